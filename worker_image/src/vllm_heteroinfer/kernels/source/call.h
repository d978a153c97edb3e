// What calls of several kinds share: memory that grows, rows in groups, and which kernel takes them.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <new>

#include "linear.h"

namespace heteroinfer {

// Grows, never shrinks: no allocation once the largest batch has been seen.
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

inline long ceil_div(long a, long b) { return (a + b - 1) / b; }

// The rows of a call, in groups that a kernel multiplies at once.
struct Rows {
  Rows(const Kernel& kernel, long m) : m(m), groups(ceil_div(m, kernel.max_rows)) {
    // Tiles are cheapest full; vectors cheapest in equal groups.
    each = &kernel == &kAmx ? std::min<long>(m, kernel.max_rows) : ceil_div(m, groups);
    groups = ceil_div(m, each);
  }
  long first(long group) const { return group * each; }
  int count(long group) const { return static_cast<int>(std::min(each, m - group * each)); }
  long m, groups, each = 0;
};

// The kernel for m rows, how many positions it reads at once, and how far it prefetches; all as tuned. For FP8 weights
// it is the one of AVX-512F where the CPU lacks AVX512-VBMI.
struct Choice {
  const Kernel* kernel;
  int streams, prefetch;
};
Choice choose_kernel(long m, bool fp8 = false);

}  // namespace heteroinfer
