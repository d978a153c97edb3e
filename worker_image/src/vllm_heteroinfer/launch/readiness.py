"""Whether a group would answer a request now, what it waits for if not, and whether that is overdue. PURE."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.group_report import GroupReport, RankPhase, RankStatus
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.launch.supervisor_messages import RankBeat

SILENT_S = 10.0
"""A rank that has told its supervisor nothing for longer is the first that a start waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """What a supervisor knows of the ranks now.

    Attributes:
        beats: the last word on each rank that has spoken.
        api_healthy: whether the API server answers, or there is none to ask.
        engine_answers: whether its engine does, likewise.
        only_pod: look at this pod's ranks only (a follower knows no others).
    """

    plan: Plan
    beats: tuple[RankBeat, ...]
    missing_pods: tuple[int, ...] = ()
    api_healthy: bool = True
    engine_answers: bool = True
    only_pod: int | None = None

    def statuses(self) -> tuple[RankStatus, ...]:
        """Returns the status of each rank by rank; Starting for those that have not spoken."""
        spoken = {beat.status.rank: beat.status for beat in self.beats}
        return tuple(
            spoken.get(rank.rank, RankStatus(rank=rank.rank, pod=rank.pod))
            for rank in self.plan.ranks
            if self.only_pod in (None, rank.pod)
        )

    @property
    def ready(self) -> bool:
        """Returns whether a request would be answered."""
        return not self.message

    @property
    def computes(self) -> bool:
        """Returns whether every rank can compute steps: then only API server and engine are waited for."""
        return not self.missing_pods and not self._not_ready()

    @property
    def message(self) -> str:
        """Returns what is waited for, "" when nothing is.

        Readers take the phase of the ranks for it, not these words.
        """
        asleep = [str(s.rank) for s in self.statuses() if s.phase is RankPhase.SLEEPING]
        if asleep and not self.missing_pods:
            return f"asleep: rank {', '.join(asleep)}; POST /wake_up to the leader's API wakes the group"
        waits = [f"pod {pod} has not connected" for pod in self.missing_pods]
        waits += [self._words(status) for status in self._not_ready() if status.pod not in self.missing_pods]
        if not waits and not self.api_healthy:
            busy = self._busiest()
            of_rank = f", and rank {busy.rank} (pod {busy.pod}) is busy" if busy else ""
            waits = [f"the API server does not answer{of_rank}"]
        if not waits and not self.engine_answers:
            waits = ["the engine does not answer"]
        return f"waiting: {', '.join(waits)}" if waits else ""

    @property
    def pod(self) -> int | None:
        """Returns the pod that the others wait for, None if all are ready.

        A pod that has not come holds up the ranks of the others, so it comes first. The engine is in pod 0.
        """
        if self.missing_pods:
            return self.missing_pods[0]
        first = next(iter(self._by_suspicion()), None)
        if first is None:
            busy = None if self.api_healthy else self._busiest()
            return busy.pod if busy else None if self.api_healthy and self.engine_answers else 0
        return 0 if self._waits_for_engine(first.rank) else first.pod

    @property
    def rank(self) -> int | None:
        """Returns the rank that the others wait for; None if it is a whole pod or the engine."""
        first = next(iter(self._by_suspicion()), None)
        if first is None:
            busy = None if self.api_healthy or self.missing_pods else self._busiest()
            return busy.rank if busy else None
        return None if self.missing_pods or self._waits_for_engine(first.rank) else first.rank

    def busy_ranks(self) -> list[RankBeat]:
        """Returns the ranks that are doing something, or have told their supervisor nothing for a while."""
        return [beat for beat in self.beats if beat.busy is not None or beat.silent_s > SILENT_S / 10]

    def _busiest(self) -> RankStatus | None:
        """Returns the rank that an API server which does not answer may wait for: none that waits itself."""
        busy = [beat for beat in self.beats if beat.busy is not None]
        first = min(busy, key=lambda beat: (beat.waiting_for_rank is not None, -beat.busy_s), default=None)
        return None if first is None else first.status

    def status(self, launch: PodLaunch, message: str) -> GroupReport:
        """Returns the status that /group shows; `message` is "" when the group is ready."""
        return GroupReport(
            group_uid=launch.group_uid,
            epoch=launch.epoch,
            plan_hash=self.plan.hash,
            ready=not message,
            message=message,
            ranks=self.statuses(),
            missing_pods=self.missing_pods,
        )

    def _words(self, status: RankStatus) -> str:
        text, beat = f"rank {status.rank} (pod {status.pod}) is {status.phase}", self._beat(status.rank)
        if beat.silent_s > SILENT_S:
            return f"{text} and has told its supervisor nothing for {beat.silent_s:.0f} s"
        if beat.waiting_for_engine:
            return f"{text} and waits for the engine"
        for_rank = beat.waiting_for_rank
        return text if for_rank is None else f"{text} and waits for rank {for_rank}"

    def _by_suspicion(self) -> list[RankStatus]:
        """Returns who is not ready: first who waits for no other such rank, then who is furthest behind.

        A silent rank comes before all, one that waits for the engine after all.
        """
        not_ready = {status.rank: status for status in self._not_ready()}
        phases = list(RankPhase)

        def order(status: RankStatus) -> tuple[bool, bool, bool, int, float]:
            loaded = status.loaded_bytes / status.total_bytes if status.total_bytes else 0.0
            return (
                self._beat(status.rank).silent_s <= SILENT_S,
                self._waits_for_engine(status.rank),
                self._beat(status.rank).waiting_for_rank in not_ready,
                phases.index(status.phase),
                loaded,
            )

        return sorted(not_ready.values(), key=order)

    def _beat(self, rank: int) -> RankBeat:
        status = RankStatus(rank=rank, pod=self.plan.ranks[rank].pod)
        return next((beat for beat in self.beats if beat.status.rank == rank), RankBeat(status=status))

    def _waits_for_engine(self, rank: int) -> bool:
        """Returns whether a rank, when it last spoke and not too long ago, waited for the engine."""
        beat = self._beat(rank)
        return beat.waiting_for_engine and beat.silent_s <= SILENT_S

    def _not_ready(self) -> list[RankStatus]:
        return [status for status in self.statuses() if status.phase is not RankPhase.READY]


