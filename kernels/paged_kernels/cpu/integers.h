// Products with quantized weights: integers of 8 or 4 bits with a scale, and if need be an offset, for each
// group of consecutive depths of a column.
//
// Each group of a row is rounded to integers from -127 to 127 with a scale of its own, once for all columns.
// A group then adds, for each column,
//
//     row scale * (weight scale * sum(row numbers * weight numbers) + offset * sum(row numbers))
//
// Integer sums are exact, and groups are added in order, so a row's bits do not depend on other rows.
//
// weight_packing.h packs the weights.
#pragma once

#include "products.h"

namespace quire {

// Rows as integers. `numbers` [rows, padded depth]; `scales` and `sums` (of the numbers) [rows, groups].
struct IntegerRows {
  int8_t* numbers;
  float* scales;
  int32_t* sums;
  size_t depth, groups;

  static size_t bytes(int64_t rows, int depth, int group) {
    const size_t groups = num_groups(depth, group);
    return size_t(rows) * groups * (sizeof(float) + sizeof(int32_t) + size_t(group));
  }
  // In `memory`, of that many bytes and aligned to 4.
  static IntegerRows in(void* memory, int64_t rows, int depth, int group) {
    const size_t groups = num_groups(depth, group);
    float* scales = static_cast<float*>(memory);
    int32_t* sums = reinterpret_cast<int32_t*>(scales + rows * groups);
    return {reinterpret_cast<int8_t*>(sums + rows * groups), scales, sums, groups * size_t(group), groups};
  }
  IntegerRows from(int64_t row) const { return {numbers + row * depth, scales + row * groups, sums + row * groups, depth, groups}; }
};

// Rounds row `number` of `in` [rows, depth]. A group with a number that is not finite gets the scale NaN.
template <class E>
void round_row(const E* in, int depth, int group, int64_t number, const IntegerRows& rows) {
  const IntegerRows row = rows.from(number);
  in += size_t(number) * depth;
  for (size_t g = 0; g < rows.groups; ++g) {
    const int begin = int(g) * group, count = std::min(group, depth - begin);
    int8_t* out = row.numbers + begin;
    const Rounding rounding = Rounding::of(in + begin, count);
    IntVec total = {};
    for (int d = 0; d < group; d += LANES) {
      const int lanes = std::min(LANES, std::max(0, count - d));
      const IntVec whole = rounding.integers(in + begin + d, lanes);
      put_vector(out + d, converted<ByteVec>(whole));
      total += whole;
    }
    row.scales[g] = rounding.scale;
    row.sums[g] = folded(total, [](auto a, auto b) { return a + b; });
  }
}

// Weights of 8 or 4 bits. A form of Weights, see Plain.
template <int BITS>
struct Grouped : IntegerPanels<BITS> {
  using Rows = IntegerRows;
  using Panels = IntegerPanels<BITS>;
  static constexpr int FETCHED_AHEAD = 0;  // `sums` prefetches
  using Panels::DEPTH, Panels::PARTS, Panels::bias, Panels::factor_bytes, Panels::head_bytes;

  // See Plain. Computes panel by panel if the sums would leave too few registers for weights.
  template <int ROWS, int PANELS>
  static void tile(const Rows& rows, const char* w, size_t panel, int, const Groups& groups, float* out, Fetch fetch) {
    constexpr int AT_ONCE = ROWS * PANELS > MOST_SUMS ? 1 : PANELS;
    for (int first = 0; first < PANELS; first += AT_ONCE) {
      sums<ROWS, AT_ONCE>(rows, w + first * panel, panel, groups, out + first * LANES, PANELS * LANES, fetch);
      fetch = {w, 0, 0};
    }
  }

 private:
#ifdef QUIRE_AVX512
  static constexpr int MOST_SUMS = 12;
#else
  static constexpr int MOST_SUMS = MOST_ROWS;
#endif
  // With few rows, computing waits for memory: panels are short, and hardware prefetching restarts with each.
  static constexpr int FEW_ROWS = 4, LEAD = 2048;  // bytes

  template <int ROWS, int PANELS>
  __attribute__((noinline)) static void sums(Rows rows, const char* w, size_t panel, Groups groups, float* out, int out_stride,
                                             Fetch fetch) {
    const int units = groups.size / DEPTH, base = bias(groups);
    const size_t factors = factor_bytes(groups), head = head_bytes(groups);
    const char* a = reinterpret_cast<const char*>(rows.numbers);
    Vec acc[ROWS][PANELS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) acc[r][p] = Vec{};
    for (size_t g = 0; g < rows.groups; ++g) {
      const char* at = w + head;
      IntVec whole[ROWS][PANELS];
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; ++p) whole[r][p] = splat_as<IntVec>(-base * rows.sums[r * rows.groups + g]);
      for (int k = 0; k < units; ++k, at += PANEL_UNIT, a += DEPTH) {
        fetch.some();
        if (ROWS <= FEW_ROWS)
          for (int p = 0; p < PANELS; ++p) __builtin_prefetch(at + p * panel + LEAD);
        multiply_unit<Factors>(whole, a, rows.depth, at, panel);
      }
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) {
        const Vec scales = load_factors(w + p * panel, groups.half);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r)
          acc[r][p] += converted<Vec>(whole[r][p]) * scales * rows.scales[r * rows.groups + g];
        if (groups.offsets) {
          const Vec offsets = load_factors(w + p * panel + factors, groups.half);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) {
            const size_t place = r * rows.groups + g;
            acc[r][p] += offsets * (rows.scales[place] * float(rows.sums[place]));
          }
        }
      }
      w = at;
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) put_vector(out + r * out_stride + p * LANES, acc[r][p]);
  }

  // See quire::Factors. A part of a unit is multiplied in the phases of Dot.
  struct Factors {
    static constexpr int PHASES = PARTS * Dot::PHASES;
    static UintVec weights(UintVec unit, int phase) {
      if (PARTS == 1) return Dot::part(unit, phase);
      return Dot::part((phase < Dot::PHASES ? unit : unit >> 4) & 0x0f0f0f0fu, phase % Dot::PHASES);
    }
    static UintVec row(const char* at, int phase) {
      return Dot::part(splat_at<UintVec>(at + phase / Dot::PHASES * 4), phase % Dot::PHASES);
    }
    static IntVec add(IntVec sums, UintVec a, UintVec w) { return Dot::add(sums, a, w); }
  };

  static Vec load_factors(const char* at, bool half) {
    return half ? load_vec(reinterpret_cast<const Float16*>(at)) : load_vec(reinterpret_cast<const Float32*>(at));
  }
};

}  // namespace quire
