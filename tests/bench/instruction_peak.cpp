// Products in registers alone: the most that an instruction set computes. Each function makes `rounds` rounds of
// independent sums and returns how many multiplications and additions that were.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define KEEP(x) asm volatile("" : "+v"(x))

extern "C" {

__attribute__((target("avx2,fma"))) long peak_avx2(long rounds) {
  __m256 sums[12], a = _mm256_set1_ps(1.0f), b = _mm256_set1_ps(0x1p-30f);
  for (auto& sum : sums) sum = _mm256_setzero_ps();
  for (long i = 0; i < rounds; i++)
#pragma GCC unroll 12
    for (auto& sum : sums) {
      sum = _mm256_fmadd_ps(a, b, sum);
      KEEP(sum);
    }
  return rounds * 12 * 8 * 2;
}

__attribute__((target("avx512f"))) long peak_avx512f(long rounds) {
  __m512 sums[24], a = _mm512_set1_ps(1.0f), b = _mm512_set1_ps(0x1p-30f);
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  for (long i = 0; i < rounds; i++)
#pragma GCC unroll 24
    for (auto& sum : sums) {
      sum = _mm512_fmadd_ps(a, b, sum);
      KEEP(sum);
    }
  return rounds * 24 * 16 * 2;
}

__attribute__((target("avx512f,avx512bf16"))) long peak_avx512_bf16(long rounds) {
  __m512 sums[24];
  const __m512bh a = (__m512bh)_mm512_set1_epi32(0x3f803f80), b = (__m512bh)_mm512_set1_epi32(0x30003000);
  for (auto& sum : sums) sum = _mm512_setzero_ps();
  for (long i = 0; i < rounds; i++)
#pragma GCC unroll 24
    for (auto& sum : sums) {
      sum = _mm512_dpbf16_ps(sum, a, b);
      KEEP(sum);
    }
  return rounds * 24 * 32 * 2;
}

__attribute__((target("amx-tile,amx-bf16"))) long peak_amx_bf16(long rounds) {
  syscall(SYS_arch_prctl, 0x1023, 18);  // asks for the tiles' registers
  alignas(64) struct {
    unsigned char palette = 1, start = 0, zeros[14] = {};
    unsigned short width[16] = {};
    unsigned char rows[16] = {};
  } config;
  for (int i = 0; i < 8; i++) config.width[i] = 64, config.rows[i] = 16;
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (long i = 0; i < rounds; i++) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
  return rounds * 4 * 16 * 16 * 32 * 2;
}
}
