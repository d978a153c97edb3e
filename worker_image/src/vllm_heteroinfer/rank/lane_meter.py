"""Reports of a feed-forward rank: metrics, step times and current work. Imports torch."""

import threading
from typing import Final

from prometheus_client import Counter

from heteroinfer_contract import metric_names
from vllm_heteroinfer.feed_forward.held import LoadedParts
from vllm_heteroinfer.feed_forward.slab import LaneView, Slab
from vllm_heteroinfer.pod.threads import start_thread
from vllm_heteroinfer.rank.context import RankContext

INTERVAL_S: Final = 0.25
"""Time between two reads of the lane's counters. A thread reads them, so that answers are not delayed."""


class LaneMeter:
    """Reads a lane's counters in a thread and reports them to the supervisor and Prometheus."""

    def __init__(self, context: RankContext, slab: Slab, lane: int, loaded_parts: LoadedParts) -> None:
        """Creates the metrics of the lane; `start` begins to report."""
        self._context, self._slab, self._lane = context, slab, lane
        self._expert_bytes = loaded_parts.stored_bytes // max(1, loaded_parts.experts)
        self._last = slab.read_lane(self._lane)
        self._seen_steps = slab.steps
        """The slab's counter of steps, at the last report. It wraps around at 32 bits."""
        self._total_steps = 0
        self._ended = threading.Event()

        def counter(name: str, text: str) -> Counter:
            labelled = Counter(name, text, metric_names.RANK_LABELS, registry=context.metrics.registry)
            return labelled.labels(*context.metrics.labels)

        self._counters = {
            "busy_ns": counter(
                metric_names.FEED_FORWARD_COMPUTE_SECONDS_TOTAL, "Seconds in which this rank computed layers"
            ),
            "idle_ns": counter(
                metric_names.FEED_FORWARD_WAIT_SECONDS_TOTAL,
                "Seconds in which this rank waited for the asking rank",
            ),
            "asks": counter(metric_names.FEED_FORWARD_ASKS_TOTAL, "Layers computed, counted once per step"),
            "rows": counter(
                metric_names.FEED_FORWARD_ROWS_TOTAL, "Tokens computed, counted once for each layer"
            ),
            "experts": counter(
                metric_names.FEED_FORWARD_EXPERTS_TOTAL,
                "Experts whose weights were read, summed over layers and steps",
            ),
            "bytes": counter(metric_names.FEED_FORWARD_BYTES_TOTAL, "Bytes of weights read"),
        }

    def start(self) -> None:
        """Starts the thread; an exception in it ends this rank."""
        start_thread(self._run, name="heteroinfer-lane", failed=self._context.fail)

    def _run(self) -> None:
        """Reports changes at each interval, until the process ends."""
        while not self._ended.wait(INTERVAL_S):
            self.report_changes()

    def report_changes(self) -> None:
        """Reports the changes since the last call: metrics, step times, and an ask that takes long."""
        current, last = self._slab.read_lane(self._lane), self._last
        self._last = current
        new_steps = (self._slab.steps - self._seen_steps) % 2**32
        # Before the first step, the asking rank only measures and warms up.
        if new_steps or self._total_steps:
            self._count(current, last)
        # An ask takes long if the last read saw the same ask in progress.
        is_in_progress = current.seen != current.answered
        takes_long = is_in_progress and current.seen == last.seen
        self._context.reporter.set_work(
            f"layer {self._slab.asked_layer} of request {current.seen}" if takes_long else None
        )
        if not new_steps:
            return
        self._seen_steps = (self._seen_steps + new_steps) % 2**32
        self._total_steps += new_steps
        busy_s = (current.busy_ns - last.busy_ns) / 1e9
        # A wait adds its whole time when it ends, so the difference may include time before the last read.
        idle_s = min(INTERVAL_S, (current.idle_ns - last.idle_ns) / 1e9)
        self._context.reporter.set_step_times(
            self._total_steps,
            step_s=(busy_s + idle_s) / new_steps,
            compute_s=busy_s / new_steps,
            wait_s=idle_s / new_steps,
            transfer_s=0.0,
        )

    def _count(self, current: LaneView, last: LaneView) -> None:
        """Adds the changes between two reads of the lane's counters to the metrics."""
        for field in ("busy_ns", "idle_ns"):
            self._counters[field].inc((getattr(current, field) - getattr(last, field)) / 1e9)
        for field in ("asks", "rows", "experts"):
            self._counters[field].inc(getattr(current, field) - getattr(last, field))
        self._counters["bytes"].inc((current.experts - last.experts) * self._expert_bytes)
