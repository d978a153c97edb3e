// Coded weights with AVX2, FMA and F16C: decodes to float32, for inputs of any element type.
#include <immintrin.h>

#include "coded.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")

namespace heteroinfer {
namespace {

#define INLINE static inline __attribute__((always_inline))

// 16 lanes of 32 bits in two registers.
struct Lanes {
  struct F {
    __m256 a, b;
  };
  struct I {
    __m256i a, b;
  };
  static constexpr float kInt4Gain = 0x1p-28f;
  template <class T>
  INLINE T read(const void* from) {
    T value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
  }
  INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  INLINE F set1(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  INLINE F load(const void* from) { return {read<__m256>(from), read<__m256>(static_cast<const char*>(from) + 32)}; }
  INLINE I bits(const void* from) { return {read<__m256i>(from), read<__m256i>(static_cast<const char*>(from) + 32)}; }
  INLINE void store(float* to, F value) {
    _mm256_storeu_ps(to, value.a);
    _mm256_storeu_ps(to + 8, value.b);
  }
  INLINE F fma(F a, F b, F sum) { return {_mm256_fmadd_ps(a.a, b.a, sum.a), _mm256_fmadd_ps(a.b, b.b, sum.b)}; }
  INLINE F mul(F a, F b) { return {_mm256_mul_ps(a.a, b.a), _mm256_mul_ps(a.b, b.b)}; }
  INLINE F add(F a, F b) { return {_mm256_add_ps(a.a, b.a), _mm256_add_ps(a.b, b.b)}; }
  INLINE F as_float(I a) { return {_mm256_castsi256_ps(a.a), _mm256_castsi256_ps(a.b)}; }
  INLINE F convert(I a) { return {_mm256_cvtepi32_ps(a.a), _mm256_cvtepi32_ps(a.b)}; }
  template <int N>
  INLINE I shl(I a) {
    return N ? I{_mm256_slli_epi32(a.a, N), _mm256_slli_epi32(a.b, N)} : a;
  }
  template <int N>
  INLINE I shr(I a) {
    return {_mm256_srli_epi32(a.a, N), _mm256_srli_epi32(a.b, N)};
  }
  INLINE I both(I a, uint32_t b) {
    const __m256i mask = _mm256_set1_epi32(static_cast<int>(b));
    return {_mm256_and_si256(a.a, mask), _mm256_and_si256(a.b, mask)};
  }
  INLINE I either(I a, I b) { return {_mm256_or_si256(a.a, b.a), _mm256_or_si256(a.b, b.b)}; }
  INLINE F of_halves(__m256i a) {
    return {_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
  }
  INLINE F lower_halves(I a) { return of_halves(a.a); }
  INLINE F upper_halves(I a) { return of_halves(a.b); }
  INLINE F from_f16(const void* from) { return of_halves(read<__m256i>(from)); }
  INLINE F from_bf16(const void* from) {
    const __m256i halves = read<__m256i>(from);
    return as_float(shl<16>({_mm256_cvtepu16_epi32(_mm256_castsi256_si128(halves)),
                             _mm256_cvtepu16_epi32(_mm256_extracti128_si256(halves, 1))}));
  }
  INLINE F from_int8(const void* from) {
    const __m128i bytes = read<__m128i>(from);
    return convert({_mm256_cvtepi8_epi32(bytes), _mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8))});
  }
  INLINE I from_bytes(const void* from) {
    const __m128i bytes = read<__m128i>(from);
    return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
  }
  INLINE __m256i e8m0(__m256i code) {
    const __m256i none = _mm256_cmpeq_epi32(code, _mm256_setzero_si256());
    const __m256i nan = _mm256_cmpeq_epi32(code, _mm256_set1_epi32(255));
    __m256i made = _mm256_blendv_epi8(_mm256_slli_epi32(code, 23), _mm256_set1_epi32(0x00400000), none);
    return _mm256_blendv_epi8(made, _mm256_set1_epi32(0x7fc00000), nan);
  }
  INLINE F from_e8m0(const void* from) {
    const I code = from_bytes(from);
    return as_float({e8m0(code.a), e8m0(code.b)});
  }
  INLINE __m256i e4m3(__m256i code) {
    const __m256i size = _mm256_and_si256(code, _mm256_set1_epi32(127));
    const __m256i small = _mm256_castps_si256(_mm256_mul_ps(_mm256_cvtepi32_ps(size), _mm256_set1_ps(0x1p-9f)));
    __m256i made = _mm256_add_epi32(_mm256_slli_epi32(size, 20), _mm256_set1_epi32(120 << 23));
    made = _mm256_blendv_epi8(made, small, _mm256_cmpgt_epi32(_mm256_set1_epi32(8), size));
    made = _mm256_blendv_epi8(made, _mm256_set1_epi32(0x7fc00000), _mm256_cmpeq_epi32(size, _mm256_set1_epi32(127)));
    return _mm256_or_si256(made, _mm256_slli_epi32(_mm256_and_si256(code, _mm256_set1_epi32(128)), 24));
  }
  INLINE F from_e4m3(const void* from) {
    const I code = from_bytes(from);
    return as_float({e4m3(code.a), e4m3(code.b)});
  }
  // Interleaves the lower or upper halves of each 16-byte lane of a and b.
  INLINE F interleave_low(F a, F b) { return {_mm256_unpacklo_ps(a.a, b.a), _mm256_unpacklo_ps(a.b, b.b)}; }
  INLINE F interleave_high(F a, F b) { return {_mm256_unpackhi_ps(a.a, b.a), _mm256_unpackhi_ps(a.b, b.b)}; }
  // Lanes 0 and 2 of a, then of b; or lanes 1 and 3.
  INLINE F even_lanes(F a, F b) {
    return {_mm256_permute2f128_ps(a.a, a.b, 0x20), _mm256_permute2f128_ps(b.a, b.b, 0x20)};
  }
  INLINE F odd_lanes(F a, F b) {
    return {_mm256_permute2f128_ps(a.a, a.b, 0x31), _mm256_permute2f128_ps(b.a, b.b, 0x31)};
  }
  template <int N>
  INLINE F int4(I a) {
    return convert(both(shl<28 - 4 * N>(a), 0xf0000000u));
  }
  template <int N>
  INLINE F fp4(I a) {
    const __m256 sizes = _mm256_setr_ps(0, .5f, 1, 1.5f, 2, 3, 4, 6);
    const I index = shr<4 * N>(a);
    const F sign = as_float(both(shl<28 - 4 * N>(a), 0x80000000u));
    return {_mm256_xor_ps(_mm256_permutevar8x32_ps(sizes, index.a), sign.a),
            _mm256_xor_ps(_mm256_permutevar8x32_ps(sizes, index.b), sign.b)};
  }
};

#include "element_rows.h"
#include "coded_float.h"
#include "coded_rows.h"

constexpr int kRows = 3;

}  // namespace

const CodedKernel kCodedAvx2 = {
    "avx2", kRows, 4, false, pack_float_rows,
    {multiply_coded<FloatDot, FloatBf16, kRows>, multiply_coded<FloatDot, FloatF16, kRows>,
     multiply_coded<FloatDot, FloatFp8, kRows>, multiply_coded<FloatDot, FloatInt8, kRows>,
     multiply_coded<FloatDot, FloatInt4, kRows>, multiply_coded<FloatDot, FloatFp4, kRows>},
    {}};
const RowsKernel kRowsAvx2 = {add_scaled_rows, store_elements, activate_elements, weighted_elements};

}  // namespace heteroinfer

#pragma GCC pop_options
