// Linear layers with coded weights, and how their weights are packed.
#include "coded_call.h"

#include <omp.h>

using namespace heteroinfer;

namespace {

constexpr long kFewRows = 64;              // for up to this many rows, a thread takes single blocks or parts of a block
constexpr long kBandRows = 128;            // with more rows, this many share one read of a block
constexpr long kPassRows = 1024;           // the inputs of this many rows are packed at once
constexpr long kTasks = 256;               // number of tasks per matrix, if its inputs suffice
constexpr long kPartUnits = 32;            // minimum units in a part of a block
constexpr long kSerialBytes = 64 << 10;    // smaller weights use one thread: waking the others takes longer
constexpr long kWidened = 4;               // units that are widened into the first cache for tiles

thread_local Buffer inputs_buffer, input_sums_buffer, results_buffer, block_buffer, wide_buffer, runs_buffer;

// Widens weights and multiplies them by tiles: all rows, for one part of a block with a common scale at a time.
void multiply_widened(const CodedChoice& choice, const Rows& rows, const PackedRows& inputs, const Layout& layout,
                      const CodedStream& stream, long first, long end, float* c) {
  const auto widen = choice.kernel->widen[layout.format.code];
  const size_t part_bytes = static_cast<size_t>(rows.m * kColumns) * sizeof(float);
  auto* wide = static_cast<uint16_t*>(wide_buffer.reserve(kWidened * kUnitElements * 2 + part_bytes + rows.m * 4));
  auto* part = reinterpret_cast<float*>(wide + kWidened * kUnitElements);
  float* sums = part + rows.m * kColumns;
  const long last = end * kUnitPairs;
  for (long pair = first * kUnitPairs; pair < last;) {
    const long group = layout.group_pairs ? pair / layout.group_pairs : 0;
    const long stop = layout.group_pairs ? std::min(last, (group + 1) * layout.group_pairs) : last;
    std::memset(part, 0, part_bytes);
    if (inputs.sums) std::memset(sums, 0, static_cast<size_t>(rows.m) * sizeof(float));
    while (pair < stop) {
      const long unit = pair / kUnitPairs, until = std::min(unit + kWidened, ceil_div(stop, kUnitPairs));
      for (long at = unit; at < until; at++) {
        const long later = at + choice.prefetch;
        const uint8_t* ahead = later < end ? stream.block + layout.header + later * layout.unit_bytes
                                           : stream.next + layout.header + (later - end + first) * layout.unit_bytes;
        widen(wide + (at - unit) * kUnitElements, stream.block + layout.header + at * layout.unit_bytes, ahead,
              std::max(0L, pair - at * kUnitPairs), std::min(kUnitPairs, stop - at * kUnitPairs));
      }
      for (long g = 0; g < rows.groups; g++) {
        const int count = rows.count(g);
        const CodedInputs in = inputs.group(*choice.kernel, rows, g, layout.units);
        const Stream tiles = {wide, wide, static_cast<const char*>(in.x) + unit * kUnit * count * choice.kernel->x_bytes};
        kAmx.multiply(part + rows.first(g) * kColumns, count, &tiles, 1, until - unit, {0, 1});
        for (long at = unit; in.sums && at < until; at++)
          for (int r = 0; r < count; r++) sums[rows.first(g) + r] += in.sums[at * count + r];
      }
      pair = std::min(stop, until * kUnitPairs);
    }
    choice.rows->add_scaled(c, part, static_cast<int>(rows.m), stream.block, layout, group, sums);
  }
}

// Packs bf16 rows for AMX. Also writes each unit's sums of inputs, unless `sums` is null.
void pack_tile_rows(void* out, float* sums, const void* x, long, long ldx, int rows, long k, long first, long end) {
  const auto* from = static_cast<const uint16_t*>(x);
  kAmx.pack_rows(out, from, ldx, rows, k, first, end);
  for (long unit = first; sums && unit < end; unit++)
    for (int r = 0; r < rows; r++) {
      float sum = 0;
      for (long i = unit * kUnit; i < std::min(k, (unit + 1) * kUnit); i++) {
        const uint32_t bits = static_cast<uint32_t>(from[r * ldx + i]) << 16;
        float value;
        std::memcpy(&value, &bits, 4);
        sum += value;
      }
      sums[unit * rows + r] = sum;
    }
}

// The place of the code of (column, k) in a unit: a byte, or one nibble of it.
struct Place {
  long byte;
  int shift;
};
// Returns the place of a code. The order differs between widths, so that each kernel decodes registers without
// shuffles.
Place place_of(long code, long column, long k) {
  const long pair = k / 2, parity = k % 2, half = column / 16, lane = column % 16;
  switch (code) {
    case kBf16: return {pair * 128 + column * 4 + parity * 2, 0};
    case kF16: return {pair * 128 + half * 64 + parity * 32 + lane * 2, 0};
    case kFp8:
    case kInt8: return {pair * 64 + fp8_offset(column, parity), 0};
    default: {
      const long nibble = parity * 4 + pair % 2 * 2 + half;
      return {pair / 2 * 64 + lane * 4 + nibble / 2, static_cast<int>(nibble % 2 * 4)};
    }
  }
}

struct Places {
  explicit Places(long code) {
    for (long column = 0; column < kColumns; column++)
      for (long k = 0; k < kUnit; k++) at[column][k] = place_of(code, column, k);
  }
  Place at[kColumns][kUnit];
};

struct Call {
  CodedChoice choice;
  Layout layout;
  Rows rows;
  PackedRows inputs;
  const uint8_t* w;
  char* y;
  long element, ldy;
  const char* bias;
  long element_bytes() const { return element == kElementF32 ? 4 : 2; }
  CodedStream stream(long block, long next) const {
    return {w + block * layout.block_bytes, w + std::min(next, layout.blocks - 1) * layout.block_bytes};
  }
  void store(long block, const float* c, long ldc, long first, int count) const {
    const long column = block * kColumns, each = element_bytes();
    choice.rows->store(y + (first * ldy + column) * each, element, ldy, c, ldc, count, std::min(kColumns, layout.n - column),
                       bias ? bias + column * each : nullptr);
  }
};

// Returns `count` empty runs. Later calls use the same memory.
Run* empty_runs(long count) {
  auto* runs = static_cast<Run*>(runs_buffer.reserve(static_cast<size_t>(count) * sizeof(Run)));
  for (long i = 0; i < count; i++) new (runs + i) Run;
  return runs;
}

// Returns `count` zeros in a buffer.
float* reserve_zeros(Buffer& buffer, long count) {
  const size_t bytes = static_cast<size_t>(count) * sizeof(float);
  void* memory = buffer.reserve(bytes);
  return static_cast<float*>(std::memset(memory, 0, bytes));
}

// Computes a call with few rows. A task is a part of a block, or a whole block. The number of tasks depends only on the
// shape, so the result does not depend on the number of threads.
void linear_few(const Call& call, bool serial) {
  const Layout& layout = call.layout;
  const long group_units = std::max(1L, layout.format.group / kUnit), rows = call.rows.m, blocks = layout.blocks;
  const long most = std::max(1L, std::min(layout.units / kPartUnits, ceil_div(kTasks, blocks)));
  const long part_units = ceil_div(ceil_div(layout.units, most), group_units) * group_units;
  const long parts = ceil_div(layout.units, part_units), width = blocks * kColumns;
  const long most_threads = serial ? 1 : omp_get_max_threads();
  Run* runs = empty_runs(most_threads);
  float* results = nullptr;
  if (parts > 1)
    results = static_cast<float*>(results_buffer.reserve(static_cast<size_t>(parts * rows * width) * sizeof(float)));
#pragma omp parallel if (!serial)
  {
    const long thread = omp_get_thread_num(), threads = omp_get_num_threads(), tasks = parts * blocks;
    if (call.choice.kernel->full) kAmx.enter();
    const auto compute = [&](long task, long count) {
      const long part = task / blocks, block = task % blocks;
      float* c = reserve_zeros(block_buffer, count * rows * kColumns);
      CodedStream streams[kMaxStreams];
      for (long s = 0; s < count; s++) streams[s] = call.stream(block + s, block + count + s);
      multiply_coded(call.choice, call.rows, call.inputs, layout, streams, static_cast<int>(count), part * part_units,
                     std::min(layout.units, (part + 1) * part_units), c);
      for (long s = 0; s < count; s++) {
        const float* from = c + s * rows * kColumns;
        if (parts == 1) call.store(block + s, from, kColumns, 0, static_cast<int>(rows));
        for (long r = 0; parts > 1 && r < rows; r++)
          std::memcpy(results + (part * rows + r) * width + (block + s) * kColumns, from + r * kColumns,
                      kColumns * sizeof(float));
      }
    };
    const auto own = [&](long from, long left) {
      return coded_at_once(call.choice, call.rows, std::min(left, blocks - from % blocks));
    };
    const auto others = [&](long until, long left) {
      return coded_at_once(call.choice, call.rows, std::min((left + 1) / 2, (until - 1) % blocks + 1));
    };
    runs[thread].set(tasks * thread / threads, tasks * (thread + 1) / threads);
    run_own_tasks(runs[thread], own, compute);
    run_tasks_of_others(runs, thread, threads, others, compute);
    if (call.choice.kernel->full) kAmx.leave();
    if (parts > 1) {
#pragma omp barrier
      for (long block = blocks * thread / threads; block < blocks * (thread + 1) / threads; block++)
        for (long r = 0; r < rows; r++) {
          float sums[kColumns] = {};
          for (long part = 0; part < parts; part++)
            for (long i = 0; i < kColumns; i++) sums[i] += results[(part * rows + r) * width + block * kColumns + i];
          call.store(block, sums, kColumns, r, 1);
        }
    }
  }
}

// Computes a call with many rows. A task is a band of rows times one block of columns.
void linear_many(const Call& call) {
  const long groups = std::max(1L, kBandRows / call.rows.each), bands = ceil_div(call.rows.groups, groups);
  Run* runs = empty_runs(omp_get_max_threads());
#pragma omp parallel
  {
    const long thread = omp_get_thread_num(), threads = omp_get_num_threads(), tasks = bands * call.layout.blocks;
    if (call.choice.kernel->full) kAmx.enter();
    const auto compute = [&](long task, long) {
      const long band = task / call.layout.blocks, block = task % call.layout.blocks;
      const long first = call.rows.first(band * groups);
      Rows rows = call.rows;
      rows.m = std::min(rows.m, call.rows.first((band + 1) * groups)) - first;
      rows.groups = ceil_div(rows.m, rows.each);
      const CodedInputs in = call.inputs.group(*call.choice.kernel, call.rows, band * groups, call.layout.units);
      float* c = reserve_zeros(block_buffer, rows.m * kColumns);
      const CodedStream stream = call.stream(block, block + 1);
      multiply_coded(call.choice, rows, {static_cast<const char*>(in.x), in.sums}, call.layout, &stream, 1, 0,
                     call.layout.units, c);
      call.store(block, c, kColumns, first, static_cast<int>(rows.m));
    };
    runs[thread].set(tasks * thread / threads, tasks * (thread + 1) / threads);
    run_own_tasks(runs[thread], one_task, compute);
    run_tasks_of_others(runs, thread, threads, one_task, compute);
    if (call.choice.kernel->full) kAmx.leave();
  }
}

}  // namespace

