// A walk over the keys and values of one sequence, in place in its blocks, for queries that share a kv head.
//
// Block layout: keys [kv_heads][head_dim][block_size], values [kv_heads][block_size][head_dim]. Keys are
// transposed so that one vector holds the same element of 16 keys and a score needs no sum across lanes.
// bfloat16 keys store two elements together, [kv_heads][head_dim / 2][block_size][2], the pairs that
// processors multiply at once; a last odd element is stored alone. Of int8 and float8, each kv head of a block ends
// with the scales of its keys, or of its values: float32 [block_size]. A score is multiplied with its key's scale, a
// weight with its value's, so that numbers are multiplied as they are.
//
// Keys are processed in parts of PART: scores, their softmax and weighted values of one part, then the next
// part, scaling earlier sums wherever the highest score grew.
//
// Invariance: the result of (token, head) is a function of its query, keys and values alone. Parts begin at
// the same positions for all sequences. A score is a sum over head_dim in order; weights are summed in 16
// lanes by key position; values are added in key order, or, where processors multiply pairs, in pairs of an
// even position and the next. Blocks, batch, threads and the set of queries that share a walk only determine
// when and on which thread it is computed. Hidden keys are never multiplied, so that stale NaNs cannot leak.
#pragma once

#include <algorithm>
#include <vector>

#include "softmax.h"
#include "units.h"

namespace quire {

constexpr int PART = 256;         // keys
constexpr int MOST_QUERIES = 12;  // sharing a walk
constexpr int SLICE = 32;         // adjacent units of a query

// The most queries of one walk, and the vectors of sums that each of `queries` has at once, for which there are
// registers.
#ifdef QUIRE_AVX512
constexpr int MOST_IN_WALK = MOST_QUERIES;
constexpr int vectors_each(int queries) { return queries >= 8 ? 2 : 4; }
#else
constexpr int MOST_IN_WALK = 6;
constexpr int vectors_each(int queries) { return queries >= 4 ? 1 : queries >= 2 ? 2 : 4; }
#endif

// Compilers keep arrays of sums in registers if loops over them are unrolled early.
#define QUIRE_UNROLLED _Pragma("GCC unroll 16")

struct Shape { int heads, kv_heads, head_dim, block_size; };

template <class T> constexpr bool has_scales() { return std::is_same_v<T, Int8> || std::is_same_v<T, Float8>; }

// Elements of a block's kv head, its scales included.
template <class T> inline size_t head_elements(const Shape& shape) {
  return size_t(shape.head_dim + (has_scales<T>() ? sizeof(float) : 0)) * shape.block_size;
}

// The scale of key or value `offset` of a block's kv head. Not aligned.
template <class T> inline T* scale_at(T* head, int offset, const Shape& shape) {
  return head + size_t(shape.head_dim) * shape.block_size + size_t(offset) * sizeof(float);
}

// One layer's keys and values, and their addresses.
template <class T>
struct Cache {
  const T *keys, *values;
  Shape shape;

  // Offset of a block's kv head, in keys as in values.
  size_t head_at(int block, int kv_head) const {
    return (size_t(block) * shape.kv_heads + kv_head) * head_elements<T>(shape);
  }
};

// Offset of element d of a block's key `offset`, from the start of its kv head.
template <class T> inline size_t key_element(int d, int offset, const Shape& shape) {
  constexpr int GROUP = together<T>();
  const int whole = shape.head_dim / GROUP * GROUP;
  if (d >= whole) return size_t(whole) * shape.block_size + size_t(d - whole) * shape.block_size + offset;
  return (size_t(d / GROUP) * shape.block_size + offset) * GROUP + d % GROUP;
}

// Blocks of one kv head, `count` from `table` on.
//
// They are scattered in memory, which defeats hardware prefetching: they are prefetched explicitly, early and
// in small steps.
template <class T>
struct Chunks {
  const Cache<T>* cache;
  const int32_t* table;
  int kv_head, count;

