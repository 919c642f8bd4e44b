// 8-bit weights: integers from -127 to 127, and a float32 scale per column.
//
// A panel holds, for each unit of 4 depths, 64 bytes for 16 columns. The integers are exact in bfloat16 and
// float32, so products are those of Plain weights with the same numbers, in the same order; the scale is
// applied last, once. Only the order of bytes within a unit and their encoding depend on the processor: they
// suit the instructions that convert them to elements.
#pragma once

#include <cmath>
#include <limits>

#include "products.h"

namespace quire {

constexpr int INT8_DEPTH = 4, INT8_MOST = 127;

// The 16 columns' numbers at depth i of a unit in which each group of 4 bytes is a column.
inline Vec int8_at(UintVec unit, int i) {
  return __builtin_convertvector(as<IntVec>(unit << (24 - 8 * i)) >> 24, Vec);
}

// Layout and decoding of a unit of weights: `place`, the byte of a column and depth; `encode`, a number's
// byte; `open`, conversion to units of Plain<E> with the same weights.
template <class E>
struct Int8Unit {
  static constexpr int PARTS = INT8_DEPTH / per_unit<E>();

  static int place(int lane, int i) { return lane * INT8_DEPTH + i; }
  static uint8_t encode(int number) { return uint8_t(number); }

  struct Opener {
    void open(const char* w, UintVec (&parts)[PARTS]) const {
      UintVec unit;
      std::memcpy(&unit, w, sizeof unit);
      for (int part = 0; part < PARTS; ++part) parts[part] = elements(E{}, unit, part);
    }
  };

 private:
  static UintVec elements(Float32, UintVec unit, int part) { return as<UintVec>(int8_at(unit, part)); }
  static UintVec elements(BFloat16, UintVec unit, int part) {
    const UintVec low = as<UintVec>(int8_at(unit, 2 * part)), high = as<UintVec>(int8_at(unit, 2 * part + 1));
    return (low >> 16) | (high & 0xffff0000u);
  }
};

#if defined(QUIRE_AVX512) && defined(__AVX512VBMI__)
// The bytes of 0 .. 127 in bfloat16.
struct alignas(64) MagnitudeBytes {
  uint8_t low[128], high[128];
  constexpr MagnitudeBytes() : low(), high() {
    for (int number = 1, exponent = 0; number < 128; ++number) {
      while (number >> (exponent + 1)) ++exponent;
      const int bits = (127 + exponent) << 7 | ((number << (7 - exponent)) & 0x7f);
      low[number] = uint8_t(bits);
      high[number] = uint8_t(bits >> 8);
    }
  }
};

// Sign and magnitude: the two bytes of a magnitude's bfloat16 are looked up in tables of 128 bytes and
// interleaved. Each 16 bytes hold 4 columns: their first two depths, then the others, in the order of the
// interleaving.
template <>
struct Int8Unit<BFloat16> {
  static constexpr int PARTS = 2;

  static int place(int lane, int i) { return lane / 4 * 16 + i / 2 * 8 + lane % 4 * 2 + i % 2; }
  static uint8_t encode(int number) { return uint8_t(number < 0 ? 0x80 | -number : number); }

  class Opener {
   public:
    Opener() {
      for (int half = 0; half < 2; ++half) {
        low_[half] = _mm512_load_si512(BYTES.low + half * 64);
        high_[half] = _mm512_load_si512(BYTES.high + half * 64);
      }
    }

    void open(const char* w, UintVec (&parts)[PARTS]) const {
      const __m512i unit = _mm512_loadu_si512(w), sign = _mm512_set1_epi8(char(0x80));
      const __m512i low = _mm512_permutex2var_epi8(low_[0], unit, low_[1]);
      __m512i high = _mm512_permutex2var_epi8(high_[0], unit, high_[1]);
      high = _mm512_ternarylogic_epi32(high, unit, sign, 0xf8);  // high | (unit & sign)
      parts[0] = (UintVec)_mm512_unpacklo_epi8(low, high);
      parts[1] = (UintVec)_mm512_unpackhi_epi8(low, high);
    }

