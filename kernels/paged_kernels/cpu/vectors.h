// Vectors of sixteen float32 lanes, and the element types stored in fewer bits.
#pragma once

#include <algorithm>
#include <limits>

#include "lanes.h"

namespace quire {

struct Float32 { float bits; };
struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };
struct Int8 { int8_t bits; };  // an integer: what it is multiplied with is stored elsewhere
struct Float8 { uint8_t bits; };  // E4M3, as Int8; never NaN

inline float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, sizeof x); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, sizeof bits); return bits; }

// The bits of E4M3 numbers, where float32 has sign, exponent and mantissa, are float32 numbers smaller by this factor.
constexpr float FLOAT8_FACTOR = 0x1p120f;

inline float load(Float32 x) { return x.bits; }
inline float load(Int8 x) { return x.bits; }
inline float load(BFloat16 x) { return as_float(uint32_t(x.bits) << 16); }
inline float load(Float8 x) {
  return as_float(uint32_t(x.bits & 0x80) << 24 | uint32_t(x.bits & 0x7f) << 20) * FLOAT8_FACTOR;
}
inline float load(Float16 x) {
  // Shift exponent and mantissa into place, then correct the exponent's bias by a multiplication, which also
  // normalises.
  uint32_t magnitude = uint32_t(x.bits & 0x7fff) << 13;
  float value = as_float(magnitude) * as_float(0x77800000u);  // 2^112
  if ((x.bits & 0x7c00) == 0x7c00) value = as_float(magnitude | 0x7f800000u);
  return as_float(as_bits(value) | uint32_t(x.bits & 0x8000) << 16);
}

inline void store(Float32& out, float x) { out.bits = x; }
inline void store(BFloat16& out, float x) {
  uint32_t bits = as_bits(x);
  out.bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void store(Float16& out, float x) {
  uint32_t bits = as_bits(x), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000u) { out.bits = uint16_t(sign | 0x7e00); return; }
  if (magnitude >= 0x477ff000u) { out.bits = uint16_t(sign | 0x7c00); return; }
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 rounds it
    out.bits = uint16_t(sign | (as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u));
    return;
  }
  out.bits = uint16_t(sign | ((magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

// Prefetches a line of memory into the second-level cache. In assembler where possible: GCC removes functions
// that only prefetch.
inline void ask_for(const char* line) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" : : "m"(*line));
#else
  __builtin_prefetch(line, 0, 2);
#endif
}

template <class T> inline Vec load_vec(const T* p, int count) {
  float lanes[LANES] = {};
  for (int i = 0; i < count; ++i) lanes[i] = load(p[i]);
  return vector_at<Vec>(lanes);
}
template <> inline Vec load_vec<Float32>(const Float32* p, int count) { return vector_at<Vec>(p, size_t(count) * sizeof(float)); }
// Widens 16 integers from 16 to 32 bits, and back.
inline UintVec widened(HalfVec h) {
#ifdef QUIRE_AVX512
  return (UintVec)_mm512_cvtepu16_epi32((__m256i)h);
#else
  return converted<UintVec>(h);
#endif
}
inline HalfVec halved(UintVec x) {
#ifdef QUIRE_AVX512
  return (HalfVec)_mm512_cvtepi32_epi16((__m512i)x);
#else
  return converted<HalfVec>(x);
#endif
}

// The first or second bfloat16 of each pair, as float32 bits.
inline UintVec one_of(UintVec pairs, int number) { return number == 0 ? pairs << 16 : pairs & 0xffff0000u; }

template <> inline Vec load_vec<BFloat16>(const BFloat16* p, int count) {
  return as<Vec>(widened(vector_at<HalfVec>(p, size_t(count) * sizeof *p)) << 16);
}
// The value of each float16, as `load` computes it.
inline Vec widened_float16(HalfVec h) {
#if defined(QUIRE_AVX512)
  return (Vec)_mm512_cvtph_ps((__m256i)h);
#elif defined(__AVX2__) && defined(__F16C__)
  return {(decltype(Vec::low))_mm256_cvtph_ps((__m128i)h.low), (decltype(Vec::low))_mm256_cvtph_ps((__m128i)h.high)};
#else
  const UintVec bits = widened(h), size = (bits & 0x7fffu) << 13;
  const Vec value = as<Vec>(size) * as_float(0x77800000u);
  const UintVec is_number = as<UintVec>((bits & 0x7c00u) != splat_as<UintVec>(0x7c00u));
  return as<Vec>((as<UintVec>(value) & is_number) | ((size | 0x7f800000u) & ~is_number) | (bits & 0x8000u) << 16);
#endif
}
template <> inline Vec load_vec<Float16>(const Float16* p, int count) {
  return widened_float16(vector_at<HalfVec>(p, size_t(count) * sizeof *p));
}
template <> inline Vec load_vec<Int8>(const Int8* p, int count) {
#if defined(__AVX2__)
  const auto numbers = vector_at<__m128i>(p, size_t(count));
#if defined(QUIRE_AVX512)
  return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(numbers));
#else
  const __m256i low = _mm256_cvtepi8_epi32(numbers), high = _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(numbers, numbers));
  return {(decltype(Vec::low))_mm256_cvtepi32_ps(low), (decltype(Vec::low))_mm256_cvtepi32_ps(high)};
#endif
#else
  return converted<Vec>(converted<IntVec>(vector_at<ByteVec>(p, size_t(count))));
#endif
}
// Byte `number` of each lane, an E4M3 number, as a float32 smaller by FLOAT8_FACTOR.
inline Vec small_float8(UintVec bytes, int number) {
  return as<Vec>(as<UintVec>(as<IntVec>(bytes << (24 - 8 * number)) >> 4) & 0x87f00000u);
}
template <> inline Vec load_vec<Float8>(const Float8* p, int count) {
#if defined(QUIRE_AVX512)
  const UintVec bytes = (UintVec)_mm512_cvtepu8_epi32(vector_at<__m128i>(p, size_t(count)));
#elif defined(__AVX2__)
  const auto numbers = vector_at<__m128i>(p, size_t(count));
  using Half = decltype(UintVec::low);
  const UintVec bytes{(Half)_mm256_cvtepu8_epi32(numbers), (Half)_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(numbers, numbers))};
