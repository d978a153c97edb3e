"""Progress of a starting group, and what it waits for. Pure.

Waiting for capacity, images and the model has no limit: a new epoch would begin the same wait again. Once all
pods are connected, the leader's supervisor watches the start, because it sees every step. This module covers
the time before: the supervisor cannot distinguish a silent pod from a pod that still pulls its image.
"""

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta

from heteroinfer_contract import names
from heteroinfer_contract.group_report import GroupReport, RankPhase
from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.api import StartupPhase, StartupStatus
from heteroinfer_operator.cluster import PodView
from heteroinfer_operator.reconcile.epoch_end import has_run
from heteroinfer_operator.reconcile.reading import index_of

LOOK_EVERY_S = 15.0
"""Seconds between checks while ranks connect, load and warm up: no event reports their progress."""
_WRITE_EVERY = timedelta(seconds=60)
BEFORE_RANKS = frozenset({StartupPhase.MODEL, StartupPhase.SCHEDULING, StartupPhase.IMAGE})
"""Phases in which not every pod has run yet."""
_LATER_S = 0.1
"""Margin that makes a check run after the time that it waits for, not at it."""
_DOING = {
    StartupPhase.CONNECTING: "the ranks are connecting",
    StartupPhase.LOADING: "reading weights",
    StartupPhase.WARMING_UP: "warming up",
}
_NO_ERROR = frozenset({"ContainerCreating", "PodInitializing"})


def begin(phase: StartupPhase, old: StartupStatus | None, now: datetime) -> StartupStatus:
    """Builds the status of a phase; keeps the start time if the phase has not changed."""
    if old is not None and old.phase is phase:
        return old
    return StartupStatus(phase=phase, since=now)


def observe_startup(
    old: StartupStatus | None,
    pods: Sequence[PodView],
    report: GroupReport | None,
    *,
    whole: bool,
    now: datetime,
) -> StartupStatus:
    """Determines the progress of a group that is not ready."""
    status = begin(_phase(old, pods, report, whole=whole), old, now)
    if report is None or status.phase not in {StartupPhase.LOADING, StartupPhase.WARMING_UP}:
        return status
    done = sum(rank.loaded_bytes for rank in report.ranks)
    total = sum(rank.total_bytes for rank in report.ranks)
    before = old if old is not None and old.measured_time is not None else None
    if not total or (before is not None and _is_fresh(before, done, now)):
        return status if before is None else _with_load_progress(status, before)
    return status.changed(bytes_done=done, bytes_total=total, measured_time=now)


def _phase(
    old: StartupStatus | None, pods: Sequence[PodView], report: GroupReport | None, *, whole: bool
) -> StartupPhase:
    if not whole or not all(pod.node for pod in pods):
        return StartupPhase.SCHEDULING
    if not all(pod.started for pod in pods):
        return StartupPhase.IMAGE
    if report is None:
        # The leader may miss one answer. Its last report holds.
        return StartupPhase.CONNECTING if old is None or old.phase in BEFORE_RANKS else old.phase
    phases = {rank.phase for rank in report.ranks}
    if phases & {RankPhase.STARTING, RankPhase.CONNECTING}:
        return StartupPhase.CONNECTING
    return StartupPhase.LOADING if RankPhase.LOADING in phases else StartupPhase.WARMING_UP


def _is_fresh(before: StartupStatus, done: int, now: datetime) -> bool:
    assert before.measured_time is not None
    return before.bytes_done == done or now - before.measured_time < _WRITE_EVERY


def _with_load_progress(status: StartupStatus, before: StartupStatus) -> StartupStatus:
    return status.changed(
        bytes_done=before.bytes_done, bytes_total=before.bytes_total, measured_time=before.measured_time
    )


def connects(startup: StartupStatus | None) -> bool:
    """Checks whether all pods of a starting group run but its ranks are not connected yet."""
    return startup is not None and startup.phase is StartupPhase.CONNECTING


def describe(
    startup: StartupStatus, pods: Sequence[PodView], report: GroupReport | None, expected: int
) -> str:
    """Describes what a starting group waits for; `expected` is its number of pods."""
    ended = next((pod for pod in pods if pod.ended), None)
    if ended is not None:
        return f"{describe_end(ended)}; the operator replaces it"
    unknown = next((pod for pod in pods if pod.unknown), None)
    if unknown is not None:
        return f"the state of pod {unknown.name} is unknown: {unknown.unknown}"
    late = sorted((pod for pod in pods if not pod.started and pod.node), key=waits_in_vain, reverse=True)
    if late:
        return describe_wait(late[0])
    if startup.phase is StartupPhase.CONNECTING:
        return _describe_connecting(pods, report)
    if startup.phase is StartupPhase.LOADING and startup.bytes_total:
        done, total = format_bytes(startup.bytes_done or 0), format_bytes(startup.bytes_total)
        return f"reading weights: {done} of {total}"
    return _DOING.get(startup.phase) or f"{sum(pod.ready for pod in pods)} of {expected} pods are ready"


