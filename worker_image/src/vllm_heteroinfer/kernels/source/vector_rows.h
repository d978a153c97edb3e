// The loop over rows and streams for both vector instruction sets. Each set includes this file after its
// `#pragma GCC target`, with `Dot` as a parameter, so that the loop is compiled for that set.
//
// `Dot::Input` is the packed form of two adjacent k of a row. `Dot::Weights` is the register form of 16 columns x 2 k;
// `Dot::of(words)` makes it from a register. `Dot::add(sum, weights, input)` multiplies 16 columns.

// c[R][32] += x * w over `units` units of S streams.
template <class Dot, int R, int S>
static void multiply_rows(float* c, const Stream* streams, long units) {
  // With few rows, each stream has its own sums, because one long chain of additions would be too slow.
  constexpr int A = R * S <= 8 ? S : 1;
  __m512 sum[A][R][2];
  for (int a = 0; a < A; a++)
    for (int r = 0; r < R; r++)
      for (int h = 0; h < 2; h++) sum[a][r][h] = a ? _mm512_setzero_ps() : _mm512_loadu_ps(c + r * 32 + h * 16);
  const uint16_t* w[S];
  const char* ahead[S];
  const typename Dot::Input* x[S];
  for (int s = 0; s < S; s++) {
    w[s] = streams[s].w;
    ahead[s] = reinterpret_cast<const char*>(streams[s].ahead);
    x[s] = static_cast<const typename Dot::Input*>(streams[s].x);
  }
  const long pairs = units * (kUnit / 2);
  for (long p = 0; p < pairs; p++) {
#pragma GCC unroll 4
    for (int s = 0; s < S; s++) {
      const typename Dot::Weights w0 = Dot::load(w[s] + p * 64), w1 = Dot::load(w[s] + p * 64 + 32);
      _mm_prefetch(ahead[s] + p * 128, _MM_HINT_T0);
      _mm_prefetch(ahead[s] + p * 128 + 64, _MM_HINT_T0);
      const typename Dot::Input* in = x[s] + p * R;
#pragma GCC unroll 12
      for (int r = 0; r < R; r++) {
        sum[s % A][r][0] = Dot::add(sum[s % A][r][0], w0, in[r]);
        sum[s % A][r][1] = Dot::add(sum[s % A][r][1], w1, in[r]);
      }
    }
  }
  for (int r = 0; r < R; r++)
    for (int h = 0; h < 2; h++) {
      __m512 total = sum[0][r][h];
      for (int a = 1; a < A; a++) total = _mm512_add_ps(total, sum[a][r][h]);
      _mm512_storeu_ps(c + r * 32 + h * 16, total);
    }
}

// Calls `multiply_rows` with the number of streams as a constant, so that the sums stay in registers.
template <class Dot, int R>
static void multiply_streams(float* c, const Stream* streams, int count, long units) {
  switch (count) {
    case 4: return multiply_rows<Dot, R, 4>(c, streams, units);
    case 2: return multiply_rows<Dot, R, 2>(c, streams, units);
    default: return multiply_rows<Dot, R, 1>(c, streams, units);
  }
}

// c[rows][32] += x * w over `units` units of each stream. The number of rows must be a constant for the sums to stay in
// registers.
template <class Dot>
static void multiply(float* c, int rows, const Stream* streams, int count, long units, Share) {
  switch (rows) {
    case 1: return multiply_streams<Dot, 1>(c, streams, count, units);
    case 2: return multiply_streams<Dot, 2>(c, streams, count, units);
    case 3: return multiply_streams<Dot, 3>(c, streams, count, units);
    case 4: return multiply_streams<Dot, 4>(c, streams, count, units);
    case 5: return multiply_streams<Dot, 5>(c, streams, count, units);
    case 6: return multiply_streams<Dot, 6>(c, streams, count, units);
    case 7: return multiply_streams<Dot, 7>(c, streams, count, units);
    case 8: return multiply_streams<Dot, 8>(c, streams, count, units);
    case 9: return multiply_streams<Dot, 9>(c, streams, count, units);
    case 10: return multiply_streams<Dot, 10>(c, streams, count, units);
    case 11: return multiply_streams<Dot, 11>(c, streams, count, units);
    default: return multiply_streams<Dot, 12>(c, streams, count, units);
  }
}

// Packs the inputs of `rows` rows for the units [first, end) of k: a pair of adjacent inputs of each row in turn.
// Writes zeros beyond k.
template <class Dot>
static void pack_rows(void* out, const uint16_t* x, long ldx, int rows, long k, long first, long end) {
  auto* to = static_cast<typename Dot::Input*>(out) + first * (kUnit / 2) * rows;
  for (long at = first * kUnit; at < end * kUnit; at += 2, to += rows)
    for (int r = 0; r < rows; r++) {
      const uint16_t* from = x + r * ldx + at;
      to[r] = Dot::input(at < k ? from[0] : uint16_t{0}, at + 1 < k ? from[1] : uint16_t{0});
    }
}

// Kernel::enter and Kernel::leave of instruction sets without state.
static void do_nothing() {}
