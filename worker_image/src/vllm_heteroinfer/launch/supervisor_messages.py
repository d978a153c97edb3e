"""What supervisors say to each other. PURE: values, and how a leader compares a follower with itself."""

from collections.abc import Mapping
from dataclasses import dataclass

from heteroinfer_contract.failure import Failure
from heteroinfer_contract.group_report import RankStatus
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.launch.culprit import Evidence


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """Who a follower is; everything must agree with the leader.

    Attributes:
        instance: tells this process from any other that says it is the pod.
    """

    group_uid: str
    epoch: int
    plan_hash: str
    pod: int
    instance: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBeat:
    """A rank in a beat: its status, and for how long it has been doing the same thing.

    Attributes:
        busy: what it does; None if it does nothing, as far as is known.
        busy_s: by its supervisor's clock, so that a rank that cannot speak grows late too.
        waiting_for_rank: whom it waits for, None if it computes.
        waiting_for_engine: whether it waits for the engine's next call.
        silent_s: since its supervisor heard of it, in seconds in which that had its turns.
    """

    status: RankStatus
    busy: str | None = None
    busy_s: float = 0.0
    waiting_for_rank: int | None = None
    waiting_for_engine: bool = False
    silent_s: float = 0.0

    @property
    def late_s(self) -> float:
        """Returns for how long nothing of it has moved, as far as is known, in seconds."""
        return max(self.busy_s, self.silent_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One line between supervisors. What is None or False is not said.

    Attributes:
        ranks: of a follower, in each of its beats.
        group_age_s: of the leader, in each of its beats: age of its oldest news of a pod.
        late_s: in each beat: how late the sender's turns came lately, as its machine is busy.
        stopping: this pod was asked to stop; its end is no failure of its own.
        verdict: the leader's word on who ended the group.
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
    """Returns what differs in words ("" if nothing), and whether that ends the leader's group.

    A pod of another group, or of an earlier epoch of this one, is only sent away. A process that
    is connected may connect again.
    """
    if hello.group_uid != launch.group_uid:
        return f"got group uid {hello.group_uid}, expected {launch.group_uid}", False
    if hello.epoch != launch.epoch:
        return f"got epoch {hello.epoch}, expected {launch.epoch}", hello.epoch > launch.epoch
    if hello.plan_hash != plan.hash:
        return f"got plan {hello.plan_hash}, expected {plan.hash}", True
    if not 0 < hello.pod < len(plan.pods):
        return f"got pod index {hello.pod}, expected 1..{len(plan.pods) - 1}", True
    if connected.get(hello.pod, hello.instance) != hello.instance:
        return f"pod {hello.pod} is connected already", False
    return "", False
