// Routed experts with coded weights: y[row] = sum over j of weight[row][j] * (down(act(gate(x), up(x))) + bias) of expert
// ids[row][j].
//
// As in experts.cpp, all blocks of all chosen experts form one list. Each thread computes a run of the list, then takes
// blocks from the runs of other threads. A block is never split. An expert with many rows is in the list several times,
// once for each band of its rows.
#include "coded_call.h"

#include <omp.h>

using namespace heteroinfer;

namespace {

constexpr long kBandRows = 128;     // rows of an expert that share one read of a block
constexpr long kFixedCostRows = 32;  // a block with this many rows takes about twice the time of a block with one
constexpr long kInputBytes = 4;     // maximum size of a packed input
constexpr long kMostChoices = 256;
constexpr long kStrip = 256;        // columns of the result that a task sums up

thread_local Buffer plan_buffer, inputs_buffer, input_sums_buffer, middle_buffer, middle_sums_buffer, gates_buffer,
    downs_buffer, rows_buffer, block_buffer;

// Rows of a chosen expert. `first` is the position of its first row in the list of (row, choice) sorted by expert.
struct Chosen {
  long expert, first;
  CodedChoice choice;
  Rows rows;
  long cost() const { return kFixedCostRows + rows.m; }
};

struct Group {
  const Chosen* chosen;
  long group;
};

// Same fields as in kernels/coded_experts.py.
struct Layer {
  const uint8_t *w13, *w2;  // packed weights of all experts; in a gated w13, blocks of gates and ups alternate
  Format format13, format2;
  const float *bias13, *bias2;  // [experts][columns of w13, in packed order], [experts][hidden]; or null
  long experts, hidden, inner, element;
  Activation activation;
};

// One of the two matrix products, for all chosen experts.
struct Product {
  const uint8_t* w;
  Layout layout;
  char* inputs;
  float* input_sums;  // null without zero points
  float* results;     // position -> columns, padded to whole blocks
  long width() const { return layout.blocks * kColumns; }
  long row_bytes() const { return layout.units * kUnit * kInputBytes; }
  const uint8_t* block(const Chosen& chosen, long block) const {
    return w + chosen.expert * layout.bytes() + block * layout.block_bytes;
  }
  PackedRows rows(const Chosen& chosen) const {
    return {inputs + chosen.first * row_bytes(), input_sums ? input_sums + chosen.first * layout.units : nullptr};
  }
  // Packs the elements [count][layout.k] of a group of rows.
  void pack(const Group& group, const void* elements, long element) const {
    const Chosen& chosen = *group.chosen;
    const CodedKernel& kernel = *chosen.choice.kernel;
    const CodedInputs to = rows(chosen).group(kernel, chosen.rows, group.group, layout.units);
    kernel.pack_rows(const_cast<void*>(to.x), const_cast<float*>(to.sums), elements, element, layout.k,
                     chosen.rows.count(group.group), layout.k, 0, layout.units);
  }
};

// Computes `count` blocks of one expert, starting at position `at` of the list of blocks. Prefetches the block at
// position `following`, which is probably read next.
void multiply_blocks_of_expert(const Chosen* chosen, const Product& product, long at, long count, long following) {
  const long blocks = product.layout.blocks, block = at % blocks;
  const Chosen& own = chosen[at / blocks];
  const Chosen& later = chosen[following / blocks];
  const long rows = own.rows.m;
  const size_t bytes = static_cast<size_t>(count * rows * kColumns) * sizeof(float);
  auto* c = static_cast<float*>(std::memset(block_buffer.reserve(bytes), 0, bytes));
  CodedStream streams[kMaxStreams];
  for (long s = 0; s < count; s++)
    streams[s] = {product.block(own, block + s), product.block(later, std::min(following % blocks + s, blocks - 1))};
  multiply_coded(own.choice, own.rows, product.rows(own), product.layout, streams, static_cast<int>(count), 0,
                 product.layout.units, c);
  float* out = product.results + own.first * product.width() + block * kColumns;
  for (long s = 0; s < count; s++)
    for (long r = 0; r < rows; r++)
      std::memcpy(out + r * product.width() + s * kColumns, c + (s * rows + r) * kColumns, kColumns * sizeof(float));
}

// Computes this thread's blocks of a product, then blocks of other threads.
void multiply_all(const Chosen* chosen, long chosen_count, const Product& product, Run* runs, long thread, long threads) {
  const long blocks = product.layout.blocks, last = chosen_count * blocks - 1;
  const auto at_once = [&](long which, long left) { return coded_at_once(chosen[which].choice, chosen[which].rows, left); };
  const auto own = [&](long from, long left) { return at_once(from / blocks, std::min(left, blocks - from % blocks)); };
  const auto others = [&](long until, long left) {
    return at_once((until - 1) / blocks, std::min((left + 1) / 2, (until - 1) % blocks + 1));
  };
  run_own_tasks(runs[thread], own, [&](long at, long count) {
    multiply_blocks_of_expert(chosen, product, at, count, std::min(at + count, last));
  });
  run_tasks_of_others(runs, thread, threads, others, [&](long at, long count) {
    multiply_blocks_of_expert(chosen, product, at, count, at);
  });
}

// Divides the list of all blocks into runs of equal cost.
void make_runs(const Chosen* chosen, long count, long blocks, Run* runs, long parts) {
  long total = 0, which = 0, before = 0, first = 0;
  for (long i = 0; i < count; i++) total += chosen[i].cost() * blocks;
  for (long part = 0; part < parts; part++) {
    const long target = total * (part + 1) / parts;
    while (which < count && before + chosen[which].cost() * blocks <= target) before += chosen[which++].cost() * blocks;
    const long end = which * blocks + (which < count ? (target - before) / chosen[which].cost() : 0);
    new (runs + part) Run(first, end);
    first = end;
  }
}

// Returns memory for `count` elements from the start of `memory`. Moves `memory` to the next cache line behind them.
template <class T>
T* carve(char*& memory, long count) {
  T* taken = reinterpret_cast<T*>(memory);
  memory += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
  return taken;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// y[m][hidden] (row stride ldy) from x[m][hidden] (row stride ldx), both of the layer's element type. weights: [m][topk]
// float32. ids: [m][topk]; an id that is not an expert adds nothing. inner is a multiple of 32.
void heteroinfer_coded_experts(const Layer* layer, void* y, long ldy, const void* x, long ldx, const float* weights,
                               const int32_t* ids, long m, long topk) {
  if (m <= 0) return;
  const long element = layer->element, each = element == kElementF32 ? 4 : 2, experts = layer->experts;
  const long choices = m * topk, most_threads = omp_get_max_threads(), most = choices / kBandRows + std::min(experts, choices);
  const size_t bytes = static_cast<size_t>(experts + 1 + 2 * choices) * sizeof(long) +
                       static_cast<size_t>(most) * sizeof(Chosen) + static_cast<size_t>(choices) * sizeof(Group) +
                       2 * static_cast<size_t>(most_threads) * sizeof(Run) + 8 * 64;
  char* memory = static_cast<char*>(plan_buffer.reserve(bytes));
  long* starts = carve<long>(memory, experts + 1);
  long* row = carve<long>(memory, choices);
  long* position = carve<long>(memory, choices);
  Chosen* chosen = carve<Chosen>(memory, most);
  Group* groups = carve<Group>(memory, choices);
  Run* up_runs = carve<Run>(memory, most_threads);
  Run* down_runs = carve<Run>(memory, most_threads);
  std::memset(starts, 0, static_cast<size_t>(experts + 1) * sizeof(long));
  for (long i = 0; i < choices; i++)
    if (ids[i] >= 0 && ids[i] < experts) starts[ids[i] + 1]++;
  for (long e = 0; e < experts; e++) starts[e + 1] += starts[e];
  long chosen_count = 0, group_count = 0;
  for (long e = 0; e < experts; e++)
    for (long first = starts[e]; first < starts[e + 1]; first += kBandRows) {
      const long rows = std::min(kBandRows, starts[e + 1] - first);
      // Both products use the same kernel, unless it does not support the code of one of them.
      const bool halves = layer->format13.code == kF16 || layer->format2.code == kF16;
      const CodedChoice choice = choose_coded(halves ? long{kF16} : layer->format13.code, element, rows);
      const Chosen& one = *new (chosen + chosen_count++) Chosen{e, first, choice, rows_of(*choice.kernel, rows)};
      for (long g = 0; g < one.rows.groups; g++) groups[group_count++] = {&one, g};
    }
  const long positions = starts[experts];
  for (long i = 0; i < choices; i++) {  // now `starts` become ends
    const bool counts = ids[i] >= 0 && ids[i] < experts;
    position[i] = counts ? starts[ids[i]]++ : -1;
    if (counts) row[position[i]] = i / topk;
  }
  const auto floats = [positions](Buffer& buffer, long count) {
    return static_cast<float*>(buffer.reserve(static_cast<size_t>(std::max(1L, positions * count)) * sizeof(float)));
  };
  const long columns13 = layer->activation.gated ? 2 * layer->inner : layer->inner;
  const auto product = [&](const uint8_t* w, const Format& format, long n, long k, Buffer& inputs, Buffer& sums,
                           Buffer& results) {
    Product made{w, Layout(format, n, k), nullptr, nullptr, nullptr};
    made.inputs = reinterpret_cast<char*>(floats(inputs, made.layout.units * kUnit));
    if (format.zeros) made.input_sums = floats(sums, made.layout.units);
    made.results = floats(results, made.width());
    return made;
  };
  const Product up = product(layer->w13, layer->format13, columns13, layer->hidden, inputs_buffer, input_sums_buffer,
                             gates_buffer);
  const Product down = product(layer->w2, layer->format2, layer->hidden, layer->inner, middle_buffer, middle_sums_buffer,
                               downs_buffer);
  make_runs(chosen, chosen_count, up.layout.blocks, up_runs, most_threads);
  make_runs(chosen, chosen_count, down.layout.blocks, down_runs, most_threads);
#pragma omp parallel
  {
    const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const auto mine = [thread, threads](long count, long part) { return count * (thread + part) / threads; };
    for (long g = mine(group_count, 0); g < mine(group_count, 1); g++) {
      const Chosen& own = *groups[g].chosen;
      const long first = own.first + own.rows.first(groups[g].group), count = own.rows.count(groups[g].group);
      const long row_bytes = layer->hidden * each;
      char* rows = static_cast<char*>(rows_buffer.reserve(static_cast<size_t>(count * row_bytes)));
      for (long r = 0; r < count; r++)
        std::memcpy(rows + r * row_bytes, static_cast<const char*>(x) + row[first + r] * ldx * each,
                    static_cast<size_t>(row_bytes));
      up.pack(groups[g], rows, element);
    }
#pragma omp barrier
    kAmx.enter();
    multiply_all(chosen, chosen_count, up, up_runs, thread, most_threads);
#pragma omp barrier
    for (long g = mine(group_count, 0); g < mine(group_count, 1); g++) {
      const Chosen& own = *groups[g].chosen;
      const long first = own.first + own.rows.first(groups[g].group);
      const int count = own.rows.count(groups[g].group);
      void* rows = rows_buffer.reserve(static_cast<size_t>(count * layer->inner * each));
      own.choice.rows->activate(rows, element, layer->inner, up.results + first * up.width(), up.width(), count,
                                layer->inner, layer->bias13 ? layer->bias13 + own.expert * columns13 : nullptr,
                                layer->activation);
      down.pack(groups[g], rows, element);
    }
#pragma omp barrier
    multiply_all(chosen, chosen_count, down, down_runs, thread, most_threads);
    kAmx.leave();
#pragma omp barrier
    const RowsKernel& rows = *choose_coded(kF16, element, 1).rows;
    const long strips = ceil_div(layer->hidden, kStrip);
    for (long task = mine(m * strips, 0); task < mine(m * strips, 1); task++) {
      const long r = task / strips, column = task % strips * kStrip;
      const float *parts[kMostChoices], *biases[kMostChoices];
      float shares[kMostChoices];
      long count = 0;
      for (long j = 0; j < topk; j++) {
        const long at = position[r * topk + j];
        if (at < 0) continue;
        parts[count] = down.results + at * down.width() + column;
        biases[count] = layer->bias2 ? layer->bias2 + ids[r * topk + j] * layer->hidden + column : nullptr;
        shares[count++] = weights[r * topk + j];
      }
      rows.weighted_sum(static_cast<char*>(y) + (r * ldy + column) * each, element, parts, biases, shares, count,
                        std::min(kStrip, layer->hidden - column));
    }
  }
}

}  // extern "C"
#pragma GCC visibility pop
