"""Progress of a starting group, or the cause of its wait. Pure.

Waiting for capacity, images and the model has no limit: a new epoch would begin the same wait again. Once all
pods are connected, the leader's supervisor watches the start. Before that, this module does, because the
supervisor cannot distinguish a silent pod from a pod that still pulls its image.
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

CHECK_EVERY_S = 15.0
"""Seconds between checks while ranks connect, load and warm up: no event reports their progress."""
_WRITE_EVERY = timedelta(seconds=60)
"""Time between two writes of loaded bytes to the status."""
BEFORE_RANKS = frozenset({StartupPhase.MODEL, StartupPhase.SCHEDULING, StartupPhase.IMAGE})
"""Phases in which not every pod has run yet."""
_CHECK_MARGIN_S = 0.1
"""Extra seconds of a wait, so that the check runs after its time limit and not exactly at it."""
_PHASE_MESSAGES = {
    StartupPhase.CONNECTING: "the ranks are connecting",
    StartupPhase.LOADING: "reading weights",
    StartupPhase.WARMING_UP: "warming up",
}
_RANKS_START = "the ranks are starting: they import Python modules, which takes minutes on a busy machine"
_NO_ERROR = frozenset({"ContainerCreating", "PodInitializing"})
"""The kubelet's reasons for a container that it still creates, without an error."""


def begin_phase(phase: StartupPhase, last: StartupStatus | None, now: datetime) -> StartupStatus:
    """Returns the status of a phase; keeps the last status, with its start time, if the phase is the same."""
    if last is not None and last.phase is phase:
        return last
    return StartupStatus(phase=phase, since=now)


def observe_startup(
    last: StartupStatus | None,
    pods: Sequence[PodView],
    report: GroupReport | None,
    *,
    all_pods_exist: bool,
    now: datetime,
) -> StartupStatus:
    """Returns the startup phase of a group that is not ready, with the bytes that its ranks have loaded.

    The bytes change at most once a minute (`_WRITE_EVERY`), because each change is a write of the status.

    Args:
        last: startup in the last status, or None.
    """
    status = begin_phase(_find_phase(last, pods, report, all_pods_exist=all_pods_exist), last, now)
    if report is None or status.phase not in {StartupPhase.LOADING, StartupPhase.WARMING_UP}:
        return status
    loaded_bytes = sum(rank.loaded_bytes for rank in report.ranks)
    total_bytes = sum(rank.total_bytes for rank in report.ranks)
    measured_before = last if last is not None and last.measured_time is not None else None
    if measured_before is None and not total_bytes:  # the ranks do not know the size of their weights yet
        return status
    if measured_before is not None and (
        not total_bytes or _keeps_progress(measured_before, loaded_bytes, now)
    ):
        return _with_old_measurement(status, measured_before)
    return status.changed(bytes_done=loaded_bytes, bytes_total=total_bytes, measured_time=now)


def _find_phase(
    last: StartupStatus | None, pods: Sequence[PodView], report: GroupReport | None, *, all_pods_exist: bool
) -> StartupPhase:
    """Returns the phase of a starting group: the first phase that not all its pods have finished."""
    if not all_pods_exist or not all(pod.node for pod in pods):
        return StartupPhase.SCHEDULING
    if not all(pod.started for pod in pods):
        return StartupPhase.IMAGE
    if report is None:
        # A single request to the leader may fail, so the phase of its last report stays.
        return StartupPhase.CONNECTING if last is None or last.phase in BEFORE_RANKS else last.phase
    phases = {rank.phase for rank in report.ranks}
    if phases & {RankPhase.STARTING, RankPhase.CONNECTING}:
        return StartupPhase.CONNECTING
    return StartupPhase.LOADING if RankPhase.LOADING in phases else StartupPhase.WARMING_UP


def _keeps_progress(measured_before: StartupStatus, loaded_bytes: int, now: datetime) -> bool:
    """Reports whether the loaded bytes in the status stay: they are unchanged, or younger than a minute."""
    assert measured_before.measured_time is not None
    return measured_before.bytes_done == loaded_bytes or now - measured_before.measured_time < _WRITE_EVERY


def _with_old_measurement(status: StartupStatus, measured_before: StartupStatus) -> StartupStatus:
    """Returns the status with the loaded bytes that the last status has."""
    return status.changed(
        bytes_done=measured_before.bytes_done,
        bytes_total=measured_before.bytes_total,
        measured_time=measured_before.measured_time,
    )


def is_connecting(startup: StartupStatus | None) -> bool:
    """Reports whether all pods of a starting group run but their ranks are not connected yet."""
    return startup is not None and startup.phase is StartupPhase.CONNECTING


def describe_progress(
    startup: StartupStatus, pods: Sequence[PodView], report: GroupReport | None, expected: int
) -> str:
    """Describes the wait or the progress of a starting group.

    A pod with a problem comes first, because the problem delays the whole group. Otherwise the description
    shows the phase of the start.

    Args:
        expected: number of pods that the group needs.
    """
    ended = next((pod for pod in pods if pod.ended), None)
    if ended is not None:
        return f"{describe_end(ended)}; the operator replaces it"
    unknown = next((pod for pod in pods if pod.unknown), None)
    if unknown is not None:
        return f"the state of pod {unknown.name} is unknown: {unknown.unknown}"
    placed_but_not_started = [pod for pod in pods if not pod.started and pod.node]
    if placed_but_not_started:
        # A pod that an error blocks comes before a pod that only waits.
        return describe_wait(max(placed_but_not_started, key=is_container_blocked))
    if startup.phase is StartupPhase.CONNECTING:
        return _describe_connecting(pods, report)
    if startup.phase is StartupPhase.LOADING and startup.bytes_total:
        done, total = format_bytes(startup.bytes_done or 0), format_bytes(startup.bytes_total)
        return f"reading weights: {done} of {total}"
    num_ready = sum(pod.ready for pod in pods)
    return _PHASE_MESSAGES.get(startup.phase) or f"{num_ready} of {expected} pods are ready"


