// Feed-forward ranks in other pods: carries asks and answers of a slab over TCP (feed_forward/pod_link.py).
//
// The relay, a thread of the asking rank, is the asking slab's lane of each other pod. It sends each ask to all of
// them at once, from the slab's memory, and receives their answers into it. In the other pod the first
// feed-forward rank receives asks into its pod's own slab, computes its part, waits for the pod's other ranks, and
// sends the sum: one message each way per layer and pod.
// Nothing here calls CUDA, and each wait is short: callers come again until they are stopped.

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "feed_forward_slab.h"

using namespace feed_forward;

namespace {

// Both pods run x86-64 and one version of this code: the hand-shake compares them.
struct Message {
  uint64_t token;  // of the connection
  uint64_t number;
  uint32_t layer, rows;
  int32_t status;    // of an answer
  uint32_t steps;    // of an ask: how often the asking rank has begun a step
  uint64_t busy_ns;  // of an answer: from the arrival of the ask to here
};
static_assert(sizeof(Message) == 40, "both sides send the same bytes");

constexpr int kEndOfFile = -1, kMalformed = -2;
constexpr int kNapMs = 20;
constexpr uint64_t kNoLimit = uint64_t{1} << 62;
constexpr int kMostLinks = kMaxLanes;

}  // namespace

// Has the same fields as `Link` in pod_link.py, which sets the first three and reads the others for its error messages.
struct HeteroinferLink {
  int32_t socket;
  uint32_t lane;  // of the slab on this side
  uint64_t token;
  uint64_t sent, to_send;  // bytes of the message that is being sent
  uint64_t received, to_receive;
  uint64_t network_ns, asks;  // of the asking side: time of its asks without the other pod's work
  int32_t error;              // errno, or one of the above
  uint32_t is_open;           // whether an ask has no answer yet
  Message out, in;
};

