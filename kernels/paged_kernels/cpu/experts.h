// Mixtures of experts: which experts a row is given to, rows grouped by expert, and the sum of their results.
//
// Invariance: a row's route depends on its logits alone, its experts' results on the row alone (products.h), and they
// are added by ascending expert. So a row's bits do not depend on which rows chose the same expert.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "integers.h"
#include "products.h"

namespace quire {

enum Scoring { SOFTMAX = 0, SIGMOID = 1 };

// Scores of experts, and the choice of `chosen` of them.
struct Routing {
  int experts, chosen, scoring;
  bool normalised;         // weights of a row are divided by their sum
  int groups, kept, best;  // experts are chosen from the `kept` groups with the highest sums of `best` scores; 1 group: from all
  float scale;
  const float* bias;  // of scores, for the choice alone; or null

  // Writes the chosen experts and their weights. `scores`: at first logits, [experts]; `keys`: memory of that size.
  // Ties, and logits that are not numbers, give some experts.
  void choose(float* scores, float* keys, int32_t* numbers, float* weights) const {
    score(scores);
    for (int e = 0; e < experts; ++e) keys[e] = scores[e] + (bias ? bias[e] : 0.0f);
    if (groups > 1) drop_groups(keys);
    float total = 0.0f;
    for (int rank = 0; rank < chosen; ++rank) {
      numbers[rank] = highest(keys, numbers, rank);
      weights[rank] = scores[numbers[rank]];
      total += weights[rank];
    }
    for (int rank = 0; rank < chosen; ++rank) weights[rank] *= normalised ? scale / (total + 1e-20f) : scale;
  }

 private:
  void score(float* scores) const {
    float most = -std::numeric_limits<float>::infinity(), total = 0.0f;
    for (int e = 0; e < experts; ++e) most = std::max(most, scores[e]);
    for (int e = 0; e < experts; e += LANES) {
      const int count = std::min(LANES, experts - e);
      auto* at = reinterpret_cast<Float32*>(scores + e);
      const Vec x = load_vec(at, count);
      store_vec(at, scoring == SIGMOID ? sigmoid(x) : exp_vec(x - most), count);
    }
    if (scoring == SIGMOID) return;
    for (int e = 0; e < experts; ++e) total += scores[e];
    for (int e = 0; e < experts; ++e) scores[e] /= total;
  }

  // The first highest key that is not among the first `taken` of `numbers`.
  int highest(const float* keys, const int32_t* numbers, int taken) const {
    int found = -1;
    for (int e = 0; e < experts; ++e)
      if ((found < 0 || keys[e] > keys[found]) && std::find(numbers, numbers + taken, e) == numbers + taken) found = e;
    return found;
  }

  void drop_groups(float* keys) const {
    const int size = experts / groups;
    std::vector<float> sums(size_t(groups), 0.0f), sorted(static_cast<size_t>(size));
    std::vector<int> order(static_cast<size_t>(groups));
    for (int g = 0; g < groups; ++g) {
      order[g] = g;
      std::partial_sort_copy(keys + g * size, keys + (g + 1) * size, sorted.begin(), sorted.begin() + best, above);
      for (int i = 0; i < best; ++i) sums[g] += sorted[i];
    }
    std::sort(order.begin(), order.end(), [&](int a, int b) {
      return above(sums[a], sums[b]) || (a < b && !above(sums[b], sums[a]));
    });
    for (int i = kept; i < groups; ++i)
      std::fill_n(keys + order[i] * size, size, -std::numeric_limits<float>::infinity());
  }

  // A strict order of all floats: those that are not numbers come last.
  static bool above(float a, float b) { return a > b || (a == a && b != b); }
};

// The routes of a step's rows, in memory of `bytes`. An entry is a row at one of its experts; entries are in the order of
// experts, and within an expert of rows. A block is up to BLOCK_ROWS entries of one expert.
struct Routes {
  struct Block { int32_t expert, first, count; };

  int64_t tokens = 0;
  int experts = 0, chosen = 0;
  float *logits, *keys, *weights;       // [tokens, experts], the same, [tokens, chosen]
  int32_t *numbers, *rows, *entries;    // [tokens, chosen]; row of each entry; entry of each row's choices, by ascending expert
  int32_t *begins, *num_blocks;         // first entry of each expert
  Block* blocks;

