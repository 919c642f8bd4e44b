// Runs a list of operators on packed rows through all layers of a decoder, in one parallel region.
//
// Each operator's work is cut into shares that threads take dynamically; the next operator starts when all
// are done. Products with integers first round their rows, in shares too.
//
// The ranks of a group run the same list on parts of the weights; REDUCE adds up what they computed, and
// GATHER joins logits of parts of the vocabulary. If the group has ended, both leave rows as they are, and the rest of
// the list computes with these.
//
// A mixture of experts is a few operators: ROUTER to GROUP say which rows an expert gets, EXPERT_GATED and EXPERT_DOWN
// compute these for all experts, with an expert's rows side by side, and MIX adds a row's results.
//
// A list may begin with the lookup of token ids and end with the choice of the next ones.
#pragma once

#include <memory>
#include <type_traits>

#include "attention.h"
#include "choose.h"
#include "experts.h"
#include "float8.h"
#include "integers.h"
#include "parallel.h"
#include "products.h"
#include "ranks.h"
#include "rows.h"

namespace quire {

enum Kind {
  NORM = 0, LINEAR = 1, GATED = 2, PLACE = 3, ATTEND = 4, EMBED = 5, HEAD = 6, CHOOSE = 7, REDUCE = 8, GATHER = 9,
  ROUTER = 10, ROUTE = 11, GROUP = 12, EXPERT_GATED = 13, EXPERT_DOWN = 14, MIX = 15
};
enum Stored { PLAIN = 0, INT8 = 1, INT4 = 2, FLOAT8 = 3 };

}  // namespace quire

// One operator, filled in by Python (cpu_operators.py, cpu_experts.py). Pointers that an operator does not use are null.
extern "C" struct QuireOperator {
  int32_t kind, in, out, adds;           // buffers; adds: add to the contents of `out`
  int32_t columns, depth;                // LINEAR, GATED, HEAD: of the weights; GATHER: of a rank's; CHOOSE: of the logits
  int32_t activation, one_plus;          // GATED; NORM, PLACE
  int32_t layer, window;                 // PLACE, ATTEND; HEAD: first column in the logits, and how many these have
  float eps, scale, softcap;             // NORM, PLACE; ATTEND, EMBED; ATTEND
  int32_t rotary;                        // PLACE: elements of a head that are rotated
  const void *weights, *bias;            // LINEAR, HEAD, GATED (the gate's); NORM; PLACE: norm of queries, of keys;
                                         // EMBED: table [tokens, width]; REDUCE, GATHER: the QuireRanks, not constant;
                                         // ATTEND: sinks, float32 [heads]
  const void *second, *second_bias;      // GATED (the up projection's); PLACE: cosines, sines [positions, rotary]
  int32_t stored, group;                 // LINEAR, HEAD, GATED: a Stored, of both weights; if not PLAIN: depths of a group
  int32_t offsets, half;                 // if not PLAIN, see Groups
  int32_t cache_group, chunk;            // PLACE, ATTEND: the layer's, for block tables and slots; ATTEND
  int32_t experts, chosen;               // ROUTER to EXPERT_DOWN: how many there are, and how many a row has
};
// Of mixtures. ROUTER: adds = logits are not rounded. EXPERT_GATED: `weights` are each expert's gate, then its up projection,
// EXPERT_DOWN: each expert's; `columns` are those of one. ROUTE: a Routing, activation = scoring, one_plus = normalised; layer,
// window, chunk = groups, kept, best; bias = its bias. ROUTE, MIX: half = weights, or results times them, are rounded. MIX:
// layer, group = buffers of a shared expert's results and of their gates, -1 = none.

// Data that a list of operators works on. `pool`: [layers, 2, num_blocks, block elements]. `tables`, `slots`: one for each cache
// group.
extern "C" struct QuireStep {
  void** buffers;
  const int64_t* widths;  // elements of a row, per buffer
  void* pool;
  int64_t num_blocks;
  const int32_t* const* tables;
  int64_t table_stride;
  const int32_t* sequences;
  int32_t* positions;
  int64_t* const* slots;
  int32_t* token_ids;  // EMBED reads them, CHOOSE writes the next ones; null if the list has neither
  float* logits;       // HEAD: [tokens, columns]
  uint8_t* finite;     // CHOOSE: if all logits of a row are
  int64_t tokens;
  int32_t heads, kv_heads, head_dim, block_size;
  int32_t threads, groups;
};

