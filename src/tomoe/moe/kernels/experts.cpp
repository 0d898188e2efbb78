// Experts on shared neuron rows: y_t = sum over the neurons u of t's experts of act(gate_u x_t) (up_u x_t) down_u.
//
// Each row that some token needs is read once for the whole batch. Neurons are grouped by the set of experts, among those
// that got tokens, which they belong to (experts that share nothing: by their expert, and those that all tokens use); a group
// meets exactly the tokens of these experts. First pass: blocks of 16 neurons are split over the threads. Second pass: columns
// of the output are, so no sum is shared between threads and the result does not depend on their number. Sums are float32;
// activations are rounded to the weights' type. Many tokens in bfloat16 go to matrix units where there are some (matrix.h).

#include "dots.h"
#include "matrix.h"
#include "meetings.h"
#include "router.h"

namespace {

constexpr int64_t SUMS = 1 << 16;  // floats of the second pass that stay in a core's cache
constexpr int HELD = WIDE ? ROWS : 8;  // rows of a block that registers hold, a part of their columns each

struct Block {
    int32_t rows[ROWS];
    int32_t count;
    int32_t group;
    int64_t place;   // of its first activations
    int32_t stride;  // from those of one token to the next one's
};

constexpr int COLUMNS = 64;  // of the output, whose sums stand together

// y[.., 64 columns] += activations of a block times its down rows. `y` and `h` hold the tokens of the block one after another.
template <class W, int R>
inline void accumulate(const W* const* rows, const W* const* next, int64_t d, const W* h, int stride, const int32_t* tokens, int n, float* y) {
#ifdef HAS_BF16_DOT
    if constexpr (sizeof(W) == 2) {
        // Pairs of rows interleaved; `finish` brings the sums into order.
        constexpr int LINES = R <= 8 ? 2 : 1;  // so many times 32 columns at once: few rows leave room for more of each
        for (int c = 0; c < COLUMNS; c += 32 * LINES) {
            __m512i low[LINES][R / 2], high[LINES][R / 2];
            for (int l = 0; l < LINES; l++)
                for (int r = 0; r < R / 2; r++) {
                    const int64_t at = d + c + 32 * l;
                    __builtin_prefetch(next[2 * r] + at);
                    __builtin_prefetch(next[2 * r + 1] + at);
                    __m512i a = _mm512_loadu_si512(rows[2 * r] + at), b = _mm512_loadu_si512(rows[2 * r + 1] + at);
                    low[l][r] = _mm512_unpacklo_epi16(a, b);
                    high[l][r] = _mm512_unpackhi_epi16(a, b);
                }
            for (int t = 0; t < n; t++) {
                float* out = y + COLUMNS * (int64_t)tokens[t] + c;
                __m512 s[2 * LINES];
                for (int i = 0; i < 2 * LINES; i++) s[i] = _mm512_loadu_ps(out + 16 * i);
                const int32_t* pairs = (const int32_t*)(h + stride * t);
                for (int r = 0; r < R / 2; r++) {
                    __m512bh p = (__m512bh)_mm512_set1_epi32(pairs[r]);
                    for (int l = 0; l < LINES; l++) {
                        s[2 * l] = _mm512_dpbf16_ps(s[2 * l], (__m512bh)low[l][r], p);
                        s[2 * l + 1] = _mm512_dpbf16_ps(s[2 * l + 1], (__m512bh)high[l][r], p);
                    }
                }
                for (int i = 0; i < 2 * LINES; i++) _mm512_storeu_ps(out + 16 * i, s[i]);
            }
        }
        return;
    }
#endif
    for (int c = 0; c < COLUMNS; c += WIDTH) {
        Part w[R];
        for (int r = 0; r < R; r++) {
            w[r] = load_as<Part>(rows[r] + d + c);
            __builtin_prefetch(next[r] + d + c);
        }
        for (int t = 0; t < n; t++) {
            float* out = y + COLUMNS * (int64_t)tokens[t] + c;
            const W* made = h + stride * t;
            Part s0 = load_as<Part>(out), s1 = {};
            for (int r = 0; r < R; r += 2) {
                s0 += w[r] * to_float(made[r]);
                s1 += w[r + 1] * to_float(made[r + 1]);
            }
            store(out, s0 + s1);
        }
    }
}

// As many rows at once as registers hold; one more where their number is odd (past the end of a block the last row again,
// with activations of zero).
template <class W>
inline void accumulate(const W* const* rows, const W* const* next, const Block& b, int64_t d, const W* h, const int32_t* tokens, int n, float* y) {
    for (int first = 0; first < b.count; first += HELD) {
        const int left = b.count - first;
        const auto some = left <= 2    ? accumulate<W, 2>
                          : left <= 4  ? accumulate<W, 4>
                          : left <= 6  ? accumulate<W, 6>
                          : left <= 8  ? accumulate<W, 8>
                          : left <= 10 ? accumulate<W, std::min(10, HELD)>
                          : left <= 12 ? accumulate<W, std::min(12, HELD)>
                                       : accumulate<W, HELD>;
        some(rows + first, next + first, d, h + first, b.stride, tokens, n, y);
    }
}

// 32 columns of sums, as `accumulate` left them, to the output; the last ones may be fewer.
template <class W>
inline void finish(const float* sums, int64_t columns, W* out) {
    Floats first = load(sums), second = load(sums + LANES);
#ifdef HAS_BF16_DOT
    if constexpr (sizeof(W) == 2) in_order(first, second);
#endif
    store_columns(first, second, columns, out);
}

// Blocks of at most 16 neurons of one group, and how many activations all of them make.
inline std::vector<Block> cut(const Meetings& groups, int64_t& activations) {
    std::vector<Block> blocks;
    activations = 0;
    for (size_t g = 0; g < groups.rows.size(); g++) {
        const List rows = groups.rows[g];
        for (size_t i = 0; i < rows.size(); i += ROWS) {
            Block b;
            b.count = (int32_t)std::min<size_t>(ROWS, rows.size() - i);
            for (int r = 0; r < ROWS; r++) b.rows[r] = rows[i + std::min(r, b.count - 1)];
            b.group = (int32_t)g;
            b.place = activations;
            b.stride = b.count <= 4 ? 4 : b.count <= 8 ? 8 : ROWS;
            activations += b.stride * (int64_t)groups.tokens[g].size() + ROWS;  // the last vector may be wider
            blocks.push_back(b);
        }
    }
    return blocks;
}

// Activations of a tile of tokens, from its gate rows' sums and then its up rows'; several tokens share a vector where they fit.
template <int STRIDE, class W>
inline void activate_tile(const Weights<W>& w, int count, const float (*sums)[2 * ROWS], int n, W* hidden) {
    constexpr int SHARE = LANES / STRIDE;
    for (int c = 0; c < n; c += SHARE) {
        const auto joined = [&](int first) {
            const float* quarters[4];
            for (int q = 0; q < 4; q++) quarters[q] = sums[std::min(c + 4 * q / STRIDE, n - 1)] + first + 4 * q % STRIDE;
            return join(quarters);
        };
        const Floats u = joined(w.gate ? count : 0), v = w.gate ? activate(w.kind, joined(0)) * u : activate(w.kind, u);
        store(hidden + STRIDE * c, (LANE & (STRIDE - 1)) < count ? v : Floats{});
    }
}

// First pass: the activations of a block. Its gate rows come first, then its up rows, so that few are left over.
template <class W>
void activate_block(const Weights<W>& w, const W* x, const Block& b, const Block& following, const Meetings& groups, W* hidden) {
    const List tokens = groups.tokens[b.group], later = groups.tokens[following.group];
    const int gates = w.gate ? b.count : 0, all = gates + b.count;
    const W *rows[2 * ROWS + 2], *next[2 * ROWS + 2];  // those past the end are repeats
    for (int r = 0; r < all + 2; r++) {
        const W* weights = r < gates ? w.gate : w.up;
        const int i = std::min(r < gates ? r : r - gates, ROWS - 1);
        rows[r] = weights + b.rows[i] * w.size;
        next[r] = weights + following.rows[i] * w.size;
    }
    for (size_t t = 0; t < tokens.size(); t += TILE) {
        const int n = (int)std::min<size_t>(TILE, tokens.size() - t);
        const W* xs[TILE];
        for (int c = 0; c < n; c++) xs[c] = x + tokens[t + c] * w.size;
        float sums[TILE][2 * ROWS] = {};
        project(rows, next, all, xs, n, w.size, sums);
        const bool ends = t + 2 * TILE >= tokens.size();
        const List& coming = ends ? later : tokens;
        for (int r = 0; r < all + 2; r++)
            next[r] = x + coming[std::min((ends ? 0 : t + 2 * TILE) + std::min(r, TILE - 1), coming.size() - 1)] * w.size;
        for (int c = 0; c < n; c++) {
            if (w.gate_bias)
                for (int r = 0; r < gates; r++) sums[c][r] += to_float(w.gate_bias[b.rows[r]]);
            if (w.up_bias)
                for (int r = 0; r < b.count; r++) sums[c][gates + r] += to_float(w.up_bias[b.rows[r]]);
        }
        const auto join = b.stride == 4 ? activate_tile<4, W> : b.stride == 8 ? activate_tile<8, W> : activate_tile<ROWS, W>;
        join(w, b.count, sums, n, hidden + b.place + b.stride * t);
    }
}

// Second pass: what all blocks add to the columns from 64 first to 64 last. `sums` holds them for one part after another.
template <class W>
void add_columns(const Weights<W>& w, const std::vector<Block>& blocks, const Meetings& groups, const W* hidden, int64_t first,
                 int64_t last, int64_t num_tokens, float* sums, W* y) {
    const int64_t size = w.size, num_blocks = (int64_t)blocks.size();
    std::memset(sums, 0, (last - first) * COLUMNS * num_tokens * sizeof(float));
    W tail[COLUMNS * ROWS] = {};
    for (int64_t i = 0; i < num_blocks; i++) {
        const Block &b = blocks[i], &following = blocks[std::min(i + 2, num_blocks - 1)];
        const List tokens = groups.tokens[b.group];
        const W *rows[ROWS], *next[ROWS];
        for (int r = 0; r < ROWS; r++) {
            rows[r] = w.down + b.rows[r] * size;
            next[r] = w.down + following.rows[r] * size;
        }
        for (int64_t k = first; k < last; k++) {
            const int64_t d = COLUMNS * k;
            float* part = sums + (k - first) * COLUMNS * num_tokens;
            if (d + COLUMNS <= size) {
                accumulate(rows, next, b, d, hidden + b.place, tokens.data(), (int)tokens.size(), part);
                continue;
            }
            const W* edge[ROWS];  // the last columns, padded with zeros
            for (int r = 0; r < ROWS; r++) {
                std::memcpy(tail + COLUMNS * r, rows[r] + d, (size - d) * sizeof(W));
                edge[r] = tail + COLUMNS * r;
            }
            accumulate(edge, edge, b, 0, hidden + b.place, tokens.data(), (int)tokens.size(), part);
        }
    }
    for (int64_t t = 0; t < num_tokens; t++)
        for (int64_t d = COLUMNS * first; d < std::min(size, COLUMNS * last); d += 32) {
            const int64_t k = d / COLUMNS - first;
            finish(sums + (k * num_tokens + t) * COLUMNS + d % COLUMNS, std::min<int64_t>(32, size - d), y + t * size + d);
        }
}

template <class W>
void run_rows(const Weights<W>& w, const W* x, const Meetings& groups, int64_t num_tokens, W* y, int threads) {
    int64_t activations;
    const std::vector<Block> blocks = cut(groups, activations);
    const std::unique_ptr<W[]> hidden(new W[activations]);
    const int64_t parts = (w.size + COLUMNS - 1) / COLUMNS, num_blocks = (int64_t)blocks.size();
    // Several pieces for each thread, with sums that a cache holds.
    const int64_t fitting = SUMS / (COLUMNS * num_tokens), even = parts / (2 * threads);
    const int64_t piece = std::max<int64_t>(1, std::min(fitting, even)), pieces = (parts + piece - 1) / piece;
    const int64_t piece_sums = piece * COLUMNS * num_tokens;
    const Lines<float> all_sums(piece_sums * threads);

#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_blocks; i++)
            activate_block(w, x, blocks[i], blocks[std::min(i + 1, num_blocks - 1)], groups, hidden.get());
#pragma omp for schedule(dynamic)
        for (int64_t p = 0; p < pieces; p++)
            add_columns(w, blocks, groups, hidden.get(), p * piece, std::min(parts, (p + 1) * piece), num_tokens,
                        all_sums.get() + piece_sums * this_thread(), y);
    }
}

