"""The protocol between the supervisors of a group: JSON lines over TCP. Followers connect to the leader.

Both ends prove that they have the epoch's key. The follower sends its identity, and the leader accepts or
refuses the follower. Then both send five heartbeats a second. A follower reconnects after a lost connection;
a peer that is silent for longer than the heartbeat limit is lost. Followers send evidence of failures to the
leader. Only the leader decides which failure is the cause, and sends the verdict to all. Stdlib and the
contract only.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.launch.culprit import Evidence

HELLO_TIMEOUT_S = 5.0
"""Time-out for the identity of a new client, and for the leader's answer."""
RETURN_POLL_S = 0.1
"""Interval of attempts to reconnect, and of checks for a lost peer."""
_REFUSAL_TIMEOUT_S = 3 * RETURN_POLL_S
"""Time for a port to refuse a connection; a machine that is gone refuses nothing."""
REFUSALS = 2
"""Refused connections in a row that mean that no process listens on a port any longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handlers:
    """The supervisor's callbacks for events. All run on its event loop.

    Attributes:
        on_evidence: called when a pod reports a failure (leader only), or when a peer's supervisor is lost.
        on_stopping: called with the index of another pod when that pod was asked to stop.
        on_left: called with the index of another pod that was asked to stop, when it has left.
        on_verdict: called when the leader has decided which failure ended the group (followers only).
    """

    on_evidence: Callable[[Evidence], None]
    on_stopping: Callable[[int], None]
    on_left: Callable[[int], None]
    on_verdict: Callable[[Failure], None]


def build_pod_lost(launch: PodLaunch, pod: int, how: str) -> Failure:
    """Builds the failure of a pod whose supervisor is lost."""
    return Failure(
        reason=FailureReason.POD_LOST,
        message=(
            f"the supervisor of pod {pod} ({launch.addresses[pod].host}) {how}. Check that pod and its node"
        ),
        pod=pod,
        time=time.time(),
    )


async def refuses_connections(host: str, port: int) -> bool:
    """Returns whether a supervisor's port refuses connections, which means that the supervisor has ended."""
    try:
        async with asyncio.timeout(_REFUSAL_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
