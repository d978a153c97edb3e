// Elements of inputs and outputs, and operations on sums of rows. Included inside a namespace after a
// `#pragma GCC target` and `Lanes`.

// Converts a float16 to float32, without rounding. AVX-512F and AVX2 have instructions for vectors only.
INLINE float half_to_float(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, size = half & 0x7fffu;
  uint32_t bits;
  float value;
  if (size >= 0x7c00)
    bits = size << 13 | 0x7f800000u;
  else if (size >= 0x400)
    bits = (size << 13) + (112u << 23);
  else {
    value = static_cast<float>(size) * 0x1p-24f;
    __builtin_memcpy(&bits, &value, 4);
  }
  bits |= sign;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// Converts a float32 to float16, rounded to nearest even.
INLINE uint16_t float_to_half(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint32_t sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
  uint32_t half;
  if (size > 0x7f800000u)
    half = 0x7e00;
  else if (size >= 0x477ff000u)  // 65520 and more round to infinity
    half = 0x7c00;
  else if (size >= 0x38800000u)
    half = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
  else {
    float magnitude;
    __builtin_memcpy(&magnitude, &size, 4);
    magnitude += 0.5f;  // the last bit of the sum is 2^-24
    __builtin_memcpy(&half, &magnitude, 4);
    half -= 0x3f000000u;
  }
  return static_cast<uint16_t>(sign | half);
}

// Converts a float32 to bf16, rounded to nearest even.
INLINE uint16_t float_to_bf16(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint32_t rounded = (bits + (bits >> 16 & 1) + 0x7fff) >> 16;
  return static_cast<uint16_t>(value != value ? 0x7fc0 : rounded);
}

// Returns the element at index `at` of x as float32.
INLINE float element_at(const void* x, long element, long at) {
  if (element == kElementF32) return static_cast<const float*>(x)[at];
  const uint16_t half = static_cast<const uint16_t*>(x)[at];
  if (element == kElementF16) return half_to_float(half);
  const uint32_t bits = static_cast<uint32_t>(half) << 16;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// Writes values[count] to y from index `at` on, rounded to y's element type.
INLINE void put_elements(void* y, long element, long at, const float* values, long count) {
  if (element == kElementF32) {
    __builtin_memcpy(static_cast<float*>(y) + at, values, static_cast<unsigned long>(count) * 4);
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(y) + at;
  if (element == kElementF16)
    for (long i = 0; i < count; i++) to[i] = float_to_half(values[i]);
  else
    for (long i = 0; i < count; i++) to[i] = float_to_bf16(values[i]);
}

// y[rows][columns] = c[rows][ldc] + bias, rounded to the element type.
static void store_elements(void* y, long element, long ldy, const float* c, long ldc, int rows, long columns,
                           const void* bias) {
  for (int r = 0; r < rows; r++)
    for (long from = 0; from < columns; from += 32) {
      const long count = columns - from < 32 ? columns - from : 32;
      float values[32];
      for (long i = 0; i < count; i++) values[i] = c[r * ldc + from + i] + (bias ? element_at(bias, element, from + i) : 0.0f);
      put_elements(y, element, r * ldy + from, values, count);
    }
}

typedef float Wide __attribute__((vector_size(32)));
typedef int32_t WideInts __attribute__((vector_size(32)));

// e^x of 8 elements, by the method of `exponential` in linear_avx512.cpp: x = n ln 2 + r, a polynomial of degree 6 for
// e^r, and n added to the exponent in two halves, because 2^n alone may overflow. x is limited to -104 to 89.
INLINE Wide exponential_of_8(Wide x) {
  const Wide low = Wide{} - 104.0f, high = Wide{} + 89.0f;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const float kMagic = 12582912.0f;
  const Wide shifted = x * 1.44269504f + kMagic, n = shifted - kMagic;
  const Wide r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Wide p = r * (1.0f / 720) + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const WideInts exponent = (WideInts)shifted - (WideInts)(Wide{} + kMagic), half = exponent >> 1;
  return (Wide)((WideInts)p + (half << 23)) * (Wide)((exponent - half + 127) << 23);
}

// 1 / (1 + e^-x); NaN for NaN, which `exponential_of_8` may lose.
INLINE Wide sigmoid(Wide x) {
  const Wide made = 1.0f / (1.0f + exponential_of_8(-x));
  return x != x ? x : made;
}

// Phi(x), the cumulative normal distribution, by Abramowitz and Stegun 7.1.26, within 1e-7.
INLINE Wide normal_distribution(Wide x) {
  const Wide z = (Wide)((WideInts)x & 0x7fffffff) * 0.70710678f, t = 1.0f / (1.0f + 0.3275911f * z);
  const Wide poly =
      t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  const Wide tail = 0.5f * poly * exponential_of_8(-z * z);
  const Wide made = x < 0.0f ? tail : 1.0f - tail;
  return x != x ? x : made;
}

// Returns the activation of 8 gates, without the product with the ups.
INLINE Wide apply_activation(Wide gate, const Activation& activation) {
  switch (activation.kind) {
    case kSwish: return gate * sigmoid(activation.alpha * gate);
    case kGelu: return gate * normal_distribution(gate);
    case kGeluTanh: return gate * sigmoid(1.5957691216f * (gate + 0.044715f * gate * gate * gate));
    case kSwishLimited: {
      const Wide limit = Wide{} + activation.limit, made = gate * sigmoid(activation.alpha * gate);
      return made > limit ? limit : made;
    }
    default: {
      const Wide positive = gate < 0.0f ? Wide{} : gate;
      return positive * positive;
    }
  }
}

// h[rows][n] = the activation of sums[rows][ld] + bias. In the sums, blocks of 32 gates and 32 ups alternate.
static void activate_elements(void* h, long element, long ldh, const float* sums, long ld, int rows, long n,
                              const float* bias, const Activation& activation) {
  const long each = activation.gated ? 2 * kColumns : kColumns;
  const Wide limit = Wide{} + activation.limit;
  for (int r = 0; r < rows; r++)
    for (long column = 0; column < n; column += 8) {
      const long at = column / kColumns * each + column % kColumns;
      Wide gate = Lanes::read<Wide>(sums + r * ld + at);
      if (bias) gate += Lanes::read<Wide>(bias + at);
      if (activation.kind != kSwishLimited) gate = gate > limit ? limit : gate;
      Wide made = apply_activation(gate, activation);
      if (activation.gated) {
        Wide up = Lanes::read<Wide>(sums + r * ld + at + kColumns);
        if (bias) up += Lanes::read<Wide>(bias + at + kColumns);
        up = up > limit ? limit : up;
        up = up < -limit ? -limit : up;
        made *= up + activation.offset;
      }
      float values[8];
      __builtin_memcpy(values, &made, sizeof values);
      put_elements(h, element, r * ldh + column, values, 8);
    }
}

// y[n] = sum over i of weights[i] * (parts[i] + biases[i]), rounded to the element type.
static void weighted_elements(void* y, long element, const float* const* parts, const float* const* biases,
                              const float* weights, long count, long n) {
  for (long column = 0; column < n; column += 32) {
    float sums[32] = {};
    for (long i = 0; i < count; i++)
      for (long j = 0; j < 32; j++)
        sums[j] += weights[i] * (parts[i][column + j] + (biases && biases[i] ? biases[i][column + j] : 0.0f));
    put_elements(y, element, column, sums, 32);
  }
}
