// How tokens choose their experts: the logits of a router, and the largest of them.

#pragma once
#include "dots.h"
#include "operands.h"

namespace {

constexpr int64_t ROUTER_ROWS = 2 * ROWS;  // that a thread takes at once

// Rows in bfloat16, if they are such values. Products of two are exact in float32.
inline bool shorten(const float* weights, int64_t count, bf16* out) {
    Words lost = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Words bits = (Words)load(weights + i);
        const Halves half = __builtin_convertvector(bits >> 16, Halves);
        lost |= bits & 0xffff;
        std::memcpy(out + i, &half, sizeof half);
    }
    uint32_t all = 0;
    for (int lane = 0; lane < LANES; lane++) all |= lost[lane];
    for (; i < count; i++) {
        uint32_t bits;
        std::memcpy(&bits, weights + i, sizeof bits);
        out[i].bits = bits >> 16;
        all |= bits & 0xffff;
    }
    return !all;
}

// logits[t] = weights x_t for `count` rows. Those behind come nearer meanwhile.
template <class W, class X>
void project_rows(const X* x, int64_t num_tokens, int64_t size, const W* weights, int64_t count, int64_t behind, float* logits, int64_t n) {
    const W *rows[ROUTER_ROWS], *next[ROUTER_ROWS];  // those past the end are repeats
    for (int64_t r = 0; r < ROUTER_ROWS; r++) {
        rows[r] = weights + std::min(r, count - 1) * size;
        next[r] = weights + std::min(ROUTER_ROWS + r, count + behind - 1) * size;
    }
    for (int64_t t = 0; t < num_tokens; t += TILE) {
        const int tokens = (int)std::min<int64_t>(TILE, num_tokens - t);
        const X* xs[TILE];
        for (int c = 0; c < tokens; c++) xs[c] = x + (t + c) * size;
        float sums[TILE][ROUTER_ROWS] = {};
        project(rows, t || !behind ? nullptr : next, (int)count, xs, tokens, size, sums);
        for (int c = 0; c < tokens; c++) std::memcpy(logits + (t + c) * n, sums[c], count * sizeof(float));
    }
}

// Weights [n, size] times every token, plus bias. A logit depends neither on the other tokens nor on the number of threads.
template <class X>
void project_router(const X* x, int64_t num_tokens, int64_t size, const float* weights, const float* bias, int64_t n, float* logits,
                    int threads) {
    // Tokens are split only where there are more threads than blocks of rows: whoever takes a block makes it short first.
    const int64_t blocks = (n + ROUTER_ROWS - 1) / ROUTER_ROWS, parts = std::min<int64_t>(num_tokens, (threads + blocks - 1) / blocks);
#ifdef HAS_BF16_DOT
    const int64_t space = sizeof(X) == 2 ? ROUTER_ROWS * size : 0;
#else
    const int64_t space = 0;
#endif
    const std::unique_ptr<bf16[]> short_rows(new bf16[space * threads]);
#pragma omp parallel for collapse(2) schedule(static) num_threads(threads)
    for (int64_t p = 0; p < parts; p++)
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t first = b * ROUTER_ROWS, count = std::min(ROUTER_ROWS, n - first);
            const int64_t token = p * num_tokens / parts, some = (p + 1) * num_tokens / parts - token;
            float* out = logits + token * n + first;
            bf16* own = short_rows.get() + space * this_thread();
            if (space && shorten(weights + first * size, count * size, own))
                project_rows(x + token * size, some, size, own, count, 0, out, n);
            else
                project_rows(x + token * size, some, size, weights + first * size, count, n - first - count, out, n);
            if (bias)
                for (int64_t t = 0; t < some; t++)
                    for (int64_t r = 0; r < count; r++) out[t * n + r] += bias[first + r];
        }
}

// Logits of up to 16 tokens and four panels of 16 experts.
inline void multiply_panels(const bf16* x, int64_t size, const uint32_t* panels, int count, float (*sums)[SIDE][SIDE]) {
    const int64_t words = SIDE * size / 2, row_bytes = size * sizeof(bf16);
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int64_t k = 0; k < size / DEPTH; k++, panels += PANEL_WORDS) {
        tile_load(4, x + k * DEPTH, row_bytes);
        tile_load_passing(6, panels, 64);
        tile_multiply(0, 4, 6);
        if (count > 1) {
            tile_load_passing(7, panels + words, 64);
            tile_multiply(1, 4, 7);
        }
        if (count > 2) {
            tile_load_passing(6, panels + 2 * words, 64);
            tile_multiply(2, 4, 6);
        }
        if (count > 3) {
            tile_load_passing(7, panels + 3 * words, 64);
            tile_multiply(3, 4, 7);
        }
    }
    tile_store(0, sums[0], 64);
    tile_store(1, sums[1], 64);
    tile_store(2, sums[2], 64);
    tile_store(3, sums[3], 64);
}

