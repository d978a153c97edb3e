// AVX-512F, AVX512-BF16, -VBMI and AMX in plain C++, after Intel's manual (SDM vol. 2: LDTILECFG, TILELOADD,
// TDPBF16PS, VDPBF16PS, VPERMI2B, VPUNPCKLBW, VPUNPCKHBW), so that the code that uses them runs on any x86-64. What the manual makes a
// fault is one here: the process aborts. Given to the compiler by -include, before each source, whose
// `target` pragmas are taken out. With EMULATED_CPU=0 the CPU has none of them.
#pragma once
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated {

using Floats = __m512;
using Ints = __m512i;
typedef int32_t Int32s __attribute__((vector_size(64)));
typedef uint32_t Uint32s __attribute__((vector_size(64)));

// What a bit pattern is as another type of the same size.
template <class To, class From>
inline To as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// AVX-512F: what the sources use of it.
inline Floats zeros() { return Floats{}; }
inline Floats spread(float value) { return Floats{} + value; }
inline Ints spread_int(int value) { return as<Ints>(Int32s{} + value); }
inline Floats load_floats(const void* memory) {
  Floats loaded;
  std::memcpy(&loaded, memory, sizeof loaded);
  return loaded;
}
inline Ints load_ints(const void* memory) { return as<Ints>(load_floats(memory)); }
inline void store_floats(void* memory, Floats value) { std::memcpy(memory, &value, sizeof value); }
inline Floats add(Floats a, Floats b) { return a + b; }
inline Ints add_ints(Ints a, Ints b) { return as<Ints>(as<Uint32s>(a) + as<Uint32s>(b)); }
inline Ints both(Ints a, Ints b) { return as<Ints>(as<Uint32s>(a) & as<Uint32s>(b)); }
inline Ints either(Ints a, Ints b) { return as<Ints>(as<Uint32s>(a) | as<Uint32s>(b)); }
inline Ints shift_left(Ints a, int bits) { return as<Ints>(as<Uint32s>(a) << bits); }
inline Ints shift_right(Ints a, int bits) { return as<Ints>(as<Uint32s>(a) >> bits); }
// Not inline: the sources unroll hundreds of these, and compilation would take minutes.
__attribute__((noinline)) static Floats multiply_add(Floats a, Floats b, Floats sum) {
  for (int i = 0; i < 16; i++) sum[i] = __builtin_fmaf(a[i], b[i], sum[i]);
  return sum;
}
inline Ints widen_halves(__m256i halves) {
  uint16_t half[16];
  std::memcpy(half, &halves, sizeof half);
  Uint32s wide;
  for (int i = 0; i < 16; i++) wide[i] = half[i];
  return as<Ints>(wide);
}
inline __mmask16 not_numbers(Floats a) {
  __mmask16 mask = 0;
  for (int i = 0; i < 16; i++) mask = static_cast<__mmask16>(mask | (a[i] != a[i]) << i);
  return mask;
}
inline Ints choose(Ints otherwise, __mmask16 mask, Ints chosen) {
  Int32s value = as<Int32s>(otherwise), other = as<Int32s>(chosen);
  for (int i = 0; i < 16; i++) value[i] = mask >> i & 1 ? other[i] : value[i];
  return as<Ints>(value);
}
inline void store_halves(void* memory, __mmask16 mask, Ints value) {
  const Int32s words = as<Int32s>(value);
  for (int i = 0; i < 16; i++) {
    const auto half = static_cast<uint16_t>(words[i]);
    if (mask >> i & 1) std::memcpy(static_cast<char*>(memory) + 2 * i, &half, 2);
  }
}

inline void store_ints(void* memory, Ints value) { std::memcpy(memory, &value, sizeof value); }

// AVX512-BW and -VBMI.
struct Bytes {
  uint8_t at[64];
};
inline Ints look_up(Ints low, Ints index, Ints high) {
  const Bytes tables[2] = {as<Bytes>(low), as<Bytes>(high)}, which = as<Bytes>(index);
  Bytes found;
  for (int i = 0; i < 64; i++) found.at[i] = tables[which.at[i] >> 6 & 1].at[which.at[i] & 63];
  return as<Ints>(found);
}
inline Ints interleave(Ints even, Ints odd, int half) {
  const Bytes a = as<Bytes>(even), b = as<Bytes>(odd);
  Bytes mixed;
  for (int i = 0; i < 64; i++) mixed.at[i] = (i % 2 ? b : a).at[i / 16 * 16 + half * 8 + i % 16 / 2];
  return as<Ints>(mixed);
}

inline Ints sizes_of_bytes(Ints a) {
  Bytes value = as<Bytes>(a);
  for (uint8_t& byte : value.at) byte = byte & 128 ? static_cast<uint8_t>(-byte) : byte;
  return as<Ints>(value);
}
inline uint64_t equal_bytes(Ints a, Ints b) {
  const Bytes left = as<Bytes>(a), right = as<Bytes>(b);
  uint64_t mask = 0;
  for (int i = 0; i < 64; i++) mask |= uint64_t{left.at[i] == right.at[i]} << i;
  return mask;
}
inline Ints choose_bytes(Ints otherwise, uint64_t mask, Ints chosen) {
  Bytes value = as<Bytes>(otherwise), other = as<Bytes>(chosen);
  for (int i = 0; i < 64; i++) value.at[i] = mask >> i & 1 ? other.at[i] : value.at[i];
  return as<Ints>(value);
}
struct Halves {
  __m256i at[2];
};
inline __m256i half_of(Ints a, int half) { return as<Halves>(a).at[half]; }
inline Floats widen_f16(__m256i halves) {
  struct {
    __m256 at[2];
  } wide = {{_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1))}};
  return as<Floats>(wide);
}

