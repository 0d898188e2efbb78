// The largest inputs of a projection: y = bias + sum over the n inputs i with the largest |x_i| c_i of x_i W[i, :].
//
// W is stored input after input, so an input that no token chose is a row that is not read. Up to four tokens share the rows
// that any of them chose. The rows are cut into blocks of columns, whose sums stay in the nearest cache, and the inputs into
// pieces; both cuts depend on the sizes alone and the sums of the pieces are added in order, so the result does not depend on
// the number of threads. Sums are float32. Where rows are added one after another (all but HAS_BF16_DOT), they do not depend
// on the other tokens either: a row that a token did not choose adds zero to its sums.

#include "vectors.h"

namespace {

constexpr int AT_ONCE = 8;            // rows that a pass over a block adds
constexpr int TOKENS = 4;             // most of them
constexpr int64_t BLOCK = 4096;       // columns of a block, at most
constexpr int64_t TASKS = 8;          // pieces of work, about
constexpr int64_t LEAST_ROWS = 128;   // of a piece of the inputs, whether they are chosen or not
constexpr int64_t STEP = 2 * WIDTH;   // columns that stand in two vectors

typedef std::conditional_t<WIDE, Words, EightWords> PartWords;


// Of a token's numbers those with the largest |x_i| c_i are chosen: all whose key is above `last`, and of those that have it
// the first `equal`.
struct Border {
    int32_t last;
    int64_t equal;
};

// The keys of a token's numbers, and the border of the n largest. The bits of numbers that are not negative stand in their order.
template <class W>
Border choose(const W* x, const float* norms, int64_t width, int64_t n, int32_t* keys) {
    for (int64_t i = 0; i < width; i++) {
        const float score = std::fabs(to_float(x[i])) * norms[i];
        std::memcpy(keys + i, &score, sizeof score);
        keys[i] &= 0x7fffffff;  // NaN may have a sign: it is the largest
    }
    if (n >= width) return {-1, 0};
    // Bit by bit, the largest number that n keys reach.
    const auto reach = [&](int32_t least) {
        int32_t count = 0;
        for (int64_t i = 0; i < width; i++) count += keys[i] >= least;
        return (int64_t)count;
    };
    int32_t last = 0;
    for (int32_t bit = 1 << 30; bit; bit >>= 1) {
        const int64_t count = reach(last | bit);
        if (count >= n) last |= bit;
        if (count == n) return {last - 1, 0};
    }
    return {last, n - (last < 0x7fffffff ? reach(last + 1) : 0)};
}

// The places of the chosen numbers, ascending.
template <class W>
void list_chosen(const W* x, const float* norms, int64_t width, int64_t n, int32_t* keys, std::vector<int32_t>& chosen) {
    Border border = choose(x, norms, width, n, keys);
    chosen.resize(width);
    int64_t count = 0;
    for (int64_t i = 0; i < width; i++) {
        const bool equal = keys[i] == border.last && border.equal > 0;
        border.equal -= equal;
        chosen[count] = (int32_t)i;
        count += keys[i] > border.last || equal;
    }
    chosen.resize(count);
}

// STEP columns of a row: of bfloat16 the even and the odd ones, of float32 the first half and the second.
inline void split(const bf16* p, Part& first, Part& second) {
    PartWords pairs;
    std::memcpy(&pairs, p, sizeof pairs);
    first = (Part)(pairs << 16);
    second = (Part)(pairs & 0xffff0000u);
}
inline void split(const float* p, Part& first, Part& second) {
    first = load_as<Part>(p);
    second = load_as<Part>(p + WIDTH);
}

// sums[t][c] += values[t][r] rows[r][c] for the columns of a block, a multiple of STEP; `next` are the rows that come after.
template <class W, int T>
inline void add_rows(const W* const* rows, const W* const* next, const float (*values)[AT_ONCE], int64_t columns, float* const* sums) {
#ifdef HAS_BF16_DOT
    if constexpr (sizeof(W) == 2) {
        __m512bh pairs[T][AT_ONCE / 2];
        for (int t = 0; t < T; t++)
            for (int r = 0; r < AT_ONCE / 2; r++) {
                uint32_t low, high;  // values are bfloat16 numbers
                std::memcpy(&low, &values[t][2 * r], sizeof low);
                std::memcpy(&high, &values[t][2 * r + 1], sizeof high);
                pairs[t][r] = (__m512bh)_mm512_set1_epi32((int)(low >> 16 | (high & 0xffff0000u)));
            }
        for (int64_t c = 0; c < columns; c += STEP) {
            __m512 low[T], high[T];
            for (int t = 0; t < T; t++) {
                low[t] = _mm512_loadu_ps(sums[t] + c);
                high[t] = _mm512_loadu_ps(sums[t] + c + LANES);
            }
            for (int r = 0; r < AT_ONCE; r += 2) {
                const __m512i a = _mm512_loadu_si512(rows[r] + c), b = _mm512_loadu_si512(rows[r + 1] + c);
                __builtin_prefetch(next[r] + c);
                __builtin_prefetch(next[r + 1] + c);
                const __m512bh ab = (__m512bh)_mm512_unpacklo_epi16(a, b), cd = (__m512bh)_mm512_unpackhi_epi16(a, b);
                for (int t = 0; t < T; t++) {
                    low[t] = _mm512_dpbf16_ps(low[t], ab, pairs[t][r / 2]);
                    high[t] = _mm512_dpbf16_ps(high[t], cd, pairs[t][r / 2]);
                }
            }
            for (int t = 0; t < T; t++) {
                _mm512_storeu_ps(sums[t] + c, low[t]);
                _mm512_storeu_ps(sums[t] + c + LANES, high[t]);
            }
        }
        return;
    }
#endif
    for (int64_t c = 0; c < columns; c += STEP) {
        Part first[T], second[T];
        for (int t = 0; t < T; t++) {
            first[t] = load_as<Part>(sums[t] + c);
            second[t] = load_as<Part>(sums[t] + c + WIDTH);
        }
#pragma GCC unroll 8
        for (int r = 0; r < AT_ONCE; r++) {
            Part a, b;
            split(rows[r] + c, a, b);
            __builtin_prefetch(next[r] + c);
            for (int t = 0; t < T; t++) {
                first[t] += a * values[t][r];
                second[t] += b * values[t][r];
            }
        }
        for (int t = 0; t < T; t++) {
            store(sums[t] + c, first[t]);
            store(sums[t] + c + WIDTH, second[t]);
        }
    }
}

// STEP sums, as `add_rows` left them, in the order of the columns.
template <class W>
inline void in_columns(const float* sums, float* out) {
#ifdef HAS_BF16_DOT
    if constexpr (sizeof(W) == 2) {
        Floats first = load(sums), second = load(sums + LANES);
        in_order(first, second);
        store(out, first);
        store(out + LANES, second);
        return;
    }
#endif
    for (int64_t i = 0; i < WIDTH; i++) {
        out[sizeof(W) == 2 ? 2 * i : i] = sums[i];
        out[sizeof(W) == 2 ? 2 * i + 1 : WIDTH + i] = sums[WIDTH + i];
    }
}

template <class W>
struct Product {
    const W* weight;
    int64_t stride, columns;
    std::vector<int32_t> rows;    // those that some token chose, those of each piece filled up to a multiple of AT_ONCE
    std::vector<int64_t> starts;  // where the groups of AT_ONCE rows of each piece begin in `rows`, and end
    std::vector<float> values;    // of every token, zero where it did not choose the row
    int tokens;
    int64_t blocks, pieces;

