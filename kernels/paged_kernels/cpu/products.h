// Products of rows with packed weights.
//
// weight_packing.h packs them. Weights may be stored in another form than their own type: a class like Plain,
// such as Grouped of integers.h.
//
// Weights are prefetched from memory while those before them are multiplied: waiting for them would take as
// long again as multiplying several dozen rows.
//
// Invariance: every element of a result is summed over the depth in order, in one accumulator, whatever rows
// and columns are computed beside it and on whichever thread. So a row's bits do not depend on other rows.
#pragma once

#include <algorithm>
#include <cstddef>

#include "weight_packing.h"

namespace quire {

// Tiles have up to MOST_ROWS rows, and WIDE panels if they have up to WIDE_ROWS rows, else one.
#ifdef QUIRE_AVX512
constexpr int MOST_ROWS = 8, WIDE = 3, WIDE_ROWS = 8;  // 24 of 32 registers accumulate
#else
constexpr int MOST_ROWS = 6, WIDE = 2, WIDE_ROWS = 2;  // AVX2: 12 of 16 registers accumulate; NEON: 24 of 32
#endif
constexpr int UNIT_PANELS = 6;  // of one share of work
constexpr int BLOCK_ROWS = 128;
constexpr int STREAMED_ROWS = 6;  // up to this many rows wait for memory, which is fastest when weights are read sequentially

// Multiplies a unit of 16 columns' weights with the same 4 bytes of a row, in phases: `weights` and `row` give
// what a phase multiplies, `add` accumulates it.
template <class E>
struct Factors {
  static constexpr int PHASES = 1;
  static UintVec weights(UintVec unit, int) { return unit; }
  static UintVec row(const char* at, int) { return splat_as<UintVec>(bits_at(at)); }
  static Vec add(Vec acc, UintVec a, UintVec w) { return acc + as<Vec>(a) * as<Vec>(w); }
};

#if defined(QUIRE_AVX512) && defined(__AVX512BF16__)
template <>
struct Factors<BFloat16> : Factors<Float32> {
  static Vec add(Vec acc, UintVec a, UintVec w) { return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)w); }
};
#else
template <>
struct Factors<BFloat16> : Factors<Float32> {
  static constexpr int PHASES = 2;
  static UintVec weights(UintVec unit, int phase) { return one_of(unit, phase); }
  static UintVec row(const char* at, int phase) { return one_of(splat_at<UintVec>(at), phase); }
};
#endif

// Adds a unit's products to the sums of a tile. `stride`: bytes from row to row, `panel`: from panel to panel.
// Unrolled explicitly: compilers would otherwise keep sums in memory.
template <class F, int ROWS, int PANELS, class Sums>
__attribute__((always_inline)) inline void multiply_unit(Sums (&acc)[ROWS][PANELS], const char* rows, size_t stride,
                                                         const char* w, size_t panel) {
#pragma GCC unroll 4
  for (int phase = 0; phase < F::PHASES; ++phase) {
    if (F::PHASES > 1) asm("" : "+r"(rows));  // else compilers keep each row's bytes in a register for the next phase
    UintVec unit[PANELS];
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; ++p) unit[p] = F::weights(vector_at<UintVec>(w + p * panel), phase);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const UintVec a = F::row(rows + r * stride, phase);
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) acc[r][p] = F::add(acc[r][p], a, unit[p]);
    }
  }
}

// Prefetches of a tile: for each unit of depth the lines at `at` and, if not 0, `apart` from it, `step` bytes
// further each time.
struct Fetch {
  const char* at;
  size_t apart, step;

  void some() {
    ask_for(at);
    if (apart) ask_for(at + apart);
    at += step;
  }
};

// Rows of one matrix, `stride` elements apart.
template <class E>
struct PlainRows {
  const E* at;
  size_t stride;
  PlainRows from(int64_t row) const { return {at + row * stride, stride}; }
};

// Weights of type E, stored as they are. A form of Weights: the rows that it multiplies, its panels, and `tile`.
template <class E>
struct Plain : PlainPanels<E> {
  using PlainPanels<E>::DEPTH;
  // Bytes by which few rows prefetch the weights that they read, or 0: where conversions fill the processor's
  // window of instructions, too few reads are in flight.
  static constexpr int FETCHED_AHEAD = LANES > NATIVE_LANES && Factors<E>::PHASES > 1 ? 2048 : 0;

  using Rows = PlainRows<E>;

