// CUDA kernels that let a GPU's stream use feed-forward ranks: two kernels per layer, captured into CUDA graphs.
//
// `ff_ask` writes rows into the slab, host memory that is mapped into the device, and raises the ask's number. `ff_get`
// polls until every lane has answered, and sums the answers. The number counts up in device memory, so that a CUDA graph
// can be replayed. slab.py has the layout of the slab, kernels/source/feed_forward.cpp the host's part.
// NVRTC compiles this file when a rank starts, so it includes no other headers.

#include "conversions.cuh"

struct alignas(8) State {  // device memory
  u64 number;              // number of the last ask
  u64 arrived;             // last number that all lanes have answered: all blocks of `ff_get` but the first wait for it
  u32 done;                // blocks of `ff_ask` that have written their rows
  u32 live;                // number of rows of the last ask that are not padding
  u32 bad;                 // 1 if the last ask failed
};

struct Params {
  char* slab;  // mapped host memory, as an address of the device
  State* state;
  const uint4* x;       // [rows, hidden]
  const u32* ids;       // [rows, topk] int32; null for an MLP
  const u32* weights;   // [rows, topk] float32
  uint4* out;           // [rows, hidden]
  const unsigned char* padding;  // [rows], 1 for a padding row; padding rows come last. Null if there are none
  u64 x_offset, ids_offset, weights_offset, y_offset, y_stride;  // in bytes
  u64 limit_ns;         // `ff_get` gives up after this time, once the watch has also made `limit_checks` checks
  u32 rows, row_parts;  // row_parts: 16-byte parts of a row
  u32 topk, layer, lanes, dtype;  // 0 float32, 1 bfloat16, 2 float16
  u32 limit_checks;     // in a frozen pod, the host's watch makes no checks, but the GPU's clock runs on
};

constexpr u64 kAsk = 128, kEnd = 384, kLanes = 512, kLaneBytes = 128;
constexpr u64 kStop = kEnd, kFailed = kEnd + 4, kChecks = kEnd + 8, kGivenUp = kEnd + 12;
constexpr u32 kPollsPerLook = 256;  // polls of an answer between two checks of the clock and of the host's words

// Reads a 64-bit number that a process of the host writes (acquire): what the process wrote before is visible afterwards.
__device__ u64 load_number(const void* p) {
  u64 v;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
// Reads a 32-bit number that a process of the host writes (acquire).
__device__ u32 load_word(const void* p) {
  u32 v;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Writes a 64-bit number that processes of the host read (release): with it they see all that was written before.
__device__ void store_number(void* p, u64 v) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory");
}
// Writes a 32-bit number that processes of the host read (release).
__device__ void store_word(void* p, u32 v) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
// Reads 16 bytes without the caches, because the host wrote this memory.
__device__ uint4 load_part(const uint4* p) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p)
               : "memory");
  return v;
}
// Time of the device's clock.
__device__ u64 clock_ns() {
  u64 t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// float32 of the first of two 16-bit elements in a word. `upper` returns the second.
__device__ float lower(u32 w, u32 dtype) { return dtype == 1 ? __uint_as_float(w << 16) : from_half((u16)(w & 0xffff)); }
__device__ float upper(u32 w, u32 dtype) {
  return dtype == 1 ? __uint_as_float(w & 0xffff0000u) : from_half((u16)(w >> 16));
}
// The sum of the lanes' answers at the i-th 16 bytes: added in float32 in the order of the lanes, and rounded once.
// A word has two 16-bit elements, so there are 8 sums. With float32, a word has one element, and odd sums stay 0.
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

// Writes the rows of an ask into the slab, without padding rows. The last block that has written its rows raises the
// ask's number.
extern "C" __global__ void ff_ask(const Params p) {
  __shared__ u32 live;  // number of rows that are not padding
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

// Returns whether the host's watch has made `limit_checks` checks since `checks_before`. If not, the host may be stopped, so the
// device keeps waiting. Without a watch (the count is 0), only the clock limits the wait.
__device__ bool watch_made_checks(const Params& p, u32 checks_before) {
  const u32 checks = load_word(p.slab + kChecks);
  return !checks || checks - checks_before >= p.limit_checks;
}

// Waits for all lanes. Returns 0 if all have answered, otherwise 1 + the index of a lane that is late or failed.
__device__ u32 wait_for_lanes(const Params& p, u64 number) {
  const u64 start = clock_ns();
  u32 polls = 0, checks = 0;
  for (u32 lane = 0; lane < p.lanes; lane++) {
    const char* at = p.slab + kLanes + lane * kLaneBytes;
    while (load_number(at) != number) {
      if (++polls % kPollsPerLook) continue;
      if (polls == kPollsPerLook) checks = load_word(p.slab + kChecks);
      if (load_word(p.slab + kStop)) return 1 + lane;
      if (clock_ns() - start > p.limit_ns && watch_made_checks(p, checks)) return 1 + lane;
    }
    if (load_word(at + 8)) return 1 + lane;  // a status other than 0: the lane's computation failed
  }
  return 0;
}

// Waits for all lanes, then writes the sum of their answers to `out`, and zeros to padding rows. The first block polls
// the slab, and the other blocks wait for the first block. If a lane is late or failed, `out` has only zeros.
extern "C" __global__ void ff_get(const Params p) {
  __shared__ bool good;
  if (threadIdx.x == 0) {
    const u64 number = p.state->number;
    if (blockIdx.x == 0) {
      const u32 late = wait_for_lanes(p, number);
      good = !late;
      if (late) {
        p.state->bad = 1;
        if (!load_word(p.slab + kFailed)) {  // keep the first lane that failed
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

// Fills x with a pattern that depends on the number of the ask, for measurements and checks.
extern "C" __global__ void ff_fill(u32* x, u64 words, const u64* number) {
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += (u64)gridDim.x * blockDim.x)
    x[i] = (u32)(*number * 2654435761ull + i);
}
// Counts the words of `out` that differ from x, which ff_fill has filled.
extern "C" __global__ void ff_check(const u32* x, const u32* out, u64 words, u64* wrong) {
  u64 count = 0;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < words; i += (u64)gridDim.x * blockDim.x)
    count += x[i] != out[i];
  if (count) atomicAdd(wrong, count);
}