  // Prefetches a block of keys or of values.
  __attribute__((always_inline)) void fetch(const T* pool, int index) const {
    constexpr int LINE = 64;  // bytes
    if (index < 0 || index >= count) return;
    const char* at = reinterpret_cast<const char*>(pool + cache->head_at(table[index], kv_head));
    const int bytes = int(head_elements<T>(cache->shape) * sizeof(T));
    for (int byte = 0; byte < bytes; byte += LINE) ask_for(at + byte);
  }
};
constexpr int CHUNKS_AHEAD = 3;

// Blocks that a thread reads now, from the sequence's block `first` on, and those it reads afterwards.
template <class T>
struct Route {
  Chunks<T> now, next;
  int first;

  // Prefetches the block that is read CHUNKS_AHEAD blocks after `block`.
  __attribute__((always_inline)) void fetch_after(const T* pool, int block) const {
    const int wanted = block - first + CHUNKS_AHEAD;
    if (wanted < now.count) now.fetch(pool, wanted);
    else next.fetch(pool, wanted - now.count);
  }
};

// Queries that share a kv head, and their sums so far. Memory that a thread keeps.
struct Scratch {
  std::vector<uint32_t> units;  // [slices][queries][SLICE]
  std::vector<float> sums;      // [queries][width]: of weighted values
  std::vector<Softmax> softmax;
  std::vector<int> first, end;  // keys that a query sees; ascending within a walk
  std::vector<char> nothing;    // zeros, for a hidden row of values
  int queries = 0, width = 0;
  alignas(64) float scores[MOST_QUERIES][PART];
};

// `NQ` queries from `base` on, over parts of a sequence's keys.
template <class Q, class T, int NQ>
class Walk {
 public:
  // `route`: null if all blocks have been prefetched already.
  Walk(const Cache<T>& cache, const int32_t* table, const Rule& rule, int kv_head, const Route<T>* route, Scratch& all, int base)
      : cache_(cache), table_(table), rule_(rule), route_(route), all_(all), base_(base), dim_(cache.shape.head_dim),
        size_(cache.shape.block_size), kv_head_(kv_head) {}

  // Processes those of keys start .. start + PART - 1 that the queries see.
  __attribute__((noinline)) void run(int start) {
    start_ = start;
    const int from = std::max(start, all_.first[base_]), to = std::min(start + PART, all_.end[base_ + NQ - 1]);
    if (from >= to) return;
    score(from, to);
    for (int n = 0; n < NQ; ++n)
      if (begin_of(n) < end_of(n)) weigh(n);
    constexpr int KEYS = U::KEYS;
    const int first = (begin_of(NQ - 1) + KEYS - 1) / KEYS * KEYS, last = std::max(first, end_of(0) / KEYS * KEYS);
    for (int n = 0; n < NQ; ++n) add_values<1>(n, begin_of(n), std::min(first, end_of(n)));
    add_values<NQ>(0, first, last);
    for (int n = 0; n < NQ; ++n) add_values<1>(n, std::max(last, begin_of(n)), end_of(n));
  }

 private:
  using U = Units<Q, T>;
  using Element = typename U::Element;
  static constexpr int RUNS = vectors_each(NQ);

  int begin_of(int n) const { return std::max(start_, all_.first[base_ + n]); }
  int end_of(int n) const { return std::min(start_ + PART, all_.end[base_ + n]); }
  float* sums_of(int n) const { return all_.sums.data() + size_t(base_ + n) * all_.width; }

  // A run: up to 16 keys within one block.
  struct Run { const T* head; int offset, count, start; };

  // Hidden keys of the run are scored too; the scores are not used.
  Run run_at(int key) const {
    const int offset = key % size_;
    const int count = std::min({LANES, size_ - offset, start_ + PART - key});
    return {cache_.keys + cache_.head_at(table_[key / size_], kv_head_), offset, count, key};
  }

  void score(int from, int to) const {
    Run runs[RUNS];
    int filled = 0;
    for (int key = from; key < to; key += runs[filled - 1].count) {
      if (filled == RUNS) { score_runs<RUNS>(runs); filled = 0; }
      runs[filled] = run_at(key);
      if (route_ && (key == from || runs[filled].offset < LANES)) route_->fetch_after(cache_.keys, key / size_);
      ++filled;
    }
    if (filled == RUNS) return score_runs<RUNS>(runs);
    for (int i = 0; i < filled; ++i) score_runs<1>(runs + i);
  }

  template <int NT>
  void score_runs(const Run* runs) const {
    bool full = true;
    for (int t = 0; t < NT; ++t) full = full && runs[t].count == LANES;
    if (full) score_runs<NT, true>(runs);
    else score_runs<NT, false>(runs);
  }

