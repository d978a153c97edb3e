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
  // Decodes e4m3 as float16, which has the same form except for a factor of 256.
  INLINE F from_e4m3(const void* from) {
    const __m256i codes = _mm256_cvtepi8_epi16(read<__m128i>(from));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
    const __m256i size = _mm256_and_si256(codes, _mm256_set1_epi16(127));
    const __m256i nan = _mm256_cmpeq_epi16(size, _mm256_set1_epi16(127));
    return mul(of_halves(_mm256_or_si256(halves, _mm256_and_si256(nan, _mm256_set1_epi16(0x7e00)))), set1(256.0f));
  }
  // Interleaves the lower or upper halves of each 16-byte lane of a and b.
  INLINE F interleave_low(F a, F b) { return {_mm256_unpacklo_ps(a.a, b.a), _mm256_unpacklo_ps(a.b, b.b)}; }
  INLINE F interleave_high(F a, F b) { return {_mm256_unpackhi_ps(a.a, b.a), _mm256_unpackhi_ps(a.b, b.b)}; }
  // `even_lanes` joins the 16-byte lanes 0 and 2 of a and of b, `odd_lanes` the lanes 1 and 3.
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

// A decoder decodes a line of kLine bytes: the weights of kPairs pairs of inputs for 32 columns. `half` decodes half a
// line, the columns of quarters `half` and `half` + 2, and calls take(pair, parity, quarter, w) for each 8 weights w.
// `take` must use the weights at once, because AVX2 has only 16 registers. The weights are multiplied by 1 / kGain. The
// columns may be permuted; `order` restores their order in the four quarters of a sum.
#define TAKE(...) [&](int pair, int parity, int quarter, __m256 w) __attribute__((always_inline)) { __VA_ARGS__ }

INLINE __m256 of_lower(__m256i halves) { return _mm256_cvtph_ps(_mm256_castsi256_si128(halves)); }
INLINE __m256 of_upper(__m256i halves) { return _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)); }
// Converts the signed integer in the highest `bits` bits of each lane to float32, and ignores the lower bits. `bits` is
// 0 if the lower bits are zeros already: then nothing must be masked.
INLINE __m256 of_top(__m256i a, int bits) {
  return _mm256_cvtepi32_ps(bits ? _mm256_and_si256(a, _mm256_set1_epi32(static_cast<int>(~0u << (32 - bits)))) : a);
}

struct InColumnOrder {
  INLINE void order(__m256 (&)[4]) {}
};

struct QuartersBf16 : InColumnOrder {
  static constexpr int kLine = 128, kPairs = 1;
  static constexpr float kGain = 1;
  template <class Take>
  INLINE void half(const uint8_t* w, int half, Take take) {
#pragma GCC unroll 2
    for (int q = half; q < 4; q += 2) {
      const __m256i raw = Lanes::read<__m256i>(w + 32 * q);
      take(0, 0, q, _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16)));
      take(0, 1, q, _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(static_cast<int>(0xffff0000u)))));
    }
  }
};

struct QuartersF16 : InColumnOrder {
  static constexpr int kLine = 128, kPairs = 1;
  static constexpr float kGain = 1;
  template <class Take>
  INLINE void half(const uint8_t* w, int half, Take take) {
#pragma GCC unroll 2
    for (int q = half; q < 4; q += 2)
#pragma GCC unroll 2
      for (int parity = 0; parity < 2; parity++)
        take(0, parity, q, _mm256_cvtph_ps(Lanes::read<__m128i>(w + q / 2 * 64 + parity * 32 + q % 2 * 16)));
  }
};

// `Ordered`: decodes the columns in order, which takes one more instruction for each half of a line.
template <bool Ordered>
struct QuartersFp8 {
  static constexpr int kLine = 64, kPairs = 1;
  static constexpr float kGain = FloatFp8::kGain;
  template <class Take>
  INLINE void half(const uint8_t* w, int half, Take take) {
    const __m256i kept = _mm256_set1_epi16(static_cast<short>(0xbf80));
    __m256i raw = Lanes::read<__m256i>(w + 32 * half);
    if (Ordered) raw = _mm256_permute4x64_epi64(raw, 0xd8);
    const __m256i even = _mm256_and_si256(_mm256_srai_epi16(_mm256_slli_epi16(raw, 8), 1), kept);
    take(0, 0, half, of_lower(even));
    take(0, 0, half + 2, of_upper(even));
    const __m256i odd = _mm256_and_si256(_mm256_srai_epi16(raw, 1), kept);
    take(0, 1, half, of_lower(odd));
    take(0, 1, half + 2, of_upper(odd));
  }
  INLINE void order(__m256 (&q)[4]) {
    if (Ordered) return;
    const __m256 a = q[0], b = q[2], c = q[1], d = q[3];
    q[0] = _mm256_permute2f128_ps(a, b, 0x20), q[1] = _mm256_permute2f128_ps(c, d, 0x20);
    q[2] = _mm256_permute2f128_ps(a, b, 0x31), q[3] = _mm256_permute2f128_ps(c, d, 0x31);
  }
};

