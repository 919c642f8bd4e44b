// Products of rows with weights that were packed once.
//
// Packed weights: panels of 16 columns; a panel holds, for each unit of depth, 16 groups of 4 bytes: one float32, or two bfloat16 of
// consecutive depth. Columns beyond the last are zero.
//
// Invariance: every element of a result is summed over the depth in order, one accumulator each, whatever rows and columns are
// computed beside it and by whom. So a row's bits do not depend on its company.
#pragma once

#include <algorithm>
#include <cstddef>

#include "vectors.h"

namespace quire {

constexpr int PANEL_UNIT = LANES * 4;  // bytes
#ifdef QUIRE_AVX512
constexpr int MOST_ROWS = 8, WIDE = 3;  // 24 of 32 registers accumulate
#else
constexpr int MOST_ROWS = 2, WIDE = 2;
#endif
constexpr int UNIT_PANELS = 6;  // of a share of work
constexpr int BLOCK_ROWS = 128;

// acc + a's pair (or single) times 16 columns' worth of weights.
inline Vec multiply_add(Vec acc, Float32, uint32_t a, const char* w) {
  Vec weights;
  std::memcpy(&weights, w, sizeof weights);
  return acc + as_float(a) * weights;
}
// acc + both products of a pair of bfloat16, as bits, with 16 pairs.
inline Vec multiply_pairs(Vec acc, uint32_t a, UintVec pairs) {
#if defined(QUIRE_AVX512) && defined(__AVX512BF16__)
  return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(int(a)), (__m512bh)pairs);
#else
  acc = acc + as_float(a << 16) * as<Vec>(pairs << 16);
  return acc + as_float(a & 0xffff0000u) * as<Vec>(pairs & 0xffff0000u);
#endif
}
inline Vec multiply_add(Vec acc, BFloat16, uint32_t a, const char* w) {
  UintVec pairs;
  std::memcpy(&pairs, w, sizeof pairs);
  return multiply_pairs(acc, a, pairs);
}

template <class E> constexpr int per_unit() { return 4 / int(sizeof(E)); }

// `out` [ROWS][PANELS * 16], float32.
template <class E, int ROWS, int PANELS>
__attribute__((noinline)) void tile(const E* a, size_t stride, const char* w, size_t panel, int units, float* out) {
  Vec acc[ROWS][PANELS] = {};
  for (int k = 0; k < units; ++k, w += PANEL_UNIT)
    for (int r = 0; r < ROWS; ++r) {
      uint32_t x;
      std::memcpy(&x, a + r * stride + size_t(k) * per_unit<E>(), sizeof x);
      for (int p = 0; p < PANELS; ++p) acc[r][p] = multiply_add(acc[r][p], E{}, x, w + p * panel);
    }
  for (int r = 0; r < ROWS; ++r)
    for (int p = 0; p < PANELS; ++p) std::memcpy(out + (r * PANELS + p) * LANES, &acc[r][p], sizeof(Vec));
}

template <class E, int PANELS>
void tile_of(int rows, const E* a, size_t stride, const char* w, size_t panel, int units, float* out) {
  switch (rows) {
#ifdef QUIRE_AVX512
    case 8: return tile<E, 8, PANELS>(a, stride, w, panel, units, out);
    case 7: return tile<E, 7, PANELS>(a, stride, w, panel, units, out);
    case 6: return tile<E, 6, PANELS>(a, stride, w, panel, units, out);
    case 5: return tile<E, 5, PANELS>(a, stride, w, panel, units, out);
    case 4: return tile<E, 4, PANELS>(a, stride, w, panel, units, out);
    case 3: return tile<E, 3, PANELS>(a, stride, w, panel, units, out);
#endif
    case 2: return tile<E, 2, PANELS>(a, stride, w, panel, units, out);
    default: return tile<E, 1, PANELS>(a, stride, w, panel, units, out);
  }
}

// Packed weights [depth, columns] of one linear map. `bias`: of type E, or null.
template <class E>
struct Weights {
  const char* packed;
  const E* bias;
  int columns, depth;

  int units() const { return depth / per_unit<E>(); }
  size_t panel_bytes() const { return size_t(units()) * PANEL_UNIT; }
  int panels() const { return (columns + LANES - 1) / LANES; }

  // Sums of rows `a` and panels first .. first + count - 1, biased and rounded: `out` [rows][count * 16].
  template <int PANELS> void compute(const E* a, size_t stride, int rows, int first, float* out) const {
    tile_of<E, PANELS>(rows, a, stride, packed + first * panel_bytes(), panel_bytes(), units(), out);
    for (int r = 0; r < rows; ++r)
      for (int p = 0; p < PANELS; ++p) {
        float* at = out + (r * PANELS + p) * LANES;
        const int column = (first + p) * LANES, count = std::min(LANES, columns - column);
        Vec value;
        std::memcpy(&value, at, sizeof value);
        if (bias) value += load_vec(bias + column, count);
        value = rounded<E>(value);
        std::memcpy(at, &value, sizeof value);
      }
  }
};

