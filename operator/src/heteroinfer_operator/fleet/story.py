"""What `heteroinfer logs` tells of one group: which pod first, and what is known of each. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure
from heteroinfer_operator.api import FailureStatus, GroupStatus
from heteroinfer_operator.cluster import PodView
from heteroinfer_operator.reconcile.reading import epoch_of, index_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PodStory:
    """One pod of a group.

    Attributes:
        title: who it is, for the line above its log.
        prefix: short, for each line of its log.
        ended: how it ended, in words, or "".
        culprit: whether it ended the epoch.
    """

    name: str
    title: str
    prefix: str
    ended: str
    culprit: bool


def epochs(pods: Sequence[PodView]) -> tuple[int, ...]:
    """Returns the epochs that pods are of, the newest last; their labels are complete."""
    return tuple(sorted({epoch_of(pod) for pod in pods}))


def build_stories(group: GroupStatus, pods: Sequence[PodView], epoch: int) -> tuple[PodStory, ...]:
    """Returns the pods of one epoch of a group: the culprit, then those that ended badly, then the others.

    In an epoch that runs, the rank that ended the last one comes first.
    """
    current = [pod for pod in pods if epoch_of(pod) == epoch]
    ranks = _ranks_by_pod(group)
    culprit = _culprit(group, current, ranks)

    def order(pod: PodView) -> tuple[bool, bool, int]:
        return index_of(pod) != culprit, not _ended_badly(pod), index_of(pod)

    return tuple(
        _story(pod, ranks.get(pod.name, ()), culprit=index_of(pod) == culprit and pod.termination is not None)
        for pod in sorted(current, key=order)
    )


def tell_failure(failure: FailureStatus) -> str:
    """Returns a kept failure in one line."""
    who = "" if failure.rank is None else f", rank {failure.rank}"
    code = "" if failure.exit_code is None else f", exit code {failure.exit_code}"
    counted = "" if failure.counted else ", not counted"
    return (
        f"epoch {failure.epoch} ended at {failure.time:%Y-%m-%d %H:%M:%SZ}: "
        f"{failure.reason}{who}{code}{counted}: {failure.message}"
    )


def tell_group(group: GroupStatus) -> str:
    """Returns what a group does, in one line."""
    waits = f": {group.message}" if group.message else ""
    return f"group {group.index} epoch {group.epoch}: {group.phase.value}{waits}"


def _ranks_by_pod(group: GroupStatus) -> Mapping[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for entry in group.members:
        found[entry.pod] = (*found.get(entry.pod, ()), entry.rank)
    return found


def _failures(pods: Iterable[PodView]) -> list[tuple[PodView, Failure]]:
    reported = [(pod, Failure.from_json(pod.termination.message)) for pod in pods if pod.termination]
    return [(pod, failure) for pod, failure in reported if failure is not None]


def _culprit(group: GroupStatus, pods: Sequence[PodView], ranks: Mapping[str, tuple[int, ...]]) -> int | None:
    """Returns the index of the culprit's pod by its own word, its peers', or the last failure's rank."""
    failures = _failures(pods)
    own = [pod for pod, failure in failures if failure.pod == index_of(pod)]
    if own:
        return index_of(own[0])
    blamed = [failure.pod for _, failure in failures if failure.pod is not None]
    if blamed:
        return blamed[0]
    last = group.failures[-1].rank if group.failures else None
    return next((index_of(pod) for pod in pods if last is not None and last in ranks.get(pod.name, ())), None)


def _ended_badly(pod: PodView) -> bool:
    return pod.termination is not None and pod.termination.exit_code != 0


def _story(pod: PodView, ranks: tuple[int, ...], *, culprit: bool) -> PodStory:
    role = pod.labels.get(names.LABEL_ROLE, "")
    who = f"rank {', '.join(map(str, ranks))}" if ranks else f"pod {index_of(pod)}"
    where = f" on node {pod.node}" if pod.node else ""
    return PodStory(
        name=pod.name,
        title=f"{pod.name}: {who}, role {role}{where}, {_state(pod)}",
        prefix=f"{who} {role}".strip(),
        ended=_ended(pod),
        culprit=culprit,
    )


def _state(pod: PodView) -> str:
    if pod.deleting:
        return "being deleted"
    if pod.unschedulable:
        return f"not placed: {pod.unschedulable}"
    if pod.waiting:
        return f"waits: {pod.waiting}"
    return "ready" if pod.ready else pod.phase


def _ended(pod: PodView) -> str:
    if pod.termination is None:
        return ""
    ended = pod.termination
    failure = Failure.from_json(ended.message)
    code = f"ended with exit code {ended.exit_code}" + (f" ({ended.reason})" if ended.reason else "")
    if failure is None:
        return f"{code} {ended.message}".strip()
    who = "" if failure.rank is None else f" rank {failure.rank}:"
    signal = "" if failure.exit_code is None else f" (exit code {failure.exit_code})"
    log = f"; its last log line: {failure.last_log}" if failure.last_log else ""
    return f"{code}: {failure.reason.value}:{who} {failure.message}{signal}{log}"