def _describe_connecting(pods: Sequence[PodView], report: GroupReport | None) -> str:
    """Describes which pod does not reach the leader, if the leader answers the operator."""
    words, by_index = _DOING[StartupPhase.CONNECTING], {index_of(pod): pod.name for pod in pods}
    if report is None:
        leader, port = by_index.get(0, "with index 0 (missing)"), names.DEFAULT_HEALTH_PORT
        return f"{words}; the leader, pod {leader}, does not answer the operator at port {port} yet"
    missing = [by_index[index] for index in report.missing_pods if index in by_index]
    if not missing:
        return words
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return (
        f"{words}; pod {missing[0]}{more} does not reach the leader, pod {by_index.get(0)}, at port "
        f"{names.DEFAULT_CONTROL_PORT} yet. If this persists, check the NetworkPolicies of the namespace, "
        "the network between the two nodes, and the log of the first pod"
    )


def describe_wait(pod: PodView) -> str:
    """Describes what a pod that has not run yet waits for."""
    return f"pod {pod.name} waits: {pod.unschedulable or pod.waiting or 'its container is not created yet'}"


def waits_in_vain(pod: PodView) -> bool:
    """Returns whether an error prevents the creation of the container, for example a missing image."""
    return pod.waiting is not None and not pod.started and pod.waiting.reason not in _NO_ERROR


def lacks_configuration(pod: PodView) -> bool:
    """Checks whether a container waits for the Secret or ConfigMap with its environment variables."""
    return pod.waiting is not None and not pod.started and pod.waiting.reason == "CreateContainerConfigError"


def find_stuck(pods: Sequence[PodView], before: Collection[int]) -> dict[int, PodView]:
    """Finds the pods whose containers could not be created, by index. A pod stays in this set until it runs.

    The kubelet's reason changes back and forth between ErrImagePull, ImagePullBackOff and ContainerCreating.
    `before` holds the pods that were stuck when the status was last written.
    """
    by_index = {index_of(pod): pod for pod in pods}
    return {
        index: pod
        for index, pod in sorted(by_index.items())
        if waits_in_vain(pod) or (index in before and not has_run(pod))
    }


def describe_end(pod: PodView) -> str:
    """Describes how a pod ended that had never run."""
    why = ": ".join(part for part in (pod.disrupted or pod.reason, pod.message) if part)
    where = f" by node {pod.node}" if pod.node else ""
    how = "was deleted" if pod.deleting else f"was rejected{where}"
    return f"pod {pod.name} {how} before it ran{f' ({why})' if why else ''}"


def is_rejected(pod: PodView) -> bool:
    """Checks whether the node rejected a pod before the pod ran."""
    return is_over_unrun(pod) and not pod.deleting


def is_over_unrun(pod: PodView) -> bool:
    """Checks whether a pod ended before it ran: it never joined its group and never will."""
    return pod.ended and not has_run(pod)


def find_spare(pods: Sequence[PodView], now: datetime, *, replace_after_s: float) -> list[PodView]:
    """Finds the pods that never ran and never will, and that new pods may replace now.

    `replace_after_s` counts from the creation of a pod that its node rejected. The wait is needed because the
    scheduler may choose the same node again.
    """
    over = [pod for pod in pods if is_over_unrun(pod)]
    return [pod for pod in over if pod.deleting or _age_s(pod, now) >= replace_after_s]


def look_again_s(
    startup: StartupStatus | None, pods: Sequence[PodView], now: datetime, *, replace_after_s: float
) -> float | None:
    """Seconds until the next check of a starting group; None if only events matter."""
    waits = [max(0.0, replace_after_s - _age_s(pod, now)) + _LATER_S for pod in pods if is_rejected(pod)]
    if startup is not None and startup.phase not in BEFORE_RANKS:
        waits.append(LOOK_EVERY_S)
    return min(waits, default=None)


def _age_s(pod: PodView, now: datetime) -> float:
    return (now - pod.created).total_seconds()