   private:
    static constexpr MagnitudeBytes BYTES{};
    __m512i low_[2], high_[2];
  };
};
#endif

// 8-bit weights for rows of type E. A form of Weights, see Plain.
template <class E>
struct Int8 {
  static constexpr bool IS_EXPANDED = false;
  static constexpr int DEPTH = INT8_DEPTH;
  using Stored = Int8Unit<E>;

  // See Plain. Computes panel by panel if the accumulators would leave too few registers to read weights
  // with.
  template <int ROWS, int PANELS>
  static void tile(const E* a, size_t stride, const char* w, size_t panel, int units, float* out, Fetch) {
    constexpr int AT_ONCE = ROWS * PANELS > MOST_SUMS ? 1 : PANELS;
    for (int first = 0; first < PANELS; first += AT_ONCE)
      sums<ROWS, AT_ONCE>(a, stride, w + first * panel, panel, units, out + first * LANES, PANELS * LANES);
  }

  // Converts a panel to the form of Plain<E>.
  static void expand(const char* w, int units, char* out) {
    const typename Stored::Opener opener;
    for (int k = 0; k < units; ++k, w += PANEL_UNIT, out += Stored::PARTS * PANEL_UNIT) {
      UintVec parts[Stored::PARTS];
      opener.open(w, parts);
      std::memcpy(out, parts, sizeof parts);
    }
  }

  // Packs a panel of plain weights [columns, depth] (torch's layout) into `packed`, and its columns' scales
  // into `scales`.
  static void pack_panel(const E* plain, int columns, int depth, int panel, char* packed, float* scales) {
    char* out = packed + size_t(panel) * (depth / DEPTH) * PANEL_UNIT;
    for (int lane = 0; lane < LANES; ++lane) {
      const int column = panel * LANES + lane;
      const E* from = plain + size_t(column) * depth;
      const float scale = column < columns ? scales[column] = scale_of(from, depth) : 0.0f;
      for (int d = 0; d < depth; ++d)
        out[size_t(d / DEPTH) * PANEL_UNIT + Stored::place(lane, d % DEPTH)] =
            char(Stored::encode(scale > 0.0f ? number_of(load(from[d]), scale) : 0));
    }
  }

 private:
  static constexpr int MOST_SUMS = 12;
  // With few rows, computing waits for memory: panels are short, and hardware prefetching restarts with each.
  static constexpr int FEW_ROWS = 4, FETCHED_AHEAD = 2048;  // bytes

  template <int ROWS, int PANELS>
  __attribute__((noinline)) static void sums(const E* a, size_t stride, const char* w, size_t panel, int units, float* out,
                                             int out_stride) {
    const typename Stored::Opener opener;
    Vec acc[ROWS][PANELS] = {};
    for (int k = 0; k < units; ++k, w += PANEL_UNIT, a += DEPTH)
      for (int p = 0; p < PANELS; ++p) {
        UintVec parts[Stored::PARTS];
        if (ROWS <= FEW_ROWS) __builtin_prefetch(w + p * panel + FETCHED_AHEAD);
        opener.open(w + p * panel, parts);
        for (int r = 0; r < ROWS; ++r)
          for (int part = 0; part < Stored::PARTS; ++part) {
            uint32_t x;
            std::memcpy(&x, a + r * stride + part * per_unit<E>(), sizeof x);
            acc[r][p] = multiply_add(acc[r][p], E{}, x, parts[part]);
          }
      }
    for (int r = 0; r < ROWS; ++r)
      for (int p = 0; p < PANELS; ++p) std::memcpy(out + r * out_stride + p * LANES, &acc[r][p], sizeof(Vec));
  }

  // The largest magnitude / 127. NaN if a weight is not finite: all products with that column are then NaN.
  static float scale_of(const E* from, int depth) {
    float most = 0.0f;
    for (int d = 0; d < depth; ++d) {
      const float magnitude = std::fabs(load(from[d]));
      if (!(magnitude <= std::numeric_limits<float>::max())) return std::numeric_limits<float>::quiet_NaN();
      most = std::max(most, magnitude);
    }
    return most / float(INT8_MOST);
  }

  static int number_of(float weight, float scale) {
    const float number = std::nearbyint(weight / scale);
    return int(std::min(std::max(number, float(-INT8_MOST)), float(INT8_MOST)));
  }
};

}  // namespace quire
