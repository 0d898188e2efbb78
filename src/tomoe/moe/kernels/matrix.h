// Many tokens in bfloat16, in products of tiles (tiles.h).
//
// Neurons come in bundles of up to 16 rows that follow one another in memory. Their gate and up rows are the left operand as
// they stand; the right operand is a panel of 16 tokens, dims in pairs. A bundle of which few tokens make use meets these
// tokens, gathered into panels of their own; others meet all tokens, and lanes of tokens that do not use a neuron become zero.
// Activations go to a slab [tokens, columns], one column for each neuron: the left operand of the product with the down rows,
// which are interleaved in pairs on the way. Slabs follow one another; meanwhile the sums of the output stand in float32.

#pragma once
#include "meetings.h"
#include "operands.h"

namespace {

constexpr int64_t SLAB = 512;    // columns of a slab, or a few more
constexpr int STRIP = 8 * SIDE;  // columns of the output whose down rows are interleaved at once: four cache lines of a row
constexpr int64_t STRIP_WORDS = STRIP * SIDE;  // of 32 down rows
constexpr int AHEAD = 2;         // steps of 32 dims by which tokens are packed before they meet rows
constexpr int RING = 4;          // steps that are kept where tokens meet one bundle only
// Cycles that a step takes, seen on a Xeon: to gather 16 tokens, and to multiply them by 16 neurons.
constexpr int64_t GATHER_CYCLES = 64, MULTIPLY_CYCLES = 72;

struct Bundle {
    int32_t row;   // the first
    int32_t count;
    int32_t groups[SIDE];
    int64_t column;  // of the first row in its slab
};

// What one thread does at once: a bundle and all tokens, or the bundles of a group and the group's tokens.
struct Job {
    size_t first, last;
    bool gathers;
};

struct Slab {
    size_t first_job, last_job;
    std::vector<int32_t> rows;  // neuron of each column
};

// Which neurons meet which tokens, how, and in which slab.
struct Schedule {
    int64_t panels;
    std::vector<Bundle> bundles;
    std::vector<Job> jobs;
    std::vector<Slab> slabs;
    std::vector<uint16_t> lanes;  // [group][panel]: the tokens that use these neurons, as bits

    Schedule(const Meetings& meetings, int64_t num_tokens) : panels((num_tokens + SIDE - 1) / SIDE) {
        lanes.resize(meetings.tokens.size() * panels);
        for (size_t g = 0; g < meetings.tokens.size(); g++) {
            const List tokens = meetings.tokens[g], rows = meetings.rows[g];
            for (size_t t = 0; t < tokens.size(); t++) lanes[g * panels + tokens[t] / SIDE] |= 1 << tokens[t] % SIDE;
            if (rows.size()) add_group((int32_t)g, rows, gathers((int64_t)tokens.size(), (int64_t)rows.size()));
        }
        for (size_t j = 0; j < jobs.size(); j++) {
            if (slabs.empty() || (int64_t)slabs.back().rows.size() >= SLAB) slabs.push_back({j, j, {}});
            Slab& slab = slabs.back();
            slab.last_job = j + 1;
            for (size_t i = jobs[j].first; i < jobs[j].last; i++) {
                bundles[i].column = (int64_t)slab.rows.size();
                for (int32_t r = 0; r < bundles[i].count; r++) slab.rows.push_back(bundles[i].row + r);
            }
        }
    }
    bool gathers(int64_t tokens, int64_t rows) const {
        const int64_t product = MULTIPLY_CYCLES * rows / SIDE;
        return (tokens + SIDE - 1) / SIDE * (GATHER_CYCLES + product) < panels * product;
    }
    void add_group(int32_t group, List rows, bool gathers) {
        const size_t first = bundles.size();
        // Rows that meet all tokens join those of the group before.
        bool joins = !gathers && !jobs.empty() && !jobs.back().gathers;
        for (size_t i = 0; i < rows.size(); i++, joins = true) {
            if (!joins || bundles.back().count == SIDE || rows[i] != bundles.back().row + bundles.back().count) {
                bundles.push_back({rows[i], 0, {}, 0});
                if (!gathers) jobs.push_back({bundles.size() - 1, bundles.size(), false});
            }
            bundles.back().groups[bundles.back().count++] = group;
        }
        if (gathers) jobs.push_back({first, bundles.size(), true});
    }
};

// Tokens as the right operand. Step k of 32 dims stands at place `k & mask`.
struct Panels {
    uint32_t* words;
    int64_t size;  // words of one panel
    int64_t mask;
    uint32_t* at(int64_t k, int panel) const { return words + panel * size + (k & mask) * PANEL_WORDS; }
};

// Rows that will be wanted next, asked for line by line while others are multiplied.
struct Coming {
    const char *gate = nullptr, *up = nullptr;
    int64_t lines = 0, at_once = 0, asked = 0;
    void ask() {
        for (const int64_t last = std::min(lines, asked + at_once); asked < last; asked++) {
            if (gate) __builtin_prefetch(gate + 64 * asked, 0, 2);
            __builtin_prefetch(up + 64 * asked, 0, 2);
        }
    }
};

typedef float Sums[2][SIDE][SIDE];  // of gate and up rows, for one panel

// Rows of gate (or null) and up against one panel, or two; these tokens are packed into them if there are some.
inline void multiply(const bf16* gate, const bf16* up, int64_t size, const Panels& panels, bool two, const bf16* const* tokens,
                     Coming& coming, Sums* sums) {
    const int64_t steps = size / DEPTH, row_bytes = size * sizeof(bf16);
    const auto fill = [&](int64_t k) {
        pack(tokens, DEPTH * k, panels.at(k, 0));
        if (two) pack(tokens + SIDE, DEPTH * k, panels.at(k, 1));
    };
    for (int64_t k = 0; tokens && k < std::min<int64_t>(AHEAD, steps); k++) fill(k);
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int64_t k = 0; k < steps; k++) {
        if (tokens && k + AHEAD < steps) fill(k + AHEAD);
        coming.ask();
        // Other tokens are next, but the same rows.
        tile_load_passing(6, panels.at(k, 0), 64);
        if (two) tile_load_passing(7, panels.at(k, 1), 64);
        if (gate) {
            tile_load(4, gate + k * DEPTH, row_bytes);
            tile_multiply(0, 4, 6);
            if (two) tile_multiply(1, 4, 7);
        }
        tile_load(5, up + k * DEPTH, row_bytes);
        tile_multiply(2, 5, 6);
        if (two) tile_multiply(3, 5, 7);
    }
    if (gate) tile_store(0, sums[0][0], 64);
    if (gate && two) tile_store(1, sums[1][0], 64);
    tile_store(2, sums[0][1], 64);
    if (two) tile_store(3, sums[1][1], 64);
}

