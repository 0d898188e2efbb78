// Numbers in bfloat16 on their way to tiles and back: tokens, activations, down rows.

#pragma once
#include "tiles.h"

namespace {

constexpr int PANEL_WORDS = SIDE * SIDE;  // of 16 tokens and 32 dims

// panel[i][t] = dims 2 i and 2 i + 1 of token t, for 32 dims of 16 tokens.
inline void pack(const bf16* const* tokens, int64_t d, uint32_t* panel) {
#ifdef HAS_BF16_DOT
    // Eight tokens stand in the low halves, eight in the high ones, so that the last step brings them into order.
    for (int half = 0; half < 2; half++) {
        __m512i rows[8], twos[8], fours[8];
        for (int i = 0; i < 8; i++) {
            const int low = i < 4 ? i : i + 4;
            const auto eight = [&](int t) { return _mm256_loadu_si256((const __m256i*)(tokens[t] + d) + half); };
            rows[i] = _mm512_inserti64x4(_mm512_castsi256_si512(eight(low)), eight(low + 4), 1);
        }
        for (int i = 0; i < 8; i += 2) {
            twos[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
            twos[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
        }
        for (int i = 0; i < 8; i++) {
            const __m512i a = twos[i / 4 * 4 + i % 4 / 2], b = twos[i / 4 * 4 + 2 + i % 4 / 2];
            fours[i] = i % 2 ? _mm512_unpackhi_epi64(a, b) : _mm512_unpacklo_epi64(a, b);
        }
        for (int i = 0; i < 4; i++) {
            uint32_t* out = panel + SIDE * (8 * half + i);
            _mm512_storeu_si512(out, _mm512_shuffle_i32x4(fours[i], fours[i + 4], 0x88));
            _mm512_storeu_si512(out + 4 * SIDE, _mm512_shuffle_i32x4(fours[i], fours[i + 4], 0xdd));
        }
    }
#else
    for (int i = 0; i < SIDE; i++)
        for (int t = 0; t < SIDE; t++) std::memcpy(panel + SIDE * i + t, tokens[t] + d + 2 * i, sizeof *panel);
#endif
}

// Two numbers, rounded, to a word.
inline Words pair_of(Floats low, Floats high) { return rounded(low) | rounded(high) << 16; }

// Eight pairs of numbers of 16 tokens, which stand in the lanes: the first `count` numbers of a token to where it wants them.
inline void store_lanes(const Words* pairs, int count, int tokens, bf16* const* to) {
#ifdef HAS_BF16_DOT
    const __mmask16 some = (1u << count) - 1;
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    __m512i twos[8], fours[8];
    for (int i = 0; i < 8; i += 2) {
        twos[i] = _mm512_unpacklo_epi32((__m512i)pairs[i], (__m512i)pairs[i + 1]);
        twos[i + 1] = _mm512_unpackhi_epi32((__m512i)pairs[i], (__m512i)pairs[i + 1]);
    }
    for (int i = 0; i < 8; i++) {
        const __m512i a = twos[i / 4 * 4 + i % 4 / 2], b = twos[i / 4 * 4 + 2 + i % 4 / 2];
        fours[i] = i % 2 ? _mm512_unpackhi_epi64(a, b) : _mm512_unpacklo_epi64(a, b);
    }
    for (int i = 0; i < 4; i++) {
        const __m512i first = _mm512_permutex2var_epi64(fours[i], low, fours[i + 4]);
        const __m512i last = _mm512_permutex2var_epi64(fours[i], high, fours[i + 4]);
        const __m256i made[] = {_mm512_castsi512_si256(first), _mm512_extracti64x4_epi64(first, 1),
                                _mm512_castsi512_si256(last), _mm512_extracti64x4_epi64(last, 1)};
        for (int j = 0; j < 4; j++)
            if (4 * j + i < tokens) _mm256_mask_storeu_epi16(to[4 * j + i], some, made[j]);
    }
#else
    for (int t = 0; t < tokens; t++)
        for (int i = 0; i < count; i++) to[t][i].bits = pairs[i / 2][t] >> 16 * (i % 2);
#endif
}

// 32 columns of two rows, both numbers of a column to one word. `store_columns_of_pairs` takes the sums of such columns.
inline void interleave(const bf16* a, const bf16* b, uint32_t* first, uint32_t* second) {
#ifdef HAS_BF16_DOT
    const __m512i u = _mm512_loadu_si512(a), v = _mm512_loadu_si512(b);
    _mm512_storeu_si512(first, _mm512_unpacklo_epi16(u, v));
    _mm512_storeu_si512(second, _mm512_unpackhi_epi16(u, v));
#else
    for (int c = 0; c < SIDE; c++) {
        first[c] = a[c].bits | (uint32_t)b[c].bits << 16;
        second[c] = a[SIDE + c].bits | (uint32_t)b[SIDE + c].bits << 16;
    }
#endif
}
inline void store_columns_of_pairs(const float* sums, bf16* out) {
    Floats first = load(sums), second = load(sums + SIDE);
#ifdef HAS_BF16_DOT
    in_order(first, second);
#endif
    store(out, first);
    store(out + SIDE, second);
}

// Memory that stays from call to call: a system takes its time to hand out pages.
struct Workspace {
    std::unique_ptr<Lines<char>> memory;
    int64_t size = 0, used = 0;
    template <class T>
    T* take(int64_t count) {
        T* taken = memory ? (T*)(memory->get() + used) : nullptr;
        used += (count * (int64_t)sizeof(T) + 63) / 64 * 64;
        return taken;
    }
    // Calls `take_all` once to count, and once for good.
    template <class TakeAll>
    void fill(const TakeAll& take_all) {
        used = 0;
        take_all();
        if (used > size) {
            memory.reset();
            size = 0;
            memory.reset(new Lines<char>(used));
            size = used;
        }
        used = 0;
        take_all();
    }
};

}  // namespace
