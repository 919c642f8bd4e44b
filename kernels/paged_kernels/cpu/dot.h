// Sums of products of 8-bit integers, exact in 32 bits, with the instructions of the processor.
#pragma once

#include "vectors.h"

namespace quire {

// Added to a weight of 8 bits before it is stored as a byte: the AVX-512 instruction takes weights without a
// sign.
#if defined(QUIRE_AVX512) && defined(__AVX512VNNI__)
constexpr int BYTE_BIAS = 128;
#else
constexpr int BYTE_BIAS = 0;
#endif

// sums[c] + x[0] * weights[4c] + .. + x[3] * weights[4c + 3]. `x`: four signed bytes from -127 to 127; weights:
// bytes from -128 to 127 plus BYTE_BIAS.
inline IntVec dot(IntVec sums, UintVec weights, uint32_t x) {
#if defined(QUIRE_AVX512) && defined(__AVX512VNNI__)
  return (IntVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(int(x)));
#elif defined(QUIRE_AVX512)
  // Even and odd bytes, widened to 16 bits: no sum of two products saturates.
  const __m512i w = (__m512i)weights, a = _mm512_set1_epi32(int(x));
  const __m512i even = _mm512_madd_epi16(_mm512_srai_epi16(_mm512_slli_epi16(w, 8), 8), _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srai_epi16(w, 8), _mm512_srai_epi16(a, 8));
  return sums + (IntVec)even + (IntVec)odd;
#elif defined(__AVX2__)
  __m256i halves[2], w[2];
  std::memcpy(halves, &sums, sizeof sums);
  std::memcpy(w, &weights, sizeof weights);
  const __m256i a = _mm256_set1_epi32(int(x));
  const __m256i even_a = _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8), odd_a = _mm256_srai_epi16(a, 8);
  for (int h = 0; h < 2; ++h) {
    const __m256i even = _mm256_madd_epi16(_mm256_srai_epi16(_mm256_slli_epi16(w[h], 8), 8), even_a);
    const __m256i odd = _mm256_madd_epi16(_mm256_srai_epi16(w[h], 8), odd_a);
    halves[h] = _mm256_add_epi32(halves[h], _mm256_add_epi32(even, odd));
  }
  std::memcpy(&sums, halves, sizeof sums);
  return sums;
#elif defined(__ARM_NEON) && defined(__aarch64__)
  int32x4_t quarters[4];
  int8x16_t w[4];
  std::memcpy(quarters, &sums, sizeof sums);
  std::memcpy(w, &weights, sizeof weights);
  const int8x16_t a = vreinterpretq_s8_u32(vdupq_n_u32(x));
  for (int q = 0; q < 4; ++q) {
#if defined(__ARM_FEATURE_DOTPROD)
    quarters[q] = vdotq_s32(quarters[q], w[q], a);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(w[q]), vget_low_s8(a)), high = vmull_high_s8(w[q], a);
    quarters[q] = vpadalq_s16(quarters[q], vpaddq_s16(low, high));
#endif
  }
  std::memcpy(&sums, quarters, sizeof sums);
  return sums;
#else
  for (int i = 0; i < 4; ++i) {
    const IntVec numbers = as<IntVec>(weights << (24 - 8 * i)) >> 24;
    sums += numbers * (int32_t(x << (24 - 8 * i)) >> 24);
  }
  return sums;
#endif
}

}  // namespace quire
