// Calls with coded weights: the choice of a kernel, and the multiplication of blocks.
#pragma once

#include <cstring>

#include "call.h"
#include "coded.h"

namespace heteroinfer {

struct CodedChoice {
  const CodedKernel* kernel;
  const RowsKernel* rows;
  int streams;  // number of blocks that are read at once for few rows
  int prefetch;  // distance in units; 0 for none
};
// The kernel for m rows of this code and element type, as tuned.
CodedChoice choose_coded(long code, long element, long m);

// The AMX kernel. It multiplies weights that the AVX512-BF16 kernel widens.
CodedKernel coded_amx();

// The rows of a call, in groups for this kernel.
inline Rows rows_of(const CodedKernel& kernel, long m) { return Rows(m, kernel.max_rows, kernel.full); }

// The packed inputs of all groups of rows, one group after another.
struct PackedRows {
  const char* x;
  const float* sums;  // null without zero points
  CodedInputs group(const CodedKernel& kernel, const Rows& rows, long group, long units) const {
    const long first = rows.first(group);
    return {x + first * units * kUnit * kernel.x_bytes, sums ? sums + first * units : nullptr};
  }
};

// c[count][m][32] += x * w over the units [first, end) of `count` blocks. Several blocks require a single group of rows.
void multiply_coded(const CodedChoice& choice, const Rows& rows, const PackedRows& inputs, const Layout& layout,
                    const CodedStream* streams, int count, long first, long end, float* c);

// Number of blocks to read at once if `left` remain.
inline int coded_at_once(const CodedChoice& choice, const Rows& rows, long left) {
  long most = rows.groups > 1 || rows.m > kStreamRows ? 1 : choice.streams;
  while (most > left) most /= 2;
  return static_cast<int>(most);
}

}  // namespace heteroinfer
