// The loop over rows and blocks of coded weights for all instruction sets. Each set includes this file after its
// `#pragma GCC target` and its `Lanes`, so that the loop is compiled for that set.

// The scales of a group for 16 of the 32 columns of a block: the first 16 if `half` is 0, the last 16 if it is 1.
INLINE Lanes::F scales_of(const uint8_t* block, const Layout& layout, long group, int half) {
  const uint8_t* at = block + layout.scales + group * layout.scale_bytes;
  switch (layout.format.scale) {
    case kNoScale: return Lanes::set1(1.0f);
    case kBlockF32: {
      float scale;
      __builtin_memcpy(&scale, at, 4);
      return Lanes::set1(scale);
    }
    case kColumnF32: return Lanes::load(at + half * 64);
    case kColumnBf16: return Lanes::from_bf16(at + half * 32);
    case kColumnF16: return Lanes::from_f16(at + half * 32);
    case kColumnE8m0: return Lanes::from_e8m0(at + half * 16);
    default:  // kColumnE4m3: the header begins with a float32 factor for each column
      return Lanes::mul(Lanes::from_e4m3(at + half * 16), Lanes::load(block + half * 64));
  }
}

// c[S][R][32] += x * w over the units [first, end) of S blocks. Sums the products of the inputs that share a scale,
// then multiplies each sum by the scale. Prefetches the units that are `distance` units ahead.
template <class Dot, class Decoder, int R, int S>
static void multiply_blocks(float* c, const CodedStream* streams, const CodedInputs& inputs, const Layout& layout,
                            long first, long end, long distance) {
  const Decoder decoder{};
  const auto* x = static_cast<const typename Dot::Input*>(inputs.x) + first * kUnitPairs * R;
  const long last = end * kUnitPairs, unit_bytes = layout.unit_bytes;
  const long unit_header = layout.group_pairs ? layout.zeros / layout.units : 0;
  long pair = first * kUnitPairs;
  while (pair < last) {
    const long group = layout.group_pairs ? pair / layout.group_pairs : 0, begin = pair;
    const long stop = layout.group_pairs && (group + 1) * layout.group_pairs < last ? (group + 1) * layout.group_pairs : last;
    Lanes::F sum[S][R][2];
    for (int s = 0; s < S; s++)
      for (int r = 0; r < R; r++) sum[s][r][0] = sum[s][r][1] = Lanes::zero();
    while (pair < stop) {
      const long unit = pair / kUnitPairs, until = (unit + 1) * kUnitPairs < stop ? (unit + 1) * kUnitPairs : stop;
      const long later = unit + distance, offset = pair % kUnitPairs / Decoder::kPairs * Decoder::kLine;
      const uint8_t *w[S], *ahead[S];
      for (int s = 0; s < S; s++) {
        const uint8_t* then = later < end ? streams[s].block : streams[s].next;
        const long place = later < end ? later : later - end + first;
        w[s] = streams[s].block + layout.header + unit * unit_bytes + offset;
        ahead[s] = then + layout.header + place * unit_bytes + offset;
        if (unit_header) {
          _mm_prefetch(reinterpret_cast<const char*>(then) + place * unit_header, _MM_HINT_T0);
          if (unit_header > 64) _mm_prefetch(reinterpret_cast<const char*>(then) + place * unit_header + 64, _MM_HINT_T0);
        }
      }
      for (long at = 0; pair < until; pair += Decoder::kPairs, at += Decoder::kLine, x += R * Decoder::kPairs) {
#pragma GCC unroll 4
        for (int s = 0; s < S; s++) {
          typename Dot::Weights weights[Decoder::kPairs][2];
          decoder.line(w[s] + at, weights);
          for (int line = 0; line < Decoder::kLine; line += 64)
            _mm_prefetch(reinterpret_cast<const char*>(ahead[s]) + at + line, _MM_HINT_T0);
#pragma GCC unroll 2
          for (int p = 0; p < Decoder::kPairs; p++)
#pragma GCC unroll 12
            for (int r = 0; r < R; r++) {
              sum[s][r][0] = Dot::add(sum[s][r][0], weights[p][0], x[p * R + r]);
              sum[s][r][1] = Dot::add(sum[s][r][1], weights[p][1], x[p * R + r]);
            }
        }
      }
    }
    for (int s = 0; s < S; s++) {
      const Lanes::F gain = Lanes::set1(Decoder::kGain);
      const Lanes::F scale[2] = {Lanes::mul(scales_of(streams[s].block, layout, group, 0), gain),
                                 Lanes::mul(scales_of(streams[s].block, layout, group, 1), gain)};
      Lanes::F zero[2] = {Lanes::zero(), Lanes::zero()};
      if (layout.format.zeros)
        for (int h = 0; h < 2; h++)
          zero[h] = Lanes::mul(Lanes::from_int8(streams[s].block + layout.zeros + group * kColumns + h * 16),
                               Lanes::set1(-1.0f / Decoder::kGain));
      for (int r = 0; r < R; r++) {
        Lanes::F part[2] = {sum[s][r][0], sum[s][r][1]};
        Decoder::order(part[0], part[1]);
        float inputs_sum = 0;
        if (layout.format.zeros)
          for (long unit = begin / kUnitPairs; unit * kUnitPairs < pair; unit++) inputs_sum += inputs.sums[unit * R + r];
        for (int h = 0; h < 2; h++) {
          float* total = c + (s * R + r) * 32 + h * 16;
          if (layout.format.zeros) part[h] = Lanes::fma(zero[h], Lanes::set1(inputs_sum), part[h]);
          Lanes::F sums = Lanes::fma(part[h], scale[h], Lanes::load(total));
          if (layout.format.code == kFp8 && pair == last)
            sums = Lanes::add(sums, Lanes::load(streams[s].block + layout.nan_markers + h * 64));
          Lanes::store(total, sums);
        }
      }
    }
  }
}

