// AVX-512F: bf16 is the upper half of a float32, so a shift or a mask converts it.
#include <immintrin.h>

#include "linear.h"

#pragma GCC push_options
#pragma GCC target("avx512f")

namespace heteroinfer {
namespace {

// 16 elements, as the compiler's own vector types.
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Bits __attribute__((vector_size(64)));

#include "fp8_rows.h"
#include "vector_rows.h"

struct Dot {
  struct Input {
    float even, odd;
  };
  struct Weights {
    __m512 even, odd;
  };
  static Input input(uint16_t even, uint16_t odd) {
    const uint32_t e = static_cast<uint32_t>(even) << 16, o = static_cast<uint32_t>(odd) << 16;
    Input in;
    __builtin_memcpy(&in.even, &e, 4);
    __builtin_memcpy(&in.odd, &o, 4);
    return in;
  }
  static inline __attribute__((always_inline)) Weights load(const uint16_t* w) { return of(_mm512_loadu_si512(w)); }
  static inline __attribute__((always_inline)) Weights of(__m512i raw) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(raw, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  static inline __attribute__((always_inline)) __m512 add(__m512 sum, const Weights& w, const Input& in) {
    sum = _mm512_fmadd_ps(w.even, _mm512_set1_ps(in.even), sum);
    return _mm512_fmadd_ps(w.odd, _mm512_set1_ps(in.odd), sum);
  }
};

struct Widen {
  // float32 of every fourth FP8 number. The bias of the exponent changes from 7 to 127, and an exact subtraction makes
  // denormal numbers right.
  template <int Byte>
  static inline __attribute__((always_inline)) Bits of_byte(Bits raw) {
    const Bits size = (Byte == 3 ? raw >> 4 : raw << (20 - 8 * (Byte % 3))) & 0x07f00000u;
    const Floats small = (Floats)(size + (121u << 23)) - 0x1p-6f;
    Bits wide = size + (120u << 23);
    wide = size < (8u << 20) ? (Bits)small : wide;
    wide = size == (127u << 20) ? Bits{} + 0x7fc00000u : wide;
    return wide | (raw << (24 - 8 * Byte) & 0x80000000u);
  }
  inline __attribute__((always_inline)) void pair(const uint8_t* w, __m512i& first, __m512i& second) const {
    const Bits raw = (Bits)_mm512_loadu_si512(w);
    // Four bytes are two columns by two k.
    const Bits even = of_byte<0>(raw) >> 16 | of_byte<1>(raw), odd = of_byte<2>(raw) >> 16 | of_byte<3>(raw);
    const Ints low = {0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29};
    first = (__m512i)__builtin_shuffle(even, odd, low);
    second = (__m512i)__builtin_shuffle(even, odd, low + 2);
  }
};

const Fp8 kFp8 = {kFp8Rows, multiply_fp8<Dot, Widen>, widen_unit<Widen>};

}  // namespace

const Kernel kAvx512 = {"avx512f", 12, 4, 4, 1, false, pack_rows<Dot>, multiply<Dot>, do_nothing, do_nothing, &kFp8};

namespace {

// Reads 16 floats.
inline Floats load(const float* from) {
  Floats to;
  __builtin_memcpy(&to, from, sizeof to);
  return to;
}

// e to the x, by a polynomial of degree 6 with x = n ln 2 + r. The relative error is below 2e-7. The result is denormal
// below -87.4, 0 below -104, and infinity above 88.8.
inline Floats exponential(Floats x) {
  const Floats low = Floats{} - 104.0f, high = Floats{} + 89.0f;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const Floats shifted = x * 1.44269504f + kMagic, n = shifted - kMagic;
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats p = r * (1.0f / 720) + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  // Multiplies by 2^(n/2) twice, since 2^n may not be a normal number.
  const Ints exponent = (Ints)shifted - (Ints)(Floats{} + kMagic), half = exponent >> 1;
  return (Floats)((Ints)p + (half << 23)) * (Floats)((exponent - half + 127) << 23);
}

// Writes 16 elements as bf16, rounded to nearest even, one by one.
inline void store_bf16(uint16_t* to, Floats value) {
  const Bits bits = (Bits)value;
  Bits rounded = (bits + ((bits >> 16 & 1) + 0x7fff)) >> 16;
  rounded = (Ints)(value != value) ? Bits{} + 0x7fc0 : rounded;  // rounding would turn some NaN into infinity
  for (int i = 0; i < 16; i++) to[i] = static_cast<uint16_t>(rounded[i]);
}

}  // namespace

// h[rows][n] = silu(gate) * up, rounded to bf16. In the sums, blocks of 32 gates and 32 ups alternate.
void silu_and_multiply(uint16_t* h, long ldh, const float* sums, long ld, int rows, long n) {
  for (int r = 0; r < rows; r++)
    for (long column = 0; column < n; column += 16) {
      const float* gate = sums + r * ld + column / kColumns * 2 * kColumns + column % kColumns;
      const Floats g = load(gate), up = load(gate + kColumns);
      store_bf16(h + r * ldh + column, g / (1.0f + exponential(-g)) * up);
    }
}

// y[n] = sum over i of weights[i] * parts[i][n], rounded to bf16.
void weighted_sum(uint16_t* y, const float* const* parts, const float* weights, long count, long n) {
  for (long column = 0; column < n; column += 16) {
    Floats sum = {};
    for (long i = 0; i < count; i++) sum += weights[i] * load(parts[i] + column);
    store_bf16(y + column, sum);
  }
}

namespace {

typedef uint16_t Halves __attribute__((vector_size(32)));

// Converts 16 bf16 to float32.
inline Floats widen(const uint16_t* from) {
  Halves halves;
  __builtin_memcpy(&halves, from, sizeof(halves));
  return (Floats)(__builtin_convertvector(halves, Bits) << 16);
}

// Writes 16 elements as bf16, rounded to nearest even, at once.
inline void store_rounded(uint16_t* to, Floats value) {
  const Bits bits = (Bits)value;
  Bits rounded = (bits + ((bits >> 16 & 1) + 0x7fff)) >> 16;
  rounded = (Ints)(value != value) ? Bits{} + 0x7fc0 : rounded;
  const Halves halves = __builtin_convertvector(rounded, Halves);
  __builtin_memcpy(to, &halves, sizeof(halves));
}

// 1 / sqrt(mean of n squares + epsilon). Lane i of `squares` has the sum of every 16th square from i on.
inline float inverse_root(Floats squares, long n, float epsilon) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) squares[i] += squares[i + half];
  return 1.0f / __builtin_sqrtf(squares[0] / static_cast<float>(n) + epsilon);
}

// y[n] = x[n] * scale * weight[n].
inline void scale_row(uint16_t* y, const uint16_t* x, const uint16_t* weight, long n, float scale) {
  for (long i = 0; i < n; i += 16) store_rounded(y + i, widen(x + i) * scale * widen(weight + i));
}

}  // namespace