// Calls `use(row, panel, count, sums)` for tiles of a share of the product: `count` panels of up to MOST_ROWS rows.
template <class E, class Use>
void share_of_product(const Weights<E>& weights, int64_t rows, int64_t share, Use use) {
  const int shares_across = (weights.panels() + UNIT_PANELS - 1) / UNIT_PANELS;
  const int first = int(share % shares_across) * UNIT_PANELS, last = std::min(weights.panels(), first + UNIT_PANELS);
  const int64_t begin = share / shares_across * BLOCK_ROWS, end = std::min(rows, begin + BLOCK_ROWS);
  for (int panel = first; panel < last;) {
    const int count = last - panel >= WIDE ? WIDE : 1;
    for (int64_t row = begin; row < end; row += MOST_ROWS) use(row, int(std::min<int64_t>(MOST_ROWS, end - row)), panel, count);
    panel += count;
  }
}

template <class E> int64_t num_shares(const Weights<E>& weights, int64_t rows) {
  return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS * ((weights.panels() + UNIT_PANELS - 1) / UNIT_PANELS);
}

template <class E>
void product_tile(const Weights<E>& weights, const E* a, int64_t row, int rows, int panel, int count, float* sums) {
  const E* from = a + row * weights.depth;
  if (count == WIDE) weights.template compute<WIDE>(from, weights.depth, rows, panel, sums);
  else weights.template compute<1>(from, weights.depth, rows, panel, sums);
}

// out (+)= a @ weights + bias. `adds`: to what is there, rounded after the product and after the sum. O: E, or Float32.
template <class E, class O>
void linear_share(const Weights<E>& weights, const E* a, O* out, size_t stride, int64_t rows, bool adds, int64_t share) {
  float sums[MOST_ROWS * WIDE * LANES];
  share_of_product(weights, rows, share, [&](int64_t row, int count_rows, int panel, int count) {
    product_tile(weights, a, row, count_rows, panel, count, sums);
    for (int r = 0; r < count_rows; ++r)
      for (int p = 0; p < count; ++p) {
        const int column = (panel + p) * LANES, lanes = std::min(LANES, weights.columns - column);
        O* at = out + size_t(row + r) * stride + column;
        Vec value;
        std::memcpy(&value, sums + (r * count + p) * LANES, sizeof value);
        store_vec(at, adds ? value + load_vec(at, lanes) : value, lanes);
      }
  });
}

enum Activation { SILU = 0, GELU_TANH = 1 };

template <class E> inline Vec activated(int activation, Vec x) {
  if (activation == SILU) return rounded<E>(x * sigmoid(x));
  return rounded<E>(x * 0.5f * (1.0f + tanh_vec(0.79788456080286535588f * (x + 0.044715f * x * x * x))));
}

// out = activation(a @ gate) * (a @ up).
template <class E>
void gated_share(const Weights<E>& gate, const Weights<E>& up, int activation, const E* a, E* out, int64_t rows, int64_t share) {
  float gates[MOST_ROWS * WIDE * LANES], ups[MOST_ROWS * WIDE * LANES];
  share_of_product(gate, rows, share, [&](int64_t row, int count_rows, int panel, int count) {
    product_tile(gate, a, row, count_rows, panel, count, gates);
    product_tile(up, a, row, count_rows, panel, count, ups);
    for (int r = 0; r < count_rows; ++r)
      for (int p = 0; p < count; ++p) {
        const int column = (panel + p) * LANES;
        Vec g, u;
        std::memcpy(&g, gates + (r * count + p) * LANES, sizeof g);
        std::memcpy(&u, ups + (r * count + p) * LANES, sizeof u);
        store_vec(out + size_t(row + r) * gate.columns + column, activated<E>(activation, g) * u,
                  std::min(LANES, gate.columns - column));
      }
  });
}

// Panels first .. of plain weights [columns, depth] (as torch keeps them) into `packed`.
template <class E>
void pack_panel(const E* plain, int columns, int depth, int panel, char* packed) {
  const int units = depth / per_unit<E>();
  E* out = reinterpret_cast<E*>(packed + size_t(panel) * units * PANEL_UNIT);
  for (int unit = 0; unit < units; ++unit)
    for (int lane = 0; lane < LANES; ++lane)
      for (int i = 0; i < per_unit<E>(); ++i, ++out) {
        const int column = panel * LANES + lane;
        *out = column < columns ? plain[size_t(column) * depth + unit * per_unit<E>() + i] : E{};
      }
}

}  // namespace quire