namespace quire {

constexpr int ROWS_A_SHARE = 4;
constexpr int TILES_A_THREAD = 8;

// Memory of one thread.
struct Room : Scratch {
  std::vector<char> gathered;  // rows of an expert
};

// E: element type of rows, T: of the cache.
template <class E, class T>
class Decoder {
 public:
  Decoder(const QuireOperator* operators, int count, const QuireStep& step)
      : operators_(operators), count_(count), step_(step), shares_(new Shares[count]), roundings_(new Shares[count]),
        rounded_(new char[most_rounded(operators, count, step.tokens)]),
        routes_(new char[most_routes(operators, count, step.tokens)]),
        shape_{step.heads, step.kv_heads, step.head_dim, step.block_size},
        first_piece_(new int64_t[count]), num_shares_(new int64_t[count]) {
    for (int group = 0; group < step.groups; ++group) attentions_.emplace_back(step, group, shape_);
    for (int i = 0; i < count; ++i) {
      num_shares_[i] = is_of_experts(operators[i]) ? 0 : count_shares(operators[i]);
      if (operators[i].kind == REDUCE || operators[i].kind == GATHER) {
        first_piece_[i] = ranks(operators[i])->next;
        ranks(operators[i])->next += num_shares_[i];
      }
    }
  }

  void run() {
    Bell bell;
    on_threads(step_.threads, [&] {
      Room room;
      for (int i = 0; i < count_; ++i) {
        const QuireOperator& op = operators_[i];
        if (is_rounded(op)) share_out(row_shares(rows_in(op)), roundings_[i], bell, [&](int64_t share) { round_rows(op, share); });
        share_out(num_shares(op), shares_[i], bell, [&](int64_t share) { perform(op, share, room); });
      }
    });
  }

 private:
  // Where the layers of one cache group have their keys and values, and how their attention is divided.
  struct GroupAttention {
    GroupAttention(const QuireStep& step, int group, const Shape& shape)
        : places{step.tables[group], step.table_stride, step.sequences, step.positions, step.slots[group], step.tokens},
          tiles(places.tiles(shape)), by_head(tiles.size() < size_t(TILES_A_THREAD) * step.threads) {}

    const Places places;
    const std::vector<Tile> tiles;
    const bool by_head;  // few tiles: heads are divided among threads too
  };

  const GroupAttention& attention(const QuireOperator& op) const { return attentions_[op.cache_group]; }

  // Does this thread's part of `count` shares; returns when all are done.
  template <class Work> static void share_out(int64_t count, Shares& shares, Bell& bell, const Work& work) {
    for (int64_t share; shares.next(count, share);) {
      work(share);
      if (shares.finish(count)) bell.ring();
    }
    bell.wait([&] { return shares.are_done(count); });
  }

  E* buffer(int number) const { return static_cast<E*>(step_.buffers[number]); }
  static const E* of(const void* p) { return static_cast<const E*>(p); }
  static Groups groups(const QuireOperator& op) { return {op.group, op.offsets != 0, op.half != 0}; }
  template <class Form> static Weights<E, Form> weights(const QuireOperator& op) {
    return {static_cast<const char*>(op.weights), of(op.bias), op.columns, op.depth, groups(op)};
  }
  template <class Form> static Weights<E, Form> second(const QuireOperator& op) {
    return {static_cast<const char*>(op.second), of(op.second_bias), op.columns, op.depth, groups(op)};
  }

  static QuireRanks* ranks(const QuireOperator& op) { return static_cast<QuireRanks*>(const_cast<void*>(op.weights)); }

  static bool is_of_experts(const QuireOperator& op) { return op.kind == EXPERT_GATED || op.kind == EXPERT_DOWN; }
  static bool is_product(const QuireOperator& op) {
    return op.kind == LINEAR || op.kind == GATED || op.kind == HEAD || op.kind == ROUTER || is_of_experts(op);
  }