// Returns the AMX kernel. It has no loop of its own for a code: `multiply_widened` widens the codes and uses the tiles.
CodedKernel heteroinfer::coded_amx() {
  CodedKernel kernel = {"amx_bf16", 32, 2, true, pack_tile_rows, {}, {}, {}};
  for (int code = 0; code < kCodes; code++) kernel.widen[code] = kCodedAvx512Bf16.widen[code];
  return kernel;
}

// Multiplies `count` blocks by all rows. Kernels differ in the method for a code: a loop over all rows, AMX tiles after
// widening, or a loop over groups of few rows.
void heteroinfer::multiply_coded(const CodedChoice& choice, const Rows& rows, const PackedRows& inputs, const Layout& layout,
                                 const CodedStream* streams, int count, long first, long end, float* c) {
  const auto multiply = choice.kernel->multiply[layout.format.code];
  if (const auto multiply_all = choice.kernel->multiply_all[layout.format.code]; multiply_all && rows.m > kStreamRows) {
    for (int s = 0; s < count; s++)
      multiply_all(c + s * rows.m * kColumns, rows.m, rows.each, streams[s], {inputs.x, inputs.sums}, layout, first, end,
                   choice.prefetch);
    return;
  }
  if (!multiply) return multiply_widened(choice, rows, inputs, layout, streams[0], first, end, c);
  for (long group = 0; group < rows.groups; group++)
    multiply(c + rows.first(group) * kColumns, rows.count(group), streams, count,
             inputs.group(*choice.kernel, rows, group, layout.units), layout, first, end, choice.prefetch);
}