// A layer and its tokens, with what all threads share.
struct Matrix {
    const Weights<bf16>& w;
    const bf16* x;
    const Meetings& meetings;
    int64_t num_tokens;
    const Schedule schedule;
    int64_t stride;    // from one token's activations to the next one's
    bf16* hidden;      // [tokens, stride]
    uint32_t* packed;  // all tokens, in panels
    float* sums;       // [strips, tokens, STRIP]

    // What a thread has of its own.
    struct Own {
        uint32_t *panels, *down;
        int shaped = 0;
        void shape(int rows) {
            if (rows != shaped) shape_tiles(rows);
            shaped = rows;
        }
    };

    // Activations of a bundle for up to 16 tokens; where `kept` is given, it tells of each neuron which tokens use it.
    void activate_panel(const Bundle& bundle, const Sums& made, const uint16_t* kept, int count, bf16* const* to) const {
        static const Words bits = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
        const auto activation = [&](int r) {
            if (r >= bundle.count) return Floats{};
            Floats v = load(made[1][r]);
            if (w.up_bias) v += to_float(w.up_bias[bundle.row + r]);
            if (w.gate) {
                Floats g = load(made[0][r]);
                if (w.gate_bias) g += to_float(w.gate_bias[bundle.row + r]);
                v *= activate(w.kind, g);
            } else {
                v = activate(w.kind, v);
            }
            return !kept || kept[r] == 0xffff ? v : (bits & kept[r]) != 0 ? v : Floats{};
        };
        Words pairs[SIDE / 2];
        for (int i = 0; i < SIDE / 2; i++) pairs[i] = pair_of(activation(2 * i), activation(2 * i + 1));
        store_lanes(pairs, bundle.count, count, to);
    }
    // A bundle and up to 32 tokens: those with these numbers, which `tokens` has, if given, for panels yet to be packed; or,
    // where `ids` is null, those from `first` on.
    void activate_bundle(const Bundle& bundle, const Panels& panels, const bf16* const* tokens, const int32_t* ids, int64_t first,
                         int64_t count, Coming& coming, Own& own) const {
        Sums made[2];
        own.shape(bundle.count);
        const int64_t row = bundle.row * w.size;
        multiply(w.gate ? w.gate + row : nullptr, w.up + row, w.size, panels, count > SIDE, tokens, coming, made);
        for (int64_t done = 0; done < count; done += SIDE) {
            const int some = (int)std::min<int64_t>(SIDE, count - done);
            uint16_t kept[SIDE];
            bf16* to[SIDE];
            for (int t = 0; t < some; t++) to[t] = hidden + (ids ? ids[done + t] : first + done + t) * stride + bundle.column;
            for (int r = 0; r < bundle.count && !ids; r++) kept[r] = schedule.lanes[bundle.groups[r] * schedule.panels + (first + done) / SIDE];
            activate_panel(bundle, made[done / SIDE], ids ? nullptr : kept, some, to);
        }
    }
    // The rows of the bundle behind, to be asked for in so many turns.
    Coming behind(size_t bundle, int64_t turns) const {
        if (bundle + 1 >= schedule.bundles.size()) return {};
        const Bundle& next = schedule.bundles[bundle + 1];
        const int64_t lines = next.count * w.size / DEPTH, steps = turns * w.size / DEPTH;
        const char* gate = w.gate ? (const char*)(w.gate + next.row * w.size) : nullptr;
        return {gate, (const char*)(w.up + next.row * w.size), lines, (lines + steps - 1) / steps};
    }
    static int64_t turns(int64_t tokens) { return (tokens + 2 * SIDE - 1) / (2 * SIDE); }
    bool used(const Bundle& bundle, int64_t panel) const {
        for (int r = 0; r < bundle.count; r++)
            if (schedule.lanes[bundle.groups[r] * schedule.panels + panel]) return true;
        return false;
    }
    void meet_all(size_t index, Own& own) const {
        const Bundle& bundle = schedule.bundles[index];
        Coming coming = behind(index, turns(num_tokens));
        for (int64_t t = 0; t < num_tokens; t += 2 * SIDE) {
            const int64_t count = std::min<int64_t>(2 * SIDE, num_tokens - t);
            if (!used(bundle, t / SIDE) && (count <= SIDE || !used(bundle, t / SIDE + 1))) continue;
            activate_bundle(bundle, {packed + t * w.size / 2, SIDE * w.size / 2, -1}, nullptr, nullptr, t, count, coming, own);
        }
    }
    void meet_gathered(const Job& job, Own& own) const {
        const List ids = meetings.tokens[schedule.bundles[job.first].groups[0]];
        const bool once = job.last - job.first == 1;
        const Panels panels{own.panels, once ? RING * PANEL_WORDS : SIDE * w.size / 2, once ? RING - 1 : -1};
        Coming coming = behind(job.first, turns((int64_t)ids.size()));
        for (int64_t t = 0; t < (int64_t)ids.size(); t += 2 * SIDE) {
            const int64_t count = std::min<int64_t>(2 * SIDE, ids.size() - t);
            const bf16* tokens[2 * SIDE];
            for (int64_t i = 0; i < 2 * SIDE; i++) tokens[i] = x + ids[t + std::min(i, count - 1)] * w.size;
            for (size_t i = job.first; i < job.last; i++) {
                if (!once) coming = t ? Coming{} : behind(i, 1);
                activate_bundle(schedule.bundles[i], panels, i == job.first ? tokens : nullptr, ids.data() + t, 0, count, coming, own);
            }
        }
    }
    void pack_panel(int64_t panel) const {
        const bf16* tokens[SIDE];
        for (int64_t t = 0; t < SIDE; t++) tokens[t] = x + std::min(num_tokens - 1, panel * SIDE + t) * w.size;
        for (int64_t k = 0; k < w.size / DEPTH; k++) pack(tokens, DEPTH * k, packed + panel * SIDE * w.size / 2 + k * PANEL_WORDS);
    }

