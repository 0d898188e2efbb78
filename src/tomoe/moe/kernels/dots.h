// Rows of weights times tokens, which stand one after another in memory.

#pragma once
#include "vectors.h"

namespace {

constexpr int TILE = WIDE ? 6 : 3;  // tokens that meet four rows at once

// out[c][r0 + r] = rows[r] . tokens[c], for R rows, four or two (and zeros behind two). Where `next` is not null, its rows
// come nearer meanwhile: the processor itself foresees long rows, but not where the next short one begins.
template <int C, int R, class W, class X>
inline void dots(const W* const* rows, const W* const* next, const X* const* tokens, int64_t size, float (*out)[2 * ROWS], int r0) {
    Part acc[R][C] = {};
    int64_t d = 0;
#ifdef HAS_BF16_DOT
    if constexpr (sizeof(W) == 2 && sizeof(X) == 2) {
#pragma GCC unroll 2
        for (; d + 32 <= size; d += 32) {
            __m512bh x[C];
            for (int c = 0; c < C; c++) x[c] = (__m512bh)_mm512_loadu_si512(tokens[c] + d);
            for (int r = 0; r < R; r++) {
                __m512bh w = (__m512bh)_mm512_loadu_si512(rows[r] + d);
                if (next) __builtin_prefetch(next[r] + d);
                for (int c = 0; c < C; c++) acc[r][c] = (Part)_mm512_dpbf16_ps((__m512)acc[r][c], w, x[c]);
            }
        }
    }
#endif
    for (; d + WIDTH <= size; d += WIDTH) {
        Part x[C];
        for (int c = 0; c < C; c++) x[c] = load_as<Part>(tokens[c] + d);
        for (int r = 0; r < R; r++) {
            const Part w = load_as<Part>(rows[r] + d);
            if (next) __builtin_prefetch(next[r] + d);
            for (int c = 0; c < C; c++) acc[r][c] += w * x[c];
        }
    }
#pragma GCC unroll 8  // indices that the compiler knows keep the sums in registers
    for (int c = 0; c < C; c++) {
        Part column[4] = {};
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) column[r] = acc[r][c];
        sums_of_four(column, out[c] + r0);
    }
    for (; d < size; d++)
        for (int c = 0; c < C; c++)
            for (int r = 0; r < R; r++) out[c][r0 + r] += to_float(rows[r][d]) * to_float(tokens[c][d]);
}

// `count` rows (those past the end are repeats) against up to TILE tokens.
template <int C, class W, class X>
inline void project(const W* const* rows, const W* const* next, int count, const X* const* tokens, int64_t size, float (*out)[2 * ROWS]) {
    for (int r = 0; r < count; r += 4)
        (count - r > 2 ? dots<C, 4, W, X> : dots<C, 2, W, X>)(rows + r, next ? next + r : nullptr, tokens, size, out, r);
}
template <class W, class X>
inline void project(const W* const* rows, const W* const* next, int count, const X* const* tokens, int n, int64_t size, float (*out)[2 * ROWS]) {
    switch (n) {
        case 1: return project<1>(rows, next, count, tokens, size, out);
        case 2: return project<2>(rows, next, count, tokens, size, out);
        case 3: return project<3>(rows, next, count, tokens, size, out);
        case 4: return project<std::min(4, TILE)>(rows, next, count, tokens, size, out);
        case 5: return project<std::min(5, TILE)>(rows, next, count, tokens, size, out);
        default: return project<TILE>(rows, next, count, tokens, size, out);
    }
}

}  // namespace
