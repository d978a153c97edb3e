"""Metrics of a rank: how a step spends its time. Each rank serves its metrics on its own HTTP port.

The time of a step begins when its call arrives, and ends when its work is done, also on a GPU. It is the sum
of compute, wait for peers, and transfer. Between steps a rank is idle. Warm-up and the group's own first
request do not count.
Imports prometheus_client; not torch or vLLM.
"""

import contextlib
import http.server
import logging
import resource
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from heteroinfer_contract import codec, metric_names, names
from heteroinfer_contract.cgroups import kernel_bytes
from heteroinfer_contract.plan import RankAssignment
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.distributed.meter import Meter
from vllm_heteroinfer.pod import addresses
from vllm_heteroinfer.pod.channel import RankReporter
from vllm_heteroinfer.pod.threads import start_thread

_logger = logging.getLogger(__name__)

_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_SMOOTHING = 0.1
"""Weight of the newest decode step in the moving averages that the rank reports to its supervisor."""
MAX_CONNECTIONS = 32
"""Connections of the metrics port, each with a thread. A further connection closes the oldest."""
_REQUEST_TIMEOUT_S = 5.0


@dataclass(slots=True)
class Step:
    """The time that a step has taken so far.

    Attributes:
        step_s: seconds from the first call to the end, without the time between calls.
        wait_s: the part of `step_s` spent waiting for peers.
        transfer_s: the part of `step_s` spent copying and sending, by direction.
        tokens: number of prompt tokens and of decode tokens, if known.
        between_calls: whether the worker is in none of the step's calls.
        began: start of the first call, by time.perf_counter().
        on_device: whether the device still works on the step after the worker's calls.
        device_s: returns the seconds of the forward pass on the device; None on CPU ranks.
    """

    step_s: float = 0.0
    wait_s: float = 0.0
    transfer_s: dict[str, float] = field(default_factory=lambda: {"send": 0.0, "recv": 0.0})
    transfer_bytes: dict[str, int] = field(default_factory=lambda: {"send": 0, "recv": 0})
    tokens: tuple[int, int] | None = None
    between_calls: bool = False
    began: float = 0.0
    on_device: bool = False
    device_s: Callable[[], float] | None = None