  // `out` [ROWS][PANELS * 16], float32: sums over the depth. `panel`: bytes from one panel to the next.
  template <int ROWS, int PANELS>
  __attribute__((noinline)) static void tile(Rows rows, const char* w, size_t panel, int depth, Groups, float* out,
                                             Fetch fetch) {
    const char* a = reinterpret_cast<const char*>(rows.at);
    const size_t stride = rows.stride * sizeof(E);
    const int units = depth / DEPTH;
    Vec acc[ROWS][PANELS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) acc[r][p] = Vec{};
    for (int k = 0; k < units; ++k, w += PANEL_UNIT, a += 4) {
      fetch.some();
      multiply_unit<Factors<E>>(acc, a, stride, w, panel);
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int p = 0; p < PANELS; ++p) put_vector(out + (r * PANELS + p) * LANES, acc[r][p]);
  }
};

template <class Form, int PANELS, int ROWS = PANELS == 1 ? MOST_ROWS : WIDE_ROWS, class... Given>
void tile_of(int rows, const Given&... given) {
  if constexpr (ROWS > 1)
    if (rows < ROWS) return tile_of<Form, PANELS, ROWS - 1>(rows, given...);
  Form::template tile<ROWS, PANELS>(given...);
}

// Packed weights [depth, columns] of one linear map. `bias`: of type E, or null. `exact`: results are not rounded to E.
template <class E, class Form = Plain<E>>
struct Weights {
  const char* packed;
  const E* bias;
  int columns, depth;
  Groups groups = {};
  bool exact = false;

  int units() const { return Form::units(depth, groups); }
  size_t panel_bytes() const { return Form::panel_bytes(depth, groups); }
  int panels() const { return (columns + LANES - 1) / LANES; }
  const char* panel(int number) const { return packed + number * panel_bytes(); }

  // The result from the sums of 16 columns (or the last fewer) from `column` on: biased and rounded.
  Vec finished(const float* sum, int column, int lanes) const {
    Vec value = load_vec(reinterpret_cast<const Float32*>(sum));
    if (bias) value += load_vec(bias + column, lanes);
    return exact ? value : rounded<E>(value);
  }

  // Columns `begin` to `begin + count - 1`, both multiples of LANES.
  Weights part(int64_t begin, int count) const {
    return {packed + begin / LANES * panel_bytes(), bias ? bias + begin : nullptr, count, depth, groups, exact};
  }
};

template <class W> int shares_across(const W& weights) { return (weights.panels() + UNIT_PANELS - 1) / UNIT_PANELS; }

template <class W> int64_t num_shares(const W& weights, int64_t rows) {
  return (rows + BLOCK_ROWS - 1) / BLOCK_ROWS * shares_across(weights);
}

// Start of the weights of a share; shares with other rows but the same columns have the same.
template <class W> const char* weights_at(const W& weights, int64_t share) {
  return weights.panel(int(share % shares_across(weights)) * UNIT_PANELS);
}

// Work of a tile: `count` panels (WIDE or one) of up to MOST_ROWS rows. `number`: index among the share's
// tiles with these panels.
struct Part {
  int64_t row;
  int rows, panel, count, number;
};

// A share of a product: panels first .. last - 1 of rows begin .. end - 1, in tiles of one height.
struct ProductShare {
  int first, last, tiles, height;
  int64_t begin, end;

  template <class W> ProductShare(const W& weights, int64_t rows, int64_t number) {
    first = int(number % shares_across(weights)) * UNIT_PANELS;
    last = std::min(weights.panels(), first + UNIT_PANELS);
    begin = number / shares_across(weights) * BLOCK_ROWS;
    end = std::min(rows, begin + BLOCK_ROWS);
    tiles = int((end - begin + MOST_ROWS - 1) / MOST_ROWS);
    height = int((end - begin + tiles - 1) / tiles);
  }

  // Calls `use(part)` for each part, those with the same panels consecutively.
  template <class Use> void each(Use use) const {
    const int most = height <= WIDE_ROWS ? WIDE : 1;
    for (int panel = first, count; panel < last; panel += count) {
      count = last - panel >= most ? most : 1;
      int number = 0;
      for (int64_t row = begin; row < end; row += height)
        use(Part{row, int(std::min<int64_t>(height, end - row)), panel, count, number++});
    }
  }
};

// Weights read after those of a share, or null: by the first reader, by the second.
struct Ahead { const char *first = nullptr, *second = nullptr; };

// Weights in the order in which a share's tiles read them.
template <class E, class Form>
class Reader {
 public:
  Reader(const Weights<E, Form>& weights, const ProductShare& share, const char* ahead)
      : weights_(weights), share_(share), ahead_(ahead) {}

  // Sums of a part: `out` [rows][count * 16].
  void sums(const typename Form::Rows& rows, const Part& part, float* out) const {
    if (part.count == WIDE) sums<WIDE>(rows, part, out);
    else sums<1>(rows, part, out);
  }

