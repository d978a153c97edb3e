// Types and conversions of numbers, for kernels.cu and unpack.cu. NVRTC gets this file from cuda_exchange.py.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

// float32 of a float16, exact.
__device__ float from_half(u16 v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  return f;
}
// float16 of a float32, rounded to nearest even.
__device__ u16 to_half(float f) {
  u16 v;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f));
  return v;
}
// bfloat16 of a float32, rounded to nearest even. A NaN stays a NaN, which the rounding could turn into infinity.
__device__ u16 to_bfloat16(float f) {
  const u32 bits = __float_as_uint(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)(bits >> 16 | 0x40);
  return (u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// Two 16-bit elements in a word, rounded to nearest even.
__device__ u32 narrow(float low, float high, u32 dtype) {
  return dtype == 1 ? (u32)to_bfloat16(low) | (u32)to_bfloat16(high) << 16
                    : (u32)to_half(low) | (u32)to_half(high) << 16;
}
