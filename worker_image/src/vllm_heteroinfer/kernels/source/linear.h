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

// FP8 weights (e4m3, a float32 scale for each 128 columns x 128 k) are packed in the same blocks and units, a byte an
// element: a pair of k of a block is 64 bytes, in the order that widening them to bf16 in registers needs.
constexpr long kScaled = 128;  // columns and k of a scale
constexpr long kScaledUnits = kScaled / kUnit;

// Where column and parity of k of a block are among the 64 bytes of a pair of FP8 weights: 16 bytes have eight of
// columns 0-15 and eight of 16-31, so that unpacking the halves of each 16 gives both in order.
constexpr long fp8_offset(long column, long parity) {
  const long at = column % 16 * 2 + parity;
  return at / 8 * 16 + column / 16 * 8 + at % 8;
}

// bf16 of an FP8 number (e4m3fn), exact: 4 bits of exponent with a bias of 7, no infinity, one NaN.
constexpr uint16_t widen_fp8(unsigned code) {
  unsigned exponent = code >> 3 & 15, mantissa = code & 7;
  const unsigned sign = (code & 128) << 8;
  if (exponent == 15 && mantissa == 7) return static_cast<uint16_t>(sign | 0x7fc0);
  if (!exponent && !mantissa) return static_cast<uint16_t>(sign);
  exponent += 120;
  if (exponent == 120)  // denormal there, normal here
    for (exponent = 121; !(mantissa & 8); exponent--) mantissa *= 2;
  return static_cast<uint16_t>(sign | exponent << 7 | (mantissa & 7) << 4);
}

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

// A block of FP8 weights that a thread reads from.
struct Fp8Stream {
  const uint8_t* w;
  const uint8_t* next;  // what is read after it: its first units are prefetched at the end of this one
  const float* scales;  // of its columns, for each 128 k
};

// What to prefetch while `unit` of `units` is read: the unit `distance` later; itself for nothing.
inline const uint8_t* fp8_ahead(const Fp8Stream& stream, long unit, long units, long distance) {
  if (!distance) return stream.w + unit * kUnitElements;
  const long later = unit + distance;
  return later < units ? stream.w + later * kUnitElements : stream.next + (later - units) * kUnitElements;
}

// What an instruction set does with FP8 weights. Each block's sums are added up in one order, whatever `count` is.
struct Fp8 {
  int rows;  // that `multiply` takes at once; beyond, `widen` and the kernel's own `multiply`
  // c[count][rows][32] += x * w over `units` units of `count` blocks, 1, 2 or 4.
  void (*multiply)(float* c, int rows, const Fp8Stream* streams, int count, const void* x, long units, long distance);
  // bf16 of a unit, as linear layers pack it; prefetches `ahead` meanwhile.
  void (*widen)(uint16_t* out, const uint8_t* w, const uint8_t* ahead);
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
  const Fp8* fp8;
};

extern const Kernel kAvx512;
extern const Kernel kAvx512Bf16;
extern const Kernel kAmx;
extern const Fp8 kFp8Avx512Bf16, kFp8Amx;  // need AVX512-VBMI too

// y[rows][columns] (row stride ldy) = c[rows][32] + bias, rounded to nearest even; bias may be null.
void store_rows(uint16_t* y, long ldy, const float* c, int rows, long columns, const uint16_t* bias);

// h[rows][n] (row stride ldh) = silu(gate) * up, rounded to nearest even; row r of `sums` (stride ld) holds its n
// gates and n ups as blocks of 32 in turn. n is a multiple of 32.
void silu_and_multiply(uint16_t* h, long ldh, const float* sums, long ld, int rows, long n);

// y[n] = sum over i of weights[i] * parts[i][n], in their order, rounded to nearest even; n is a multiple of 16.
void weighted_sum(uint16_t* y, const float* const* parts, const float* weights, long count, long n);

// How a layer chooses experts for a row, as patches/cpu_router.py says.
struct Routing {
  long experts, topk;
  const float* bias;   // [experts], that corrects which are chosen but not what they weigh; or null
  long sigmoid;        // scores are sigmoids of the logits; else their softmax
  long normalize;      // weights add up to `factor`; where all are zero they stay so
  float factor;
};

// Floats that `choose_experts` needs.
inline long choosing_floats(long experts) { return 2 * ((experts + 15) / 16 * 16); }

// weights[topk] and ids[topk] of the experts with the highest corrected scores, the highest first, of equal ones the
// first; from the logits of a row, bf16 or float32. NaN counts as the highest. `scratch` as above.
void choose_experts(float* weights, int32_t* ids, const void* logits, bool bf16, const Routing& routing, float* scratch);

// y[n] = x[n] / sqrt(mean(x^2) + epsilon) * weight[n], rounded to nearest even; n is a multiple of 32.
void norm_row(uint16_t* y, const uint16_t* x, const uint16_t* weight, long n, float epsilon);

// residual[n] = x + residual, rounded, and x its norm as above, of the sum before it is rounded where that is squared.
void add_and_norm_row(uint16_t* x, uint16_t* residual, const uint16_t* weight, long n, float epsilon);

// c[count] += scale * part[count]; count is a multiple of 16.
void add_scaled(float* c, const float* part, float scale, long count);

// Asks the kernel for the tile registers of this process; false if it has none to give.
bool request_amx();

}  // namespace heteroinfer
