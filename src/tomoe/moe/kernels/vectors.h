// What both ways through the experts share: vectors of 16, two types of weights, activations.

#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>
#ifdef _OPENMP
#include <omp.h>
#endif
// Sums that stay in registers are counted in what 32 of 16 floats (AVX-512) or 16 of eight (AVX2) hold. Other processors do
// well with the smaller number, too: 32 registers of four floats hold as much.
#ifndef WIDE_REGISTERS
#ifdef __AVX512F__
#define WIDE_REGISTERS 1
#else
#define WIDE_REGISTERS 0
#endif
#endif
#ifdef __AVX512F__
#include <immintrin.h>
#endif
#if WIDE_REGISTERS && defined(__AVX512BF16__) && defined(__AVX512BW__)
#define HAS_BF16_DOT 1
#endif

namespace {

constexpr int ROWS = 16;   // neurons of a block
constexpr int LANES = 16;  // floats of a vector; the compiler splits it where registers are narrower
typedef float Floats __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef float Eight __attribute__((vector_size(32)));
typedef uint32_t EightWords __attribute__((vector_size(32)));
typedef uint16_t EightHalves __attribute__((vector_size(16)));
constexpr bool WIDE = WIDE_REGISTERS;
constexpr int WIDTH = WIDE ? LANES : 8;
typedef std::conditional_t<WIDE, Floats, Eight> Part;
struct bf16 {
    uint16_t bits;
};

template <class V>
inline V load_as(const float* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
template <class V>
inline V load_as(const bf16* p) {
    std::conditional_t<sizeof(V) == sizeof(Floats), Halves, EightHalves> h;
    std::memcpy(&h, p, sizeof h);
    return (V)(__builtin_convertvector(h, std::conditional_t<sizeof(V) == sizeof(Floats), Words, EightWords>) << 16);
}
template <class W>
inline Floats load(const W* p) {
    return load_as<Floats>(p);
}
template <class V>
inline void store(float* p, V v) {
    std::memcpy(p, &v, sizeof v);
}
inline float to_float(float v) { return v; }
inline float to_float(bf16 v) {
    uint32_t bits = (uint32_t)v.bits << 16;
    float f;
    std::memcpy(&f, &bits, sizeof f);
    return f;
}
inline Words rounded(Floats v) {  // to bfloat16, in the low half; to nearest, ties to even; NaN stays NaN
#ifdef HAS_BF16_DOT
    return (Words)_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v));
#endif
    Words bits = (Words)v;
    Words r = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return v != v ? Words{} + 0x7fc0 : r;
}
inline void store(bf16* p, Floats v) {
    const Halves h = __builtin_convertvector(rounded(v), Halves);
    std::memcpy(p, &h, sizeof h);
}
// Up to 32 floats.
template <class W>
inline void store_columns(Floats first, Floats second, int64_t columns, W* out) {
    W made[2 * LANES];
    W* y = columns < 2 * LANES ? made : out;
    store(y, first);
    store(y + LANES, second);
    if (y == made) std::memcpy(out, made, columns * sizeof(W));
}
constexpr Ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
template <class V>
inline V blend(V a, V b, V lanes) {  // lanes below the width are of a, the others of b
#ifdef __clang__
    constexpr int width = sizeof(V) / 4;
    V v;
    for (int i = 0; i < width; i++) v[i] = lanes[i] < width ? a[lanes[i]] : b[lanes[i] - width];
    return v;
#else
    return __builtin_shuffle(a, b, lanes);
#endif
}
// Where two rows were interleaved within quarters of a register, sums of 32 columns stand as 0-3, 8-11, 16-19, 24-27 and then the
// others. This brings them into order.
inline void in_order(Floats& first, Floats& second) {
    const Words low = (Words)first, high = (Words)second;
    first = (Floats)blend(low, high, Words{0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23});
    second = (Floats)blend(low, high, Words{8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31});
}
// Four quarters of a vector. A processor that has just written them one by one would have to wait if it read them at once.
inline Floats join(const float* const* quarters) {
#if WIDE_REGISTERS && defined(__AVX512F__)
    __m512 v = _mm512_castps128_ps512(_mm_loadu_ps(quarters[0]));
    v = _mm512_insertf32x4(v, _mm_loadu_ps(quarters[1]), 1);
    v = _mm512_insertf32x4(v, _mm_loadu_ps(quarters[2]), 2);
    return (Floats)_mm512_insertf32x4(v, _mm_loadu_ps(quarters[3]), 3);
#else
    float v[LANES];
    for (int q = 0; q < 4; q++) std::memcpy(v + 4 * q, quarters[q], 4 * sizeof(float));
    return load(v);
#endif
}
// out[i] = sum of the lanes of v[i]. The shuffles are those that a processor does within 16 bytes.
inline void sums_of_four(const Floats* v, float* out) {
    typedef float Four __attribute__((vector_size(16)));
    constexpr Words low = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
    constexpr Words low_pairs = {0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29};
    const auto halved = [](Floats a, Floats b, Words lanes, uint32_t other) {
        return (Floats)blend((Words)a, (Words)b, lanes) + (Floats)blend((Words)a, (Words)b, lanes + other);
    };
    const Floats all = halved(halved(v[0], v[1], low, 2), halved(v[2], v[3], low, 2), low_pairs, 2);
    Eight halves[2];
    std::memcpy(halves, &all, sizeof all);
    halves[0] += halves[1];
    Four quarters[2];
    std::memcpy(quarters, halves, sizeof quarters);
    quarters[0] += quarters[1];
    std::memcpy(out, quarters, sizeof quarters[0]);
}
// The same for vectors of eight, which no compiler needs to take apart.
inline void sums_of_four(const Eight* v, float* out) {
    typedef float Four __attribute__((vector_size(16)));
    Four folded[4], halves[2];
    for (int i = 0; i < 4; i++) {
        std::memcpy(halves, &v[i], sizeof halves);
        folded[i] = halves[0] + halves[1];
    }
    const Four first = {folded[0][0], folded[1][0], folded[2][0], folded[3][0]};
    const Four second = {folded[0][1], folded[1][1], folded[2][1], folded[3][1]};
    const Four third = {folded[0][2], folded[1][2], folded[2][2], folded[3][2]};
    const Four fourth = {folded[0][3], folded[1][3], folded[2][3], folded[3][3]};
    const Four sums = (first + second) + (third + fourth);
    std::memcpy(out, &sums, sizeof sums);
}