  template <int NT, bool FULL>
  void score_runs(const Run* runs) const {
    constexpr int STORED = U::DEPTH * U::IN_STORED;  // adjacent elements
    const int units = dim_ / STORED * U::IN_STORED, step = size_ * together<T>();
    Vec acc[NT][NQ];
    QUIRE_UNROLLED
    for (int t = 0; t < NT; ++t)
      QUIRE_UNROLLED
      for (int n = 0; n < NQ; ++n) acc[t][n] = Vec{};
    const T* at[NT];
    for (int t = 0; t < NT; ++t) at[t] = runs[t].head + size_t(runs[t].offset) * together<T>();
    const uint32_t* query = all_.units.data() + size_t(base_) * SLICE;
    for (int first = 0; first < units; first += SLICE, query += size_t(all_.queries) * SLICE) {
      const int count = std::min(SLICE, units - first);
      for (int u = 0; u < count; u += U::IN_STORED) {
        UintVec stored[NT];
        QUIRE_UNROLLED
        for (int t = 0; t < NT; ++t) {
          stored[t] = load_keys(at[t], FULL ? LANES : runs[t].count);
          at[t] += step;
        }
        QUIRE_UNROLLED
        for (int i = 0; i < U::IN_STORED; ++i) {
          UintVec keys[NT];
          QUIRE_UNROLLED
          for (int t = 0; t < NT; ++t) keys[t] = U::part(stored[t], i);
          QUIRE_UNROLLED
          for (int n = 0; n < NQ; ++n) {
            const UintVec q = splat_as<UintVec>(query[n * SLICE + u + i]);
            QUIRE_UNROLLED
            for (int t = 0; t < NT; ++t) acc[t][n] = Factors<Element>::add(acc[t][n], q, keys[t]);
          }
        }
      }
    }
    if constexpr (has_scales<T>())
      for (int t = 0; t < NT; ++t) {
        const Vec scales = scales_of(runs[t].head, runs[t].offset, FULL ? LANES : runs[t].count);
        QUIRE_UNROLLED
        for (int n = 0; n < NQ; ++n) acc[t][n] = acc[t][n] * scales;
      }
    QUIRE_UNROLLED
    for (int t = 0; t < NT; ++t)
      QUIRE_UNROLLED
      for (int n = 0; n < NQ; ++n)
        put_vector(&all_.scores[n][runs[t].start - start_], acc[t][n], size_t(FULL ? LANES : runs[t].count) * sizeof(float));
    if (dim_ % STORED) add_last(runs, NT);
  }

  // The last element of keys, if it is stored alone.
  __attribute__((noinline)) void add_last(const Run* runs, int count) const {
    const int unit = (dim_ - 1) / U::DEPTH;
    const uint32_t* query = all_.units.data() + (size_t(unit / SLICE) * all_.queries + base_) * SLICE + unit % SLICE;
    for (const Run* run = runs; run < runs + count; ++run) {
      const auto keys = as<UintVec>(load_vec(run->head + key_element<T>(dim_ - 1, run->offset, cache_.shape), run->count));
      for (int n = 0; n < NQ; ++n) {
        Float32* scores = reinterpret_cast<Float32*>(&all_.scores[n][run->start - start_]);
        const Vec before = load_vec(scores, run->count);
        store_vec(scores, Factors<Float32>::add(before, splat_as<UintVec>(query[n * SLICE]), keys), run->count);
      }
    }
  }

  // Converts query n's scores to weights.
  void weigh(int n) {
    const int begin = begin_of(n) - start_, end = end_of(n) - start_;
    const float factor = all_.softmax[base_ + n].weigh(all_.scores[n], begin, end, rule_);
    if constexpr (has_scales<T>()) scale_weights(n);
    U::keep_weights(all_.scores[n], begin / GRAIN * GRAIN, (end + GRAIN - 1) / GRAIN * GRAIN);
    if (factor == 1.0f) return;
    float* sums = sums_of(n);
    for (int d = 0; d < all_.width; ++d) sums[d] *= factor;
  }

  Vec scales_of(const T* head, int offset, int count) const {
    return vector_at<Vec>(scale_at(head, offset, cache_.shape), size_t(count) * sizeof(float));
  }

