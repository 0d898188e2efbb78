// Many tokens: products of matrices, in registers. Tokens stand sorted by expert, 16 to a panel, one in each lane.
//
// First pass: a tile of up to seven neurons (their gate and up rows, laid out so that one step's numbers are neighbors)
// meets every panel in which some token needs one of them. Neurons of a tile may belong to different experts; if a
// token's expert does not have a neuron, its activation is zero. Second pass: 32 columns of the output at a time, tokens
// of one expert against the tiles that reach it, in chunks whose down rows a core's cache holds.
// The unit of both is a word: one float32, or two bfloat16 of neighboring dims (first pass) or neurons (second pass).

#pragma once
#include "vectors.h"

namespace {

constexpr int PANEL = LANES;  // tokens
constexpr int TILE_NEURONS = 7;       // neurons of a tile
constexpr int TILE_ROWS = WIDE ? 2 * TILE_NEURONS : 6;  // its gate and up rows that meet
constexpr int TILE_PANELS = WIDE ? 2 : 1;               // so many panels at once
constexpr int TILE_TOKENS = 8;      // tokens of one expert that are sorted together
constexpr int HELD_TOKENS = WIDE ? TILE_TOKENS : 6;     // those of them that meet
constexpr int HELD_LINES = WIDE ? 2 : 1;                // so many times 16 columns at once
constexpr int64_t CHUNK = 1024;  // words of a column of down rows that stay in a core's cache

struct alignas(64) CacheLine {
    uint32_t words[LANES];
};
inline Words load(const CacheLine& line) {
    Words v;
    std::memcpy(&v, line.words, sizeof v);
    return v;
}
inline void store(CacheLine& line, Words v) { std::memcpy(line.words, &v, sizeof v); }

// Elements in a word: two bfloat16 only where the processor multiplies pairs of them.
template <class W>
constexpr int elems_per_word() {
#ifdef HAS_BF16_DOT
    return sizeof(W) == 2 ? 2 : 1;
#else
    return 1;
#endif
}
template <class W>
constexpr int64_t in_words(int64_t elements) {
    return (elements + elems_per_word<W>() - 1) / elems_per_word<W>();
}

template <class W>
inline Part add_product(Part sums, PartWords a, uint32_t b) {
#ifdef HAS_BF16_DOT
    if constexpr (elems_per_word<W>() == 2)
        return (Part)_mm512_dpbf16_ps((__m512)sums, (__m512bh)a, (__m512bh)_mm512_set1_epi32((int)b));
#endif
    float f;
    std::memcpy(&f, &b, sizeof f);
    return sums + (Part)a * f;
}
inline PartWords part(const CacheLine& line, int p) {
    PartWords v;
    std::memcpy(&v, line.words + WIDTH * p, sizeof v);
    return v;
}

template <int S>
inline void transpose_step(PartWords* v) {  // blocks of S x S change places across the diagonal
    PartWords first, second;
    for (int l = 0; l < WIDTH; l++) {
        first[l] = l & S ? WIDTH + l - S : l;
        second[l] = l & S ? WIDTH + l : l + S;
    }
    for (int i = 0; i < WIDTH; i++) {
        if (i & S) continue;
        PartWords a = v[i], b = v[i | S];
        v[i] = blend(a, b, first);
        v[i | S] = blend(a, b, second);
    }
}
inline void transpose(Words* v) {  // in blocks of WIDTH x WIDTH
    PartWords blocks[PARTS][PARTS][WIDTH];
    for (int i = 0; i < LANES; i++) {
        PartWords parts[PARTS];
        std::memcpy(parts, &v[i], sizeof parts);
        for (int p = 0; p < PARTS; p++) blocks[p][i / WIDTH][i % WIDTH] = parts[p];
    }
    for (int i = 0; i < LANES; i++) {
        if (i % WIDTH == 0) {
            for (int p = 0; p < PARTS; p++) {
                transpose_step<1>(blocks[i / WIDTH][p]);
                transpose_step<2>(blocks[i / WIDTH][p]);
                transpose_step<4>(blocks[i / WIDTH][p]);
                if constexpr (WIDE) transpose_step<8>(blocks[i / WIDTH][p]);
            }
        }
        PartWords parts[PARTS];
        for (int p = 0; p < PARTS; p++) parts[p] = blocks[i / WIDTH][p][i % WIDTH];
        std::memcpy(&v[i], parts, sizeof parts);
    }
}

template <class W>
inline Words load_words(const W* p) {
#ifdef HAS_BF16_DOT
    if constexpr (elems_per_word<W>() == 2) {
        Words v;
        std::memcpy(&v, p, sizeof v);
        return v;
    }
#endif
    return (Words)load(p);
}

// out[k].words[i] = word k of row i; a row that is null is zero.
template <class W>
inline void interleave(const W* const* rows, int64_t size, CacheLine* out) {
    constexpr int64_t STEP = LANES * elems_per_word<W>();
    for (int64_t d = 0; d < size; d += STEP) {
        Words v[LANES];
        for (int i = 0; i < LANES; i++) {
            if (!rows[i]) {
                v[i] = Words{};
            } else if (d + STEP <= size) {
                v[i] = load_words(rows[i] + d);
            } else {
                W tail[STEP] = {};
                std::memcpy(tail, rows[i] + d, (size - d) * sizeof(W));
                v[i] = load_words(tail);
            }
        }
        transpose(v);
        const int64_t first = d / elems_per_word<W>(), count = std::min<int64_t>(LANES, in_words<W>(size) - first);
        for (int64_t k = 0; k < count; k++) store(out[first + k], v[k]);
    }
}

// sums[p][first + r]: row first + r of `rows` (one word of each row in a line) against the 16 tokens of panel p.
template <class W, int R, int P>
inline void multiply(const CacheLine* rows, int first, const CacheLine* const* panels, int64_t depth, Floats (*sums)[2 * TILE_NEURONS]) {
    Part acc[P][R][PARTS] = {};
    for (int64_t k = 0; k < depth; k++) {
        PartWords x[P][PARTS];
        for (int p = 0; p < P; p++)
            for (int q = 0; q < PARTS; q++) x[p][q] = part(panels[p][k], q);
        for (int r = 0; r < R; r++)
            for (int p = 0; p < P; p++)
                for (int q = 0; q < PARTS; q++) acc[p][r][q] = add_product<W>(acc[p][r][q], x[p][q], rows[k].words[first + r]);
    }
    for (int p = 0; p < P; p++)
        for (int r = 0; r < R; r++) std::memcpy(&sums[p][first + r], acc[p][r], sizeof acc[p][r]);
}
template <class W, int P>
inline void multiply(const CacheLine* rows, int first, int count, const CacheLine* const* panels, int64_t depth, Floats (*sums)[2 * TILE_NEURONS]) {
    switch (count) {
        case 1: return multiply<W, 1, P>(rows, first, panels, depth, sums);
        case 2: return multiply<W, 2, P>(rows, first, panels, depth, sums);
        case 3: return multiply<W, 3, P>(rows, first, panels, depth, sums);
        case 4: return multiply<W, 4, P>(rows, first, panels, depth, sums);
        case 5: return multiply<W, 5, P>(rows, first, panels, depth, sums);
        case 6: return multiply<W, 6, P>(rows, first, panels, depth, sums);
        case 7: return multiply<W, std::min(7, TILE_ROWS), P>(rows, first, panels, depth, sums);
        case 8: return multiply<W, std::min(8, TILE_ROWS), P>(rows, first, panels, depth, sums);
        case 10: return multiply<W, std::min(10, TILE_ROWS), P>(rows, first, panels, depth, sums);
        case 12: return multiply<W, std::min(12, TILE_ROWS), P>(rows, first, panels, depth, sums);
        default: return multiply<W, TILE_ROWS, P>(rows, first, panels, depth, sums);
    }
}
// All rows of a tile, in even parts that registers hold.
template <class W, int P>
inline void multiply(const CacheLine* rows, int count, const CacheLine* const* panels, int64_t depth, Floats (*sums)[2 * TILE_NEURONS]) {
    const int parts = (count + TILE_ROWS - 1) / TILE_ROWS;
    for (int i = 0; i < parts; i++) {
        const int first = count * i / parts, end = count * (i + 1) / parts;
        multiply<W, P>(rows, first, end - first, panels, depth, sums);
    }
}

template <class W>
inline Words word_of(Floats low, Floats high) {  // activations of one neuron, or of two
    if constexpr (sizeof(W) == 4) return (Words)low;
    if constexpr (elems_per_word<W>() == 1) return rounded(low) << 16;
    return rounded(low) | rounded(high) << 16;
}

struct Tile {
    int32_t rows[TILE_NEURONS];
    int32_t count = 0;
    uint64_t sets[TILE_NEURONS];  // working experts that each neuron belongs to
    uint64_t reach = 0;   // those of any
    int64_t slot;         // of its first word among those of all tiles
};

struct Range {
    int64_t slot, place, count;  // words of down rows, and of activations within a panel, that belong together
};

// Tokens of one expert in one panel, at most eight.
struct Some {
    int64_t panel, lane, count;
    int32_t expert;
    int32_t pair;  // of panel's kind and expert
};

// Tokens in the order of their experts, in panels; which tiles meet which panels, and where activations stand.
template <class W>
struct Layout {
    std::vector<int32_t> order;        // tokens
    std::vector<int32_t> experts;      // of the sorted tokens
    std::vector<uint64_t> reach;       // experts of each panel
    std::vector<int32_t> kind;         // panels with the same experts are of one kind
    std::vector<uint64_t> kinds;
    std::vector<int64_t> popularity;   // panels of a kind
    std::vector<Some> some;
    std::vector<size_t> first_of;      // of each panel among `some`, and the end
    std::vector<std::pair<int32_t, int32_t>> pairs;  // (kind, expert)
    std::vector<Tile> tiles;
    std::vector<std::vector<int64_t>> places;  // [kind][tile], -1 where they do not meet
    std::vector<int64_t> starts;       // of each panel's activations, in lines
    std::vector<int64_t> chunks;       // tiles at which a chunk begins, and the end
    std::vector<int32_t> word_rows;    // neurons of each word of down rows; where one is missing, its neighbour again
    int64_t slots = 0;

