// Attention over blocks in place.
//
// Block layout: keys [kv_heads][head_dim][block_size], values [kv_heads][block_size][head_dim]. Keys lie transposed so that one
// vector holds the same element of 16 keys and a score needs no sum across lanes.
//
// Invariance: the result of (token, head) is a function of its query, keys and values alone. A score is a sum over head_dim in
// order; weights are summed in 16 lanes by key position; values are added in key order. Blocks, batch, threads, and which queries
// share a walk through the keys only decide who computes it and when. Hidden keys are never multiplied, so that stale NaNs cannot
// leak.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "vectors.h"

namespace quire {

struct Shape { int heads, kv_heads, head_dim, block_size; };
struct Rule { float scale; int window; float softcap; };  // window, softcap: 0 = none

constexpr int MOST_QUERIES = 12;  // that share a walk

// One layer's keys and values, and where a sequence's are.
template <class T>
struct Cache {
  const T *keys, *values;
  Shape shape;

  size_t key_at(int block, int kv_head) const {
    return (size_t(block) * shape.kv_heads + kv_head) * shape.head_dim * shape.block_size;
  }
};

// Room that a thread keeps between walks.
struct Scratch {
  std::vector<float> scores, queries, sums;

  float* scores_of(size_t count) { if (scores.size() < count) scores.resize(count); return scores.data(); }
};

// NQ queries of one sequence that share a kv head; query n stands at `positions[n]`, ascending.
template <class T, int NQ>
class Walk {
 public:
  Walk(const Cache<T>& cache, const int32_t* table, const Rule& rule, int kv_head, const int* positions, Scratch& scratch)
      : cache_(cache), table_(table), rule_(rule), dim_(cache.shape.head_dim), size_(cache.shape.block_size), kv_head_(kv_head) {
    for (int n = 0; n < NQ; ++n) {
      end_[n] = positions[n] + 1;
      first_[n] = rule.window > 0 ? std::max(0, end_[n] - rule.window) : 0;
    }
    stride_ = (end_[NQ - 1] + 2 * LANES) / LANES * LANES;
    scores_ = scratch.scores_of(size_t(stride_) * NQ);
  }

  // `query` and `out` [NQ][head_dim]; `out` is still to be divided by `total`.
  __attribute__((noinline)) void run(const float* query, float* out) {
    score(query);
    for (int n = 0; n < NQ; ++n) { finish(n); totals_[n] = softmax(n); }
    std::fill(out, out + size_t(NQ) * dim_, 0.0f);
    const int from = first_[NQ - 1], to = std::max(from, end_[0]);
    for (int n = 0; n < NQ; ++n) add_values_of(n, first_[n], std::min(from, end_[n]), out);
    add_values(from, to, out);
    for (int n = 0; n < NQ; ++n) add_values_of(n, std::max(to, first_[n]), end_[n], out);
  }

  // Sum of query n's weights. After `run`.
  float total(int n) const { return totals_[n]; }

 private:
  static constexpr int RUNS = NQ >= 8 ? 1 : NQ >= 4 ? 2 : 4;
  static constexpr int WIDTH = NQ >= 8 ? 2 : 4;  // vectors of values at once
  static constexpr int AHEAD = RUNS + 1;         // blocks
  static constexpr int LINE = 64;                // bytes

  float* scores_of(int n) const { return scores_ + size_t(n) * stride_; }

  // A run: up to 16 keys within one block, beginning at a multiple of 16 of the block. Returns keys in it.
  int run_at(int key, const T*& at) const {
    const int block = key / size_, offset = key % size_;
    at = cache_.keys + cache_.key_at(table_[block], kv_head_) + offset;
    return std::min(LANES, size_ - offset);
  }

  void score(const float* query) {
    // A block size that is no multiple of 16 gives short runs at the end of each block.
    int key = first_[0] / size_ * size_;
    key += (first_[0] - key) / LANES * LANES;
    const T* at[RUNS];
    int counts[RUNS], starts[RUNS], filled = 0;
    while (key < end_[NQ - 1]) {
      starts[filled] = key;
      counts[filled] = run_at(key, at[filled]);
      fetch(key);
      key += counts[filled];
      if (++filled == RUNS) { score_runs<RUNS>(query, at, counts, starts); filled = 0; }
    }
    for (int i = 0; i < filled; ++i) score_runs<1>(query, at + i, counts + i, starts + i);
  }

  // Blocks lie anywhere, so the processor does not guess what comes next: the values of a block whose keys are read now, and the
  // keys of one that is read soon.
  void fetch(int key) const {
    if (key % size_ && key != first_[0]) return;
    fetch_block(cache_.values, key);
    const int later = key + AHEAD * size_;
    if (later < end_[NQ - 1]) fetch_block(cache_.keys, later);
  }

  void fetch_block(const T* pool, int key) const {
    const char* at = reinterpret_cast<const char*>(pool + cache_.key_at(table_[key / size_], kv_head_));
    const int bytes = size_ * dim_ * int(sizeof(T));
    for (int line = 0; line < bytes; line += LINE) __builtin_prefetch(at + line, 0, 2);
  }

