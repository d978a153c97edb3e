// A CUDA kernel that unpacks weights of experts to plain matrices, for long batches of which a GPU computes some experts.
//
// kernels/source/coded.h describes the packed weights (linear.h describes weights without headers): blocks of 32
// columns, each with a header and units of 32 inputs. NVRTC compiles this file when a rank starts, so it includes no other headers.

#include "conversions.cuh"

struct Params {
  const u8* packed;     // [experts], each `expert_bytes`
  const float* blocks;  // scales of 128 x 128 weights, [experts][column blocks][input blocks]; null if headers have the scales
  char* out;            // [experts][columns][inputs] of the element type
  const u32* places;    // [32 columns][32 inputs]: number of the half byte of a unit at which the code begins
  u64 expert_bytes, block_bytes, blocks_stride;  // blocks_stride: scales of an expert
  u64 expert_stride, row_stride;                 // of `out`, in elements
  u32 units, header, unit_bytes;                 // of a packed weight
  u32 scales, scale_bytes, zeros, group;         // of a header; group: inputs of a scale, 0 for all
  u32 code, scale, has_zeros;                    // as in coded.h
  u32 gate_rows;  // w13: rows of `out` between a gate and its up. 0: blocks of gates and ups do not alternate
  u32 block_rows, block_columns;  // of `blocks`: rows of a half, and numbers in a row
  u32 dtype;      // 0 float32, 1 bfloat16, 2 float16
};

enum { kBf16, kF16, kFp8, kInt8, kInt4, kFp4 };
enum { kNoScale, kBlockF32, kColumnF32, kColumnBf16, kColumnF16, kColumnE8m0, kColumnE4m3 };
constexpr u32 kColumns = 32, kUnit = 32, kUnits = 4, kThreads = 256;  // kUnits: units that one thread block writes

// float32 of an e4m3fn number, exact. The codes 127 and 255 are NaN.
__device__ float from_fp8(u32 v) {
  const u32 exponent = v >> 3 & 15, mantissa = v & 7;
  float f = exponent ? __uint_as_float((exponent + 120) << 23 | mantissa << 20) : mantissa * 0.001953125f;
  if ((v & 127) == 127) f = __uint_as_float(0x7fc00000u);
  return v & 128 ? -f : f;
}
// float32 of an e2m1 number, exact.
__device__ float from_fp4(u32 v) {
  const u32 exponent = v >> 1 & 3, mantissa = v & 1;
  const float f = exponent ? __uint_as_float((exponent + 126) << 23 | mantissa << 22) : mantissa * 0.5f;
  return v & 8 ? -f : f;
}

// The number whose code is at `place` of a unit, without its scale.
__device__ float decode(const u8* unit, u32 place, u32 code) {
  const u8* at = unit + place / 2;
  switch (code) {
    case kBf16: return __uint_as_float((u32)*(const u16*)at << 16);
    case kF16: return from_half(*(const u16*)at);
    case kFp8: return from_fp8(*at);
    case kInt8: return (float)(signed char)*at;
    // Shifts the half byte to the top of an int and back, which extends its sign.
    case kInt4: return (float)((int)(*at >> place % 2 * 4 << 28) >> 28);
    default: return from_fp4(*at >> place % 2 * 4 & 15);
  }
}

// The scale of a column's group of inputs in a header.
__device__ float scale_of(const Params& p, const u8* header, u32 group, u32 column) {
  const u8* at = header + p.scales + group * p.scale_bytes;
  switch (p.scale) {
    case kNoScale: return 1.f;
    case kBlockF32: return *(const float*)at;
    case kColumnF32: return ((const float*)at)[column];
    case kColumnBf16: return __uint_as_float((u32)((const u16*)at)[column] << 16);
    case kColumnF16: return from_half(((const u16*)at)[column]);
    // The code 0 is 2^-127, which a float32 has only as a denormal number.
    case kColumnE8m0: return at[column] ? __uint_as_float((u32)at[column] << 23) : 5.877471754e-39f;
    default: return from_fp8(at[column]) * ((const float*)header)[column];
  }
}

// Writes kUnits units of a block: blockIdx.x is the group of units, .y the block, .z the expert. Each thread writes 16
// inputs of a column.
extern "C" __global__ void __launch_bounds__(kThreads) ff_unpack(const Params p) {
  __shared__ uint4 copied[kUnits * kColumns * kUnit * 2 / 16];
  const u32 first = blockIdx.x * kUnits, block = blockIdx.y;
  const u64 expert = blockIdx.z;
  const u8* header = p.packed + expert * p.expert_bytes + block * p.block_bytes;
  const u32 count = min(kUnits, p.units - first);
  const uint4* from = (const uint4*)(header + p.header + (u64)first * p.unit_bytes);
  for (u32 i = threadIdx.x; i < count * p.unit_bytes / 16; i += kThreads) copied[i] = from[i];
  __syncthreads();
  const u32 column = threadIdx.x / 8, unit = threadIdx.x % 8 / 2, half = threadIdx.x % 2 * 16;
  if (unit >= count) return;
  // which: 0 for gates (and for w2), 1 for ups. In a packed w13, blocks of gates and ups alternate.
  const u32 which = p.gate_rows ? block % 2 : 0, column_block = p.gate_rows ? block / 2 : block;
  const u64 row = (u64)which * p.gate_rows + column_block * kColumns + column, input = (u64)(first + unit) * kUnit + half;
  const u8* codes = (const u8*)copied + unit * p.unit_bytes;
  const u32* places = p.places + column * kUnit + half;
  float values[16];
#pragma unroll
  for (u32 i = 0; i < 16; i++) values[i] = decode(codes, places[i], p.code);
  if (p.blocks) {
    const u64 at = expert * p.blocks_stride + (which * p.block_rows + column_block / 4) * (u64)p.block_columns;
    const float scale = p.blocks[at + input / 128];
    for (u32 i = 0; i < 16; i++) values[i] *= scale;
  } else if (p.scale) {
    // Groups have 16 inputs or a multiple, so one scale holds for all inputs of this thread.
    const u32 group = p.group ? (u32)input / p.group : 0;
    const float scale = scale_of(p, header, group, column);
    const float zero = p.has_zeros ? (float)((const signed char*)header)[p.zeros + group * kColumns + column] : 0.f;
    for (u32 i = 0; i < 16; i++) values[i] = (values[i] - zero) * scale;
  }
  const u64 to = expert * p.expert_stride + row * p.row_stride + input;
  if (p.dtype == 0) {
    for (u32 i = 0; i < 16; i++) ((float*)p.out)[to + i] = values[i];
    return;
  }
  u32 words[8];
  for (u32 i = 0; i < 8; i++) words[i] = narrow(values[2 * i], values[2 * i + 1], p.dtype);
  uint4* out = (uint4*)((u16*)p.out + to);
  out[0] = make_uint4(words[0], words[1], words[2], words[3]);
  out[1] = make_uint4(words[4], words[5], words[6], words[7]);
}
