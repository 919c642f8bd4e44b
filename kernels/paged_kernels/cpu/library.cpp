// The CPU kernels as C functions over raw pointers, for ctypes. Built by cpu_library.py; no torch headers.

#include "decoder.h"
#include "parallel.h"

namespace {

using namespace quire;

struct Nothing {};

template <class Q, class T>
void paged_attention(const Q* query, Q* out, const T* keys, const T* values, const Places& places, const Shape& shape,
                     const Rule& rule, int threads) {
  const std::vector<Tile> tiles = places.tiles(shape);
  const size_t stride = size_t(shape.heads) * shape.head_dim;
  const Queries<Q> queries{query, stride, out, stride};
  const Cache<T> cache{keys, values, shape};
  const int64_t shares = int64_t(tiles.size()) * shape.kv_heads;
  share_out<Scratch>(shares, threads, [&](int64_t share, Scratch& scratch) {
    const Tile& tile = tiles[tiles.size() - 1 - size_t(share / shape.kv_heads)];
    Attention<Q, T>(queries, cache, places, rule, tile, int(share % shape.kv_heads))
        .run(Chunks<T>{&cache, nullptr, 0, 0}, scratch);
  });
}

template <class E, class T>
void write_all(const E* key, const E* value, T* keys, T* values, const int64_t* slots, int64_t tokens, const Shape& shape,
               int threads) {
  const size_t width = size_t(shape.kv_heads) * shape.head_dim;
  share_out<Nothing>(tokens, tokens < 64 ? 1 : threads, [&](int64_t token, Nothing) {
    if (slots[token] < 0) return;
    for (int head = 0; head < shape.kv_heads; ++head) {
      const size_t at = token * width + size_t(head) * shape.head_dim;
      write_kv(key + at, value + at, keys, values, slots[token], head, shape);
    }
  });
}

// Calls `pack_panel(panel)` for each panel of `columns` columns.
template <class Pack>
void pack(int columns, int threads, Pack pack_panel) {
  const int panels = (columns + LANES - 1) / LANES;
  share_out<Nothing>(panels, threads, [&](int64_t panel, Nothing) { pack_panel(int(panel)); });
}

// Rows of a product with integers are rounded into `memory`; others are read as they are.
template <class E, class Form>
typename Plain<E>::Rows rows_of(const Weights<E, Form>& weights, const E* in, int64_t, int, std::vector<char>&) {
  return {in, size_t(weights.depth)};
}
template <class E, int BITS>
IntegerRows rows_of(const Weights<E, Grouped<BITS>>& weights, const E* in, int64_t count, int threads, std::vector<char>& memory) {
  const int depth = weights.depth, group = weights.groups.size;
  memory.resize(IntegerRows::bytes(count, depth, group));
  const IntegerRows rows = IntegerRows::in(memory.data(), count, depth, group);
  share_out<Nothing>((count + ROWS_A_SHARE - 1) / ROWS_A_SHARE, threads, [&](int64_t share, Nothing) {
    const int64_t end = std::min(count, (share + 1) * ROWS_A_SHARE);
    for (int64_t row = share * ROWS_A_SHARE; row < end; ++row) round_row(in, depth, group, row, rows);
  });
  return rows;
}

template <class O, class E, class Form>
void linear(const Weights<E, Form>& weights, const typename Form::Rows& in, O* out, int64_t rows, int threads) {
  const int64_t shares = num_shares(weights, rows);
  share_out<Nothing>(shares, threads, [&](int64_t share, Nothing) {
    const int64_t next = share + threads;
    const Ahead ahead{next < shares ? weights_at(weights, next) : nullptr};
    linear_share(weights, in, out, weights.columns, rows, false, share, ahead);
  });
}

template <class E, class Form>
void linear(const Weights<E, Form>& weights, const void* in, void* out, int64_t count, bool wide, int threads) {
  std::vector<char> memory;
  const auto rows = rows_of(weights, static_cast<const E*>(in), count, threads, memory);
  if (wide) linear(weights, rows, static_cast<Float32*>(out), count, threads);
  else linear(weights, rows, static_cast<E*>(out), count, threads);
}

}  // namespace

