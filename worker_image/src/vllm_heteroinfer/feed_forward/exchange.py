"""Sends asks of a CPU rank through the slab, and watches the lanes of any asking rank. Imports torch.

`cuda_exchange` sends the asks of a GPU. A GPU rank also uses this module's start and its `FeedForwardWatch`.
"""

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import RankAssignment
from vllm_heteroinfer.feed_forward import slab_library
from vllm_heteroinfer.feed_forward.lane_judge import LaneError, LaneFailedError, LaneJudge, SlabState, Verdict
from vllm_heteroinfer.feed_forward.slab import Shape, Slab, create
from vllm_heteroinfer.pod.threads import start_thread

if TYPE_CHECKING:
    from vllm_heteroinfer.group.deadline import Deadline
    from vllm_heteroinfer.group.rendezvous import GroupStore

PROBE_LAYER: Final = 0xFFFF_FFFE
"""Layer number of the first ask, a test: each feed-forward rank answers it with the rows of the ask."""
SPIN_NS: Final = 100_000
"""Time that an asking CPU rank spins before it sleeps until the answer."""
STALL_BASE_S: Final = 1.5
STALL_TIMES: Final = 20.0
"""A feed-forward rank is stuck after this multiple of its warm-up time, but not before STALL_BASE_S."""
WATCH_INTERVAL_S: Final = 0.1
OWN_REPORT_S: Final = 1.0
"""Time for a failed rank to report its own exception, before the asking rank accuses the failed rank."""
NAMING_LIMIT_S: Final = 2.0
"""Time for the watch to find the late rank and end this process, after the device gave up waiting."""


def offer_key(rank: int) -> str:
    """Returns the key of the asking rank's offer in the group's store."""
    return f"feed-forward/slab/{rank}"


def lane_key(rank: int) -> str:
    """Returns the key under which a feed-forward rank reports that it is ready, in the group's store."""
    return f"feed-forward/lane/{rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneReady:
    """Report of a feed-forward rank that is ready to answer.

    Attributes:
        nonce: number in hex that the rank wrote into the asking rank's slab, as a proof that it maps this
            memory; "" for a rank of another pod, which does not map it.
        ask_s: seconds for one row in the rank's slowest layer.
        row_s: seconds per row in the rank's largest warm-up batch, in its first layer.
        host: address at which the rank waits for the asking rank's connection; "" except for the first
            feed-forward rank of each other pod.
        port: port of `host`; 0 if `host` is "".
    """

    nonce: str
    ask_s: float
    row_s: float
    host: str = ""
    port: int = 0


def open_slab(
    shape: Shape,
    asking: RankAssignment,
    lanes: Sequence[RankAssignment],
    store: "GroupStore",
    deadline: "Deadline",
) -> tuple[Slab, tuple[LaneReady, ...]]:
    """Creates a slab, and waits until every rank behind a lane is ready.

    Ranks of this pod are ready only after they have mapped the slab.

    Args:
        asking: the rank that creates the slab: the asking rank, or the first feed-forward rank of another
            pod, for its own pod. Such a feed-forward rank is also the first of `lanes`.
        lanes: rank of each lane; for another pod, the pod's first feed-forward rank.

    Returns:
        The slab, and the reports of all lanes except the asking rank's own.

    Raises:
        ContractError: a rank mapped other memory.
        TimeoutError: a rank was not ready by the deadline.
    """
    slab, offer = create(shape)
    store.put(offer_key(asking.rank), offer.to_json())
    ready = []
    for lane, rank in enumerate(lanes):
        if rank == asking:
            continue
        awaited = f"message from feed-forward rank {rank.rank} that it is ready"
        text = store.get(lane_key(rank.rank), deadline, awaited=awaited, rank=rank.rank)
        report = codec.from_json(LaneReady, text)
        ready.append(report)
        if rank.pod == asking.pod and slab.read_lane(lane).nonce.hex() != report.nonce:
            raise ContractError(
                f"feed-forward rank {rank.rank}: must share memory with rank {asking.rank} (the test number "
                f"that rank {rank.rank} wrote did not arrive). Run both ranks in one PID namespace"
            )
    return slab, tuple(ready)


def stall_limit_s(ready: Sequence[LaneReady], rows: int) -> float:
    """Returns the seconds after which a feed-forward rank without an answer to `rows` rows is stuck."""
    ask_s = max((lane.ask_s for lane in ready), default=0.0)
    row_s = max((lane.row_s for lane in ready), default=0.0)
    return max(STALL_BASE_S, STALL_TIMES * ask_s) + STALL_TIMES * rows * row_s


