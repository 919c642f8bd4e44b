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

// Adds, for each lane, the products of its four bytes of two vectors, one of rows (from -127 to 127) and one of
// weights (from -128 to 127, plus BYTE_BIAS): `add` of `part` of both, for each phase.
struct Dot {
#if defined(QUIRE_AVX512) && defined(__AVX512VNNI__)
  static constexpr int PHASES = 1;
  static UintVec part(UintVec bytes, int) { return bytes; }
  static IntVec add(IntVec sums, UintVec a, UintVec w) {
    return (IntVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)a);
  }
#elif defined(__AVX2__)
  // Even bytes, then odd ones, widened to 16 bits: no sum of two products saturates.
  static constexpr int PHASES = 2;
  template <class U> static U part(U bytes, int phase) {
    if constexpr (IsHalves<U>::value) {
      return {part(bytes.low, phase), part(bytes.high, phase)};
    } else {
      typedef int16_t Shorts __attribute__((vector_size(sizeof(U))));
      return (U)(phase == 0 ? Shorts((Shorts)bytes << 8) >> 8 : (Shorts)bytes >> 8);
    }
  }
  template <class I, class U> static I add(I sums, U a, U w) {
    if constexpr (IsHalves<I>::value) return {add(sums.low, a.low, w.low), add(sums.high, a.high, w.high)};
#if defined(QUIRE_AVX512)
    else return sums + (I)_mm512_madd_epi16((__m512i)a, (__m512i)w);
#else
    else return sums + (I)_mm256_madd_epi16((__m256i)a, (__m256i)w);
#endif
  }
#elif defined(__ARM_NEON) && defined(__aarch64__)
  static constexpr int PHASES = 1;
  static UintVec part(UintVec bytes, int) { return bytes; }
  template <class I, class U> static I add(I sums, U a, U w) {
    if constexpr (IsHalves<I>::value) return {add(sums.low, a.low, w.low), add(sums.high, a.high, w.high)};
    else return (I)add_bytes((int32x4_t)sums, (int8x16_t)a, (int8x16_t)w);
  }
#else
  // One byte of each lane after the other.
  static constexpr int PHASES = 4;
  static UintVec part(UintVec bytes, int phase) { return as<UintVec>(as<IntVec>(bytes << (24 - 8 * phase)) >> 24); }
  static IntVec add(IntVec sums, UintVec a, UintVec w) { return sums + as<IntVec>(a) * as<IntVec>(w); }
#endif

#if defined(__ARM_NEON) && defined(__aarch64__)
 private:
  static int32x4_t add_bytes(int32x4_t sums, int8x16_t a, int8x16_t w) {
#if defined(__ARM_FEATURE_DOTPROD)
    return vdotq_s32(sums, w, a);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(a)), high = vmull_high_s8(w, a);
    return vpadalq_s16(sums, vpaddq_s16(low, high));
#endif
  }
#endif
};

}  // namespace quire
