// Threads that go through a list of operators together. Inside an OpenMP region of exactly `size` threads.
//
// A thread that waits spins for some microseconds, then gives its core to others that want it: spinning would starve the thread
// waited for wherever cores are shared.
#pragma once

#include <atomic>
#include <cstdint>
#include <sched.h>

namespace quire {

class Team {
 public:
  explicit Team(int size) : size_(size) {}

  // All have arrived when it returns.
  void wait() {
    if (size_ == 1) return;
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int turn = 0; phase_.load(std::memory_order_acquire) == phase; ++turn) {
      if (turn < SPINS) pause();
      else sched_yield();
    }
  }

 private:
  static constexpr int SPINS = 2000;
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  const int size_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};

// Hands out 0 .. count - 1, each once, to whoever asks next.
class Shares {
 public:
  bool next(int64_t count, int64_t& share) { return (share = taken_.fetch_add(1, std::memory_order_relaxed)) < count; }
  void restart() { taken_.store(0, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int64_t> taken_{0};
};

}  // namespace quire
