// Attention of a step: which queries share a walk over the keys (paged_scan.h), and how a token is written to its
// slot.
#pragma once

#include <algorithm>
#include <vector>

#include "paged_scan.h"

namespace quire {

constexpr int MOST_BATCHES = 4;  // walks of a tile that run side by side, part by part

// Rows that are attended together: of one sequence at consecutive positions, or, where `shared` is not 0, one
// row each of sequences with the same blocks for the first `shared` keys (whole parts).
struct Tile {
  int64_t token;
  int count, shared;
};

// Positions and cache slots of a step's packed tokens.
struct Places {
  const int32_t* tables;
  int64_t table_stride;
  const int32_t *sequences, *positions;
  const int64_t* slots;
  int64_t tokens;

  const int32_t* table(int64_t token) const { return tables + sequences[token] * table_stride; }

  std::vector<Tile> tiles(const Shape& shape) const {
    const int group = shape.heads / shape.kv_heads, most = std::max(1, MOST_QUERIES / group);
    std::vector<Tile> found;
    for (int64_t t = 0; t < tokens; ++t)
      if (t > 0 && found.back().count < most * MOST_BATCHES && goes_on(t)) ++found.back().count;
      else found.push_back({t, 1, 0});
    return joined(found, shape.block_size, most);
  }

 private:
  // True if a token directly follows the token before it in the same sequence.
  bool goes_on(int64_t t) const {
    return slots[t] >= 0 && slots[t - 1] >= 0 && sequences[t] == sequences[t - 1] && positions[t] == positions[t - 1] + 1;
  }

  // Joins single rows of sequences that begin with the same blocks into tiles of up to `most` rows.
  std::vector<Tile> joined(const std::vector<Tile>& tiles, int block_size, int most) const {
    std::vector<Tile> found;
    for (const Tile& tile : tiles) {
      const int shared = found.empty() ? 0 : shared_keys(found.back(), tile, block_size);
      if (shared > 0 && found.back().count < most) found.back() = {found.back().token, found.back().count + 1, shared};
      else found.push_back(tile);
    }
    return found;
  }

