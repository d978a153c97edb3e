// The C interface of linear layers: the choice of a kernel, the work of each thread, and the sums of split blocks.
//
// OpenMP is torch's own. This library is linked without libgomp, and its GOMP_* symbols resolve to the libgomp that torch
// has loaded. A second pool of threads would spin against the first.
#include "call.h"
#include "coded_call.h"

#include <cpuid.h>
#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

using namespace heteroinfer;

namespace {

enum Path { kPathAvx512 = 0, kPathAvx512Bf16 = 1, kPathAmx = 2, kPathAvx2 = 3, kPaths = 4 };
const Kernel* const kKernels[] = {&kAvx512, &kAvx512Bf16, &kAmx};

constexpr long kFewRows = 64;            // for up to this many rows, threads share single blocks
constexpr long kAmxRows = 4;             // from this many rows on, tiles are faster than vectors
constexpr long kAmxCodedRows = 5;        // the same for coded weights, which must be widened for tiles
constexpr long kSerialBytes = 64 << 10;  // smaller weights use one thread: waking the others takes longer
constexpr long kChunkUnits = 16;         // units of weights that several groups of rows read in turn: 32 KiB
constexpr long kSharedChunkUnits = 8;    // the same if they prefetch the next chunk meanwhile: half of the first cache
constexpr long kManyRows = 256;          // rows that share one read of a chunk of weights
constexpr long kManyBlocks = 4;          // blocks of columns that share one read of the inputs
constexpr long kHugePage = 2 << 20;

int available = 0;  // bits of Path
bool has_vbmi = false;  // AVX512-VBMI, which widens FP8 and coded weights to bf16
int forced_path = -1, forced_streams = -1, forced_prefetch = -1;

thread_local Buffer inputs_buffer, parts_buffer, sums_buffer, runs_buffer;

struct Call {
  const Kernel* kernel;
  Rows rows;
  uint16_t* y;
  long ldy;
  const uint16_t* w;
  const uint16_t* bias;
  const char* inputs;
  long n, blocks, units;  // columns; blocks of columns; units in a block
  int streams, prefetch;

