// Paged attention and cache writes on CPU over raw pointers. Built by cpu_library.py; no torch headers.
//
// Block layout: keys [kv_heads][head_dim][block_size], values [kv_heads][block_size][head_dim]. Keys lie transposed so that one
// vector holds the same element of 16 keys and a score needs no sum across lanes.
//
// Invariance: the result of (token, head) is a function of its query, keys and values alone. A score is a sum over head_dim in
// order; weights are summed in 16 lanes by key position; values are added in key order. Blocks, batch and threads only decide
// who computes it and when. Hidden keys are never multiplied, so that stale NaNs cannot leak.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int LANES = 16;
typedef float Vec __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t IntVec __attribute__((vector_size(LANES * sizeof(int32_t))));

struct Float32 { float bits; };
struct BFloat16 { uint16_t bits; };
struct Float16 { uint16_t bits; };

inline float as_float(uint32_t bits) { float x; std::memcpy(&x, &bits, sizeof x); return x; }
inline uint32_t as_bits(float x) { uint32_t bits; std::memcpy(&bits, &x, sizeof bits); return bits; }

inline float load(Float32 x) { return x.bits; }
inline float load(BFloat16 x) { return as_float(uint32_t(x.bits) << 16); }
inline float load(Float16 x) {
  // Shift exponent and mantissa into place, then correct the exponent's bias by a multiplication, which also normalises.
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
  if (magnitude < 0x38800000u) {  // subnormal: let the addition of 0.5 round
    out.bits = uint16_t(sign | (as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u));
    return;
  }
  out.bits = uint16_t(sign | ((magnitude - 0x38000000u + 0xfff + ((magnitude >> 13) & 1)) >> 13));
}

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
template <> inline Vec load_vec<BFloat16>(const BFloat16* p, int count) {
  if (count != LANES) { Vec v = {}; for (int i = 0; i < count; ++i) v[i] = load(p[i]); return v; }
  typedef uint16_t Half __attribute__((vector_size(LANES * sizeof(uint16_t))));
  Half h;
  std::memcpy(&h, p, sizeof h);
  IntVec bits = __builtin_convertvector(h, IntVec) << 16;
  Vec v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

inline Vec splat(float x) { return Vec{} + x; }

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
  IntVec scale = (__builtin_convertvector(n, IntVec) + 127) << 23;
  Vec factor;
  std::memcpy(&factor, &scale, sizeof factor);
  return underflow ? Vec{} : p * factor;
}

struct Shape { int heads, kv_heads, head_dim, block_size; };
struct Rule { float scale; int window; float softcap; };  // window, softcap: 0 = none

// Scores of NQ queries against NT runs of up to 16 keys. `keys[t]` points at the first key of a run, `stride` is block_size.
template <class T, int NQ, int NT>
inline void score_runs(const float* query, const T* const* keys, const int* counts, int dim, int stride, Vec (*out)[NQ]) {
  Vec acc[NT][NQ] = {};
  for (int d = 0; d < dim; ++d)
    for (int t = 0; t < NT; ++t) {
      Vec k = load_vec(keys[t] + size_t(d) * stride, counts[t]);
      for (int n = 0; n < NQ; ++n) acc[t][n] += query[n * dim + d] * k;
    }
  for (int t = 0; t < NT; ++t)
    for (int n = 0; n < NQ; ++n) out[t][n] = acc[t][n];
}

// One token and NQ query heads that share a kv head.
template <class T, int NQ>
class Attention {
 public:
  Attention(const T* keys, const T* values, const int32_t* table, const Shape& shape, const Rule& rule, int kv_head,
            int position, std::vector<float>& scratch)
      : keys_(keys), values_(values), table_(table), shape_(shape), rule_(rule), kv_head_(kv_head),
        first_(rule.window > 0 ? std::max(0, position - rule.window + 1) : 0), end_(position + 1),
        stride_((end_ + 2 * LANES) / LANES * LANES) {
    if (scratch.size() < size_t(stride_) * NQ) scratch.resize(size_t(stride_) * NQ);
    scores_ = scratch.data();
  }

