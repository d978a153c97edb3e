// 16 lanes of 32 bits with AVX-512F. Included inside a namespace after a `#pragma GCC target`. Uses the compiler's vector
// types if an operation becomes one instruction.
typedef float F16L __attribute__((vector_size(64)));
typedef int32_t I16L __attribute__((vector_size(64)));
typedef uint32_t U16L __attribute__((vector_size(64)));
typedef uint8_t B16L __attribute__((vector_size(16)));
typedef int8_t S16L __attribute__((vector_size(16)));
typedef uint16_t H16L __attribute__((vector_size(32)));

#define INLINE static inline __attribute__((always_inline))

struct Lanes {
  using F = F16L;
  using I = U16L;
  static constexpr float kInt4Gain = 1.0f, kFp8Gain = 256.0f;
  template <class T>
  INLINE T read(const void* from) {
    T value;
    __builtin_memcpy(&value, from, sizeof value);
    return value;
  }
  INLINE F zero() { return F{}; }
  INLINE F set1(float value) { return (F)_mm512_set1_ps(value); }
  INLINE F load(const void* from) { return read<F>(from); }
  INLINE I bits(const void* from) { return read<I>(from); }
  INLINE void store(float* to, F value) { __builtin_memcpy(to, &value, sizeof value); }
  INLINE F fma(F a, F b, F sum) { return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sum); }
  INLINE F mul(F a, F b) { return a * b; }
  INLINE F add(F a, F b) { return a + b; }
  INLINE F sub(F a, F b) { return a - b; }
  INLINE F as_float(I a) { return (F)a; }
  INLINE F convert(I a) { return __builtin_convertvector((I16L)a, F); }
  template <int N>
  INLINE I shl(I a) { return N ? a << N : a; }
  template <int N>
  INLINE I shr(I a) { return a >> N; }
  INLINE I both(I a, uint32_t b) { return a & (I{} + b); }
  INLINE I either(I a, I b) { return a | b; }
  // Converts the float16 in the lower or upper half of a register, or in memory, to float32.
  INLINE F lower_halves(I a) { return (F)_mm512_cvtph_ps(_mm512_castsi512_si256((__m512i)a)); }
  INLINE F upper_halves(I a) { return (F)_mm512_cvtph_ps(_mm512_extracti64x4_epi64((__m512i)a, 1)); }
  INLINE F from_f16(const void* from) { return (F)_mm512_cvtph_ps(read<__m256i>(from)); }
  INLINE F from_bf16(const void* from) { return (F)(__builtin_convertvector(read<H16L>(from), U16L) << 16); }
  INLINE F from_int8(const void* from) { return __builtin_convertvector(__builtin_convertvector(read<S16L>(from), I16L), F); }
  INLINE F from_e8m0(const void* from) {
    const U16L code = __builtin_convertvector(read<B16L>(from), U16L);
    U16L made = code << 23;
    made = code == 0 ? U16L{} + 0x00400000u : made;
    return (F)(code == 255 ? U16L{} + 0x7fc00000u : made);
  }
  INLINE F from_e4m3(const void* from) {
    const U16L code = __builtin_convertvector(read<B16L>(from), U16L), size = code & 127;
    const U16L small = (U16L)(__builtin_convertvector((I16L)size, F) * 0x1p-9f);
    U16L made = size < 8 ? small : (size << 20) + (120u << 23);
    made = size == 127 ? U16L{} + 0x7fc00000u : made;
    return (F)(made | (code & 128) << 24);
  }
  // Interleaves the lower or upper halves of each 16-byte lane of a and b.
  INLINE F interleave_low(F a, F b) { return __builtin_shuffle(a, b, I16L{0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29}); }
  INLINE F interleave_high(F a, F b) { return __builtin_shuffle(a, b, I16L{2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31}); }
  // `even_lanes` joins the 16-byte lanes 0 and 2 of a and of b, `odd_lanes` the lanes 1 and 3.
  INLINE F even_lanes(F a, F b) { return __builtin_shuffle(a, b, I16L{0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}); }
  INLINE F odd_lanes(F a, F b) { return __builtin_shuffle(a, b, I16L{4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31}); }
  template <int N>
  INLINE F int4(I a) {
    return __builtin_shuffle(F{0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1}, (I16L)shr<4 * N>(a));
  }
  template <int N>
  INLINE F fp4(I a) {
    return __builtin_shuffle(F{0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -.5f, -1, -1.5f, -2, -3, -4, -6}, (I16L)shr<4 * N>(a));
  }
};
