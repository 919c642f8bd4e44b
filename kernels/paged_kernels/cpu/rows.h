// Operations on rows between products: norms, rotary positions.
//
// Values are rounded to E wherever transformers' modules round them, so that both agree except for the order
// of sums.
#pragma once

#include <cmath>

#include "vectors.h"

namespace quire {

// x / sqrt(mean(x^2) + eps) * weight. `one_plus`: the factor is 1 + weight, multiplied before rounding
// (Gemma).
template <class E>
struct RmsNorm {
  const E* weight;
  float eps;
  bool one_plus;

  // `out` may be `in`; `adds`: add the result to its contents.
  void apply(const E* in, E* out, int width, bool adds) const {
    Vec squares = {};
    for (int d = 0; d < width; d += LANES) {
      const Vec x = load_vec(in + d, std::min(LANES, width - d));
      squares += x * x;
    }
    const float factor = 1.0f / std::sqrt(sum(squares) / float(width) + eps);
    for (int d = 0; d < width; d += LANES) {
      const int count = std::min(LANES, width - d);
      const Vec normed = load_vec(in + d, count) * factor, w = load_vec(weight + d, count);
      Vec value = one_plus ? normed * (1.0f + w) : rounded<E>(normed) * w;
      if (adds) value = load_vec(out + d, count) + rounded<E>(value);
      store_vec(out + d, value, count);
    }
  }
};

// sum + a * b, the product rounded to E. With float32 it is fused, explicitly: where both terms are products,
// compilers differ in which one they fuse.
template <class E> inline Vec plus_product(Vec sum, Vec a, Vec b) { return sum + rounded<E>(a * b); }
template <> inline Vec plus_product<Float32>(Vec sum, Vec a, Vec b) { return fused(a, b, sum); }

// Rotates the first `width` elements of a head by its position's angles; `cosines` and `sines` [width].
template <class E>
void rotate(E* head, const E* cosines, const E* sines, int width) {
  const int half = width / 2;
  for (int i = 0; i < half; i += LANES) {
    const int count = std::min(LANES, half - i);
    const Vec a = load_vec(head + i, count), b = load_vec(head + half + i, count);
    const Vec left_cosine = load_vec(cosines + i, count), left_sine = load_vec(sines + i, count);
    const Vec right_cosine = load_vec(cosines + half + i, count), right_sine = load_vec(sines + half + i, count);
    store_vec(head + i, plus_product<E>(-rounded<E>(b * left_sine), a, left_cosine), count);
    store_vec(head + half + i, plus_product<E>(rounded<E>(a * right_sine), b, right_cosine), count);
  }
}

}  // namespace quire