  // `query` and `out`: [NQ][head_dim].
  __attribute__((noinline)) void run(const float* query, float* out) {
    score(query);
    for (int n = 0; n < NQ; ++n) totals_[n] = softmax(scores_ + size_t(n) * stride_);
    int dv = 0, vectors = (shape_.head_dim + LANES - 1) / LANES;
    for (; dv + 4 <= vectors; dv += 4) sum_values<4>(dv * LANES, out);
    for (; dv + 2 <= vectors; dv += 2) sum_values<2>(dv * LANES, out);
    for (; dv < vectors; ++dv) sum_values<1>(dv * LANES, out);
  }

 private:
  static constexpr int RUNS = NQ >= 4 ? 1 : 4 / NQ;

  // A run: up to 16 keys within one block, beginning at a multiple of 16 of the block. Returns keys in it.
  int run_at(int key, const T*& at) const {
    int block = key / shape_.block_size, offset = key % shape_.block_size;
    at = keys_ + (size_t(table_[block]) * shape_.kv_heads + kv_head_) * shape_.head_dim * shape_.block_size + offset;
    return std::min(LANES, shape_.block_size - offset);
  }

  void score(const float* query) {
    // A block size that is no multiple of 16 gives short runs at the end of each block.
    int key = first_ / shape_.block_size * shape_.block_size;
    key += (first_ - key) / LANES * LANES;
    const T* at[RUNS];
    int counts[RUNS], starts[RUNS], filled = 0;
    while (key < end_) {
      starts[filled] = key;
      counts[filled] = run_at(key, at[filled]);
      key += counts[filled];
      if (++filled == RUNS) { score_block<RUNS>(query, at, counts, starts); filled = 0; }
    }
    for (int i = 0; i < filled; ++i) score_block<1>(query, at + i, counts + i, starts + i);
    for (int n = 0; n < NQ; ++n) finish(scores_ + size_t(n) * stride_);
  }

  template <int NT>
  void score_block(const float* query, const T* const* at, const int* counts, const int* starts) {
    Vec acc[NT][NQ];
    bool full = true;
    for (int t = 0; t < NT; ++t) full = full && counts[t] == LANES;
    if (full) {
      const int sixteen[4] = {LANES, LANES, LANES, LANES};
      score_runs<T, NQ, NT>(query, at, sixteen, shape_.head_dim, shape_.block_size, acc);
    } else {
      score_runs<T, NQ, NT>(query, at, counts, shape_.head_dim, shape_.block_size, acc);
    }
    for (int t = 0; t < NT; ++t)
      for (int n = 0; n < NQ; ++n) std::memcpy(scores_ + size_t(n) * stride_ + starts[t], &acc[t][n], size_t(counts[t]) * 4);
  }

  // Scale, cap and mask in place; lanes from here on are absolute key positions modulo 16.
  void finish(float* s) const {
    int begin = first_ / LANES * LANES, stop = (end_ + LANES - 1) / LANES * LANES;
    const float hidden = -std::numeric_limits<float>::infinity();
    for (int k = begin; k < first_; ++k) s[k] = hidden;
    for (int k = end_; k < stop; ++k) s[k] = hidden;
    for (int k = begin; k < stop; k += LANES) {
      Vec v;
      std::memcpy(&v, s + k, sizeof v);
      v *= rule_.scale;
      std::memcpy(s + k, &v, sizeof v);
    }
    if (rule_.softcap > 0)
      for (int k = first_; k < end_; ++k) s[k] = rule_.softcap * std::tanh(s[k] / rule_.softcap);
  }