def no_description(lane: int) -> str:
    """Returns "". It is the `describe_ask` of a rank whose lanes are all in its own pod."""
    del lane
    return ""


class HostExchange:
    """Sends asks from the host. Only one thread at a time may use this object."""

    def __init__(
        self,
        slab: Slab,
        lanes: Sequence[RankAssignment],
        ready: Sequence[LaneReady],
        describe_ask: Callable[[int], str] = no_description,
    ) -> None:
        """Prepares asks through `slab`.

        Args:
            lanes: rank of each lane.
            ready: report of each lane's rank.
            describe_ask: describes, for a lane of another pod, how far the last ask got.
        """
        self.slab = slab
        self._lanes, self._ready, self._describe_ask = lanes, ready, describe_ask
        self._exchange = slab_library.load().heteroinfer_ff_exchange
        self._layout = ctypes.byref(slab.layout)

    def ask(
        self,
        layer: int,
        x: torch.Tensor,
        ids: torch.Tensor | None,
        weights: torch.Tensor | None,
        padding: torch.Tensor | None,
    ) -> torch.Tensor:
        """Sends an ask, waits for the answer, and returns it.

        Raises:
            LaneError: a feed-forward rank is stuck, or answered that it failed.
        """
        rows = x.shape[0]
        out = torch.empty_like(x)
        unpadded_rows = rows if padding is None else int(rows - padding.sum())
        if unpadded_rows < rows:
            out[unpadded_rows:] = 0  # padding rows come last, and no rank computes them
        check_ask(self.slab.shape, x, ids)
        limit_ns = int(stall_limit_s(self._ready, unpadded_rows) * 1e9)
        result = self._exchange(
            self.slab.address,
            self._layout,
            layer,
            unpadded_rows,
            x.data_ptr(),
            None if ids is None else ids.data_ptr(),
            None if weights is None else weights.data_ptr(),
            out.data_ptr(),
            SPIN_NS,
            limit_ns,
        )
        if result:
            self._raise_error(result, layer, unpadded_rows, limit_ns / 1e9)
        return out

    def _raise_error(self, result: int, layer: int, rows: int, limit_s: float) -> None:
        """Raises the error for a failed ask.

        Args:
            result: 1 + lane of a rank that is late, -1 - lane of a rank that failed, or WAS_STOPPED.
        """
        if result == slab_library.WAS_STOPPED:
            raise RuntimeError("feed-forward ask: not answered, because the group is ending")
        lane = abs(result) - 1
        rank = self._lanes[lane].rank
        if result > 0:
            raise build_late_error(rank, layer, rows, limit_s, self._describe_ask(lane))
        time.sleep(OWN_REPORT_S)  # the supervisor prefers the failed rank's own report, which has the cause
        raise build_failed_error(rank, layer, rows)


def build_late_error(rank: int, layer: int, rows: int, late_s: float, note: str = "") -> LaneError:
    """Returns the error for a feed-forward rank that sent no answer within `late_s` seconds.

    Args:
        note: for a rank of another pod, how far the ask to this rank got, in parentheses; otherwise "".
    """
    return LaneError(
        rank,
        f"feed-forward rank {rank}: sent no answer within {late_s:.1f} s for layer {layer} with {rows} rows"
        f"{note}. Read the log of rank {rank}",
    )


def build_failed_error(rank: int, layer: int, rows: int) -> LaneFailedError:
    """Returns the error for a feed-forward rank whose computation failed."""
    return LaneFailedError(
        rank,
        f"feed-forward rank {rank}: the computation of layer {layer} with {rows} rows failed (the rank did "
        f"not report the cause). Read the log of rank {rank}",
    )


def check_ask(shape: Shape, x: torch.Tensor, ids: torch.Tensor | None) -> None:
    """Raises ValueError for an ask that does not fit the slab."""
    rows, hidden = x.shape
    topk, dtype = 0 if ids is None else ids.shape[1], str(x.dtype).removeprefix("torch.")
    if rows > shape.max_rows or (hidden, topk, dtype) != (shape.hidden, shape.topk, shape.dtype):
        raise ValueError(
            f"feed-forward ask: must have at most {shape.max_rows} rows, hidden size {shape.hidden}, dtype "
            f"{shape.dtype} and {shape.topk} experts per row (got {rows} rows, hidden size {hidden}, dtype "
            f"{dtype} and {topk} experts). "
            "This is a defect of HeteroInfer. Report it, and name the model"
        )


