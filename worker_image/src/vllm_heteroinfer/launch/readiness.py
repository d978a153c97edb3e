"""Decides whether a group can answer requests, which rank delays it, and whether a rank is overdue. Pure."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.group_report import GroupReport, RankPhase, RankStatus
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.launch.supervisor_messages import RankBeat

_BRIEF_SILENCE_S = 1.0
"""A rank that has sent its supervisor nothing for longer may be stuck."""
SILENT_S = 10.0
"""A rank that has sent its supervisor nothing for longer is the most likely cause of a slow start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A supervisor's current knowledge of the ranks.

    Attributes:
        beats: the last report of each rank that has sent a report.
        api_healthy: whether vLLM's API server answers; true if the pod has none.
        engine_answers: whether the engine answers; true if there is no engine.
        only_pod: consider only this pod's ranks (a follower knows no other ranks).
    """

    plan: Plan
    beats: tuple[RankBeat, ...]
    missing_pods: tuple[int, ...] = ()
    api_healthy: bool = True
    engine_answers: bool = True
    only_pod: int | None = None

    def statuses(self) -> tuple[RankStatus, ...]:
        """Returns the statuses of all ranks, in order; Starting for a rank without a report."""
        reported = {beat.status.rank: beat.status for beat in self.beats}
        return tuple(
            reported.get(rank.rank, RankStatus(rank=rank.rank, pod=rank.pod))
            for rank in self.plan.ranks
            if self.only_pod in (None, rank.pod)
        )

    @property
    def ready(self) -> bool:
        """Whether the group can answer a request."""
        return not self.message

    @property
    def computes(self) -> bool:
        """Whether all ranks are ready. Then the group can wait only for vLLM's API server or the engine."""
        return not self.missing_pods and not self._not_ready()

    @property
    def message(self) -> str:
        """Text that names each part for which the group waits; "" if the group is ready.

        If ranks sleep and all pods are connected, the text names only the sleeping ranks. vLLM's API server
        counts only when all ranks are ready, and the engine only when vLLM's API server answers. Programs use
        the phases of the ranks, not this text.
        """
        asleep = [str(status.rank) for status in self.statuses() if status.phase is RankPhase.SLEEPING]
        if asleep and not self.missing_pods:
            ranks = f"rank{'s' if len(asleep) > 1 else ''} {', '.join(asleep)}"
            return f"asleep: {ranks}. To wake the group, send POST /wake_up to the API of the leader's pod"
        waits = [f"pod {pod} has not connected" for pod in self.missing_pods]
        waits += [
            self._describe_rank(status) for status in self._not_ready() if status.pod not in self.missing_pods
        ]
        if not waits and not self.api_healthy:
            busy = self._busy_rank_to_blame()
            busy_rank_text = f", and rank {busy.rank} (pod {busy.pod}) is busy" if busy else ""
            waits = [f"vLLM's API server does not answer{busy_rank_text}"]
        if not waits and not self.engine_answers:
            waits = ["vLLM's engine does not answer"]
        return f"waiting: {', '.join(waits)}" if waits else ""

    @property
    def awaited_pod(self) -> int | None:
        """The pod that the others wait for; None if all are ready.

        A pod that has not connected delays all ranks, so it has priority. The engine is in pod 0.
        """
        if self.missing_pods:
            return self.missing_pods[0]
        suspect = next(iter(self._most_suspicious_first()), None)
        if suspect is not None:
            return 0 if self._waits_for_engine(suspect.rank) else suspect.pod
        if self.api_healthy:
            return None if self.engine_answers else 0
        busy = self._busy_rank_to_blame()
        return busy.pod if busy else 0

    @property
    def awaited_rank(self) -> int | None:
        """The rank that the others wait for; None if they wait for a whole pod or the engine."""
        if self.missing_pods:
            return None
        suspect = next(iter(self._most_suspicious_first()), None)
        if suspect is not None:
            return None if self._waits_for_engine(suspect.rank) else suspect.rank
        busy = None if self.api_healthy else self._busy_rank_to_blame()
        return busy.rank if busy else None

    def busy_ranks(self) -> list[RankBeat]:
        """Returns the beats of ranks that are busy, or have sent their supervisor nothing for a second."""
        return [beat for beat in self.beats if beat.busy is not None or beat.silent_s > _BRIEF_SILENCE_S]

    def _busy_rank_to_blame(self) -> RankStatus | None:
        """Returns the busy rank that vLLM's API server may wait for if it does not answer.

        Prefers a rank that does not wait for another rank. Returns None if no rank is busy.
        """
        busy = [beat for beat in self.beats if beat.busy is not None]
        to_blame = min(busy, key=lambda beat: (beat.waiting_for_rank is not None, -beat.busy_s), default=None)
        return None if to_blame is None else to_blame.status

    def build_report(self, launch: PodLaunch, message: str) -> GroupReport:
        """Builds the report for /group; `message` is "" if the group is ready."""
        return GroupReport(
            group_uid=launch.group_uid,
            epoch=launch.epoch,
            plan_hash=self.plan.hash,
            ready=not message,
            message=message,
            ranks=self.statuses(),
            missing_pods=self.missing_pods,
        )

    def _describe_rank(self, status: RankStatus) -> str:
        """Returns why a rank is not ready, for a message."""
        text, beat = f"rank {status.rank} (pod {status.pod}) is {status.phase}", self._last_beat(status.rank)
        if beat.silent_s > SILENT_S:
            return f"{text} and has sent its supervisor nothing for {beat.silent_s:.0f} s"
        if beat.waiting_for_engine:
            return f"{text} and waits for the engine"
        for_rank = beat.waiting_for_rank
        return text if for_rank is None else f"{text} and waits for rank {for_rank}"

    def _most_suspicious_first(self) -> list[RankStatus]:
        """Returns the ranks that are not ready, the most likely cause first.

        Silent ranks come first, then ranks that do not wait for another unready rank, then the others. Ranks
        that wait for the engine come last. Among equals, the rank furthest behind in its start comes first.
        """
        not_ready = {status.rank: status for status in self._not_ready()}
        phases = list(RankPhase)

        def order(status: RankStatus) -> tuple[bool, bool, bool, int, float]:
            """Returns the sort key of a rank. False sorts before True."""
            loaded = status.loaded_bytes / status.total_bytes if status.total_bytes else 0.0
            return (
                self._last_beat(status.rank).silent_s <= SILENT_S,
                self._waits_for_engine(status.rank),
                self._last_beat(status.rank).waiting_for_rank in not_ready,
                phases.index(status.phase),
                loaded,
            )

        return sorted(not_ready.values(), key=order)

    def _last_beat(self, rank: int) -> RankBeat:
        """Returns the last beat of a rank; a beat without work for a rank that has sent none."""
        status = RankStatus(rank=rank, pod=self.plan.ranks[rank].pod)
        return next((beat for beat in self.beats if beat.status.rank == rank), RankBeat(status=status))

    def _waits_for_engine(self, rank: int) -> bool:
        """Returns whether a rank waited for the engine in its last report, if that is recent enough."""
        beat = self._last_beat(rank)
        return beat.waiting_for_engine and beat.silent_s <= SILENT_S

    def _not_ready(self) -> list[RankStatus]:
        """Returns the statuses of the ranks that are not ready."""
        return [status for status in self.statuses() if status.phase is not RankPhase.READY]