  template <int NT>
  void score_runs(const float* query, const T* const* at, const int* counts, const int* starts) {
    bool full = true;
    for (int t = 0; t < NT; ++t) full = full && counts[t] == LANES;
    if (full) score_runs<NT, true>(query, at, counts, starts);
    else score_runs<NT, false>(query, at, counts, starts);
  }

  template <int NT, bool FULL>
  void score_runs(const float* query, const T* const* at, const int* counts, const int* starts) {
    Vec acc[NT][NQ] = {};
    for (int d = 0; d < dim_; ++d)
      for (int t = 0; t < NT; ++t) {
        const Vec k = load_vec(at[t] + size_t(d) * size_, FULL ? LANES : counts[t]);
        for (int n = 0; n < NQ; ++n) acc[t][n] += query[n * dim_ + d] * k;
      }
    for (int t = 0; t < NT; ++t)
      for (int n = 0; n < NQ; ++n)
        std::memcpy(scores_of(n) + starts[t], &acc[t][n], size_t(FULL ? LANES : counts[t]) * sizeof(float));
  }

  // Scale, cap and mask in place; lanes from here on are absolute key positions modulo 16.
  void finish(int n) const {
    float* s = scores_of(n);
    const int begin = first_[n] / LANES * LANES, stop = (end_[n] + LANES - 1) / LANES * LANES;
    for (int k = begin; k < stop; k += LANES) {
      Vec v = load_vec(reinterpret_cast<Float32*>(s + k)) * rule_.scale;
      std::memcpy(s + k, &v, sizeof v);
    }
    if (rule_.softcap > 0)
      for (int k = first_[n]; k < end_[n]; ++k) s[k] = rule_.softcap * std::tanh(s[k] / rule_.softcap);
    const float hidden = -std::numeric_limits<float>::infinity();
    std::fill(s + begin, s + first_[n], hidden);
    std::fill(s + end_[n], s + stop, hidden);
  }

  // Scores to weights in place; returns their sum.
  float softmax(int n) const {
    float* s = scores_of(n);
    const int begin = first_[n] / LANES * LANES, stop = (end_[n] + LANES - 1) / LANES * LANES;
    Vec highest = splat(-std::numeric_limits<float>::infinity()), total = {};
    for (int k = begin; k < stop; k += LANES) {
      const Vec v = load_vec(reinterpret_cast<Float32*>(s + k));
      highest = v > highest ? v : highest;
    }
    const float top = most(highest);
    for (int k = begin; k < stop; k += LANES) {
      const Vec v = exp_vec(load_vec(reinterpret_cast<Float32*>(s + k)) - top);
      std::memcpy(s + k, &v, sizeof v);
      total += v;
    }
    return sum(total);
  }

  const T* values_at(int key) const {
    return cache_.values + cache_.key_at(table_[key / size_], kv_head_) + size_t(key % size_) * dim_;
  }

  // Weighted values of keys from .. to - 1, which every query sees, added to `out`.
  void add_values(int from, int to, float* out) const {
    if (from >= to) return;
    int d = 0;
    for (; d + WIDTH * LANES <= dim_; d += WIDTH * LANES) add_columns<WIDTH>(from, to, d, out);
    for (; d + LANES <= dim_; d += LANES) add_columns<1>(from, to, d, out);
    if (d < dim_)
      for (int n = 0; n < NQ; ++n) add_rest_of(n, from, to, d, out);
  }

  template <int NV>
  void add_columns(int from, int to, int d, float* out) const {
    Vec acc[NQ][NV];
    for (int n = 0; n < NQ; ++n)
      for (int v = 0; v < NV; ++v) std::memcpy(&acc[n][v], out + n * dim_ + d + v * LANES, sizeof(Vec));
    for (int key = from; key < to;) {
      const int count = std::min(size_ - key % size_, to - key);
      const T* at = values_at(key) + d;
      for (int k = key; k < key + count; ++k, at += dim_)
        for (int v = 0; v < NV; ++v) {
          const Vec value = load_vec(at + v * LANES);
          for (int n = 0; n < NQ; ++n) acc[n][v] += scores_[size_t(n) * stride_ + k] * value;
        }
      key += count;
    }
    for (int n = 0; n < NQ; ++n)
      for (int v = 0; v < NV; ++v) std::memcpy(out + n * dim_ + d + v * LANES, &acc[n][v], sizeof(Vec));
  }

  // The same for query n alone.
  void add_values_of(int n, int from, int to, float* out) const {
    if (from < to) add_rest_of(n, from, to, 0, out);
  }

  void add_rest_of(int n, int from, int to, int first_column, float* out) const {
    for (int key = from; key < to; ++key) {
      const T* at = values_at(key);
      const float weight = scores_of(n)[key];
      for (int d = first_column; d < dim_; d += LANES) {
        const int count = std::min(LANES, dim_ - d);
        Float32* sums = reinterpret_cast<Float32*>(out + n * dim_ + d);
        store_vec(sums, load_vec(sums, count) + weight * load_vec(at + d, count), count);
      }
    }
  }