class StartClock:
    """Measures for how long nothing has moved since all pods are connected.

    A rank moves when its phase changes or it has read more weights. Pods that are not connected
    stop the clock: their nodes may be pulling the image, which the operator sees.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._seen: object = None
        self._moved_at_s = 0.0

    def is_overdue(self, view: GroupView, now_s: float) -> bool:
        """Returns whether a start that is not complete has stood still for too long.

        Args:
            now_s: on a clock that never goes back and stands still while the supervisor has no turn, in
                seconds.
        """
        ranks = tuple((status.phase, status.loaded_bytes) for status in view.statuses())
        seen = (ranks, view.api_healthy)
        if view.missing_pods or seen != self._seen:
            self._seen, self._moved_at_s = seen, now_s
        return self.still_s(now_s) > self._timeout_s

    def still_s(self, now_s: float) -> float:
        """Returns since when nothing has moved, as far as `is_overdue` was told, in seconds."""
        return now_s - self._moved_at_s


def blame_stuck(stuck: Sequence[RankBeat], step_timeout_s: float) -> Failure | None:
    """Returns the failure that names the rank which holds up the others, or None.

    A rank that waits for one which has been busy for more than half the deadline passes
    the blame on (it may have begun to wait first); one that waits for a rank which is
    not busy, or only just, keeps it, since its message is lost. What a silent rank waited for
    when it last spoke says nothing.

    Args:
        stuck: every rank that is busy or silent, however short.
    """
    known = [replace(s, waiting_for_rank=None) if s.silent_s > step_timeout_s / 2 else s for s in stuck]
    late = {s.status.rank: s for s in known if s.late_s > step_timeout_s}
    slow = {s.status.rank: s for s in known if s.late_s > step_timeout_s / 2}
    if not late:
        return None
    culprit = min(late.values(), key=lambda s: (s.waiting_for_rank is not None, -s.late_s, s.status.rank))
    seen = {culprit.status.rank}
    while culprit.waiting_for_rank in slow and culprit.waiting_for_rank not in seen:
        culprit = slow[culprit.waiting_for_rank]
        seen.add(culprit.status.rank)
    rank, is_silent = culprit.status.rank, culprit.silent_s > step_timeout_s / 2
    others = sorted(set(late) - {rank})
    if is_silent:
        late_words = f"rank {rank} has told its supervisor nothing for {culprit.silent_s:.0f} s"
    else:
        for_rank = culprit.waiting_for_rank
        waiting = "" if for_rank is None else f", waiting for rank {for_rank}"
        late_words = f"rank {rank} has not finished '{culprit.busy}' in {culprit.busy_s:.0f} s{waiting}"
    beside = f"; ranks {others} wait as well" if others else ""
    return Failure(
        reason=FailureReason.RANK_STOPPED if is_silent else FailureReason.STEP_TIMEOUT,
        message=f"{late_words}{beside}; expected at most {step_timeout_s:.0f} s (stepTimeout)",
        pod=culprit.status.pod,
        rank=rank,
    )
