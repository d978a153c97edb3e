"""How a feed-forward rank gets asks and sends answers: through shared memory of its pod, or over TCP.

An ask is the asking rank's request to compute a layer for some rows.
"""

import ctypes
import os
import time
from dataclasses import replace
from typing import Any, Protocol

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.feed_forward import pod_link, slab_library
from vllm_heteroinfer.feed_forward.exchange import (
    OWN_REPORT_S,
    LaneReady,
    build_failed_error,
    build_late_error,
    lane_key,
    offer_key,
    open_slab,
    stall_limit_s,
)
from vllm_heteroinfer.feed_forward.slab import Offer, Shape, Slab, check_offer, connect
from vllm_heteroinfer.feed_forward.slab_lanes import asking_lanes, pod_lanes
from vllm_heteroinfer.feed_forward.spinning import spin_time_ns
from vllm_heteroinfer.pod import addresses
from vllm_heteroinfer.pod.lost_peer import PeerGoneError
from vllm_heteroinfer.rank.context import RankContext

ACCUSE_EARLIER_S = 0.3
"""A pod's first rank reports a stuck rank of its pod this many seconds before the asking rank's time limit.

At the limit, the asking rank would report the first rank as stuck."""


class Line(Protocol):
    """The connection of a feed-forward rank to the rank that asks it.

    Attributes:
        slab: has this rank's inputs and its part of the answers.
        lane: number of this rank's lane in the slab.
    """

    slab: Slab
    lane: int

    def report_ready(self, ask_s: float, row_s: float) -> None:
        """Reports that this rank can answer, with the times of `LaneReady`."""

    def next(self, limit_ns: int, layer: Any, rows: Any) -> bool:
        """Waits for an ask. Returns whether an ask came within the limit.

        Args:
            layer: pointer to a number that gets the ask's layer.
            rows: pointer to a number that gets the ask's number of rows.

        Raises:
            PeerGoneError: the rank that asks has ended.
        """

    def answer(self, status: int, rows: int, ids: int | None, topk: int, busy_ns: int) -> None:
        """Answers the last ask, and adds its rows, experts and time to the lane's counters.

        Args:
            status: 0 if the computation succeeded.
            ids: address of the rows' experts, [rows, topk] int32; None for an MLP.
            busy_ns: nanoseconds of computing.
        """


def open_line(context: RankContext, expected: Shape) -> Line:
    """Opens this rank's line to the asking rank, which this rank serves.

    A rank in the asking rank's pod maps the asking rank's slab. In another pod, the first feed-forward rank
    creates a slab for its pod and has the TCP connection to the asking rank. The pod's other ranks map this
    slab.

    Args:
        expected: shape of the asking rank's slab, with any number of lanes.

    Raises:
        ContractError: the ranks disagree about the shape, or this process cannot map the slab's memory.
        TimeoutError: another rank was not ready by the deadline.
    """
    plan, rank = context.plan, context.rank
    asking = plan.asking_rank(rank)
    shape = replace(expected, lanes=len(asking_lanes(plan, asking)))
    if rank.pod == asking.pod:
        return SlabLine(context, asking.rank, asking_lanes(plan, asking).index(rank), shape)
    lanes = pod_lanes(plan, rank)
    if rank == lanes[0]:
        return PodLine(context, shape)
    return SlabLine(context, lanes[0].rank, lanes.index(rank), replace(shape, lanes=len(lanes)))


def _wait_for_offer(context: RankContext, rank: int) -> Offer:
    """Waits for the offer of a slab by its owner, and returns the offer."""
    awaited = f"shared memory (slab) of rank {rank}"
    return Offer.from_json(context.store.get(offer_key(rank), context.startup, awaited=awaited, rank=rank))


class SlabLine:
    """A line through a slab of another process of this pod."""

    def __init__(self, context: RankContext, owner: int, lane: int, shape: Shape) -> None:
        """Maps the slab of rank `owner`, in which this rank has a lane."""
        self._context, self._owner, self.lane = context, owner, lane
        self.slab, self._nonce = connect(_wait_for_offer(context, owner), lane, shape)
        self._spin_ns = spin_time_ns(os.environ)
        calls, self._address = slab_library.load(), self.slab.address
        self._wait, self._answer = calls.heteroinfer_ff_next, calls.heteroinfer_ff_answer

    def report_ready(self, ask_s: float, row_s: float) -> None:
        """Reports that this rank can answer, with the nonce that it wrote into the slab."""
        ready = LaneReady(nonce=self._nonce.hex(), ask_s=ask_s, row_s=row_s)
        self._context.store.put(lane_key(self._context.rank.rank), codec.to_json(ready))

    def next(self, limit_ns: int, layer: Any, rows: Any) -> bool:
        """Waits for an ask in the slab. Returns whether an ask came within the limit.

        Raises:
            PeerGoneError: the asking rank has ended.
        """
        result = self._wait(self._address, self.lane, self._spin_ns, limit_ns, layer, rows)
        if result == slab_library.STOPPED:
            raise PeerGoneError(
                self._owner,
                f"rank {self._owner} has ended, so this rank gets no more layers to compute. Read the log of "
                f"rank {self._owner}",
            )
        return bool(result == slab_library.ASKED)

    def answer(self, status: int, rows: int, ids: int | None, topk: int, busy_ns: int) -> None:
        """Marks the last ask as answered in this rank's lane, and adds to the lane's counters."""
        self._answer(self._address, self.lane, status, rows, ids, topk, busy_ns)


