"""Orders the pods of a group for `heteroinfer logs`, and describes each pod. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure
from heteroinfer_operator.api import FailureStatus, GroupStatus
from heteroinfer_operator.cluster import PodView
from heteroinfer_operator.reconcile.reading import epoch_of, index_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PodStory:
    """The description of one pod of a group.

    Attributes:
        title: name, rank, role, node and state, for the line above the pod's log.
        prefix: rank and role, for the beginning of each line of the log.
        ended: exit code and cause of the worker container's end, or "".
        culprit: whether this pod's failure ended the epoch.
    """

    name: str
    title: str
    prefix: str
    ended: str
    culprit: bool


def epochs(pods: Sequence[PodView]) -> tuple[int, ...]:
    """Returns the epochs of pods with complete labels, the newest last."""
    return tuple(sorted({epoch_of(pod) for pod in pods}))


def build_stories(group: GroupStatus, pods: Sequence[PodView], epoch: int) -> tuple[PodStory, ...]:
    """Describes the pods of one epoch: first the culprit, then other failed pods, then all other pods.

    The *culprit* is the pod that ended the epoch. In a running epoch without failures, the pod of the rank
    that ended the previous epoch comes first.
    """
    current = [pod for pod in pods if epoch_of(pod) == epoch]
    ranks = _ranks_by_pod(group)
    culprit = _find_culprit(group, current, ranks)

    def order(pod: PodView) -> tuple[bool, bool, int]:
        """Returns the sort key of a pod. False sorts before True."""
        return index_of(pod) != culprit, not _has_failed(pod), index_of(pod)

    # A pod that still runs did not end this epoch, even if it comes first.
    return tuple(
        _build_story(
            pod, ranks.get(pod.name, ()), culprit=index_of(pod) == culprit and pod.termination is not None
        )
        for pod in sorted(current, key=order)
    )


def failure_text(failure: FailureStatus) -> str:
    """Describes a failure of the status in one line."""
    rank = "" if failure.rank is None else f", rank {failure.rank}"
    code = "" if failure.exit_code is None else f", exit code {failure.exit_code}"
    counted = "" if failure.counted else ", does not count towards restart.maxRestarts"
    return (
        f"epoch {failure.epoch} ended at {failure.time:%Y-%m-%d %H:%M:%SZ}: "
        f"{failure.reason}{rank}{code}{counted}: {failure.message}"
    )


def group_text(group: GroupStatus) -> str:
    """Describes the state of a group in one line."""
    waits = f": {group.message}" if group.message else ""
    return f"group {group.index} epoch {group.epoch}: {group.phase.value}{waits}"


def _ranks_by_pod(group: GroupStatus) -> Mapping[str, tuple[int, ...]]:
    """Returns the ranks of each pod, by the pod's name."""
    ranks: dict[str, tuple[int, ...]] = {}
    for entry in group.members:
        ranks[entry.pod] = (*ranks.get(entry.pod, ()), entry.rank)
    return ranks


def _read_failures(pods: Iterable[PodView]) -> list[tuple[PodView, Failure]]:
    """Returns the failures that pods reported when they ended, with their pods."""
    reported = [(pod, Failure.from_json(pod.termination.message)) for pod in pods if pod.termination]
    return [(pod, failure) for pod, failure in reported if failure is not None]


def _find_culprit(
    group: GroupStatus, pods: Sequence[PodView], ranks: Mapping[str, tuple[int, ...]]
) -> int | None:
    """Returns the index of the pod that ended the epoch, or None.

    Uses the first of these sources: a pod's report about its own failure, a pod's report about another pod,
    the last failure in the status.
    """
    failures = _read_failures(pods)
    self_reported = [pod for pod, failure in failures if failure.pod == index_of(pod)]
    if self_reported:
        return index_of(self_reported[0])
    reported_by_others = [failure.pod for _, failure in failures if failure.pod is not None]
    if reported_by_others:
        return reported_by_others[0]
    failed_rank = group.failures[-1].rank if group.failures else None
    for pod in pods:
        if failed_rank is not None and failed_rank in ranks.get(pod.name, ()):
            return index_of(pod)
    return None


def _has_failed(pod: PodView) -> bool:
    return pod.termination is not None and pod.termination.exit_code != 0


def _build_story(pod: PodView, ranks: tuple[int, ...], *, culprit: bool) -> PodStory:
    """Builds the description of a pod and of its end."""
    role = pod.labels.get(names.LABEL_ROLE, "")
    label = f"rank {', '.join(map(str, ranks))}" if ranks else f"pod {index_of(pod)}"
    node = f" on node {pod.node}" if pod.node else ""
    return PodStory(
        name=pod.name,
        title=f"{pod.name}: {label}, role {role}{node}, {_describe_state(pod)}",
        prefix=f"{label} {role}".strip(),
        ended=_describe_end(pod),
        culprit=culprit,
    )


def _describe_state(pod: PodView) -> str:
    """Describes the state of a pod in a few words."""
    if pod.deleting:
        return "being deleted"
    if pod.unschedulable:
        return f"not scheduled: {pod.unschedulable}"
    if pod.waiting:
        return f"waiting: {pod.waiting}"
    return "ready" if pod.ready else pod.phase


def _describe_end(pod: PodView) -> str:
    """Describes how a pod's worker container ended, or "" while it runs."""
    if pod.termination is None:
        return ""
    ended = pod.termination
    failure = Failure.from_json(ended.message)
    code = f"ended with exit code {ended.exit_code}" + (f" ({ended.reason})" if ended.reason else "")
    if failure is None:
        return f"{code}: {ended.message}" if ended.message else code
    rank = "" if failure.rank is None else f" rank {failure.rank}:"
    exit_code = "" if failure.exit_code is None else f" (exit code {failure.exit_code})"
    log = f"; its last log line: {failure.last_log}" if failure.last_log else ""
    return f"{code}: {failure.reason.value}:{rank} {failure.message}{exit_code}{log}"
