// Asking feed-forward ranks from a GPU's stream: two kernels a layer, captured into CUDA graphs.
//
// `ask` puts rows into the slab, which the device maps, and raises the ask's number; `get` spins until every
// lane has answered, and sums their answers. The number counts up in device memory, so that a graph can be
// replayed. Layout of the slab: slab.py; the host's side: kernels/source/feed_forward.cpp.
// Compiled by NVRTC when a rank starts: no headers.

typedef unsigned long long u64;
typedef unsigned int u32;
typedef unsigned short u16;

struct alignas(8) State {  // device memory
  u64 number;              // of the last ask
  u64 arrived;             // number whose answers have all come, for the blocks that don't look at the host
  u32 done;                // blocks of `ask` that have put their rows
  u32 live;                // rows of the last ask, padding not counted
  u32 bad;                 // whether the last ask got no answer
};

struct Params {
  char* slab;  // mapped host memory, as the device sees it
  State* state;
  const uint4* x;       // [rows, hidden]
  const u32* ids;       // [rows, topk] int32, or null: an MLP
  const u32* weights;   // [rows, topk] float32
  uint4* out;           // [rows, hidden]
  const unsigned char* padding;  // [rows], 1 for a row that nobody needs; padded rows are the last ones; or null
  u64 x_offset, ids_offset, weights_offset, y_offset, y_stride;  // in bytes
  u64 limit_ns;         // after which `get` gives up,
  u32 rows, row_parts;  // parts of 16 bytes of a row
  u32 topk, layer, lanes, dtype;  // 0 float32, 1 bfloat16, 2 float16
  u32 limit_turns;      // if the host's watch had so many turns meanwhile: a frozen pod has none, the device has
};

constexpr u64 kAsk = 128, kEnd = 384, kLanes = 512, kLaneBytes = 128;
constexpr u64 kStop = kEnd, kFailed = kEnd + 4, kTurns = kEnd + 8, kGivenUp = kEnd + 12;
constexpr u32 kPollsPerLook = 256;

