"""How the supervisors of a group speak: JSON lines over TCP, followers to the leader.

Both ends prove that they have the epoch's key; a follower says who it is and is welcomed or
refused in words; then both beat five times a second. A connection that ends is made again
within the heart-beat limit; whoever is silent for longer is lost. Evidence of failures goes to the
leader, which alone decides who is to blame and tells all. Stdlib and the contract only.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.launch.culprit import Evidence

HELLO_TIMEOUT_S = 5.0
"""For a stranger on the port to say who it is, and for the leader to answer."""
RETURN_POLL_S = 0.1
REFUSALS = 2
"""Of one port in a row: no process listens there any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Handlers:
    """What the supervisor does on news; all run on its loop.

    Attributes:
        on_evidence: a pod saw a failure (leader), or a peer's supervisor was lost (both).
        on_stopping: that pod was asked to stop.
        on_left: that pod, which was asked to stop, is gone.
        on_verdict: the leader has decided (followers).
    """

    on_evidence: Callable[[Evidence], None]
    on_stopping: Callable[[int], None]
    on_left: Callable[[int], None]
    on_verdict: Callable[[Failure], None]


def pod_lost(launch: PodLaunch, pod: int, how: str) -> Failure:
    """Returns the failure that names a pod whose supervisor is gone."""
    return Failure(
        reason=FailureReason.POD_LOST,
        message=(
            f"the supervisor of pod {pod} ({launch.addresses[pod].host}) {how}; look at that pod and its node"
        ),
        pod=pod,
        time=time.time(),
    )


async def is_refused(host: str, port: int) -> bool:
    """Returns whether a port that a living supervisor listens on refuses connections."""
    try:
        async with asyncio.timeout(RETURN_POLL_S * 3):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except (OSError, TimeoutError):
        return False
    writer.close()
    return False
