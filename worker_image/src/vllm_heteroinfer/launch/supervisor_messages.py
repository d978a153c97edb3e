"""Messages between supervisors, and the leader's check of a follower's identity. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from heteroinfer_contract.failure import Failure
from heteroinfer_contract.group_report import RankStatus
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.launch.culprit import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Identity of a follower; the group, the epoch and the plan must be the leader's.

    Attributes:
        instance: distinguishes this process from other processes with the same pod index.
    """

    group_uid: str
    epoch: int
    plan_hash: str
    pod: int
    instance: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBeat:
    """A rank's state in a heartbeat.

    Attributes:
        busy: the rank's current activity; None if the rank was idle in its last report.
        busy_s: time since the activity began, in seconds. The supervisor's clock measures this time, so
            that the time also grows for a rank that cannot report.
        waiting_for_rank: the rank that this rank waits for; None if this rank computes.
        waiting_for_engine: whether this rank waits for the engine's next call.
        silent_s: time since the last report, in seconds; counts only time in which the supervisor runs.
    """

    status: RankStatus
    busy: str | None = None
    busy_s: float = 0.0
    waiting_for_rank: int | None = None
    waiting_for_engine: bool = False
    silent_s: float = 0.0

    @property
    def late_s(self) -> float:
        """Known time without progress of the rank, in seconds."""
        return max(self.busy_s, self.silent_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One line between supervisors. A field with None or False is not set.

    Attributes:
        ranks: in each heartbeat of a follower: the state of the follower's ranks.
        group_age_s: in each heartbeat of the leader: seconds since the last message of the pod that has been
            silent longest.
        late_s: in each heartbeat: recent scheduling delay of the sender on a busy machine, in seconds.
        stopping: whether the sender was asked to stop. Then the sender's end is not a failure.
        verdict: the leader's decision about the cause of the group's end.
    """

    hello: Hello | None = None
    welcome: bool = False
    refused: Failure | None = None
    ranks: tuple[RankBeat, ...] | None = None
    group_age_s: float | None = None
    late_s: float | None = None
    evidence: Evidence | None = None
    stopping: bool = False
    verdict: Failure | None = None


def check_hello(
    hello: Hello, *, plan: Plan, launch: PodLaunch, connected: Mapping[int, str]
) -> tuple[str, bool]:
    """Returns how a follower differs from the leader, and whether the difference ends the leader's group.

    The first value is "" if the follower does not differ. A pod of a different group or of an earlier epoch
    is only refused. A pod of a later epoch ends this group, because a later epoch starts only after this one.
    A follower may connect again, but another process with the same pod index is only refused.
    """
    if hello.group_uid != launch.group_uid:
        return f"group uid must be {launch.group_uid} (got {hello.group_uid})", False
    if hello.epoch != launch.epoch:
        return f"epoch must be {launch.epoch} (got {hello.epoch})", hello.epoch > launch.epoch
    if hello.plan_hash != plan.hash:
        return f"plan must be {plan.hash} (got {hello.plan_hash})", True
    if not 0 < hello.pod < len(plan.pods):
        return f"pod index must be 1 to {len(plan.pods) - 1} (got {hello.pod})", True
    if connected.get(hello.pod, hello.instance) != hello.instance:
        return f"pod {hello.pod} is already connected", False
    return "", False
