// A walk through the keys and values of one sequence, in blocks where they lie, for queries that share a kv head.
//
// Block layout: keys [kv_heads][head_dim][block_size], values [kv_heads][block_size][head_dim]. Keys lie transposed so that one
// vector holds the same element of 16 keys and a score needs no sum across lanes. Of bfloat16 keys two elements lie together,
// [kv_heads][head_dim / 2][block_size][2], which is what processors multiply at once; a last odd element lies alone.
//
// Invariance: the result of (token, head) is a function of its query, keys and values alone. A score is a sum over head_dim in
// order; weights are summed in 16 lanes by key position; values are added in key order. Blocks, batch, threads, and which queries
// share a walk through the keys only decide who computes it and when. Hidden keys are never multiplied, so that stale NaNs cannot
// leak.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "products.h"

namespace quire {

struct Shape { int heads, kv_heads, head_dim, block_size; };
struct Rule { float scale; int window; float softcap; };  // window, softcap: 0 = none

// One layer's keys and values, and where a sequence's are.
template <class T>
struct Cache {
  const T *keys, *values;
  Shape shape;

  // Where a kv head of a block begins, among keys as among values.
  size_t head_at(int block, int kv_head) const {
    return (size_t(block) * shape.kv_heads + kv_head) * shape.head_dim * shape.block_size;
  }
};

// Elements of a key that lie together.
template <class T> constexpr int together() { return std::is_same_v<T, BFloat16> ? 2 : 1; }

// Where element d of a block's key `offset` is, from the beginning of its kv head.
template <class T> inline size_t key_element(int d, int offset, const Shape& shape) {
  constexpr int GROUP = together<T>();
  const int whole = shape.head_dim / GROUP * GROUP;
  if (d >= whole) return size_t(whole) * shape.block_size + size_t(d - whole) * shape.block_size + offset;
  return (size_t(d / GROUP) * shape.block_size + offset) * GROUP + d % GROUP;
}

// Room that a thread keeps between walks.
struct Scratch {
  std::vector<float> scores, queries, sums;
  std::vector<uint32_t> pairs;

  float* scores_of(size_t count) { if (scores.size() < count) scores.resize(count); return scores.data(); }
};

// Blocks of one kv head, those of keys first and then those of values: `count` of each, from `table` on.
//
// They lie anywhere, so the processor does not guess what comes next and must be told, early enough and little by little.
template <class T>
struct Chunks {
  const Cache<T>* cache;
  const int32_t* table;
  int kv_head, count;

  void fetch(int index) const {
    constexpr int LINE = 64;  // bytes
    if (index >= 2 * count) return;
    const T* pool = index < count ? cache->keys : cache->values;
    const char* at = reinterpret_cast<const char*>(pool + cache->head_at(table[index % count], kv_head));
    const int bytes = cache->shape.block_size * cache->shape.head_dim * int(sizeof(T));
    for (int byte = 0; byte < bytes; byte += LINE) ask_for(at + byte);
  }
};
constexpr int CHUNKS_AHEAD = 6;

// NQ queries of one sequence that share a kv head; query n stands at `positions[n]`, ascending. Q: what queries were stored as.
template <class Q, class T, int NQ>
class Walk {
 public:
  // `next`: what the thread will walk through after this.
  Walk(const Cache<T>& cache, const int32_t* table, const Rule& rule, int kv_head, const int* positions, const Chunks<T>& next,
       Scratch& scratch)
      : cache_(cache), table_(table), rule_(rule), next_(next), dim_(cache.shape.head_dim), size_(cache.shape.block_size),
        kv_head_(kv_head) {
    for (int n = 0; n < NQ; ++n) {
      end_[n] = positions[n] + 1;
      first_[n] = rule.window > 0 ? std::max(0, end_[n] - rule.window) : 0;
    }
    stride_ = (end_[NQ - 1] + 2 * LANES) / LANES * LANES;
    scores_ = scratch.scores_of(size_t(stride_) * NQ);
    if (MULTIPLIES_PAIRS) scratch.pairs.resize(size_t(NQ) * (dim_ / 2));
    pairs_ = scratch.pairs.data();
  }