    Layout(const int64_t* expert_ids, int64_t num_tokens, int64_t neurons, const uint64_t* members) {
        order.resize(num_tokens);
        for (int64_t t = 0; t < num_tokens; t++) order[t] = (int32_t)t;
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return expert_ids[a] < expert_ids[b]; });
        uint64_t working = 0;
        for (int64_t i = 0; i < num_tokens; i++) {
            experts.push_back((int32_t)expert_ids[order[i]]);
            if (i % PANEL == 0) reach.push_back(0);
            reach.back() |= 1ull << experts[i];
            working |= reach.back();
        }
        for (uint64_t set : reach) {
            auto it = std::find(kinds.begin(), kinds.end(), set);
            kind.push_back((int32_t)(it - kinds.begin()));
            if (it == kinds.end()) {
                kinds.push_back(set);
                popularity.push_back(0);
            }
            popularity[kind.back()]++;
        }
        segment();
        cut(Groups(members, neurons, working));
        place();
    }
    void segment() {
        const int64_t num_tokens = (int64_t)order.size();
        for (int64_t t = 0; t < num_tokens;) {
            const int64_t p = t / PANEL, end = std::min(num_tokens, (p + 1) * PANEL);
            int64_t last = t;
            while (last < end && experts[last] == experts[t]) last++;
            if (last - t > TILE_TOKENS) last = t + (last - t + 1) / 2;
            const std::pair<int32_t, int32_t> pair(kind[p], experts[t]);
            const auto it = std::find(pairs.begin(), pairs.end(), pair);
            if (t % PANEL == 0) first_of.push_back(some.size());
            some.push_back({p, t - p * PANEL, last - t, experts[t], (int32_t)(it - pairs.begin())});
            if (it == pairs.end()) pairs.push_back(pair);
            t = last;
        }
        first_of.push_back(some.size());
    }
    // Zeros if a token's expert is not in the set.
    Floats kept(Floats v, int64_t panel, uint64_t set) const {
        static const Words bits = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
        uint32_t lanes = 0;
        for (size_t i = first_of[panel]; i < first_of[panel + 1]; i++)
            lanes |= (uint32_t)(set >> some[i].expert & 1) * ((1u << some[i].count) - 1) << some[i].lane;
        return (bits & lanes) != 0 ? v : Floats{};
    }
    int64_t met(uint64_t set) const {  // panels
        int64_t count = 0;
        for (size_t i = 0; i < kinds.size(); i++)
            if (kinds[i] & set) count += popularity[i];
        return count;
    }
    static int64_t cost(int64_t panels, int64_t rows) { return panels * std::max<int64_t>(rows, 3); }

    void cut(const Groups& groups) {  // even tiles, but for the last of a group; small groups join the one before
        for (size_t g = 0; g < groups.sets.size(); g++) {
            const uint64_t set = groups.sets[g];
            const auto& rows = groups.rows[g];
            const int64_t n = (int64_t)rows.size(), parts = n == 1 ? 1 : (n - 1 + TILE_NEURONS - 2) / (TILE_NEURONS - 1);
            if (!tiles.empty() && tiles.back().count + n <= TILE_NEURONS) {
                const Tile& last = tiles.back();
                const int64_t apart = cost(met(last.reach), last.count) + cost(met(set), n);
                if (cost(met(last.reach | set), last.count + n) <= apart) {
                    for (int32_t row : rows) add(row, set);
                    continue;
                }
            }
            int64_t done = 0;
            for (int64_t i = 0; i < parts; i++) {
                const int64_t end = i + 1 == parts ? n : (n * (i + 1) / parts) / 2 * 2;
                tiles.emplace_back();
                for (; done < end; done++) add(rows[done], set);
            }
        }
    }
    void add(int32_t row, uint64_t set) {
        Tile& tile = tiles.back();
        tile.rows[tile.count] = row;
        tile.sets[tile.count++] = set;
        tile.reach |= set;
    }
    void place() {
        for (size_t i = 0; i < tiles.size(); i++) {
            if (i == 0 || slots + in_words<W>(tiles[i].count) - tiles[chunks.back()].slot > CHUNK) chunks.push_back((int64_t)i);
            tiles[i].slot = slots;
            slots += in_words<W>(tiles[i].count);
            word_rows.insert(word_rows.end(), tiles[i].rows, tiles[i].rows + tiles[i].count);
            word_rows.resize(slots * elems_per_word<W>(), word_rows.back());
        }
        chunks.push_back((int64_t)tiles.size());
        std::vector<int64_t> totals;
        for (uint64_t set : kinds) {
            int64_t total = 0;
            places.emplace_back();
            for (const Tile& tile : tiles) {
                places.back().push_back(tile.reach & set ? total : -1);
                if (tile.reach & set) total += in_words<W>(tile.count);
            }
            totals.push_back(total);
        }
        starts.push_back(0);
        for (int32_t k : kind) starts.push_back(starts.back() + totals[k]);
    }
    // What an expert's tokens meet of a chunk, in panels of a kind.
    std::vector<Range> ranges(int64_t chunk, int32_t kind, int32_t expert) const {
        std::vector<Range> merged;
        for (int64_t i = chunks[chunk]; i < chunks[chunk + 1]; i++) {
            const Tile& tile = tiles[i];
            if (!(tile.reach >> expert & 1)) continue;
            const int64_t place = places[kind][i], count = in_words<W>(tile.count);
            if (!merged.empty() && merged.back().slot + merged.back().count == tile.slot &&
                merged.back().place + merged.back().count == place)
                merged.back().count += count;
            else
                merged.push_back({tile.slot, place, count});
        }
        return merged;
    }
};

