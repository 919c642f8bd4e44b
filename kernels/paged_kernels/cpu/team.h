// Threads that go through a list of operators together. Inside an OpenMP region of exactly `size` threads.
//
// A thread that waits spins for some microseconds, then sleeps: where cores are shared, the thread waited for has lost its core to
// somebody, and an idle core takes it over at once; one that spins, or yields to nobody, does not.
#pragma once

#include <atomic>
#include <cstdint>
#include <sched.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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
      phase_.store(phase + 1);
      if (sleepers_.load() > 0) wake();
      return;
    }
    for (int turn = 0; phase_.load(std::memory_order_acquire) == phase; ++turn) {
      if (turn < SPINS) pause();
      else sleep(phase);
    }
  }

 private:
  static constexpr int SPINS = 2000;

  // Until the phase is another, or for no reason.
  void sleep(int phase) {
#if defined(__linux__)
    sleepers_.fetch_add(1);
    if (phase_.load() == phase) syscall(SYS_futex, &phase_, FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1);
#else
    (void)phase;
    sched_yield();
#endif
  }
  void wake() {
#if defined(__linux__)
    syscall(SYS_futex, &phase_, FUTEX_WAKE_PRIVATE, size_, nullptr, nullptr, 0);
#endif
  }
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  const int size_;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
  alignas(64) std::atomic<int> sleepers_{0};
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
