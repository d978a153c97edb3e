"""Finds why an epoch ended: the pod of the group that caused the end. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_operator.api.status import MAX_EXIT_CODE
from heteroinfer_operator.cluster import ContainerTermination, PodView

IMAGE_CHANGED: Final = "ImageChanged"
"""Reason of an end that an upgrade of the operator causes once. Such an end does not delay other restarts."""
NODE_LOST: Final = "NodeLost"
POD_DELETED: Final = "PodDeleted"
POD_ENDED: Final = "PodEnded"
OOM_KILLED: Final = "OOMKilled"
"""The kubelet's reason for a container in which the kernel killed a process that reached the memory limit."""
_MAX_TEXT: Final = 370
"""Characters of message and log line together; a stored failure has 400."""
_MIN_LOG: Final = 80
"""Number of characters at the end of the log line that stay even if the message is long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    """The end of an epoch.

    Attributes:
        reason: a CamelCase reason from the contract's FailureReason, from Kubernetes, or PodDeleted.
        rank: rank that caused the end, or None if no rank did.
        counted: whether the end counts towards `restart.maxRestarts`: evictions, drains, preemptions
            and lost nodes do not count.
        orderly: whether the group was asked to end and nothing has failed, so that it may still
            finish its running requests.
    """

    reason: str
    message: str
    rank: int | None = None
    exit_code: int | None = None
    counted: bool = True
    orderly: bool = False


def has_run(pod: PodView) -> bool:
    """Reports whether this pod may have joined its group. A pod that has not run can be replaced."""
    return pod.started or pod.termination is not None or pod.phase == "Succeeded"


def find_epoch_end(pods: Sequence[PodView]) -> EpochEnd | None:
    """Returns why an epoch with these pods has ended, or None if it has not ended.

    A pod that ended before it ran does not end the epoch. Of several causes, a pod's report about itself
    takes precedence, then Kubernetes' report about a pod, then a pod's report about another pod, because
    other pods see only that a pod is gone.
    """
    ended = [pod for pod in pods if pod.ended and has_run(pod)]
    if not ended:
        return None
    epoch_end = _find_first_cause(ended)
    orderly = all(pod.deleting and pod.termination is None for pod in ended)  # deleted, and no worker failed
    return replace(epoch_end, orderly=orderly)


def _find_first_cause(ended: Sequence[PodView]) -> EpochEnd:
    """Returns the cause that takes precedence: the most direct report about the end of one of the pods."""
    causes_by_precedence: tuple[Iterable[EpochEnd | None], ...] = (
        (_find_own_report(pod) for pod in ended),
        (_find_disruption(pod) for pod in ended),  # this cause and the next two are Kubernetes' reports
        (_find_termination(pod) for pod in ended),
        (_find_deletion(pod) for pod in ended),
        (_find_peer_report(pod) for pod in ended),
    )
    for causes in causes_by_precedence:
        for epoch_end in causes:
            if epoch_end is not None:
                return epoch_end
    first = ended[0]
    return EpochEnd(
        reason=POD_ENDED, message=f"pod {first.name} ended ({first.phase}) {first.message}".strip()
    )


def _read_failure(pod: PodView) -> Failure | None:
    """Reads the worker's failure report from a pod's termination message, or None."""
    return Failure.from_json(pod.termination.message) if pod.termination else None


def _find_own_report(pod: PodView) -> EpochEnd | None:
    """Returns the end from a pod's report about itself; None if the report names another pod."""
    failure = _read_failure(pod)
    if failure is None or str(failure.pod) != pod.labels.get(names.LABEL_POD_INDEX):
        return None
    epoch_end = _build_from_failure(failure)
    assert pod.termination is not None  # the report is part of the termination
    if pod.termination.reason != OOM_KILLED or failure.reason is not FailureReason.RANK_EXITED:
        return epoch_end
    # The kernel killed the rank but not the supervisor, and the supervisor sees only a SIGKILL.
    return replace(
        epoch_end, reason=OOM_KILLED, message=f"pod {pod.name} reached its memory limit: {epoch_end.message}"
    )


def _find_peer_report(pod: PodView) -> EpochEnd | None:
    """Returns the end from a pod's report about any pod of the group; None without a report."""
    failure = _read_failure(pod)
    return None if failure is None else _build_from_failure(failure)


def _build_from_failure(failure: Failure) -> EpochEnd:
    """Returns the end for a failure report; shortens message and log line so that both fit the status."""
    message, log = failure.message, failure.last_log
    # The message has the fix, so the log line is shortened first. The end of the log line stays.
    max_log = max(_MAX_TEXT - len(message), _MIN_LOG)
    if len(log) > max_log:
        log = f"…{log[1 - max_log :]}"
    max_message = _MAX_TEXT - len(log)
    if len(message) > max_message:
        message = f"{message[: max_message - 1]}…"
    return EpochEnd(
        reason=failure.reason.value,
        message=f"{message} (last log line: {log})" if log else message,
        rank=failure.rank,
        exit_code=failure.exit_code,
    )


def _find_disruption(pod: PodView) -> EpochEnd | None:
    """Returns the end if Kubernetes evicted, preempted or drained the pod, otherwise None."""
    is_evicted = pod.reason in {"Evicted", "Preempting", NODE_LOST, "NodeShutdown", "Terminated"}
    if not pod.disrupted and not is_evicted:
        return None
    reason = pod.disrupted or pod.reason
    on_node = f" on node {pod.node}" if pod.node else ""
    return EpochEnd(
        reason="PodDisrupted",
        message=f"pod {pod.name}{on_node} was disrupted: {reason} {pod.message}".strip(),
        counted=False,
    )


def _find_termination(pod: PodView) -> EpochEnd | None:
    """Returns the end if the pod's container failed without a report, otherwise None.

    A container that ended with exit code 0 during the deletion of the pod has not failed. `_find_deletion`
    finds this end.
    """
    if pod.termination is None or _read_failure(pod) is not None:
        return None
    if pod.deleting and pod.termination.exit_code == 0:
        return None
    ended = pod.termination
    return EpochEnd(
        reason=OOM_KILLED if ended.reason == OOM_KILLED else "PodFailed",
        message=describe_exit(pod.name, ended),
        # Some runtimes report exit codes that Linux does not have and that do not fit the status field.
        exit_code=ended.exit_code if abs(ended.exit_code) <= MAX_EXIT_CODE else None,
    )


def describe_exit(pod: str, ended: ContainerTermination) -> str:
    """Describes how a pod's container ended."""
    return f"pod {pod} ended with exit code {ended.exit_code}: {ended.message[:300]}".rstrip(": ")


def _find_deletion(pod: PodView) -> EpochEnd | None:
    """Returns the end if the pod is being deleted, otherwise None."""
    if not pod.deleting:
        return None
    return EpochEnd(reason=POD_DELETED, message=f"pod {pod.name} was deleted")
