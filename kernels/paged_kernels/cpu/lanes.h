// Vectors of sixteen lanes, made of as many of the processor's own vectors as they need.
//
// A vector that is wider than the processor's is two halves: compilers keep the compiler's own wide vectors in
// memory, but members of a small class in registers.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__AVX512F__) && defined(__AVX512BW__)
#define QUIRE_AVX512
#endif
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace quire {

constexpr int LANES = 16;
#if defined(QUIRE_AVX512)
constexpr int NATIVE_LANES = 16;  // of 32 bits
#elif defined(__AVX2__)
constexpr int NATIVE_LANES = 8;
#else
constexpr int NATIVE_LANES = 4;
#endif

template <class V>
struct Halves {
  V low, high;

  auto operator[](int lane) const {
    constexpr int COUNT = sizeof(V) / sizeof(low[0]);
    return lane < COUNT ? low[lane] : high[lane - COUNT];
  }
};
template <class V> inline Halves<V> halves(V low, V high) { return {low, high}; }

template <class T, int COUNT, bool IS_NATIVE = COUNT <= NATIVE_LANES>
struct VectorOf { typedef T type __attribute__((vector_size(COUNT * sizeof(T)))); };
template <class T, int COUNT>
struct VectorOf<T, COUNT, false> { using type = Halves<typename VectorOf<T, COUNT / 2>::type>; };

using Vec = VectorOf<float, LANES>::type;
using IntVec = VectorOf<int32_t, LANES>::type;
using UintVec = VectorOf<uint32_t, LANES>::type;
using HalfVec = VectorOf<uint16_t, LANES>::type;
using ByteVec = VectorOf<int8_t, LANES>::type;

template <class V> struct IsHalves : std::false_type {};
template <class V> struct IsHalves<Halves<V>> : std::true_type {};
template <class V> constexpr int count_of() { return int(sizeof(V) / sizeof(V{}[0])); }
template <class S> using IfScalar = std::enable_if_t<std::is_arithmetic_v<S>>;

#define QUIRE_LANEWISE(OP)                                                                                         \
  template <class V> inline auto operator OP(Halves<V> a, Halves<V> b) { return halves(a.low OP b.low, a.high OP b.high); } \
  template <class V, class S, class = IfScalar<S>>                                                                 \
  inline auto operator OP(Halves<V> a, S b) { return halves(a.low OP b, a.high OP b); }                            \
  template <class V, class S, class = IfScalar<S>>                                                                 \
  inline auto operator OP(S a, Halves<V> b) { return halves(a OP b.low, a OP b.high); }
QUIRE_LANEWISE(+) QUIRE_LANEWISE(-) QUIRE_LANEWISE(*) QUIRE_LANEWISE(/)
QUIRE_LANEWISE(&) QUIRE_LANEWISE(|) QUIRE_LANEWISE(<<) QUIRE_LANEWISE(>>)
QUIRE_LANEWISE(<) QUIRE_LANEWISE(>) QUIRE_LANEWISE(==) QUIRE_LANEWISE(!=)
#undef QUIRE_LANEWISE
template <class V> inline auto operator-(Halves<V> a) { return halves(-a.low, -a.high); }
template <class V> inline auto operator~(Halves<V> a) { return halves(~a.low, ~a.high); }
template <class V, class B> inline Halves<V>& operator+=(Halves<V>& a, B b) { return a = a + b; }

// Lanes of `a` where the mask is set, else of `b`.
template <class M, class V> inline V select(M mask, V a, V b) {
  if constexpr (IsHalves<V>::value) return {select(mask.low, a.low, b.low), select(mask.high, a.high, b.high)};
  else return mask ? a : b;
}
template <class V> inline V larger(V a, V b) { return select(a > b, a, b); }

// a * b + c, rounded once where the processor can.
template <class V> inline V fused(V a, V b, V c) {
  if constexpr (IsHalves<V>::value) return {fused(a.low, b.low, c.low), fused(a.high, b.high, c.high)};
#if defined(QUIRE_AVX512)
  else return (V)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  else return (V)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__ARM_NEON) && defined(__aarch64__)
  else return (V)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  else return a * b + c;
#endif
}

// The same bits as another type.
template <class To, class From> inline To as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  if constexpr (IsHalves<To>::value) {
    using V = decltype(To::low);
    return {as<V>(from.low), as<V>(from.high)};
  } else {
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
  }
}

// The same numbers as another type of the same number of lanes.
template <class To, class From> inline To converted(From from) {
  if constexpr (IsHalves<To>::value) {
    using V = decltype(To::low);
    return {converted<V>(from.low), converted<V>(from.high)};
  } else {
    return __builtin_convertvector(from, To);
  }
}

// A vector from memory, and to it; no alignment is needed.
template <class V> inline V vector_at(const void* from) {
  if constexpr (IsHalves<V>::value) {
    using Half = decltype(V::low);
    return {vector_at<Half>(from), vector_at<Half>(static_cast<const char*>(from) + sizeof(Half))};
  } else {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
  }
}
template <class V> inline void put_vector(void* to, V v) {
  if constexpr (IsHalves<V>::value) {
    put_vector(to, v.low);
    put_vector(static_cast<char*>(to) + sizeof v.low, v.high);
  } else {
    std::memcpy(to, &v, sizeof v);
  }
}
// The first lanes alone, `bytes` in all; those read are followed by zeros.
template <class V> inline V vector_at(const void* from, size_t bytes) {
  if (bytes == sizeof(V)) return vector_at<V>(from);
  char whole[sizeof(V)] = {};
  std::memcpy(whole, from, bytes);
  return vector_at<V>(whole);
}
template <class V> inline void put_vector(void* to, V v, size_t bytes) {
  if (bytes == sizeof(V)) return put_vector(to, v);
  char whole[sizeof(V)];
  put_vector(whole, v);
  std::memcpy(to, whole, bytes);
}

template <class V, class S> inline V splat_as(S x) {
  if constexpr (IsHalves<V>::value) {
    const auto half = splat_as<decltype(V::low)>(x);
    return {half, half};
  } else {
    return x - V{};
  }
}
inline uint32_t bits_at(const void* from) { uint32_t bits; std::memcpy(&bits, from, sizeof bits); return bits; }
// Four bytes from memory in every lane. Hides that lanes are equal: GCC would compute what follows with scalars,
// and broadcast the results.
template <class V> inline V splat_at(const void* from) {
  if constexpr (IsHalves<V>::value) {
    const auto half = splat_at<decltype(V::low)>(from);
    return {half, half};
  } else {
    V v = splat_as<V>(bits_at(from));
#if defined(__AVX2__) && !defined(QUIRE_AVX512)
    asm("" : "+x"(v));
#elif defined(__ARM_NEON)
    asm("" : "+w"(v));
#endif
    return v;
  }
}
inline Vec splat(float x) { return splat_as<Vec>(x); }

// Combines lanes by halves, then quarters, ...: always in the same order.
template <class V, class Take> inline auto folded(V x, Take take) {
  if constexpr (IsHalves<V>::value) {
    return folded(take(x.low, x.high), take);
  } else if constexpr (count_of<V>() > 4) {
    using Half = typename VectorOf<std::decay_t<decltype(x[0])>, count_of<V>() / 2>::type;
    Half parts[2];
    std::memcpy(parts, &x, sizeof x);
    return folded(take(parts[0], parts[1]), take);
  } else {
    const auto even = take(x[0], x[2]), odd = take(x[1], x[3]);
    return take(even, odd);
  }
}

}  // namespace quire