inline Floats exponential(Floats x) {  // relative error below 3e-7
    x = x < -87.3f ? Floats{} - 87.3f : x;
    x = x > 88.3f ? Floats{} + 88.3f : x;
    const float whole = 12582912.f;  // 1.5 * 2^23: added to a small number it leaves no room for a fraction
    const Floats n = (x * 1.44269504f + whole) - whole;
    const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    const Floats p =
        1.f + r * (1.f + r * (0.5f + r * (0.16666667f + r * (0.041666664f + r * (0.0083333f + r * 0.0013888f)))));
    return (Floats)((Words)p + ((Words)__builtin_convertvector(n, Ints) << 23));
}

// Memory that begins with a cache line, so that no vector lies in two.
template <class T>
struct Lines {
    std::unique_ptr<T[]> memory;
    T* first;
    explicit Lines(int64_t count) : memory(new T[count + 64 / sizeof(T)]) {
        first = (T*)(((uintptr_t)memory.get() + 63) & ~(uintptr_t)63);
    }
    T* get() const { return first; }
};

inline int this_thread() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

// An MLP, with neurons as rows; those that it has not are null.
template <class W>
struct Weights {
    int64_t size;
    const W *gate, *up, *down, *gate_bias, *up_bias;
    int kind;
};

// a / b to some units in the last place, for b of at least 1. A division would take as long as all else in an activation.
inline Floats quotient(Floats a, Floats b) {
#ifdef __AVX512F__
    const Floats near = (Floats)_mm512_rcp14_ps((__m512)b);
    return a * (near * (2.f - b * near));
#else
    return a / b;
#endif
}

enum Activation { SILU, RELU, GELU, GELU_TANH };
inline Floats activate(int kind, Floats x) {
    if (kind == SILU) return quotient(x, 1.f + exponential(-x));
    if (kind == RELU) return x < 0.f ? Floats{} : x;
    if (kind == GELU_TANH) return quotient(x, 1.f + exponential(-1.5957691f * (x + 0.044715f * x * x * x)));
    float v[LANES];
    store(v, x);
    for (int i = 0; i < LANES; i++) v[i] = 0.5f * v[i] * (1.f + std::erf(v[i] * 0.70710678f));
    return load(v);
}

}  // namespace