    int64_t column(int64_t block) const {  // where a block begins; inner borders are multiples of STEP
        const int64_t even = (columns + blocks - 1) / blocks;
        return std::min(columns, block * ((even + STEP - 1) / STEP * STEP));
    }

    // The sums of one piece of the list for one block: `out` holds the columns of every token.
    void add(int64_t block, int64_t piece, float* out) const {
        const int64_t first = column(block), last = column(block + 1), whole = first + (last - first) / STEP * STEP;
        const int64_t begin = starts[piece], end = starts[piece + 1];
        const int64_t padded = padded_columns();
        float* sums[TOKENS];
        for (int t = 0; t < tokens; t++) {
            sums[t] = out + t * padded + first;
            std::memset(sums[t], 0, (last - first) * sizeof(float));
        }
        for (int64_t g = begin; g < end; g++) {
            const int32_t *ids = rows.data() + AT_ONCE * g, *later = ids + (g + 1 < end ? AT_ONCE : 0);
            const W *now[AT_ONCE], *next[AT_ONCE];
            float own[TOKENS][AT_ONCE];
            for (int r = 0; r < AT_ONCE; r++) {
                now[r] = weight + ids[r] * stride + first;
                next[r] = weight + later[r] * stride + first;
                for (int t = 0; t < tokens; t++) own[t][r] = values[t * rows.size() + AT_ONCE * g + r];
            }
            const auto run = tokens == 1 ? add_rows<W, 1> : tokens == 2 ? add_rows<W, 2> : tokens == 3 ? add_rows<W, 3> : add_rows<W, 4>;
            run(now, next, own, whole - first, sums);
            for (int64_t c = whole - first; c < last - first; c++)
                for (int t = 0; t < tokens; t++)
                    for (int r = 0; r < AT_ONCE; r++) sums[t][c] += own[t][r] * to_float(now[r][c]);
        }
    }
    int64_t padded_columns() const { return (columns + LANES - 1) / LANES * LANES; }
};

inline void write(float v, float* y) { *y = v; }
inline void write(float v, bf16* y) { y->bits = (uint16_t)rounded(Floats{} + v)[0]; }

template <class W>
void run(const W* x, int64_t tokens, int64_t width, const float* norms, int64_t n, const W* weight, int64_t stride, int64_t columns,
         const W* bias, W* y, int threads) {
    Product<W> product{weight, stride, columns, {}, {}, {}, (int)tokens, 0, 0};
    std::vector<int32_t> keys(width), chosen[TOKENS];
    for (int64_t t = 0; t < tokens; t++) list_chosen(x + t * width, norms, width, n, keys.data(), chosen[t]);
    std::vector<int32_t> used = chosen[0];
    for (int64_t t = 1; t < tokens; t++) {
        std::vector<int32_t> both;
        std::set_union(used.begin(), used.end(), chosen[t].begin(), chosen[t].end(), std::back_inserter(both));
        used.swap(both);
    }
    product.blocks = (columns + BLOCK - 1) / BLOCK;
    product.pieces = std::max<int64_t>(1, std::min(TASKS / product.blocks, width / LEAST_ROWS));
    std::vector<char> fills;  // which rows only fill up
    for (int64_t p = 0, at = 0; p < product.pieces; p++) {
        product.starts.push_back((int64_t)product.rows.size() / AT_ONCE);
        for (const int64_t end = (p + 1) * width / product.pieces; at < (int64_t)used.size() && used[at] < end; at++)
            product.rows.push_back(used[at]);
        fills.resize(product.rows.size(), 0);
        while (product.rows.size() % AT_ONCE) product.rows.push_back(product.rows.back());
        fills.resize(product.rows.size(), 1);
    }
    const int64_t length = (int64_t)product.rows.size();
    product.starts.push_back(length / AT_ONCE);
    product.values.assign(tokens * length, 0.f);
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0, at = 0; i < length && at < (int64_t)chosen[t].size(); i++)
            if (!fills[i] && chosen[t][at] == product.rows[i]) {
                product.values[t * length + i] = to_float(x[t * width + product.rows[i]]);
                at++;
            }
    const int64_t padded = product.padded_columns(), tasks = product.blocks * product.pieces;
    const Lines<float> sums(product.pieces * tokens * padded);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
    for (int64_t i = 0; i < tasks; i++)
        product.add(i / product.pieces, i % product.pieces, sums.get() + i % product.pieces * tokens * padded);
    for (int64_t t = 0; t < tokens; t++) {
        float* total = sums.get() + t * padded;
        for (int64_t p = 1; p < product.pieces; p++) {
            const float* more = total + p * tokens * padded;
            for (int64_t c = 0; c < columns; c++) total[c] += more[c];
        }
        for (int64_t b = 0; b < product.blocks; b++) {
            const int64_t first = product.column(b), last = product.column(b + 1);
            for (int64_t c = first; c < last; c += STEP) {
                float ordered[STEP];
                if (c + STEP <= last)
                    in_columns<W>(total + c, ordered);
                else
                    std::memcpy(ordered, total + c, (last - c) * sizeof(float));
                for (int64_t i = 0; i < std::min(STEP, last - c); i++)
                    write(ordered[i] + (bias ? to_float(bias[c + i]) : 0.f), y + t * columns + c + i);
            }
        }
    }
}