  // `query` and `out` [NQ][head_dim]; `out` is still to be divided by `total`.
  __attribute__((noinline)) void run(const float* query, float* out) {
    if (MULTIPLIES_PAIRS)
      for (int n = 0; n < NQ; ++n)
        for (int d = 0; d < dim_ / 2; ++d)
          pairs_[n * (dim_ / 2) + d] = as_bits(query[n * dim_ + 2 * d]) >> 16 | (as_bits(query[n * dim_ + 2 * d + 1]) & 0xffff0000u);
    score(query);
    for (int n = 0; n < NQ; ++n) totals_[n] = softmax(n, finish(n));
    std::fill(out, out + size_t(NQ) * dim_, 0.0f);
    const int from = first_[NQ - 1], to = std::max(from, end_[0]);
    for (int n = 0; n < NQ; ++n) add_values_of(n, first_[n], std::min(from, end_[n]), out);
    add_values(from, to, out);
    for (int n = 0; n < NQ; ++n) add_values_of(n, std::max(to, first_[n]), end_[n], out);
  }

  // Sum of query n's weights. After `run`.
  float total(int n) const { return totals_[n]; }

 private:
  // Two bfloat16 elements at once lose nothing only of queries that are bfloat16 themselves.
  static constexpr bool MULTIPLIES_PAIRS = std::is_same_v<Q, BFloat16> && std::is_same_v<T, BFloat16>;
  static constexpr int RUNS = NQ >= 8 ? 2 : 4;
  static constexpr int WIDTH = NQ >= 8 ? 2 : 4;  // vectors of values at once

  float* scores_of(int n) const { return scores_ + size_t(n) * stride_; }

  // A run: up to 16 keys within one block, beginning at a multiple of 16 of the block.
  struct Run { const T* head; int offset, count, start; };

  Run run_at(int key) const {
    const int block = key / size_, offset = key % size_;
    return {cache_.keys + cache_.head_at(table_[block], kv_head_), offset, std::min(LANES, size_ - offset), key};
  }

  void score(const float* query) {
    // A block size that is no multiple of 16 gives short runs at the end of each block.
    int key = first_[0] / size_ * size_;
    key += (first_[0] - key) / LANES * LANES;
    Run runs[RUNS];
    int filled = 0;
    while (key < end_[NQ - 1]) {
      runs[filled] = run_at(key);
      if (key % size_ < LANES) fetch_after(key / size_ - first_[0] / size_);
      key += runs[filled].count;
      if (++filled == RUNS) { score_runs<RUNS>(query, runs); filled = 0; }
    }
    for (int i = 0; i < filled; ++i) score_runs<1>(query, runs + i);
  }

  // Block number `block` of keys (of values: behind those of keys) is being read: asks for one that comes some time later.
  void fetch_after(int block) const {
    const int first = first_[0] / size_, count = (end_[NQ - 1] - 1) / size_ - first + 1, wanted = block + CHUNKS_AHEAD;
    if (wanted < 2 * count) Chunks<T>{&cache_, table_ + first, kv_head_, count}.fetch(wanted);
    else next_.fetch(wanted - 2 * count);
  }

  template <int NT>
  void score_runs(const float* query, const Run* runs) {
    bool full = true;
    for (int t = 0; t < NT; ++t) full = full && runs[t].count == LANES;
    if (full) score_runs<NT, true>(query, runs);
    else score_runs<NT, false>(query, runs);
  }

