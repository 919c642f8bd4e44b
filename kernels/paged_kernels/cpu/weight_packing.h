// Packing of weights: the order in which products read them.
//
// Weights are packed into panels of 16 columns. A panel holds units of 64 bytes, one after the other in the
// order of depth; a unit has 4 bytes of each of the 16 columns. Columns beyond the last are zero.
#pragma once

#include <cstddef>

#include "dot.h"
#include "vectors.h"

namespace quire {

constexpr int PANEL_UNIT = LANES * 4;  // bytes

// Groups of quantized weights: `size` depths have a scale in common and, if `offsets`, an offset. `half`: both
// are stored as Float16, else as float32.
struct Groups {
  int size;
  bool offsets, half;
};

// Number of groups of a depth, the last one maybe smaller.
inline size_t num_groups(int depth, int group) { return size_t(depth + group - 1) / group; }

// Weights in their own type: a unit has one float32 of each column, or two bfloat16 of consecutive depth.
template <class E>
struct PlainPanels {
  static constexpr int DEPTH = 4 / int(sizeof(E));  // of a unit

  static int units(int depth, const Groups&) { return depth / DEPTH; }
  static size_t panel_bytes(int depth, const Groups&) { return size_t(depth / DEPTH) * PANEL_UNIT; }

  // Packs one panel of weights [columns, depth] (torch's layout) into `packed`.
  static void pack_panel(const E* plain, int columns, int depth, int panel, char* packed) {
    const int units = depth / DEPTH;
    E* out = reinterpret_cast<E*>(packed + size_t(panel) * units * PANEL_UNIT);
    for (int unit = 0; unit < units; ++unit)
      for (int lane = 0; lane < LANES; ++lane)
        for (int i = 0; i < DEPTH; ++i, ++out) {
          const int column = panel * LANES + lane;
          *out = column < columns ? plain[size_t(column) * depth + unit * DEPTH + i] : E{};
        }
  }
};

// Quantized weights: a panel holds for each group 16 scales, 16 offsets if there are any, then the group's
// units. A unit of 8 bits has 4 depths of each column; of 4 bits 8, the first 4 in the low halves of the bytes.
// `BIAS`: added to numbers of 8 bits.
template <int BITS, int BIAS = BYTE_BIAS>
struct IntegerPanels {
  static constexpr int PARTS = 8 / BITS, DEPTH = 4 * PARTS;  // of a unit

  // Subtracted from a stored number to get the number.
  static int bias(const Groups& groups) { return BITS == 8 ? BIAS : groups.offsets ? 0 : 8; }

  static size_t factor_bytes(const Groups& groups) { return LANES * (groups.half ? sizeof(Float16) : sizeof(float)); }
  static size_t head_bytes(const Groups& groups) { return factor_bytes(groups) * (groups.offsets ? 2 : 1); }
  static int units(int depth, const Groups& groups) { return int(num_groups(depth, groups.size)) * (groups.size / DEPTH); }
  static size_t panel_bytes(int depth, const Groups& groups) {
    return num_groups(depth, groups.size) * head_bytes(groups) + size_t(units(depth, groups)) * PANEL_UNIT;
  }

  // Packs a panel of numbers [columns, depth] with their factors [columns, groups]; `offsets` may be null.
  static void pack_panel(const int8_t* numbers, const float* scales, const float* offsets, int columns, int depth,
                         const Groups& groups, int panel, char* packed) {
    const int count = int(num_groups(depth, groups.size)), base = bias(groups);
    char* out = packed + size_t(panel) * panel_bytes(depth, groups);
    for (int g = 0; g < count; ++g) {
      out = pack_factors(scales, columns, count, panel, g, groups.half, out);
      if (offsets) out = pack_factors(offsets, columns, count, panel, g, groups.half, out);
      std::memset(out, 0, size_t(groups.size / DEPTH) * PANEL_UNIT);
      for (int lane = 0; lane < LANES; ++lane)
        for (int i = 0; i < groups.size; ++i) {
          const int column = panel * LANES + lane, d = g * groups.size + i;
          const int number = base + (column < columns && d < depth ? numbers[size_t(column) * depth + d] : 0);
          const int part = i % DEPTH / 4;
          out[size_t(i / DEPTH) * PANEL_UNIT + lane * 4 + i % 4] |= char(uint8_t(number << (part * BITS)));
        }
      out += size_t(groups.size / DEPTH) * PANEL_UNIT;
    }
  }

 private:
  static char* pack_factors(const float* from, int columns, int count, int panel, int g, bool half, char* out) {
    for (int lane = 0; lane < LANES; ++lane) {
      const int column = panel * LANES + lane;
      const float value = column < columns ? from[size_t(column) * count + g] : 0.0f;
      if (half) store(reinterpret_cast<Float16*>(out)[lane], value);
      else store(reinterpret_cast<Float32*>(out)[lane], value);
    }
    return out + LANES * (half ? sizeof(Float16) : sizeof(float));
  }
};

// E4M3 numbers with a scale for each group.
using Float8Panels = IntegerPanels<8, 0>;

}  // namespace quire
