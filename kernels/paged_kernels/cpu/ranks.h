// Sums over the processes (ranks) of a group on one host, through memory that they share.
//
// All ranks sum the same pieces in the same order, numbered from 0 over the life of the memory. A rank copies
// its piece to a slot of its own, posts it, waits for those of the others and adds all in rank order, so that
// every rank has the same bits. A slot is used again when all ranks have taken what it held: there is no
// barrier, and threads of a rank may work on several pieces at once. As each takes the lowest piece that is
// left, the lowest unfinished piece of a group always proceeds.
//
// A waiting rank spins for some microseconds, gives up its core, then sleeps. It returns without a sum when the
// group has ended: a watcher has seen a rank die, a wait took too long, or sizes differ.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <sched.h>
#include <time.h>

#include "team.h"
#include "vectors.h"

// A rank's view of its group's memory, filled in by Python (ranks.py).
extern "C" struct QuireRanks {
  char* memory;
  int64_t next;        // number of the next piece
  int64_t timeout_ns;  // of a wait for another rank; 0 = none
  int32_t rank, size;
};

namespace quire {

enum Ending { NOT_ENDED = 0, LOST = 1, TIMED_OUT = 2, SIZES_DIFFER = 3 };

constexpr int64_t SLOTS = 32, SLOT_BYTES = 16 * 1024;

class RankMemory {
 public:
  explicit RankMemory(const QuireRanks& ranks) : ranks_(ranks) {}

  static int64_t bytes(int ranks) { return int64_t(sizeof(Header)) + ranks * SLOTS * int64_t(sizeof(Slot) + SLOT_BYTES); }
  template <class E> static constexpr int64_t piece() { return SLOT_BYTES / int64_t(sizeof(E)); }
  template <class E> static int64_t pieces(int64_t count) { return (count + piece<E>() - 1) / piece<E>(); }

  // out (+)= the sum of all ranks' `in`, rounded once; `adds`: rounded again after it is added to `out`, which
  // may be `in` otherwise. Writes nothing if the group has ended.
  template <class E> void sum(int64_t number, const E* in, E* out, int64_t count, bool adds) const {
    share(number, in, count, [&](int64_t place) { add<E>(place, out, count, adds); });
  }

  // out[rank * stride ..] = each rank's `in`, which is where this rank's part of `out` is. Writes nothing if the
  // group has ended.
  template <class E> void gather(int64_t number, E* out, size_t stride, int64_t count) const {
    share(number, out + ranks_.rank * stride, count, [&](int64_t place) {
      for (int rank = 0; rank < ranks_.size; ++rank)
        if (rank != ranks_.rank) std::memcpy(out + rank * stride, data(rank, place), size_t(count) * sizeof(E));
    });
  }

  // The first reason is kept.
  void end(Ending why) const {
    int32_t none = NOT_ENDED;
    header().ended.compare_exchange_strong(none, why);
    ring();
  }
  int ended() const { return header().ended.load(std::memory_order_acquire); }

 private:
  static constexpr int SPINS = 1000, YIELDS = 50;
  static constexpr long SLEEP_NS = 5'000'000;  // how late a ring may be heard that came at the wrong moment

  // Gives this rank's piece to the others, and calls `use(place)` when the slots there hold all of them.
  template <class E, class Use> void share(int64_t number, const E* in, int64_t count, Use use) const {
    const int64_t place = number % SLOTS;
    Slot& own = slot(ranks_.rank, place);
    if (!wait([&] { return all(place, [&](const Slot& s) { return s.taken.load(std::memory_order_acquire) > number - SLOTS; }); }))
      return;
    std::memcpy(data(ranks_.rank, place), in, size_t(count) * sizeof(E));
    own.bytes = count * int64_t(sizeof(E));
    own.posted.store(number + 1, std::memory_order_release);
    ring();
    if (!wait([&] { return all(place, [&](const Slot& s) { return s.posted.load(std::memory_order_acquire) > number; }); }))
      return;
    if (!all(place, [&](const Slot& s) { return s.bytes == own.bytes; })) return end(SIZES_DIFFER);
    use(place);
    own.taken.store(number + 1, std::memory_order_release);
    ring();
  }

  // Zero at first. `taken`, `posted`: number of the last piece, plus one.
  struct alignas(64) Header {
    std::atomic<int32_t> ended;
    alignas(64) std::atomic<int32_t> rings;
    alignas(64) std::atomic<int32_t> sleepers;
  };
  struct alignas(64) Slot {
    std::atomic<int64_t> posted;
    int64_t bytes;
    alignas(64) std::atomic<int64_t> taken;
  };

  Header& header() const { return *reinterpret_cast<Header*>(ranks_.memory); }
  Slot& slot(int rank, int64_t place) const {
    return reinterpret_cast<Slot*>(ranks_.memory + sizeof(Header))[rank * SLOTS + place];
  }
  char* data(int rank, int64_t place) const {
    char* first = ranks_.memory + sizeof(Header) + ranks_.size * SLOTS * sizeof(Slot);
    return first + (rank * SLOTS + place) * SLOT_BYTES;
  }
  template <class Test> bool all(int64_t place, Test test) const {
    for (int rank = 0; rank < ranks_.size; ++rank)
      if (!test(slot(rank, place))) return false;
    return true;
  }

  template <class E> void add(int64_t place, E* out, int64_t count, bool adds) const {
    for (int64_t d = 0; d < count; d += LANES) {
      const int lanes = int(std::min<int64_t>(LANES, count - d));
      Vec total = load_vec(reinterpret_cast<const E*>(data(0, place)) + d, lanes);
      for (int rank = 1; rank < ranks_.size; ++rank)
        total = total + load_vec(reinterpret_cast<const E*>(data(rank, place)) + d, lanes);
      store_vec(out + d, adds ? load_vec(out + d, lanes) + rounded<E>(total) : total, lanes);
    }
  }

  // False if the group has ended meanwhile.
  template <class IsOver> bool wait(IsOver is_over) const {
    for (int turn = 0; turn < SPINS; ++turn) {
      if (is_over()) return true;
      pause();
    }
    for (int turn = 0; turn < YIELDS; ++turn) {
      if (is_over()) return true;
      sched_yield();
    }
    const int64_t begin = now_ns();
    for (;;) {
      const int heard = header().rings.load();
      if (is_over()) return true;
      if (ended()) return false;
      if (ranks_.timeout_ns && now_ns() - begin > ranks_.timeout_ns) end(TIMED_OUT);
      else sleep(heard);
    }
  }

  static int64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
  }
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  // As Bell's, but between processes, and never for longer than SLEEP_NS.
  void sleep(int heard) const {
    const timespec most{0, SLEEP_NS};
#if defined(__linux__)
    header().sleepers.fetch_add(1);
    if (header().rings.load() == heard) syscall(SYS_futex, &header().rings, FUTEX_WAIT, heard, &most, nullptr, 0);
    header().sleepers.fetch_sub(1);
#else
    (void)heard;
    nanosleep(&most, nullptr);
#endif
  }
  void ring() const {
    header().rings.fetch_add(1);
#if defined(__linux__)
    if (header().sleepers.load() > 0) syscall(SYS_futex, &header().rings, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#endif
  }

  const QuireRanks& ranks_;
};

}  // namespace quire
