// AVX512-BF16: one instruction multiplies 16 x 2 pairs and adds them to 16 float32 sums. Two look-ups of AVX512-VBMI
// widen FP8 weights to bf16, one for each byte.
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
  static inline __attribute__((always_inline)) Weights load(const uint16_t* w) { return of(_mm512_loadu_si512(w)); }
  static inline __attribute__((always_inline)) Weights of(__m512i words) { return (__m512bh)words; }
  static inline __attribute__((always_inline)) __m512 add(__m512 sum, Weights w, Input in) {
    return _mm512_dpbf16_ps(sum, w, (__m512bh)_mm512_set1_epi32(in));
  }
};

}  // namespace

const Kernel kAvx512Bf16 = {"avx512_bf16", 12, 2, 4, 1, false, pack_rows<Dot>, multiply<Dot>, do_nothing, do_nothing,
                            &kFp8Avx512Bf16};

}  // namespace heteroinfer

#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi")

namespace heteroinfer {
namespace {

#include "fp8_rows.h"

// The 128 FP8 numbers without sign as bf16, in two tables of bytes: one for the lower bytes, one for the upper.
struct Table {
  constexpr Table() : low(), high() {
    for (unsigned code = 0; code < 128; code++) {
      low[code] = static_cast<uint8_t>(widen_fp8(code) & 255);
      high[code] = static_cast<uint8_t>(widen_fp8(code) >> 8);
    }
  }
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};
constexpr Table kTable;

struct Widen {
  Widen()  // has a body: a defaulted constructor would be compiled for any CPU
      : low0(_mm512_loadu_si512(kTable.low)),
        low1(_mm512_loadu_si512(kTable.low + 64)),
        high0(_mm512_loadu_si512(kTable.high)),
        high1(_mm512_loadu_si512(kTable.high + 64)),
        sign(_mm512_set1_epi32(static_cast<int>(0x80808080u))) {}
  inline __attribute__((always_inline)) void pair(const uint8_t* w, __m512i& first, __m512i& second) const {
    const __m512i raw = _mm512_loadu_si512(w);
    const __m512i low = _mm512_permutex2var_epi8(low0, raw, low1);
    const __m512i high =
        _mm512_or_si512(_mm512_permutex2var_epi8(high0, raw, high1), _mm512_and_si512(raw, sign));
    first = _mm512_unpacklo_epi8(low, high);
    second = _mm512_unpackhi_epi8(low, high);
  }
  const __m512i low0, low1, high0, high1, sign;
};

}  // namespace

const Fp8 kFp8Avx512Bf16 = {kFp8Rows, multiply_fp8<Dot, Widen>, widen_unit<Widen>};
const Fp8 kFp8Amx = {0, nullptr, widen_unit<Widen>};

}  // namespace heteroinfer

#pragma GCC pop_options