  static bool is_rounded(const QuireOperator& op) { return is_product(op) && (op.stored == INT8 || op.stored == INT4); }

  static int64_t rows_in(const QuireOperator& op, int64_t tokens) { return op.kind == EXPERT_DOWN ? tokens * op.chosen : tokens; }
  int64_t rows_in(const QuireOperator& op) const { return rows_in(op, step_.tokens); }

  static size_t most_routes(const QuireOperator* operators, int count, int64_t tokens) {
    size_t most = 0;
    for (const auto* op = operators; op < operators + count; ++op)
      if (op->kind == GROUP) most = std::max(most, Routes::bytes(tokens, op->experts, op->chosen));
    return most;
  }
  Routes routes(const QuireOperator& op) const { return Routes::in(routes_.get(), step_.tokens, op.experts, op.chosen); }

  static size_t most_rounded(const QuireOperator* operators, int count, int64_t tokens) {
    size_t most = 0;
    for (const auto* op = operators; op < operators + count; ++op)
      if (is_rounded(*op)) most = std::max(most, IntegerRows::bytes(rows_in(*op, tokens), op->depth, op->group));
    return most;
  }

  IntegerRows rounded_rows(const QuireOperator& op) const {
    return IntegerRows::in(rounded_.get(), rows_in(op), op.depth, op.group);
  }

  void round_rows(const QuireOperator& op, int64_t share) const {
    const int64_t begin = share * ROWS_A_SHARE, end = std::min(rows_in(op), begin + ROWS_A_SHARE);
    for (int64_t row = begin; row < end; ++row) round_row(buffer(op.in), op.depth, op.group, row, rounded_rows(op));
  }

  static int64_t row_shares(int64_t rows) { return (rows + ROWS_A_SHARE - 1) / ROWS_A_SHARE; }

  int64_t num_shares(const QuireOperator& op) const { return num_shares_[&op - operators_]; }

  int64_t count_shares(const QuireOperator& op) const {
    switch (op.kind) {
      case LINEAR: case GATED: case HEAD: case ROUTER: return quire::num_shares(weights<Plain<E>>(op), step_.tokens);
      case EXPERT_GATED: case EXPERT_DOWN: return *routes(op).num_blocks * int64_t(shares_across(weights<Plain<E>>(op)));
      case GROUP: return 1;
      case CHOOSE: return step_.tokens;
      case REDUCE: return RankMemory::pieces<E>(step_.tokens * step_.widths[op.in]);
      case GATHER: return step_.tokens * RankMemory::pieces<Float32>(op.columns);
      case ATTEND: return int64_t(attention(op).tiles.size()) * (attention(op).by_head ? shape_.kv_heads : 1);
      default: return row_shares(step_.tokens);
    }
  }

  void perform(const QuireOperator& op, int64_t share, Room& room) const {
    switch (op.kind) {
      case LINEAR: case GATED: case HEAD: case ROUTER: case EXPERT_GATED: case EXPERT_DOWN: return multiply(op, share, room);
      case GROUP: return group(op);
      case ATTEND: return attend_share(op, share, room);
      case CHOOSE: return choose_next(op, share);
      case REDUCE: return reduce(op, share);
      case GATHER: return gather(op, share);
    }
    const int64_t begin = share * ROWS_A_SHARE, end = std::min(step_.tokens, begin + ROWS_A_SHARE);
    for (int64_t row = begin; row < end; ++row) {
      if (op.kind == NORM) norm_row(op, row);
      else if (op.kind == EMBED) embed_row(op, row);
      else if (op.kind == ROUTE) route_row(op, row);
      else if (op.kind == MIX) mix(op, row);
      else place_row(op, row);
    }
  }

  void multiply(const QuireOperator& op, int64_t share, Room& room) const {
    switch (op.stored) {
      case INT8: return multiply<Grouped<8>>(op, rounded_rows(op), share, room);
      case INT4: return multiply<Grouped<4>>(op, rounded_rows(op), share, room);
      case FLOAT8: return multiply<Scaled<E>>(op, {buffer(op.in), size_t(op.depth)}, share, room);
      default: return multiply<Plain<E>>(op, {buffer(op.in), size_t(op.depth)}, share, room);
    }
  }