  template <int NT, bool FULL>
  void score_runs(const float* query, const Run* runs) {
    constexpr int GROUP = together<T>();
    Vec acc[NT][NQ] = {};
    int d = 0;
    for (; d + GROUP <= dim_; d += GROUP)
      for (int t = 0; t < NT; ++t)
        multiply<FULL>(query, d, runs[t].head + (size_t(d / GROUP) * size_ + runs[t].offset) * GROUP, runs[t].count, acc[t]);
    for (; d < dim_; ++d)
      for (int t = 0; t < NT; ++t) {
        const Vec k = load_vec(runs[t].head + key_element<T>(d, runs[t].offset, cache_.shape), runs[t].count);
        for (int n = 0; n < NQ; ++n) acc[t][n] += query[n * dim_ + d] * k;
      }
    for (int t = 0; t < NT; ++t)
      for (int n = 0; n < NQ; ++n)
        std::memcpy(scores_of(n) + runs[t].start, &acc[t][n], size_t(FULL ? LANES : runs[t].count) * sizeof(float));
  }

  // Elements d (and d + 1 where two lie together) of up to 16 keys times those of each query.
  template <bool FULL>
  void multiply(const float* query, int d, const T* keys, int count, Vec* acc) const {
    if constexpr (together<T>() == 1) {
      const Vec k = load_vec(keys, FULL ? LANES : count);
      for (int n = 0; n < NQ; ++n) acc[n] += query[n * dim_ + d] * k;
    } else {
      UintVec k = {};
      std::memcpy(&k, keys, FULL ? sizeof k : size_t(count) * 2 * sizeof(T));
      if constexpr (MULTIPLIES_PAIRS) {
        for (int n = 0; n < NQ; ++n) acc[n] = multiply_pairs(acc[n], pairs_[n * (dim_ / 2) + d / 2], k);
      } else {
        const Vec left = as<Vec>(k << 16), right = as<Vec>(k & 0xffff0000u);
        for (int n = 0; n < NQ; ++n) acc[n] = acc[n] + query[n * dim_ + d] * left + query[n * dim_ + d + 1] * right;
      }
    }
  }

  // Scales, caps and masks scores in place; lanes from here on are absolute key positions modulo 16. Returns the highest.
  float finish(int n) const {
    float* s = scores_of(n);
    const int begin = first_[n] / LANES * LANES, stop = (end_[n] + LANES - 1) / LANES * LANES;
    const float hidden = -std::numeric_limits<float>::infinity();
    std::fill(s + begin, s + first_[n], hidden);
    std::fill(s + end_[n], s + stop, hidden);
    Vec highest = splat(hidden);
    for (int k = begin; k < stop; k += LANES) {
      Vec v = load_vec(reinterpret_cast<Float32*>(s + k)) * rule_.scale;
      if (rule_.softcap > 0) v = rule_.softcap * tanh_vec(v / rule_.softcap);
      // Minus infinity comes out of the cap as a number.
      if (rule_.softcap > 0 && (k < first_[n] || k + LANES > end_[n]))
        for (int i = 0; i < LANES; ++i) if (k + i < first_[n] || k + i >= end_[n]) v[i] = hidden;
      std::memcpy(s + k, &v, sizeof v);
      highest = v > highest ? v : highest;
    }
    return most(highest);
  }

  // Scores to weights in place; returns their sum. `top`: the highest score.
  float softmax(int n, float top) const {
    float* s = scores_of(n);
    const int begin = first_[n] / LANES * LANES, stop = (end_[n] + LANES - 1) / LANES * LANES;
    Vec total = {};
    for (int k = begin; k < stop; k += LANES) {
      const Vec v = exp_vec(load_vec(reinterpret_cast<Float32*>(s + k)) - top);
      std::memcpy(s + k, &v, sizeof v);
      total += v;
    }
    return sum(total);
  }

  const T* values_at(int key) const {
    return cache_.values + cache_.head_at(table_[key / size_], kv_head_) + size_t(key % size_) * dim_;
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
    const int behind_keys = (end_[NQ - 1] - 1) / size_ - 2 * (first_[0] / size_) + 1;
    for (int key = from; key < to;) {
      const int count = std::min(size_ - key % size_, to - key);
      if (d == 0) fetch_after(key / size_ + behind_keys);
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
  const Chunks<T>& next_;
  const int dim_, size_, kv_head_;
  int first_[NQ], end_[NQ], stride_;
  float* scores_;
  uint32_t* pairs_;
  float totals_[NQ];
};

}  // namespace quire
