// AVX512-BF16: one instruction multiplies 16 x 2 pairs and adds them to 16 float32 sums.
#include <immintrin.h>

#include "linear.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512bf16")

namespace heteroinfer {
namespace {

#include "vector_rows.h"

struct Dot {
  using Input = int32_t;  // two bf16
  using Weights = __m512bh;
  static Input input(uint16_t even, uint16_t odd) {
    return static_cast<Input>(static_cast<uint32_t>(odd) << 16 | even);
  }
  static inline __attribute__((always_inline)) Weights load(const uint16_t* w) {
    return (__m512bh)_mm512_loadu_si512(w);
  }
  static inline __attribute__((always_inline)) __m512 add(__m512 sum, Weights w, Input in) {
    return _mm512_dpbf16_ps(sum, w, (__m512bh)_mm512_set1_epi32(in));
  }
};

}  // namespace

const Kernel kAvx512Bf16 = {"avx512_bf16", 12, 2, 4, 1, false, pack_rows<Dot>, multiply<Dot>, nothing, nothing};

}  // namespace heteroinfer

#pragma GCC pop_options