def probe(asks: Any, shape: Shape, device: torch.device, ranks: int) -> None:
    """Sends a test pattern to all lanes, and checks that each rank behind the lanes returned the pattern.

    The answer is the sum of all returned patterns, so it must be the pattern times the number of ranks.

    Raises:
        RuntimeError: the sum of the answers is wrong.
    """
    rows = min(shape.max_rows, 64)
    # Small numbers, so that the sum of MAX_LANES patterns is exact in bfloat16.
    pattern = torch.arange(rows * shape.hidden) % 7 + 1
    x = pattern.view(rows, shape.hidden).to(getattr(torch, shape.dtype)).to(device)
    ids = weights = None
    if shape.topk:
        ids = torch.zeros((rows, shape.topk), dtype=torch.int32, device=device)
        weights = torch.zeros((rows, shape.topk), dtype=torch.float32, device=device)
    answer = asks.ask(PROBE_LAYER, x, ids, weights, None)
    if not torch.equal(answer, x * ranks):
        raise RuntimeError(
            f"feed-forward ask: the answers of {ranks} feed-forward ranks to a test pattern have a wrong sum "
            "(perhaps this device does not see writes of other processes to shared memory). Restart the "
            "group. If the error repeats, report it"
        )


class FeedForwardWatch:
    """A thread that ends this rank if a feed-forward rank does not answer the GPU in time.

    The GPU itself waits for answers, so without this thread no code on the host would notice a feed-forward
    rank that hangs. A lane is the place of one feed-forward rank in the slab.
    """

    def __init__(
        self,
        slab: Slab,
        lanes: Sequence[RankAssignment],
        ready: Sequence[LaneReady],
        fail: Callable[[BaseException], Any],
        describe_ask: Callable[[int], str] = no_description,
    ) -> None:
        """Starts the thread.

        Args:
            lanes: the feed-forward rank of each lane.
            ready: each lane's report that its rank is ready to answer.
            fail: ends this rank with an error; does not return.
            describe_ask: describes how far the last ask to a lane of another pod got; takes the lane.
        """
        self._slab, self._lanes, self._ready, self._fail = slab, lanes, ready, fail
        self._describe_ask = describe_ask
        self._ended = threading.Event()
        self._thread = start_thread(self._run, name="heteroinfer-feed-forward", failed=fail)

    def check_steps(self) -> None:
        """Checks that the device never gave up waiting; only then are the results of a step valid.

        Raises:
            RuntimeError: the device gave up waiting for an answer. Before the error, this method waits up to
                NAMING_LIMIT_S, so that the watch can end this process with an error that names the rank.
        """
        if self._slab.device_gave_up:
            self._thread.join(NAMING_LIMIT_S)
            raise RuntimeError(
                "the GPU gave up waiting for a feed-forward rank, so the result of this step is invalid. "
                "Read the logs of the feed-forward ranks"
            )

    def close(self) -> None:
        """Ends the thread, and waits up to 5 s for its end."""
        self._ended.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        """Judges the lanes every WATCH_INTERVAL_S seconds. Ends this rank at a verdict."""
        lane_judge = LaneJudge(WATCH_INTERVAL_S, time.monotonic())
        while not self._ended.wait(WATCH_INTERVAL_S):
            self._slab.add_check()  # a waiting GPU kernel gives up only if this count grew
            verdict = lane_judge.judge(self._observe_lanes(), time.monotonic())
            if verdict is not None:
                self._fail(self._build_error(verdict))
                return

    def _observe_lanes(self) -> SlabState:
        """Reads the slab's control words for the judge."""
        slab = self._slab
        last_ask, gave_up = slab.asked, slab.device_gave_up
        views = [slab.read_lane(lane) for lane in range(len(self._lanes))]
        return SlabState(
            last_ask=last_ask,
            last_answers=tuple(view.answered for view in views),
            failed=tuple(view.status != 0 for view in views),
            limit_s=stall_limit_s(self._ready, slab.asked_rows),
            gave_up=gave_up,
            given_up_lane=slab.given_up_lane if gave_up else None,
        )

    def _build_error(self, verdict: Verdict) -> RuntimeError:
        """Returns the error that ends this rank for a verdict."""
        layer, rows = self._slab.asked_layer, self._slab.asked_rows
        if verdict.lane is None:
            return RuntimeError(
                f"the GPU gave up waiting for an answer near layer {layer}, although every feed-forward rank "
                "has answered. Restart the group. If the error repeats, report it"
            )
        accused = self._lanes[verdict.lane].rank
        if not verdict.failed:
            return build_late_error(accused, layer, rows, verdict.waited_s, self._describe_ask(verdict.lane))
        self._ended.wait(OWN_REPORT_S)  # the supervisor prefers the failed rank's own report
        return build_failed_error(accused, layer, rows)
