// The host's part of the feed-forward slab: asks and answers with bounded waits. feed_forward/slab.py has the layout.
//
// The asker is the rank with attention. Up to kMaxLanes feed-forward ranks, the lanes, answer it. An ask is a number that
// counts up: the asker writes the payload first, then the number. Each lane answers with the same number. x needs only one
// slot, because the next ask comes after every lane has answered. A GPU asks and reads answers in its own kernels
// (feed_forward/kernels.cu); its host calls only `ring` here.

#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <ctime>

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

constexpr int kMaxLanes = 24;
constexpr uint32_t kSumsFloat32 = 0, kSumsBfloat16 = 1, kSumsFloat16 = 2;

struct alignas(128) Ask {
  uint64_t number;
  uint32_t layer, rows;
};
struct alignas(128) Bell {
  uint32_t rung;  // futex: the asker's host is about to ask
  uint32_t steps;
};
struct alignas(128) End {
  uint32_t stop, failed;  // failed: the device gave up an ask
  uint32_t turns;         // turns of the asking host's watch; the count stops while its pod is frozen
  uint32_t given_up;      // 1 + the lane for which the device waited when it gave up
};
struct alignas(128) Lane {
  uint64_t answered;
  int32_t status;
  uint32_t sleeps;  // whether the asker sleeps on the low word of `answered` (only a host can sleep)
  unsigned char nonce[16];
  uint64_t busy_ns, idle_ns, asks, rows, experts;  // counters; the lane writes them
  uint64_t seen;                                   // number of the ask that the lane works on
};
struct Slab {
  unsigned char header[128];
  Ask ask;
  Bell bell;
  End end;
  Lane lanes[kMaxLanes];
};
static_assert(sizeof(Slab) <= 4096, "the control words have one page");
static_assert(offsetof(Slab, ask) == 128 && offsetof(Slab, bell) == 256 && offsetof(Slab, end) == 384 &&
                  offsetof(Slab, lanes) == 512 && sizeof(Lane) == 128,
              "as in feed_forward/slab.py and feed_forward/kernels.cu");

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

void sleep_on(const void* word, uint32_t value, uint64_t ns) {
  timespec t{static_cast<time_t>(ns / 1000000000u), static_cast<long>(ns % 1000000000u)};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &t, nullptr, 0);
}