// y[n] = x[n] / sqrt(mean(x^2) + epsilon) * weight[n], rounded to bf16.
void norm_row(uint16_t* y, const uint16_t* x, const uint16_t* weight, long n, float epsilon) {
  Floats squares = {};
  for (long i = 0; i < n; i += 16) squares += widen(x + i) * widen(x + i);
  scale_row(y, x, weight, n, inverse_root(squares, n, epsilon));
}

// residual[n] += x[n], and x = the norm of this sum. The mean of squares uses the sum before it is rounded.
void add_and_norm_row(uint16_t* x, uint16_t* residual, const uint16_t* weight, long n, float epsilon) {
  Floats squares = {};
  for (long i = 0; i < n; i += 16) {
    const Floats sum = widen(x + i) + widen(residual + i);
    squares += sum * sum;
    store_rounded(residual + i, sum);
  }
  scale_row(x, residual, weight, n, inverse_root(squares, n, epsilon));
}

// Chooses the topk experts with the highest corrected scores: computes all scores, adds the bias, then finds the
// highest score topk times and removes it each time. Scores are padded to 16 with minus infinity.
void choose_experts(float* weights, int32_t* ids, const void* logits, bool bf16, const Routing& routing, float* scratch) {
  const float kInfinity = __builtin_inff();
  const long count = routing.experts, padded = (count + 15) / 16 * 16;
  float *scores = scratch, *keys = scratch + padded;
  Floats highest = Floats{} - kInfinity;
  for (long e = 0; e < count; e++) {
    if (bf16) {
      const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(logits)[e]) << 16;
      __builtin_memcpy(scores + e, &bits, 4);
    } else {
      scores[e] = static_cast<const float*>(logits)[e];
    }
  }
  for (long e = count; e < padded; e++) scores[e] = -kInfinity;
  for (long e = 0; e < padded; e += 16) {
    const Floats x = load(scores + e);
    highest = x > highest ? x : highest;
  }
  float top = -kInfinity, sum = 0;
  for (int i = 0; i < 16; i++) top = highest[i] > top ? highest[i] : top;
  Floats sums = {};
  for (long e = 0; e < padded; e += 16) {
    const Floats x = load(scores + e);
    // `exponential` shifts bits and may turn NaN into a number. NaN is restored here.
    Floats score = routing.sigmoid ? 1.0f / (1.0f + exponential(-x)) : exponential(x - top);
    const Floats inner = routing.sigmoid ? x : x - top;
    score = inner != inner ? inner : score;
    if (e + 16 > count)
      for (long i = count - e; i < 16; i++) score[i] = 0;
    sums += score;
    _mm512_storeu_ps(scores + e, (__m512)score);
  }
  if (!routing.sigmoid) {
    for (int i = 0; i < 16; i++) sum += sums[i];
    for (long e = 0; e < padded; e += 16) _mm512_storeu_ps(scores + e, (__m512)(load(scores + e) / sum));
  }
  for (long e = 0; e < padded; e++) {
    const float key = routing.bias && e < count ? scores[e] + routing.bias[e] : scores[e];
    keys[e] = e >= count ? -kInfinity : key != key ? kInfinity : key < -3e38f ? -3e38f : key;
  }
  float total = 0;
  for (long j = 0; j < routing.topk; j++) {
    Floats best = Floats{} - kInfinity;
    Ints at = {};
    for (long e = 0; e < padded; e += 16) {
      const Floats key = load(keys + e);
      at = key > best ? Ints{} + static_cast<int32_t>(e) : at;
      best = key > best ? key : best;
    }
    int lane = 0;
    for (int i = 1; i < 16; i++)
      if (best[i] > best[lane] || (best[i] == best[lane] && at[i] + i < at[lane] + lane)) lane = i;
    ids[j] = at[lane] + lane;
    weights[j] = scores[ids[j]];
    total += weights[j];
    keys[ids[j]] = -kInfinity;
  }
  for (long j = 0; j < routing.topk; j++) {
    if (routing.normalize && total != 0) weights[j] /= total;
    weights[j] *= routing.factor;
  }
}