struct QuartersInt8 {
  static constexpr int kLine = 64, kPairs = 1;
  static constexpr float kGain = FloatInt8::kGain;
  template <class Take>
  INLINE void half(const uint8_t* w, int half, Take take) {
    const __m256i raw = Lanes::read<__m256i>(w + 32 * half);
    take(0, 0, half, of_top(_mm256_slli_epi32(raw, 24), 0));
    take(0, 0, half + 2, of_top(_mm256_slli_epi32(raw, 8), 8));
    take(0, 1, half, of_top(_mm256_slli_epi32(raw, 16), 8));
    take(0, 1, half + 2, of_top(raw, 8));
  }
  INLINE void order(__m256 (&q)[4]) {
    const __m256 a = q[0], b = q[1], c = q[2], d = q[3];
    q[0] = _mm256_unpacklo_ps(a, c), q[1] = _mm256_unpacklo_ps(b, d);
    q[2] = _mm256_unpackhi_ps(a, c), q[3] = _mm256_unpackhi_ps(b, d);
  }
};

// Order of the eight nibbles of a lane: nibble N belongs to parity N / 4, pair N / 2 % 2 and half N % 2.
struct QuartersInt4 : InColumnOrder {
  static constexpr int kLine = 64, kPairs = 2;
  static constexpr float kGain = FloatInt4::kGain;
  template <class Take>
  INLINE void half(const uint8_t* w, int half, Take take) {
    const __m256i raw = Lanes::read<__m256i>(w + 32 * half);
    take(0, 0, half, of_top(_mm256_slli_epi32(raw, 28), 0));
    take(0, 0, half + 2, of_top(_mm256_slli_epi32(raw, 24), 4));
    take(0, 1, half, of_top(_mm256_slli_epi32(raw, 12), 4));
    take(0, 1, half + 2, of_top(_mm256_slli_epi32(raw, 8), 4));
    take(1, 0, half, of_top(_mm256_slli_epi32(raw, 20), 4));
    take(1, 0, half + 2, of_top(_mm256_slli_epi32(raw, 16), 4));
    take(1, 1, half, of_top(_mm256_slli_epi32(raw, 4), 4));
    take(1, 1, half + 2, of_top(raw, 4));
  }
};

// Looks up bytes in a table of doubled values, because twice an FP4 value is an integer.
struct QuartersFp4 : InColumnOrder {
  static constexpr int kLine = 64, kPairs = 2;
  static constexpr float kGain = 0x1p-25f;
  template <class Take>
  INLINE void half(const uint8_t* w, int half, Take take) {
    const __m256i table = _mm256_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12,  //
                                           0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    const __m256i raw = Lanes::read<__m256i>(w + 32 * half), nibbles = _mm256_set1_epi8(15);
    const __m256i low = _mm256_shuffle_epi8(table, _mm256_and_si256(raw, nibbles));
    const __m256i high = _mm256_shuffle_epi8(table, _mm256_and_si256(_mm256_srli_epi16(raw, 4), nibbles));
    take(0, 0, half, of_top(_mm256_slli_epi32(low, 24), 0));
    take(0, 0, half + 2, of_top(_mm256_slli_epi32(high, 24), 0));
    take(0, 1, half, of_top(_mm256_slli_epi32(low, 8), 8));
    take(0, 1, half + 2, of_top(_mm256_slli_epi32(high, 8), 8));
    take(1, 0, half, of_top(_mm256_slli_epi32(low, 16), 8));
    take(1, 0, half + 2, of_top(_mm256_slli_epi32(high, 16), 8));
    take(1, 1, half, of_top(low, 8));
    take(1, 1, half + 2, of_top(high, 8));
  }
};

// Prefetches `bytes` bytes.
INLINE void prefetch(const uint8_t* at, long bytes) {
  for (long line = 0; line < bytes; line += 64) _mm_prefetch(reinterpret_cast<const char*>(at) + line, _MM_HINT_T0);
}

