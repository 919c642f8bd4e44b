// Products of rows with weights that were packed once.
//
// Packed weights: panels of 16 columns; a panel holds, for each unit of depth, 16 groups of 4 bytes: one float32, or two bfloat16 of
// consecutive depth. Columns beyond the last are zero. Weights may be stored in another form (a class like Plain, such as Int8 of
// int8.h): a few rows read that form as it is, for many each panel is expanded once.
//
// Invariance: every element of a result is summed over the depth in order, one accumulator each, whatever rows and columns are
// computed beside it and by whom. So a row's bits do not depend on its company.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

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

// acc + both products of a pair of bfloat16, as bits, with 16 pairs.
inline Vec multiply_pairs(Vec acc, uint32_t a, UintVec pairs) {
#if defined(QUIRE_AVX512) && defined(__AVX512BF16__)
  return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)_mm512_set1_epi32(int(a)), (__m512bh)pairs);
#else
  acc = acc + as_float(a << 16) * as<Vec>(pairs << 16);
  return acc + as_float(a & 0xffff0000u) * as<Vec>(pairs & 0xffff0000u);
#endif
}
// acc + a's pair (or single) times 16 columns' worth of weights.
inline Vec multiply_add(Vec acc, BFloat16, uint32_t a, UintVec w) { return multiply_pairs(acc, a, w); }
inline Vec multiply_add(Vec acc, Float32, uint32_t a, UintVec w) { return acc + as_float(a) * as<Vec>(w); }

template <class E> constexpr int per_unit() { return 4 / int(sizeof(E)); }

// Weights of type E as they are.
template <class E>
struct Plain {
  static constexpr bool IS_EXPANDED = true;
  static constexpr int DEPTH = per_unit<E>();  // of a unit

  // `out` [ROWS][PANELS * 16], float32.
  template <int ROWS, int PANELS>
  __attribute__((noinline)) static void tile(const E* a, size_t stride, const char* w, size_t panel, int units, float* out) {
    Vec acc[ROWS][PANELS] = {};
    for (int k = 0; k < units; ++k, w += PANEL_UNIT)
      for (int r = 0; r < ROWS; ++r) {
        uint32_t x;
        std::memcpy(&x, a + r * stride + size_t(k) * DEPTH, sizeof x);
        for (int p = 0; p < PANELS; ++p) {
          UintVec unit;
          std::memcpy(&unit, w + p * panel, sizeof unit);
          acc[r][p] = multiply_add(acc[r][p], E{}, x, unit);
        }
      }
    for (int r = 0; r < ROWS; ++r)
      for (int p = 0; p < PANELS; ++p) std::memcpy(out + (r * PANELS + p) * LANES, &acc[r][p], sizeof(Vec));
  }
};

template <class Form, int PANELS, class E>
void tile_of(int rows, const E* a, size_t stride, const char* w, size_t panel, int units, float* out) {
  switch (rows) {
#ifdef QUIRE_AVX512
    case 8: return Form::template tile<8, PANELS>(a, stride, w, panel, units, out);
    case 7: return Form::template tile<7, PANELS>(a, stride, w, panel, units, out);
    case 6: return Form::template tile<6, PANELS>(a, stride, w, panel, units, out);
    case 5: return Form::template tile<5, PANELS>(a, stride, w, panel, units, out);
    case 4: return Form::template tile<4, PANELS>(a, stride, w, panel, units, out);
    case 3: return Form::template tile<3, PANELS>(a, stride, w, panel, units, out);
#endif
    case 2: return Form::template tile<2, PANELS>(a, stride, w, panel, units, out);
    default: return Form::template tile<1, PANELS>(a, stride, w, panel, units, out);
  }
}

// Packed weights [depth, columns] of one linear map. `bias`: of type E, or null; `scales`: what sums of a column are multiplied by,
// or null.
template <class E, class Form = Plain<E>>
struct Weights {
  const char* packed;
  const E* bias;
  int columns, depth;
  const float* scales = nullptr;

  int units() const { return depth / Form::DEPTH; }
  size_t panel_bytes() const { return size_t(units()) * PANEL_UNIT; }
  int panels() const { return (columns + LANES - 1) / LANES; }
  const char* panel(int number) const { return packed + number * panel_bytes(); }

  // From sums [rows][count * 16] of panels first .. first + count - 1 to results: scaled, biased and rounded.
  void finish(float* sums, int rows, int first, int count) const {
    for (int r = 0; r < rows; ++r)
      for (int p = 0; p < count; ++p) {
        float* at = sums + (r * count + p) * LANES;
        const int column = (first + p) * LANES, lanes = std::min(LANES, columns - column);
        Vec value;
        std::memcpy(&value, at, sizeof value);
        if (scales) value *= load_vec(reinterpret_cast<const Float32*>(scales + column), lanes);
        if (bias) value += load_vec(bias + column, lanes);
        value = rounded<E>(value);
        std::memcpy(at, &value, sizeof value);
      }
  }
};