  static size_t bytes(int64_t tokens, int experts, int chosen) {
    const size_t entries = size_t(tokens) * chosen;
    return 4 * (2 * size_t(tokens) * experts + 4 * entries + experts + 2) + sizeof(Block) * most_blocks(entries, experts);
  }
  static Routes in(char* memory, int64_t tokens, int experts, int chosen) {
    Routes made;
    const size_t entries = size_t(tokens) * chosen;
    made.tokens = tokens, made.experts = experts, made.chosen = chosen;
    made.logits = reinterpret_cast<float*>(memory);
    made.keys = made.logits + tokens * experts;
    made.weights = made.keys + tokens * experts;
    made.numbers = reinterpret_cast<int32_t*>(made.weights + entries);
    made.rows = made.numbers + entries;
    made.entries = made.rows + entries;
    made.begins = made.entries + entries;
    made.num_blocks = made.begins + experts + 1;
    made.blocks = reinterpret_cast<Block*>(made.num_blocks + 1);
    return made;
  }

  // Puts a row's choices into the order of their experts, and rounds the weights to E if `rounds`.
  template <class E> void finish_row(int64_t row, bool rounds) const {
    int32_t* at = numbers + row * chosen;
    float* weight = weights + row * chosen;
    for (int i = 1; i < chosen; ++i)
      for (int j = i; j > 0 && at[j - 1] > at[j]; --j) std::swap(at[j - 1], at[j]), std::swap(weight[j - 1], weight[j]);
    for (int i = 0; rounds && i < chosen; ++i) {
      E kept;
      store(kept, weight[i]);
      weight[i] = load(kept);
    }
  }

  void group() const {
    const int64_t count = tokens * chosen;
    std::fill(begins, begins + experts + 1, 0);
    for (int64_t i = 0; i < count; ++i) ++begins[numbers[i] + 1];
    *num_blocks = 0;
    for (int e = 0; e < experts; ++e) {
      const int32_t size = begins[e + 1];
      for (int32_t done = 0; done < size; done += BLOCK_ROWS)
        blocks[(*num_blocks)++] = {e, begins[e] + done, std::min<int32_t>(BLOCK_ROWS, size - done)};
      begins[e + 1] += begins[e];
    }
    for (int64_t i = 0; i < count; ++i) {
      entries[i] = begins[numbers[i]]++;
      rows[entries[i]] = int32_t(i / chosen);
    }
  }

 private:
  static size_t most_blocks(size_t entries, int experts) { return std::min(entries, experts + entries / BLOCK_ROWS); }
};

// The rows of a block side by side, copied into `memory` unless there is one alone.
template <class E>
PlainRows<E> gathered(const PlainRows<E>& rows, const int32_t* numbers, int count, std::vector<char>& memory) {
  if (count == 1) return rows.from(*numbers);
  memory.resize(count * rows.stride * sizeof(E));
  E* to = reinterpret_cast<E*>(memory.data());
  for (int i = 0; i < count; ++i) std::memcpy(to + i * rows.stride, rows.from(numbers[i]).at, rows.stride * sizeof(E));
  return {to, rows.stride};
}
inline IntegerRows gathered(const IntegerRows& rows, const int32_t* numbers, int count, std::vector<char>& memory) {
  if (count == 1) return rows.from(*numbers);
  const size_t group = rows.depth / rows.groups;
  memory.resize(IntegerRows::bytes(count, int(rows.depth), int(group)));
  const IntegerRows made = IntegerRows::in(memory.data(), count, int(rows.depth), int(group));
  for (int i = 0; i < count; ++i) {
    const IntegerRows from = rows.from(numbers[i]), to = made.from(i);
    std::memcpy(to.numbers, from.numbers, rows.depth);
    std::memcpy(to.scales, from.scales, rows.groups * sizeof *to.scales);
    std::memcpy(to.sums, from.sums, rows.groups * sizeof *to.sums);
  }
  return made;
}

// out (+)= sum of a row's experts' results `parts` [entries, width] times their weights, and of its row of `shared`, if that
// is not null, times the sigmoid of its element of `gates`, if that is not null. `rounds`: each expert's product is rounded.
template <class E>
struct Mixture {
  const E *parts, *shared, *gates;
  bool rounds;

  // `out`: the row's, `width` elements, a multiple of LANES.
  void mix(const Routes& routes, int64_t row, E* out, int width, bool adds) const {
    const int32_t* entries = routes.entries + row * routes.chosen;
    const float* weights = routes.weights + row * routes.chosen;
    const Vec gate = gates ? rounded<E>(sigmoid(splat(load(gates[row])))) : splat(1.0f);
    for (int d = 0; d < width; d += LANES) {
      Vec total = {};
      for (int i = 0; i < routes.chosen; ++i) {
        const Vec weighted = load_vec(parts + size_t(entries[i]) * width + d) * weights[i];
        total += rounds ? rounded<E>(weighted) : weighted;
      }
      total = rounded<E>(total);
      if (shared) total = rounded<E>(total + rounded<E>(load_vec(shared + size_t(row) * width + d) * gate));
      store_vec(out + d, adds ? total + load_vec(out + d) : total, LANES);
    }
  }
};

}  // namespace quire