// Multiplies `count` blocks, as many at once as have their sums in registers.
template <class Dot, class Decoder, int R>
static void multiply_in_registers(float* c, const CodedStream* streams, int count, const CodedInputs& inputs,
                          const Layout& layout, long first, long end, long distance) {
  constexpr int kMost = R <= 2 ? 4 : R <= 4 ? 2 : 1;  // more sums would not fit into registers
  const int at_once = count < kMost ? count : kMost;
  for (; count > 0; count -= at_once, streams += at_once, c += at_once * R * 32) switch (at_once) {
      case 4: multiply_blocks<Dot, Decoder, R, kMost>(c, streams, inputs, layout, first, end, distance); break;
      case 2: multiply_blocks<Dot, Decoder, R, (kMost < 2 ? 1 : 2)>(c, streams, inputs, layout, first, end, distance); break;
      default: multiply_blocks<Dot, Decoder, R, 1>(c, streams, inputs, layout, first, end, distance);
    }
}

// c[count][rows][32] += x * w over the units [first, end) of `count` blocks. Calls the function for the number of rows,
// 1 to Most, which must be a constant for the sums to stay in registers.
template <class Dot, class Decoder, int Most, int R = 1>
static void multiply_coded(float* c, int rows, const CodedStream* streams, int count, const CodedInputs& inputs,
                           const Layout& layout, long first, long end, long distance) {
  if constexpr (R == Most) {
    multiply_in_registers<Dot, Decoder, R>(c, streams, count, inputs, layout, first, end, distance);
  } else {
    if (rows == R)
      multiply_in_registers<Dot, Decoder, R>(c, streams, count, inputs, layout, first, end, distance);
    else
      multiply_coded<Dot, Decoder, Most, R + 1>(c, rows, streams, count, inputs, layout, first, end, distance);
  }
}

// c[rows][32] += scale * (part - zero * sums), with the scales and zero points of one group. Used after another kernel
// has multiplied widened codes; widened FP8 has its NaN already.
[[maybe_unused]] static void add_scaled_rows(float* c, const float* part, int rows, const uint8_t* block, const Layout& layout, long group,
                            const float* sums) {
  for (int h = 0; h < 2; h++) {
    const Lanes::F scale = scales_of(block, layout, group, h);
    Lanes::F zero = Lanes::zero();
    if (layout.format.zeros)
      zero = Lanes::mul(Lanes::from_int8(block + layout.zeros + group * kColumns + h * 16), Lanes::set1(-1.0f));
    for (int r = 0; r < rows; r++) {
      Lanes::F own = Lanes::load(part + r * 32 + h * 16);
      if (layout.format.zeros) own = Lanes::fma(zero, Lanes::set1(sums[r]), own);
      float* total = c + r * 32 + h * 16;
      Lanes::store(total, Lanes::fma(own, scale, Lanes::load(total)));
    }
  }
}
