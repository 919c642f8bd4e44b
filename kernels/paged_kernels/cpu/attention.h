// Attention of a step: which queries walk together (walk.h), and what a token leaves in its slot.
#pragma once

#include <algorithm>
#include <vector>

#include "walk.h"

namespace quire {

constexpr int MOST_QUERIES = 12;  // that share a walk

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
          int first, const Chunks<T>& next, Scratch& scratch) {
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
  Walk<Q, T, NQ> all(cache, table, rule, kv_head, positions, next, scratch);
  all.run(query, sums);
  for (int n = 0; n < NQ; ++n) {
    const int64_t t = token + (first + n) / group;
    Q* o = queries.out + t * queries.out_stride + (size_t(kv_head) * group + (first + n) % group) * dim;
    convert(reinterpret_cast<const Float32*>(sums + n * dim), o, dim, all.total(n));
  }
}

// What a tile reads of a kv head; nothing for padding.
template <class T>
Chunks<T> chunks_of(const Cache<T>& cache, const Places& places, const Rule& rule, const Tile& tile, int kv_head) {
  if (places.slots[tile.token] < 0) return {&cache, nullptr, 0, 0};
  const int size = cache.shape.block_size, position = places.positions[tile.token];
  const int first = rule.window > 0 ? std::max(0, position + 1 - rule.window) / size : 0;
  const int32_t* table = places.tables + places.sequences[tile.token] * places.table_stride;
  return {&cache, table + first, kv_head, (position + tile.count - 1) / size - first + 1};
}

// All queries of one tile and kv head. `next`: what the thread will read after them. A padding token's result is zero.
template <class Q, class T>
void attend(const Queries<Q>& queries, const Cache<T>& cache, const Places& places, const Rule& rule, const Tile& tile, int kv_head,
            const Chunks<T>& next, Scratch& scratch) {
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
    walk<Q, T, NQ>(queries, cache, places, rule, kv_head, tile.token, first, next, scratch);   \
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
  for (int d = 0; d < dim; ++d) keys[at + key_element<T>(d, int(offset), shape)] = key[d];
  std::memcpy(values + at + size_t(offset) * dim, value, size_t(dim) * sizeof(T));
}

}  // namespace quire
