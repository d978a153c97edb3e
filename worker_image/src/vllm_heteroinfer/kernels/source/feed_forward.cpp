// The host's part of the feed-forward slab: asks and answers with bounded waits (feed_forward_slab.h).
//
// A GPU asks and reads answers in its own kernels (feed_forward/kernels.cu). Its host calls only `heteroinfer_ff_wake`
// of this file.
// feed_forward_link.cpp carries asks to other pods.

#include "feed_forward_slab.h"

using namespace feed_forward;

namespace {

// Number of different experts in ids[n]. Ids below 0 are not counted.
uint64_t count_experts(const int32_t* ids, uint64_t n) {
  uint64_t seen[64] = {}, count = 0;  // one bit for each of 4,096 experts
  for (uint64_t i = 0; i < n; i++) {
    const uint32_t id = static_cast<uint32_t>(ids[i]) & 4095;
    count += ids[i] >= 0 && !(seen[id >> 6] >> (id & 63) & 1);
    seen[id >> 6] |= uint64_t{1} << (id & 63);
  }
  return count;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Waits for the ask that follows the last answered one, and sets layer and rows. Returns kAsked, kNothing or kStopped.
int heteroinfer_ff_next(void* memory, int lane, uint64_t spin_ns, uint64_t limit_ns, uint32_t* layer, uint32_t* rows) {
  Slab* slab = static_cast<Slab*>(memory);
  Lane& own = slab->lanes[lane];
  // Time of the last ask or wake, kept across calls: an idle lane must not spin again in each call.
  static thread_local uint64_t idle_since = 0;
  if (!idle_since) idle_since = now_ns();
  Waiter waiter(spin_ns, limit_ns, idle_since);
  for (;;) {
    const uint32_t rung = load(&slab->bell.rung);
    const uint64_t number = load(&slab->ask.number);
    if (number != own.answered) {
      *layer = slab->ask.layer;
      *rows = slab->ask.rows;
      own.idle_ns += now_ns() - waiter.start;
      store(&own.seen, number);
      idle_since = 0;
      return kAsked;
    }
    if (stopped(slab)) return kStopped;
    if (!waiter.wait(&slab->bell.rung, rung)) {
      own.idle_ns += now_ns() - waiter.start;
      return kNothing;
    }
    // After a wake, an ask follows within microseconds: spin again.
    if (load(&slab->bell.rung) != rung) {
      idle_since = now_ns();
      waiter.since = idle_since;
      waiter.waited = 0;
    }
  }
}

// Answers the ask that `heteroinfer_ff_next` returned; y is in the slab already. A nonzero status means that the
// computation failed, and ends the asker's step.
void heteroinfer_ff_answer(void* memory, int lane, int32_t status, uint32_t rows, const int32_t* ids, uint32_t topk,
                           uint64_t busy_ns) {
  Slab* slab = static_cast<Slab*>(memory);
  Lane& own = slab->lanes[lane];
  own.busy_ns += busy_ns;
  own.asks++;
  own.rows += rows;
  own.experts += ids ? count_experts(ids, static_cast<uint64_t>(rows) * topk) : rows != 0;
  store(&own.status, status);
  store(&own.answered, own.seen);
  // Store the number before reading `sleeps`: otherwise the asker might fall asleep unseen, and nobody would wake it.
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  if (load(&own.sleeps)) wake(&own.answered);
}

// Wakes the lanes before the first ask of a step, so that they do not have to wake up during it.
void heteroinfer_ff_wake(void* memory) {
  Slab* slab = static_cast<Slab*>(memory);
  __atomic_fetch_add(&slab->bell.rung, 1, __ATOMIC_ACQ_REL);
  __atomic_fetch_add(&slab->bell.steps, 1, __ATOMIC_RELAXED);
  wake(&slab->bell.rung);
}

// Ends every wait on this slab, now and in future.
void heteroinfer_ff_stop(void* memory) {
  Slab* slab = static_cast<Slab*>(memory);
  store(&slab->end.stop, 1u);
  wake(&slab->bell.rung);
  for (Lane& lane : slab->lanes) wake(&lane.answered);
}

// Sends an ask from the host and waits for every lane. out[rows][hidden] becomes the sum of their answers. ids and weights may be
// null (an MLP). Returns 0; 1 + lane if that lane is late; -1 - lane if that lane answered with a status; INT_MIN if
// the slab was stopped.
int heteroinfer_ff_exchange(void* memory, const Layout* layout, uint32_t layer, uint32_t rows, const void* x,
                            const int32_t* ids, const float* weights, void* out, uint64_t spin_ns, uint64_t limit_ns) {
  Slab* slab = static_cast<Slab*>(memory);
  char* base = static_cast<char*>(memory);
  const uint64_t elements = static_cast<uint64_t>(rows) * layout->hidden;
  std::memcpy(base + layout->x, x, elements * element_bytes(layout->dtype));
  if (ids) {
    const uint64_t bytes = static_cast<uint64_t>(rows) * layout->topk * 4;
    std::memcpy(base + layout->ids, ids, bytes);
    std::memcpy(base + layout->weights, weights, bytes);
  }
  slab->ask.layer = layer;
  slab->ask.rows = rows;
  const uint64_t number = slab->ask.number + 1;
  store(&slab->ask.number, number);
  __atomic_fetch_add(&slab->bell.rung, 1, __ATOMIC_ACQ_REL);
  wake(&slab->bell.rung);
  Waiter waiter(spin_ns, limit_ns);
  for (uint32_t lane = 0; lane < layout->lanes; lane++) {
    Lane& other = slab->lanes[lane];
    for (;;) {
      const uint64_t answered = load(&other.answered);
      if (answered == number) break;
      if (stopped(slab)) return INT_MIN;
      const bool late = !waiter.wait(&other.answered, static_cast<uint32_t>(answered), &other.sleeps);
      if (late && load(&other.answered) != number) return static_cast<int>(1 + lane);
    }
    if (load(&other.status)) return -1 - static_cast<int>(lane);
  }
  sum_lanes(base, *layout, static_cast<char*>(out), elements);
  return 0;
}

// For tests of the protocol: asks `count` times with patterned rows and checks that every lane echoes them. Stops at the
// first wrong answer. Returns the number of right answers.
uint64_t heteroinfer_ff_stress(void* memory, const Layout* layout, uint64_t count, uint32_t max_rows, uint64_t spin_ns,
                               uint64_t limit_ns) {
  char* base = static_cast<char*>(memory);
  const uint64_t bytes = element_bytes(layout->dtype), words = layout->hidden * bytes / 4;
  static thread_local uint32_t x[1 << 16], out[1 << 16];
  Layout one = *layout;
  for (uint64_t i = 0; i < count; i++) {
    const uint32_t rows = 1 + static_cast<uint32_t>(i % max_rows);
    if (rows * words > (1 << 16)) return i;
    for (uint64_t w = 0; w < rows * words; w++) x[w] = static_cast<uint32_t>((i + 1) * 2654435761u + w);
    one.lanes = layout->lanes;
    const int failed = heteroinfer_ff_exchange(memory, &one, static_cast<uint32_t>(i % 7), rows, x, nullptr, nullptr,
                                               out, spin_ns, limit_ns);
    if (failed) return i;
    for (uint32_t lane = 0; lane < layout->lanes; lane++)
      if (std::memcmp(base + layout->y + lane * layout->y_stride, x, rows * words * 4)) return i;
  }
  return count;
}

// Answers each ask with its input until the slab is stopped: the other side of `heteroinfer_ff_stress` and of
// measurements. With `skip` > 0 every skip-th answer is wrong, so that a test can see the check fail. Returns the
// number of answers.
uint64_t heteroinfer_ff_echo(void* memory, const Layout* layout, int lane, uint64_t spin_ns, uint64_t skip) {
  char* base = static_cast<char*>(memory);
  uint32_t layer = 0, rows = 0;
  uint64_t count = 0;
  for (;;) {
    const int got = heteroinfer_ff_next(memory, lane, spin_ns, 100000000u, &layer, &rows);
    if (got == kStopped) return count;
    if (got == kNothing) continue;
    char* y = base + layout->y + static_cast<uint64_t>(lane) * layout->y_stride;
    std::memcpy(y, base + layout->x, static_cast<uint64_t>(rows) * layout->hidden * element_bytes(layout->dtype));
    count++;
    if (skip && count % skip == 0) y[0] = static_cast<char>(y[0] ^ 1);
    heteroinfer_ff_answer(memory, lane, 0, rows, nullptr, 0, 0);
  }
}

}  // extern "C"
#pragma GCC visibility pop