// sums[t][0..32] += activations of some tokens times the down rows of their expert, 32 columns of them.
template <class W, int N>
inline void gather(const CacheLine (*rows)[2], int64_t first, const CacheLine* hidden, const std::vector<Range>& ranges, CacheLine (*sums)[2]) {
    constexpr int P = PARTS * HELD_LINES;
    for (int line = 0; line < 2; line += HELD_LINES) {
        Part acc[N][P];
        for (int t = 0; t < N; t++) std::memcpy(acc[t], &sums[t][line], sizeof acc[t]);
        for (const Range& range : ranges) {
            const CacheLine(*w)[2] = rows + (range.slot - first);
            const CacheLine* h = hidden + range.place;
            for (int64_t k = 0; k < range.count; k++) {
                PartWords v[P];
                for (int p = 0; p < P; p++) v[p] = part(w[k][line + p / PARTS], p % PARTS);
                for (int t = 0; t < N; t++)
                    for (int p = 0; p < P; p++) acc[t][p] = add_product<W>(acc[t][p], v[p], h[k].words[t]);
            }
        }
        for (int t = 0; t < N; t++) std::memcpy((void*)&sums[t][line], acc[t], sizeof acc[t]);
    }
}
template <class W>
inline void gather(const CacheLine (*rows)[2], int64_t first, const CacheLine* hidden, int64_t lane, int64_t count,
                   const std::vector<Range>& ranges, CacheLine (*sums)[2]) {
    if (count > HELD_TOKENS) {
        gather<W>(rows, first, hidden, lane, count / 2, ranges, sums);
        return gather<W>(rows, first, hidden, lane + count / 2, count - count / 2, ranges, sums + count / 2);
    }
    const CacheLine* h = (const CacheLine*)((const uint32_t*)hidden + lane);
    switch (count) {
        case 1: return gather<W, 1>(rows, first, h, ranges, sums);
        case 2: return gather<W, 2>(rows, first, h, ranges, sums);
        case 3: return gather<W, 3>(rows, first, h, ranges, sums);
        case 4: return gather<W, 4>(rows, first, h, ranges, sums);
        case 5: return gather<W, 5>(rows, first, h, ranges, sums);
        case 6: return gather<W, 6>(rows, first, h, ranges, sums);
        case 7: return gather<W, std::min(7, HELD_TOKENS)>(rows, first, h, ranges, sums);
        default: return gather<W, HELD_TOKENS>(rows, first, h, ranges, sums);
    }
}