// QUERIES_CACHE: queries and results have the cache's type, or float32.
#define QUIRE_ATTENTION(NAME, Q, T)                                                                                    \
  extern "C" void quire_paged_attention_##NAME(                                                                        \
      const void* query, void* out, const void* keys, const void* values, const int32_t* tables, int64_t table_stride, \
      const int32_t* sequences, const int32_t* positions, const int64_t* slots, int64_t tokens, int heads,             \
      int kv_heads, int head_dim, int block_size, float scale, int window, int chunk, float softcap,                   \
      const float* sinks, int threads) {                                                                               \
    paged_attention<Q, T>((const Q*)query, (Q*)out, (const T*)keys, (const T*)values,                                  \
                          Places{tables, table_stride, sequences, positions, slots, tokens},                           \
                          Shape{heads, kv_heads, head_dim, block_size}, Rule{scale, window, chunk, softcap, sinks},   \
                          threads);                                                                                    \
  }

// E: type of what is written to a cache of type T.
#define QUIRE_WRITE(NAME, E, T)                                                                                        \
  extern "C" void quire_write_kv_##NAME(const void* key, const void* value, void* keys, void* values,                  \
                                        const int64_t* slots, int64_t tokens, int kv_heads, int head_dim,              \
                                        int block_size, int threads) {                                                 \
    write_all((const E*)key, (const E*)value, (T*)keys, (T*)values, slots, tokens,                                     \
                 Shape{kv_heads, kv_heads, head_dim, block_size}, threads);                                            \
  }

// `wide`: `out` is float32, with values rounded to E.
#define QUIRE_PRODUCTS(NAME, E)                                                                                        \
  extern "C" void quire_pack_##NAME(const void* plain, void* packed, int columns, int depth, int threads) {            \
    pack(columns, threads, [=](int panel) { PlainPanels<E>::pack_panel((const E*)plain, columns, depth, panel, (char*)packed); });  \
  }\
  extern "C" void quire_linear_##NAME(const void* packed, const void* bias, int columns, int depth, const void* in,    \
                                      void* out, int64_t rows, int wide, int stored, int group, int offsets, int half, \
                                      int threads) {                                                                   \
    const auto multiply = [=](auto form) {                                                                             \
      linear(Weights<E, decltype(form)>{(const char*)packed, (const E*)bias, columns, depth,                           \
                                        Groups{group, offsets != 0, half != 0}},                                       \
             in, out, rows, wide, threads);                                                                            \
    };                                                                                                                 \
    if (stored == INT8) multiply(Grouped<8>{});                                                                        \
    else if (stored == INT4) multiply(Grouped<4>{});                                                                   \
    else if (stored == FLOAT8) multiply(Scaled<E>{});                                                                  \
    else multiply(Plain<E>{});                                                                                         \
  }

#define QUIRE_DECODER(NAME, E, T)                                                                                      \
  extern "C" void quire_decode_##NAME(const QuireOperator* operators, int count, const QuireStep* step) {              \
    Decoder<E, T>(operators, count, *step).run();                                                                      \
  }                                                                                                                    \
  extern "C" int quire_decode_next_##NAME(const QuireOperator* operators, int count, const QuireStep* step) {          \
    return decode_next<E, T>(operators, count, *step);                                                                 \
  }

QUIRE_ATTENTION(float32_float32, Float32, Float32)
QUIRE_ATTENTION(bfloat16_bfloat16, BFloat16, BFloat16)
QUIRE_ATTENTION(float16_float16, Float16, Float16)
QUIRE_ATTENTION(float32_bfloat16, Float32, BFloat16)
QUIRE_ATTENTION(float32_float16, Float32, Float16)
QUIRE_ATTENTION(float32_int8, Float32, Int8)
QUIRE_ATTENTION(bfloat16_int8, BFloat16, Int8)
QUIRE_ATTENTION(float32_float8, Float32, Float8)
QUIRE_ATTENTION(bfloat16_float8, BFloat16, Float8)
QUIRE_WRITE(float32, Float32, Float32)
QUIRE_WRITE(bfloat16, BFloat16, BFloat16)
QUIRE_WRITE(float16, Float16, Float16)
QUIRE_WRITE(int8, Float32, Int8)
QUIRE_WRITE(float8, Float32, Float8)
QUIRE_PRODUCTS(float32, Float32)
QUIRE_PRODUCTS(bfloat16, BFloat16)
QUIRE_DECODER(float32_float32, Float32, Float32)
QUIRE_DECODER(bfloat16_bfloat16, BFloat16, BFloat16)
QUIRE_DECODER(float32_bfloat16, Float32, BFloat16)
QUIRE_DECODER(float32_float16, Float32, Float16)
QUIRE_DECODER(float32_int8, Float32, Int8)
QUIRE_DECODER(bfloat16_int8, BFloat16, Int8)
QUIRE_DECODER(float32_float8, Float32, Float8)
QUIRE_DECODER(bfloat16_float8, BFloat16, Float8)

