// The memory of the feed-forward slab, and bounded waits on it. feed_forward/slab.py has the layout.
//
// The asker is the rank with attention. Up to kMaxLanes lanes answer it: feed-forward ranks of its pod, and other pods with
// such ranks. An ask is a number that counts up: the asker writes the payload first, then the number. Each lane answers with
// the same number. x needs only one slot, because the next ask comes after every lane has answered.

#pragma once

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

namespace feed_forward {

constexpr int kMaxLanes = 24;
constexpr uint32_t kSumsFloat32 = 0, kSumsBfloat16 = 1, kSumsFloat16 = 2;

struct alignas(128) Ask {
  uint64_t number;
  uint32_t layer, rows;
};
struct alignas(128) Bell {
  uint32_t rung;   // futex: the count of wakes of sleeping lanes
  uint32_t steps;  // number of steps that the asking rank has begun
};
struct alignas(128) End {
  uint32_t stop, failed;  // failed: the device gave up an ask
  uint32_t turns;         // checks that the asking host's watch has made; the count stops while its pod is frozen
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

// Time of a monotonic clock.
inline uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}

// Sleeps until `wake` is called for this word, at most `ns`. Returns at once if the word is not `value`.
inline void sleep_until_changed(const void* word, uint32_t value, uint64_t ns) {
  timespec t{static_cast<time_t>(ns / 1000000000u), static_cast<long>(ns % 1000000000u)};
  syscall(SYS_futex, word, FUTEX_WAIT, value, &t, nullptr, 0);
}

// Wakes all processes that sleep on this word.
inline void wake(const void* word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }

// Reads a word that another process writes. Sees all that the process wrote before it.
template <typename T>
T load(const T* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
// Writes a word that another process reads. The process sees all that was written before it.
template <typename T>
void store(T* word, T value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

// Whether `heteroinfer_ff_stop` was called for the slab.
inline bool stopped(const Slab* slab) { return load(&slab->end.stop) != 0; }

constexpr int kPollsPerClock = 64;
// If two readings of the clock are further apart than the nap between them plus this time, the process got no CPU.
constexpr uint64_t kLongestTurnNs = 5000000u;
// After a wait without CPU, the limit grows by this time, once: the other side may get its CPU later than this process.
constexpr uint64_t kGraceNs = 50000000u;

// Spins, then sleeps on a futex in naps that grow. A wake may never come, because a GPU cannot wake a futex. The limit
// does not count time in which this process got no CPU (frozen pod, suspended machine, busy CPU).
struct Waiter {
  Waiter(uint64_t spin_ns, uint64_t limit_ns, uint64_t idle_since_ns = 0)
      : start(now_ns()),
        since(idle_since_ns ? idle_since_ns : start),
        spin(spin_ns),
        limit(limit_ns),
        counted_until(start) {}
  // Returns false once the limit is reached. `sleeps`, if not null, is 1 while this process needs a wake.
  bool wait(const void* word, uint32_t value, uint32_t* sleeps = nullptr) {
    if (++polls % kPollsPerClock && waited < spin) {
      _mm_pause();
      return true;
    }
    count_time(kLongestTurnNs);
    if (awake >= limit) return false;
    if (waited < spin) return true;
    const uint64_t nap = waited > 1000000000u ? 20000000u : waited > 50000000u ? 1000000u : 50000u;
    if (sleeps) __atomic_store_n(sleeps, 1u, __ATOMIC_SEQ_CST);
    sleep_until_changed(word, value, nap);
    if (sleeps) store(sleeps, 0u);
    count_time(nap + kLongestTurnNs);
    return true;
  }
  // Counts the time since the last call, at most `due` of it: in the rest, the process got no CPU.
  void count_time(uint64_t due) {
    const uint64_t now = now_ns(), gap = now - counted_until;
    if (gap > due && !lost_time) {
      lost_time = true;
      limit += kGraceNs;
    }
    awake += gap < due ? gap : due;
    counted_until = now;
    waited = now - since;
  }
  uint64_t start, since, spin, limit, counted_until, awake = 0, waited = 0, polls = 0;
  bool lost_time = false;
};

// float32 of a bfloat16, exact.
inline float from_bfloat16(uint16_t v) {
  const uint32_t bits = static_cast<uint32_t>(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
// bfloat16 of a float32, rounded to nearest even.
inline uint16_t to_bfloat16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

struct Layout {
  uint64_t x, ids, weights, y, y_stride;  // offsets in bytes
  uint32_t hidden, topk, dtype, lanes;
};

inline uint64_t element_bytes(uint32_t dtype) { return dtype == kSumsFloat32 ? 4 : 2; }

// sums[n] += part[n].
__attribute__((target("f16c"))) inline void add_float16(float* sums, const uint16_t* part, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) sums[i] += _cvtsh_ss(part[i]);
}
// out[n] = sums[n], rounded to nearest even.
__attribute__((target("f16c"))) inline void store_float16(uint16_t* out, const float* sums, uint64_t n) {
  for (uint64_t i = 0; i < n; i++) out[i] = static_cast<uint16_t>(_cvtss_sh(sums[i], 0));
}

// Writes the sum of all lanes' answers to `out`: added in float32, in the order of the lanes, and rounded once. `out`
// may be the answer of lane 0.
inline void sum_lanes(const char* slab, const Layout& layout, char* out, uint64_t elements) {
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

// Results of a wait for an ask: there is one; none came in time; the slab was stopped or its connection ended.
enum { kAsked = 1, kNothing = 0, kStopped = -1 };

}  // namespace feed_forward