#else
  const UintVec bytes = as<UintVec>(converted<IntVec>(vector_at<ByteVec>(p, size_t(count))));
#endif
  return small_float8(bytes, 0) * FLOAT8_FACTOR;
}
template <class T> inline Vec load_vec(const T* p) { return load_vec(p, LANES); }

// Bits of bfloat16, rounded to nearest, ties to even.
inline HalfVec narrow(Vec x) {
#if defined(QUIRE_AVX512) && defined(__AVX512BF16__)
  return (HalfVec)_mm512_cvtneps_pbh((__m512)x);
#else
  UintVec bits = as<UintVec>(x);
  UintVec rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  IntVec is_number = x == x;
  UintVec chosen = (rounded & as<UintVec>(is_number)) | (0x7fc0u & ~as<UintVec>(is_number));
  return halved(chosen);
#endif
}

template <class T> inline void store_vec(T* p, Vec x, int count) {
  float lanes[LANES];
  put_vector(lanes, x);
  for (int i = 0; i < count; ++i) store(p[i], lanes[i]);
}
template <> inline void store_vec<Float32>(Float32* p, Vec x, int count) { put_vector(p, x, size_t(count) * sizeof *p); }
template <> inline void store_vec<BFloat16>(BFloat16* p, Vec x, int count) { put_vector(p, narrow(x), size_t(count) * sizeof *p); }

// A value after storing it as T.
template <class T> inline Vec rounded(Vec x) {
  T kept[LANES];
  store_vec(kept, x, LANES);
  return load_vec(kept);
}
template <> inline Vec rounded<Float32>(Vec x) { return x; }
template <> inline Vec rounded<BFloat16>(Vec x) { return as<Vec>(widened(narrow(x)) << 16); }

inline float sum(Vec x) { return folded(x, [](auto a, auto b) { return a + b; }); }
inline float most(Vec x) { return folded(x, [](auto a, auto b) { return larger(a, b); }); }

// The E4M3 numbers nearest to those of x, ties to even; none may be above 448 when it is rounded.
inline IntVec float8_of(Vec x) {
  const UintVec bits = as<UintVec>(x), size = bits & 0x7fffffffu;
  const UintVec normal = ((size + 0x7ffffu + ((size >> 20) & 1u)) >> 20) - (120u << 3);
  const UintVec small = as<UintVec>(as<Vec>(size) + 0x1p14f) - 0x46800000u;  // adding rounds to multiples of 2^-9
  return as<IntVec>(select(as<Vec>(size) < splat(0x1p-6f), small, normal) | ((bits >> 24) & 0x80u));
}