// AVX512-BF16 and AMX take denormal inputs for zeros and make zeros of denormal results, whatever MXCSR says.
inline float flushed(float value) { return __builtin_fabsf(value) < 0x1p-126f ? __builtin_copysignf(0.0f, value) : value; }
inline float step(float sum, float a, float b) {
  return flushed(__builtin_fmaf(flushed(a), flushed(b), flushed(sum)));
}
inline float widen(uint16_t bf16) { return as<float>(static_cast<uint32_t>(bf16) << 16); }
__attribute__((noinline)) static Floats dot(Floats sum, __m512bh a, __m512bh b) {
  uint16_t x[32], y[32];
  std::memcpy(x, &a, sizeof x);
  std::memcpy(y, &b, sizeof y);
  for (int i = 0; i < 16; i++)
    for (int odd = 1; odd >= 0; odd--) sum[i] = step(sum[i], widen(x[2 * i + odd]), widen(y[2 * i + odd]));
  return sum;
}

struct Tile {
  int rows = 0, bytes = 0;
  uint8_t data[16][64];
};
struct Tiles {
  Tile tile[8];
  bool configured = false;
};
inline Tiles& tiles() {
  static thread_local Tiles state;
  return state;
}
inline Tile& usable(int index) {
  Tile& tile = tiles().tile[index];
  if (!tiles().configured || !tile.rows) abort();
  return tile;
}
inline void load_config(const void* memory) {
  const auto* bytes = static_cast<const uint8_t*>(memory);
  if (bytes[0] != 1 || bytes[1] != 0) abort();
  for (int i = 0; i < 8; i++) {
    uint16_t row_bytes;
    std::memcpy(&row_bytes, bytes + 16 + 2 * i, 2);
    const int rows = bytes[48 + i];
    if (rows > 16 || row_bytes > 64 || (rows == 0) != (row_bytes == 0)) abort();
    tiles().tile[i] = Tile{rows, row_bytes, {}};
  }
  tiles().configured = true;
}
inline void load_tile(int index, const void* memory, long stride) {
  Tile& tile = usable(index);
  for (int r = 0; r < tile.rows; r++)
    std::memcpy(tile.data[r], static_cast<const char*>(memory) + r * stride, static_cast<size_t>(tile.bytes));
}
inline void store_tile(int index, void* memory, long stride) {
  Tile& tile = usable(index);
  for (int r = 0; r < tile.rows; r++)
    std::memcpy(static_cast<char*>(memory) + r * stride, tile.data[r], static_cast<size_t>(tile.bytes));
}
inline float half_at(const uint8_t* data) {
  uint16_t half;
  std::memcpy(&half, data, 2);
  return widen(half);
}
inline void multiply_tiles(int c, int a, int b) {
  Tile &sums = usable(c), &left = usable(a), &right = usable(b);
  if (sums.rows != left.rows || left.bytes / 4 != right.rows || sums.bytes != right.bytes) abort();
  // Two sums of every second k, which are added to the tile at the end.
  for (int m = 0; m < sums.rows; m++)
    for (int n = 0; n < sums.bytes / 4; n++) {
      float half[2] = {0, 0};
      for (int k = 0; k < left.bytes / 4; k++)
        for (int i = 0; i < 2; i++)
          half[i] = step(half[i], half_at(left.data[m] + 4 * k + 2 * i), half_at(right.data[k] + 4 * n + 2 * i));
      float sum;
      std::memcpy(&sum, sums.data[m] + 4 * n, 4);
      sum = flushed(flushed(sum) + flushed(half[0] + half[1]));
      std::memcpy(sums.data[m] + 4 * n, &sum, 4);
    }
}

}  // namespace emulated