// Addresses of the units of a block, and of the units that are read `distance` units later, to prefetch them.
struct Reader {
  const uint8_t *block, *next;
  const Layout& layout;
  long first, end, distance;
  const uint8_t* at(long unit) const { return block + layout.header + unit * layout.unit_bytes; }
  const uint8_t* ahead(long unit) const {
    const long later = unit + distance;
    return later < end ? at(later) : next + layout.header + (later - end + first) * layout.unit_bytes;
  }
  // Prefetches the part of a header that belongs to a unit: the header is read with the same distance as the codes.
  void prefetch_header(long unit) const {
    const long bytes = layout.group_pairs ? layout.zeros / layout.units : 0, later = unit + distance;
    if (bytes) prefetch((later < end ? block + later * bytes : next + (later - end + first) * bytes), bytes);
  }
};

// Scales and zero points of the four quarters of a group of a block.
struct Scales {
  __m256 scale[4], zero[4];
  INLINE Scales of(const uint8_t* block, const Layout& layout, long group, float gain) {
    Scales made;
    for (int h = 0; h < 2; h++) {
      const Lanes::F scale = Lanes::mul(scales_of(block, layout, group, h), Lanes::set1(gain));
      Lanes::F zero = Lanes::zero();
      if (layout.format.zeros)
        zero = Lanes::mul(Lanes::from_int8(block + layout.zeros + group * kColumns + h * 16), Lanes::set1(-1.0f / gain));
      made.scale[2 * h] = scale.a, made.scale[2 * h + 1] = scale.b;
      made.zero[2 * h] = zero.a, made.zero[2 * h + 1] = zero.b;
    }
    return made;
  }
};

// c[32] += scale * (sum - zero * inputs_sum).
INLINE void add_quarter(float* c, __m256 sum, const Scales& scales, int q, const float* inputs_sum) {
  if (inputs_sum) sum = _mm256_fmadd_ps(scales.zero[q], _mm256_set1_ps(*inputs_sum), sum);
  _mm256_storeu_ps(c + 8 * q, _mm256_fmadd_ps(sum, scales.scale[q], _mm256_loadu_ps(c + 8 * q)));
}

// Adds the NaN markers of a block of FP8 weights to a row: NaN for each column with a NaN weight, else 0.
INLINE void add_nan_markers(float* c, const uint8_t* block, const Layout& layout) {
  for (int q = 0; q < 4; q++)
    _mm256_storeu_ps(c + 8 * q, _mm256_add_ps(_mm256_loadu_ps(c + 8 * q),
                                              Lanes::read<__m256>(block + layout.nan_markers + 32 * q)));
}

constexpr int kRows = 6;      // rows that are multiplied at once: their sums of 16 columns take 12 registers
constexpr long kWidened = 4;  // units that are decoded into the first cache

// Pairs [pair, stop) of a block that share a scale and whose decoded weights fit into the first cache.
struct Part {
  long group, pair, stop;
};
// Returns the part of a block that begins at `pair`.
INLINE Part part_at(const Layout& layout, long pair, long end) {
  const long last = end * kUnitPairs, group = layout.group_pairs ? pair / layout.group_pairs : 0;
  long stop = (pair / kUnitPairs + kWidened) * kUnitPairs;
  if (layout.group_pairs && (group + 1) * layout.group_pairs < stop) stop = (group + 1) * layout.group_pairs;
  return {group, pair, stop < last ? stop : last};
}

// Sums of the inputs of R rows over a part; null without zero points.
INLINE const float* sums_of(float* to, const Layout& layout, const float* sums, const Part& part, long rows) {
  if (!layout.format.zeros) return nullptr;
  for (long r = 0; r < rows; r++) to[r] = 0;
  for (long unit = part.pair / kUnitPairs; unit * kUnitPairs < part.stop; unit++)
    for (long r = 0; r < rows; r++) to[r] += sums[unit * rows + r];
  return to;
}

// Calls line(first pair, codes) for each line of a part.
template <class Decoder, class Line>
INLINE void each_line(const Reader& reader, const Part& part, bool prefetches, Line line) {
  for (long pair = part.pair; pair < part.stop;) {
    const long unit = pair / kUnitPairs, until = (unit + 1) * kUnitPairs < part.stop ? (unit + 1) * kUnitPairs : part.stop;
    const long offset = pair % kUnitPairs / Decoder::kPairs * Decoder::kLine;
    const uint8_t *w = reader.at(unit) + offset, *ahead = reader.ahead(unit) + offset;
    if (prefetches) reader.prefetch_header(unit);
    for (; pair < until; pair += Decoder::kPairs, w += Decoder::kLine, ahead += Decoder::kLine) {
      if (prefetches) prefetch(ahead, Decoder::kLine);
      line(pair, w);
    }
  }
}