  template <class Form>
  void multiply(const QuireOperator& op, const typename Form::Rows& in, int64_t share, Room& room) const {
    if (is_of_experts(op)) return multiply_block<Form>(op, in, share, room);
    E* out = buffer(op.out);  // HEAD has another
    const Ahead next = ahead<Form>(op, share);
    if (op.kind == GATED)
      gated_share(weights<Form>(op), second<Form>(op), op.activation, in, out, step_.tokens, share, next);
    else if (op.kind == HEAD)
      linear_share(weights<Form>(op), in, logits(0, op.window) + op.layer, op.window, step_.tokens, false, share, next);
    else if (op.kind == ROUTER) {
      Weights<E, Form> router = weights<Form>(op);
      router.exact = op.adds != 0;
      linear_share(router, in, reinterpret_cast<Float32*>(routes(op).logits), op.columns, step_.tokens, false, share, next);
    } else linear_share(weights<Form>(op), in, out, step_.widths[op.out], step_.tokens, op.adds != 0, share, next);
  }

  // Part of the columns of one block of rows, which chose the same expert.
  template <class Form>
  void multiply_block(const QuireOperator& op, const typename Form::Rows& in, int64_t share, Room& room) const {
    const int across = shares_across(weights<Form>(op));
    const Routes found = routes(op);
    const Routes::Block& block = found.blocks[share / across];
    E* out = buffer(op.out) + size_t(block.first) * op.columns;
    const int64_t next = share + step_.threads;
    Ahead ahead;
    if (next < num_shares(op)) ahead = block_weights<Form>(op, found.blocks[next / across].expert, next % across);
    if (op.kind == EXPERT_GATED) {
      const auto rows = gathered(in, found.rows + block.first, block.count, room.gathered);
      gated_share(gate_of<Form>(op, block.expert), up_of<Form>(op, block.expert), op.activation, rows, out, block.count,
                  share % across, ahead);
    } else {
      linear_share(expert<Form>(op, block.expert), in.from(block.first), out, size_t(op.columns), block.count, false,
                   share % across, ahead);
    }
  }

  template <class Form> static Weights<E, Form> expert(const QuireOperator& op, int number) {
    return weights<Form>(op).part(int64_t(number) * op.columns, op.columns);
  }
  template <class Form> static Weights<E, Form> gate_of(const QuireOperator& op, int number) {
    return weights<Form>(op).part(int64_t(number) * 2 * op.columns, op.columns);
  }
  template <class Form> static Weights<E, Form> up_of(const QuireOperator& op, int number) {
    return weights<Form>(op).part((int64_t(number) * 2 + 1) * op.columns, op.columns);
  }
  template <class Form> static Ahead block_weights(const QuireOperator& op, int number, int64_t share) {
    if (op.kind == EXPERT_DOWN) return {weights_at(expert<Form>(op, number), share)};
    return {weights_at(gate_of<Form>(op, number), share), weights_at(up_of<Form>(op, number), share)};
  }

  // Weights to prefetch: this thread's likely next share, or, after an operator's last one, the next
  // product's, if it has the same form.
  template <class Form> Ahead ahead(const QuireOperator& op, int64_t share) const {
    const int64_t next = share + step_.threads, count = num_shares(op);
    if (next < count)
      return {weights_at(weights<Form>(op), next), op.kind == GATED ? weights_at(second<Form>(op), next) : nullptr};
    const auto* after = std::find_if(&op + 1, operators_ + count_, is_product);
    if (after == operators_ + count_ || after->stored != op.stored || is_of_experts(*after)) return {};
    const char* first = weights_at(weights<Form>(*after), next - count);
    return {first, first + WIDE * weights<Form>(*after).panel_bytes()};
  }

  Float32* logits(int64_t row, int64_t columns) const { return reinterpret_cast<Float32*>(step_.logits) + row * columns; }

