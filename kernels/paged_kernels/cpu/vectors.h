// Vectors of sixteen float32 lanes, and the element types stored in fewer bits.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define QUIRE_AVX512  // compilers would split conversions of whole vectors into halves
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace quire {

constexpr int LANES = 16;
typedef float Vec __attribute__((vector_size(LANES * sizeof(float))));
typedef float LooseVec __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));  // unaligned
typedef int32_t IntVec __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef uint32_t UintVec __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef uint16_t HalfVec __attribute__((vector_size(LANES * sizeof(uint16_t))));

struct Float32 { float bits; };
struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

inline float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, sizeof x); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, sizeof bits); return bits; }
template <class To, class From>
inline To as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

inline float load(Float32 x) { return x.bits; }
inline float load(BFloat16 x) { return as_float(uint32_t(x.bits) << 16); }
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

inline Vec vec_at(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
inline void put_vec(float* p, Vec x) { *reinterpret_cast<LooseVec*>(p) = x; }

inline Vec splat(float x) { return Vec{} + x; }

template <class T> inline Vec load_vec(const T* p, int count) {
  Vec v = {};
  if (count == LANES) { for (int i = 0; i < LANES; ++i) v[i] = load(p[i]); }
  else { for (int i = 0; i < count; ++i) v[i] = load(p[i]); }
  return v;
}
template <> inline Vec load_vec<Float32>(const Float32* p, int count) {
  Vec v = {};
  std::memcpy(&v, p, size_t(count) * sizeof(float));
  return v;
}
// Widens 16 integers from 16 to 32 bits, and back.
inline UintVec widened(HalfVec h) {
#ifdef QUIRE_AVX512
  return (UintVec)_mm512_cvtepu16_epi32((__m256i)h);
#else
  return __builtin_convertvector(h, UintVec);
#endif
}
inline HalfVec halved(UintVec x) {
#ifdef QUIRE_AVX512
  return (HalfVec)_mm512_cvtepi32_epi16((__m512i)x);
#else
  return __builtin_convertvector(x, HalfVec);
#endif
}

template <> inline Vec load_vec<BFloat16>(const BFloat16* p, int count) {
  if (count != LANES) { Vec v = {}; for (int i = 0; i < count; ++i) v[i] = load(p[i]); return v; }
  HalfVec h;
  std::memcpy(&h, p, sizeof h);
  return as<Vec>(widened(h) << 16);
}
template <> inline Vec load_vec<Float16>(const Float16* p, int count) {
  if (count != LANES) { Vec v = {}; for (int i = 0; i < count; ++i) v[i] = load(p[i]); return v; }
#if defined(QUIRE_AVX512)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__)
  const __m256 halves[2] = {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
                            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
  Vec v;
  std::memcpy(&v, halves, sizeof v);
  return v;
#else
  Vec v = {};
  for (int i = 0; i < LANES; ++i) v[i] = load(p[i]);
  return v;
#endif
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
  for (int i = 0; i < count; ++i) store(p[i], x[i]);
}
template <> inline void store_vec<Float32>(Float32* p, Vec x, int count) { std::memcpy(p, &x, size_t(count) * sizeof(float)); }
template <> inline void store_vec<BFloat16>(BFloat16* p, Vec x, int count) {
  HalfVec h = narrow(x);
  if (count == LANES) std::memcpy(p, &h, sizeof h);
  else std::memcpy(p, &h, size_t(count) * sizeof(uint16_t));
}

// A value after storing it as T.
template <class T> inline Vec rounded(Vec x) {
  T kept[LANES];
  store_vec(kept, x, LANES);
  return load_vec(kept);
}
template <> inline Vec rounded<Float32>(Vec x) { return x; }
template <> inline Vec rounded<BFloat16>(Vec x) { return as<Vec>(widened(narrow(x)) << 16); }

// Combines lanes by halves, then quarters, ...: always in the same order.
template <class V, class Take> inline auto folded(V x, Take take) {
  typedef decltype(x[0] + x[0]) Element;
  typedef Element HalfOf __attribute__((vector_size(8 * sizeof(Element))));
  typedef Element QuarterOf __attribute__((vector_size(4 * sizeof(Element))));
  HalfOf halves[2];
  std::memcpy(halves, &x, sizeof x);
  const HalfOf half = take(halves[0], halves[1]);
  QuarterOf quarters[2];
  std::memcpy(quarters, &half, sizeof half);
  const QuarterOf quarter = take(quarters[0], quarters[1]);
  return take(take(Element(quarter[0]), Element(quarter[2])), take(Element(quarter[1]), Element(quarter[3])));
}
inline float sum(Vec x) { return folded(x, [](auto a, auto b) { return a + b; }); }
inline float most(Vec x) { return folded(x, [](auto a, auto b) { return a > b ? a : b; }); }

// e^x for x <= 0, about 1 ulp; 0 below -87. NaN stays NaN.
inline Vec exp_vec(Vec x) {
  const Vec low = splat(-87.0f), magic = splat(12582912.0f);
  IntVec underflow = x < low;
  Vec y = underflow ? low : x;
  Vec n = (y * 1.44269504088896341f + magic) - magic;
  Vec r = y - n * 0.693359375f + n * 2.12194440e-4f;
  Vec p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  Vec factor = as<Vec>((__builtin_convertvector(n, IntVec) + 127) << 23);
  return underflow ? Vec{} : p * factor;
}

// 2^x for x up to about 100, about 1 ulp; 0 for very negative x. NaN stays NaN.
inline Vec exp2_vec(Vec x) {
#ifdef QUIRE_AVX512
  const Vec y = (Vec)_mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);
  const Vec n = (Vec)_mm512_roundscale_ps((__m512)y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const Vec low = splat(-126.0f), magic = splat(12582912.0f);
  const IntVec underflow = x < low;
  const Vec y = underflow ? low : x;
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
  const Vec factor = as<Vec>((__builtin_convertvector(n, IntVec) + 127) << 23);
  return underflow ? Vec{} : p * factor;
#endif
}

inline Vec magnitude(Vec x) { return as<Vec>(as<UintVec>(x) & 0x7fffffffu); }

// 1 / (1 + e^-x); takes the exponential of -|x| only.
inline Vec sigmoid(Vec x) {
  Vec e = exp_vec(-magnitude(x)), one = splat(1.0f);
  return (x < Vec{} ? e : one) / (one + e);
}

inline Vec tanh_vec(Vec x) {
  Vec e = exp_vec(magnitude(x) * -2.0f), one = splat(1.0f);
  Vec t = (one - e) / (one + e);
  return x < Vec{} ? -t : t;
}

}  // namespace quire