def _describe_connecting(pods: Sequence[PodView], report: GroupReport | None) -> str:
    """Describes the first pod that does not reach the leader, or the leader that gives no answer.

    If all pods have reached the leader, the description shows whether ranks still start or only connect.
    """
    message = _PHASE_MESSAGES[StartupPhase.CONNECTING]
    name_by_index = {index_of(pod): pod.name for pod in pods}
    if 0 not in name_by_index:
        return f"{message}; the leader's pod (index 0) does not exist yet"
    if report is None:
        return (
            f"the ranks are starting or connecting; the leader, pod {name_by_index[0]}, does not answer the "
            f"operator at port {names.DEFAULT_HEALTH_PORT} yet, because it starts, is busy or cannot be "
            "reached. If this lasts longer than 5 minutes, check the NetworkPolicies of the namespace, and "
            "the network between the operator and this pod"
        )
    missing = [name_by_index[index] for index in report.missing_pods if index in name_by_index]
    if not missing:
        is_starting = any(rank.phase is RankPhase.STARTING for rank in report.ranks)
        return _RANKS_START if is_starting else message
    others = f" and {len(missing) - 1} more pods do" if len(missing) > 1 else " does"
    return (
        f"{message}; pod {missing[0]}{others} not reach the leader, pod {name_by_index[0]}, at port "
        f"{names.DEFAULT_CONTROL_PORT} yet. If this persists, check the NetworkPolicies of the namespace, "
        f"the network between the two nodes, and the log of pod {missing[0]}"
    )


def describe_wait(pod: PodView) -> str:
    """Describes the wait of a pod that has not run yet."""
    return f"pod {pod.name} waits: {pod.unschedulable or pod.waiting or 'its container is not created yet'}"


def is_container_blocked(pod: PodView) -> bool:
    """Reports whether an error keeps the container from being created, for example a missing image."""
    return pod.waiting is not None and not pod.started and pod.waiting.reason not in _NO_ERROR


def lacks_configuration(pod: PodView) -> bool:
    """Reports whether a container waits for the Secret or ConfigMap with its environment variables."""
    return pod.waiting is not None and not pod.started and pod.waiting.reason == "CreateContainerConfigError"


def find_uncreated_containers(pods: Sequence[PodView], blocked_before: Collection[int]) -> dict[int, PodView]:
    """Returns, by index, the pods whose containers could not be created and have not run since.

    A pod stays in the result until it runs: the kubelet's reason alternates between an error (ErrImagePull)
    and no error (ContainerCreating), and each change would be reported again.

    Args:
        blocked_before: indices of the pods in the last result, from the status.
    """
    by_index = {index_of(pod): pod for pod in pods}
    return {
        index: pod
        for index, pod in sorted(by_index.items())
        if is_container_blocked(pod) or (index in blocked_before and not has_run(pod))
    }


def describe_end(pod: PodView) -> str:
    """Describes the end of a pod that had never run."""
    cause = ": ".join(part for part in (pod.disrupted or pod.reason, pod.message) if part)
    by_node = f" by node {pod.node}" if pod.node else ""
    end = "was deleted" if pod.deleting else f"was rejected{by_node}"
    return f"pod {pod.name} {end} before it ran{f' ({cause})' if cause else ''}"


def is_rejected(pod: PodView) -> bool:
    """Reports whether the node rejected a pod before the pod ran."""
    return ended_before_run(pod) and not pod.deleting


def ended_before_run(pod: PodView) -> bool:
    """Reports whether a pod ended before it ran, so that it never joined its group."""
    return pod.ended and not has_run(pod)


def find_replaceable(pods: Sequence[PodView], now: datetime, *, replace_after_s: float) -> list[PodView]:
    """Returns the pods that ended before they ran, and that new pods may replace now.

    Args:
        replace_after_s: wait from the creation of a pod that its node rejected. Without this wait, the
            scheduler could choose the same node again and again. A deleted pod is replaced without a wait.
    """
    ended_pods = [pod for pod in pods if ended_before_run(pod)]
    return [pod for pod in ended_pods if pod.deleting or _age_s(pod, now) >= replace_after_s]


def next_check_s(
    startup: StartupStatus | None, pods: Sequence[PodView], now: datetime, *, replace_after_s: float
) -> float | None:
    """Returns the seconds until the next check of a starting group; None if only events matter."""
    waits = [
        max(0.0, replace_after_s - _age_s(pod, now)) + _CHECK_MARGIN_S for pod in pods if is_rejected(pod)
    ]
    if startup is not None and startup.phase not in BEFORE_RANKS:
        waits.append(CHECK_EVERY_S)
    return min(waits, default=None)


def _age_s(pod: PodView, now: datetime) -> float:
    return (now - pod.created).total_seconds()
