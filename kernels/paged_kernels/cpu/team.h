// Threads that go through a list of operators together, where cores are shared with other processes.
//
// An operator is over when its shares are done, not when all threads have come: one that has lost its core holds up nobody unless it
// holds a share. A thread that waits spins for some microseconds, then sleeps: an idle core takes over who waits for one.
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

// Waits, and tells of progress. Of one team.
class Bell {
 public:
  // Those who sleep look again.
  void ring() {
    rings_.fetch_add(1);
    if (sleepers_.load() > 0) wake();
  }

  // Until `is_over()`; whoever makes it so rings afterwards.
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

  // Until there was another ring, or for no reason.
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

// Hands out 0 .. count - 1, each once, to whoever asks next, and knows when all are done.
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