// 32 columns, at most, of `count` words of down rows; columns past the end are zero.
template <class W>
inline void interleave_down(const int32_t* rows, int64_t count, const W* down, int64_t size, int64_t columns, CacheLine (*out)[2]) {
    const int64_t neurons = count * elems_per_word<W>(), ahead = 16;
    for (int64_t i = 0; i < neurons; i += elems_per_word<W>()) {
        const W* of[2];
        W tails[2][2 * LANES];
        for (int half = 0; half < elems_per_word<W>(); half++) {
            of[half] = down + rows[i + half] * size;
            if (i + half + ahead < neurons) __builtin_prefetch(down + rows[i + half + ahead] * size);
            if (columns < 2 * LANES) {
                std::memset(tails[half], 0, sizeof tails[half]);
                std::memcpy(tails[half], of[half], columns * sizeof(W));
                of[half] = tails[half];
            }
        }
        for (int c = 0; c < 2; c++) {
            Words word = (Words)load(of[0] + LANES * c);  // bfloat16 stands in the high half
            if constexpr (elems_per_word<W>() == 2) word = word >> 16 | (Words)load(of[1] + LANES * c);
            store(out[i / elems_per_word<W>()][c], word);
        }
    }
}

// Ask for the beginning of a row; the processor itself foresees what follows.
template <class W>
inline void come(const W* row, int64_t size) {
    const int64_t bytes = std::min<int64_t>(size * sizeof(W), 2048);
    for (int64_t byte = 0; byte < bytes; byte += 64) __builtin_prefetch((const char*)row + byte);
}