// Where a thread expands panels.
struct alignas(PANEL_UNIT) Unit { char bytes[PANEL_UNIT]; };
struct Room { std::vector<Unit> first, second; };

// Weights as the tiles of a share read them, panels in order: as they are stored, or expanded where they serve `rows` enough.
template <class E, class Form>
class Reader {
 public:
  Reader(const Weights<E, Form>& weights, int64_t rows, std::vector<Unit>& room)
      : weights_(weights), expands_(!Form::IS_EXPANDED && rows > MOST_ROWS), room_(room) {}

  // Results of `rows` rows from `row` on and `count` panels (WIDE or one): `out` [rows][count * 16].
  void results(const E* a, int64_t row, int rows, int panel, int count, float* out) {
    const E* from = a + row * weights_.depth;
    if (count == WIDE) sums<WIDE>(from, rows, panel, out);
    else sums<1>(from, rows, panel, out);
    weights_.finish(out, rows, panel, count);
  }

 private:
  template <int PANELS> void sums(const E* from, int rows, int panel, float* out) {
    const int depth = weights_.depth;
    if (!expands_) {
      const char* stored = weights_.panel(panel);
      return tile_of<Form, PANELS>(rows, from, depth, stored, weights_.panel_bytes(), weights_.units(), out);
    }
    if constexpr (!Form::IS_EXPANDED) {
      if (panel != expanded_) expand(panel, PANELS);
      const int units = depth / Plain<E>::DEPTH;
      tile_of<Plain<E>, PANELS>(rows, from, depth, room_.data()->bytes, size_t(units) * PANEL_UNIT, units, out);
    }
  }

  void expand(int panel, int count) {
    const size_t units = weights_.depth / Plain<E>::DEPTH;
    if (room_.size() < units * WIDE) room_.resize(units * WIDE);
    for (int p = 0; p < count; ++p) Form::expand(weights_.panel(panel + p), weights_.units(), room_[p * units].bytes);
    expanded_ = panel;
  }

  const Weights<E, Form> weights_;
  const bool expands_;
  std::vector<Unit>& room_;
  int expanded_ = -1;
};

// Calls `use(row, panel, count, sums)` for tiles of a share of the product: `count` panels of up to MOST_ROWS rows.
template <class W, class Use>
void share_of_product(const W& weights, int64_t rows, int64_t share, Use use) {
  const int shares_across = (weights.panels() + UNIT_PANELS - 1) / UNIT_PANELS;
  const int first = int(share % shares_across) * UNIT_PANELS, last = std::min(weights.panels(), first + UNIT_PANELS);
  const int64_t begin = share / shares_across * BLOCK_ROWS, end = std::min(rows, begin + BLOCK_ROWS);
  for (int panel = first; panel < last;) {
    const int count = last - panel >= WIDE ? WIDE : 1;
    for (int64_t row = begin; row < end; row += MOST_ROWS) use(row, int(std::min<int64_t>(MOST_ROWS, end - row)), panel, count);
    panel += count;
  }
}

template <class W> int64_t num_shares(const W& weights, int64_t rows) {
  return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS * ((weights.panels() + UNIT_PANELS - 1) / UNIT_PANELS);
}

// out (+)= a @ weights + bias. `adds`: to what is there, rounded after the product and after the sum. O: E, or Float32.
template <class E, class Form, class O>
void linear_share(const Weights<E, Form>& weights, const E* a, O* out, size_t stride, int64_t rows, bool adds, int64_t share,
                  Room& room) {
  float sums[MOST_ROWS * WIDE * LANES];
  Reader<E, Form> reader(weights, rows, room.first);
  share_of_product(weights, rows, share, [&](int64_t row, int count_rows, int panel, int count) {
    reader.results(a, row, count_rows, panel, count, sums);
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
template <class E, class Form>
void gated_share(const Weights<E, Form>& gate, const Weights<E, Form>& up, int activation, const E* a, E* out, int64_t rows,
                 int64_t share, Room& room) {
  float gates[MOST_ROWS * WIDE * LANES], ups[MOST_ROWS * WIDE * LANES];
  Reader<E, Form> gate_reader(gate, rows, room.first), up_reader(up, rows, room.second);
  share_of_product(gate, rows, share, [&](int64_t row, int count_rows, int panel, int count) {
    gate_reader.results(a, row, count_rows, panel, count, gates);
    up_reader.results(a, row, count_rows, panel, count, ups);
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