class PodLine:
    """The line of the first feed-forward rank in a pod without the asking rank.

    It receives asks over TCP into the pod's slab, and sends the sum of the answers of the pod's ranks.
    """

    lane = 0

    def __init__(self, context: RankContext, expected: Shape) -> None:
        """Creates the pod's slab, and listens for the asking rank, which connects after `report_ready`."""
        self._context = context
        self._asking = context.plan.asking_rank(context.rank).rank
        # The pod's slab has the shape of the asking rank's slab, but a lane for each rank of this pod.
        offered = _wait_for_offer(context, self._asking).shape
        check_offer(offered, expected, f"feed-forward rank {context.rank.rank}")
        self._lanes = pod_lanes(context.plan, context.rank)
        self._shape = replace(offered, lanes=len(self._lanes))
        self._spin_ns = spin_time_ns(os.environ)
        self.slab, self._ready = open_slab(
            self._shape, context.rank, self._lanes, context.store, context.startup
        )
        self._listener = pod_link.Listener(addresses.own_address(os.environ))
        self._ask_arrived_ns = 0

    def report_ready(self, ask_s: float, row_s: float) -> None:
        """Reports the pod as ready, and waits until the asking rank has connected and measured the network.

        The pod answers when its slowest rank has answered, so the highest times of its ranks are reported.
        """
        context = self._context
        ready = LaneReady(
            nonce="",
            ask_s=max([ask_s, *(each.ask_s for each in self._ready)]),
            row_s=max([row_s, *(each.row_s for each in self._ready)]),
            host=addresses.own_address(os.environ),
            port=self._listener.port,
        )
        context.store.put(lane_key(context.rank.rank), codec.to_json(ready))
        context.reporter.set_awaited_rank(self._asking)
        self._connection = self._listener.accept(context.launch, self._asking, context.startup)
        try:
            self._connection.answer_trials()
        except (OSError, ContractError) as error:
            raise PeerGoneError(
                self._asking,
                f"the connection to rank {self._asking} ended while its speed was measured ({error}). Read "
                f"the log of rank {self._asking}",
            ) from error
        context.reporter.set_awaited_rank(None)
        self._link = self._connection.link(self.lane)
        self._link_pointer, self._layout_pointer = ctypes.byref(self._link), ctypes.byref(self.slab.layout)

    def next(self, limit_ns: int, layer: Any, rows: Any) -> bool:
        """Receives an ask over TCP into the pod's slab. Returns whether an ask came within the limit.

        Raises:
            PeerGoneError: the connection to the asking rank has ended.
        """
        result = slab_library.load().heteroinfer_ff_receive(
            self._link_pointer,
            self.slab.address,
            self._layout_pointer,
            self._shape.max_rows,
            self._spin_ns,
            limit_ns,
            layer,
            rows,
        )
        self._ask_arrived_ns = time.monotonic_ns()  # the time limit of the pod's ranks starts here
        if result == slab_library.STOPPED:
            raise self._build_lost_error()
        return bool(result == slab_library.ASKED)

    def answer(self, status: int, rows: int, ids: int | None, topk: int, busy_ns: int) -> None:
        """Waits for the answers of the pod's ranks, and sends their sum to the asking rank.

        Blames a late rank of the pod before the asking rank's own time limit (ACCUSE_EARLIER_S).

        Raises:
            LaneError: another rank of the pod is late, or failed.
            PeerGoneError: the connection to the asking rank has ended.
        """
        calls, slab = slab_library.load(), self.slab
        calls.heteroinfer_ff_answer(slab.address, self.lane, status, rows, ids, topk, busy_ns)
        limit_s = stall_limit_s(self._ready, slab.asked_rows) - ACCUSE_EARLIER_S
        limit_ns = int(limit_s * 1e9)
        result = calls.heteroinfer_ff_reply(
            self._link_pointer,
            slab.address,
            self._layout_pointer,
            self._ask_arrived_ns,
            self._spin_ns,
            limit_ns,
        )
        if result == slab_library.WAS_STOPPED:
            raise self._build_lost_error()
        # A result of n means that rank n - 1 of the pod is late. -n means that rank n - 1 of the pod failed.
        if result > 0:
            raise build_late_error(self._lanes[result - 1].rank, slab.asked_layer, slab.asked_rows, limit_s)
        if result < -1:  # -1 means that this rank failed, which raises its own error elsewhere
            time.sleep(OWN_REPORT_S)  # the failed rank reports its own error first
            raise build_failed_error(self._lanes[-1 - result].rank, slab.asked_layer, slab.asked_rows)

    def _build_lost_error(self) -> PeerGoneError:
        """Returns the error for the ended connection to the asking rank, with the reason."""
        error, read_log = self._link.error, f"Read the log of rank {self._asking}"
        if error == pod_link.MALFORMED:
            reason = (
                "the rank sent a message that is not a request for a layer. Start all pods from one image"
            )
        elif error == pod_link.END_OF_FILE:
            reason = f"rank {self._asking} closed it. {read_log}"
        else:  # an errno
            reason = f"{os.strerror(max(error, 0))}. {read_log}"
        return PeerGoneError(
            self._asking,
            f"the connection to rank {self._asking}, which sends the inputs of layers, has ended: {reason}",
        )