class RankMetrics(Meter):
    """The metrics of a rank, and the meter of its steps.

    Only the worker's thread may call the methods. Any thread may call the functions that
    `continue_on_device` and `continue_into_next_step` return.
    """

    def __init__(
        self, rank: RankAssignment, launch: PodLaunch, reporter: RankReporter, *, writes_metrics: bool = True
    ) -> None:
        """Creates the metrics. Without `writes_metrics`, steps are only reported to the supervisor."""
        self.registry = CollectorRegistry()
        self.writes_metrics = writes_metrics
        self._reporter = reporter
        self.labels = (launch.group, str(rank.rank), str(rank.stage), rank.role, rank.device.value)
        self._create_step_metrics()
        self._create_rank_metrics(rank)
        self._client_steps = 0
        self._all_steps = 0
        """Number of finished steps, including those of the group's own request. It names steps in reports."""
        self._averages: tuple[float, ...] = ()
        self._step_name: str | None = None
        self._step = Step()
        self._idle_since: float | None = None
        self._last_step_end = 0.0
        self._in_call = False
        self._steps_on_device = 0
        self._lock = threading.Lock()

    def _create_step_metrics(self) -> None:
        """Creates the metrics that each step updates."""
        by_phase = (*metric_names.RANK_LABELS, "phase")
        by_direction = (*metric_names.RANK_LABELS, "direction")

        def histogram(name: str, text: str, labels: tuple[str, ...]) -> Histogram:
            return Histogram(name, text, labels, buckets=_BUCKETS_S, registry=self.registry)

        self._step_seconds = histogram(
            metric_names.STEP_SECONDS, "Seconds from the start to the end of a step on this rank", by_phase
        )
        self._compute = histogram(
            metric_names.COMPUTE_SECONDS, "Seconds of this rank's own computing in a step", by_phase
        )
        self._device = histogram(
            metric_names.DEVICE_SECONDS, "Seconds of a step's forward pass on the GPU", by_phase
        )
        self._wait = histogram(metric_names.WAIT_SECONDS, "Seconds of waiting for peers in a step", by_phase)
        self._transfer = histogram(
            metric_names.TRANSFER_SECONDS, "Seconds of copying and sending in a step", by_direction
        )
        self._bytes = self._counter(
            metric_names.TRANSFER_BYTES_TOTAL,
            "Bytes that this rank sent to or received from other ranks",
            by_direction,
        )
        self._tokens = self._counter(
            metric_names.TOKENS_TOTAL, "Tokens that this rank has processed", by_phase
        )
        self._idle = self._counter(
            metric_names.IDLE_SECONDS_TOTAL,
            "Seconds that this rank waited for the engine between steps",
            metric_names.RANK_LABELS,
        ).labels(*self.labels)

    def _create_rank_metrics(self, rank: RankAssignment) -> None:
        """Creates the metrics of memory, prediction, heartbeat and transports, which no step updates."""
        self.kv_cache_bytes = self._gauge(metric_names.KV_CACHE_BYTES, "Bytes of this rank's KV cache")
        self.kv_blocks = self._gauge(metric_names.KV_BLOCKS, "Number of KV blocks of the group")
        self.weight_bytes = self._gauge(
            metric_names.WEIGHT_BYTES, "Bytes of this rank's weights after loading"
        )
        self._gauge(
            metric_names.PREDICTED_STEP_SECONDS,
            "Planned compute time of a decode step of one request, in seconds",
        ).set(rank.predicted_step_s)
        self._gauge(
            metric_names.HEARTBEAT_AGE_SECONDS,
            "Age in seconds of the last heartbeat from the leader; in the leader's pod, from the most silent "
            "follower",
        ).set_function(self._reporter.heartbeat_age_s)
        self._gauge(
            metric_names.LOCKED_MEMORY_BYTES, "Bytes of memory that this rank has locked or pinned"
        ).set_function(locked_memory_bytes)
        self._gauge(metric_names.LOCKED_MEMORY_LIMIT_BYTES, "Bytes of memory that this rank may lock").set(
            locked_memory_limit_bytes()
        )
        self._transport = Gauge(
            metric_names.TRANSPORT_INFO,
            "Transport of this rank's tensors to other ranks, in the label path. The value is always 1",
            (*metric_names.RANK_LABELS, "between", "path"),
            registry=self.registry,
        )

    def add_wait(self, seconds: float) -> None:
        """Adds time that this step waited for a peer. Outside a step (warm-up) it does nothing."""
        if self._in_call:
            self._step.wait_s += seconds

    def add_transfer(self, direction: str, seconds: float, num_bytes: int) -> None:
        """Adds time and bytes of a copy or message in this step; direction is `send` or `recv`."""
        if self._in_call:
            self._step.transfer_s[direction] += seconds
            self._step.transfer_bytes[direction] += num_bytes

    def set_awaited_rank(self, rank: int | None) -> None:
        """Reports to the supervisor which rank's message this rank waits for."""
        if self._in_call:
            self._reporter.set_work(self._step_name, waiting_for_rank=rank)

    def record_path(self, between: str, path: str) -> None:
        """Records how tensors travel between `stages`, or between `ranks` of a stage (TRANSPORT_INFO)."""
        self._transport.labels(*self.labels, between, path).set(1)
        self._reporter.add_transport(f"{between}:{path}")

    def report_locked_memory(self) -> None:
        """Reports the memory that this rank has locked, for the status of its group.

        A limit above codec.MAX_INT does not fit into a report, and no machine reaches it. It is reported as
        no limit.
        """
        limit_bytes = locked_memory_limit_bytes()
        self._reporter.set_locked_memory(
            int(locked_memory_bytes()), None if limit_bytes > codec.MAX_INT else int(limit_bytes)
        )

    def set_device_timer(self, seconds: Callable[[], float]) -> None:
        """Sets the function that returns the seconds of this step's forward pass on the device.

        The function is called after the step.
        """
        self._step.device_s = seconds

    def begin_call(self) -> None:
        """Begins a call of the current step. Counts the idle time since the previous call."""
        with self._lock:
            self._call_began = time.perf_counter()
            self._in_call, self._step.between_calls = True, False
            self._step.began = self._step.began or self._call_began  # only the step's first call sets it
            if self._idle_since is not None:
                self._idle.inc(self._call_began - self._idle_since)
        self._step_name = f"step {self._all_steps + 1}"
        self._reporter.set_work(self._step_name)

    def end_call(self) -> None:
        """Ends a call of the step. Until the next call this rank is idle, unless its device still works.

        If the device still works on this step, the end of that work adds the call's time to the step.
        """
        with self._lock:
            self._idle_since, self._in_call = time.perf_counter(), False
            self._step.between_calls = True
            if not self._step.on_device:
                self._step.step_s += self._idle_since - self._call_began
            if not self._steps_on_device:
                self._reporter.set_work(None)

    def continue_on_device(self) -> Callable[[float], None]:
        """Marks this step as running on the device after the worker's call returns.

        Call this method between `begin_call` and `end_call`. The worker's call returns before the device has
        finished. So the returned function, and not `end_call`, adds the time since `begin_call` to the step.

        Returns:
            A function to call once, from any thread, when the device is done. Its argument is the seconds of
            the last copy to the host, which count as sending.
        """
        step, call_began = self._step, self._call_began
        self._mark_on_device(step)

        def done(copy_s: float) -> None:
            """Ends the step's work on the device."""
            with self._lock:
                now = time.perf_counter()
                if step.between_calls:  # within a call, `end_call` adds the call's time
                    step.step_s += now - call_began
                step.transfer_s["send"] += copy_s
                self._mark_done_on_device(step, now)

        return done

    def continue_into_next_step(self) -> Callable[[], None]:
        """Marks this step as running on the device even when the next step's call begins.

        Such steps overlap. So that no time counts twice, a step's time begins at its first call, or at the
        end of the previous step if that is later.

        Returns:
            A function to call once, from any thread, when the step's answer is available.
        """
        step = self._step
        self._mark_on_device(step)

        def done() -> None:
            """Ends the step, whose time begins at its first call or at the previous step's end."""
            with self._lock:
                now = time.perf_counter()
                step.step_s = now - max(step.began, self._last_step_end)
                self._last_step_end = now
                self._mark_done_on_device(step, now)

        return done

    def _mark_on_device(self, step: Step) -> None:
        """Notes that the device still works on a step after the worker's calls."""
        with self._lock:
            step.on_device = True
            self._steps_on_device += 1

    def _mark_done_on_device(self, step: Step, now: float) -> None:
        """Ends a step's work on the device. Call it with the lock held.

        This rank is idle from then on, if no call runs and the device works on no other step.
        """
        step.on_device = False
        self._steps_on_device -= 1
        if not self._in_call:
            self._idle_since = now  # if the device still works on another step, its end sets this again
            if not self._steps_on_device:
                self._reporter.set_work(None)
        if step.tokens is not None:
            self._record_step(step, step.tokens)

    def finish_step(self, *, prefill_tokens: int, decode_tokens: int, for_client: bool = True) -> None:
        """Records the current step after all its calls.

        Args:
            prefill_tokens: prompt tokens of the step; a step with prompt tokens counts as prefill.
            for_client: whether the step serves a client. Steps of the group's own first request, which tests
                the group, are not recorded.
        """
        step, self._step, self._step_name = self._step, Step(), None
        self._all_steps += 1
        if not for_client:
            with self._lock:
                self._idle_since = None  # idle time starts with the first step of a client
            return
        with self._lock:
            step.tokens = (prefill_tokens, decode_tokens)
            if not step.on_device:
                self._record_step(step, step.tokens)

    def _record_step(self, step: Step, token_counts: tuple[int, int]) -> None:
        """Adds a finished step to the metrics, and to the averages that the supervisor gets.

        Args:
            token_counts: number of prompt tokens and of decode tokens.
        """
        prompt_tokens, _ = token_counts
        phase = metric_names.PHASE_PREFILL if prompt_tokens else metric_names.PHASE_DECODE
        scale_transfer_to_step(step)  # sampled times of copies can exceed the step
        transfer_s = sum(step.transfer_s.values())
        compute_s = max(0.0, step.step_s - step.wait_s - transfer_s)
        if self.writes_metrics:
            self._write_metrics(step, phase, token_counts, compute_s)
        self._client_steps += 1
        if phase == metric_names.PHASE_DECODE:
            self._update_averages(step.step_s, compute_s, step.wait_s, transfer_s)
        no_averages = (0.0, 0.0, 0.0, 0.0)  # before the first decode step
        self._reporter.set_step_times(self._client_steps, *(self._averages or no_averages))

    def _write_metrics(self, step: Step, phase: str, token_counts: tuple[int, int], compute_s: float) -> None:
        """Adds a finished step to the histograms and counters of its phase."""
        self._step_seconds.labels(*self.labels, phase).observe(step.step_s)
        self._compute.labels(*self.labels, phase).observe(compute_s)
        self._wait.labels(*self.labels, phase).observe(step.wait_s)
        if step.device_s is not None:
            self._device.labels(*self.labels, phase).observe(step.device_s())
        for direction in ("send", "recv"):
            if step.transfer_bytes[direction]:
                self._transfer.labels(*self.labels, direction).observe(step.transfer_s[direction])
                self._bytes.labels(*self.labels, direction).inc(step.transfer_bytes[direction])
        for label, count in zip(
            (metric_names.PHASE_PREFILL, metric_names.PHASE_DECODE), token_counts, strict=True
        ):
            if count:
                self._tokens.labels(*self.labels, label).inc(count)

    def _update_averages(self, *newest: float) -> None:
        """Updates the moving averages of decode steps with the newest values."""
        old = self._averages or newest
        self._averages = tuple(
            average + _SMOOTHING * (value - average) for average, value in zip(old, newest, strict=True)
        )

    def _counter(self, name: str, text: str, labels: tuple[str, ...]) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, metric_names.RANK_LABELS, registry=self.registry).labels(*self.labels)


