// Products of tiles in bfloat16 with sums in float32: by the processor's matrix units (AMX) if it has them, else the same in
// plain C++, which is slow and lets any processor test what is built on it.
//
// There are eight tiles, known by number: 0 to 3 hold sums, rows x 16 floats; 4 and 5 hold rows of the left operand, 32
// numbers each; 6 and 7 hold the right operand, 16 rows of 16 pairs of numbers.

#pragma once
#include "vectors.h"
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(HAS_BF16_DOT) && defined(__linux__) && !defined(PORTABLE_TILES)
#define HAS_MATRIX_UNITS 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

constexpr int SIDE = 16;         // rows of a tile, and columns of one with sums
constexpr int DEPTH = 2 * SIDE;  // numbers of a row of the left operand

#ifdef HAS_MATRIX_UNITS

// Linux gives a process the registers of the matrix units when it asks for them.
inline bool ask_for_tiles() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
// Tiles of sums and of the left operand have so many rows from now on.
inline void shape_tiles(int rows) {
    struct alignas(64) {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } shape;
    for (int t = 0; t < 8; t++) {
        shape.row_bytes[t] = 64;
        shape.rows[t] = t < 6 ? rows : SIDE;
    }
    _tile_loadconfig(&shape);
}
inline void release_tiles() { _tile_release(); }
// The instructions take the numbers of tiles as constants.
#define tile_zero(tile) _tile_zero(tile)
#define tile_load(tile, from, stride_bytes) _tile_loadd(tile, from, stride_bytes)
#define tile_load_passing(tile, from, stride_bytes) _tile_stream_loadd(tile, from, stride_bytes)  // leaves near caches to others
#define tile_store(tile, to, stride_bytes) _tile_stored(tile, to, stride_bytes)
#define tile_multiply(sums, left, right) _tile_dpbf16ps(sums, left, right)

#else

struct PortableTile {
    uint32_t words[SIDE][SIDE];
};
thread_local PortableTile portable_tiles[8];
thread_local int portable_rows = SIDE;

inline void shape_tiles(int rows) {
    portable_rows = rows;
    std::memset(portable_tiles, 0, sizeof portable_tiles);
}
inline void release_tiles() {}
inline int rows_of_tile(int tile) { return tile < 6 ? portable_rows : SIDE; }
inline void tile_zero(int tile) { portable_tiles[tile] = {}; }
inline void tile_load(int tile, const void* from, int64_t stride_bytes) {
    for (int r = 0; r < rows_of_tile(tile); r++)
        std::memcpy(portable_tiles[tile].words[r], (const char*)from + r * stride_bytes, sizeof portable_tiles[tile].words[r]);
}
inline void tile_load_passing(int tile, const void* from, int64_t stride_bytes) { tile_load(tile, from, stride_bytes); }
inline void tile_store(int tile, void* to, int64_t stride_bytes) {
    for (int r = 0; r < rows_of_tile(tile); r++)
        std::memcpy((char*)to + r * stride_bytes, portable_tiles[tile].words[r], sizeof portable_tiles[tile].words[r]);
}
inline void tile_multiply(int sums, int left, int right) {
    const auto low = [](uint32_t pair) { return to_float(bf16{(uint16_t)pair}); };
    const auto high = [](uint32_t pair) { return to_float(bf16{(uint16_t)(pair >> 16)}); };
    for (int r = 0; r < portable_rows; r++)
        for (int c = 0; c < SIDE; c++) {
            float sum;
            std::memcpy(&sum, &portable_tiles[sums].words[r][c], sizeof sum);
            for (int k = 0; k < SIDE; k++) {
                const uint32_t a = portable_tiles[left].words[r][k], b = portable_tiles[right].words[k][c];
                sum += low(a) * low(b);
                sum += high(a) * high(b);
            }
            std::memcpy(&portable_tiles[sums].words[r][c], &sum, sizeof sum);
        }
}

#endif

}  // namespace