#ifndef EMULATED_CPU
#define EMULATED_CPU 1
#endif
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef __get_cpuid_count
#define _mm512_setzero_ps() emulated::zeros()
#define _mm512_set1_ps(value) emulated::spread(value)
#define _mm512_set1_epi32(value) emulated::spread_int(value)
#define _mm512_loadu_ps(memory) emulated::load_floats(memory)
#define _mm512_loadu_si512(memory) emulated::load_ints(memory)
#define _mm512_storeu_ps(memory, value) emulated::store_floats(memory, value)
#define _mm512_add_ps(a, b) emulated::add(a, b)
#define _mm512_add_epi32(a, b) emulated::add_ints(a, b)
#define _mm512_and_si512(a, b) emulated::both(a, b)
#define _mm512_or_si512(a, b) emulated::either(a, b)
#define _mm512_storeu_si512(memory, value) emulated::store_ints(memory, value)
#define _mm512_permutex2var_epi8(low, index, high) emulated::look_up(low, index, high)
#undef _mm512_extracti64x4_epi64
#undef _mm512_cmpeq_epi8_mask
#define _mm512_abs_epi8(a) emulated::sizes_of_bytes(a)
#define _mm512_cmpeq_epi8_mask(a, b) emulated::equal_bytes(a, b)
#define _mm512_mask_mov_epi8(otherwise, mask, chosen) emulated::choose_bytes(otherwise, mask, chosen)
#define _mm512_castsi512_si256(a) emulated::half_of(a, 0)
#define _mm512_extracti64x4_epi64(a, half) emulated::half_of(a, half)
#define _mm512_cvtph_ps(halves) emulated::widen_f16(halves)
#define _mm512_unpacklo_epi8(a, b) emulated::interleave(a, b, 0)
#define _mm512_unpackhi_epi8(a, b) emulated::interleave(a, b, 1)
#undef _mm512_slli_epi32
#undef _mm512_srli_epi32
#undef _mm512_cmp_ps_mask
#define _mm512_slli_epi32(a, bits) emulated::shift_left(a, bits)
#define _mm512_srli_epi32(a, bits) emulated::shift_right(a, bits)
#define _mm512_fmadd_ps(a, b, sum) emulated::multiply_add(a, b, sum)
#define _mm512_castps_si512(a) emulated::as<__m512i>(a)
#define _mm512_castsi512_ps(a) emulated::as<__m512>(a)
#define _mm512_cvtepu16_epi32(halves) emulated::widen_halves(halves)
#define _mm256_load_si256(memory) emulated::as<__m256i>(*(memory))
#define _mm512_cmp_ps_mask(a, b, predicate) emulated::not_numbers(a)
#define _mm512_mask_mov_epi32(otherwise, mask, chosen) emulated::choose(otherwise, mask, chosen)
#define _mm512_mask_cvtepi32_storeu_epi16(memory, mask, value) emulated::store_halves(memory, mask, value)
#define _mm512_dpbf16_ps(sum, a, b) emulated::dot(sum, a, b)
#define _tile_loadconfig(memory) emulated::load_config(memory)
#define _tile_release() (emulated::tiles().configured = false)
#define _tile_loadd(tile, memory, stride) emulated::load_tile(tile, memory, stride)
#define _tile_stored(tile, memory, stride) emulated::store_tile(tile, memory, stride)
#define _tile_dpbf16ps(c, a, b) emulated::multiply_tiles(c, a, b)
// The CPU has them all or none, and the kernel grants the tiles.
#define __get_cpuid_count(leaf, subleaf, a, b, c, d) (*(a) = *(b) = *(c) = 0, *(d) = ~0u, 1)
#define __builtin_cpu_supports(feature) EMULATED_CPU
#define syscall(...) 0L
