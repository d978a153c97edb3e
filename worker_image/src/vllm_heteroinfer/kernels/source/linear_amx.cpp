// AMX: multiplies tiles of 16 rows x 32 k by tiles of 32 k x 16 columns. It is faster than vectors from several rows on.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#include "linear.h"

#pragma GCC push_options
#pragma GCC target("avx512f,amx-tile,amx-bf16")

namespace heteroinfer {
namespace {

struct __attribute__((packed)) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// Tiles: 0, 1 sums of rows 0-15 (columns 0-15, 16-31); 2, 3 sums of rows 16-31; 4, 5 inputs; 6, 7 weights.
thread_local int configured_rows = 0;

// Sets the sizes of the tiles for this number of rows, if they differ from those set before.
void configure(int rows) {
  if (configured_rows == rows) return;
  const int upper = rows < 16 ? rows : 16, lower = rows - upper;
  TileConfig config;
  for (int tile = 0; tile < 8; tile++) {
    const bool low = tile == 2 || tile == 3 || tile == 5;
    const int count = tile >= 6 ? 16 : low ? lower : upper;
    config.rows[tile] = static_cast<uint8_t>(count);
    config.row_bytes[tile] = count ? 64 : 0;
  }
  _tile_loadconfig(&config);
  configured_rows = rows;
}

// Prefetches the cache lines [first, end) of a unit.
inline __attribute__((always_inline)) void prefetch_unit(const uint16_t* ahead, int first, int end) {
  for (int line = first; line < end; line++)
    _mm_prefetch(reinterpret_cast<const char*>(ahead) + line * 64, _MM_HINT_T0);
}

// c[rows][32] += x * w over `units` units of each stream, with the sums in tiles. `Lower`: there are more than 16 rows,
// so rows 16 to 31 have tiles, too. Prefetches this share of each stream's `ahead`.
template <bool Lower>
void multiply_tiles(float* c, int rows, const Stream* streams, int count, long units, Share share) {
  const int first_line = 32 * share.index / share.count, end_line = 32 * (share.index + 1) / share.count;
  _tile_loadd(0, c, 128);
  _tile_loadd(1, c + 16, 128);
  if (Lower) {
    _tile_loadd(2, c + 16 * 32, 128);
    _tile_loadd(3, c + 16 * 32 + 16, 128);
  }
  for (long u = 0; u < units; u++)
    for (int s = 0; s < count; s++) {
      const uint16_t* w = streams[s].w + u * kUnitElements;
      const uint16_t* x = static_cast<const uint16_t*>(streams[s].x) + u * kUnit * rows;
      if (streams[s].ahead != streams[s].w) prefetch_unit(streams[s].ahead + u * kUnitElements, first_line, end_line);
      _tile_loadd(6, w, 128);
      _tile_loadd(4, x, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w + 32, 128);
      _tile_dpbf16ps(1, 4, 7);
      if (Lower) {
        _tile_loadd(5, x + 16 * kUnit, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  _tile_stored(0, c, 128);
  _tile_stored(1, c + 16, 128);
  if (Lower) {
    _tile_stored(2, c + 16 * 32, 128);
    _tile_stored(3, c + 16 * 32 + 16, 128);
  }
}

// c[rows][32] += x * w over `units` units of each stream, for up to 32 rows.
void multiply(float* c, int rows, const Stream* streams, int count, long units, Share share) {
  configure(rows);
  if (rows > 16)
    multiply_tiles<true>(c, rows, streams, count, units, share);
  else
    multiply_tiles<false>(c, rows, streams, count, units, share);
}

// Packs the inputs of `rows` rows for the units [first, end) of k: the 32 inputs of each row in turn, which are a row
// of a tile. Writes zeros beyond k.
void pack_rows(void* out, const uint16_t* x, long ldx, int rows, long k, long first, long end) {
  auto* to = static_cast<uint16_t*>(out) + first * kUnit * rows;
  for (long unit = first; unit < end; unit++)
    for (int r = 0; r < rows; r++, to += kUnit) {
      const long left = k - unit * kUnit, take = left < kUnit ? left : kUnit;
      std::memcpy(to, x + r * ldx + unit * kUnit, static_cast<size_t>(take) * 2);
      if (take < kUnit) std::memset(to + take, 0, static_cast<size_t>(kUnit - take) * 2);
    }
}

// Other libraries (oneDNN) configure the tiles for themselves, so each call must set its own configuration.
void enter() { configured_rows = 0; }

// Releases the tiles, so that the operating system need not save them at a switch of threads.
void leave() {
  if (configured_rows) _tile_release();
  configured_rows = 0;
}

}  // namespace

const Kernel kAmx = {"amx_bf16", 32, 2, 2, 1, true, pack_rows, multiply, enter, leave, &kFp8Amx};

// Linux gives a process the tile registers only on request. Returns false if this system does not.
bool request_amx() {
  constexpr long kArchReqXcompPerm = 0x1023, kXfeatureTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXfeatureTileData) == 0;
}

}  // namespace heteroinfer

#pragma GCC pop_options
