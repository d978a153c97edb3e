// bf16 linear layers for x86-64 with AVX-512: definitions that all parts share.
//
// y[m][n] = sum_k x[m][k] * w[n][k] + bias[n], with bf16 inputs and outputs and float32 sums.
//
// The time of a decoding step is the time to read w once, so everything serves this one stream:
//   - w is packed once as [n/32][k/2][32][2]: a block of 32 columns is contiguous, and so is any part of a block along k.
//     Both edges are padded with zeros (n to 32, k to 32).
//   - A unit is 32 columns x 32 k (2 KiB). Each thread takes the same number of consecutive units, whatever the shape.
//     The sums of a block that is split between threads are added at the end.
//   - A thread reads several positions of a block at once (streams) and prefetches each. One contiguous stream per thread
//     cannot use the whole memory bandwidth.
//   - x is repacked so that the rows of a group are contiguous.
//
// The paths round differently in two ways. VDPBF16PS and TDPBF16PS treat denormal inputs and sums (below 2^-126) as zeros
// and turn denormal results into zeros, whatever MXCSR is (Intel SDM vol. 2); AVX-512F keeps them, as torch does. Also,
// sums are added in another order. The bias is added outside of the paths, where denormals are kept.
#pragma once

#include <cstdint>

namespace heteroinfer {

constexpr long kColumns = 32;              // columns of a block
constexpr long kUnit = 32;                 // k of a unit
constexpr long kUnitElements = kColumns * kUnit;
constexpr int kMaxStreams = 4;

// FP8 weights (e4m3 with a float32 scale for each 128 columns x 128 k) are packed in the same blocks and units, one byte
// per element. A pair of k of a block has 64 bytes, in the order in which registers widen them to bf16.
constexpr long kScaled = 128;  // columns and k of a scale
constexpr long kScaledUnits = kScaled / kUnit;

// Index of (column, parity of k) among the 64 bytes of a pair of FP8 weights. Each 16 bytes have eight of columns 0-15,
// then eight of columns 16-31, so unpacking the halves of each 16 bytes yields both in order.
constexpr long fp8_offset(long column, long parity) {
  const long at = column % 16 * 2 + parity;
  return at / 8 * 16 + column / 16 * 8 + at % 8;
}

// Converts an FP8 number (e4m3fn) to bf16, without rounding. e4m3fn has 4 bits of exponent with a bias of 7, no infinity
// and one NaN.
constexpr uint16_t widen_fp8(unsigned code) {
  unsigned exponent = code >> 3 & 15, mantissa = code & 7;
  const unsigned sign = (code & 128) << 8;
  if (exponent == 15 && mantissa == 7) return static_cast<uint16_t>(sign | 0x7fc0);
  if (!exponent && !mantissa) return static_cast<uint16_t>(sign);
  exponent += 120;
  if (exponent == 120)  // denormal in FP8, normal in bf16
    for (exponent = 121; !(mantissa & 8); exponent--) mantissa *= 2;
  return static_cast<uint16_t>(sign | exponent << 7 | (mantissa & 7) << 4);
}

// A position from which a thread reads.
struct Stream {
  const uint16_t* w;      // packed weights
  const uint16_t* ahead;  // memory to prefetch while w is read, as long as w; w itself to prefetch nothing
  const void* x;          // the rows' inputs at the same k, as `pack_rows` writes them
};

// The part of `ahead` to prefetch: part `index` of `count` equal parts.
struct Share {
  int index, count;
};

// A block of FP8 weights that a thread reads.
struct Fp8Stream {
  const uint8_t* w;
  const uint8_t* next;  // the block that is read next: its first units are prefetched at the end of this block
  const float* scales;  // scales of the block's columns, one for each 128 k
};

// Address to prefetch while `unit` of `units` is read: the unit `distance` later, or, to prefetch nothing, the unit
// itself.
inline const uint8_t* fp8_ahead(const Fp8Stream& stream, long unit, long units, long distance) {
  if (!distance) return stream.w + unit * kUnitElements;
  const long later = unit + distance;
  return later < units ? stream.w + later * kUnitElements : stream.next + (later - units) * kUnitElements;
}

// FP8 kernels of an instruction set. The order in which a block's sums are added does not depend on `count`.
struct Fp8 {
  int rows;  // maximum rows of `multiply`; for more rows use `widen` and Kernel::multiply
  // c[count][rows][32] += x * w over `units` units of `count` blocks: 1, 2 or 4.
  void (*multiply)(float* c, int rows, const Fp8Stream* streams, int count, const void* x, long units, long distance);
  // Writes a unit as bf16, in the packed order of linear layers, and prefetches `ahead`.
  void (*widen)(uint16_t* out, const uint8_t* w, const uint8_t* ahead);
};

// The kernels of one instruction set.
struct Kernel {
  const char* name;
  int max_rows;       // maximum rows of a `multiply`
  int x_bytes;        // bytes of one packed input
  int streams;        // number of streams for few rows
  int prefetch;       // distance in units
  bool shares;        // true: each group of rows prefetches a share, one chunk ahead; false: the first group prefetches all
  // Packs rows x[rows][k] (row stride ldx) for the units [first, end) of k into `out`, the start of these rows' inputs.
  // Writes zeros beyond k.
  void (*pack_rows)(void* out, const uint16_t* x, long ldx, int rows, long k, long first, long end);
  // c[rows][32] += x * w over `units` units of each stream.
  void (*multiply)(float* c, int rows, const Stream* streams, int count, long units, Share share);
  // A thread calls `enter` before its first and `leave` after its last `multiply`.
  void (*enter)();
  void (*leave)();
  const Fp8* fp8;
};

extern const Kernel kAvx512;
extern const Kernel kAvx512Bf16;
extern const Kernel kAmx;
extern const Fp8 kFp8Avx512Bf16, kFp8Amx;  // these also need AVX512-VBMI

// y[rows][columns] (row stride ldy) = c[rows][32] + bias, rounded to nearest even; bias may be null.
void store_rows(uint16_t* y, long ldy, const float* c, int rows, long columns, const uint16_t* bias);

// h[rows][n] (row stride ldh) = silu(gate) * up, rounded to nearest even. In row r of `sums` (stride ld), blocks of 32
// gates and 32 ups alternate. n is a multiple of 32.
void silu_and_multiply(uint16_t* h, long ldh, const float* sums, long ld, int rows, long n);

// y[n] = sum over i of weights[i] * parts[i][n], added in this order, rounded to nearest even; n is a multiple of 16.
void weighted_sum(uint16_t* y, const float* const* parts, const float* weights, long count, long n);

// How a layer chooses experts for a row, as in patches/cpu_router.py.
struct Routing {
  long experts, topk;
  const float* bias;   // [experts], added to the scores for the choice only, not for the weights; or null
  long sigmoid;        // scores are the sigmoid of the logits (1) or their softmax (0)
  long normalize;      // weights add up to `factor`; if all are zero, they stay zero
  float factor;
};

// Number of floats that `choose_experts` needs in `scratch`.
inline long choosing_floats(long experts) { return 2 * ((experts + 15) / 16 * 16); }

// Writes weights[topk] and ids[topk] of the experts with the highest corrected scores, in descending order; of equal
// scores, the lower id comes first. The logits of the row are bf16 or float32. NaN counts as the highest score.
void choose_experts(float* weights, int32_t* ids, const void* logits, bool bf16, const Routing& routing, float* scratch);

// y[n] = x[n] / sqrt(mean(x^2) + epsilon) * weight[n], rounded to nearest even; n is a multiple of 32.
void norm_row(uint16_t* y, const uint16_t* x, const uint16_t* weight, long n, float epsilon);

// residual[n] = x + residual, rounded; x = the norm of this sum. The mean of squares uses the sum before rounding.
void add_and_norm_row(uint16_t* x, uint16_t* residual, const uint16_t* weight, long n, float epsilon);

// c[count] += scale * part[count]; count is a multiple of 16.
void add_scaled(float* c, const float* part, float scale, long count);

// Requests the AMX tile registers from the operating system; false if it has none for this process.
bool request_amx();

}  // namespace heteroinfer