// `values` [count] become the sums of all ranks' values.
#define QUIRE_ALL_REDUCE(NAME, E)                                                                                      \
  extern "C" void quire_all_reduce_##NAME(QuireRanks* ranks, void* values, int64_t count, int threads) {               \
    const int64_t first = ranks->next, pieces = RankMemory::pieces<E>(count);                                          \
    ranks->next += pieces;                                                                                             \
    share_out<Nothing>(pieces, threads, [=](int64_t piece, Nothing) {                                                  \
      const int64_t begin = piece * RankMemory::piece<E>();                                                            \
      E* at = (E*)values + begin;                                                                                      \
      RankMemory(*ranks).sum<E>(first + piece, at, at, std::min(RankMemory::piece<E>(), count - begin), false);        \
    });                                                                                                                \
  }

// `out` [rows, ranks, columns]: all ranks' values; this rank's are there already.
#define QUIRE_ALL_GATHER(NAME, E)                                                                                      \
  extern "C" void quire_all_gather_##NAME(QuireRanks* ranks, void* out, int64_t rows, int64_t columns, int threads) {  \
    const int64_t first = ranks->next, pieces = RankMemory::pieces<E>(columns);                                        \
    ranks->next += rows * pieces;                                                                                      \
    share_out<Nothing>(rows * pieces, threads, [=](int64_t share, Nothing) {                                           \
      const int64_t begin = share % pieces * RankMemory::piece<E>();                                                   \
      E* row = (E*)out + share / pieces * columns * ranks->size;                                                       \
      RankMemory(*ranks).gather(first + share, row + begin, size_t(columns),                                           \
                                std::min(RankMemory::piece<E>(), columns - begin));                                    \
    });                                                                                                                \
  }

QUIRE_ALL_GATHER(float32, Float32)
QUIRE_ALL_GATHER(bfloat16, BFloat16)
QUIRE_ALL_GATHER(float16, Float16)
QUIRE_ALL_REDUCE(float32, Float32)
QUIRE_ALL_REDUCE(bfloat16, BFloat16)
QUIRE_ALL_REDUCE(float16, Float16)

// Bytes of the memory, zero at first, of a group of so many ranks.
extern "C" int64_t quire_ranks_bytes(int ranks) { return RankMemory::bytes(ranks); }

// An Ending; all waits of the group end. Returns the first one that was given; 0 only asks.
extern "C" int quire_ranks_end(const QuireRanks* ranks, int why) {
  if (why) RankMemory(*ranks).end(Ending(why));
  return RankMemory(*ranks).ended();
}

// `numbers` [columns, depth], int8 or E4M3; `scales`, `offsets` [columns, groups], `offsets` null if there are none.
extern "C" void quire_pack_integers(const void* numbers, const float* scales, const float* offsets, void* packed,
                                    int columns, int depth, int stored, int group, int half, int threads) {
  const Groups groups{group, offsets != nullptr, half != 0};
  const auto pack_all = [&](auto form) {
    pack(columns, threads, [&](int panel) {
      form.pack_panel((const int8_t*)numbers, scales, offsets, columns, depth, groups, panel, (char*)packed);
    });
  };
  if (stored == INT4) pack_all(IntegerPanels<4>{});
  else if (stored == FLOAT8) pack_all(Float8Panels{});
  else pack_all(IntegerPanels<8>{});
}

// With few rows, a single thread finishes before another would be awake.
extern "C" void quire_choose(const void* logits, int64_t rows, int64_t columns, int64_t* places, uint8_t* finite,
                             int threads) {
  share_out<Nothing>(rows, rows < 8 ? 1 : threads, [=](int64_t row, Nothing) {
    const Choice choice = choose((const Float32*)logits + row * columns, columns);
    places[row] = choice.place;
    finite[row] = choice.is_finite;
  });
}

// Sets the OpenMP runtime's GOMP_parallel; call this first.
extern "C" void quire_use_threads(ParallelRegion region) { parallel_region = region; }

// Incremented with every change of a signature or a layout above.
extern "C" int quire_kernels_abi() { return 12; }
