"""The causes that end an epoch, in order of precedence. Pure."""

from collections.abc import Callable
from typing import Final

from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.group_report import GroupReport
from heteroinfer_operator.api import StartupStatus
from heteroinfer_operator.errors import PlanReason
from heteroinfer_operator.manifests.group_key_secret import group_key_secret, key_of
from heteroinfer_operator.nodes.node_assignment import Gang
from heteroinfer_operator.quantity import parse_duration_s
from heteroinfer_operator.reconcile import startup
from heteroinfer_operator.reconcile.epoch_end import IMAGE_CHANGED, POD_DELETED, POD_ENDED, EpochEnd, has_run
from heteroinfer_operator.reconcile.epoch_end import find_epoch_end as find_end_of_pods
from heteroinfer_operator.reconcile.group_planner import gang_of
from heteroinfer_operator.reconcile.one_group.made import BegunEpoch, had_run

PODS_NEVER_SEEN: Final = "PodsNeverSeen"
_SUPERVISORS_FIRST_S: Final = 30.0
"""Extra seconds for the supervisor: its own timeout has the same length, and its report names the rank."""
EndCheck = Callable[[BegunEpoch], EpochEnd | None]


def find_epoch_end(epoch: BegunEpoch) -> EpochEnd | None:
    """Finds why an epoch has ended: the first cause that a check in ENDS finds, or None."""
    return next((end for check in ENDS if (end := check(epoch)) is not None), None)


def pod_ended(epoch: BegunEpoch) -> EpochEnd | None:
    """End of an epoch in which a pod ended after it had run; otherwise None."""
    return find_end_of_pods(epoch.pods)


def node_lost(epoch: BegunEpoch) -> EpochEnd | None:
    """End of an epoch that has a pod on a lost node; otherwise None."""
    pods = [pod for pod in epoch.pods if not startup.is_rejected(pod)]
    return epoch.context.node_loss.find_epoch_end(pods)


def held_by_kueue(epoch: BegunEpoch) -> EpochEnd | None:
    """End of an epoch under Kueue in which a pod ended before it ran; otherwise None.

    Kueue keeps the name of such a pod, so the operator cannot replace the pod alone.
    """
    if gang_of(epoch.pods) is not Gang.KUEUE or not epoch.spare:
        return None
    spare = epoch.spare
    message = f"{startup.describe_end(spare[0])}; Kueue cannot replace one pod, so the whole group restarts"
    deleted = spare[0].deleting
    lost = epoch.context.node_loss.find_epoch_end(spare)
    return lost or EpochEnd(
        reason=POD_DELETED if deleted else POD_ENDED, message=message, counted=not deleted
    )


def pod_gone(epoch: BegunEpoch) -> EpochEnd | None:
    """End of an epoch in which a pod that had run no longer exists; otherwise None."""
    present = {pod.name for pod in epoch.pods}
    gone = [pod for pod in had_run(epoch.status) if pod not in present]
    return EpochEnd(reason=POD_DELETED, message=f"pod {gone[0]} is gone") if gone else None


def plan_lost(epoch: BegunEpoch) -> EpochEnd | None:
    """End of an epoch that needs a pod or container, but whose plan or revision is lost; otherwise None."""
    made = epoch.made
    to_be_made = epoch.missing and (made.plan is None or made.revision is None)
    waiting = next((pod.name for pod in epoch.pods if not has_run(pod)), "") if made.plan is None else ""
    if not to_be_made and not waiting:
        return None
    what = f"the container of pod {waiting}" if waiting else f"a pod of epoch {epoch.status.epoch}"
    return EpochEnd(
        reason=PlanReason.PLAN_LOST.value,
        message=f"cannot create {what}: the ConfigMap of its plan or revision was deleted or damaged; the "
        "group restarts with a new plan",
    )


