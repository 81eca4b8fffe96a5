// Shares independent tasks between the caller and XLA's own thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <thread>

#include "vector.h"
#include "xla/ffi/api/ffi.h"

namespace jaxserve {

// Runs task(i) for every i below `num_tasks`, in any order; returns when all are done.
//
// The caller works too and never waits for a thread to start: helpers that come late find nothing left, and
// only then let go of the shared counters.
template <typename Task>
void parallel_for(xla::ffi::ThreadPool& pool, int64_t num_tasks, Task task) {
  const int64_t num_threads = pool.num_threads();
  if (num_threads < 2 || num_tasks < 2) {
    for (int64_t i = 0; i < num_tasks; ++i) task(i);
    return;
  }
  struct Counters {
    std::atomic<int64_t> next{0}, done{0};
  };
  auto counters = std::make_shared<Counters>();
  auto work = [counters, num_tasks, task] {
    for (int64_t i; (i = counters->next.fetch_add(1)) < num_tasks;) {
      task(i);
      counters->done.fetch_add(1, std::memory_order_release);
    }
  };
  for (int64_t i = 1; i < std::min(num_threads, num_tasks); ++i) pool.Schedule(std::function<void()>(work));
  work();
  for (int spins = 0; counters->done.load(std::memory_order_acquire) < num_tasks; ++spins) {
    if (spins < 4096) {
#if defined(__aarch64__)
      asm volatile("yield");
#else
      _mm_pause();
#endif
    } else {
      std::this_thread::yield();
    }
  }
}

// Shares n outputs among threads in multiples of `unit`: a long run for each, whose weights stream in without a break,
// then short ones for threads that are ahead of the others.
struct Split {
  int64_t n, threads, run, rest;

  Split(int64_t n, int64_t threads, int64_t unit) : n(n), threads(threads) {
    run = n * 3 / 4 / threads / unit * unit;
    rest = (n / (16 * threads) / unit + 1) * unit;
  }
  int64_t begin(int64_t task) const {
    return std::min(n, std::min(task, threads) * run + std::max<int64_t>(task - threads, 0) * rest);
  }
  int64_t count() const { return threads + (n - threads * run + rest - 1) / rest; }
};

}  // namespace jaxserve