// The same in products of tiles, for a size that is a multiple of 32: tokens are the left operand as they stand, weights are
// packed. False, and nothing done, for weights that are no values in bfloat16.
inline bool project_in_tiles(const bf16* x, int64_t num_tokens, int64_t size, const float* weights, const float* bias, int64_t n,
                             float* logits, int threads) {
    const int64_t panels = (n + SIDE - 1) / SIDE, words = SIDE * size / 2;
    static thread_local Workspace workspace;
    uint32_t* packed;
    bf16* rows;
    workspace.fill([&] {
        packed = workspace.take<uint32_t>(panels * words);
        rows = workspace.take<bf16>(threads * SIDE * size);
    });
    bool exact = true;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(&& : exact)
    for (int64_t p = 0; p < panels; p++) {
        const int64_t count = std::min<int64_t>(SIDE, n - p * SIDE);
        bf16* own = rows + this_thread() * SIDE * size;
        exact = shorten(weights + p * SIDE * size, count * size, own) && exact;
        std::memset((void*)(own + count * size), 0, (SIDE - count) * size * sizeof(bf16));
        const bf16* of[SIDE];
        for (int r = 0; r < SIDE; r++) of[r] = own + r * size;
        for (int64_t k = 0; k < size / DEPTH; k++) pack(of, k * DEPTH, packed + p * words + k * PANEL_WORDS);
    }
    if (!exact) return false;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t t = 0; t < num_tokens; t += SIDE) {
            const int count = (int)std::min<int64_t>(SIDE, num_tokens - t);
            shape_tiles(count);
            for (int64_t p = 0; p < panels; p += 4) {
                float sums[4][SIDE][SIDE];
                multiply_panels(x + t * size, size, packed + p * words, (int)std::min<int64_t>(4, panels - p), sums);
                for (int64_t first = SIDE * p; first < std::min(n, SIDE * (p + 4)); first += SIDE) {
                    const int64_t some = std::min<int64_t>(SIDE, n - first);
                    float added[SIDE] = {};
                    if (bias) std::memcpy(added, bias + first, some * sizeof(float));
                    for (int64_t r = 0; r < count; r++) {
                        float* out = logits + (t + r) * n + first;
                        const Floats made = load(sums[first / SIDE - p][r]) + load(added);
                        if (some == SIDE)
                            store(out, made);
                        else
                            std::memcpy(out, &made, some * sizeof(float));
                    }
                }
            }
        }
        release_tiles();
    }
    return true;
}

}  // namespace

// In products of tiles (`matrix`) for bfloat16 and a size that is a multiple of 32. 0: done; 1: not enough memory.
extern "C" int tomoe_router(int is_bf16, int matrix, const void* x, int64_t num_tokens, int64_t size, const float* weights,
                            const float* bias, int64_t n, float* logits, int threads) {
    try {
        if (is_bf16 && matrix && project_in_tiles((const bf16*)x, num_tokens, size, weights, bias, n, logits, threads)) return 0;
        if (is_bf16)
            project_router((const bf16*)x, num_tokens, size, weights, bias, n, logits, threads);
        else
            project_router((const float*)x, num_tokens, size, weights, bias, n, logits, threads);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

// The numbers of the k largest of n logits of each token, ascending. 1: logits are equal at the border, so that their order
// does not tell which ones to take; the caller asks somebody else.
extern "C" int tomoe_largest(const float* logits, int64_t num_tokens, int32_t n, int32_t k, int64_t* ids) {
    std::vector<int32_t> keys(n);
    for (int64_t t = 0; t < num_tokens; t++, logits += n, ids += k) {
        std::memcpy(keys.data(), logits, n * sizeof(float));
        for (int32_t& key : keys) key ^= (key >> 31) & 0x7fffffff;  // integers in the order of the floats
        const auto above = [&](int32_t border) {
            int32_t count = 0;
            for (int32_t i = 0; i < n; i++) count += keys[i] >= border;
            return count;
        };
        // The largest border that k keys reach, bit by bit; the first one that exactly k keys reach will do.
        uint32_t border = 1u << 31;
        int32_t reached = n;
        for (uint32_t bit = 1u << 31; bit && reached > k; bit >>= 1)
            if (const int32_t count = above((int32_t)(border + bit)); count >= k) {
                border += bit;
                reached = count;
            }
        if (reached != k) return 1;
        for (int32_t i = 0, found = 0; found < k; i++) {  // no branch on what cannot be foreseen
            ids[found] = i;
            found += keys[i] >= (int32_t)border;
        }
    }
    return 0;
}
