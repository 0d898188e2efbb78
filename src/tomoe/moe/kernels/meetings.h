// Groups of neurons that meet the same tokens.

#pragma once
#include "vectors.h"

namespace {

// Neurons by the set of working experts that they belong to, in order of first appearance, each in blocks of 16.
struct Groups {
    std::vector<uint64_t> sets;
    std::vector<std::vector<int32_t>> rows;
    Groups(const uint64_t* members, int64_t neurons, uint64_t working) {
        std::vector<int32_t> slots(1024, -1);
        int32_t last = -1;
        for (int64_t u = 0; u < neurons; u++) {
            uint64_t set = members[u] & working;
            if (!set) continue;
            if (last < 0 || sets[last] != set) last = find(set, slots);
            rows[last].push_back((int32_t)u);
        }
    }
    int32_t find(uint64_t set, std::vector<int32_t>& slots) {
        if (2 * sets.size() >= slots.size()) {
            slots.assign(2 * slots.size(), -1);
            for (size_t g = 0; g < sets.size(); g++) slots[probe(sets[g], slots)] = (int32_t)g;
        }
        size_t i = probe(set, slots);
        if (slots[i] < 0) {
            slots[i] = (int32_t)sets.size();
            sets.push_back(set);
            rows.emplace_back();
        }
        return slots[i];
    }
    size_t probe(uint64_t set, const std::vector<int32_t>& slots) const {
        size_t i = (set * 0x9E3779B97F4A7C15ull) >> 40 & (slots.size() - 1);
        while (slots[i] >= 0 && sets[slots[i]] != set) i = (i + 1) & (slots.size() - 1);
        return i;
    }
};

struct List {
    const int32_t* first;
    size_t count;
    size_t size() const { return count; }
    const int32_t* data() const { return first; }
    int32_t operator[](size_t i) const { return first[i]; }
};

// Numbers by group, one list after another in memory. `walk` calls what it is given with each group and number.
struct Lists {
    std::vector<int32_t> numbers;
    std::vector<size_t> starts;
    template <class Walk>
    Lists(size_t groups, const Walk& walk) : starts(groups + 2, 0) {
        walk([&](size_t group, int32_t) { starts[group + 2]++; });
        for (size_t g = 2; g < starts.size(); g++) starts[g] += starts[g - 1];
        numbers.resize(starts.back());
        walk([&](size_t group, int32_t number) { numbers[starts[group + 1]++] = number; });
    }
    size_t size() const { return starts.size() - 2; }
    List operator[](size_t group) const { return {numbers.data() + starts[group], starts[group + 1] - starts[group]}; }
};

// Groups of neurons, and the tokens that meet each.
struct Meetings {
    Lists tokens, rows;
};

// `members`: the experts of each neuron as bits. A token has one expert.
inline Meetings meet_overlapping(const int64_t* expert_ids, int64_t num_tokens, int64_t neurons, const uint64_t* members) {
    uint64_t working = 0;
    for (int64_t t = 0; t < num_tokens; t++) working |= 1ull << expert_ids[t];
    const Groups groups(members, neurons, working);
    const size_t count = groups.sets.size();
    return {Lists(count, [&](const auto& add) {
                for (size_t g = 0; g < count; g++)
                    for (int64_t t = 0; t < num_tokens; t++)
                        if (groups.sets[g] >> expert_ids[t] & 1) add(g, (int32_t)t);
            }),
            Lists(count, [&](const auto& add) {
                for (size_t g = 0; g < count; g++)
                    for (int32_t row : groups.rows[g]) add(g, row);
            })};
}

// `members`: 1 + the expert of each neuron, 0 for those that all tokens use.
inline Meetings meet_fine(const int64_t* expert_ids, int64_t top_k, int64_t num_tokens, int64_t neurons, const uint64_t* members) {
    const size_t groups = 1 + *std::max_element(members, members + neurons);
    Lists tokens(groups, [&](const auto& add) {
        for (int64_t t = 0; t < num_tokens; t++) {
            add(0, (int32_t)t);
            for (int64_t k = 0; k < top_k; k++) add(1 + expert_ids[t * top_k + k], (int32_t)t);
        }
    });
    Lists rows(groups, [&](const auto& add) {
        for (int64_t u = 0; u < neurons; u++)
            if (tokens[members[u]].size()) add(members[u], (int32_t)u);
    });
    return {std::move(tokens), std::move(rows)};
}

}  // namespace
