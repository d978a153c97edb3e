// Weights in the formats that checkpoints have, for linear layers and experts: what the parts share.
//
// A weight w[n][k] is a code of 16, 8 or 4 bits, and most formats multiply it by a scale. Codes stay as wide in memory
// as in the checkpoint, and are decoded in registers, exactly, to bf16 (for VDPBF16PS and AMX) or float32 (for FMA). Scales
// are multiplied in float32, into the sums of the inputs that share one: no weight is rounded.
//
// The packed weight is one array of bytes: for each block of 32 columns a header, then the codes as units of 32 inputs.
// The header has the block's scales, [group][32] (or [group] if the 32 columns share them), its zero points, and what
// poisons a column; it is padded to 64 bytes. A block's codes are contiguous, and blocks follow each other.
#pragma once

#include "linear.h"

namespace heteroinfer {

// As kernels/coded.py numbers them.
enum Code { kBf16, kF16, kFp8, kInt8, kInt4, kFp4, kCodes };
enum ScaleType { kNoScale, kBlockF32, kColumnF32, kColumnBf16, kColumnF16, kColumnE8m0, kColumnE4m3 };
enum Element { kElementBf16, kElementF16, kElementF32 };  // of inputs and outputs
enum ActivationKind { kSwish, kGelu, kGeluTanh, kRelu2 };

constexpr long kUnitPairs = kUnit / 2;

struct Format {
  long code, scale, group;  // group: inputs that share a scale, a multiple of 16; 0 for all of them
  long zeros;               // whether groups have zero points; of groups that are a multiple of 32
};

// Where things of a packed weight are, in bytes.
struct Layout {
  Layout() = default;
  Layout(const Format& format, long n, long k)
      : format(format), n(n), k(k), blocks((n + kColumns - 1) / kColumns), units((k + kUnit - 1) / kUnit) {
    group_pairs = format.group / 2;
    groups = format.group ? (units * kUnit + format.group - 1) / format.group : 1;
    static const long kScaleBytes[] = {0, 4, 4 * kColumns, 2 * kColumns, 2 * kColumns, kColumns, kColumns};
    scale_bytes = kScaleBytes[format.scale];
    scales = format.scale == kColumnE4m3 ? 4 * kColumns : 0;  // after a float32 factor of each column
    zeros = scales + groups * scale_bytes;
    poison = zeros + (format.zeros ? groups * kColumns : 0);
    header = poison + (format.code == kFp8 ? 4 * kColumns : 0);
    header = (header + 63) / 64 * 64;
    const long bits = format.code <= kF16 ? 16 : format.code <= kInt8 ? 8 : 4;
    unit_bytes = kUnitElements * bits / 8;
    block_bytes = header + units * unit_bytes;
  }
  Format format{};
  long n = 0, k = 0, blocks = 0, units = 0;
  long groups = 0, group_pairs = 0;  // of a block; pairs of inputs of a group, 0 for all
  long scale_bytes = 0, scales = 0, zeros = 0, poison = 0, header = 0, unit_bytes = 0, block_bytes = 0;
  long bytes() const { return blocks * block_bytes; }
};

// A block that a thread reads, and the one that it likely reads next.
struct CodedStream {
  const uint8_t *block, *next;
};

// Inputs of rows that are multiplied at once: of all units as `pack_rows` lays them, and their sums, [unit][row].
struct CodedInputs {
  const void* x;
  const float* sums;
};

// What an activation does with the sums of w13: h = act(gate) * (up + offset), or act(gate) without a gate.
struct Activation {
  long kind, gated;
  float alpha;   // of swish: g * sigmoid(alpha * g)
  float limit;   // gates are at most, ups at most this far from 0; infinity for none
  float offset;
};

using MultiplyCoded = void (*)(float* c, int rows, const CodedStream* streams, int count, const CodedInputs& inputs,
                               const Layout& layout, long first, long end, long distance);

struct CodedKernel {
  const char* name;
  int max_rows;  // that `multiply` takes at once
  int x_bytes;   // of one packed input
  bool full;     // whether groups of rows are cheapest full, not equal
  // Packs rows as `Kernel` does, from any element; and the sums of each unit if `sums` is not null.
  void (*pack_rows)(void* out, float* sums, const void* x, long element, long ldx, int rows, long k, long first,
                    long end);
  // c[count][rows][32] += x * w over the units [first, end) of `count` blocks, 1, 2 or 4. Null: not this code.
  MultiplyCoded multiply[kCodes];
  // bf16 of a unit as linear layers pack it: pairs [first, end), zeros for others.
  void (*widen[kCodes])(uint16_t* out, const uint8_t* w, const uint8_t* ahead, long first, long end);
};

// What is done with float32 sums, for one instruction set.
struct RowsKernel {
  // c[rows][32] += scale * (part - zero * sums): the scales of a group of a block.
  void (*add_scaled)(float* c, const float* part, int rows, const uint8_t* block, const Layout& layout, long group,
                     const float* sums);
  // y[rows][columns] (row stride ldy) = c[rows][ldc] + bias, rounded to nearest even; bias has y's elements, or is null.
  void (*store)(void* y, long element, long ldy, const float* c, long ldc, int rows, long columns, const void* bias);
  // h[rows][n] of sums [rows][ld] with gates and ups as blocks of 32 in turn, bias alike or null; n is a multiple of 32.
  void (*activate)(void* h, long element, long ldh, const float* sums, long ld, int rows, long n,
                   const float* bias, const Activation& activation);
  // y[n] = sum over i of weights[i] * (parts[i] + biases[i]); biases may be null.
  void (*weighted_sum)(void* y, long element, const float* const* parts, const float* const* biases, const float* weights,
                       long count, long n);
};

extern const CodedKernel kCodedAvx512Bf16, kCodedAvx512, kCodedAvx2;
extern const RowsKernel kRowsAvx512, kRowsAvx2;

}  // namespace heteroinfer