#pragma GCC visibility push(default)
extern "C" {

// Returns the size in bytes of the packed w[n][k], or 0 if no kernel supports the format. A group is the inputs of a
// column that share a scale; 0 means that all inputs of a column share it.
long heteroinfer_coded_bytes(const Format* format, long n, long k) {
  const long group = format->group;
  if (n <= 0 || k <= 0) return 0;
  if (format->code < 0 || format->code >= kCodes || format->scale < 0 || format->scale > kColumnE4m3) return 0;
  if (group < 0 || group % 16) return 0;
  // The size of a group must be a multiple of the unit, or divide it.
  if (group && group % kUnit && kUnit % group) return 0;
  // With zero points, the size of a group must be a multiple of the unit.
  if (format->zeros && (group % kUnit || !group)) return 0;
  return Layout(*format, n, k).bytes();
}

// Writes offsets and sizes of the packed w[n][k], in bytes: block, unit, header, first scale, scales of a group, first zero
// point. Other code must not compute them itself from the format.
void heteroinfer_coded_layout(const Format* format, long n, long k, long* out) {
  const Layout layout(*format, n, k);
  const long all[] = {layout.block_bytes, layout.unit_bytes,  layout.header,
                      layout.scales,      layout.scale_bytes, layout.zeros};
  std::memcpy(out, all, sizeof all);
}

// Writes the places of a unit's codes to out[column][k], as numbers of half bytes.
void heteroinfer_coded_places(long code, int32_t* out) {
  for (long column = 0; column < kColumns; column++)
    for (long k = 0; k < kUnit; k++) {
      const Place place = place_of(code, column, k);
      out[column * kUnit + k] = static_cast<int32_t>(place.byte * 2 + place.shift / 4);
    }
}

// Packs w[n][k] into `out`, which nobody has written before, so that each page lies in the NUMA node of the thread
// that packs into it. ldw is w's row stride in bytes. Two 4-bit codes share a byte, the first in its lower half. `scales`:
// [n][groups] of the format's type, or [blocks][groups] if a block has one scale. `zeros`: [n][groups] int8, or null.
// `factors`: [n] float32, for scales in e4m3.
void heteroinfer_coded_pack(uint8_t* out, const Format* format, const uint8_t* w, long ldw, const void* scales,
                            const int8_t* zeros, const float* factors, long n, long k) {
  const Layout layout(*format, n, k);
  const Places places(format->code);
  const long given = format->group ? ceil_div(k, format->group) : 1;  // groups in `scales`
  const long each = layout.scale_bytes / (format->scale == kBlockF32 ? 1 : kColumns);
  const long code_bytes = format->code <= kF16 ? 2 : 1;
  const bool nibbles = format->code >= kInt4;
#pragma omp parallel for
  for (long block = 0; block < layout.blocks; block++) {
    uint8_t* to = out + block * layout.block_bytes;
    std::memset(to, 0, static_cast<size_t>(layout.block_bytes));
    const long columns = std::min(kColumns, n - block * kColumns);
    for (long group = 0; group < std::min(given, layout.groups); group++) {
      uint8_t* at = to + layout.scales + group * layout.scale_bytes;
      if (format->scale == kBlockF32) {
        std::memcpy(at, static_cast<const float*>(scales) + block * given + group, 4);
        continue;
      }
      for (long column = 0; column < columns; column++) {
        const long from = (block * kColumns + column) * given + group;
        std::memcpy(at + column * each, static_cast<const uint8_t*>(scales) + from * each, static_cast<size_t>(each));
        if (format->zeros) to[layout.zeros + group * kColumns + column] = static_cast<uint8_t>(zeros[from]);
      }
    }
    if (format->scale == kColumnE4m3)
      std::memcpy(to, factors + block * kColumns, static_cast<size_t>(columns) * sizeof(float));
    auto* nan_markers = reinterpret_cast<float*>(to + layout.nan_markers);
    for (long column = 0; column < columns; column++) {
      const uint8_t* from = w + (block * kColumns + column) * ldw;
      for (long i = 0; i < k; i++) {
        const Place place = places.at[column][i % kUnit];
        uint8_t* code = to + layout.header + i / kUnit * layout.unit_bytes + place.byte;
        if (nibbles)
          *code = static_cast<uint8_t>(*code | (from[i / 2] >> (i % 2 * 4) & 15) << place.shift);
        else
          std::memcpy(code, from + i * code_bytes, static_cast<size_t>(code_bytes));
        if (format->code == kFp8 && (from[i] & 127) == 127) nan_markers[column] = __builtin_nanf("");
      }
    }
  }
}

// y[m][n] (row stride ldy) = x[m][k] (row stride ldx) * packed w + bias[n]. x, y and bias have the same element type; bias
// may be null.
void heteroinfer_coded_linear(void* y, long ldy, const void* x, long ldx, long element, const uint8_t* w,
                              const Format* format, const void* bias, long m, long n, long k) {
  const long each = element == kElementF32 ? 4 : 2;
  const Layout layout(*format, n, k);
  const bool serial = layout.bytes() <= kSerialBytes && m <= kFewRows;
  for (long from = 0; from < m; from += kPassRows) {
    const long some = std::min(kPassRows, m - from);
    const CodedChoice choice = choose_coded(format->code, element, some);
    const CodedKernel& kernel = *choice.kernel;
    const char* own = static_cast<const char*>(x) + from * ldx * each;
    Call call{choice, layout, rows_of(kernel, some), {own, nullptr}, w, static_cast<char*>(y) + from * ldy * each,
              element, ldy, static_cast<const char*>(bias)};
    // If inputs are read as pairs, a single row is already in packed order.
    if (some != 1 || kernel.x_bytes != 2 || k % kUnit || format->zeros) {
      const size_t bytes = static_cast<size_t>(some * layout.units * kUnit * kernel.x_bytes);
      char* inputs = static_cast<char*>(inputs_buffer.reserve(bytes));
      float* sums = nullptr;
      if (format->zeros)
        sums = static_cast<float*>(input_sums_buffer.reserve(static_cast<size_t>(some * layout.units) * sizeof(float)));
      call.inputs = {inputs, sums};
#pragma omp parallel if (!serial)
      {
        const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
        const long first = layout.units * thread / threads, end = layout.units * (thread + 1) / threads;
        for (long g = 0; g < call.rows.groups; g++) {
          const CodedInputs in = call.inputs.group(kernel, call.rows, g, layout.units);
          kernel.pack_rows(const_cast<void*>(in.x), const_cast<float*>(in.sums), own + call.rows.first(g) * ldx * each,
                           element, ldx, call.rows.count(g), k, first, end);
        }
      }
    }
    if (some <= kFewRows)
      linear_few(call, serial);
    else
      linear_many(call);
  }
}

}  // extern "C"
#pragma GCC visibility pop
