// Decoders of codes to float32, for instruction sets without bf16 products. Included after `Lanes`.

struct FloatDot {
  struct Input {
    float even, odd;
  };
  struct Weights {  // weights of 16 columns
    Lanes::F even, odd;
  };
  INLINE Lanes::F add(Lanes::F sum, const Weights& w, const Input& in) {
    return Lanes::fma(w.odd, Lanes::set1(in.odd), Lanes::fma(w.even, Lanes::set1(in.even), sum));
  }
};

// A decoder turns a line of kLine bytes into the weights of kPairs pairs of inputs for 32 columns, multiplied by 1 / kGain.
// The columns may be permuted; `order` restores their order.
struct InOrder {
  INLINE void order(Lanes::F&, Lanes::F&) {}
};

struct FloatBf16 : InOrder {
  static constexpr int kLine = 128, kPairs = 1;
  static constexpr float kGain = 1;
  inline __attribute__((always_inline)) void line(const uint8_t* w, FloatDot::Weights (&out)[1][2]) const {
    for (int h = 0; h < 2; h++) {
      const Lanes::I raw = Lanes::bits(w + 64 * h);
      out[0][h] = {Lanes::as_float(Lanes::shl<16>(raw)), Lanes::as_float(Lanes::both(raw, 0xffff0000u))};
    }
  }
};

// A pair of inputs: 16 columns of the even input, 16 of the odd input, then the same for the other 16 columns.
struct FloatF16 : InOrder {
  static constexpr int kLine = 128, kPairs = 1;
  static constexpr float kGain = 1;
  inline __attribute__((always_inline)) void line(const uint8_t* w, FloatDot::Weights (&out)[1][2]) const {
    for (int h = 0; h < 2; h++) out[0][h] = {Lanes::from_f16(w + 64 * h), Lanes::from_f16(w + 64 * h + 32)};
  }
};

// Decodes e4m3 as float16, which has the same form except for a factor of 256, even for denormal numbers. This does not
// decode NaN: the header's NaN markers add it to the sums.
struct FloatFp8 {
  static constexpr int kLine = 64, kPairs = 1;
  static constexpr float kGain = 256.0f;
  INLINE Lanes::I halves(Lanes::I upper) {
    return Lanes::either(Lanes::both(upper, 0x80008000u), Lanes::both(Lanes::shr<1>(upper), 0x3f803f80u));
  }
  inline __attribute__((always_inline)) void line(const uint8_t* w, FloatDot::Weights (&out)[1][2]) const {
    const Lanes::I raw = Lanes::bits(w), even = halves(Lanes::shl<8>(raw)), odd = halves(raw);
    out[0][0] = {Lanes::lower_halves(even), Lanes::lower_halves(odd)};
    out[0][1] = {Lanes::upper_halves(even), Lanes::upper_halves(odd)};
  }
  INLINE void order(Lanes::F& a, Lanes::F& b) {
    const Lanes::F low = Lanes::even_lanes(a, b), high = Lanes::odd_lanes(a, b);
    a = low, b = high;
  }
};

struct FloatInt8 {
  static constexpr int kLine = 64, kPairs = 1;
  static constexpr float kGain = 0x1p-24f;
  template <int Byte>
  INLINE Lanes::F of_byte(Lanes::I raw) {
    return Lanes::convert(Lanes::both(Lanes::shl<24 - 8 * Byte>(raw), 0xff000000u));
  }
  inline __attribute__((always_inline)) void line(const uint8_t* w, FloatDot::Weights (&out)[1][2]) const {
    const Lanes::I raw = Lanes::bits(w);
    out[0][0] = {of_byte<0>(raw), of_byte<1>(raw)};
    out[0][1] = {of_byte<2>(raw), of_byte<3>(raw)};
  }
  INLINE void order(Lanes::F& a, Lanes::F& b) {
    const Lanes::F low = Lanes::interleave_low(a, b), high = Lanes::interleave_high(a, b);
    a = low, b = high;
  }
};

// Order of the nibbles of a lane: N and N + 4 are the even and the odd input of pair N / 2, half N % 2.
struct FloatInt4 : InOrder {
  static constexpr int kLine = 64, kPairs = 2;
  static constexpr float kGain = Lanes::kInt4Gain;
  inline __attribute__((always_inline)) void line(const uint8_t* w, FloatDot::Weights (&out)[2][2]) const {
    const Lanes::I raw = Lanes::bits(w);
    out[0][0] = {Lanes::int4<0>(raw), Lanes::int4<4>(raw)};
    out[0][1] = {Lanes::int4<1>(raw), Lanes::int4<5>(raw)};
    out[1][0] = {Lanes::int4<2>(raw), Lanes::int4<6>(raw)};
    out[1][1] = {Lanes::int4<3>(raw), Lanes::int4<7>(raw)};
  }
};

struct FloatFp4 : InOrder {
  static constexpr int kLine = 64, kPairs = 2;
  static constexpr float kGain = 1;
  inline __attribute__((always_inline)) void line(const uint8_t* w, FloatDot::Weights (&out)[2][2]) const {
    const Lanes::I raw = Lanes::bits(w);
    out[0][0] = {Lanes::fp4<0>(raw), Lanes::fp4<4>(raw)};
    out[0][1] = {Lanes::fp4<1>(raw), Lanes::fp4<5>(raw)};
    out[1][0] = {Lanes::fp4<2>(raw), Lanes::fp4<6>(raw)};
    out[1][1] = {Lanes::fp4<3>(raw), Lanes::fp4<7>(raw)};
  }
};

// Packs inputs of any element type for the units [first, end), widened to float32. Also writes each unit's sums, unless
// `sums` is null.
static void pack_float_rows(void* out, float* sums, const void* x, long element, long ldx, int rows, long k, long first,
                            long end) {
  auto* to = static_cast<FloatDot::Input*>(out) + first * kUnitPairs * rows;
  for (long unit = first; unit < end; unit++) {
    if (sums)
      for (int r = 0; r < rows; r++) sums[unit * rows + r] = 0;
    for (long at = unit * kUnit; at < (unit + 1) * kUnit; at += 2, to += rows)
      for (int r = 0; r < rows; r++) {
        to[r].even = at < k ? element_at(x, element, r * ldx + at) : 0.0f;
        to[r].odd = at + 1 < k ? element_at(x, element, r * ldx + at + 1) : 0.0f;
        if (sums) sums[unit * rows + r] += to[r].even + to[r].odd;
      }
  }
}