  void route_row(const QuireOperator& op, int64_t row) const {
    const Routes found = routes(op);
    const Routing routing{op.experts, op.chosen, op.activation, op.one_plus != 0, op.layer, op.window, op.chunk, op.scale,
                          static_cast<const float*>(op.bias)};
    routing.choose(found.logits + row * op.experts, found.keys + row * op.experts, found.numbers + row * op.chosen,
                   found.weights + row * op.chosen);
    found.template finish_row<E>(row, op.half != 0);
  }

  // Counts the shares of the mixture too: a thread that comes late to one must find its own number, not a later mixture's.
  void group(const QuireOperator& op) const {
    routes(op).group();
    for (const auto* next = &op + 1; next < operators_ + count_ && next->kind != GROUP; ++next)
      if (is_of_experts(*next)) num_shares_[next - operators_] = count_shares(*next);
  }

  void mix(const QuireOperator& op, int64_t row) const {
    const int64_t width = step_.widths[op.out];
    const Mixture<E> mixture{buffer(op.in), op.layer < 0 ? nullptr : buffer(op.layer),
                             op.group < 0 ? nullptr : buffer(op.group), op.half != 0};
    mixture.mix(routes(op), row, buffer(op.out) + row * width, int(width), op.adds != 0);
  }

  void choose_next(const QuireOperator& op, int64_t row) const {
    const Choice choice = choose(logits(row, op.columns), op.columns);
    step_.token_ids[row] = int32_t(choice.place);
    step_.finite[row] = choice.is_finite;
  }

  void reduce(const QuireOperator& op, int64_t share) const {
    const int64_t begin = share * RankMemory::piece<E>(), all = step_.tokens * step_.widths[op.in];
    RankMemory(*ranks(op)).sum<E>(first_piece_[&op - operators_] + share, buffer(op.in) + begin, buffer(op.out) + begin,
                                  std::min(RankMemory::piece<E>(), all - begin), op.adds != 0);
  }

  void gather(const QuireOperator& op, int64_t share) const {
    const int64_t pieces = RankMemory::pieces<Float32>(op.columns), begin = share % pieces * RankMemory::piece<Float32>();
    Float32* row = logits(share / pieces, int64_t(op.columns) * ranks(op)->size);
    RankMemory(*ranks(op)).gather(first_piece_[&op - operators_] + share, row + begin, size_t(op.columns),
                                  std::min(RankMemory::piece<Float32>(), op.columns - begin));
  }

  void embed_row(const QuireOperator& op, int64_t row) const {
    const int64_t width = step_.widths[op.out];
    const E* from = of(op.weights) + size_t(step_.token_ids[row]) * width;
    E* out = buffer(op.out) + row * width;
    for (int64_t d = 0; d < width; d += LANES) {
      const int count = int(std::min<int64_t>(LANES, width - d));
      store_vec(out + d, load_vec(from + d, count) * op.scale, count);
    }
  }

  void norm_row(const QuireOperator& op, int64_t row) const {
    const int64_t width = step_.widths[op.in];
    const RmsNorm<E> norm{of(op.weights), op.eps, op.one_plus != 0};
    norm.apply(buffer(op.in) + row * width, buffer(op.out) + row * width, int(width), op.adds);
  }

  T* cached(int layer, int which) const {
    const size_t elements = shape_.kv_heads * head_elements<T>(shape_);
    return static_cast<T*>(step_.pool) + (size_t(layer) * 2 + which) * step_.num_blocks * elements;
  }

  // Rotates a row [queries, keys, values] to its position and writes its key and value to their slot.
  void place_row(const QuireOperator& op, int64_t row) const {
    const int64_t slot = step_.slots[op.cache_group][row];
    if (slot < 0) return;
    const int dim = shape_.head_dim;
    E* heads = buffer(op.in) + row * step_.widths[op.in];
    E* keys = heads + size_t(shape_.heads) * dim;
    const size_t width = size_t(shape_.kv_heads) * dim;  // of a row's keys, and of its values
    const E* cosines = op.rotary ? of(op.second) + size_t(step_.positions[row]) * op.rotary : nullptr;
    const E* sines = op.rotary ? of(op.second_bias) + size_t(step_.positions[row]) * op.rotary : nullptr;
    turn(op, heads, shape_.heads, of(op.weights), cosines, sines);
    turn(op, keys, shape_.kv_heads, of(op.bias), cosines, sines);
    for (int head = 0; head < shape_.kv_heads; ++head) {
      const E* key = keys + size_t(head) * dim;
      write_kv(key, key + width, cached(op.layer, 0), cached(op.layer, 1), slot, head, shape_);
    }
  }

