"""Relays the asks of an asking rank to feed-forward ranks in other pods.

A thread of the asking rank runs C++ code that relays asks. The slab has a lane for each other pod. The relay
sends each ask to the pod, and writes the pod's answer into the lane. So the code that asks (a kernel of the
GPU, or a call of the host) does not depend on the network. The thread calls neither CUDA nor Python while it
runs. Imports torch.
"""

import ctypes
import errno
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import RankAssignment
from heteroinfer_contract.pod_launch import PodLaunch
from heteroinfer_contract.printable import format_bytes
from vllm_heteroinfer.feed_forward import pod_link, slab_library
from vllm_heteroinfer.feed_forward.exchange import OWN_REPORT_S, LaneReady
from vllm_heteroinfer.feed_forward.lane_judge import LaneError
from vllm_heteroinfer.feed_forward.slab import Shape, Slab
from vllm_heteroinfer.pod.threads import start_thread

_logger = logging.getLogger(__name__)

_CHOICE_BYTES: Final = 8
"""Bytes of one expert of a row in an ask: its number and its weight."""
_HEADER_BYTES: Final = 40
"""Size of `Message` in kernels/source/feed_forward_link.cpp. Each ask and each answer begins with it."""
_SILENT_MACHINE_ERRORS: Final = frozenset({errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH})


@dataclass(frozen=True, slots=True)
class RelayedLane:
    """A lane that stands for another pod, and the connection to that pod.

    Attributes:
        lane: number of the lane in the asking rank's slab.
        rank: the pod's first feed-forward rank.
    """

    lane: int
    rank: RankAssignment
    connection: pod_link.Connection


def connect_all(
    lanes: Sequence[tuple[int, RankAssignment]],
    ready: Sequence[LaneReady],
    shape: Shape,
    launch: PodLaunch,
    asking: RankAssignment,
) -> tuple[tuple[RelayedLane, ...], tuple[LaneReady, ...]]:
    """Connects the asking rank to other pods, and measures each connection.

    Args:
        lanes: number of each lane of another pod, and the first rank of the pod.
        ready: reports of the ranks behind all lanes of the slab.

    Returns:
        The connected lanes, and `ready` with the time of the network added to the reports of other pods.

    Raises:
        LaneError: a rank cannot be reached, another process answers at the rank's port, or the connection
            ended.
    """
    connected_lanes, reports = [], list(ready)
    ask_bytes = shape.row_bytes + _CHOICE_BYTES * shape.topk  # of one row
    for lane, rank in lanes:
        report = reports[lane]
        connection, cost = _connect(rank, report, shape, ask_bytes, launch, asking)
        _logger.info(
            "feed-forward rank %d in pod %d: the network needs %.0f us for one token and its answer, and "
            "transfers %s per second of long batches",
            rank.rank,
            rank.pod,
            cost.round_trip_s * 1e6,
            format_bytes(cost.bytes_per_s),
        )
        connected_lanes.append(RelayedLane(lane, rank, connection))
        reports[lane] = replace(  # the rank's own time and the time of the network
            report,
            ask_s=report.ask_s + cost.round_trip_s,
            row_s=report.row_s + (ask_bytes + shape.row_bytes) / cost.bytes_per_s,
        )
    return tuple(connected_lanes), tuple(reports)


def _connect(
    rank: RankAssignment,
    report: LaneReady,
    shape: Shape,
    ask_bytes: int,
    launch: PodLaunch,
    asking: RankAssignment,
) -> tuple[pod_link.Connection, pod_link.LinkCost]:
    """Connects the asking rank to the rank of another pod, and measures the connection.

    Args:
        report: report of `rank`, with its address.
        ask_bytes: size of an ask of one row, without its header.

    Raises:
        LaneError: as in `connect_all`.
    """
    try:
        connection = pod_link.connect(report.host, report.port, launch, asking.rank, rank)
        cost = connection.measure(_HEADER_BYTES + ask_bytes, _HEADER_BYTES + shape.row_bytes, shape.max_rows)
    except ContractError as error:
        raise LaneError(rank.rank, f"feed-forward rank {rank.rank}: {error}") from error
    except OSError as error:
        raise LaneError(
            rank.rank,
            f"feed-forward rank {rank.rank}: rank {asking.rank} has no working connection to {report.host} "
            f"port {report.port} ({error}). Let the pods of a group reach each other at all ports, and read "
            f"the log of rank {rank.rank}",
        ) from error
    return connection, cost


def relay_cpus(env: Mapping[str, str]) -> frozenset[int]:
    """Returns the CPUs that the supervisor chose for the relay; none if ranks are not bound to CPUs."""
    text = env.get(names.ENV_RELAY_CPUS, "")
    return frozenset(int(cpu) for cpu in text.split(",")) if text else frozenset()


class Relay:
    """The thread that relays the asks of a slab."""

    def __init__(
        self,
        slab: Slab,
        relayed: Sequence[RelayedLane],
        *,
        spin_ns: int,
        cpus: Collection[int],
        fail: Callable[[BaseException], Any],
    ) -> None:
        """Starts the thread.

        Args:
            spin_ns: time that the relay spins for the next ask, and for answers, before it sleeps.
            cpus: CPUs for the thread; if empty, the thread uses the CPUs of the calling thread.
            fail: ends this rank with an error.
        """
        self._slab, self._relayed, self._cpus = slab, relayed, cpus
        self._links = (pod_link.Link * len(relayed))(*(lane.connection.link(lane.lane) for lane in relayed))
        self._spin_ns = spin_ns
        start_thread(self._run, name="heteroinfer-relay", failed=fail)

    def _run(self) -> None:
        """Relays asks until the slab is stopped; raises LaneError if a connection ends."""
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)
        result = slab_library.load().heteroinfer_ff_relay(
            self._slab.address,
            ctypes.byref(self._slab.layout),
            self._links,
            len(self._relayed),
            self._spin_ns,
        )
        if result > 0:  # 1 + the index of a connection that ended; 0 if the slab was stopped
            raise self._build_error(result - 1)

    def _build_error(self, index: int) -> LaneError:
        """Returns the error for a connection that ended. The error accuses the pod's first rank.

        If that rank's process may have ended, waits OWN_REPORT_S first. In this time the pod's own report,
        which has the cause, can reach the leader.

        Args:
            index: index of the connection in `self._relayed`.
        """
        rank, error = self._relayed[index].rank, self._links[index].error
        if error == pod_link.MALFORMED:
            problem = "sent a message that answers no request. Start all pods from one image"
        elif error in _SILENT_MACHINE_ERRORS:
            problem = (
                f"its machine does not respond ({os.strerror(error)}). Check the rank's node and the network"
            )
        else:
            time.sleep(OWN_REPORT_S)
            reason = "end of file" if error == pod_link.END_OF_FILE else os.strerror(error)
            problem = f"its connection broke ({reason}). Read the log of rank {rank.rank}"
        return LaneError(rank.rank, f"feed-forward rank {rank.rank} (pod {rank.pod}): {problem}")

    def describe_ask(self, lane: int) -> str:
        """Describes how far the last ask in a lane got; "" for a lane of this pod."""
        for relayed, link in zip(self._relayed, self._links, strict=True):
            if relayed.lane == lane:
                return f" (pod {relayed.rank.pod}: {pod_link.describe(link)})"
        return ""