template <class W>
void run(bool fine, bool matrix, const void* x, const int64_t* expert_ids, int64_t top_k, int64_t num_tokens, int64_t size,
         int64_t neurons, const uint64_t* members, const void* gate, const void* up, const void* down,
         const void* gate_bias, const void* up_bias, int kind, void* y, int threads) {
    const Weights<W> weights{size, (const W*)gate, (const W*)up, (const W*)down, (const W*)gate_bias, (const W*)up_bias, kind};
    const Meetings groups = fine ? meet_fine(expert_ids, top_k, num_tokens, neurons, members)
                                 : meet_overlapping(expert_ids, num_tokens, neurons, members);
    if constexpr (sizeof(W) == 2)
        if (matrix) return run_matrix(weights, (const W*)x, groups, num_tokens, (W*)y, threads);
    run_rows<W>(weights, (const W*)x, groups, num_tokens, (W*)y, threads);
}

}  // namespace

// 2: matrix units multiply tiles; 1: plain C++ does; 0: the system keeps the units to itself.
extern "C" int tomoe_tiles() {
#ifdef HAS_MATRIX_UNITS
    return ask_for_tiles() ? 2 : 0;
#else
    return 1;
#endif
}

// Products of tiles (`matrix`) are for bfloat16 and a size that is a multiple of 32. 0: done; 1: not enough memory.
extern "C" int tomoe_experts(int is_bf16, int fine, int matrix, const void* x, const int64_t* expert_ids, int64_t top_k,
                             int64_t num_tokens, int64_t size, int64_t neurons, const uint64_t* members, const void* gate, const void* up,
                             const void* down, const void* gate_bias, const void* up_bias, int kind, void* y, int threads) {
    try {
        (is_bf16 ? run<bf16> : run<float>)(fine, matrix, x, expert_ids, top_k, num_tokens, size, neurons, members, gate, up, down,
                                           gate_bias, up_bias, kind, y, threads);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

// y = weight x for few tokens, in bfloat16; sums are float32, and depend neither on the other tokens nor on the number of threads.
// 0: done; 1: not enough memory.
extern "C" int tomoe_logits(const bf16* x, int64_t num_tokens, int64_t size, const bf16* weight, int64_t n, bf16* y, int threads) {
    constexpr int64_t AT_ONCE = 64 * ROUTER_ROWS;  // rows that a thread takes at once
    try {
        const Lines<float> all(threads * num_tokens * AT_ONCE);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
        for (int64_t first = 0; first < n; first += AT_ONCE) {
            const int64_t count = std::min(AT_ONCE, n - first);
            float* sums = all.get() + this_thread() * num_tokens * AT_ONCE;
            for (int64_t r = 0; r < count; r += ROUTER_ROWS) {
                const int64_t some = std::min(ROUTER_ROWS, count - r);
                project_rows(x, num_tokens, size, weight + (first + r) * size, some, n - first - r - some, sums + r, AT_ONCE);
            }
            for (int64_t t = 0; t < num_tokens; t++) {
                const float* own = sums + t * AT_ONCE;
                bf16* out = y + t * n + first;
                int64_t r = 0;
                for (; r + LANES <= count; r += LANES) store(out + r, load(own + r));
                for (; r < count; r++) out[r].bits = (uint16_t)rounded(Floats{} + own[r])[0];
            }
        }
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}
