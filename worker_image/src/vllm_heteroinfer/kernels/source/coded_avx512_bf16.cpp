// Coded weights with AVX512-BF16: decodes exactly to pairs of bf16, with tables of AVX512-BW and AVX512-VBMI.
#include <immintrin.h>

#include "coded.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512bf16,avx512vbmi")

namespace heteroinfer {
namespace {

#include "lanes_avx512.h"
#include "coded_rows.h"

typedef uint16_t Words __attribute__((vector_size(64)));

struct PairDot {
  using Input = int32_t;  // two bf16
  using Weights = __m512i;
  INLINE Lanes::F add(Lanes::F sum, Weights w, Input in) {
    return (Lanes::F)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(in));
  }
};

struct PairInOrder {
  static constexpr float kGain = 1;
  INLINE void order(Lanes::F&, Lanes::F&) {}
};

struct PairBf16 : PairInOrder {
  static constexpr int kLine = 128, kPairs = 1;
  inline __attribute__((always_inline)) void line(const uint8_t* w, __m512i (&out)[1][2]) const {
    out[0][0] = _mm512_loadu_si512(w), out[0][1] = _mm512_loadu_si512(w + 64);
  }
};

// Returns an integer from 0 to 127 as bf16. 134 is the exponent of 128: the bias 127 plus 7. Each shift to the left
// lowers the exponent by one, until bit 7 is the leading 1, which bf16 does not store.
constexpr uint16_t widen_integer(unsigned value) {
  if (!value) return 0;
  unsigned exponent = 134;
  for (; !(value & 128); exponent--) value *= 2;
  return static_cast<uint16_t>(exponent << 7 | (value & 127));
}

// The 128 codes without sign as bf16, in two tables of bytes: one for the lower bytes, one for the upper.
template <bool Float>
struct ByteTable {
  constexpr ByteTable() : low(), high() {
    for (unsigned code = 0; code < 128; code++) {
      const uint16_t wide = Float ? widen_fp8(code) : widen_integer(code);
      low[code] = static_cast<uint8_t>(wide & 255);
      high[code] = static_cast<uint8_t>(wide >> 8);
    }
  }
  alignas(64) uint8_t low[128];
  alignas(64) uint8_t high[128];
};
template <bool Float>
constexpr ByteTable<Float> kByteTable;

// 8-bit codes in the order of `fp8_offset`.
template <bool Float>
struct PairBytes : PairInOrder {
  static constexpr int kLine = 64, kPairs = 1;
  PairBytes()  // has a body: a defaulted constructor would be compiled for any CPU
      : low0(_mm512_loadu_si512(kByteTable<Float>.low)),
        low1(_mm512_loadu_si512(kByteTable<Float>.low + 64)),
        high0(_mm512_loadu_si512(kByteTable<Float>.high)),
        high1(_mm512_loadu_si512(kByteTable<Float>.high + 64)),
        sign(_mm512_set1_epi32(static_cast<int>(0x80808080u))) {}
  inline __attribute__((always_inline)) void line(const uint8_t* w, __m512i (&out)[1][2]) const {
    const __m512i raw = _mm512_loadu_si512(w), size = Float ? raw : _mm512_abs_epi8(raw);
    const __m512i low = _mm512_permutex2var_epi8(low0, size, low1);
    __m512i high = _mm512_or_si512(_mm512_permutex2var_epi8(high0, size, high1), _mm512_and_si512(raw, sign));
    if (!Float)  // -128 does not fit into 7 bits
      high = _mm512_mask_mov_epi8(high, _mm512_cmpeq_epi8_mask(raw, sign), _mm512_set1_epi32(static_cast<int>(0xc3c3c3c3u)));
    out[0][0] = _mm512_unpacklo_epi8(low, high);
    out[0][1] = _mm512_unpackhi_epi8(low, high);
  }
  const __m512i low0, low1, high0, high1, sign;
};

// The 16 4-bit codes as bf16. The table has them twice, because a look-up uses 5 bits of a word.
constexpr uint16_t kInt4Words[16] = {0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
                                     0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
constexpr uint16_t kFp4Words[16] = {0,      0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                    0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};

// Order of the nibbles of a word: nibble N belongs to pair N / 2, half N % 2.
template <const uint16_t (&Table)[16]>
struct PairNibbles : PairInOrder {
  static constexpr int kLine = 64, kPairs = 2;
  PairNibbles() {
    for (int i = 0; i < 32; i++) table[i] = Table[i % 16];
  }
  inline __attribute__((always_inline)) __m512i look_up(Words nibbles) const {
    return (__m512i)__builtin_shuffle(table, nibbles);
  }
  inline __attribute__((always_inline)) void line(const uint8_t* w, __m512i (&out)[2][2]) const {
    const Words raw = Lanes::read<Words>(w);
    out[0][0] = look_up(raw), out[0][1] = look_up(raw >> 4);
    out[1][0] = look_up(raw >> 8), out[1][1] = look_up(raw >> 12);
  }
  Words table;
};

// Writes the pairs [first, end) of a unit as bf16, in the order of linear layers, and zeros for the other pairs.
// Prefetches `ahead`.
template <class Decoder>
void widen_unit(uint16_t* out, const uint8_t* w, const uint8_t* ahead, long first, long end) {
  const Decoder decoder{};
  for (long pair = 0; pair < kUnitPairs; pair += Decoder::kPairs, w += Decoder::kLine, ahead += Decoder::kLine) {
    uint16_t* to = out + pair * 64;
    if (pair < first || pair >= end) {
      for (int p = 0; p < Decoder::kPairs * 2; p++) _mm512_storeu_si512(to + p * 32, _mm512_set1_epi32(0));
      continue;
    }
    __m512i wide[Decoder::kPairs][2];
    decoder.line(w, wide);
    for (int line = 0; line < Decoder::kLine; line += 64)
      _mm_prefetch(reinterpret_cast<const char*>(ahead) + line, _MM_HINT_T0);
    for (int p = 0; p < Decoder::kPairs; p++)
      for (int h = 0; h < 2; h++) _mm512_storeu_si512(to + p * 64 + h * 32, wide[p][h]);
  }
}

// Packs bf16 inputs for the units [first, end): a pair of adjacent inputs of a row is one word. Also writes each unit's
// sums, unless `sums` is null.
void pack_pairs(void* out, float* sums, const void* x, long, long ldx, int rows, long k, long first, long end) {
  const auto* from = static_cast<const uint16_t*>(x);
  auto* to = static_cast<int32_t*>(out) + first * kUnitPairs * rows;
  const auto at = [&](int r, long i) { return i < k ? from[r * ldx + i] : uint16_t{0}; };
  const auto wide = [](uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    __builtin_memcpy(&value, &bits, 4);
    return value;
  };
  for (long unit = first; unit < end; unit++) {
    for (long i = unit * kUnit; i < (unit + 1) * kUnit; i += 2, to += rows)
      for (int r = 0; r < rows; r++) to[r] = static_cast<int32_t>(static_cast<uint32_t>(at(r, i + 1)) << 16 | at(r, i));
    for (int r = 0; sums && r < rows; r++) {
      float sum = 0;
      for (long i = unit * kUnit; i < (unit + 1) * kUnit; i++) sum += wide(at(r, i));
      sums[unit * rows + r] = sum;
    }
  }
}

constexpr int kRows = 12;

}  // namespace

const CodedKernel kCodedAvx512Bf16 = {
    "avx512_bf16", kRows, 2, false, pack_pairs,
    {multiply_coded<PairDot, PairBf16, kRows>, nullptr, multiply_coded<PairDot, PairBytes<true>, kRows>,
     multiply_coded<PairDot, PairBytes<false>, kRows>, multiply_coded<PairDot, PairNibbles<kInt4Words>, kRows>,
     multiply_coded<PairDot, PairNibbles<kFp4Words>, kRows>},
    {widen_unit<PairBf16>, nullptr, widen_unit<PairBytes<true>>, widen_unit<PairBytes<false>>,
     widen_unit<PairNibbles<kInt4Words>>, widen_unit<PairNibbles<kFp4Words>>},
    {}};

}  // namespace heteroinfer

#pragma GCC pop_options