// c[R][32] += x * w for few rows, with all sums in registers: one row sums all 32 columns at once, several rows sum one
// half of the columns after the other.
template <class Decoder, int R>
static void multiply_few(float* c, const CodedStream& stream, const CodedInputs& inputs, const Layout& layout, long first,
                         long end, long distance) {
  const Reader reader{stream.block, stream.next, layout, first, end, distance};
  const float* x = &static_cast<const FloatDot::Input*>(inputs.x)->even;
  for (long pair = first * kUnitPairs; pair < end * kUnitPairs;) {
    const Part part = part_at(layout, pair, end);
    __m256 total[R][4];
    if constexpr (R == 1) {
      __m256 sums[2][4];  // separate sums for each parity, because one long chain of additions would be too slow
      for (int parity = 0; parity < 2; parity++)
        for (int q = 0; q < 4; q++) sums[parity][q] = _mm256_setzero_ps();
      each_line<Decoder>(reader, part, true, [&](long at, const uint8_t* codes) __attribute__((always_inline)) {
        const float* in = x + at * 2;
        const auto take = TAKE(sums[parity][quarter] = _mm256_fmadd_ps(w, _mm256_broadcast_ss(in + pair * 2 + parity),
                                                                       sums[parity][quarter]););
        Decoder::half(codes, 0, take);
        Decoder::half(codes, 1, take);
      });
      for (int q = 0; q < 4; q++) total[0][q] = _mm256_add_ps(sums[0][q], sums[1][q]);
    } else {
#pragma GCC unroll 2
      for (int half = 0; half < 2; half++) {
        __m256 sums[R][2];
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) sums[r][0] = sums[r][1] = _mm256_setzero_ps();
        each_line<Decoder>(reader, part, !half, [&](long at, const uint8_t* codes) __attribute__((always_inline)) {
          const float* in = x + at * 2 * R;
          Decoder::half(codes, half, [&](int pair, int parity, int quarter, __m256 w) __attribute__((always_inline)) {
#pragma GCC unroll 6
            for (int r = 0; r < R; r++)
              sums[r][quarter / 2] =
                  _mm256_fmadd_ps(w, _mm256_broadcast_ss(in + (pair * R + r) * 2 + parity), sums[r][quarter / 2]);
          });
        });
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) total[r][half] = sums[r][0], total[r][half + 2] = sums[r][1];
      }
    }
    float of_rows[R];
    const float* sums = sums_of(of_rows, layout, inputs.sums, part, R);
    const Scales scales = Scales::of(stream.block, layout, part.group, Decoder::kGain);
    for (int r = 0; r < R; r++) {
      Decoder::order(total[r]);
      for (int q = 0; q < 4; q++) add_quarter(c + r * kColumns, total[r][q], scales, q, sums ? sums + r : nullptr);
    }
    pair = part.stop;
  }
  for (int r = 0; r < R && layout.format.code == kFp8; r++) add_nan_markers(c + r * kColumns, stream.block, layout);
}

// c[count][rows][32] += x * w over the units [first, end) of `count` blocks. The number of rows must be a constant for
// the sums to stay in registers.
template <class Decoder, int R = 1>
static void multiply_few(float* c, int rows, const CodedStream* streams, int count, const CodedInputs& inputs,
                         const Layout& layout, long first, long end, long distance) {
  if constexpr (R < kStreamRows)
    if (rows > R)
      return multiply_few<Decoder, R + 1>(c, rows, streams, count, inputs, layout, first, end, distance);
  for (int s = 0; s < count; s++)
    multiply_few<Decoder, R>(c + s * R * kColumns, streams[s], inputs, layout, first, end, distance);
}

// c[R][32] += scale * (x * w) over `pairs` pairs of decoded weights [pair][parity][32], for the columns of `Quarters`
// quarters, the first of which is `from`. `sums`: the sum of each row's inputs, for zero points; null without them.
template <int R, int Quarters>
INLINE void multiply_wide(float* c, const float* w, const FloatDot::Input* x, long pairs, const Scales& scales, int from,
                          const float* sums) {
  __m256 total[R][Quarters];
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int q = 0; q < Quarters; q++) total[r][q] = _mm256_setzero_ps();
  const float* in = &x->even;
  for (long pair = 0; pair < pairs; pair++, w += 2 * kColumns, in += 2 * R)
