// The first of a row's highest logits, and whether all are finite, in one pass over the row.
#pragma once

#include <algorithm>

#include "vectors.h"

namespace quire {

struct Choice {
  int64_t place;  // an index of the row; meaningless if the row is not finite
  bool is_finite;
};

// State of each lane over the pieces seen so far.
struct Lanes {
  static constexpr int VECS = 4, PIECE = VECS * LANES;

  Vec highest = splat(-__builtin_inff());
  IntVec pieces = {};   // the first piece that has `highest`
  IntVec largest = {};  // of all, bits without the sign: infinities and NaN compare highest

  void see(const Float32* at, int32_t piece) {
    Vec top = highest;
    for (int i = 0; i < VECS; ++i) {
      const Vec x = load_vec(at + i * LANES);
      const IntVec bits = as<IntVec>(x) & 0x7fffffff;
      largest = larger(bits, largest);
      top = larger(x, top);
    }
    pieces = select(top > highest, splat_as<IntVec>(piece), pieces);
    highest = top;
  }
};

inline Choice choose(const Float32* row, int64_t count) {
  const int64_t whole = count / Lanes::PIECE;
  Lanes seen;
  for (int64_t piece = 0; piece < whole; ++piece) seen.see(row + piece * Lanes::PIECE, int32_t(piece));
  float highest = seen.highest[0];
  int32_t largest = seen.largest[0];
  for (int lane = 1; lane < LANES; ++lane) {
    highest = std::max(highest, seen.highest[lane]);
    largest = std::max(largest, seen.largest[lane]);
  }
  int32_t first = int32_t(whole);
  for (int lane = 0; lane < LANES; ++lane)
    if (seen.highest[lane] == highest) first = std::min(first, seen.pieces[lane]);
  int64_t place = int64_t(first) * Lanes::PIECE;
  while (place < whole * Lanes::PIECE && row[place].bits != highest) ++place;
  if (place >= whole * Lanes::PIECE) place = 0;
  for (int64_t at = whole * Lanes::PIECE; at < count; ++at) {
    largest = std::max(largest, int32_t(as_bits(row[at].bits) & 0x7fffffff));
    if (row[at].bits > highest) { highest = row[at].bits; place = at; }
  }
  return {place, largest < 0x7f800000};
}

}  // namespace quire
