"""Why an epoch ended: the culprit among the pods of a group. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_operator.api.status import MOST_EXIT_CODE
from heteroinfer_operator.cluster import ContainerTermination, PodView

IMAGE_CHANGED: Final = "ImageChanged"
"""Comes once an upgrade, and makes nothing else wait."""
NODE_LOST: Final = "NodeLost"
POD_DELETED: Final = "PodDeleted"
POD_ENDED: Final = "PodEnded"
OOM_KILLED: Final = "OOMKilled"
"""The kubelet's reason of a container in which the kernel ended a process for want of memory."""
_LONGEST_WORD, _LONGEST_LOG = 370, 160
"""Characters of a failure's message and log line together, and of the log line: a kept failure has 400."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    """The end of an epoch.

    Attributes:
        reason: CamelCase: of the contract's FailureReason, Kubernetes' own, or PodDeleted.
        rank: the culprit's rank, or None if it is not a rank.
        counted: whether it counts towards `restart.maxRestarts`: evictions, drains, preemptions
            and lost nodes don't.
        orderly: whether the group was asked to end and nothing of it has failed: it may still
            answer the requests that it has.
    """

    reason: str
    message: str
    rank: int | None = None
    exit_code: int | None = None
    counted: bool = True
    orderly: bool = False


def has_run(pod: PodView) -> bool:
    """Returns whether a peer may have met this pod: if not, another one can replace it under its name."""
    return pod.started or pod.termination is not None or pod.phase == "Succeeded"


def find_epoch_end(pods: Sequence[PodView]) -> EpochEnd | None:
    """Returns why an epoch with these pods has ended, or None if it has not.

    A pod that ended before it ran ends nothing. A pod that tells of itself is believed first,
    then what Kubernetes says of a pod, then what its peers say of it: a peer sees only that a
    pod is gone.
    """
    ended = [pod for pod in pods if pod.ended and has_run(pod)]
    if not ended:
        return None
    epoch_end = _first_cause(ended)
    orderly = all(pod.deleting and pod.termination is None for pod in ended)
    return replace(epoch_end, orderly=orderly)


def _first_cause(ended: Sequence[PodView]) -> EpochEnd:
    rungs: tuple[Iterable[EpochEnd | None], ...] = (
        (_own_word(pod) for pod in ended),
        (_disruption(pod) for pod in ended),
        (_termination(pod) for pod in ended),
        (_deletion(pod) for pod in ended),
        (_peers_word(pod) for pod in ended),
    )
    for rung in rungs:
        for epoch_end in rung:
            if epoch_end is not None:
                return epoch_end
    first = ended[0]
    return EpochEnd(
        reason=POD_ENDED, message=f"pod {first.name} ended ({first.phase}) {first.message}".strip()
    )


def _word(pod: PodView) -> Failure | None:
    return Failure.from_json(pod.termination.message) if pod.termination else None


def _own_word(pod: PodView) -> EpochEnd | None:
    failure = _word(pod)
    if failure is None or str(failure.pod) != pod.labels.get(names.LABEL_POD_INDEX):
        return None
    epoch_end = _from_failure(failure)
    assert pod.termination is not None  # it is where the word was
    if pod.termination.reason != OOM_KILLED or failure.reason is not FailureReason.RANK_EXITED:
        return epoch_end
    # The kernel killed the rank, not the supervisor, which knows only that it was a SIGKILL.
    return replace(
        epoch_end, reason=OOM_KILLED, message=f"pod {pod.name} reached its memory limit: {epoch_end.message}"
    )


def _peers_word(pod: PodView) -> EpochEnd | None:
    failure = _word(pod)
    return None if failure is None else _from_failure(failure)


def _from_failure(failure: Failure) -> EpochEnd:
    message, log = failure.message, failure.last_log
    if len(message) + len(log) > _LONGEST_WORD:  # the end of a log tells most, the beginning of a message
        message, log = message[: _LONGEST_WORD - min(len(log), _LONGEST_LOG)], log[-_LONGEST_LOG:]
    return EpochEnd(
        reason=failure.reason.value,
        message=f"{message} (last log line: {log})" if log else message,
        rank=failure.rank,
        exit_code=failure.exit_code,
    )


def _disruption(pod: PodView) -> EpochEnd | None:
    evicted = pod.reason in {"Evicted", "Preempting", NODE_LOST, "NodeShutdown", "Terminated"}
    if not pod.disrupted and not evicted:
        return None
    reason = pod.disrupted or pod.reason
    where = f" on node {pod.node}" if pod.node else ""
    return EpochEnd(
        reason="PodDisrupted",
        message=f"pod {pod.name}{where} was taken away: {reason} {pod.message}".strip(),
        counted=False,
    )


def _termination(pod: PodView) -> EpochEnd | None:
    if pod.termination is None or _word(pod) is not None or (pod.deleting and pod.termination.exit_code == 0):
        return None
    ended = pod.termination
    return EpochEnd(
        reason=OOM_KILLED if ended.reason == OOM_KILLED else "PodFailed",
        message=describe_exit(pod.name, ended),
        # Some runtimes give numbers that Linux has not; the status has no field for them.
        exit_code=ended.exit_code if abs(ended.exit_code) <= MOST_EXIT_CODE else None,
    )


def describe_exit(pod: str, ended: ContainerTermination) -> str:
    """Returns how a pod's container ended, in words."""
    return f"pod {pod} ended with exit code {ended.exit_code} {ended.message[:300]}".strip()


def _deletion(pod: PodView) -> EpochEnd | None:
    if not pod.deleting:
        return None
    return EpochEnd(reason=POD_DELETED, message=f"pod {pod.name} was deleted")
