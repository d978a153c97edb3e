// AMX and AVX512-BF16 in plain C++, after Intel's manual (SDM vol. 2: LDTILECFG, TILELOADD, TDPBF16PS,
// VDPBF16PS), so that the code that uses them runs on any CPU with AVX-512F. What the manual makes a
// fault is one here: the process aborts. Given to the compiler by -include, before each source.
#pragma once
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated {

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
inline void load(int index, const void* memory, long stride) {
  Tile& tile = usable(index);
  for (int r = 0; r < tile.rows; r++)
    std::memcpy(tile.data[r], static_cast<const char*>(memory) + r * stride, static_cast<size_t>(tile.bytes));
}
inline void store(int index, void* memory, long stride) {
  Tile& tile = usable(index);
  for (int r = 0; r < tile.rows; r++)
    std::memcpy(static_cast<char*>(memory) + r * stride, tile.data[r], static_cast<size_t>(tile.bytes));
}
inline float widen(const uint8_t* bf16) {
  uint16_t half;
  std::memcpy(&half, bf16, 2);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline void multiply(int c, int a, int b) {
  Tile &sums = usable(c), &left = usable(a), &right = usable(b);
  if (sums.rows != left.rows || left.bytes / 4 != right.rows || sums.bytes != right.bytes) abort();
  for (int m = 0; m < sums.rows; m++)
    for (int k = 0; k < left.bytes / 4; k++)
      for (int n = 0; n < sums.bytes / 4; n++) {
        float sum;
        std::memcpy(&sum, sums.data[m] + 4 * n, 4);
        for (int i = 0; i < 4; i += 2) sum += widen(left.data[m] + 4 * k + i) * widen(right.data[k] + 4 * n + i);
        std::memcpy(sums.data[m] + 4 * n, &sum, 4);
      }
}
__attribute__((target("avx512f"))) inline __m512 dot(__m512 sum, __m512bh a, __m512bh b) {
  const __m512i x = (__m512i)a, y = (__m512i)b, upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  sum = _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_slli_epi32(x, 16)), _mm512_castsi512_ps(_mm512_slli_epi32(y, 16)), sum);
  return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_and_si512(x, upper)), _mm512_castsi512_ps(_mm512_and_si512(y, upper)), sum);
}

}  // namespace emulated

#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef __get_cpuid_count
#define _tile_loadconfig(memory) emulated::load_config(memory)
#define _tile_release() (emulated::tiles().configured = false)
#define _tile_loadd(tile, memory, stride) emulated::load(tile, memory, stride)
#define _tile_stored(tile, memory, stride) emulated::store(tile, memory, stride)
#define _tile_dpbf16ps(c, a, b) emulated::multiply(c, a, b)
#define _mm512_dpbf16_ps(sum, a, b) emulated::dot(sum, a, b)
// The CPU has them all, and the kernel grants the tiles.
#define __get_cpuid_count(leaf, subleaf, a, b, c, d) (*(a) = *(b) = *(c) = 0, *(d) = ~0u, 1)
#define __builtin_cpu_supports(feature) 1
#define syscall(...) 0L