 private:
  template <int PANELS> void sums(const typename Form::Rows& rows, const Part& part, float* out) const {
    tile_of<Form, PANELS>(part.rows, rows.from(part.row), weights_.panel(part.panel), weights_.panel_bytes(), weights_.depth,
                          weights_.groups, out, fetch(part));
  }

  // Tiles with the same panels divide the prefetches of the next ones; with two tiles or fewer, each fetches
  // in both halves at once, so that no lines are left out.
  Fetch fetch(const Part& part) const {
    const char* next = part.panel + part.count < share_.last ? weights_.panel(part.panel + part.count) : ahead_;
    const char* own = weights_.panel(part.panel);
    if (share_.end - share_.begin <= STREAMED_ROWS && Form::FETCHED_AHEAD > 0)
      return {own + Form::FETCHED_AHEAD, part.count > 1 ? weights_.panel_bytes() : 0, PANEL_UNIT};
    if (!next || share_.end - share_.begin <= STREAMED_ROWS) return {own, 0, 0};
    const size_t bytes = part.count * weights_.panel_bytes(), apart = share_.tiles > 2 ? 0 : bytes / 2;
    const size_t times = size_t(share_.tiles) * weights_.units(), step = (bytes - apart + times - 1) / times;
    return {next + part.number * step * weights_.units(), apart, step};
  }

  const Weights<E, Form> weights_;
  const ProductShare share_;
  const char* const ahead_;
};

// Calls `use(row, panel, column, lanes)` for each 16 columns of a part's rows. Full pieces get a constant
// lane count.
template <class Use> inline void each_piece(const Part& part, int columns, Use use) {
  for (int r = 0; r < part.rows; ++r)
    for (int p = 0; p < part.count; ++p) {
      const int column = (part.panel + p) * LANES;
      if (columns - column >= LANES) use(r, p, column, LANES);
      else use(r, p, column, columns - column);
    }
}

// out (+)= a @ weights + bias. `adds`: add to the contents, rounded after the product and after the sum. O:
// E, or Float32.
template <class E, class Form, class O>
void linear_share(const Weights<E, Form>& weights, const typename Form::Rows& a, O* out, size_t stride, int64_t rows, bool adds,
                  int64_t number, Ahead ahead) {
  float sums[MOST_ROWS * WIDE * LANES];
  const ProductShare share(weights, rows, number);
  const Reader<E, Form> reader(weights, share, ahead.first);
  share.each([&](const Part& part) {
    O* corner = out + size_t(part.row) * stride + part.panel * LANES;
    for (int r = 0; r < part.rows; ++r)
      for (int p = 0; p < part.count; ++p) __builtin_prefetch(corner + r * stride + p * LANES, 1);
    reader.sums(a, part, sums);
    each_piece(part, weights.columns, [&](int r, int p, int column, int lanes) __attribute__((always_inline)) {
      O* at = corner + r * stride + p * LANES;
      const Vec value = weights.finished(sums + (r * part.count + p) * LANES, column, lanes);
      store_vec(at, adds ? value + load_vec(at, lanes) : value, lanes);
    });
  });
}

enum Activation { SILU = 0, GELU_TANH = 1 };

template <class E> inline Vec activated(int activation, Vec x) {
  if (activation == SILU) return rounded<E>(x * sigmoid(x));
  return rounded<E>(x * 0.5f * (1.0f + tanh_vec(0.79788456080286535588f * (x + 0.044715f * x * x * x))));
}

// out = activation(a @ gate) * (a @ up).
template <class E, class Form>
void gated_share(const Weights<E, Form>& gate, const Weights<E, Form>& up, int activation, const typename Form::Rows& a,
                 E* out, int64_t rows, int64_t number, Ahead ahead) {
  float gates[MOST_ROWS * WIDE * LANES], ups[MOST_ROWS * WIDE * LANES];
  const ProductShare share(gate, rows, number);
  const Reader<E, Form> gate_reader(gate, share, ahead.first), up_reader(up, share, ahead.second);
  share.each([&](const Part& part) {
    gate_reader.sums(a, part, gates);
    up_reader.sums(a, part, ups);
    each_piece(part, gate.columns, [&](int r, int p, int column, int lanes) __attribute__((always_inline)) {
      const int at = (r * part.count + p) * LANES;
      const Vec g = activated<E>(activation, gate.finished(gates + at, column, lanes));
      store_vec(out + size_t(part.row + r) * gate.columns + column, g * up.finished(ups + at, column, lanes), lanes);
    });
  });
}

}  // namespace quire
