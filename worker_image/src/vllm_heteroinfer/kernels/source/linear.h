// bf16 linear layers for x86-64 with AVX-512: what the parts share.
//
// y[m][n] = sum_k x[m][k] * w[n][k] + bias[n], bf16 in and out, float32 sums.
//
// Decoding is bound by reading w once a step, so everything here serves that one stream:
//   - w is packed once as [n/32][k/2][32][2]: a block of 32 columns is contiguous, and any part
//     of a block along k too. Both edges are padded with zeros (n to 32, k to 32).
//   - A unit is 32 columns x 32 k (2 KiB). Threads take equal runs of units, whatever the shape;
//     a block that is split between threads is summed up at the end.
//   - A thread reads several positions of a block at once (streams) and prefetches each: one
//     contiguous stream a thread does not fill the memory controllers.
//   - x is repacked so that the rows which are computed together lie together.
//
// Paths differ in one thing: VDPBF16PS and TDPBF16PS take denormal inputs and sums (below 2^-126 in size) for
// zeros and make zeros of denormal results, whatever MXCSR says (Intel SDM vol. 2); AVX-512F keeps them, as
// torch does. Sums also round in another order. The bias is added outside of the paths and keeps denormals.
#pragma once

#include <cstdint>

namespace heteroinfer {

constexpr long kColumns = 32;              // of a block
constexpr long kUnit = 32;                 // k of a unit
constexpr long kUnitElements = kColumns * kUnit;
constexpr int kMaxStreams = 4;

// One position that a thread reads from.
struct Stream {
  const uint16_t* w;      // packed weights
  const uint16_t* ahead;  // what to prefetch while w is read: as long as w; w itself for nothing
  const void* x;          // the rows' inputs at the same k, as `pack_rows` lays them
};

// Which part of `ahead` to prefetch: `index` of `count` equal ones.
struct Share {
  int index, count;
};

// One instruction set's part.
struct Kernel {
  const char* name;
  int max_rows;       // that `multiply` takes at once
  int x_bytes;        // of one packed input
  int streams;        // at once, for few rows
  int prefetch;       // distance, in units
  bool shares;        // whether groups of rows prefetch a share each, a chunk ahead; else the first all
  // Packs rows x[rows][k] (row stride ldx) for the units [first, end) of k into `out`, which is
  // the start of these rows' inputs; zeros beyond k.
  void (*pack_rows)(void* out, const uint16_t* x, long ldx, int rows, long k, long first, long end);
  // c[rows][32] += x * w over `units` units of each stream.
  void (*multiply)(float* c, int rows, const Stream* streams, int count, long units, Share share);
  // Before the first and after the last `multiply` of a thread.
  void (*enter)();
  void (*leave)();
};

extern const Kernel kAvx512;
extern const Kernel kAvx512Bf16;
extern const Kernel kAmx;

// y[rows][columns] (row stride ldy) = c[rows][32] + bias, rounded to nearest even; bias may be null.
void store_rows(uint16_t* y, long ldy, const float* c, int rows, long columns, const uint16_t* bias);

// h[rows][n] (row stride ldh) = silu(gate) * up, rounded to nearest even; row r of `sums` (stride ld) holds its n
// gates and n ups as blocks of 32 in turn. n is a multiple of 32.
void silu_and_multiply(uint16_t* h, long ldh, const float* sums, long ld, int rows, long n);

// y[n] = sum over i of weights[i] * parts[i][n], in their order, rounded to nearest even; n is a multiple of 16.
void weighted_sum(uint16_t* y, const float* const* parts, const float* weights, long count, long n);

// Asks the kernel for the tile registers of this process; false if it has none to give.
bool request_amx();

}  // namespace heteroinfer
