// Weights in the formats of checkpoints, for linear layers and experts: definitions that all parts share.
//
// A weight w[n][k] is a code of 16, 8 or 4 bits. Most formats multiply it by a scale. In memory a code has the same width
// as in the checkpoint. A kernel decodes it in registers to bf16 (for VDPBF16PS and AMX) or float32 (for FMA). Both
// conversions are exact. The products of inputs and codes that share a scale are summed in float32, and the sum is
// multiplied by the scale, so no weight is rounded.
//
// The packed weight is one array of bytes. Each block of 32 columns has a header, followed by its codes in units of 32
// inputs. The header has the block's scales, [group][32] (or [group] if the 32 columns share them), its zero points and
// its NaN markers, and is padded to 64 bytes. The codes of a block are contiguous, and so are the blocks.
#pragma once

#include "linear.h"

namespace heteroinfer {

// Same numbers as in kernels/coded.py.
enum Code { kBf16, kF16, kFp8, kInt8, kInt4, kFp4, kCodes };
enum ScaleType { kNoScale, kBlockF32, kColumnF32, kColumnBf16, kColumnF16, kColumnE8m0, kColumnE4m3 };
enum Element { kElementBf16, kElementF16, kElementF32 };  // element types of inputs and outputs
enum ActivationKind { kSwish, kGelu, kGeluTanh, kRelu2, kSwishLimited };

constexpr long kUnitPairs = kUnit / 2;
constexpr int kStreamRows = 4;  // for up to this many rows, several blocks are read at once

struct Format {
  long code, scale, group;  // group: number of inputs with a common scale, a multiple of 16; 0 for all inputs
  long zeros;               // whether groups have zero points; such groups have a multiple of 32 inputs
};

// Offsets of the parts of a packed weight, in bytes.
struct Layout {
  Layout() = default;
  Layout(const Format& format, long n, long k)
      : format(format), n(n), k(k), blocks((n + kColumns - 1) / kColumns), units((k + kUnit - 1) / kUnit) {
    group_pairs = format.group / 2;
    groups = format.group ? (units * kUnit + format.group - 1) / format.group : 1;
    static const long kScaleBytes[] = {0, 4, 4 * kColumns, 2 * kColumns, 2 * kColumns, kColumns, kColumns};
    scale_bytes = kScaleBytes[format.scale];
    scales = format.scale == kColumnE4m3 ? 4 * kColumns : 0;  // each column's float32 factor comes before the scales
    zeros = scales + groups * scale_bytes;
    nan_markers = zeros + (format.zeros ? groups * kColumns : 0);
    header = nan_markers + (format.code == kFp8 ? 4 * kColumns : 0);
    header = (header + 63) / 64 * 64;
    const long bits = format.code <= kF16 ? 16 : format.code <= kInt8 ? 8 : 4;
    unit_bytes = kUnitElements * bits / 8;
    block_bytes = header + units * unit_bytes;
  }
  Format format{};
  long n = 0, k = 0, blocks = 0, units = 0;
  long groups = 0, group_pairs = 0;  // groups in a block; pairs of inputs in a group, 0 for all
  long scale_bytes = 0, scales = 0, zeros = 0, nan_markers = 0, header = 0, unit_bytes = 0, block_bytes = 0;
  long bytes() const { return blocks * block_bytes; }
};

// A block that a thread reads, and the block that it will probably read next.
struct CodedStream {
  const uint8_t *block, *next;
};

// Packed inputs of the rows of a group, as `pack_rows` writes them, and their sums, [unit][row].
struct CodedInputs {
  const void* x;
  const float* sums;
};

// The activation between the two products: h = act(gate) * (up + offset), or act(gate) without a gate.
struct Activation {
  long kind, gated;
  float alpha;   // for swish: g * sigmoid(alpha * g)
  float limit;   // upper bound of gates (of their activation for kSwishLimited), and bound of the magnitude of ups;
                 // infinity for no bound
  float offset;
};

using MultiplyCoded = void (*)(float* c, int rows, const CodedStream* streams, int count, const CodedInputs& inputs,
                               const Layout& layout, long first, long end, long distance);

// c[rows][32] += x * w over the units [first, end) of a block; groups of `each` rows have their inputs after each other.
using MultiplyAllRows = void (*)(float* c, long rows, long each, const CodedStream& stream, const CodedInputs& inputs,
                                 const Layout& layout, long first, long end, long distance);

struct CodedKernel {
  const char* name;
  int max_rows;  // maximum rows of a `multiply`
  int x_bytes;   // bytes of one packed input
  bool full;     // true: fill each group of rows; false: use groups of equal size
  // Packs rows of any element type in the form of Kernel::pack_rows. Also writes each unit's sums, unless `sums` is null.
  void (*pack_rows)(void* out, float* sums, const void* x, long element, long ldx, int rows, long k, long first,
                    long end);
  // c[count][rows][32] += x * w over the units [first, end) of `count` blocks: 1, 2 or 4. Null if the code is unsupported.
  MultiplyCoded multiply[kCodes];
  // Writes a unit as bf16 in the order of linear layers: pairs [first, end), and zeros for the others.
  void (*widen[kCodes])(uint16_t* out, const uint8_t* w, const uint8_t* ahead, long first, long end);
  // For more than kStreamRows rows: decodes a block once for all rows. Null: `multiply` takes one group of rows at a time.
  MultiplyAllRows multiply_all[kCodes];
};

// Operations on float32 sums for one instruction set.
struct RowsKernel {
  // c[rows][32] += scale * (part - zero * sums), with the scales and zero points of one group of a block.
  void (*add_scaled)(float* c, const float* part, int rows, const uint8_t* block, const Layout& layout, long group,
                     const float* sums);
  // y[rows][columns] (row stride ldy) = c[rows][ldc] + bias, rounded to nearest even; bias has y's element type, or is null.
  void (*store)(void* y, long element, long ldy, const float* c, long ldc, int rows, long columns, const void* bias);
  // h[rows][n] from sums[rows][ld], in which blocks of 32 gates and 32 ups alternate. bias has the same order, or is null.
  // n is a multiple of 32.
  void (*activate)(void* h, long element, long ldh, const float* sums, long ld, int rows, long n,
                   const float* bias, const Activation& activation);
  // y[n] = sum over i of weights[i] * (parts[i] + biases[i]); biases may be null.
  void (*weighted_sum)(void* y, long element, const float* const* parts, const float* const* biases, const float* weights,
                       long count, long n);
};

extern const CodedKernel kCodedAvx512Bf16, kCodedAvx512, kCodedAvx2;
extern const RowsKernel kRowsAvx512, kRowsAvx2;

}  // namespace heteroinfer
