// Products with E4M3 weights that have a scale for each group of consecutive depths of a column.
//
// A weight is its number times its scale, rounded to float32 once; rows are read as they are. So sums are those of a
// plain product with dequantized weights in float32, bit by bit, and the invariance of products.h holds.
//
// weight_packing.h packs the weights.
#pragma once

#include "products.h"

namespace quire {

// A form of Weights, see Plain. Depths behind the last one are not read from rows.
template <class E>
struct Scaled : Float8Panels {
  using Rows = typename Plain<E>::Rows;
  static constexpr int FETCHED_AHEAD = 0;  // `tile` prefetches

  template <int ROWS, int PANELS>
  __attribute__((noinline)) static void tile(Rows rows, const char* w, size_t panel, int depth, Groups groups, float* out,
                                             Fetch fetch) {
    const size_t head = head_bytes(groups), bytes = head + size_t(groups.size / DEPTH) * PANEL_UNIT;
    const E* a = rows.at;
    Vec acc[ROWS][PANELS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) acc[r][p] = Vec{};
    for (; depth > 0; depth -= groups.size, w += bytes) {
      Vec scales[PANELS];
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) scales[p] = load_scales(w + p * panel, groups.half) * FLOAT8_FACTOR;
      const int count = std::min(depth, groups.size);
      const char* at = w + head;
      int d = 0;
      for (; d + DEPTH <= count; d += DEPTH, at += PANEL_UNIT, a += DEPTH) {
        fetch.some();
        if (ROWS <= FEW_ROWS)
          for (int p = 0; p < PANELS; ++p) __builtin_prefetch(at + p * panel + LEAD);
#pragma GCC unroll 4
        for (int i = 0; i < DEPTH; ++i) add(acc, a + i, rows.stride, at, panel, i, scales);
      }
      for (int i = 0; d < count; ++d, ++i) add(acc, a + i, rows.stride, at, panel, i, scales);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) put_vector(out + (r * PANELS + p) * LANES, acc[r][p]);
  }

 private:
  // With few rows, computing waits for memory.
  static constexpr int FEW_ROWS = 4, LEAD = 2048;  // bytes

  // Adds the products of one depth, number `i` of a unit.
  template <int ROWS, int PANELS>
  __attribute__((always_inline)) static void add(Vec (&acc)[ROWS][PANELS], const E* a, size_t stride, const char* unit,
                                                 size_t panel, int i, const Vec (&scales)[PANELS]) {
    Vec weights[PANELS];
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; ++p) weights[p] = small_float8(vector_at<UintVec>(unit + p * panel), i) * scales[p];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const Vec row = splat(load(a[r * stride]));
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) acc[r][p] = fused(row, weights[p], acc[r][p]);
    }
  }

  static Vec load_scales(const char* at, bool half) {
    return half ? load_vec(reinterpret_cast<const Float16*>(at)) : load_vec(reinterpret_cast<const Float32*>(at));
  }
};

}  // namespace quire