  // Scores to weights in place; returns their sum.
  float softmax(float* s) const {
    int begin = first_ / LANES * LANES, stop = (end_ + LANES - 1) / LANES * LANES;
    Vec highest = splat(-std::numeric_limits<float>::infinity()), total = {};
    for (int k = begin; k < stop; k += LANES) {
      Vec v;
      std::memcpy(&v, s + k, sizeof v);
      highest = v > highest ? v : highest;
    }
    float top = highest[0];
    for (int i = 1; i < LANES; ++i) top = std::max(top, float(highest[i]));
    for (int k = begin; k < stop; k += LANES) {
      Vec v;
      std::memcpy(&v, s + k, sizeof v);
      v = exp_vec(v - top);
      std::memcpy(s + k, &v, sizeof v);
      total += v;
    }
    float sum = 0;
    for (int i = 0; i < LANES; ++i) sum += total[i];
    return sum;
  }

  template <int NV>
  void sum_values(int d0, float* out) const {
    Vec acc[NQ][NV] = {};
    int counts[NV];
    for (int v = 0; v < NV; ++v) counts[v] = std::min(LANES, shape_.head_dim - d0 - v * LANES);
    if (counts[NV - 1] == LANES) {
      for (int v = 0; v < NV; ++v) counts[v] = LANES;
      walk_values<NV>(d0, counts, acc);
    } else {
      walk_values<NV>(d0, counts, acc);
    }
    for (int n = 0; n < NQ; ++n)
      for (int v = 0; v < NV; ++v)
        for (int i = 0; i < counts[v]; ++i)
          out[n * shape_.head_dim + d0 + v * LANES + i] = acc[n][v][i] / totals_[n];
  }

  template <int NV>
  void walk_values(int d0, const int* counts, Vec (*acc)[NV]) const {
    for (int key = first_; key < end_;) {
      int block = key / shape_.block_size, offset = key % shape_.block_size;
      int count = std::min(shape_.block_size - offset, end_ - key);
      const T* at = values_ + ((size_t(table_[block]) * shape_.kv_heads + kv_head_) * shape_.block_size + offset) *
                                  shape_.head_dim + d0;
      for (int k = 0; k < count; ++k, at += shape_.head_dim)
        for (int v = 0; v < NV; ++v) {
          Vec value = load_vec(at + v * LANES, counts[v]);
          for (int n = 0; n < NQ; ++n) acc[n][v] += scores_[size_t(n) * stride_ + key + k] * value;
        }
      key += count;
    }
  }

  const T *keys_, *values_;
  const int32_t* table_;
  const Shape& shape_;
  const Rule& rule_;
  int kv_head_, first_, end_, stride_;
  float* scores_;
  float totals_[NQ];
};

// Q: type of queries and results, T: of the cache. `wide`: room for twice NQ heads.
template <class Q, class T, int NQ>
void attend(const Q* query, Q* out, const T* keys, const T* values, const int32_t* table, const Shape& shape,
            const Rule& rule, int kv_head, int position, std::vector<float>& scratch, std::vector<float>& wide) {
  const int count = NQ * shape.head_dim;
  float* result = wide.data() + count;
  for (int i = 0; i < count; ++i) wide[i] = load(query[i]);
  Attention<T, NQ>(keys, values, table, shape, rule, kv_head, position, scratch).run(wide.data(), result);
  for (int i = 0; i < count; ++i) store(out[i], result[i]);
}