  const uint16_t* weights(long block, long unit) const { return w + (block * units + unit) * kUnitElements; }
  const char* group_inputs(long group, long unit) const {
    const long k = rows.first(group) * units * kUnit + unit * kUnit * rows.count(group);
    return inputs + k * kernel->x_bytes;
  }
  void store(long block, const float* c, long first, int count) const {
    const long column = block * kColumns;
    store_rows(y + first * ldy + column, ldy, c, count, std::min(kColumns, n - column),
               bias ? bias + column : nullptr);
  }
};

// Part of a block: units [first, end).
struct Piece {
  long block, first, end;
  bool whole(const Call& call) const { return first == 0 && end == call.units; }
};

// The units [first, end) of one thread, counted over all blocks.
struct Range {
  Range(const Call& call, long thread, long threads)
      : first(call.blocks * call.units * thread / threads), end(call.blocks * call.units * (thread + 1) / threads) {}
  Piece piece(const Call& call, long unit) const {
    const long block = unit / call.units;
    return {block, unit - block * call.units, std::min(call.units, end - block * call.units)};
  }
  long first, end;
};

// c[m][32] += x * w for a piece. Prefetches the piece's own weights, then the start of `next`.
void multiply_piece(const Call& call, const Piece& piece, const Piece& next, float* c) {
  const Kernel& kernel = *call.kernel;
  const long length = piece.end - piece.first, streams = length < call.streams ? 1 : call.streams;
  const long each = length / streams, next_each = (next.end - next.first) / streams;
  const bool several = call.rows.groups > 1, shares = several && kernel.shares && call.prefetch;
  const long chunk = !several ? each : std::max<long>(1, (shares ? kSharedChunkUnits : kChunkUnits) / streams);
  const long distance = std::min<long>(shares ? chunk : call.prefetch, each);
  Stream stream[kMaxStreams];
  for (long from = 0; from < each; from += chunk) {
    const long to = std::min(each, from + chunk);
    for (long group = 0; group < call.rows.groups; group++) {
      float* sums = c + call.rows.first(group) * kColumns;
      for (long at = from; at < to;) {
        // At most two runs: the first prefetches this piece's own weights, the second those of the next piece.
        const bool own = at < each - distance;
        const long until = own ? std::min(to, each - distance) : to;
        for (long s = 0; s < streams; s++) {
          const long unit = piece.first + s * each + at;
          stream[s].w = call.weights(piece.block, unit);
          stream[s].x = call.group_inputs(group, unit);
          if (!call.prefetch || (group && !shares))
            stream[s].ahead = stream[s].w;
          else if (own)
            stream[s].ahead = stream[s].w + distance * kUnitElements;
          else
            stream[s].ahead = call.weights(next.block, next.first + s * next_each + at - (each - distance));
        }
        const Share share = shares ? Share{static_cast<int>(group), static_cast<int>(call.rows.groups)} : Share{0, 1};
        kernel.multiply(sums, call.rows.count(group), stream, static_cast<int>(streams), until - at, share);
        at = until;
      }
    }
  }
  for (long unit = piece.first + streams * each; unit < piece.end; unit++)
    for (long group = 0; group < call.rows.groups; group++) {
      const uint16_t* w = call.weights(piece.block, unit);
      stream[0] = {w, w, call.group_inputs(group, unit)};
      kernel.multiply(c + call.rows.first(group) * kColumns, call.rows.count(group), stream, 1, 1, {0, 1});
    }
}

// The sums of a thread's first or last piece, the only pieces that may be a part of a block. Each has its own slot in
// `parts`.
float* part_sums(float* parts, const Call& call, long thread, bool first) {
  return parts + (thread * 2 + (first ? 0 : 1)) * call.rows.m * kColumns;
}

// Computes a piece. Stores a whole block in y; keeps the sums of a part of a block in `split_sums`.
void compute_piece(const Call& call, const Piece& piece, const Piece& next, float* split_sums, float* sums) {
  const bool whole = piece.whole(call);
  float* c = whole ? sums : split_sums;
  std::memset(c, 0, static_cast<size_t>(call.rows.m * kColumns) * sizeof(float));
  multiply_piece(call, piece, next, c);
  if (whole) call.store(piece.block, c, 0, static_cast<int>(call.rows.m));
}

// Computes a thread's range. The range may begin and end inside a block: the thread computes these two parts itself. The
// whole blocks between them are tasks, which idle threads may take. At the end, the thread takes such tasks of others.
void compute_few_rows(const Call& call, Run* runs, float* parts, float* sums, long thread, long threads) {
  const Range range(call, thread, threads);
  const long units = call.units, last = range.end / units * units;
  const auto compute = [&](long unit) {
    const Piece piece = range.piece(call, unit);
    const long following = unit + piece.end - piece.first;
    compute_piece(call, piece, following < range.end ? range.piece(call, following) : piece,
                  part_sums(parts, call, thread, unit == range.first), sums);
  };
  runs[thread].set(ceil_div(range.first, units), range.end / units);
  if (range.first < range.end && range.first % units) compute(range.first);
  run_own_tasks(runs[thread], one_task, [&](long block, long) { compute(block * units); });
  if (last < range.end && last >= range.first) compute(last);
  run_tasks_of_others(runs, thread, threads, one_task, [&](long block, long) {
    compute_piece(call, {block, 0, units}, {block, 0, units}, nullptr, sums);
  });
}

// Completes the block that is split between this thread and the following ones, if this thread has its start: adds the
// sums of the other threads, and stores the block.
void join_split_block(const Call& call, float* parts, long thread, long threads) {
  const Range range(call, thread, threads);
  if (range.first == range.end) return;
  const long block = (range.end - 1) / call.units, start = block * call.units, end = start + call.units;
  if (start < range.first || range.end == end) return;
  float* total = part_sums(parts, call, thread, start == range.first);
  for (long other = thread + 1; other < threads; other++) {
    const Range theirs(call, other, threads);
    if (theirs.first >= end) break;
    if (theirs.first == theirs.end) continue;
    const float* c = part_sums(parts, call, other, true);
    for (long i = 0; i < call.rows.m * kColumns; i++) total[i] += c[i];
  }
  call.store(block, total, 0, static_cast<int>(call.rows.m));
}

// Computes rows [first_group, end_group) x blocks [first_block, end_block), chunk by chunk of k. A chunk of weights stays
// in the first cache for all rows, and the rows' inputs stay in the second cache for all blocks.
void compute_many_rows(const Call& call, float* sums, long first_group, long end_group, long first_block,
                       long end_block) {
  const long first_row = call.rows.first(first_group);
  const long rows = call.rows.first(end_group - 1) + call.rows.count(end_group - 1) - first_row;
  std::memset(sums, 0, static_cast<size_t>(rows * kColumns * (end_block - first_block)) * sizeof(float));
  for (long unit = 0; unit < call.units; unit += kChunkUnits) {
    const long length = std::min(kChunkUnits, call.units - unit);
    for (long block = first_block; block < end_block; block++) {
      const uint16_t* w = call.weights(block, unit);
      float* c = sums + rows * kColumns * (block - first_block);
      for (long group = first_group; group < end_group; group++) {
        const Stream stream = {w, w, call.group_inputs(group, unit)};
        call.kernel->multiply(c + (call.rows.first(group) - first_row) * kColumns, call.rows.count(group), &stream,
                              1, length, {0, 1});
      }
    }
  }
  for (long block = first_block; block < end_block; block++)
    call.store(block, sums + rows * kColumns * (block - first_block), first_row, static_cast<int>(rows));
}

// Returns `count` empty runs. Later calls use the same memory.
Run* empty_runs(long count) {
  auto* runs = static_cast<Run*>(runs_buffer.reserve(static_cast<size_t>(count) * sizeof(Run)));
  for (long i = 0; i < count; i++) new (runs + i) Run;
  return runs;
}

// Computes a call with many rows. A task is a band of rows times a few blocks of columns.
void linear_many(const Call& call) {
  const long groups = std::max<long>(1, kManyRows / call.rows.each), bands = ceil_div(call.rows.groups, groups);
  Run* runs = empty_runs(omp_get_max_threads());
#pragma omp parallel
  {
    const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
    long wide = kManyBlocks;
    while (wide > 1 && ceil_div(call.blocks, wide) * bands < 8 * threads) wide /= 2;
    float* sums = static_cast<float*>(
        sums_buffer.reserve(static_cast<size_t>(groups * call.rows.each * kColumns * kManyBlocks) * sizeof(float)));
    const long tasks = ceil_div(call.blocks, wide) * bands;
    call.kernel->enter();
    const auto compute = [&](long task, long) {
      const long block = task / bands * wide, group = task % bands * groups;
      compute_many_rows(call, sums, group, std::min(call.rows.groups, group + groups), block,
                std::min(call.blocks, block + wide));
    };
    runs[thread].set(tasks * thread / threads, tasks * (thread + 1) / threads);
    run_own_tasks(runs[thread], one_task, compute);
    run_tasks_of_others(runs, thread, threads, one_task, compute);
    call.kernel->leave();
  }
}

// Computes a call with few rows: the threads share all units of the weights evenly, so a block may be split between two
// threads or more. `serial`: uses one thread.
void linear_few(const Call& call, bool serial) {
  const size_t block_bytes = static_cast<size_t>(call.rows.m * kColumns) * sizeof(float);
  const long most_threads = serial ? 1 : omp_get_max_threads();
  float* parts = static_cast<float*>(parts_buffer.reserve(2 * block_bytes * static_cast<size_t>(most_threads)));
  Run* runs = empty_runs(most_threads);
#pragma omp parallel if (!serial)
  {
    const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
    float* sums = static_cast<float*>(sums_buffer.reserve(block_bytes));
    call.kernel->enter();
    compute_few_rows(call, runs, parts, sums, thread, threads);
    call.kernel->leave();
    if (call.blocks % threads) {
#pragma omp barrier
      join_split_block(call, parts, thread, threads);
    }
  }
}

// Packs the inputs of all rows for the kernel. Each thread packs a part of the inputs of each row.
void pack_inputs(const Call& call, char* out, const uint16_t* x, long ldx, long k, bool serial) {
#pragma omp parallel if (!serial)
  {
    const long thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const long first = call.units * thread / threads, end = call.units * (thread + 1) / threads;
    for (long group = 0; group < call.rows.groups; group++)
      call.kernel->pack_rows(out + call.rows.first(group) * call.units * kUnit * call.kernel->x_bytes,
                             x + call.rows.first(group) * ldx, ldx, call.rows.count(group), k, first, end);
  }
}

// The fastest available path for m rows, or the one that `heteroinfer_tune` set.
Path choose_path(long m) {
  if (forced_path >= 0 && forced_path != kPathAvx2) return static_cast<Path>(forced_path);
  if (m >= kAmxRows && available >> kPathAmx & 1) return kPathAmx;
  return available >> kPathAvx512Bf16 & 1 ? kPathAvx512Bf16 : kPathAvx512;
}

// Asks the operating system to use huge pages in this memory, as far as they fit: weights are then read faster.
void ask_for_huge_pages(void* memory, long bytes) {
  const auto start = reinterpret_cast<uintptr_t>(memory);
  const uintptr_t first = (start + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (start + static_cast<uintptr_t>(bytes)) / kHugePage * kHugePage;
  if (first < end) madvise(reinterpret_cast<void*>(first), end - first, MADV_HUGEPAGE);  // advice: an error has no effect
}

// Packs w[n][k] (row stride ldw) into `out`; `offset(column, k)` is the position of an element in a unit. Each thread
// is the first to write the memory that it will read later, so that the operating system places this memory in the
// thread's NUMA node.
template <class Element, class Offset>
void pack(Element* out, const Element* w, long ldw, long n, long k, Offset offset) {
  const long blocks = ceil_div(n, kColumns), units = ceil_div(k, kUnit);
  ask_for_huge_pages(out, blocks * units * kUnitElements * static_cast<long>(sizeof(Element)));
#pragma omp parallel
  {
    const long thread = omp_get_thread_num(), threads = omp_get_num_threads(), total = blocks * units;
    for (long at = total * thread / threads; at < total * (thread + 1) / threads; at++) {
      Element* to = out + at * kUnitElements;
      const long n0 = at / units * kColumns, k0 = at % units * kUnit;
      for (long column = 0; column < kColumns; column++)
        for (long i = 0; i < kUnit; i++)
          to[offset(column, i)] = n0 + column < n && k0 + i < k ? w[(n0 + column) * ldw + k0 + i] : Element{0};
    }
  }
}

}  // namespace

// Returns the kernel for m rows with its number of streams and prefetch distance. FP8 weights need AVX512-VBMI for all
// kernels but the one for AVX-512F.
Choice heteroinfer::choose_kernel(long m, bool fp8) {
  const Kernel& kernel = *kKernels[fp8 && !has_vbmi ? kPathAvx512 : choose_path(m)];
  return {&kernel, forced_streams > 0 ? forced_streams : kernel.streams,
          forced_prefetch >= 0 ? forced_prefetch : kernel.prefetch};
}

// Returns the kernel for m rows of coded weights. Only bf16 inputs can use AMX and AVX512-BF16, with AVX512-VBMI to
// widen the codes to bf16. Everything else is decoded to float32, by AVX-512F or AVX2.
CodedChoice heteroinfer::choose_coded(long code, long element, long m) {
  static const CodedKernel kCodedAmx = coded_amx();
  const auto may = [](Path path) { return (forced_path < 0 || forced_path == path) && available >> path & 1; };
  const CodedKernel* kernel = &kCodedAvx512;
  const RowsKernel* rows = &kRowsAvx512;
  if (may(kPathAmx) && has_vbmi && element == kElementBf16 && code != kF16 && m >= kAmxCodedRows)
    kernel = &kCodedAmx;
  else if ((may(kPathAvx512Bf16) || may(kPathAmx)) && has_vbmi && element == kElementBf16 && code != kF16)
    kernel = &kCodedAvx512Bf16;
  else if (!(available >> kPathAvx512 & 1) || forced_path == kPathAvx2)
    kernel = &kCodedAvx2, rows = &kRowsAvx2;
  return {kernel, rows, forced_streams > 0 ? forced_streams : kMaxStreams, forced_prefetch >= 0 ? forced_prefetch : 4};
}

#pragma GCC visibility push(default)
extern "C" {

// Detects the instruction sets of this CPU; call it once, before all other functions. `allowed` has the bits that may be
// used. Returns their sum: 1 AVX512F, 2 AVX512-BF16, 4 AMX-BF16, 8 AVX2 with FMA and F16C, 16 AVX512-VBMI; 0 if no kernel
// of this library can run.
int heteroinfer_init(int allowed) {
  __builtin_cpu_init();
  available = 0;
  has_vbmi = false;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    available = allowed & 1 << kPathAvx2;
  if (!__builtin_cpu_supports("avx512f") || !(allowed >> kPathAvx512 & 1)) return available;
  available |= 1 << kPathAvx512;
  if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl"))
    available |= allowed & 1 << kPathAvx512Bf16;
  has_vbmi = __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bw");
  unsigned a, b, c, d = 0;
  const bool tiles = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) && (d >> 24 & 1);
  if (tiles && allowed >> kPathAmx & 1 && request_amx()) available |= 1 << kPathAmx;
  return available | has_vbmi << kPaths;
}

// Name of the kernel that multiplies m rows.
const char* heteroinfer_kernel(long m) { return kKernels[choose_path(m)]->name; }

// For measurements and tests: sets a path (0, 1, 2, and 3 for coded weights), the streams (1, 2, 4) and the prefetch
// distance in units (for FP8, in 128 k). -1 restores the default. Returns 0 if this CPU does not support them.
int heteroinfer_tune(int path, int streams, int prefetch) {
  if (path >= kPaths || (path >= 0 && !(available >> path & 1))) return 0;
  if (streams == 0 || streams == 3 || streams > kMaxStreams) return 0;
  forced_path = path;
  forced_streams = streams;
  forced_prefetch = prefetch;
  return 1;
}

// Number of threads that a call uses.
int heteroinfer_threads() { return omp_get_max_threads(); }

// Number of elements of the packed w[n][k].
long heteroinfer_packed_elements(long n, long k) {
  return ceil_div(n, kColumns) * kColumns * (ceil_div(k, kUnit) * kUnit);
}

// Asks for huge pages for memory into which several weights will be packed. It must be asked as a whole, because a huge
// page may have parts of two weights.
void heteroinfer_ask_for_huge_pages(void* memory, long bytes) { ask_for_huge_pages(memory, bytes); }

// Packs w[n][k] (row stride ldw) into `out`, which nobody has written before, so that each page lies in the NUMA node of
// the thread that packs into it. In a unit, two inputs of a column are neighbours (as VDPBF16PS and AMX need them). Then
// come the same two inputs of the next column.
void heteroinfer_pack(uint16_t* out, const uint16_t* w, long ldw, long n, long k) {
  pack(out, w, ldw, n, k, [](long column, long i) { return i / 2 * 2 * kColumns + column * 2 + i % 2; });
}

// Packs FP8 weights; the arguments are those of `heteroinfer_pack`.
void heteroinfer_pack_fp8(uint8_t* out, const uint8_t* w, long ldw, long n, long k) {
  pack(out, w, ldw, n, k, [](long column, long i) { return i / 2 * 2 * kColumns + fp8_offset(column, i % 2); });
}

// y[m][n] (row stride ldy) = x[m][k] (row stride ldx) * packed w + bias[n]; all bf16, and bias may be null.
void heteroinfer_linear(uint16_t* y, long ldy, const uint16_t* x, long ldx, const uint16_t* w, const uint16_t* bias,
                        long m, long n, long k) {
  if (m <= 0 || n <= 0) return;
  const auto [chosen, streams, prefetch] = choose_kernel(m);
  const Kernel& kernel = *chosen;
  Call call{&kernel, Rows(kernel, m), y, ldy, w, bias, nullptr, n, ceil_div(n, kColumns), ceil_div(k, kUnit),
            streams, prefetch};
  const bool serial = call.blocks * call.units * kUnitElements * 2 <= kSerialBytes;
  if (m == 1 && kernel.x_bytes == 2 && k % kUnit == 0) {
    call.inputs = reinterpret_cast<const char*>(x);  // a single row is already in packed order
  } else {
    const size_t bytes = static_cast<size_t>(m * call.units * kUnit) * static_cast<size_t>(kernel.x_bytes);
    char* inputs = static_cast<char*>(inputs_buffer.reserve(bytes));
    pack_inputs(call, inputs, x, ldx, k, serial);
    call.inputs = inputs;
  }
  if (m <= kFewRows)
    linear_few(call, serial);
  else
    linear_many(call);
}

}  // extern "C"
#pragma GCC visibility pop