def locked_memory_bytes(process: Path = Path("/proc/self")) -> float:
    """Returns the bytes of a process that are locked (mlock) or pinned for a device (RDMA).

    Returns 0 if the kernel does not count them (gVisor).
    """
    status = (process / "status").read_text()
    try:
        return float(kernel_bytes(status, "VmLck") + kernel_bytes(status, "VmPin"))
    except KeyError:
        return 0.0


def locked_memory_limit_bytes() -> float:
    """Returns the bytes that this process may lock; infinite without a limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return float("inf") if limit == resource.RLIM_INFINITY else float(limit)


def scale_transfer_to_step(step: Step) -> None:
    """Scales a step's transfer times down, so that together they fit into the step without its waits.

    Times of small GPU copies are sampled, so a step can get more transfer time than its copies took.
    """
    left_s, transfer_s = max(0.0, step.step_s - step.wait_s), sum(step.transfer_s.values())
    if transfer_s > left_s:
        for direction in step.transfer_s:
            step.transfer_s[direction] *= left_s / transfer_s


class MetricsServer(http.server.ThreadingHTTPServer):
    """An HTTP server with a limit on connections, so that idle clients cannot use up threads and files."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, host: str, port: int, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        """Listens at a port of an address, without looking up the host's name."""
        self._connections: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__((host, port), handler, bind_and_activate=False)
        # Replaces HTTPServer's socket: its own bind resolves the host's name, which takes seconds if no
        # resolver answers.
        self.socket.close()
        self.socket = addresses.open_listener(host, port)
        self.server_address = self.socket.getsockname()[:2]
        self.server_activate()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers a request in a thread. Closes the oldest connection if there are too many."""
        with self._lock:
            self._connections[request] = None
            too_many = len(self._connections) > MAX_CONNECTIONS
            oldest = next(iter(self._connections))
            if too_many:
                del self._connections[oldest]
        if too_many:
            with contextlib.suppress(OSError):  # the client has just closed this connection
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)


def serve(
    registry: CollectorRegistry,
    launch: PodLaunch,
    rank: RankAssignment,
    *,
    healthy: Callable[[], bool],
    failed: Callable[[BaseException], object],
) -> bool:
    """Serves /metrics and /healthz of a rank in a thread. Returns whether the port was free.

    If the port is in use, the rank logs an error and runs without metrics.

    Args:
        rank: the rank that serves. Its local rank is added to the port.
        healthy: whether /healthz answers 200 (otherwise 503).
        failed: called with the exception that ended the server's thread.
    """
    port = launch.address.metrics_port + rank.local_rank
    try:
        server = MetricsServer(launch.address.host, port, _define_handler(registry, healthy))
    except OSError as error:
        _logger.error(
            "rank %d: cannot listen at metrics port %d (%s), so this rank runs without metrics. End the "
            "process that uses the port, and restart the group",
            rank.rank,
            port,
            error,
        )
        return False
    start_thread(server.serve_forever, name="heteroinfer-metrics", failed=failed)
    return True


def _define_handler(
    registry: CollectorRegistry, healthy: Callable[[], bool]
) -> type[http.server.BaseHTTPRequestHandler]:
    """Defines and returns the class that answers requests to a rank's metrics port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = _REQUEST_TIMEOUT_S

        def do_GET(self) -> None:
            """Answers /metrics, /healthz, or 404."""
            if self.path == "/metrics":
                self._answer(200, generate_latest(registry), CONTENT_TYPE_LATEST)
            elif self.path == names.PATH_HEALTHZ:
                is_healthy = healthy()
                body = b"ok\n" if is_healthy else b"group lost\n"
                self._answer(200 if is_healthy else 503, body, "text/plain")
            else:
                self._answer(404, b"expected /metrics or /healthz\n", "text/plain")

        def _answer(self, status: int, body: bytes, kind: str) -> None:
            """Sends a response; `kind` is its content type."""
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Logs nothing, because there is a scrape every few seconds."""

    return Handler