template <class Q, class T>
void paged_attention(const Q* query, Q* out, const T* keys, const T* values, const int32_t* tables, int64_t table_stride,
                     const int32_t* sequences, const int32_t* positions, const int64_t* slots, int64_t tokens,
                     const Shape shape, const Rule rule, int threads) {
  const int group = shape.heads / shape.kv_heads;
#pragma omp parallel num_threads(threads)
  {
    std::vector<float> scratch, wide(size_t(8) * shape.head_dim);
#pragma omp for schedule(dynamic, 1)
    for (int64_t unit = 0; unit < tokens * shape.kv_heads; ++unit) {
      // Last tokens first: they have the longest contexts, and short work at the end keeps threads level.
      const int64_t token = tokens - 1 - unit / shape.kv_heads;
      const int kv_head = int(unit % shape.kv_heads);
      const size_t at = (size_t(token) * shape.heads + size_t(kv_head) * group) * shape.head_dim;
      if (slots[token] < 0) {
        for (int i = 0; i < group * shape.head_dim; ++i) store(out[at + i], 0.0f);
        continue;
      }
      const int32_t* table = tables + sequences[token] * table_stride;
      for (int n = 0; n < group;) {
        const Q* q = query + at + size_t(n) * shape.head_dim;
        Q* o = out + at + size_t(n) * shape.head_dim;
        if (group - n >= 4) { attend<Q, T, 4>(q, o, keys, values, table, shape, rule, kv_head, positions[token], scratch, wide); n += 4; }
        else if (group - n >= 2) { attend<Q, T, 2>(q, o, keys, values, table, shape, rule, kv_head, positions[token], scratch, wide); n += 2; }
        else { attend<Q, T, 1>(q, o, keys, values, table, shape, rule, kv_head, positions[token], scratch, wide); n += 1; }
      }
    }
  }
}

template <class T>
void write_kv(const T* key, const T* value, T* keys, T* values, const int64_t* slots, int64_t tokens, const Shape shape,
              int threads) {
  const int dim = shape.head_dim, size = shape.block_size;
#pragma omp parallel for num_threads(tokens < 64 ? 1 : threads) schedule(static)
  for (int64_t unit = 0; unit < tokens * shape.kv_heads; ++unit) {
    const int64_t token = unit / shape.kv_heads;
    const int head = int(unit % shape.kv_heads);
    if (slots[token] < 0) continue;
    const int64_t block = slots[token] / size, offset = slots[token] % size;
    const size_t at = (size_t(block) * shape.kv_heads + head) * dim * size;
    const T *k = key + unit * dim, *v = value + unit * dim;
    for (int d = 0; d < dim; ++d) keys[at + size_t(d) * size + offset] = k[d];
    std::memcpy(values + at + size_t(offset) * dim, v, size_t(dim) * sizeof(T));
  }
}

}  // namespace

// QUERIES_CACHE: queries and results are of the cache's type, or of float32.
#define QUIRE_ATTENTION(NAME, Q, T)                                                                                    \
  extern "C" void quire_paged_attention_##NAME(                                                                        \
      const void* query, void* out, const void* keys, const void* values, const int32_t* tables, int64_t table_stride, \
      const int32_t* sequences, const int32_t* positions, const int64_t* slots, int64_t tokens, int heads,             \
      int kv_heads, int head_dim, int block_size, float scale, int window, float softcap, int threads) {               \
    paged_attention<Q, T>((const Q*)query, (Q*)out, (const T*)keys, (const T*)values, tables, table_stride, sequences, \
                          positions, slots, tokens, Shape{heads, kv_heads, head_dim, block_size},                      \
                          Rule{scale, window, softcap}, threads);                                                      \
  }

#define QUIRE_WRITE(NAME, T)                                                                                           \
  extern "C" void quire_write_kv_##NAME(const void* key, const void* value, void* keys, void* values,                  \
                                        const int64_t* slots, int64_t tokens, int kv_heads, int head_dim,              \
                                        int block_size, int threads) {                                                 \
    write_kv<T>((const T*)key, (const T*)value, (T*)keys, (T*)values, slots, tokens,                                   \
                Shape{kv_heads, kv_heads, head_dim, block_size}, threads);                                             \
  }

QUIRE_ATTENTION(float32_float32, Float32, Float32)
QUIRE_ATTENTION(bfloat16_bfloat16, BFloat16, BFloat16)
QUIRE_ATTENTION(float16_float16, Float16, Float16)
QUIRE_ATTENTION(float32_bfloat16, Float32, BFloat16)
QUIRE_ATTENTION(float32_float16, Float32, Float16)
QUIRE_WRITE(float32, Float32)
QUIRE_WRITE(bfloat16, BFloat16)
QUIRE_WRITE(float16, Float16)

// Raised with every change of a signature or a layout above.
extern "C" int quire_kernels_abi() { return 2; }
