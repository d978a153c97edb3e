// Parts of linear layers and experts: a buffer, groups of rows, the choice of a kernel, and lists of tasks.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <utility>

#include "linear.h"

namespace heteroinfer {

// A buffer that grows and never shrinks: after the largest batch, no call allocates memory.
class Buffer {
 public:
  ~Buffer() { std::free(data_); }
  void* reserve(size_t bytes) {
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
      if (!data_) throw std::bad_alloc();
      size_ = bytes;
    }
    return data_;
  }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// a / b, rounded up.
inline long ceil_div(long a, long b) { return (a + b - 1) / b; }

// The rows of a call, divided into groups. A kernel multiplies one group at a time.
struct Rows {
  Rows(const Kernel& kernel, long m) : Rows(m, kernel.max_rows, &kernel == &kAmx) {}
  // AMX tiles are cheapest if they are full, vectors if all groups have the same size.
  Rows(long m, long most, bool full) : m(m), groups(ceil_div(m, most)) {
    each = full ? std::min(m, most) : ceil_div(m, groups);
    groups = ceil_div(m, each);
  }
  long first(long group) const { return group * each; }
  int count(long group) const { return static_cast<int>(std::min(each, m - group * each)); }
  long m, groups, each = 0;
};

// The kernel for m rows, its number of streams (see linear.h) and its prefetch distance, as tuned. For FP8 weights on a
// CPU without AVX512-VBMI, the kernel is the one for AVX-512F.
struct Choice {
  const Kernel* kernel;
  int streams, prefetch;
};
Choice choose_kernel(long m, bool fp8 = false);

// The remaining tasks [first, end) of a thread. The thread takes tasks from the front, other threads take them from the
// back once they have done their own: all threads get the same number of tasks, but some are slower, because they share
// a core or memory with other work. Both numbers are in one word, so that one atomic operation takes tasks.
class alignas(64) Run {
 public:
  explicit Run(long first = 0, long end = 0) : both_(pack(first, end)) {}
  void set(long first, long end) { both_.store(pack(first, end), std::memory_order_relaxed); }
  long left() const {
    const uint64_t both = both_.load(std::memory_order_relaxed);
    return end(both) - first(both);
  }
  // Takes tasks from the front: as many as count(first task, number of remaining tasks) returns. Returns the first
  // task and the number of tasks, which is 0 if none remained. `take_back` takes tasks from the end.
  template <class Count>
  std::pair<long, long> take_front(Count count) {
    uint64_t both = both_.load(std::memory_order_relaxed);
    while (first(both) < end(both)) {
      const long from = first(both), taken = count(from, end(both) - from);
      if (both_.compare_exchange_weak(both, pack(from + taken, end(both)), std::memory_order_relaxed))
        return {from, taken};
    }
    return {0, 0};
  }
  template <class Count>
  std::pair<long, long> take_back(Count count) {
    uint64_t both = both_.load(std::memory_order_relaxed);
    while (first(both) < end(both)) {
      const long until = end(both), taken = count(until, until - first(both));
      if (both_.compare_exchange_weak(both, pack(first(both), until - taken), std::memory_order_relaxed))
        return {until - taken, taken};
    }
    return {0, 0};
  }

 private:
  static uint64_t pack(long first, long end) { return static_cast<uint64_t>(first) << 32 | static_cast<uint64_t>(end); }
  static long first(uint64_t both) { return static_cast<long>(both >> 32); }
  static long end(uint64_t both) { return static_cast<long>(both & 0xffffffff); }
  std::atomic<uint64_t> both_;
};

// A `count` for Run and the two functions below that takes one task at a time.
inline long one_task(long, long) { return 1; }

// Takes the tasks of the thread's own run until it is empty, and calls compute(first task, number) for them.
template <class Count, class Compute>
void run_own_tasks(Run& run, Count count, Compute compute) {
  for (;;) {
    const auto [first, taken] = run.take_front(count);
    if (!taken) return;
    compute(first, taken);
  }
}

// Takes tasks of other threads, each time from the run with most tasks left, until all runs are empty. Calls
// compute(first task, number) for them.
template <class Count, class Compute>
void run_tasks_of_others(Run* runs, long thread, long threads, Count count, Compute compute) {
  for (;;) {
    long fullest = thread, most = 0;
    for (long other = thread + 1; other < thread + threads; other++)
      if (const long left = runs[other % threads].left(); left > most) fullest = other % threads, most = left;
    if (!most) return;
    const auto [first, taken] = runs[fullest].take_back(count);
    if (taken) compute(first, taken);
  }
}

}  // namespace heteroinfer