// One tile against the panels that it meets: activations to `hidden`.
template <class W>
inline void run_tile(const Layout<W>& layout, size_t index, const CacheLine* x, int64_t depth, const Weights<W>& w,
                     CacheLine* rows, CacheLine* hidden) {
    const Tile& tile = layout.tiles[index];
    const int n = tile.count, r = w.gate ? 2 * n : n;
    const W* sources[LANES] = {};
    for (int i = 0; i < n; i++) {
        if (w.gate) sources[i] = w.gate + tile.rows[i] * w.size;
        sources[r - n + i] = w.up + tile.rows[i] * w.size;
    }
    interleave(sources, w.size, rows);
    const int64_t panels = (int64_t)layout.reach.size();
    const Tile* next = index + 1 < layout.tiles.size() ? &layout.tiles[index + 1] : nullptr;
    const int coming = next ? next->count : 0;
    int ahead = 0;
    for (int64_t p = 0; p < panels;) {
        int64_t met[TILE_PANELS];
        const CacheLine* xs[TILE_PANELS];
        int count = 0;
        for (; p < panels && count < TILE_PANELS; p++)
            if (layout.reach[p] & tile.reach) {
                met[count] = p;
                xs[count++] = x + p * depth;
            }
        if (!count) break;
        // Rows of the next tile come nearer while this one is multiplied.
        for (int i = 0; i < 4 && ahead < 2 * coming; i++, ahead++) {
            const W* weights = ahead < coming ? w.up : w.gate;
            if (!weights) break;
            come(weights + next->rows[ahead % coming] * w.size, w.size);
        }
        Floats sums[TILE_PANELS][2 * TILE_NEURONS];
        if (count == TILE_PANELS)
            multiply<W, TILE_PANELS>(rows, r, xs, depth, sums);
        else
            multiply<W, 1>(rows, r, xs, depth, sums);
        for (int c = 0; c < count; c++) {
            CacheLine* out = hidden + layout.starts[met[c]] + layout.places[layout.kind[met[c]]][index];
            Floats made[TILE_NEURONS + 1] = {};
            for (int i = 0; i < n; i++) {
                Floats u = sums[c][r - n + i], g = w.gate ? sums[c][i] : u;
                if (w.up_bias) u += to_float(w.up_bias[tile.rows[i]]);
                if (w.gate_bias) g += to_float(w.gate_bias[tile.rows[i]]);
                made[i] = w.gate ? activate(w.kind, g) * u : activate(w.kind, u);
                if (layout.reach[met[c]] & ~tile.sets[i]) made[i] = layout.kept(made[i], met[c], tile.sets[i]);
            }
            for (int i = 0; i < n; i += elems_per_word<W>()) store(*out++, word_of<W>(made[i], made[i + 1]));
        }
    }
}

