"""Why an epoch ended: the culprit among the pods of a group. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure
from heteroinfer_operator.cluster import PodView


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """The end of an epoch.

    Attributes:
        reason: CamelCase: of the contract's FailureReason, Kubernetes' own, or PodDeleted.
        message: one line for people.
        rank: the culprit's rank, or None if it is not a rank.
        exit_code: of the culprit, or None if unknown.
        counted: whether it counts towards `restart.maxRestarts`: evictions, drains and
            preemptions don't.
    """

    reason: str
    message: str
    rank: int | None = None
    exit_code: int | None = None
    counted: bool = True


def find_fall(pods: Sequence[PodView]) -> Fall | None:
    """Returns why an epoch with these pods has ended, or None if it has not.

    A pod that tells of itself is believed first, then what Kubernetes says of a pod,
    then what its peers say of it: a peer sees only that a pod is gone.
    """
    ended = [pod for pod in pods if pod.ended]
    if not ended:
        return None
    rungs: tuple[Iterable[Fall | None], ...] = (
        (_own_word(pod) for pod in ended),
        (_disruption(pod) for pod in ended),
        (_termination(pod) for pod in ended),
        (_deletion(pod) for pod in ended),
        (_peers_word(pod) for pod in ended),
    )
    for rung in rungs:
        for fall in rung:
            if fall is not None:
                return fall
    first = ended[0]
    return Fall(reason="PodEnded", message=f"pod {first.name} ended ({first.phase}) {first.message}".strip())


def _word(pod: PodView) -> Failure | None:
    return Failure.from_json(pod.termination.message) if pod.termination else None


def _own_word(pod: PodView) -> Fall | None:
    failure = _word(pod)
    if failure is None or str(failure.pod) != pod.labels.get(names.LABEL_POD_INDEX):
        return None
    return _from_failure(failure)


def _peers_word(pod: PodView) -> Fall | None:
    failure = _word(pod)
    return None if failure is None else _from_failure(failure)


def _from_failure(failure: Failure) -> Fall:
    log = f" (last log line: {failure.last_log})" if failure.last_log else ""
    return Fall(
        reason=failure.reason.value,
        message=failure.message + log,
        rank=failure.rank,
        exit_code=failure.exit_code,
    )


def _disruption(pod: PodView) -> Fall | None:
    evicted = pod.reason in {"Evicted", "Preempting", "NodeLost", "NodeShutdown", "Terminated"}
    if not pod.disrupted and not evicted:
        return None
    reason = pod.disrupted or pod.reason
    where = f" on node {pod.node}" if pod.node else ""
    return Fall(
        reason="PodDisrupted",
        message=f"pod {pod.name}{where} was taken away: {reason} {pod.message}".strip(),
        counted=False,
    )


def _termination(pod: PodView) -> Fall | None:
    if pod.termination is None or _word(pod) is not None or (pod.deleting and pod.termination.exit_code == 0):
        return None
    ended = pod.termination
    return Fall(
        reason=ended.reason if ended.reason == "OOMKilled" else "PodFailed",
        message=f"pod {pod.name} ended with exit code {ended.exit_code} {ended.message[:300]}".strip(),
        exit_code=ended.exit_code,
    )


def _deletion(pod: PodView) -> Fall | None:
    if not pod.deleting:
        return None
    return Fall(reason="PodDeleted", message=f"pod {pod.name} was deleted")
