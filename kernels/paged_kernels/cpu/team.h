// Threads that run a list of operators together, where cores are shared with other processes.
//
// An operator is complete when its shares are done, not when all threads have arrived: a descheduled thread
// delays the others only if it holds a share. A waiting thread spins for a few microseconds, then sleeps and
// yields its core.
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

// Wait and notify, for one team.
class Bell {
 public:
  // Makes sleeping threads check again.
  void ring() {
    rings_.fetch_add(1);
    if (sleepers_.load() > 0) wake();
  }

  // Waits until `is_over()`; the thread that makes it true must ring afterwards.
  template <class IsOver>
  void wait(IsOver is_over) {
    for (int turn = 0; turn < SPINS; ++turn) {
      if (is_over()) return;
      pause();
    }
    for (int heard = rings_.load(); !is_over(); heard = rings_.load()) sleep(heard);
  }

 private:
  static constexpr int SPINS = 500;

  // Returns after another ring, or spuriously.
  void sleep(int heard) {
#if defined(__linux__)
    sleepers_.fetch_add(1);
    if (rings_.load() == heard) syscall(SYS_futex, &rings_, FUTEX_WAIT_PRIVATE, heard, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1);
#else
    (void)heard;
    sched_yield();
#endif
  }
  void wake() {
#if defined(__linux__)
    syscall(SYS_futex, &rings_, FUTEX_WAKE_PRIVATE, INT32_MAX, nullptr, nullptr, 0);
#endif
  }
  static void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  alignas(64) std::atomic<int> rings_{0};
  alignas(64) std::atomic<int> sleepers_{0};
};

// Hands out 0 .. count - 1, each once, and knows when all are done.
class Shares {
 public:
  bool next(int64_t count, int64_t& share) {
    if (taken_.load(std::memory_order_relaxed) >= count) return false;
    return (share = taken_.fetch_add(1, std::memory_order_relaxed)) < count;
  }
  // True for the last one.
  bool finish(int64_t count) { return done_.fetch_add(1, std::memory_order_acq_rel) + 1 == count; }
  bool are_done(int64_t count) const { return done_.load(std::memory_order_acquire) == count; }

 private:
  alignas(64) std::atomic<int64_t> taken_{0};
  std::atomic<int64_t> done_{0};
};

}  // namespace quire
