"""Stops a group: because of its spec, for a new revision, or because its epoch has ended. Pure.

The operator first writes the failure and the next epoch to the status, then deletes the old pods. It creates
the new pods once the old pods are gone.
"""

from collections.abc import Sequence
from typing import Final

from heteroinfer_contract.failure import FailureReason
from heteroinfer_operator.api import FailureStatus, GroupStatus, StartupPhase
from heteroinfer_operator.api.base import MAX_TEXT
from heteroinfer_operator.cluster import PodView, RecordEvent, Refusal
from heteroinfer_operator.reconcile import restarts, startup, transitions
from heteroinfer_operator.reconcile.epoch_end import POD_DELETED, POD_ENDED, EpochEnd
from heteroinfer_operator.reconcile.epoch_pods import name_epoch
from heteroinfer_operator.reconcile.node_loss import find_still_running
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision
from heteroinfer_operator.reconcile.reading import epoch_of
from heteroinfer_operator.reconcile.reconcile_context import Context

ENDED_EPOCH_GRACE_S: Final = 2
"""Grace period for pods of an epoch that has ended: they can no longer answer any request."""
_CONSEQUENCES_OF_NODE_LOSS: Final = frozenset({FailureReason.POD_LOST.value, POD_DELETED, POD_ENDED})


def stop_group(context: Context, status: GroupStatus, pods: Sequence[PodView], message: str) -> GroupDecision:
    """Stops a group that must not run; its running requests may finish first."""
    # One pod is enough: all pods may have run and disappeared before the next reconcile.
    had_epoch = status.epoch_start_time is not None or any(epoch_of(pod) == status.epoch for pod in pods)
    return GroupDecision(
        status=transitions.stopped(
            status,
            message=context.node_loss.find_finalizer_block(pods) or find_still_running(pods) or message,
            has_pods=bool(pods),
            had_epoch=had_epoch,
        ),
        deletes=context.node_loss.deletes(pods, grace_s=None),
        look_again_s=context.node_loss.look_again_s(pods),
    )


def replace_group(context: Context, status: GroupStatus, pods: Sequence[PodView]) -> GroupDecision:
    """Stops a group so that the new revision can replace it."""
    message = context.node_loss.blocked_message(pods) or "replaced by the new revision"
    return GroupDecision(
        status=transitions.replaced(status, revision=context.target.name, message=message),
        deletes=context.node_loss.deletes(pods, grace_s=None, after_status=True),
        look_again_s=context.node_loss.look_again_s(pods),
    )


def end_epoch(
    context: Context, status: GroupStatus, pods: Sequence[PodView], epoch_end: EpochEnd
) -> GroupDecision:
    """Ends an epoch that cannot continue: records the failure and deletes the pods."""
    failure = FailureStatus(
        epoch=status.epoch,
        time=context.now,
        reason=epoch_end.reason,
        message=epoch_end.message[:MAX_TEXT],
        rank=epoch_end.rank,
        exit_code=epoch_end.exit_code,
        counted=epoch_end.counted,
        served=status.served_time is not None,
    )
    failures = restarts.remember(status.failures, failure)
    failed = restarts.used_up(failures, context.life.restart)
    who = "" if epoch_end.rank is None else f"rank {epoch_end.rank}: "
    event = RecordEvent(
        reason=epoch_end.reason,
        message=f"{name_epoch(status)} ended: {who}{epoch_end.message}"[:1000],
        warning=True,
    )
    ending = [pod for pod in pods if not (failed and _has_logs(pod))]
    return GroupDecision(
        status=transitions.ended(
            status,
            failures,
            for_good=failed,
            held=context.node_loss.blocked_message(pods),
            next_epoch_time=restarts.next_epoch_time(failures, context.life.restart),
        ),
        deletes=context.node_loss.deletes(
            ending, grace_s=None if epoch_end.orderly else ENDED_EPOCH_GRACE_S, after_status=True
        ),
        events=(event,),
        look_again_s=context.node_loss.look_again_s(ending),
    )


def go_on_stopping(
    context: Context, status: GroupStatus, pods: Sequence[PodView], events: tuple[RecordEvent, ...]
) -> GroupDecision:
    """Waits until the old pods of a group are gone; a failed group keeps the pods that have logs."""
    if restarts.used_up(status.failures, context.life.restart):
        status = transitions.failed(status, held=find_still_running(pods))
        pods = [pod for pod in pods if not _has_logs(pod)]
    else:
        status = transitions.stopping(
            status, message=context.node_loss.blocked_message(pods) or status.message
        )
    return GroupDecision(
        status=status,
        deletes=context.node_loss.deletes(pods, grace_s=ENDED_EPOCH_GRACE_S, after_status=True),
        events=events,
        look_again_s=context.node_loss.look_again_s(pods),
    )


def put_down_to_node(
    context: Context, status: GroupStatus, pods: Sequence[PodView]
) -> tuple[GroupStatus, tuple[RecordEvent, ...]]:
    """Attributes a counted loss of a pod to its node if the node turns out to be lost too."""
    last = status.failures[-1] if status.failures else None
    if last is None or not last.counted or last.reason not in _CONSEQUENCES_OF_NODE_LOSS:
        return status, ()
    lost = context.node_loss.find_epoch_end([pod for pod in pods if epoch_of(pod) == last.epoch])
    if lost is None:
        return status, ()
    failures = restarts.excuse(status.failures, lost.message)
    message = f"group {status.index} epoch {last.epoch}: {lost.message}"
    event = RecordEvent(reason=lost.reason, message=message[:1000], warning=True)
    next_epoch_time = restarts.next_epoch_time(failures, context.life.restart)
    return transitions.excused(status, failures, next_epoch_time=next_epoch_time), (event,)


def give_back(
    context: Context, status: GroupStatus, current: Sequence[PodView], refusal: Refusal
) -> GroupDecision:
    """Deletes the other pods of a group with a refused pod to free their resources; the group retries."""
    if any(pod.started for pod in current):
        message = f"cannot create all pods of the group: {refusal.message}"
        end = EpochEnd(reason="PodRefused", message=message, counted=False)
        return end_epoch(context, status, current, end)
    return GroupDecision(
        status=refuse(context, status, refusal, had_epoch=True),
        deletes=context.node_loss.deletes(current, grace_s=ENDED_EPOCH_GRACE_S, after_status=True),
        look_again_s=max((refusal.retry_at - context.now).total_seconds(), 0.0),
    )


def refuse(context: Context, status: GroupStatus, refusal: Refusal, *, had_epoch: bool) -> GroupStatus:
    """Status of a group with a refused pod."""
    begun = startup.begin(StartupPhase.SCHEDULING, status.startup, context.now)
    return transitions.refused(status, message=refusal.message, startup=begun, had_epoch=had_epoch)


def _has_logs(pod: PodView) -> bool:
    return pod.termination is not None and not pod.deleting