  // Multiplies query n's weights with the scales of their values.
  void scale_weights(int n) {
    const int end = end_of(n);
    for (int key = begin_of(n), count; key < end; key += count) {
      count = std::min({LANES, size_ - key % size_, end - key});
      Float32* weights = reinterpret_cast<Float32*>(all_.scores[n] + key - start_);
      const T* head = cache_.values + cache_.head_at(table_[key / size_], kv_head_);
      store_vec(weights, load_vec(weights, count) * scales_of(head, key % size_, count), count);
    }
  }

  // Rows of values for `count` consecutive units of keys; one row of a pair may be hidden.
  struct Rows { const T *row, *next; int count; };

  const T* values_at(int key) const {
    return cache_.values + cache_.head_at(table_[key / size_], kv_head_) + size_t(key % size_) * dim_;
  }

  __attribute__((always_inline)) Rows rows_at(int key, int to) const {
    const int inside = std::min(size_ - key % size_, to - key);
    if constexpr (U::KEYS == 1) {
      return {values_at(key), nullptr, inside};
    } else {
      const T* zeros = reinterpret_cast<const T*>(all_.nothing.data());
      if (key % 2) return {zeros, values_at(key), 1};
      if (key + 1 == to) return {values_at(key), zeros, 1};
      return {values_at(key), values_at(key + 1), std::max(1, inside / 2)};
    }
  }

  // Adds the weighted values of keys from .. to - 1 to the sums of N queries from n on, all of which see
  // them.
  template <int N>
  void add_values(int n, int from, int to) const {
    if (from >= to) return;
    constexpr int GROUPS = vectors_each(N) / U::VECS;
    int d = 0;
    for (; d + GROUPS * U::COLUMNS <= dim_; d += GROUPS * U::COLUMNS) add_columns<N, GROUPS, true>(n, from, to, d);
    for (; d + U::COLUMNS <= dim_; d += U::COLUMNS) add_columns<N, 1, true>(n, from, to, d);
    if (d < dim_) add_columns<N, 1, false>(n, from, to, d);
  }

  template <int N, int GROUPS, bool FULL>
  void add_columns(int n, int from, int to, int d) const {
    constexpr int VECS = GROUPS * U::VECS;
    Vec acc[N][VECS];
    QUIRE_UNROLLED
    for (int i = 0; i < N; ++i)
      QUIRE_UNROLLED
      for (int v = 0; v < VECS; ++v) acc[i][v] = vector_at<Vec>(sums_of(n + i) + d + v * LANES);
    const int columns = FULL ? U::COLUMNS : dim_ - d;
    for (int key = from; key < to;) {
      Rows rows = rows_at(key, to);
      if (route_ && N == NQ && d == 0 && key % size_ < U::KEYS) route_->fetch_after(cache_.values, key / size_);
      const float* weights = all_.scores[n] + (key - start_) / U::KEYS;
      const T *row = rows.row + d, *next = rows.next + d;
      for (int u = 0; u < rows.count; ++u, row += U::KEYS * dim_, next += U::KEYS * dim_) {
        UintVec values[VECS];
        QUIRE_UNROLLED
        for (int g = 0; g < GROUPS; ++g) U::load_values(row + g * U::COLUMNS, next + g * U::COLUMNS, columns, values + g * U::VECS);
        QUIRE_UNROLLED
        for (int i = 0; i < N; ++i) {
          const UintVec weight = as<UintVec>(splat(weights[i * PART + u]));
          QUIRE_UNROLLED
          for (int v = 0; v < VECS; ++v) acc[i][v] = Factors<Element>::add(acc[i][v], weight, values[v]);
        }
      }
      key = key / U::KEYS * U::KEYS + U::KEYS * rows.count;
    }
    QUIRE_UNROLLED
    for (int i = 0; i < N; ++i)
      QUIRE_UNROLLED
      for (int v = 0; v < VECS; ++v) put_vector(sums_of(n + i) + d + v * LANES, acc[i][v]);
  }

  const Cache<T>& cache_;
  const int32_t* table_;
  const Rule& rule_;
  const Route<T>* route_;
  Scratch& all_;
  const int base_, dim_, size_, kv_head_;
  int start_ = 0;
};

}  // namespace quire