namespace {

using Link = HeteroinferLink;

// Writes the parts without their first `done` bytes to `left`. Returns the number of parts that remain.
int skip_done_bytes(const iovec* parts, int count, uint64_t done, iovec* left) {
  int n = 0;
  for (int i = 0; i < count; i++) {
    if (done >= parts[i].iov_len) {
      done -= parts[i].iov_len;
      continue;
    }
    left[n++] = {static_cast<char*>(parts[i].iov_base) + done, parts[i].iov_len - done};
    done = 0;
  }
  return n;
}

// Bytes of all parts.
uint64_t total_bytes(const iovec* parts, int count) {
  uint64_t bytes = 0;
  for (int i = 0; i < count; i++) bytes += parts[i].iov_len;
  return bytes;
}

// Sends what the socket takes now of a message. Returns whether bytes moved; sets `error` if the connection ended.
bool send_some(Link& link, const iovec* parts, int count) {
  iovec left[4];
  msghdr message{};
  message.msg_iov = left;
  message.msg_iovlen = static_cast<size_t>(skip_done_bytes(parts, count, link.sent, left));
  if (!message.msg_iovlen) return false;
  const ssize_t n = sendmsg(link.socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  if (n < 0) {
    if (errno != EAGAIN && errno != EINTR) link.error = errno;
    return false;
  }
  link.sent += static_cast<uint64_t>(n);
  return true;
}

// Receives what has arrived of a message. Returns whether bytes moved; sets `error` if the connection ended.
bool receive_some(Link& link, const iovec* parts, int count) {
  iovec left[4];
  msghdr message{};
  message.msg_iov = left;
  message.msg_iovlen = static_cast<size_t>(skip_done_bytes(parts, count, link.received, left));
  if (!message.msg_iovlen) return false;
  const ssize_t n = recvmsg(link.socket, &message, MSG_DONTWAIT);
  if (n < 0) {
    if (errno != EAGAIN && errno != EINTR) link.error = errno;
    return false;
  }
  if (n == 0) link.error = kEndOfFile;
  link.received += static_cast<uint64_t>(n);
  return n != 0;
}

// Spins for a while after the last progress, since a wake costs microseconds; then sleeps in naps until a socket
// is ready.
struct SocketWaiter {
  explicit SocketWaiter(uint64_t spin_ns, uint64_t since_ns = 0) : spin(spin_ns), since(since_ns ? since_ns : now_ns()) {}
  void progressed() { since = 0; }
  void wait(pollfd* sockets, int count) {
    if (++polls % 16) {
      _mm_pause();
      return;
    }
    const uint64_t now = now_ns();
    if (!since) since = now;
    if (now - since < spin) return;
    poll(sockets, static_cast<nfds_t>(count), kNapMs);
  }
  uint64_t spin, since;
  uint32_t polls = 15;  // the first wait looks at the clock, so with `spin` 0 it sleeps at once
};

struct RelayedAsk {
  uint64_t number;
  uint32_t layer, rows;
  uint64_t began_ns;
};

// Sets the parts of an ask's message: header, rows, ids and weights. Returns their number.
int ask_parts(char* base, const Layout& layout, Message& header, uint32_t rows, iovec* parts) {
  parts[0] = {&header, sizeof(header)};
  parts[1] = {base + layout.x, uint64_t{rows} * layout.hidden * element_bytes(layout.dtype)};
  parts[2] = {base + layout.ids, uint64_t{rows} * layout.topk * 4};
  parts[3] = {base + layout.weights, uint64_t{rows} * layout.topk * 4};
  return 4;
}

// Sets the parts of an answer's message: header and rows of a lane. Returns their number.
int answer_parts(char* base, const Layout& layout, Message& header, uint32_t lane, uint32_t rows, iovec* parts) {
  parts[0] = {&header, sizeof(header)};
  parts[1] = {base + layout.y + lane * layout.y_stride, uint64_t{rows} * layout.hidden * element_bytes(layout.dtype)};
  return 2;
}

// Marks an ask as answered by a lane of another pod, and wakes the asker.
void complete_ask(Lane& own, int32_t status, uint64_t number, uint32_t rows, uint64_t busy_ns) {
  own.busy_ns += busy_ns;
  own.asks++;
  own.rows += rows;
  store(&own.seen, number);
  store(&own.status, status);
  store(&own.answered, number);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);  // store the number before reading `sleeps`, as in heteroinfer_ff_answer
  if (load(&own.sleeps)) wake(&own.answered);
}

// Prepares a link to send an ask and to receive its answer.
void begin_ask(Slab* slab, char* base, const Layout& layout, Link& link, const RelayedAsk& ask) {
  iovec parts[4];
  link.out = {link.token, ask.number, ask.layer, ask.rows, 0, load(&slab->bell.steps), 0};
  link.sent = link.received = 0;
  link.to_send = total_bytes(parts, ask_parts(base, layout, link.out, ask.rows, parts));
  link.to_receive = total_bytes(parts, answer_parts(base, layout, link.in, link.lane, ask.rows, parts));
  link.is_open = 1;
}

// Sends and receives what can be moved of a link's ask, and completes the ask if its answer has arrived. Returns
// whether anything changed.
bool move_bytes(Slab* slab, char* base, const Layout& layout, Link& link, const RelayedAsk& ask) {
  iovec parts[4];
  bool moved = false;
  if (link.sent < link.to_send) moved = send_some(link, parts, ask_parts(base, layout, link.out, ask.rows, parts));
  if (link.error) return moved;
  moved |= receive_some(link, parts, answer_parts(base, layout, link.in, link.lane, ask.rows, parts));
  if (link.error || link.received < sizeof(Message)) return moved;
  const Message& in = link.in;
  const bool fits = in.token == link.token && in.number == ask.number && (in.status || in.rows == ask.rows);
  if (!fits) link.error = kMalformed;
  if (link.error || (!in.status && link.received < link.to_receive)) return moved;
  const uint64_t took = now_ns() - ask.began_ns;
  link.network_ns += took > in.busy_ns ? took - in.busy_ns : 0;
  link.asks++;
  store(&link.is_open, 0u);
  complete_ask(slab->lanes[link.lane], in.status, ask.number, ask.rows, in.busy_ns);
  return true;
}

// Whether an idle connection has ended. There is nothing to read, unless the other end closed it or sent too much.
bool has_ended(Link& link) {
  char byte;
  const ssize_t n = recv(link.socket, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  if (n < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  link.error = n < 0 ? errno : n == 0 ? kEndOfFile : kMalformed;
  return true;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Relays asks of a slab to other pods. Returns kStopped once the slab is stopped, or 1 + the number of the link
// whose connection ended; the link's `error` has the reason.
int heteroinfer_ff_relay(void* memory, const Layout* layout, HeteroinferLink* links, int count, uint64_t spin_ns) {
  Slab* slab = static_cast<Slab*>(memory);
  char* base = static_cast<char*>(memory);
  RelayedAsk ask{};
  for (;;) {
    Waiter waiter(spin_ns, kNoLimit);
    while (load(&slab->ask.number) == ask.number) {
      if (stopped(slab)) return kStopped;
      const uint32_t rung = load(&slab->bell.rung);
      if (load(&slab->ask.number) != ask.number) break;
      waiter.wait(&slab->bell.rung, rung);
      if (waiter.waited >= spin_ns)
        for (int i = 0; i < count; i++)
          if (has_ended(links[i])) return 1 + i;
      if (load(&slab->bell.rung) != rung) {  // an ask follows within microseconds: spin again
        waiter.since = now_ns();
        waiter.waited = 0;
      }
    }
    ask = {load(&slab->ask.number), slab->ask.layer, slab->ask.rows, now_ns()};
    if (!ask.rows) {
      for (int i = 0; i < count; i++) complete_ask(slab->lanes[links[i].lane], 0, ask.number, 0, 0);
      continue;
    }
    for (int i = 0; i < count; i++) begin_ask(slab, base, *layout, links[i], ask);
    SocketWaiter waits(spin_ns);
    for (int left = count; left;) {
      bool moved = false;
      pollfd sockets[kMostLinks];
      left = 0;
      for (int i = 0; i < count; i++) {
        if (!links[i].is_open) continue;
        moved |= move_bytes(slab, base, *layout, links[i], ask);
        if (links[i].error) return 1 + i;
        if (!links[i].is_open) continue;
        const short events = static_cast<short>(POLLIN | (links[i].sent < links[i].to_send ? POLLOUT : 0));
        sockets[left++] = {links[i].socket, events, 0};
      }
      if (stopped(slab)) return kStopped;
      if (!left) break;
      if (moved)
        waits.progressed();
      else
        waits.wait(sockets, left);
    }
  }
}

// In the other pod: receives the next ask into the pod's slab. Returns kAsked; kNothing after `limit_ns`; kStopped if
// the connection ended, and then the link's `error` has the reason.
int heteroinfer_ff_receive(HeteroinferLink* link, void* memory, const Layout* layout, uint32_t max_rows,
                           uint64_t spin_ns, uint64_t limit_ns, uint32_t* layer, uint32_t* rows) {
  Slab* slab = static_cast<Slab*>(memory);
  char* base = static_cast<char*>(memory);
  Lane& own = slab->lanes[link->lane];
  // Time of the last ask, kept across calls: an idle rank must not spin again in each call.
  static thread_local uint64_t idle_since = 0;
  const uint64_t start = now_ns();
  if (!idle_since) idle_since = start;
  SocketWaiter waiter(spin_ns, idle_since);
  iovec parts[4];
  for (;;) {
    const bool has_header = link->received >= sizeof(Message);
    const int count = ask_parts(base, *layout, link->in, has_header ? link->in.rows : 0, parts);
    const bool moved = receive_some(*link, parts, count);
    if (link->error) return kStopped;
    const Message& in = link->in;
    if (!has_header && link->received == sizeof(Message)) {
      if (in.token != link->token || in.number <= slab->ask.number || !in.rows || in.rows > max_rows) {
        link->error = kMalformed;
        return kStopped;
      }
      continue;
    }
    if (has_header && link->received == total_bytes(parts, count)) break;
    if (moved) {
      waiter.progressed();
      continue;
    }
    if (waiter.polls % 16 == 15 && now_ns() - start >= limit_ns) {
      own.idle_ns += now_ns() - start;
      return kNothing;
    }
    pollfd socket{link->socket, POLLIN, 0};
    waiter.wait(&socket, 1);
  }
  link->received = 0;
  *layer = slab->ask.layer = link->in.layer;
  *rows = slab->ask.rows = link->in.rows;
  own.idle_ns += now_ns() - start;
  idle_since = 0;
  store(&slab->bell.steps, link->in.steps);
  store(&own.seen, link->in.number);
  store(&slab->ask.number, link->in.number);
  if (layout->lanes > 1) {
    __atomic_fetch_add(&slab->bell.rung, 1, __ATOMIC_ACQ_REL);
    wake(&slab->bell.rung);
  }
  return kAsked;
}

// Waits for the pod's other ranks, and sends their sum with this rank's part, which is in the slab and counted
// by `heteroinfer_ff_answer`. Returns 0; 1 + lane: that lane is late; -1 - lane: it answered with a status (this
// is sent too); INT_MIN: the connection ended, or took no bytes within `limit_ns`.
int heteroinfer_ff_reply(HeteroinferLink* link, void* memory, const Layout* layout, uint64_t began_ns,
                         uint64_t spin_ns, uint64_t limit_ns) {
  Slab* slab = static_cast<Slab*>(memory);
  char* base = static_cast<char*>(memory);
  const uint64_t number = slab->ask.number;
  const uint32_t rows = slab->ask.rows;
  int result = slab->lanes[link->lane].status ? -1 - static_cast<int>(link->lane) : 0;
  Waiter waiter(spin_ns, limit_ns);
  for (uint32_t lane = 0; lane < layout->lanes && !result; lane++) {
    Lane& other = slab->lanes[lane];
    for (;;) {
      const uint64_t answered = load(&other.answered);
      if (answered == number) break;
      const bool late = !waiter.wait(&other.answered, static_cast<uint32_t>(answered), &other.sleeps);
      if (late && load(&other.answered) != number) return static_cast<int>(1 + lane);
    }
    if (load(&other.status)) result = -1 - static_cast<int>(lane);
  }
  // Overwrites lane 0's answer with the sum; each element is read before it is overwritten.
  if (!result && layout->lanes > 1) sum_lanes(base, *layout, base + layout->y, uint64_t{rows} * layout->hidden);
  link->out = {link->token, number, slab->ask.layer, rows, result ? 1 : 0, 0, now_ns() - began_ns};
  link->sent = 0;
  iovec parts[4];
  const int count = answer_parts(base, *layout, link->out, 0, result ? 0 : rows, parts);
  link->to_send = total_bytes(parts, count);
  SocketWaiter waits(spin_ns);
  for (uint64_t since = now_ns(); link->sent < link->to_send;) {
    if (send_some(*link, parts, count)) {
      since = now_ns();
      waits.progressed();
      continue;
    }
    if (!link->error && now_ns() - since >= limit_ns) link->error = ETIMEDOUT;
    if (link->error) return INT_MIN;
    pollfd socket{link->socket, POLLOUT, 0};
    waits.wait(&socket, 1);
  }
  return result;
}

}  // extern "C"
#pragma GCC visibility pop