  int shared_keys(const Tile& tile, const Tile& other, int block_size) const {
    const bool alone = tile.count == 1 || tile.shared > 0;
    if (!alone || other.count > 1 || slots[tile.token] < 0 || slots[other.token] < 0) return 0;
    const int32_t *one = table(tile.token), *two = table(other.token);
    const int seen = std::min(positions[tile.token], positions[other.token]) + 1;
    const int most = tile.shared > 0 ? std::min(tile.shared, seen) : seen;
    int block = 0;
    while (block < most / block_size && one[block] == two[block]) ++block;
    const int shared = block * block_size / PART * PART;
    return 2 * shared >= tile.shared ? shared : 0;
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

// The queries of one kv head for a tile's rows: which keys they see, and their results.
template <class Q, class T>
class Attention {
 public:
  Attention(const Queries<Q>& queries, const Cache<T>& cache, const Places& places, const Rule& rule, const Tile& tile, int kv_head)
      : queries_(queries), cache_(cache), places_(places), rule_(rule), tile_(tile), kv_head_(kv_head),
        group_(cache.shape.heads / cache.shape.kv_heads), shared_(rule.sees_all() ? tile.shared : 0) {}

  bool is_padding() const { return places_.slots[tile_.token] < 0; }

  // The blocks that are read first; none for padding.
  Chunks<T> first_chunks() const {
    if (is_padding()) return {&cache_, nullptr, 0, 0};
    if (shared_ > 0) return chunks(0, 0, shared_);
    return tile_.shared > 0 ? chunks(0, first_key(0), end(0)) : chunks(0, first_key(0), end(tile_.count - 1));
  }

  // A padding token's result is zero. `next`: blocks that the thread reads after these.
  void run(const Chunks<T>& next, Scratch& scratch) const {
    if (is_padding()) {
      Q* out = queries_.out + tile_.token * queries_.out_stride + size_t(kv_head_) * group_ * dim();
      std::fill_n(out, size_t(group_) * dim(), Q{});
      return;
    }
    ask(scratch);
    if (tile_.shared == 0) {
      walk(scratch, 0, tile_.count, first_key(0), end(tile_.count - 1), next);
    } else {
      if (shared_ > 0) walk(scratch, 0, tile_.count, 0, shared_, rest_of(0));
      for (int row = 0; row < tile_.count; ++row)
        walk(scratch, row, 1, std::max(shared_, first_key(row)), end(row), row + 1 < tile_.count ? rest_of(row + 1) : next);
    }
    for (int n = 0; n < tile_.count * group_; ++n) answer(scratch, n);
  }

 private:
  using U = Units<Q, T>;

  int dim() const { return cache_.shape.head_dim; }
  int end(int row) const { return places_.positions[tile_.token + row] + 1; }
  int first_key(int row) const { return rule_.first_key(end(row) - 1); }
  Chunks<T> rest_of(int row) const { return chunks(row, std::max(shared_, first_key(row)), end(row)); }

  // Blocks of a row's sequence that hold keys from .. to - 1.
  Chunks<T> chunks(int row, int from, int to) const {
    const int size = cache_.shape.block_size, first = from / size;
    return {&cache_, places_.table(tile_.token + row) + first, kv_head_, from < to ? (to - 1) / size - first + 1 : 0};
  }

  // Offset of the head of query n of the tile, in rows of `stride` elements.
  size_t head_at(int n, size_t stride) const {
    return (tile_.token + n / group_) * stride + (size_t(kv_head_) * group_ + n % group_) * dim();
  }

  void ask(Scratch& all) const {
    const int units = (dim() + U::DEPTH - 1) / U::DEPTH;
    all.queries = tile_.count * group_;
    all.width = (dim() + U::COLUMNS - 1) / U::COLUMNS * U::COLUMNS;
    all.units.resize(size_t((units + SLICE - 1) / SLICE) * all.queries * SLICE);
    all.sums.assign(size_t(all.queries) * all.width, 0.0f);
    all.softmax.assign(all.queries, Softmax{});
    all.nothing.resize(size_t(all.width) * sizeof(T));
    all.first.resize(all.queries);
    all.end.resize(all.queries);
    for (int n = 0; n < all.queries; ++n) {
      all.first[n] = first_key(n / group_);
      all.end[n] = end(n / group_);
      const Q* query = queries_.query + head_at(n, queries_.query_stride);
      uint32_t* to = all.units.data() + size_t(n) * SLICE;
      for (int unit = 0; unit < units; unit += SLICE, to += size_t(all.queries) * SLICE) {
        const int whole = std::min(SLICE, dim() / U::DEPTH - unit);
        for (int i = 0; i < whole; ++i) to[i] = U::of_query(query + (unit + i) * U::DEPTH);
        if (whole < std::min(SLICE, units - unit)) to[whole] = as_bits(load(query[dim() - 1]));
      }
    }
  }

  // Rows `row` .. row + rows - 1 over keys from .. to - 1 of the first row's sequence.
  void walk(Scratch& all, int row, int rows, int from, int to, const Chunks<T>& next) const {
    const Route<T> route{chunks(row, from, to), next, from / cache_.shape.block_size};
    for (int start = from / PART * PART; start < to; start += PART) {
      const Route<T>* asks = &route;
      for (int n = row * group_, left = rows * group_; left > 0; asks = nullptr) {
        const int taken = walk_part(all, row, n, left, start, asks);
        n += taken;
        left -= taken;
      }
    }
  }

  // Walks for as many queries from n on as one walk takes; returns their number.
  int walk_part(Scratch& all, int row, int n, int left, int start, const Route<T>* route) const {
#define QUIRE_WALK(NQ)                                                                                        \
  if (left >= NQ) {                                                                                           \
    Walk<Q, T, NQ>(cache_, places_.table(tile_.token + row), rule_, kv_head_, route, all, n).run(start);        \
    return NQ;                                                                                                \
  }
    if constexpr (MOST_IN_WALK >= 12) { QUIRE_WALK(12) QUIRE_WALK(9) QUIRE_WALK(8) }
    QUIRE_WALK(6) QUIRE_WALK(4) QUIRE_WALK(3) QUIRE_WALK(2) QUIRE_WALK(1)
#undef QUIRE_WALK
    return left;
  }

  void answer(Scratch& all, int n) const {
    Q* out = queries_.out + head_at(n, queries_.out_stride);
    const float* sink = rule_.sinks ? rule_.sinks + size_t(kv_head_) * group_ + n % group_ : nullptr;
    const float total = all.softmax[n].sum_with(sink);
    for (int d = 0; d < dim(); d += U::COLUMNS) {
      Vec sums[U::VECS];
      for (int v = 0; v < U::VECS; ++v) sums[v] = vector_at<Vec>(&all.sums[size_t(n) * all.width + d + v * LANES]);
      U::in_order(sums);
      for (int v = 0; v < U::VECS && d + v * LANES < dim(); ++v)
        store_vec(out + d + v * LANES, sums[v] / total, std::min(LANES, dim() - d - v * LANES));
    }
  }

  const Queries<Q>& queries_;
  const Cache<T>& cache_;
  const Places& places_;
  const Rule& rule_;
  const Tile& tile_;
  const int kv_head_, group_, shared_;
};

// `count` elements, converted to T.
template <class E, class T>
void copy_elements(const E* from, T* to, int count) {
  if constexpr (std::is_same_v<E, T>) std::memcpy(to, from, size_t(count) * sizeof(T));
  else for (int i = 0; i < count; ++i) store(to[i], load(from[i]));
}

// Rounds a token's key or value, and writes element d to place(d) of a block's kv head, and its scale.
template <class E, class T, class Place>
void write_rounded(const E* from, T* head, int offset, const Shape& shape, Place place) {
  constexpr bool IS_FLOAT = std::is_same_v<T, Float8>;
  const Rounding rounding = Rounding::of(from, shape.head_dim, IS_FLOAT ? Rounding::MOST_FLOAT8 : Rounding::MOST);
  for (int d = 0; d < shape.head_dim; d += LANES) {
    const int count = std::min(LANES, shape.head_dim - d);
    int32_t whole[LANES];
    put_vector(whole, IS_FLOAT ? rounding.floats(from + d, count) : rounding.integers(from + d, count));
    for (int i = 0; i < count; ++i) head[place(d + i)].bits = decltype(T::bits)(whole[i]);
  }
  std::memcpy(scale_at(head, offset, shape), &rounding.scale, sizeof rounding.scale);
}

// Writes the key and value of one token and kv head to their slot.
template <class E, class T>
void write_kv(const E* key, const E* value, T* keys, T* values, int64_t slot, int kv_head, const Shape& shape) {
  const int dim = shape.head_dim, offset = int(slot % shape.block_size);
  const size_t at = Cache<T>{keys, values, shape}.head_at(int(slot / shape.block_size), kv_head);
  const auto key_place = [&](int d) { return key_element<T>(d, offset, shape); };
  if constexpr (has_scales<T>()) {
    write_rounded(key, keys + at, offset, shape, key_place);
    write_rounded(value, values + at, offset, shape, [=](int d) { return size_t(offset) * dim + d; });
  } else {
    constexpr int GROUP = together<T>();
    int d = 0;
    for (; d + GROUP <= dim; d += GROUP) copy_elements(key + d, keys + at + key_place(d), GROUP);
    for (; d < dim; ++d) copy_elements(key + d, keys + at + key_place(d), 1);
    copy_elements(value, values + at + size_t(offset) * dim, dim);
  }
}

}  // namespace quire