#pragma GCC unroll 2
    for (int parity = 0; parity < 2; parity++) {
      __m256 own[Quarters];
#pragma GCC unroll 4
      for (int q = 0; q < Quarters; q++) own[q] = _mm256_load_ps(w + parity * kColumns + (from + q) * 8);
#pragma GCC unroll 6
      for (int r = 0; r < R; r++) {
        const __m256 each = _mm256_broadcast_ss(in + r * 2 + parity);
#pragma GCC unroll 4
        for (int q = 0; q < Quarters; q++) total[r][q] = _mm256_fmadd_ps(own[q], each, total[r][q]);
      }
    }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++)
#pragma GCC unroll 4
    for (int q = 0; q < Quarters; q++)
      add_quarter(c + r * kColumns, total[r][q], scales, from + q, sums ? sums + r : nullptr);
}

// c[rows][32] += scale * (x * w) over `pairs` pairs of decoded weights. The number of rows must be a constant for the
// sums to stay in registers: up to two rows sum all 32 columns at once, more rows 16 columns at a time.
template <int R = 1>
static void multiply_wide(float* c, long rows, const float* w, const FloatDot::Input* x, long pairs, const Scales& scales,
                          const float* sums) {
  if constexpr (R < kRows)
    if (rows > R) return multiply_wide<R + 1>(c, rows, w, x, pairs, scales, sums);
  constexpr int kQuarters = R <= 2 ? 4 : 2;
  for (int from = 0; from < 4; from += kQuarters) multiply_wide<R, kQuarters>(c, w, x, pairs, scales, from, sums);
}

// c[rows][32] += x * w for many rows: decodes each weight of a block once, into the first cache.
template <class Decoder>
static void multiply_all(float* c, long rows, long each, const CodedStream& stream, const CodedInputs& inputs,
                         const Layout& layout, long first, long end, long distance) {
  alignas(64) float wide[kWidened * kUnitElements];
  const Reader reader{stream.block, stream.next, layout, first, end, distance};
  for (long pair = first * kUnitPairs; pair < end * kUnitPairs;) {
    const Part part = part_at(layout, pair, end);
    each_line<Decoder>(reader, part, true, [&](long at, const uint8_t* codes) __attribute__((always_inline)) {
      float* to = wide + (at - part.pair) * 2 * kColumns;
      __m256 line[Decoder::kPairs][2][4];
      const auto take = TAKE(line[pair][parity][quarter] = w;);
      Decoder::half(codes, 0, take);
      Decoder::half(codes, 1, take);
#pragma GCC unroll 2
      for (int p = 0; p < Decoder::kPairs; p++)
#pragma GCC unroll 2
        for (int parity = 0; parity < 2; parity++, to += kColumns) {
          Decoder::order(line[p][parity]);
#pragma GCC unroll 4
          for (int q = 0; q < 4; q++) _mm256_store_ps(to + 8 * q, line[p][parity][q]);
        }
    });
    const Scales scales = Scales::of(stream.block, layout, part.group, Decoder::kGain);
    for (long row = 0; row < rows; row += each) {
      const long count = rows - row < each ? rows - row : each;
      const auto* x = static_cast<const FloatDot::Input*>(inputs.x) + row * layout.units * kUnitPairs + part.pair * count;
      float of_rows[kRows];
      const float* sums = sums_of(of_rows, layout, inputs.sums + (layout.format.zeros ? row * layout.units : 0), part, count);
      multiply_wide(c + row * kColumns, count, wide, x, part.stop - part.pair, scales, sums);
    }
    pair = part.stop;
  }
  for (long row = 0; row < rows && layout.format.code == kFp8; row++)
    add_nan_markers(c + row * kColumns, stream.block, layout);
}

}  // namespace

const CodedKernel kCodedAvx2 = {
    "avx2", kRows, 4, false, pack_float_rows,
    {multiply_few<QuartersBf16>, multiply_few<QuartersF16>, multiply_few<QuartersFp8<false>>, multiply_few<QuartersInt8>,
     multiply_few<QuartersInt4>, multiply_few<QuartersFp4>},
    {},
    {multiply_all<QuartersBf16>, multiply_all<QuartersF16>, multiply_all<QuartersFp8<true>>, multiply_all<QuartersInt8>,
     multiply_all<QuartersInt4>, multiply_all<QuartersFp4>}};
const RowsKernel kRowsAvx2 = {add_scaled_rows, store_elements, activate_elements, weighted_elements};

}  // namespace heteroinfer

#pragma GCC pop_options