    // What a slab adds to a strip of the output.
    void add_strip(const Slab& slab, int64_t strip, bool begins, Own& own) const {
        static const bf16 zeros[STRIP] = {};
        const int64_t d = STRIP * strip, columns = std::min<int64_t>(STRIP, w.size - d), count = (int64_t)slab.rows.size();
        const int64_t steps = (count + DEPTH - 1) / DEPTH;
        const auto down = [&](int64_t i) { return i < count ? w.down + slab.rows[i] * w.size + d : zeros; };
        for (int64_t i = 0; i < steps * DEPTH; i += 2) {
            uint32_t* to = own.down + i / DEPTH * STRIP_WORDS + i % DEPTH / 2 * SIDE;
            for (int64_t c = 0; c < columns; c += 2 * SIDE, to += 2 * PANEL_WORDS)
                interleave(down(i) + c, down(i + 1) + c, to, to + PANEL_WORDS);
        }
        own.shape(SIDE);
        for (int64_t t = 0; t < num_tokens; t += 2 * SIDE)
            for (int64_t c = 0; c < columns; c += 2 * SIDE)
                add_block(hidden + t * stride, own.down + c * SIDE, steps, begins, t + SIDE < num_tokens,
                          sums + (strip * schedule.panels * SIDE + t) * STRIP + c);
    }
    // 32 columns for 32 tokens, or 16.
    void add_block(const bf16* h, const uint32_t* down, int64_t steps, bool begins, bool two, float* out) const {
        const int64_t row_bytes = stride * sizeof(bf16), sum_bytes = STRIP * sizeof(float);
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
        if (!begins) {
            tile_load(0, out, sum_bytes);
            tile_load(1, out + SIDE, sum_bytes);
            if (two) tile_load(2, out + SIDE * STRIP, sum_bytes);
            if (two) tile_load(3, out + SIDE * STRIP + SIDE, sum_bytes);
        }
        for (int64_t k = 0; k < steps; k++) {
            tile_load(6, down + k * STRIP_WORDS, 64);
            tile_load(7, down + k * STRIP_WORDS + PANEL_WORDS, 64);
            tile_load(4, h + k * DEPTH, row_bytes);
            tile_multiply(0, 4, 6);
            tile_multiply(1, 4, 7);
            if (!two) continue;
            tile_load(5, h + SIDE * stride + k * DEPTH, row_bytes);
            tile_multiply(2, 5, 6);
            tile_multiply(3, 5, 7);
        }
        tile_store(0, out, sum_bytes);
        tile_store(1, out + SIDE, sum_bytes);
        if (two) tile_store(2, out + SIDE * STRIP, sum_bytes);
        if (two) tile_store(3, out + SIDE * STRIP + SIDE, sum_bytes);
    }
    void write(int64_t strip, bf16* y) const {
        const int64_t d = STRIP * strip, columns = std::min<int64_t>(STRIP, w.size - d);
        for (int64_t t = 0; t < num_tokens; t++)
            for (int64_t c = 0; c < columns; c += 2 * SIDE)
                store_columns_of_pairs(sums + (strip * schedule.panels * SIDE + t) * STRIP + c, y + t * w.size + d + c);
    }
};

