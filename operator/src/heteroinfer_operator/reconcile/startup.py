"""How far a group that starts has come, and when it has stood still for too long. Pure.

Waiting for capacity, images and the model has no limit: a new epoch would begin the same wait again.
What happens once all pods are connected is watched by the leader's supervisor, which sees every
move; here is what it cannot see, since a pod that never speaks may as well be pulling its image.
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
"""While ranks connect, load and warm up: nothing else tells that they moved."""
_WRITE_EVERY = timedelta(seconds=60)
BEFORE_RANKS = frozenset({StartupPhase.MODEL, StartupPhase.SCHEDULING, StartupPhase.IMAGE})
"""Phases in which not every pod has run yet."""
_LATER_S = 0.1
"""Behind a moment, so that it has passed."""
_DOING = {
    StartupPhase.CONNECTING: "the ranks connect",
    StartupPhase.LOADING: "reading weights",
    StartupPhase.WARMING_UP: "warming up",
}
_NO_ERROR = frozenset({"ContainerCreating", "PodInitializing"})


def begin(phase: StartupPhase, old: StartupStatus | None, now: datetime) -> StartupStatus:
    """Returns a phase with the time since when it lasts."""
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
    """Returns how far a group that is not ready has come."""
    status = begin(_phase(old, pods, report, whole=whole), old, now)
    if report is None or status.phase not in {StartupPhase.LOADING, StartupPhase.WARMING_UP}:
        return status
    done = sum(rank.loaded_bytes for rank in report.ranks)
    total = sum(rank.total_bytes for rank in report.ranks)
    before = old if old is not None and old.measured_time is not None else None
    if not total or (before is not None and _is_fresh(before, done, now)):
        return status if before is None else _measured(status, before)
    return status.changed(bytes_done=done, bytes_total=total, measured_time=now)


def _phase(
    old: StartupStatus | None, pods: Sequence[PodView], report: GroupReport | None, *, whole: bool
) -> StartupPhase:
    if not whole or not all(pod.node for pod in pods):
        return StartupPhase.SCHEDULING
    if not all(pod.started for pod in pods):
        return StartupPhase.IMAGE
    if report is None:
        # Silent once: what was last said holds.
        return StartupPhase.CONNECTING if old is None or old.phase in BEFORE_RANKS else old.phase
    phases = {rank.phase for rank in report.ranks}
    if phases & {RankPhase.STARTING, RankPhase.CONNECTING}:
        return StartupPhase.CONNECTING
    return StartupPhase.LOADING if RankPhase.LOADING in phases else StartupPhase.WARMING_UP


def _is_fresh(before: StartupStatus, done: int, now: datetime) -> bool:
    assert before.measured_time is not None
    return before.bytes_done == done or now - before.measured_time < _WRITE_EVERY


def _measured(status: StartupStatus, before: StartupStatus) -> StartupStatus:
    return status.changed(
        bytes_done=before.bytes_done, bytes_total=before.bytes_total, measured_time=before.measured_time
    )


def connects(startup: StartupStatus | None) -> bool:
    """Returns whether all pods of a group that starts run, and its ranks have not met yet."""
    return startup is not None and startup.phase is StartupPhase.CONNECTING


def describe(
    startup: StartupStatus, pods: Sequence[PodView], report: GroupReport | None, expected: int
) -> str:
    """Returns in words what a group waits for, of so many pods."""
    ended = next((pod for pod in pods if pod.ended), None)
    if ended is not None:
        return f"{describe_end(ended)}; it is replaced"
    unknown = next((pod for pod in pods if pod.unknown), None)
    if unknown is not None:
        return f"nothing is known of pod {unknown.name}: {unknown.unknown}"
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
    """Returns who does not reach whom, as far as the leader answers."""
    words, by_index = _DOING[StartupPhase.CONNECTING], {index_of(pod): pod.name for pod in pods}
    if report is None:
        leader = by_index.get(0, "that is not there")
        port = names.DEFAULT_HEALTH_PORT
        return f"{words}; their leader, pod {leader}, does not answer the operator at port {port} yet"
    missing = [by_index[index] for index in report.missing_pods if index in by_index]
    if not missing:
        return words
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return (
        f"{words}; pod {missing[0]}{more} does not reach the leader, pod {by_index.get(0)}, at port "
        f"{names.DEFAULT_CONTROL_PORT} yet. If that lasts, check the NetworkPolicies of the namespace, the "
        "network between the two nodes, and the log of the first pod"
    )


def describe_wait(pod: PodView) -> str:
    """Returns what a pod that has not run yet waits for."""
    return f"pod {pod.name} waits: {pod.unschedulable or pod.waiting or 'its container is not made yet'}"


def waits_in_vain(pod: PodView) -> bool:
    """Returns whether a container cannot be made as things are, as with an image that is not there."""
    return pod.waiting is not None and not pod.started and pod.waiting.reason not in _NO_ERROR


def lacks_configuration(pod: PodView) -> bool:
    """Returns whether a container waits for a Secret or ConfigMap that its variables are from."""
    return pod.waiting is not None and not pod.started and pod.waiting.reason == "CreateContainerConfigError"


def find_stuck(pods: Sequence[PodView], before: Collection[int]) -> dict[int, PodView]:
    """Returns the pods whose containers could not be made, by index, until they run.

    The kubelet's reason flips between ErrImagePull, ImagePullBackOff and ContainerCreating.

    `before` are those that were stuck when the status was last written.
    """
    by_index = {index_of(pod): pod for pod in pods}
    return {
        index: pod
        for index, pod in sorted(by_index.items())
        if waits_in_vain(pod) or (index in before and not has_run(pod))
    }


def describe_end(pod: PodView) -> str:
    """Returns how a pod ended that had not run."""
    why = ": ".join(part for part in (pod.disrupted or pod.reason, pod.message) if part)
    where = f" by node {pod.node}" if pod.node else ""
    how = "was deleted" if pod.deleting else f"was rejected{where}"
    return f"pod {pod.name} {how} before it ran{f' ({why})' if why else ''}"


def is_rejected(pod: PodView) -> bool:
    """Returns whether a pod's node rejected it before it ran."""
    return is_over_unrun(pod) and not pod.deleting


def is_over_unrun(pod: PodView) -> bool:
    """Returns whether a pod was seen to end before it ran: it can have met nobody, and never will."""
    return pod.ended and not has_run(pod)


def find_spare(pods: Sequence[PodView], now: datetime, *, replace_after_s: float) -> list[PodView]:
    """Returns the pods that never ran and never will, whose name another one shall have now.

    `replace_after_s` counts from the creation of a pod that its node rejected: the scheduler may choose the
    same node.
    """
    over = [pod for pod in pods if is_over_unrun(pod)]
    return [pod for pod in over if pod.deleting or _age_s(pod, now) >= replace_after_s]


def look_again_s(
    startup: StartupStatus | None, pods: Sequence[PodView], now: datetime, *, replace_after_s: float
) -> float | None:
    """Returns when a group that starts shall be looked at though nothing says that it changed, in seconds."""
    waits = [max(0.0, replace_after_s - _age_s(pod, now)) + _LATER_S for pod in pods if is_rejected(pod)]
    if startup is not None and startup.phase not in BEFORE_RANKS:
        waits.append(LOOK_EVERY_S)
    return min(waits, default=None)


def _age_s(pod: PodView, now: datetime) -> float:
    return (now - pod.created).total_seconds()
