// How elements of keys and values are multiplied with those of queries and weights: 4 bytes, a unit, at a
// time.
//
// A unit is one float32, or, if queries and cache are bfloat16 and the processor multiplies pairs of them,
// two bfloat16.
#pragma once

#include <algorithm>
#include <type_traits>

#include "products.h"

namespace quire {

// Adjacent elements of one key.
template <class T> constexpr int together() { return std::is_same_v<T, BFloat16> ? 2 : 1; }

// 16 consecutive elements of keys, or 16 adjacent pairs, of which `count` exist.
template <class T> inline UintVec load_keys(const T* at, int count) {
  if constexpr (sizeof(T) * together<T>() == 4) {
    return vector_at<UintVec>(at, size_t(count) * 4);
  } else {
    return as<UintVec>(load_vec(at, count));
  }
}

// Q: stored type of queries, T: of keys and values.
template <class Q, class T>
struct Units {
  using Element = Float32;
  static constexpr int DEPTH = 1;              // elements of a query in a unit
  static constexpr int IN_STORED = together<T>();  // units in the result of `load_keys`
  static constexpr int KEYS = 1;               // keys with weights in one unit
  static constexpr int COLUMNS = LANES;        // of values at once
  static constexpr int VECS = 1;               // vectors that these become

  static uint32_t of_query(const Q* at) { return as_bits(load(*at)); }
  static UintVec part(UintVec stored, int number) {
    if constexpr (together<T>() == 1) return stored;
    else return one_of(stored, number);
  }
  static void load_values(const T* row, const T*, int count, UintVec* out) { out[0] = as<UintVec>(load_vec(row, count)); }
  static void keep_weights(float*, int, int) {}
  static void in_order(Vec*) {}
};

#if defined(QUIRE_AVX512) && defined(__AVX512BF16__)
template <>
struct Units<BFloat16, BFloat16> {
  using Element = BFloat16;
  static constexpr int DEPTH = 2, IN_STORED = 1, KEYS = 2, COLUMNS = 2 * LANES, VECS = 2;

  static uint32_t of_query(const BFloat16* at) { uint32_t unit; std::memcpy(&unit, at, sizeof unit); return unit; }
  static UintVec part(UintVec stored, int) { return stored; }

  // Interleaved elements of two rows; by quarters of a vector, even quarters first.
  static void load_values(const BFloat16* row, const BFloat16* next, int count, UintVec* out) {
    const __m512i a = load_row(row, count), b = load_row(next, count);
    out[0] = (UintVec)_mm512_unpacklo_epi16(a, b);
    out[1] = (UintVec)_mm512_unpackhi_epi16(a, b);
  }
  static __m512i load_row(const BFloat16* row, int count) {
    return count == COLUMNS ? _mm512_loadu_si512(row) : _mm512_maskz_loadu_epi16((uint32_t(1) << count) - 1, row);
  }

  // Converts weights from .. to - 1 (multiples of COLUMNS) to bfloat16 in place.
  static void keep_weights(float* weights, int from, int to) {
    for (int k = from; k < to; k += COLUMNS) {
      const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(weights + k + LANES), _mm512_loadu_ps(weights + k));
      std::memcpy(reinterpret_cast<BFloat16*>(weights) + k, &both, sizeof both);
    }
  }

  // Reorders the sums of COLUMNS columns into column order.
  static void in_order(Vec* sums) {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512 a = (__m512)sums[0], b = (__m512)sums[1];
    sums[0] = (Vec)_mm512_permutex2var_ps(a, first, b);
    sums[1] = (Vec)_mm512_permutex2var_ps(a, _mm512_add_epi32(first, _mm512_set1_epi32(8)), b);
  }
};
#endif

}  // namespace quire