// The size of the model is a multiple of 32.
inline void run_matrix(const Weights<bf16>& w, const bf16* x, const Meetings& meetings, int64_t num_tokens, bf16* y, int threads) {
    Matrix m{w, x, meetings, num_tokens, Schedule(meetings, num_tokens)};
    const int64_t panels = m.schedule.panels, tokens = panels * SIDE, strips = (w.size + STRIP - 1) / STRIP;
    size_t columns = 0;
    for (const Slab& slab : m.schedule.slabs) columns = std::max(columns, slab.rows.size());
    const int64_t steps = (columns + DEPTH - 1) / DEPTH;
    m.stride = (steps + 1) * DEPTH;  // activations a power of two apart would share few places of a cache
    std::vector<Matrix::Own> owns(threads);
    static thread_local Workspace workspace;
    workspace.fill([&] {
        m.hidden = workspace.take<bf16>(tokens * m.stride);
        m.packed = workspace.take<uint32_t>(tokens * w.size / 2);
        m.sums = workspace.take<float>(strips * STRIP * tokens);
        for (Matrix::Own& own : owns) {
            own.panels = workspace.take<uint32_t>(std::max<int64_t>(SIDE * w.size, 2 * RING * PANEL_WORDS));
            own.down = workspace.take<uint32_t>(steps * STRIP_WORDS);
        }
    });

#pragma omp parallel num_threads(threads)
    {
        Matrix::Own& own = owns[this_thread()];
#pragma omp for schedule(static)
        for (int64_t p = 0; p < panels; p++) m.pack_panel(p);
        for (const Slab& slab : m.schedule.slabs) {
#pragma omp for schedule(static)
            for (int64_t t = 0; t < tokens; t++) std::memset((void*)(m.hidden + t * m.stride), 0, m.stride * sizeof(bf16));
#pragma omp for schedule(dynamic)
            for (size_t j = slab.first_job; j < slab.last_job; j++) {
                const Job& job = m.schedule.jobs[j];
                job.gathers ? m.meet_gathered(job, own) : m.meet_all(job.first, own);
            }
#pragma omp for schedule(dynamic)
            for (int64_t strip = 0; strip < strips; strip++) m.add_strip(slab, strip, &slab == &m.schedule.slabs[0], own);
        }
        release_tiles();
#pragma omp for schedule(static)
        for (int64_t strip = 0; strip < strips; strip++) m.write(strip, y);
    }
}

}  // namespace
