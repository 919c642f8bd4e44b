// The softmax of one query, part by part of its keys.
//
// Not a template over the number of queries: the same instructions compute a query's weights whatever queries
// are computed with it.
#pragma once

#include <algorithm>
#include <limits>

#include "vectors.h"

namespace quire {

// scale > 0; window, chunk, softcap: 0 = none; sinks: a further score of each query head, null = none
struct Rule {
  float scale;
  int window, chunk;
  float softcap;
  const float* sinks;

  bool sees_all() const { return window <= 0 && chunk <= 0; }

  // The first key that the token at `position` sees.
  int first_key(int position) const {
    if (chunk > 0) return position / chunk * chunk;
    return window > 0 ? std::max(0, position + 1 - window) : 0;
  }
};

constexpr int GRAIN = 2 * LANES;  // keys
constexpr float LOG2_E = 1.44269504088896341f;

// Powers of two. Earlier weights are relative to an earlier `top`.
struct Softmax {
  float top = -std::numeric_limits<float>::infinity();
  Vec total = {};  // by key position modulo 16

  // The sum of all weights, with that of a score `sink` if it is not null.
  float sum_with(const float* sink) const {
    return sum(total) + (sink ? exp2_vec(splat(*sink * LOG2_E - top))[0] : 0.0f);
  }

  // Converts scores begin .. end - 1 of a part to weights in place, and those around them in the same grains
  // to zero. Returns the factor for sums that were weighted before.
  __attribute__((noinline)) float weigh(float* scores, int begin, int end, const Rule& rule) {
    const int from = begin / GRAIN * GRAIN, to = (end + GRAIN - 1) / GRAIN * GRAIN;
    if (rule.softcap > 0) cap(scores + from, to - from, rule);
    const float hidden = -std::numeric_limits<float>::infinity();
    std::fill(scores + from, scores + begin, hidden);
    std::fill(scores + end, scores + to, hidden);
    const float unit = LOG2_E * (rule.softcap > 0 ? 1.0f : rule.scale);
    const float factor = raise(highest(scores + from, to - from) * unit);
    Vec sums = {};
    for (int k = from; k < to; k += LANES) {
      const Vec weight = exp2_vec(vector_at<Vec>(scores + k) * unit - top);
      put_vector(scores + k, weight);
      sums += weight;
    }
    total = total * factor + sums;
    return factor;
  }

 private:
  static void cap(float* scores, int count, const Rule& rule) {
    for (int k = 0; k < count; k += LANES) {
      const Vec v = rule.softcap * tanh_vec(vector_at<Vec>(scores + k) * rule.scale / rule.softcap);
      put_vector(scores + k, v);
    }
  }

  static float highest(const float* scores, int count) {
    Vec found = vector_at<Vec>(scores);
    for (int k = LANES; k < count; k += LANES) {
      const Vec v = vector_at<Vec>(scores + k);
      found = larger(v, found);
    }
    return most(found);
  }

  float raise(float found) {
    if (!(found > top)) return 1.0f;
    const float factor = exp2_vec(splat(top - found))[0];
    top = found;
    return factor;
  }
};

}  // namespace quire
