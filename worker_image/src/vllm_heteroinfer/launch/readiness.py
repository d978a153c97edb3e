"""Whether a group would answer a request now, and what it waits for if not. PURE."""

from dataclasses import dataclass

from heteroinfer_contract.group_report import GroupReport, RankPhase, RankStatus
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.launch.culprit import Stuck
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

    def busy_ranks(self) -> list[Stuck]:
        """Returns the ranks that are doing something, or have told their supervisor nothing for a while."""
        return [
            Stuck(
                rank=beat.status.rank,
                pod=beat.status.pod,
                busy=beat.busy,
                busy_s=beat.busy_s,
                waiting_for_rank=beat.waiting_for_rank,
                silent_s=beat.silent_s,
            )
            for beat in self.beats
            if beat.busy is not None or beat.silent_s > SILENT_S / 10
        ]

    def _busiest(self) -> Stuck | None:
        """Returns the rank that an API server which does not answer may wait for: none that waits itself."""
        busy = [stuck for stuck in self.busy_ranks() if stuck.busy is not None]
        return min(busy, key=lambda each: (each.waiting_for_rank is not None, -each.busy_s), default=None)

    def status(self, launch: PodLaunch, message: str) -> GroupReport:
        """Returns the status that /group shows; `message` is "" when the group is ready."""
        return GroupReport(
            group_uid=launch.group_uid,
            epoch=launch.epoch,
            plan_hash=self.plan.hash,
            ready=not message,
            message=message,
            ranks=self.statuses(),
        )

    def _words(self, status: RankStatus) -> str:
        text = f"rank {status.rank} (pod {status.pod}) is {status.phase}"
        if self._silent_s(status.rank) > SILENT_S:
            return f"{text} and has told its supervisor nothing for {self._silent_s(status.rank):.0f} s"
        if self._waits_for_engine(status.rank):
            return f"{text} and waits for the engine"
        for_rank = self._waits_for(status.rank)
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
                self._silent_s(status.rank) <= SILENT_S,
                self._waits_for_engine(status.rank),
                self._waits_for(status.rank) in not_ready,
                phases.index(status.phase),
                loaded,
            )

        return sorted(not_ready.values(), key=order)

    def _waits_for(self, rank: int) -> int | None:
        return next((beat.waiting_for_rank for beat in self.beats if beat.status.rank == rank), None)

    def _waits_for_engine(self, rank: int) -> bool:
        """Returns whether a rank, when it last spoke and not too long ago, waited for the engine."""
        waits = any(beat.waiting_for_engine for beat in self.beats if beat.status.rank == rank)
        return waits and self._silent_s(rank) <= SILENT_S

    def _silent_s(self, rank: int) -> float:
        return next((beat.silent_s for beat in self.beats if beat.status.rank == rank), 0.0)

    def _not_ready(self) -> list[RankStatus]:
        return [status for status in self.statuses() if status.phase is not RankPhase.READY]