void wake(const void* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

template <typename T>
T load(const T* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
template <typename T>
void store(T* word, T value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

bool stopped(const Slab* slab) { return load(&slab->end.stop) != 0; }

constexpr int kPollsPerClock = 64;
// If two readings of the clock are further apart than the nap between them plus this time, the process got no CPU.
constexpr uint64_t kTurnNs = 5000000u;
// After a wait without CPU, the limit grows by this time, once: the other side may get its CPU later than this process.
constexpr uint64_t kGraceNs = 50000000u;

// Spins, then sleeps on a futex in naps that grow. A wake may never come, because a GPU cannot wake a futex. The limit
// does not count time in which this process got no CPU (frozen pod, suspended machine, busy CPU).
struct Waiter {
  Waiter(uint64_t spin_ns, uint64_t limit_ns, uint64_t idle_since_ns = 0)
      : start(now_ns()), since(idle_since_ns ? idle_since_ns : start), spin(spin_ns), limit(limit_ns), looked(start) {}
  // Returns false once the limit is reached. `sleeps`, if not null, is 1 while this process needs a wake.
  bool wait(const void* word, uint32_t value, uint32_t* sleeps = nullptr) {
    if (++polls % kPollsPerClock && waited < spin) {
      _mm_pause();
      return true;
    }
    look(kTurnNs);
    if (awake >= limit) return false;
    if (waited < spin) return true;
    const uint64_t nap = waited > 1000000000u ? 20000000u : waited > 50000000u ? 1000000u : 50000u;
    if (sleeps) __atomic_store_n(sleeps, 1u, __ATOMIC_SEQ_CST);
    sleep_on(word, value, nap);
    if (sleeps) store(sleeps, 0u);
    look(nap + kTurnNs);
    return true;
  }
  // Counts the time since the last call. The process asked to sleep for at most `due` of it.
  void look(uint64_t due) {
    const uint64_t now = now_ns(), gap = now - looked;
    if (gap > due && !missed) {
      missed = true;
      limit += kGraceNs;
    }
    awake += gap < due ? gap : due;
    looked = now;
    waited = now - since;
  }
  uint64_t start, since, spin, limit, looked, awake = 0, waited = 0, polls = 0;
  bool missed = false;
};

float from_bfloat16(uint16_t v) {
  const uint32_t bits = static_cast<uint32_t>(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
uint16_t to_bfloat16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

struct Layout {
  uint64_t x, ids, weights, y, y_stride;  // offsets in bytes
  uint32_t hidden, topk, dtype, lanes;
};

uint64_t element_bytes(uint32_t dtype) { return dtype == kSumsFloat32 ? 4 : 2; }

__attribute__((target("f16c"))) void add_float16(float* sums, const uint16_t* part, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) sums[i] += _cvtsh_ss(part[i]);
}
__attribute__((target("f16c"))) void store_float16(uint16_t* out, const float* sums, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) out[i] = static_cast<uint16_t>(_cvtss_sh(sums[i], 0));
}

void sum_lanes(const char* slab, const Layout& layout, char* out, uint64_t elements) {
  const uint64_t bytes = element_bytes(layout.dtype);
  if (layout.lanes == 1) {
    std::memcpy(out, slab + layout.y, elements * bytes);
    return;
  }
  constexpr uint64_t kChunk = 1024;
  float sums[kChunk];
  for (uint64_t first = 0; first < elements; first += kChunk) {
    const uint64_t n = elements - first < kChunk ? elements - first : kChunk;
    std::memset(sums, 0, sizeof(sums));
    for (uint32_t lane = 0; lane < layout.lanes; lane++) {
      const char* part = slab + layout.y + lane * layout.y_stride + first * bytes;
      if (layout.dtype == kSumsFloat32) {
        for (uint64_t i = 0; i < n; i++) sums[i] += reinterpret_cast<const float*>(part)[i];
      } else if (layout.dtype == kSumsFloat16) {
        add_float16(sums, reinterpret_cast<const uint16_t*>(part), n);
      } else {
        for (uint64_t i = 0; i < n; i++) sums[i] += from_bfloat16(reinterpret_cast<const uint16_t*>(part)[i]);
      }
    }
    char* to = out + first * bytes;
    if (layout.dtype == kSumsFloat32) {
      std::memcpy(to, sums, n * 4);
    } else if (layout.dtype == kSumsFloat16) {
      store_float16(reinterpret_cast<uint16_t*>(to), sums, n);
    } else {
      for (uint64_t i = 0; i < n; i++) reinterpret_cast<uint16_t*>(to)[i] = to_bfloat16(sums[i]);
    }
  }
}

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

// Results of an answerer's wait.
enum { kAsked = 1, kNothing = 0, kStopped = -1 };

// Waits for the ask that follows the last answered one, and sets layer and rows. Returns a result from above.
int heteroinfer_ff_next(void* memory, int lane, uint64_t spin_ns, uint64_t limit_ns, uint32_t* layer, uint32_t* rows) {
  Slab* slab = static_cast<Slab*>(memory);
  Lane& own = slab->lanes[lane];
  // Time of the last ask or ring, kept across calls: an idle lane must not spin again in each call.
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
    // After a ring, an ask follows within microseconds: spin again.
    if (load(&slab->bell.rung) != rung) {
      idle_since = now_ns();
      waiter.since = idle_since;
      waiter.waited = 0;
    }
  }
}

// Answers the ask that `next` returned; y is in the slab. A nonzero status ends the asker's step.
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
  __atomic_thread_fence(__ATOMIC_SEQ_CST);  // store the number before reading `sleeps`
  if (load(&own.sleeps)) wake(&own.answered);
}

// Announces asks, so that sleeping lanes wake up in time.
void heteroinfer_ff_ring(void* memory) {
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

// Asks from the host and waits for every lane. out[rows][hidden] becomes the sum of their answers. ids and weights may be
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

// Echoes each ask until stopped: the other side of `stress`, and of the exchange's measurement. With `skip` > 0 every
// skip-th answer is wrong, so that a test can see the check fail.
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