// By their bits, which compilers do many at once.
inline bf16 kept(bf16 v, bool keeps) { return {(uint16_t)(v.bits & -(uint16_t)keeps)}; }
inline float kept(float v, bool keeps) { return keeps ? v : 0.f; }

// y = x, with zeros in place of all numbers but the n largest of each token.
template <class W>
void keep_chosen(const W* x, int64_t tokens, int64_t width, const float* norms, int64_t n, W* y, int threads) {
    std::vector<int32_t> all_keys(threads * width);
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t t = 0; t < tokens; t++) {
        const W* from = x + t * width;
        W* to = y + t * width;
        int32_t* keys = all_keys.data() + this_thread() * width;
        Border border = choose(from, norms, width, n, keys);
        for (int64_t i = 0; i < width; i++) to[i] = kept(from[i], keys[i] > border.last);
        for (int64_t i = 0; border.equal > 0; i++)
            if (keys[i] == border.last) {
                to[i] = from[i];
                border.equal--;
            }
    }
}

}  // namespace

// Up to four tokens x [tokens, width], n inputs of each, weight [width, columns] with `stride` numbers from one input to the next.
// 0: done; 1: not enough memory.
extern "C" int tomoe_inputs(int is_bf16, const void* x, int64_t tokens, int64_t width, const float* norms, int64_t n, const void* weight,
                            int64_t stride, int64_t columns, const void* bias, void* y, int threads) {
    try {
        if (is_bf16)
            run((const bf16*)x, tokens, width, norms, n, (const bf16*)weight, stride, columns, (const bf16*)bias, (bf16*)y, threads);
        else
            run((const float*)x, tokens, width, norms, n, (const float*)weight, stride, columns, (const float*)bias, (float*)y, threads);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}

// The same choice for any number of tokens x [tokens, width]: y of the same shape. 0: done; 1: not enough memory.
extern "C" int tomoe_chosen(int is_bf16, const void* x, int64_t tokens, int64_t width, const float* norms, int64_t n, void* y, int threads) {
    try {
        if (is_bf16)
            keep_chosen((const bf16*)x, tokens, width, norms, n, (bf16*)y, threads);
        else
            keep_chosen((const float*)x, tokens, width, norms, n, (float*)y, threads);
    } catch (const std::bad_alloc&) {
        return 1;
    }
    return 0;
}
