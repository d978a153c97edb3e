// vector_rows.h for FP8 weights, which are widened to bf16 in registers. Widen::pair(w, first, second) produces the bf16
// of a pair of k: first for 16 columns, second for the next 16, in the form that `Dot::of` takes.

// c[S][R][32] += x * w over `units` units of S blocks. Sums 128 k, then multiplies the sum by the scale of these 128 k.
template <class Dot, class Widen, int R, int S>
static void multiply_fp8_rows(float* c, const Fp8Stream* streams, const void* inputs, long units, long distance) {
  const Widen widen;
  const auto* x = static_cast<const typename Dot::Input*>(inputs);
  for (long scaled = 0; scaled < units; scaled += kScaledUnits) {
    __m512 sum[S][R][2];
    for (int s = 0; s < S; s++)
      for (int r = 0; r < R; r++) sum[s][r][0] = sum[s][r][1] = _mm512_setzero_ps();
    const long end = scaled + kScaledUnits < units ? scaled + kScaledUnits : units;
    for (long unit = scaled; unit < end; unit++) {
      const uint8_t *w[S], *ahead[S];
      for (int s = 0; s < S; s++) {
        w[s] = streams[s].w + unit * kUnitElements;
        ahead[s] = fp8_ahead(streams[s], unit, units, distance);
      }
      for (long p = 0; p < kUnit / 2; p++, x += R) {
#pragma GCC unroll 4
        for (int s = 0; s < S; s++) {
          __m512i first, second;
          widen.pair(w[s] + p * 64, first, second);
          _mm_prefetch(reinterpret_cast<const char*>(ahead[s]) + p * 64, _MM_HINT_T0);
          const typename Dot::Weights w0 = Dot::of(first), w1 = Dot::of(second);
#pragma GCC unroll 4
          for (int r = 0; r < R; r++) {
            sum[s][r][0] = Dot::add(sum[s][r][0], w0, x[r]);
            sum[s][r][1] = Dot::add(sum[s][r][1], w1, x[r]);
          }
        }
      }
    }
    for (int s = 0; s < S; s++) {
      const __m512 scale = _mm512_set1_ps(streams[s].scales[scaled / kScaledUnits]);
      for (int r = 0; r < R; r++)
        for (int h = 0; h < 2; h++) {
          float* total = c + (s * R + r) * 32 + h * 16;
          _mm512_storeu_ps(total, _mm512_fmadd_ps(sum[s][r][h], scale, _mm512_loadu_ps(total)));
        }
    }
  }
}

// Multiplies `count` blocks, as many at once as have their sums in registers.
template <class Dot, class Widen, int R>
static void multiply_fp8_streams(float* c, const Fp8Stream* streams, int count, const void* x, long units,
                                 long distance) {
  constexpr int kMost = R <= 2 ? 4 : 2;  // more sums would not fit into registers beside the tables for widening
  const int at_once = count < kMost ? count : kMost;
  for (; count > 0; count -= at_once, streams += at_once, c += at_once * R * 32) switch (at_once) {
      case 4: multiply_fp8_rows<Dot, Widen, R, kMost>(c, streams, x, units, distance); break;
      case 2: multiply_fp8_rows<Dot, Widen, R, 2>(c, streams, x, units, distance); break;
      default: multiply_fp8_rows<Dot, Widen, R, 1>(c, streams, x, units, distance);
    }
}

constexpr int kFp8Rows = 4;

// c[count][rows][32] += x * w over `units` units of `count` blocks. The number of rows must be a constant for the sums
// to stay in registers.
template <class Dot, class Widen>
static void multiply_fp8(float* c, int rows, const Fp8Stream* streams, int count, const void* x, long units,
                         long distance) {
  switch (rows) {
    case 1: return multiply_fp8_streams<Dot, Widen, 1>(c, streams, count, x, units, distance);
    case 2: return multiply_fp8_streams<Dot, Widen, 2>(c, streams, count, x, units, distance);
    case 3: return multiply_fp8_streams<Dot, Widen, 3>(c, streams, count, x, units, distance);
    default: return multiply_fp8_streams<Dot, Widen, 4>(c, streams, count, x, units, distance);
  }
}

// Writes a unit of FP8 weights as bf16, in the packed order of linear layers, and prefetches `ahead`.
template <class Widen>
static void widen_unit(uint16_t* out, const uint8_t* w, const uint8_t* ahead) {
  const Widen widen;
  for (long p = 0; p < kUnit / 2; p++) {
    __m512i first, second;
    widen.pair(w + p * 64, first, second);
    _mm_prefetch(reinterpret_cast<const char*>(ahead) + p * 64, _MM_HINT_T0);
    _mm512_storeu_si512(out + p * 64, first);
    _mm512_storeu_si512(out + p * 64 + 32, second);
  }
}
