// How calls multiply coded weights: which kernel takes the rows, and what it does with a block.
#pragma once

#include <cstring>

#include "call.h"
#include "coded.h"

namespace heteroinfer {

struct CodedChoice {
  const CodedKernel* kernel;
  const RowsKernel* rows;
  int streams;  // blocks that few rows read at once
  int prefetch;  // distance in units; 0 for none
};
// The kernel for m rows of these elements; as tuned.
CodedChoice choose_coded(long code, long element, long m);

// Tiles, of which AVX512-BF16 widens the weights.
CodedKernel coded_amx();

// The rows of a call, in groups of the kernel's.
inline Rows rows_of(const CodedKernel& kernel, long m) { return Rows(m, kernel.max_rows, kernel.full); }

// Packed inputs of rows: those of a group follow the ones before it.
struct PackedRows {
  const char* x;
  const float* sums;  // null without zero points
  CodedInputs group(const CodedKernel& kernel, const Rows& rows, long group, long units) const {
    const long first = rows.first(group);
    return {x + first * units * kUnit * kernel.x_bytes, sums ? sums + first * units : nullptr};
  }
};

// c[count][m][32] += x * w over the units [first, end) of `count` blocks; several blocks are for one group of rows.
void multiply_coded(const CodedChoice& choice, const Rows& rows, const PackedRows& inputs, const Layout& layout,
                    const CodedStream* streams, int count, long first, long end, float* c);

// How many blocks are read at once where `left` are left.
inline int coded_at_once(const CodedChoice& choice, const Rows& rows, long left) {
  long most = rows.groups > 1 || rows.m > 4 ? 1 : choice.streams;
  while (most > left) most /= 2;
  return static_cast<int>(most);
}

}  // namespace heteroinfer