// How some numbers are rounded to integers from -127 to 127, or to E4M3 numbers up to 448, each of which stands for
// itself times `scale`. The scale is NaN if one of the numbers is not finite.
struct Rounding {
  float factor, scale;  // x * factor is rounded; both 0 if all are smaller than LEAST

  static constexpr float LEAST = 1e-30f, MOST = 127.0f, MOST_FLOAT8 = 448.0f;

  template <class E> static Rounding of(const E* from, int count, float most = MOST) {
    IntVec bits = {};
    for (int d = 0; d < count; d += LANES) {
      const IntVec x = as<IntVec>(as<UintVec>(load_vec(from + d, std::min(LANES, count - d))) & 0x7fffffffu);
      bits = larger(x, bits);  // infinities and NaN are larger than numbers
    }
    const int32_t top = folded(bits, [](auto a, auto b) { return larger(a, b); });
    if (top >= 0x7f800000) return {0.0f, std::numeric_limits<float>::quiet_NaN()};
    const float size = as_float(uint32_t(top));
    return size > LEAST ? Rounding{most / size, size / most} : Rounding{0.0f, 0.0f};
  }

  // The integers of `count` numbers, and zeros behind them; ties to even.
  template <class E> IntVec integers(const E* from, int count) const {
    const Vec magic = splat(12582912.0f);  // adding it rounds to the nearest integer
    return factor > 0.0f ? as<IntVec>(fused(load_vec(from, count), splat(factor), magic)) - 0x4b400000 : IntVec{};
  }

  // The E4M3 numbers of `count` numbers. The product is rounded to float32 before.
  template <class E> IntVec floats(const E* from, int count) const {
    return factor > 0.0f ? float8_of(load_vec(from, count) * factor) : IntVec{};
  }
};

// e^x for x <= 0, about 1 ulp; 0 below -87. NaN stays NaN.
inline Vec exp_vec(Vec x) {
  const Vec low = splat(-87.0f), magic = splat(12582912.0f);
  IntVec underflow = x < low;
  Vec y = select(underflow, low, x);
  Vec n = (y * 1.44269504088896341f + magic) - magic;
  Vec r = y - n * 0.693359375f + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Vec factor = as<Vec>((converted<IntVec>(n) + 127) << 23);
  return select(underflow, Vec{}, p * factor);
}

// 2^x for x up to about 100, about 1 ulp; 0 for very negative x. NaN stays NaN.
inline Vec exp2_vec(Vec x) {
#ifdef QUIRE_AVX512
  const Vec y = (Vec)_mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);
  const Vec n = (Vec)_mm512_roundscale_ps((__m512)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Vec low = splat(-126.0f), magic = splat(12582912.0f);
  const IntVec underflow = x < low;
  const Vec y = select(underflow, low, x);
  const Vec n = (y + magic) - magic;
#endif
  const Vec r = y - n;
  Vec p = splat(1.32647273e-3f);
  p = p * r + 9.67151299e-3f;
  p = p * r + 5.55073358e-2f;
  p = p * r + 2.40222424e-1f;
  p = p * r + 6.93147004e-1f;
  p = p * r + 1.0f;
#ifdef QUIRE_AVX512
  return (Vec)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  const Vec factor = as<Vec>((converted<IntVec>(n) + 127) << 23);
  return select(underflow, Vec{}, p * factor);
#endif
}

inline Vec magnitude(Vec x) { return as<Vec>(as<UintVec>(x) & 0x7fffffffu); }

// 1 / (1 + e^-x); takes the exponential of -|x| only.
inline Vec sigmoid(Vec x) {
  Vec e = exp_vec(-magnitude(x)), one = splat(1.0f);
  return select(x < Vec{}, e, one) / (one + e);
}

inline Vec tanh_vec(Vec x) {
  Vec e = exp_vec(magnitude(x) * -2.0f), one = splat(1.0f);
  Vec t = (one - e) / (one + e);
  return select(x < Vec{}, -t, t);
}

}  // namespace quire
