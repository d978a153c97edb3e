// RMS norms of bf16 rows. One thread computes few rows, because waking other threads would take longer.
#include "linear.h"

using namespace heteroinfer;

namespace {

constexpr long kSerialElements = 32768;  // for up to this many elements, one thread is faster

// Calls compute(row) for each row of n elements: in one thread for few elements, otherwise in all threads.
template <class Compute>
void each_row(long rows, long n, Compute compute) {
  if (rows * n <= kSerialElements) {
    for (long row = 0; row < rows; row++) compute(row);
    return;
  }
#pragma omp parallel for
  for (long row = 0; row < rows; row++) compute(row);
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// y[tokens][heads][n] = norm of each row of x[tokens][heads][n] (strides ldt and ldh); n is a multiple of 32.
void heteroinfer_norm(uint16_t* y, const uint16_t* x, const uint16_t* weight, long tokens, long ldt, long heads, long ldh,
                      long n, float epsilon) {
  each_row(tokens * heads, n, [&](long row) {
    norm_row(y + row * n, x + row / heads * ldt + row % heads * ldh, weight, n, epsilon);
  });
}

// residual[rows][n] += x[rows][n], and x = the norm of the sum.
void heteroinfer_add_and_norm(uint16_t* x, uint16_t* residual, const uint16_t* weight, long rows, long n,
                              float epsilon) {
  each_row(rows, n, [&](long row) { add_and_norm_row(x + row * n, residual + row * n, weight, n, epsilon); });
}

}  // extern "C"
#pragma GCC visibility pop
