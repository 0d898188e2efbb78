// Experts on shared neuron rows: y_t = sum over the neurons u of t's experts of act(gate_u x_t) (up_u x_t) down_u.
//
// Each row that some token needs is read once for the whole batch. Neurons are grouped by the set of experts, among those
// that got tokens, which they belong to (experts that share nothing: by their expert, and those that all tokens use); a group
// meets exactly the tokens of these experts. First pass: blocks of 16 neurons are split over the threads. Second pass: columns
// of the output are, so no sum is shared between threads and the result does not depend on their number. Sums are float32;
// activations are rounded to the weights' type.

#include "dots.h"
#include "panels.h"
#include "router.h"
#include "vectors.h"

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

// y[.., 32 columns] += activations of a block times its down rows. `y` and `h` hold the tokens of the block one after another.
template <class W, int R>
inline void accumulate(const W* const* rows, const W* const* next, int64_t d, const W* h, int stride, const int32_t* tokens, int n, float* y) {
#ifdef HAS_BF16_DOT
    if constexpr (sizeof(W) == 2) {
        // Pairs of rows interleaved: within 32 columns the sums stand as 0-3, 8-11, 16-19, 24-27 and then the others.
        __m512i low[R / 2], high[R / 2];
        for (int r = 0; r < R / 2; r++) {
            __builtin_prefetch(next[2 * r] + d);
            __builtin_prefetch(next[2 * r + 1] + d);
            __m512i a = _mm512_loadu_si512(rows[2 * r] + d), b = _mm512_loadu_si512(rows[2 * r + 1] + d);
            low[r] = _mm512_unpacklo_epi16(a, b);
            high[r] = _mm512_unpackhi_epi16(a, b);
        }
        for (int t = 0; t < n; t++) {
            float* out = y + 32 * (int64_t)tokens[t];
            __m512 s0 = _mm512_loadu_ps(out), s1 = _mm512_loadu_ps(out + 16);
            const int32_t* pairs = (const int32_t*)(h + stride * t);
            for (int r = 0; r < R / 2; r++) {
                __m512bh p = (__m512bh)_mm512_set1_epi32(pairs[r]);
                s0 = _mm512_dpbf16_ps(s0, (__m512bh)low[r], p);
                s1 = _mm512_dpbf16_ps(s1, (__m512bh)high[r], p);
            }
            _mm512_storeu_ps(out, s0);
            _mm512_storeu_ps(out + 16, s1);
        }
        return;
    }
#endif
    for (int c = 0; c < 2 * LANES; c += WIDTH) {
        Part w[R];
        for (int r = 0; r < R; r++) {
            w[r] = load_as<Part>(rows[r] + d + c);
            __builtin_prefetch(next[r] + d + c);
        }
        for (int t = 0; t < n; t++) {
            float* out = y + 32 * (int64_t)tokens[t] + c;
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
    if constexpr (sizeof(W) == 2) {
        const Words low = (Words)first, high = (Words)second;
        first = (Floats)blend(low, high, Words{0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23});
        second = (Floats)blend(low, high, Words{8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31});
    }
#endif
    store_columns(first, second, columns, out);
}

// Groups of neurons, and the tokens that meet each.
struct Meetings {
    std::vector<std::vector<int32_t>> rows, tokens;
};

// `members`: the experts of each neuron as bits. A token has one expert.
inline Meetings meet_overlapping(const int64_t* expert_ids, int64_t num_tokens, int64_t neurons, const uint64_t* members) {
    uint64_t working = 0;
    for (int64_t t = 0; t < num_tokens; t++) working |= 1ull << expert_ids[t];
    Groups groups(members, neurons, working);
    Meetings found{std::move(groups.rows), std::vector<std::vector<int32_t>>(groups.sets.size())};
    for (size_t g = 0; g < groups.sets.size(); g++)
        for (int64_t t = 0; t < num_tokens; t++)
            if (groups.sets[g] >> expert_ids[t] & 1) found.tokens[g].push_back((int32_t)t);
    return found;
}

// `members`: 1 + the expert of each neuron, 0 for those that all tokens use.
inline Meetings meet_fine(const int64_t* expert_ids, int64_t top_k, int64_t num_tokens, int64_t neurons, const uint64_t* members) {
    const uint64_t groups = 1 + *std::max_element(members, members + neurons);
    Meetings found{std::vector<std::vector<int32_t>>(groups), std::vector<std::vector<int32_t>>(groups)};
    for (int64_t t = 0; t < num_tokens; t++) {
        found.tokens[0].push_back((int32_t)t);
        for (int64_t k = 0; k < top_k; k++) found.tokens[1 + expert_ids[t * top_k + k]].push_back((int32_t)t);
    }
    for (int64_t u = 0; u < neurons; u++)
        if (!found.tokens[members[u]].empty()) found.rows[members[u]].push_back((int32_t)u);
    return found;
}

// Blocks of at most 16 neurons of one group, and how many activations all of them make.
inline std::vector<Block> cut(const Meetings& groups, int64_t& activations) {
    std::vector<Block> blocks;
    activations = 0;
    for (size_t g = 0; g < groups.rows.size(); g++) {
        const auto& rows = groups.rows[g];
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
    const std::vector<int32_t>&tokens = groups.tokens[b.group], &later = groups.tokens[following.group];
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
        const auto& coming = t + 2 * TILE < tokens.size() ? tokens : later;
        for (int r = 0; r < all + 2; r++) {
            const size_t i = (&coming == &later ? 0 : t + 2 * TILE) + std::min(r, TILE - 1);
            next[r] = x + coming[std::min(i, coming.size() - 1)] * w.size;
        }
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

// Second pass: what all blocks add to the columns from 32 first to 32 last. `sums` holds them for one column after another.
template <class W>
void add_columns(const Weights<W>& w, const std::vector<Block>& blocks, const Meetings& groups, const W* hidden, int64_t first,
                 int64_t last, int64_t num_tokens, float* sums, W* y) {
    const int64_t size = w.size, num_blocks = (int64_t)blocks.size();
    std::memset(sums, 0, (last - first) * 32 * num_tokens * sizeof(float));
    W tail[32 * ROWS] = {};
    for (int64_t i = 0; i < num_blocks; i++) {
        const Block &b = blocks[i], &following = blocks[std::min(i + 2, num_blocks - 1)];
        const auto& tokens = groups.tokens[b.group];
        const W *rows[ROWS], *next[ROWS];
        for (int r = 0; r < ROWS; r++) {
            rows[r] = w.down + b.rows[r] * size;
            next[r] = w.down + following.rows[r] * size;
        }
        for (int64_t k = first; k < last; k++) {
            const int64_t d = 32 * k;
            float* column_sums = sums + (k - first) * 32 * num_tokens;
            if (d + 32 <= size) {
                accumulate(rows, next, b, d, hidden + b.place, tokens.data(), (int)tokens.size(), column_sums);
                continue;
            }
            const W* edge[ROWS];  // the last columns, padded with zeros
            for (int r = 0; r < ROWS; r++) {
                std::memcpy(tail + 32 * r, rows[r] + d, (size - d) * sizeof(W));
                edge[r] = tail + 32 * r;
            }
            accumulate(edge, edge, b, 0, hidden + b.place, tokens.data(), (int)tokens.size(), column_sums);
        }
    }
    for (int64_t t = 0; t < num_tokens; t++)
        for (int64_t k = first; k < last; k++)
            finish(sums + ((k - first) * num_tokens + t) * 32, std::min<int64_t>(32, size - 32 * k), y + t * size + 32 * k);
}

template <class W>
void run_rows(const Weights<W>& w, const W* x, const Meetings& groups, int64_t num_tokens, W* y, int threads) {
    int64_t activations;
    const std::vector<Block> blocks = cut(groups, activations);
    const std::unique_ptr<W[]> hidden(new W[activations]);
    const int64_t wide_size = (w.size + 31) / 32, num_blocks = (int64_t)blocks.size();
    // Columns are split in pieces of at least 128: several for each thread, and with sums that a cache holds.
    const int64_t fitting = SUMS / (32 * num_tokens), even = wide_size / (2 * threads);
    const int64_t piece = std::max<int64_t>(4, std::min(fitting, even)), pieces = (wide_size + piece - 1) / piece;
    const int64_t piece_sums = piece * 32 * num_tokens;
    const Lines<float> all_sums(piece_sums * threads);

#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_blocks; i++)
            activate_block(w, x, blocks[i], blocks[std::min(i + 1, num_blocks - 1)], groups, hidden.get());
#pragma omp for schedule(dynamic)
        for (int64_t p = 0; p < pieces; p++)
            add_columns(w, blocks, groups, hidden.get(), p * piece, std::min(wide_size, (p + 1) * piece), num_tokens,
                        all_sums.get() + piece_sums * this_thread(), y);
    }
}

// How neurons belong to experts, and how they are run: row by row, or in products of matrices (many tokens, one expert each).
enum Way { OVERLAPPING_ROWS, OVERLAPPING_PANELS, FINE_ROWS };

template <class W>
void run(int way, const void* x, const int64_t* expert_ids, int64_t top_k, int64_t num_tokens, int64_t size,
         int64_t neurons, const uint64_t* members, const void* gate, const void* up, const void* down,
         const void* gate_bias, const void* up_bias, int kind, void* y, int threads) {
    const Weights<W> weights{size, (const W*)gate, (const W*)up, (const W*)down, (const W*)gate_bias, (const W*)up_bias, kind};
    if (way == OVERLAPPING_PANELS)
        return run_panels<W>(weights, (const W*)x, expert_ids, num_tokens, neurons, members, (W*)y, threads);
    const Meetings groups = way == FINE_ROWS ? meet_fine(expert_ids, top_k, num_tokens, neurons, members)
                                             : meet_overlapping(expert_ids, num_tokens, neurons, members);
    run_rows<W>(weights, (const W*)x, groups, num_tokens, (W*)y, threads);
}

}  // namespace

// 0: done; 1: not enough memory.
extern "C" int tomoe_experts(int is_bf16, int way, const void* x, const int64_t* expert_ids, int64_t top_k,
                             int64_t num_tokens, int64_t size, int64_t neurons, const uint64_t* members, const void* gate, const void* up,
                             const void* down, const void* gate_bias, const void* up_bias, int kind, void* y, int threads) {
    try {
        (is_bf16 ? run<bf16> : run<float>)(way, x, expert_ids, top_k, num_tokens, size, neurons, members, gate, up, down,
                                           gate_bias, up_bias, kind, y, threads);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}