class StartClock:
    """Measures the time without progress since all pods are connected.

    A rank makes progress when its phase changes or it has read more weights. While a pod is not connected,
    the clock stops: its node may be pulling the image, which only the operator can see.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last_progress: object = None
        self._progress_at_s = 0.0

    def is_overdue(self, view: GroupView, now_s: float) -> bool:
        """Records the progress in `view`. Returns whether the start has made no progress for too long.

        Args:
            now_s: seconds on a monotonic clock that pauses while the supervisor is not scheduled.
        """
        ranks = tuple((status.phase, status.loaded_bytes) for status in view.statuses())
        seen = (ranks, view.api_healthy)
        if view.missing_pods or seen != self._last_progress:
            self._last_progress, self._progress_at_s = seen, now_s
        return self.no_progress_s(now_s) > self._timeout_s

    def no_progress_s(self, now_s: float) -> float:
        """Returns the time without progress according to the last call of `is_overdue`, in seconds."""
        return now_s - self._progress_at_s


def find_stuck_rank(beats: Sequence[RankBeat], step_timeout_s: float) -> Failure | None:
    """Returns a failure that names the rank that blocks the others; None if no rank is overdue.

    If a late rank waits for a rank that has been busy for more than half of the time-out, the awaited rank is
    the culprit. (The awaited rank may have become busy after the late rank, so half is enough.) Otherwise the
    late rank is the culprit, because it waits for a message that was lost. The last report of a silent rank
    is outdated, so the wait in this report is ignored.

    Args:
        beats: last beats of all ranks that are busy or silent, for any time.
    """
    believed_beats = [
        replace(beat, waiting_for_rank=None) if beat.silent_s > step_timeout_s / 2 else beat for beat in beats
    ]
    late = {beat.status.rank: beat for beat in believed_beats if beat.late_s > step_timeout_s}
    slow = {beat.status.rank: beat for beat in believed_beats if beat.late_s > step_timeout_s / 2}
    if not late:
        return None
    # Suspects first a late rank that waits for no other rank, then the rank that is late for the longest
    # time.
    suspect = min(
        late.values(),
        key=lambda beat: (beat.waiting_for_rank is not None, -beat.late_s, beat.status.rank),
    )
    culprit = _follow_waits(suspect, slow)
    return _build_stuck_failure(culprit, late, step_timeout_s)


def _build_stuck_failure(culprit: RankBeat, late_ranks: Collection[int], step_timeout_s: float) -> Failure:
    """Builds the failure that names the rank that blocks the others.

    Args:
        late_ranks: all ranks that are late, for the message.
    """
    rank, is_silent = culprit.status.rank, culprit.silent_s > step_timeout_s / 2
    others = sorted(set(late_ranks) - {rank})
    if is_silent:
        late_text = f"rank {rank} has sent its supervisor nothing for {culprit.silent_s:.0f} s"
    else:
        for_rank = culprit.waiting_for_rank
        waiting = "" if for_rank is None else f", waiting for rank {for_rank}"
        late_text = f"rank {rank} has not finished '{culprit.busy}' in {culprit.busy_s:.0f} s{waiting}"
    others_text = f"; ranks {', '.join(map(str, others))} are late, too" if others else ""
    return Failure(
        reason=FailureReason.RANK_STOPPED if is_silent else FailureReason.STEP_TIMEOUT,
        message=(
            f"{late_text}{others_text}. The limit is {step_timeout_s:.0f} s (stepTimeout). Read the log of "
            f"rank {rank}"
        ),
        pod=culprit.status.pod,
        rank=rank,
    )


def _follow_waits(late: RankBeat, slow: dict[int, RankBeat]) -> RankBeat:
    """Returns the last rank in the chain of ranks that wait for each other, from a late rank on.

    Args:
        slow: beats of the ranks that can be blamed, by rank. The chain ends before any other rank.
    """
    culprit, seen = late, {late.status.rank}
    while culprit.waiting_for_rank in slow and culprit.waiting_for_rank not in seen:
        culprit = slow[culprit.waiting_for_rank]
        seen.add(culprit.status.rank)
    return culprit