template <class W>
void run_panels(const Weights<W>& w, const W* x, const int64_t* expert_ids, int64_t num_tokens, int64_t neurons,
                const uint64_t* members, W* y, int threads) {
    const int64_t size = w.size;
    const Layout<W> layout(expert_ids, num_tokens, neurons, members);
    const int64_t depth = in_words<W>(size), panels = (int64_t)layout.reach.size(), tiles = (int64_t)layout.tiles.size();
    const int64_t num_chunks = (int64_t)layout.chunks.size() - 1, strips = (size + 2 * LANES - 1) / (2 * LANES);
    std::vector<std::vector<Range>> ranges;  // [chunk][pair]
    for (int64_t c = 0; c < num_chunks; c++)
        for (const auto& pair : layout.pairs) ranges.push_back(layout.ranges(c, pair.first, pair.second));

    const std::unique_ptr<CacheLine[]> packed(new CacheLine[panels * depth]), hidden(new CacheLine[layout.starts.back()]);
    // Each thread holds the rows of a tile in the first pass; in the second a chunk of down rows, and sums of all tokens.
    const int64_t scratch_size = std::max(depth, 2 * (CHUNK + TILE_NEURONS) + 2 * num_tokens);
    const std::unique_ptr<CacheLine[]> scratch(new CacheLine[scratch_size * threads]);

#pragma omp parallel num_threads(threads)
    {
        CacheLine* mine = scratch.get() + scratch_size * this_thread();
#pragma omp for schedule(dynamic)
        for (int64_t p = 0; p < panels; p++) {
            const W* rows[LANES] = {};
            for (int64_t i = 0; i < std::min<int64_t>(PANEL, num_tokens - p * PANEL); i++)
                rows[i] = x + layout.order[p * PANEL + i] * size;
            interleave(rows, size, packed.get() + p * depth);
        }
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < tiles; i++)
            run_tile(layout, i, packed.get(), depth, w, mine, hidden.get());
#pragma omp for schedule(dynamic)
        for (int64_t s = 0; s < strips; s++) {
            const int64_t d = 2 * LANES * s, columns = std::min<int64_t>(2 * LANES, size - d);
            CacheLine(*rows)[2] = (CacheLine(*)[2])mine;
            CacheLine(*sums)[2] = rows + CHUNK + TILE_NEURONS;
            std::memset((void*)sums, 0, num_tokens * sizeof *sums);
            for (int64_t c = 0; c < num_chunks; c++) {
                const int64_t first = layout.tiles[layout.chunks[c]].slot;
                const int64_t end = c + 1 < num_chunks ? layout.tiles[layout.chunks[c + 1]].slot : layout.slots;
                interleave_down(layout.word_rows.data() + first * elems_per_word<W>(), end - first, w.down + d, size, columns, rows);
                for (const Some& tokens : layout.some)
                    gather<W>(rows, first, hidden.get() + layout.starts[tokens.panel], tokens.lane, tokens.count,
                              ranges[c * layout.pairs.size() + tokens.pair], sums + tokens.panel * PANEL + tokens.lane);
            }
            for (int64_t t = 0; t < num_tokens; t++)
                store_columns((Floats)load(sums[t][0]), (Floats)load(sums[t][1]), columns, y + layout.order[t] * size + d);
        }
    }
}

}  // namespace
