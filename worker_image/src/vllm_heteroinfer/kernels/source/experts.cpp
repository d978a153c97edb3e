// Routed experts of a mixture in bf16 or FP8: y[row] = sum over j of weight[row][j] * down(silu(gate(x)) * up(x)) of expert
// ids[row][j].
//
// A step reads the weights of the chosen experts once. As in linear.h, everything serves this stream:
//   - An expert's w13 is packed as a linear weight in which blocks of 32 gate columns and 32 up columns alternate. Its w2
//     is packed as a linear weight of hidden columns. The experts follow each other.
//   - All blocks of all chosen experts form one list, divided into equal runs, one for each thread. A block is never
//     split. While a thread reads the last unit of an expert, it prefetches the first unit of the next. A thread that
//     has finished its run takes blocks from the ends of other runs, because some threads are slower: they share a core
//     or memory with other work.
//   - Rows are gathered and packed for each expert. Sums stay in float32 up to the activation, and up to the end.
//   - FP8 is widened exactly to bf16 as it is read. Scales multiply float32 sums of 128 k. For FP8 a thread reads several
//     blocks at once instead of several positions of one block, because scales change along k.
#include "call.h"

#include <omp.h>

#include <cstring>

using namespace heteroinfer;

namespace {

// A unit with this many rows of an expert takes about twice the time of a unit with one row.
constexpr long kFixedCostRows = 64;
constexpr long kInputBytes = 4;    // maximum size of a packed input

constexpr long kSerialLogits = 4096;  // for up to this many logits, one thread is done before the others wake up

// Number of FP8 blocks that are widened in turn, 128 k at a time. Widening prefetches the next 128 k of the same block, which
// arrive while the other block is multiplied.
constexpr int kWidenedBlocks = 2;

thread_local Buffer plan_buffer, inputs_buffer, hidden_buffer, gates_buffer, downs_buffer, rows_buffer, sums_buffer;
thread_local Buffer wide_buffer;

// The rows of a chosen expert. `first` is the position of its first row in the list of (row, choice) sorted by expert.
struct Chosen {
  Chosen(long expert, long first, long m, bool fp8)
      : expert(expert),
        first(first),
        choice(choose_kernel(m, fp8)),
        rows(*choice.kernel, m),
        cost(kFixedCostRows + m) {}
  long expert, first;
  Choice choice;
  Rows rows;
  long cost;  // cost of a block, relative to others
};

struct Group {
  const Chosen* chosen;
  long group;
};

// The plan of a call. A position is an index into the list of all (row, choice), sorted by expert.
struct Call {
  const uint16_t* x;
  long ldx, hidden, inner, topk;
  const Chosen* chosen;
  long experts;         // number of chosen experts
  const Group* groups;  // groups of rows of all chosen experts
  long group_count;
  const long* row;    // position -> row
  const long* position;  // row * topk + j -> position; -1 for a choice that adds nothing
  char* inputs;       // position -> packed x
  char* middle;       // position -> packed input of w2
  float* gates;       // position -> 2 * inner sums
  float* downs;       // position -> hidden sums
};

// One of the two matrix products, for all chosen experts.
struct Product {
  const void* w;        // weights of all experts
  const float* scales;  // scales of all experts, [rows of scales][one for each 128 k]; null for bf16
  long columns, k;
  bool gated;  // blocks of gate and up columns alternate; the scales of all gates come before those of all ups
  const char* inputs;
  float* sums;  // position -> columns
  bool direct;  // `inputs` of a single row are x itself
  long blocks() const { return columns / kColumns; }
  long units() const { return k / kUnit; }
  template <class Element>
  const Element* block(const Chosen& chosen, long block) const {
    return static_cast<const Element*>(w) + (chosen.expert * blocks() + block) * units() * kUnitElements;
  }
  const float* block_scales(const Chosen& chosen, long block) const {
    const long parts = gated ? 2 : 1, rows = ceil_div(columns / parts, kScaled);
    const long row = block % parts * rows + block / parts * kColumns / kScaled;
    return scales + (chosen.expert * parts * rows + row) * ceil_div(k, kScaled);
  }
};

// Whether the kernel can read the row of this expert where it is: a single row of bf16 pairs is in packed order.
bool is_packed_already(const Chosen& chosen) { return chosen.rows.m == 1 && chosen.choice.kernel->x_bytes == 2; }

// The inputs of a group of rows from a unit of k on, in packed order.
const char* group_inputs(const Call& call, const Product& product, const Chosen& chosen, long group, long unit) {
  if (product.direct && is_packed_already(chosen))
    return reinterpret_cast<const char*>(call.x + call.row[chosen.first] * call.ldx + unit * kUnit);
  const long first = chosen.rows.first(group), at = first * product.k + unit * kUnit * chosen.rows.count(group);
  return product.inputs + chosen.first * product.k * kInputBytes + at * chosen.choice.kernel->x_bytes;
}

// c[m][32] = x * w of a block. Near its end it prefetches the start of `next`.
void multiply_block(const Call& call, const Product& product, const Chosen& chosen, long block, const uint16_t* next,
                    float* c) {
  const Kernel& kernel = *chosen.choice.kernel;
  const uint16_t* w = product.block<uint16_t>(chosen, block);
  const long units = product.units(), streams = units < chosen.choice.streams ? 1 : chosen.choice.streams;
  const long each = units / streams, chunk = chosen.rows.groups > 1 ? std::max<long>(1, 16 / streams) : each;
  const long distance = std::min<long>(chosen.choice.prefetch, each);
  std::memset(c, 0, static_cast<size_t>(chosen.rows.m * kColumns) * sizeof(float));
  Stream stream[kMaxStreams];
  for (long from = 0; from < each; from += chunk) {
    const long to = std::min(each, from + chunk);
    for (long group = 0; group < chosen.rows.groups; group++)
      for (long at = from; at < to;) {
        const bool own = at < each - distance;
        const long until = own ? std::min(to, each - distance) : to;
        for (long s = 0; s < streams; s++) {
          const long unit = s * each + at;
          stream[s].w = w + unit * kUnitElements;
          stream[s].x = group_inputs(call, product, chosen, group, unit);
          stream[s].ahead = group || !distance ? stream[s].w
                            : own              ? stream[s].w + distance * kUnitElements
                                               : next + (s * each + at - (each - distance)) * kUnitElements;
        }
        kernel.multiply(c + chosen.rows.first(group) * kColumns, chosen.rows.count(group), stream,
                        static_cast<int>(streams), until - at, {0, 1});
        at = until;
      }
  }
  for (long unit = streams * each; unit < units; unit++)
    for (long group = 0; group < chosen.rows.groups; group++) {
      stream[0] = {w + unit * kUnitElements, w + unit * kUnitElements,
                   group_inputs(call, product, chosen, group, unit)};
      kernel.multiply(c + chosen.rows.first(group) * kColumns, chosen.rows.count(group), stream, 1, 1, {0, 1});
    }
}

// A block of a chosen expert.
struct Item {
  long chosen, block;
};

// c[count][m][32] = x * w of consecutive FP8 blocks. Near their ends they prefetch the start of `next`.
void multiply_fp8(const Call& call, const Product& product, const Chosen& chosen, long block, long count, Item next,
                  float* c) {
  const Kernel& kernel = *chosen.choice.kernel;
  const Fp8& fp8 = *kernel.fp8;
  const long units = product.units(), rows = chosen.rows.m;
  const long distance = std::min(chosen.choice.prefetch * kScaledUnits, units);
  Fp8Stream streams[kMaxStreams];
  for (long s = 0; s < count; s++)
    streams[s] = {product.block<uint8_t>(chosen, block + s),
                  product.block<uint8_t>(call.chosen[next.chosen], std::min(next.block + s, product.blocks() - 1)),
                  product.block_scales(chosen, block + s)};
  std::memset(c, 0, static_cast<size_t>(count * rows * kColumns) * sizeof(float));
  if (rows <= fp8.rows) {
    fp8.multiply(c, static_cast<int>(rows), streams, static_cast<int>(count),
                 group_inputs(call, product, chosen, 0, 0), units, distance);
    return;
  }
  const size_t part_bytes = static_cast<size_t>(kernel.max_rows * kColumns) * sizeof(float);
  auto* wide = static_cast<uint16_t*>(wide_buffer.reserve(kScaledUnits * kUnitElements * 2 + part_bytes));
  auto* part = reinterpret_cast<float*>(wide + kScaledUnits * kUnitElements);
  for (long from = 0; from < units; from += kScaledUnits)
    for (long s = 0; s < count; s++) {
      const long until = std::min(from + kScaledUnits, units);
      for (long unit = from; unit < until; unit++)
        fp8.widen(wide + (unit - from) * kUnitElements, streams[s].w + unit * kUnitElements,
                  fp8_ahead(streams[s], unit, units, distance));
      for (long group = 0; group < chosen.rows.groups; group++) {
        const int some = chosen.rows.count(group);
        const Stream stream = {wide, wide, group_inputs(call, product, chosen, group, from)};
        std::memset(part, 0, static_cast<size_t>(some * kColumns) * sizeof(float));
        kernel.multiply(part, some, &stream, 1, until - from, {0, 1});
        add_scaled(c + (s * rows + chosen.rows.first(group)) * kColumns, part, streams[s].scales[from / kScaledUnits],
                   some * kColumns);
      }
    }
}

// Number of FP8 blocks to read at once, if the expert has `left` blocks left.
long blocks_at_once(const Chosen& chosen, long left) {
  long count = chosen.choice.streams;
  if (chosen.rows.m > chosen.choice.kernel->fp8->rows) count = std::min<long>(count, kWidenedBlocks);
  while (count > left) count /= 2;
  return count;
}

// Divides the list of all blocks into runs of equal cost.
void make_runs(const Call& call, long blocks, Run* runs, long parts) {
  long total = 0, chosen = 0, before = 0, first = 0;
  for (long i = 0; i < call.experts; i++) total += call.chosen[i].cost * blocks;
  for (long part = 0; part < parts; part++) {
    const long target = total * (part + 1) / parts;
    while (chosen < call.experts && before + call.chosen[chosen].cost * blocks <= target)
      before += call.chosen[chosen++].cost * blocks;
    const long end = chosen * blocks + (chosen < call.experts ? (target - before) / call.chosen[chosen].cost : 0);
    new (runs + part) Run(first, end);
    first = end;
  }
}

// Computes `count` blocks of one expert, starting at position `at` of the list of blocks. Prefetches the block at
// position `following`, which is probably read next.
void multiply_blocks_of_expert(const Call& call, const Product& product, long at, long count, long following) {
  const long blocks = product.blocks(), block = at % blocks;
  const Chosen& chosen = call.chosen[at / blocks];
  const long rows = chosen.rows.m;
  const Item next = {following / blocks, following % blocks};
  float* c =
      static_cast<float*>(sums_buffer.reserve(static_cast<size_t>(count * rows * kColumns) * sizeof(float)));
  if (product.scales)
    multiply_fp8(call, product, chosen, block, count, next, c);
  else
    multiply_block(call, product, chosen, block, product.block<uint16_t>(call.chosen[next.chosen], next.block), c);
  float* out = product.sums + chosen.first * product.columns + block * kColumns;
  for (long s = 0; s < count; s++)
    for (long r = 0; r < rows; r++)
      std::memcpy(out + r * product.columns + s * kColumns, c + (s * rows + r) * kColumns, kColumns * sizeof(float));
}

// Computes this thread's blocks of a product, then blocks of other threads.
void multiply_all(const Call& call, const Product& product, Run* runs, long thread, long threads) {
  const long blocks = product.blocks(), last = call.experts * blocks - 1;
  const auto at_once = [&](long expert, long left) {
    return product.scales ? blocks_at_once(call.chosen[expert], left) : 1;
  };
  const auto own_count = [&](long from, long left) {
    return at_once(from / blocks, std::min(left, blocks - from % blocks));
  };
  const auto others_count = [&](long until, long left) {
    return at_once((until - 1) / blocks, std::min((left + 1) / 2, (until - 1) % blocks + 1));
  };
  run_own_tasks(runs[thread], own_count, [&](long at, long count) {
    multiply_blocks_of_expert(call, product, at, count, std::min(at + count, last));
  });
  run_tasks_of_others(runs, thread, threads, others_count, [&](long at, long count) {
    multiply_blocks_of_expert(call, product, at, count, at);
  });
}

// Packs the rows of x that chose an expert, as inputs of the first product.
void pack_inputs(const Call& call, const Group& group) {
  const Chosen& chosen = *group.chosen;
  if (is_packed_already(chosen)) return;
  const Kernel& kernel = *chosen.choice.kernel;
  const long first = chosen.rows.first(group.group);
  const int count = chosen.rows.count(group.group);
  auto* rows = static_cast<uint16_t*>(rows_buffer.reserve(static_cast<size_t>(count * call.hidden) * 2));
  for (int r = 0; r < count; r++)
    std::memcpy(rows + r * call.hidden, call.x + call.row[chosen.first + first + r] * call.ldx,
                static_cast<size_t>(call.hidden) * 2);
  char* to = call.inputs + chosen.first * call.hidden * kInputBytes + first * call.hidden * kernel.x_bytes;
  kernel.pack_rows(to, rows, call.hidden, count, call.hidden, 0, call.hidden / kUnit);
}

// Computes the activations of a group's sums, and packs them as inputs of the second product.
void activate(const Call& call, const Group& group) {
  const Chosen& chosen = *group.chosen;
  const Kernel& kernel = *chosen.choice.kernel;
  const long first = chosen.rows.first(group.group);
  const int count = chosen.rows.count(group.group);
  const float* gates = call.gates + (chosen.first + first) * 2 * call.inner;
  char* to = call.middle + chosen.first * call.inner * kInputBytes + first * call.inner * kernel.x_bytes;
  if (is_packed_already(chosen)) {
    silu_and_multiply(reinterpret_cast<uint16_t*>(to), call.inner, gates, 2 * call.inner, 1, call.inner);
    return;
  }
  auto* rows = static_cast<uint16_t*>(rows_buffer.reserve(static_cast<size_t>(count * call.inner) * 2));
  silu_and_multiply(rows, call.inner, gates, 2 * call.inner, count, call.inner);
  kernel.pack_rows(to, rows, call.inner, count, call.inner, 0, call.inner / kUnit);
}

// Returns memory for `count` elements from the start of `memory`. Moves `memory` to the next cache line behind them.
template <class T>
T* carve(char*& memory, long count) {
  T* taken = reinterpret_cast<T*>(memory);
  memory += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
  return taken;
}

// A layer's parameters for a row, except the logits.
struct Layer {
  const void *w13, *w2;                   // in the form that `heteroinfer_experts` takes
  const float *scales13, *scales2;
  const uint16_t* gate;  // packed router weight [experts][hidden]; null if the caller passes logits
  long hidden, inner;
  Routing routing;
};

thread_local Buffer logits_buffer, weights_buffer, ids_buffer, scores_buffer;

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void heteroinfer_linear(uint16_t* y, long ldy, const uint16_t* x, long ldx, const uint16_t* w, const uint16_t* bias,
                        long m, long n, long k);

// Writes weights[m][topk] and ids[m][topk] of the experts chosen for each row, from logits[m][experts] in bf16 or float32.
void heteroinfer_choose_experts(float* weights, int32_t* ids, const void* logits, int bf16, const Routing* routing,
                                long m) {
  const long row_bytes = routing->experts * (bf16 ? 2 : 4);
  const auto choose = [&](long row) {
    auto* scratch = static_cast<float*>(
        scores_buffer.reserve(static_cast<size_t>(choosing_floats(routing->experts)) * sizeof(float)));
    choose_experts(weights + row * routing->topk, ids + row * routing->topk,
                   static_cast<const char*>(logits) + row * row_bytes, bf16, *routing, scratch);
  };
  if (m * routing->experts <= kSerialLogits) {
    for (long row = 0; row < m; row++) choose(row);
    return;
  }
#pragma omp parallel for
  for (long row = 0; row < m; row++) choose(row);
}

// y[m][hidden] (row stride ldy) from x[m][hidden] (row stride ldx). ids: [m][topk]; an id that is not an expert adds
// nothing. weights: [m][topk]. w13: for each expert a packed weight of 2 * inner columns, in which blocks of 32 gates and
// 32 ups alternate. w2: for each expert a packed weight [hidden][inner]. hidden and inner are multiples of 32. With scales
// both weights are FP8: scales13[experts][2 * ceil(inner / 128)][ceil(hidden / 128)], all gates before all ups, and
// scales2[experts][ceil(hidden / 128)][ceil(inner / 128)]. The scales are null for bf16.
void heteroinfer_experts(uint16_t* y, long ldy, const uint16_t* x, long ldx, const void* w13, const void* w2,
                         const float* scales13, const float* scales2, const float* weights, const int32_t* ids,
                         long m, long topk, long experts, long hidden, long inner) {
  if (m <= 0) return;
  const long choices = m * topk, most_threads = omp_get_max_threads();
  // The plan: positions of (row, choice) by expert, the chosen experts, their groups of rows, and the runs of the threads.
  const size_t bytes = (static_cast<size_t>(experts) + 1) * sizeof(long) + static_cast<size_t>(choices) * 2 * sizeof(long) +
                       static_cast<size_t>(std::min(experts, choices)) * sizeof(Chosen) +
                       static_cast<size_t>(choices) * sizeof(Group) + 2 * static_cast<size_t>(most_threads) * sizeof(Run) + 7 * 64;
  char* memory = static_cast<char*>(plan_buffer.reserve(bytes));
  long* starts = carve<long>(memory, experts + 1);
  long* row = carve<long>(memory, choices);
  long* position = carve<long>(memory, choices);
  Chosen* chosen = carve<Chosen>(memory, std::min(experts, choices));
  Group* groups = carve<Group>(memory, choices);
  Run* up_runs = carve<Run>(memory, most_threads);
  Run* down_runs = carve<Run>(memory, most_threads);
  std::memset(starts, 0, static_cast<size_t>(experts + 1) * sizeof(long));
  for (long i = 0; i < choices; i++)
    if (ids[i] >= 0 && ids[i] < experts) starts[ids[i] + 1]++;
  for (long e = 0; e < experts; e++) starts[e + 1] += starts[e];
  long chosen_count = 0, group_count = 0;
  for (long e = 0; e < experts; e++) {
    const long count = starts[e + 1] - starts[e];
    if (!count) continue;
    const Chosen& one = *new (chosen + chosen_count++) Chosen(e, starts[e], count, scales13);
    for (long g = 0; g < one.rows.groups; g++) groups[group_count++] = {&one, g};
  }
  const long positions = starts[experts];
  for (long i = 0; i < choices; i++) {  // now `starts` become ends
    const bool counts = ids[i] >= 0 && ids[i] < experts;
    position[i] = counts ? starts[ids[i]]++ : -1;
    if (counts) row[position[i]] = i / topk;
  }
  const auto reserve = [positions](Buffer& buffer, long each) {
    return static_cast<char*>(buffer.reserve(static_cast<size_t>(std::max(1L, positions * each))));
  };
  const Call call{x,           ldx, hidden, inner, topk, chosen, chosen_count, groups, group_count, row, position,
                  reserve(inputs_buffer, hidden * kInputBytes), reserve(hidden_buffer, inner * kInputBytes),
                  reinterpret_cast<float*>(reserve(gates_buffer, 2 * inner * long{sizeof(float)})),
                  reinterpret_cast<float*>(reserve(downs_buffer, hidden * long{sizeof(float)}))};
  const Product up{w13, scales13, 2 * inner, hidden, true, call.inputs, call.gates, true};
  const Product down{w2, scales2, hidden, inner, false, call.middle, call.downs, false};
  make_runs(call, up.blocks(), up_runs, most_threads);
  make_runs(call, down.blocks(), down_runs, most_threads);
  bool packs = false;
  for (long i = 0; i < chosen_count; i++) packs |= !is_packed_already(chosen[i]);
#pragma omp parallel
  {
    const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const auto mine = [thread, threads](long count, long part) { return count * (thread + part) / threads; };
    if (packs) {
      for (long g = mine(group_count, 0); g < mine(group_count, 1); g++) pack_inputs(call, groups[g]);
#pragma omp barrier
    }
    kAmx.enter();
    multiply_all(call, up, up_runs, thread, most_threads);
#pragma omp barrier
    for (long g = mine(group_count, 0); g < mine(group_count, 1); g++) activate(call, groups[g]);
#pragma omp barrier
    multiply_all(call, down, down_runs, thread, most_threads);
    kAmx.leave();
#pragma omp barrier
    const long strips = ceil_div(hidden, 256);
    for (long task = mine(m * strips, 0); task < mine(m * strips, 1); task++) {
      const long r = task / strips, column = task % strips * 256;
      const float* parts[256];
      float shares[256];
      long count = 0;
      for (long j = 0; j < topk; j++) {
        if (position[r * topk + j] < 0) continue;
        parts[count] = call.downs + position[r * topk + j] * hidden + column;
        shares[count++] = weights[r * topk + j];
      }
      weighted_sum(y + r * ldy + column, parts, shares, count, std::min<long>(256, hidden - column));
    }
  }
}

// Computes a layer's routed experts from its hidden states x[m][hidden]: the logits, the choice of experts, and the
// weighted sum. `logits` are [m][experts] in bf16 or float32; they are ignored if the layer has a gate.
void heteroinfer_mixture(const Layer* layer, uint16_t* y, long ldy, const uint16_t* x, long ldx, const void* logits,
                         int bf16, long m) {
  if (m <= 0) return;
  const Routing& routing = layer->routing;
  if (layer->gate) {
    auto* made = static_cast<uint16_t*>(logits_buffer.reserve(static_cast<size_t>(m * routing.experts) * 2));
    heteroinfer_linear(made, routing.experts, x, ldx, layer->gate, nullptr, m, routing.experts, layer->hidden);
    logits = made;
    bf16 = 1;
  }
  const size_t choices = static_cast<size_t>(m * routing.topk);
  auto* weights = static_cast<float*>(weights_buffer.reserve(choices * sizeof(float)));
  auto* ids = static_cast<int32_t*>(ids_buffer.reserve(choices * sizeof(int32_t)));
  heteroinfer_choose_experts(weights, ids, logits, bf16, &routing, m);
  heteroinfer_experts(y, ldy, x, ldx, layer->w13, layer->w2, layer->scales13, layer->scales2, weights, ids, m,
                      routing.topk, routing.experts, layer->hidden, layer->inner);
}

}  // extern "C"
#pragma GCC visibility pop