  void turn(const QuireOperator& op, E* heads, int count, const E* norm, const E* cosines, const E* sines) const {
    for (int head = 0; head < count; ++head) {
      E* at = heads + size_t(head) * shape_.head_dim;
      if (norm) RmsNorm<E>{norm, op.eps, op.one_plus != 0}.apply(at, at, shape_.head_dim, false);
      if (op.rotary) rotate(at, cosines, sines, op.rotary);
    }
  }

  // In a packed row of prompts the longest contexts come last. They are taken first: short work at the end
  // balances the threads.
  void attend_share(const QuireOperator& op, int64_t share, Room& room) const {
    const GroupAttention& group = attention(op);
    const int heads = group.by_head ? 1 : shape_.kv_heads, shares_a_tile = shape_.kv_heads / heads;
    const size_t place = group.tiles.size() - 1 - size_t(share / shares_a_tile);
    const Tile& tile = group.tiles[place];
    const Queries<E> queries{buffer(op.in), size_t(step_.widths[op.in]), buffer(op.out), size_t(step_.widths[op.out])};
    const Cache<T> cache{cached(op.layer, 0), cached(op.layer, 1), shape_};
    const Rule rule{op.scale, op.window, op.chunk, op.softcap, static_cast<const float*>(op.weights)};
    const int first = group.by_head ? int(share % shape_.kv_heads) : 0;
    for (int head = first; head < first + heads; ++head) {
      const Chunks<T> next = next_chunks(group, queries, cache, rule, place, head, head + 1 < first + heads);
      Attention<E, T>(queries, cache, group.places, rule, tile, head).run(next, room);
    }
  }

  // Other threads take the shares in between: this thread's next one is about as many further on as there are
  // threads.
  Chunks<T> next_chunks(const GroupAttention& group, const Queries<E>& queries, const Cache<T>& cache, const Rule& rule,
                        size_t place, int head, bool same_tile) const {
    if (!same_tile && (group.by_head || place < size_t(step_.threads))) return {&cache, nullptr, 0, 0};
    const Tile& tile = group.tiles[same_tile ? place : place - size_t(step_.threads)];
    return Attention<E, T>(queries, cache, group.places, rule, tile, same_tile ? head + 1 : 0).first_chunks();
  }

  const QuireOperator* operators_;
  const int count_;
  const QuireStep& step_;
  std::unique_ptr<Shares[]> shares_, roundings_;
  std::unique_ptr<char[]> rounded_;  // the rows of the product that is computed
  std::unique_ptr<char[]> routes_;   // of the mixture that is computed
  const Shape shape_;
  std::unique_ptr<int64_t[]> first_piece_;  // of each REDUCE and GATHER
  std::unique_ptr<int64_t[]> num_shares_;   // of each operator
  std::vector<GroupAttention> attentions_;  // of each cache group
};

// One token of each row, from its id to the id of the next, by a list that begins with EMBED and ends with
// CHOOSE. Sets `slots`, and moves `positions` on. Returns the number of rows whose logits are not all finite.
template <class E, class T>
int decode_next(const QuireOperator* operators, int count, const QuireStep& step) {
  for (int group = 0; group < step.groups; ++group)
    for (int64_t row = 0; row < step.tokens; ++row) {
      const int position = step.positions[row], size = step.block_size;
      const int32_t* table = step.tables[group] + step.sequences[row] * step.table_stride;
      step.slots[group][row] = int64_t(table[position / size]) * size + position % size;
    }
  Decoder<E, T>(operators, count, step).run();
  for (int64_t row = 0; row < step.tokens; ++row) ++step.positions[row];
  return int(std::count(step.finite, step.finite + step.tokens, uint8_t(0)));
}

}  // namespace quire