__device__ u64 load_number(const void* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
__device__ u32 load_word(const void* p) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ void store_number(void* p, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
__device__ void store_word(void* p, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ uint4 load_part(const uint4* p) {  // past the caches: the host has written it since
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
__device__ u64 clock_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

__device__ float from_half(u16 v) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(v));
  return f;
}
__device__ u16 to_half(float f) {
  u16 v;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f));
  return v;
}
__device__ u16 to_bfloat16(float f) {
  const u32 bits = __float_as_uint(f);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (u16)(bits >> 16 | 0x40);
  return (u16)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

__device__ float lower(u32 w, u32 dtype) { return dtype == 1 ? __uint_as_float(w << 16) : from_half((u16)(w & 0xffff)); }
__device__ float upper(u32 w, u32 dtype) {
  return dtype == 1 ? __uint_as_float(w & 0xffff0000u) : from_half((u16)(w >> 16));
}
__device__ u32 narrow(float low, float high, u32 dtype) {
  return dtype == 1 ? (u32)to_bfloat16(low) | (u32)to_bfloat16(high) << 16
                    : (u32)to_half(low) | (u32)to_half(high) << 16;
}

__device__ uint4 sum_parts(const char* y, u64 stride, u32 lanes, u64 i, u32 dtype) {
  const uint4 first = load_part((const uint4*)y + i);
  if (lanes == 1) return first;
  float sums[8];
  u32 words[4] = {first.x, first.y, first.z, first.w};
  for (int w = 0; w < 4; w++) {
    sums[2 * w] = dtype == 0 ? __uint_as_float(words[w]) : lower(words[w], dtype);
    sums[2 * w + 1] = dtype == 0 ? 0.f : upper(words[w], dtype);
  }
  for (u32 lane = 1; lane < lanes; lane++) {
    const uint4 part = load_part((const uint4*)(y + lane * stride) + i);
    const u32 more[4] = {part.x, part.y, part.z, part.w};
    for (int w = 0; w < 4; w++) {
      sums[2 * w] += dtype == 0 ? __uint_as_float(more[w]) : lower(more[w], dtype);
      sums[2 * w + 1] += dtype == 0 ? 0.f : upper(more[w], dtype);
    }
  }
  for (int w = 0; w < 4; w++)
    words[w] = dtype == 0 ? __float_as_uint(sums[2 * w]) : narrow(sums[2 * w], sums[2 * w + 1], dtype);
  return make_uint4(words[0], words[1], words[2], words[3]);
}

extern "C" __global__ void ff_ask(const Params p) {
  __shared__ u32 live;
  if (threadIdx.x == 0) live = p.padding ? 0 : p.rows;
  __syncthreads();
  if (p.padding) {
    u32 count = 0;
    for (u32 row = threadIdx.x; row < p.rows; row += blockDim.x) count += !p.padding[row];
    if (count) atomicAdd(&live, count);
    __syncthreads();
  }
  const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
  uint4* x = (uint4*)(p.slab + p.x_offset);
  for (u64 i = first; i < (u64)live * p.row_parts; i += step) x[i] = p.x[i];
  if (p.ids) {
    u32* ids = (u32*)(p.slab + p.ids_offset);
    u32* weights = (u32*)(p.slab + p.weights_offset);
    for (u64 i = first; i < (u64)live * p.topk; i += step) {
      ids[i] = p.ids[i];
      weights[i] = p.weights[i];
    }
  }
  __threadfence_system();
  __syncthreads();
  if (threadIdx.x) return;
  if (atomicAdd(&p.state->done, 1u) != gridDim.x - 1) return;
  p.state->done = 0;
  p.state->live = live;
  p.state->bad = 0;
  volatile u32* ask = (volatile u32*)(p.slab + kAsk);
  ask[2] = p.layer;
  ask[3] = live;
  __threadfence_system();
  store_number(p.slab + kAsk, ++p.state->number);
}

// Returns whether the host has had as many turns as the limit has; without a watch (0) the clock alone decides.
__device__ bool host_had_turns(const Params& p, u32 turns_before) {
  const u32 turns = load_word(p.slab + kTurns);
  return !turns || turns - turns_before >= p.limit_turns;
}

// Waits for every lane; returns 0 if all answered, else 1 + the lane that did not.
__device__ u32 wait_for_lanes(const Params& p, u64 number) {
  const u64 start = clock_ns();
  u32 polls = 0, turns = 0;
  for (u32 lane = 0; lane < p.lanes; lane++) {
    const char* at = p.slab + kLanes + lane * kLaneBytes;
    while (load_number(at) != number) {
      if (++polls % kPollsPerLook) continue;
      if (polls == kPollsPerLook) turns = load_word(p.slab + kTurns);
      if (load_word(p.slab + kStop)) return 1 + lane;
      if (clock_ns() - start > p.limit_ns && host_had_turns(p, turns)) return 1 + lane;
    }
    if (load_word(at + 8)) return 1 + lane;
  }
  return 0;
}

extern "C" __global__ void ff_get(const Params p) {
  __shared__ bool good;
  if (threadIdx.x == 0) {
    const u64 number = p.state->number;
    if (blockIdx.x == 0) {
      const u32 late = wait_for_lanes(p, number);
      good = !late;
      if (late) {
        p.state->bad = 1;
        if (!load_word(p.slab + kFailed)) {  // the first lane given up stays named
          store_word(p.slab + kGivenUp, late);
          store_word(p.slab + kFailed, 1);
        }
      }
      __threadfence();
      asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(&p.state->arrived), "l"(number) : "memory");
    } else {
      u64 arrived;
      do {
        asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(arrived) : "l"(&p.state->arrived) : "memory");
      } while (arrived != number);
      good = !p.state->bad;
    }
  }
  __syncthreads();
  const u64 first = (u64)blockIdx.x * blockDim.x + threadIdx.x, step = (u64)gridDim.x * blockDim.x;
  const u64 live = good ? (u64)p.state->live * p.row_parts : 0, all = (u64)p.rows * p.row_parts;
  const char* y = p.slab + p.y_offset;
  for (u64 i = first; i < all; i += step)
    p.out[i] = i < live ? sum_parts(y, p.y_stride, p.lanes, i, p.dtype) : make_uint4(0, 0, 0, 0);
}

// Fills x with a pattern of the round, for the measurement and the check of many exchanges; see cuda.py.
extern "C" __global__ void ff_fill(u32* x, u64 words, const u64* number) {
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += (u64)gridDim.x * blockDim.x)
    x[i] = (u32)(*number * 2654435761ull + i);
}
// Counts words that are not as ff_fill left them.
extern "C" __global__ void ff_check(const u32* x, const u32* out, u64 words, u64* wrong) {
  u64 count = 0;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += (u64)gridDim.x * blockDim.x)
    count += x[i] != out[i];
  if (count) atomicAdd(wrong, count);
}