def key_lost(epoch: BegunEpoch) -> EpochEnd | None:
    """End of an epoch that needs a pod or container, but whose key the operator no longer has.

    The operator's own key has changed, and the group's key is derived from it. A container would wait
    indefinitely for the Secret with the old key; a pod with the new key could not join the others.
    """
    group = epoch.context.epoch_ref(epoch.status)
    key = key_of(epoch.context.options.operator_key, group)
    made = "" if key is None else group_key_secret(group, key)
    missing, lacks = epoch.missing, startup.lacks_configuration
    waiting = (pod for pod in epoch.pods if missing or (lacks(pod) and pod.key_secret))
    old = next((pod for pod in waiting if pod.key_secret != made), None)
    if old is None:
        return None
    key_of_pod = f"the key of Secret {old.key_secret}" if old.key_secret else "no key"
    message = (
        f"pod {old.name} was created with {key_of_pod}, but the operator's key has changed since; the group "
        "restarts with the current key"
    )
    return EpochEnd(reason="KeyLost", message=message, counted=False)


def images_changed(epoch: BegunEpoch) -> EpochEnd | None:
    """End of an epoch that needs a pod again, but whose image differs from the other pods' image.

    The operator's default images change with an upgrade of the chart. Pods that an older version created do
    not record their images.
    """
    made = epoch.made
    if made.plan is None or made.revision is None or not epoch.missing & set(epoch.status.spare_pods):
        return None
    images = epoch.context.options.images.of_plan(made.revision.spec, made.plan)
    old = next((pod for pod in epoch.pods if pod.images and pod.images != images), None)
    if old is None:
        return None
    message = (
        f"a pod must be created again, but the operator's worker images have changed from {old.images} (pod "
        f"{old.name}) to {images}; the group restarts with the new images"
    )
    return EpochEnd(reason=IMAGE_CHANGED, message=message, counted=False)


ENDS: Final[tuple[EndCheck, ...]] = (
    pod_ended,
    node_lost,
    held_by_kueue,
    pod_gone,
    plan_lost,
    key_lost,
    images_changed,
)
"""The checks in order of precedence; the first that finds a cause decides.

The end of a Ready group must be visible in its pods: `believed_group` revokes any other end.
"""


def find_overdue(
    epoch: BegunEpoch, status: StartupStatus | None, report: GroupReport | None
) -> EpochEnd | None:
    """Ends an epoch whose pods all run but whose ranks did not connect in time.

    The check needs a report of the leader: a leader that does not answer the operator may be healthy. It does
    not use the times in the status, so a clock change or a stopped operator does not make a rank late.
    """
    timeout_s = parse_duration_s(epoch.context.life.startup.timeout)
    connecting_s = epoch.context.connecting_s.get((epoch.status.index, epoch.status.epoch), 0.0)
    in_time = connecting_s < timeout_s + _SUPERVISORS_FIRST_S
    if report is None or in_time or not startup.connects(status):
        return None
    return EpochEnd(
        reason=FailureReason.STARTUP_TIMEOUT.value,
        message=f"all pods run, but their ranks did not connect within {timeout_s:g} s (startup.timeout): "
        f"{report.message}. Check the log of that pod, and the network between its node and the leader's",
    )


def pod_missing(epoch: BegunEpoch, index: int) -> EpochEnd:
    """Ends an epoch that lacks a pod that was, or may have been, created."""
    name = epoch.context.epoch_ref(epoch.status).pod_name(index)
    message = f"pod {name} disappeared and may already have joined its group; the group restarts"
    return EpochEnd(reason=POD_DELETED, message=message, counted=False)


def never_seen(epoch: int) -> EpochEnd:
    """Ends an epoch whose pods the operator never saw; each further such epoch waits longer."""
    message = (
        f"the operator never saw a pod of epoch {epoch}: the pods were not created, or another controller "
        "changed or deleted them at once. Look for a mutating webhook or a controller that changes labels or "
        "owners of pods"
    )
    return EpochEnd(reason=PODS_NEVER_SEEN, message=message, counted=False)