// c[count] += scale * part[count].
void add_scaled(float* c, const float* part, float scale, long count) {
  for (long i = 0; i < count; i += 16)
    _mm512_storeu_ps(c + i, _mm512_fmadd_ps(_mm512_loadu_ps(part + i), _mm512_set1_ps(scale), _mm512_loadu_ps(c + i)));
}

// y[rows][columns] = c[rows][32] + bias, rounded to bf16.
void store_rows(uint16_t* y, long ldy, const float* c, int rows, long columns, const uint16_t* bias) {
  for (int r = 0; r < rows; r++)
    for (long h = 0; h < columns; h += 16) {
      const long left = columns - h;
      const __mmask16 mask = left >= 16 ? 0xffff : static_cast<__mmask16>((1u << left) - 1);
      __m512 sum = _mm512_loadu_ps(c + r * kColumns + h);
      if (bias) {
        alignas(32) uint16_t b[16] = {};
        __builtin_memcpy(b, bias + h, static_cast<unsigned long>(left >= 16 ? 16 : left) * 2);
        const __m512i wide = _mm512_cvtepu16_epi32(_mm256_load_si256(reinterpret_cast<const __m256i*>(b)));
        sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
      }
      const __m512i bits = _mm512_castps_si512(sum);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      __m512i rounded = _mm512_srli_epi32(
          _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
      // Rounding would turn some NaN into infinity.
      rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(sum, sum, _CMP_UNORD_Q),
                                      _mm512_set1_epi32(0x7fc0));
      _mm512_mask_cvtepi32_storeu_epi16(y + r * ldy + h, mask, rounded);
    }
}

}  // namespace heteroinfer

#pragma GCC pop_options