  const Cache<T>& cache_;
  const int32_t* table_;
  const Rule& rule_;
  const int dim_, size_, kv_head_;
  int first_[NQ], end_[NQ], stride_;
  float* scores_;
  float totals_[NQ];
};

// Tokens of one sequence at consecutive positions that are attended for together.
struct Tile { int64_t token; int count; };

// Tokens per tile: as many as keep within MOST_QUERIES.
inline int tile_tokens(const Shape& shape) { return std::max(1, MOST_QUERIES / (shape.heads / shape.kv_heads)); }

// Where the packed tokens of a step live.
struct Places {
  const int32_t* tables;
  int64_t table_stride;
  const int32_t *sequences, *positions;
  const int64_t* slots;
  int64_t tokens;

  std::vector<Tile> tiles(const Shape& shape) const {
    const int most = tile_tokens(shape);
    std::vector<Tile> found;
    for (int64_t t = 0; t < tokens; ++t) {
      const bool goes_on = t > 0 && found.back().count < most && slots[t] >= 0 && slots[t - 1] >= 0 &&
                           sequences[t] == sequences[t - 1] && positions[t] == positions[t - 1] + 1;
      if (goes_on) ++found.back().count;
      else found.push_back({t, 1});
    }
    return found;
  }
};

// Queries and results of a step: rows of `stride` elements, heads side by side.
template <class Q>
struct Queries {
  const Q* query;
  size_t query_stride;
  Q* out;
  size_t out_stride;
};

// out = in / divisor.
template <class From, class To>
void convert(const From* in, To* out, int count, float divisor) {
  for (int d = 0; d < count; d += LANES) {
    const int lanes = std::min(LANES, count - d);
    store_vec(out + d, load_vec(in + d, lanes) / divisor, lanes);
  }
}

template <class Q, class T, int NQ>
void walk(const Queries<Q>& queries, const Cache<T>& cache, const Places& places, const Rule& rule, int kv_head, int64_t token,
          int first, Scratch& scratch) {
  const int dim = cache.shape.head_dim, group = cache.shape.heads / cache.shape.kv_heads;
  scratch.queries.resize(size_t(MOST_QUERIES) * dim);
  scratch.sums.resize(size_t(MOST_QUERIES) * dim);
  int positions[NQ];
  float *query = scratch.queries.data(), *sums = scratch.sums.data();
  for (int n = 0; n < NQ; ++n) {
    const int64_t t = token + (first + n) / group;
    const Q* q = queries.query + t * queries.query_stride + (size_t(kv_head) * group + (first + n) % group) * dim;
    convert(q, reinterpret_cast<Float32*>(query + n * dim), dim, 1.0f);
    positions[n] = places.positions[t];
  }
  const int32_t* table = places.tables + places.sequences[token] * places.table_stride;
  Walk<T, NQ> all(cache, table, rule, kv_head, positions, scratch);
  all.run(query, sums);
  for (int n = 0; n < NQ; ++n) {
    const int64_t t = token + (first + n) / group;
    Q* o = queries.out + t * queries.out_stride + (size_t(kv_head) * group + (first + n) % group) * dim;
    convert(reinterpret_cast<const Float32*>(sums + n * dim), o, dim, all.total(n));
  }
}

// All queries of one tile and kv head. A padding token's result is zero.
template <class Q, class T>
void attend(const Queries<Q>& queries, const Cache<T>& cache, const Places& places, const Rule& rule, const Tile& tile, int kv_head,
            Scratch& scratch) {
  const Shape& shape = cache.shape;
  const int group = shape.heads / shape.kv_heads, dim = shape.head_dim, total = tile.count * group;
  if (places.slots[tile.token] < 0) {
    std::fill_n(queries.out + tile.token * queries.out_stride + size_t(kv_head) * group * dim, size_t(group) * dim, Q{});
    return;
  }
  for (int first = 0; first < total;) {
    const int left = total - first;
#define QUIRE_WALK(NQ)                                                                        \
  if (left >= NQ) {                                                                           \
    walk<Q, T, NQ>(queries, cache, places, rule, kv_head, tile.token, first, scratch);         \
    first += NQ;                                                                              \
    continue;                                                                                 \
  }
    QUIRE_WALK(12) QUIRE_WALK(8) QUIRE_WALK(6) QUIRE_WALK(4) QUIRE_WALK(3) QUIRE_WALK(2) QUIRE_WALK(1)
#undef QUIRE_WALK
  }
}

// The key and value of one token and kv head into their slot.
template <class T>
void write_kv(const T* key, const T* value, T* keys, T* values, int64_t slot, int kv_head, const Shape& shape) {
  const int dim = shape.head_dim, size = shape.block_size;
  const int64_t block = slot / size, offset = slot % size;
  const size_t at = (size_t(block) * shape.kv_heads + kv_head) * dim * size;
  for (int d = 0; d < dim; ++d) keys[at + size_t(d) * size + offset] = key[d];
  std::memcpy(values + at + size_t(offset) * dim, value, size_t(dim) * sizeof(T));
}

}  // namespace quire
