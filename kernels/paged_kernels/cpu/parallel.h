// Runs work on the threads of the OpenMP runtime that torch itself uses.
//
// No OpenMP pragmas: a compiler turns them into calls of its own runtime (GCC: libgomp, Clang: libomp), and a
// process with two runtimes has two thread pools that compete for its cores. GOMP_parallel exists in libgomp,
// LLVM's libomp and Intel's libiomp5 alike; cpu_compiled.py looks it up in torch and passes it in.
#pragma once

#include <cstdint>

#include "team.h"

namespace quire {

typedef void (*ParallelRegion)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
static ParallelRegion parallel_region = nullptr;  // serial until set

// Calls `work()` on up to `threads` threads concurrently.
template <class Work>
void on_threads(int threads, const Work& work) {
  if (threads < 2 || !parallel_region) return work();
  const auto body = [](void* data) { (*static_cast<const Work*>(data))(); };
  parallel_region(body, const_cast<Work*>(&work), unsigned(threads), 0);
}

// Calls `work(share, room)` for each share 0 .. count - 1, taken by threads dynamically; each thread has its
// own Room.
template <class Room, class Work>
void share_out(int64_t count, int threads, const Work& work) {
  Shares shares;
  on_threads(count < 2 ? 1 : threads, [&] {
    Room room;
    for (int64_t share; shares.next(count, share);) work(share, room);
  });
}

}  // namespace quire
