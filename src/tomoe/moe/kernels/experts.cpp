// Experts on shared neuron rows: y_t = sum over the neurons u of t's experts of act(gate_u x_t) (up_u x_t) down_u.
//
// Each row that some token needs is read once for the whole batch. Neurons are grouped by the set of experts, among those
// that got tokens, which they belong to (experts that share nothing: by their expert, and those that all tokens use); a group
// meets exactly the tokens of these experts. First pass: blocks of 16 neurons are split over the threads. Second pass: columns
// of the output are, so no sum is shared between threads and the result does not depend on their number. Sums are float32;
// activations are rounded to the weights' type.

#include "panels.h"
#include "vectors.h"

namespace {

constexpr int64_t SUMS = 1 << 16;  // floats of the second pass that stay in a core's cache
constexpr int TILE = WIDE ? 6 : 3;      // tokens that meet four of its rows at once
constexpr int HELD = WIDE ? ROWS : 8;  // rows of a block that registers hold, a part of their columns each
// out[c][r0 + r] = rows[r] . tokens[c], for R rows, four or two (and zeros behind two). Where `next` is not null, its rows
// come nearer meanwhile: the processor itself foresees long rows, but not where the next short one begins.
template <class W, int C, int R>
inline void dots(const W* const* rows, const W* const* next, const W* const* tokens, int64_t size, float (*out)[ROWS], int r0) {
    Part acc[R][C] = {};
    int64_t d = 0;
#ifdef HAS_BF16_DOT
    if constexpr (sizeof(W) == 2) {
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
    for (int c = 0; c < C; c++) {
        Part column[4] = {};
        for (int r = 0; r < R; r++) column[r] = acc[r][c];
        sums_of_four(column, out[c] + r0);
        for (int r = 0; r < R; r++)
            for (int64_t i = d; i < size; i++) out[c][r0 + r] += to_float(rows[r][i]) * to_float(tokens[c][i]);
    }
}

// All 16 rows of a block (rows past its end are repeats of the last one) against up to TILE tokens.
template <class W, int C>
inline void project(const W* const* rows, const W* const* next, int count, const W* const* tokens, int64_t size, float (*out)[ROWS]) {
    for (int r = 0; r < count; r += 4)
        (count - r > 2 ? dots<W, C, 4> : dots<W, C, 2>)(rows + r, next ? next + r : nullptr, tokens, size, out, r);
}
template <class W>
inline void project(const W* const* rows, const W* const* next, int count, const W* const* tokens, int n, int64_t size, float (*out)[ROWS]) {
    switch (n) {
        case 1: return project<W, 1>(rows, next, count, tokens, size, out);
        case 2: return project<W, 2>(rows, next, count, tokens, size, out);
        case 3: return project<W, 3>(rows, next, count, tokens, size, out);
        case 4: return project<W, std::min(4, TILE)>(rows, next, count, tokens, size, out);
        case 5: return project<W, std::min(5, TILE)>(rows, next, count, tokens, size, out);
        default: return project<W, TILE>(rows, next, count, tokens, size, out);
    }
}

struct Block {
    int32_t rows[ROWS];
    int32_t count;
    int32_t group;
    int64_t place;  // of its first activations
};

// y[.., 32 columns] += activations of a block times its down rows. `y` and `h` hold the tokens of the block one after another.
template <class W, int R>
inline void accumulate(const W* const* rows, const W* const* next, int64_t d, const W* h, const int32_t* tokens, int n, float* y) {
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
            const int32_t* pairs = (const int32_t*)(h + ROWS * t);
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
            const W* made = h + ROWS * t;
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
inline void accumulate(const W* const* rows, const W* const* next, int count, int64_t d, const W* h, const int32_t* tokens, int n, float* y) {
    for (int first = 0; first < count; first += HELD) {
        const int left = count - first;
        const auto some = left <= 2   ? accumulate<W, 2>
                          : left <= 4 ? accumulate<W, 4>
                          : left <= 6 ? accumulate<W, 6>
                          : left <= 8 ? accumulate<W, 8>
                                      : accumulate<W, HELD>;
        some(rows + first, next + first, d, h + first, tokens, n, y);
    }
}

template <class W>
inline int column(int i) {
#ifdef HAS_BF16_DOT
    if (sizeof(W) == 2) return i < 16 ? (i / 4) * 8 + i % 4 : ((i - 16) / 4) * 8 + 4 + i % 4;
#endif
    return i;
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

template <class W>
void run_rows(const W* x, const Meetings& groups, int64_t num_tokens, int64_t size, const W* gate, const W* up, const W* down,
              const W* gate_bias, const W* up_bias, int kind, W* y, int threads) {
    std::vector<Block> blocks;
    int64_t place = 0;
    for (size_t g = 0; g < groups.rows.size(); g++) {
        const auto& rows = groups.rows[g];
        for (size_t i = 0; i < rows.size(); i += ROWS) {
            Block b;
            b.count = (int32_t)std::min<size_t>(ROWS, rows.size() - i);
            for (int r = 0; r < ROWS; r++) b.rows[r] = rows[i + std::min(r, b.count - 1)];
            b.group = (int32_t)g;
            b.place = place;
            place += ROWS * (int64_t)groups.tokens[g].size();
            blocks.push_back(b);
        }
    }
    std::vector<W> hidden(place);
    const int64_t wide_size = (size + 31) / 32, num_blocks = (int64_t)blocks.size();
    // Columns are split in pieces of at least 128: several for each thread, and with sums that a cache holds.
    const int64_t fitting = SUMS / (32 * num_tokens), even = wide_size / (2 * threads);
    const int64_t piece = std::max<int64_t>(4, std::min(fitting, even)), pieces = (wide_size + piece - 1) / piece;
    std::vector<float> all_sums(wide_size * 32 * num_tokens);

#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_blocks; i++) {
            const Block& b = blocks[i];
            const auto& tokens = groups.tokens[b.group];
            const Block& following = blocks[std::min(i + 1, num_blocks - 1)];
            const W *gates[ROWS], *ups[ROWS], *next_gates[ROWS], *next_ups[ROWS];
            for (int r = 0; r < ROWS; r++) {
                gates[r] = gate ? gate + b.rows[r] * size : nullptr;
                ups[r] = up + b.rows[r] * size;
                next_gates[r] = gate ? gate + following.rows[r] * size : nullptr;
                next_ups[r] = up + following.rows[r] * size;
            }
            for (size_t t = 0; t < tokens.size(); t += TILE) {
                const int n = (int)std::min<size_t>(TILE, tokens.size() - t);
                const W* xs[TILE];
                for (int c = 0; c < n; c++) xs[c] = x + tokens[t + c] * size;
                float g[TILE][ROWS] = {}, u[TILE][ROWS] = {};
                project(ups, t ? nullptr : next_ups, b.count, xs, n, size, u);
                if (gate) project(gates, t ? nullptr : next_gates, b.count, xs, n, size, g);
                for (int c = 0; c < n; c++) {
                    if (up_bias)
                        for (int r = 0; r < ROWS; r++) u[c][r] += to_float(up_bias[b.rows[r]]);
                    if (gate_bias)
                        for (int r = 0; r < ROWS; r++) g[c][r] += to_float(gate_bias[b.rows[r]]);
                    const Floats v = gate ? activate(kind, load(g[c])) * load(u[c]) : activate(kind, load(u[c]));
                    float made[ROWS];
                    store(made, v);
                    W* h = hidden.data() + b.place + ROWS * (t + c);
                    for (int r = 0; r < ROWS; r++) from_float(r < b.count ? made[r] : 0.f, h[r]);
                }
            }
        }
#pragma omp for schedule(dynamic)
        for (int64_t p = 0; p < pieces; p++) {
            const int64_t first = p * piece, last = std::min(wide_size, first + piece);
            float* sums = all_sums.data() + first * 32 * num_tokens;
            W tail[32 * ROWS] = {};
            for (int64_t i = 0; i < num_blocks; i++) {
                const Block &b = blocks[i], &following = blocks[std::min(i + 2, num_blocks - 1)];
                const auto& tokens = groups.tokens[b.group];
                const W *rows[ROWS], *next[ROWS];
                for (int r = 0; r < ROWS; r++) {
                    rows[r] = down + b.rows[r] * size;
                    next[r] = down + following.rows[r] * size;
                }
                for (int64_t k = first; k < last; k++) {
                    int64_t d = 32 * k;
                    const W* edge[ROWS];
                    if (d + 32 > size) {  // the last columns, padded with zeros
                        for (int r = 0; r < ROWS; r++) {
                            std::memcpy(tail + 32 * r, rows[r] + d, (size - d) * sizeof(W));
                            edge[r] = tail + 32 * r;
                        }
                        accumulate(edge, edge, b.count, 0, hidden.data() + b.place, tokens.data(), (int)tokens.size(),
                                   sums + (k - first) * 32 * num_tokens);
                    } else {
                        accumulate(rows, next, b.count, d, hidden.data() + b.place, tokens.data(), (int)tokens.size(),
                                   sums + (k - first) * 32 * num_tokens);
                    }
                }
            }
            for (int64_t t = 0; t < num_tokens; t++)
                for (int64_t k = first; k < last; k++)
                    for (int i = 0; i < 32; i++) {
                        int64_t d = 32 * k + column<W>(i);
                        if (d < size) from_float(sums[((k - first) * num_tokens + t) * 32 + i], y[t * size + d]);
                    }
        }
    }
}

// How neurons belong to experts, and how they are run: row by row, or in products of matrices (many tokens, one expert each).
enum Way { OVERLAPPING_ROWS, OVERLAPPING_PANELS, FINE_ROWS };

template <class W>
void run(int way, const void* x, const int64_t* expert_ids, int64_t top_k, int64_t num_tokens, int64_t size,
         int64_t neurons, const uint64_t* members, const void* gate, const void* up, const void* down,
         const void* gate_bias, const void* up_bias, int kind, void* y, int threads) {
    if (way == OVERLAPPING_PANELS)
        return run_panels<W>((const W*)x, expert_ids, num_tokens, size, neurons, members, (const W*)gate, (const W*)up,
                             (const W*)down, (const W*)gate_bias, (const W*)up_bias, kind, (W*)y, threads);
    const Meetings groups = way == FINE_ROWS ? meet_fine(expert_ids, top_k, num_tokens, neurons, members)
                                             : meet_overlapping(expert_ids, num_tokens, neurons, members);
    run_rows<W>((const W*)x, groups, num_tokens, size, (const W*)gate, (const W*)up, (const W*)down, (const W*)gate_bias,
                (const W*)up_bias, kind, (W*)y, threads);
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
