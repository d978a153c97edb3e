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
from heteroinfer_operator.reconcile.epoch_pods import describe_epoch
from heteroinfer_operator.reconcile.node_loss import describe_still_running
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision
from heteroinfer_operator.reconcile.reading import epoch_of
from heteroinfer_operator.reconcile.reconcile_context import Context

ENDED_EPOCH_GRACE_S: Final = 2
"""Grace period for pods of an epoch that has ended, which can no longer answer any request."""
_CONSEQUENCES_OF_NODE_LOSS: Final = frozenset({FailureReason.POD_LOST.value, POD_DELETED, POD_ENDED})
"""Reasons of an epoch end that a lost node can have caused."""


def stop_group(context: Context, status: GroupStatus, pods: Sequence[PodView], message: str) -> GroupDecision:
    """Returns the decision that stops a group that must not run; running requests may finish first."""
    # A single pod shows that the epoch has begun. Other pods of the epoch may have run and disappeared
    # already, so the next epoch needs a new number.
    had_epoch = status.epoch_start_time is not None or any(epoch_of(pod) == status.epoch for pod in pods)
    return GroupDecision(
        status=transitions.stopped(
            status,
            message=context.node_loss.describe_finalizer(pods) or describe_still_running(pods) or message,
            has_pods=bool(pods),
            had_epoch=had_epoch,
        ),
        deletes=context.node_loss.build_deletes(pods, grace_s=None),
        look_again_s=context.node_loss.next_check_s(pods),
    )


def replace_group(context: Context, status: GroupStatus, pods: Sequence[PodView]) -> GroupDecision:
    """Returns the decision that stops a group, whose next epoch uses the new revision."""
    message = context.node_loss.describe_blocked(pods) or "replaced by the new revision"
    return GroupDecision(
        status=transitions.replaced(status, revision=context.target.name, message=message),
        deletes=context.node_loss.build_deletes(pods, grace_s=None, after_status=True),
        look_again_s=context.node_loss.next_check_s(pods),
    )


def end_epoch(
    context: Context, status: GroupStatus, pods: Sequence[PodView], epoch_end: EpochEnd
) -> GroupDecision:
    """Returns the decision that records the failure of an epoch and deletes its pods.

    A group that has used up its restarts keeps the pods that have logs.
    """
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
    failures = restarts.add_failure(status.failures, failure)
    has_failed = restarts.used_up(failures, context.life.restart)
    rank = "" if epoch_end.rank is None else f"rank {epoch_end.rank}: "
    event = RecordEvent(
        reason=epoch_end.reason,
        message=f"{describe_epoch(status)} ended: {rank}{epoch_end.message}"[:1000],
        warning=True,
    )
    deleted_pods = [pod for pod in pods if not (has_failed and _has_logs(pod))]
    return GroupDecision(
        status=transitions.ended(
            status,
            failures,
            is_final=has_failed,
            blocked_pod=context.node_loss.describe_blocked(pods),
            next_epoch_time=restarts.next_epoch_time(failures, context.life.restart),
        ),
        # After an orderly end, the pods have their own grace period to finish running requests.
        deletes=context.node_loss.build_deletes(
            deleted_pods, grace_s=None if epoch_end.orderly else ENDED_EPOCH_GRACE_S, after_status=True
        ),
        events=(event,),
        look_again_s=context.node_loss.next_check_s(deleted_pods),
    )


def continue_stopping(
    context: Context, status: GroupStatus, pods: Sequence[PodView], events: tuple[RecordEvent, ...]
) -> GroupDecision:
    """Returns the decision for a group whose epoch has ended but whose pods still exist.

    A group that has used up its restarts stays Failed and keeps the pods that have logs.
    """
    if restarts.used_up(status.failures, context.life.restart):
        status = transitions.failed(status, blocked_pod=describe_still_running(pods))
        pods = [pod for pod in pods if not _has_logs(pod)]
    else:
        status = transitions.stopping(
            status, message=context.node_loss.describe_blocked(pods) or status.message
        )
    return GroupDecision(
        status=status,
        deletes=context.node_loss.build_deletes(pods, grace_s=ENDED_EPOCH_GRACE_S, after_status=True),
        events=events,
        look_again_s=context.node_loss.next_check_s(pods),
    )


def attribute_loss_to_node(
    context: Context, status: GroupStatus, pods: Sequence[PodView]
) -> tuple[GroupStatus, tuple[RecordEvent, ...]]:
    """Changes the last failure of a group from a lost pod to a lost node, if the pod's node is lost.

    The failure then no longer counts as a restart. Returns the status, and the event about the change. If
    nothing changes, returns the unchanged status and no event.
    """
    last = status.failures[-1] if status.failures else None
    if last is None or not last.counted or last.reason not in _CONSEQUENCES_OF_NODE_LOSS:
        return status, ()
    node_lost = context.node_loss.find_epoch_end([pod for pod in pods if epoch_of(pod) == last.epoch])
    if node_lost is None:
        return status, ()
    failures = restarts.attribute_to_lost_node(status.failures, node_lost.message)
    message = f"group {status.index} epoch {last.epoch}: {node_lost.message}"
    event = RecordEvent(reason=node_lost.reason, message=message[:1000], warning=True)
    status = transitions.with_uncounted_failure(
        status,
        failures,
        was_final=restarts.used_up(status.failures, context.life.restart),
        next_epoch_time=restarts.next_epoch_time(failures, context.life.restart),
    )
    return status, (event,)


def free_resources_of_pods(
    context: Context, status: GroupStatus, current: Sequence[PodView], refusal: Refusal
) -> GroupDecision:
    """Returns the decision that deletes the existing pods of a group, because one pod was refused.

    A group cannot run without the refused pod. Until the next attempt, its other pods would only occupy
    resources. If a pod has started, the end of the epoch is recorded, but not counted as a restart.
    """
    if any(pod.started for pod in current):
        message = f"cannot create all pods of the group: {refusal.message}"
        end = EpochEnd(reason="PodRefused", message=message, counted=False)
        return end_epoch(context, status, current, end)
    return GroupDecision(
        status=status_of_refused_group(context, status, refusal, had_epoch=True),
        deletes=context.node_loss.build_deletes(current, grace_s=ENDED_EPOCH_GRACE_S, after_status=True),
        look_again_s=max((refusal.retry_at - context.now).total_seconds(), 0.0),
    )


def status_of_refused_group(
    context: Context, status: GroupStatus, refusal: Refusal, *, had_epoch: bool
) -> GroupStatus:
    """Returns the status of a group that waits because the API server refused a pod.

    Args:
        had_epoch: whether the epoch has begun, so that the next epoch needs a new number.
    """
    scheduling = startup.begin_phase(StartupPhase.SCHEDULING, status.startup, context.now)
    return transitions.refused(status, message=refusal.message, startup=scheduling, had_epoch=had_epoch)


def _has_logs(pod: PodView) -> bool:
    """Reports whether a pod has ended by itself, so that users can still read its log."""
    return pod.termination is not None and not pod.deleting
