"""The causes that end an epoch, in order of precedence. Pure."""

from collections.abc import Callable
from typing import Final

from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.group_report import GroupReport
from heteroinfer_operator.api import StartupStatus
from heteroinfer_operator.errors import PlanReason
from heteroinfer_operator.manifests.group_key_secret import derive_group_key, group_key_secret_name
from heteroinfer_operator.nodes.node_assignment import Gang
from heteroinfer_operator.quantity import parse_duration_s
from heteroinfer_operator.reconcile import startup
from heteroinfer_operator.reconcile.epoch_end import IMAGE_CHANGED, POD_DELETED, POD_ENDED, EpochEnd, has_run
from heteroinfer_operator.reconcile.epoch_end import find_epoch_end as find_end_of_pods
from heteroinfer_operator.reconcile.group_planner import read_gang
from heteroinfer_operator.reconcile.one_group.made import BegunEpoch, names_of_run_pods

PODS_NEVER_SEEN: Final = "PodsNeverSeen"
_SUPERVISORS_FIRST_S: Final = 30.0
"""Extra seconds after the supervisors' time-out of the same length, because they report the late rank."""
EndCheck = Callable[[BegunEpoch], EpochEnd | None]


def find_epoch_end(epoch: BegunEpoch) -> EpochEnd | None:
    """Returns the first cause that a check in ENDS finds for the end of the epoch, or None."""
    return next((end for check in ENDS if (end := check(epoch)) is not None), None)


def pod_ended(epoch: BegunEpoch) -> EpochEnd | None:
    """Returns the end if a pod that had run has ended; otherwise None."""
    return find_end_of_pods(epoch.pods)


def node_lost(epoch: BegunEpoch) -> EpochEnd | None:
    """Returns the end if the node of a pod is lost; otherwise None.

    A pod that the node had rejected does not count, because the pod never ran.
    """
    pods = [pod for pod in epoch.pods if not startup.is_rejected(pod)]
    return epoch.context.node_loss.find_epoch_end(pods)


def kueue_holds_pod_name(epoch: BegunEpoch) -> EpochEnd | None:
    """Returns the end if, under Kueue, a pod ended before it ran; otherwise None.

    Without Kueue, a new pod with the same name would replace this pod. But Kueue keeps the name.
    """
    replaceable = epoch.replaceable_pods
    if read_gang(epoch.pods) is not Gang.KUEUE or not replaceable:
        return None
    first = replaceable[0]
    message = f"{startup.describe_end(first)}; Kueue cannot replace one pod, so the whole group restarts"
    lost_node = epoch.context.node_loss.find_epoch_end(replaceable)
    if lost_node is not None:
        return lost_node
    if first.deleting:
        return EpochEnd(reason=POD_DELETED, message=message, counted=False)
    return EpochEnd(reason=POD_ENDED, message=message)  # the node rejected the pod


def pod_gone(epoch: BegunEpoch) -> EpochEnd | None:
    """Returns the end if a pod that had run no longer exists; otherwise None."""
    existing_names = {pod.name for pod in epoch.pods}
    lost_names = [name for name in names_of_run_pods(epoch.status) if name not in existing_names]
    return EpochEnd(reason=POD_DELETED, message=f"pod {lost_names[0]} is gone") if lost_names else None


def plan_lost(epoch: BegunEpoch) -> EpochEnd | None:
    """Returns the end if a pod or its container needs a lost plan or revision; otherwise None.

    A missing pod can only be created from its plan and revision. The container of a pod that has not run yet
    can only be created with the plan's ConfigMap.
    """
    origin = epoch.origin
    cannot_create_pod = bool(epoch.missing) and (origin.plan is None or origin.revision is None)
    pods_not_run = [pod.name for pod in epoch.pods if not has_run(pod)]
    cannot_create_container = origin.plan is None and bool(pods_not_run)
    if cannot_create_container:
        missing_part = f"the container of pod {pods_not_run[0]}"
    elif cannot_create_pod:
        missing_part = f"a pod of epoch {epoch.status.epoch}"
    else:
        return None
    return EpochEnd(
        reason=PlanReason.PLAN_LOST.value,
        message=f"cannot create {missing_part}: the ConfigMap of its plan or revision was deleted or "
        "damaged; the group restarts with a new plan",
    )


def key_lost(epoch: BegunEpoch) -> EpochEnd | None:
    """Returns the end if a pod or container must be created, but the operator's key has changed; else None.

    The group's key is derived from the operator's key. There are two cases:

    - A pod is missing. The new pod would get the current key, so it could not join pods with another key.
    - A container waits for the Secret with its pod's key. It would wait forever, because the operator creates
      only the Secret with the current key.
    """
    group = epoch.context.epoch_ref(epoch.status)
    key = derive_group_key(epoch.context.options.operator_key, group)
    current_secret = "" if key is None else group_key_secret_name(group, key)
    if epoch.missing:
        pods_that_need_current_key = epoch.pods
    else:
        waiting_pods = [pod for pod in epoch.pods if startup.lacks_configuration(pod)]
        pods_that_need_current_key = [pod for pod in waiting_pods if pod.key_secret]
    with_old_key = next((pod for pod in pods_that_need_current_key if pod.key_secret != current_secret), None)
    if with_old_key is None:
        return None
    old_key = f"the key of Secret {with_old_key.key_secret}" if with_old_key.key_secret else "no key"
    message = (
        f"pod {with_old_key.name} was created with {old_key}, but the operator's key has changed since; the "
        "group restarts with the current key"
    )
    return EpochEnd(reason="KeyLost", message=message, counted=False)


def images_changed(epoch: BegunEpoch) -> EpochEnd | None:
    """Returns the end if a pod must be created again, but the worker images have changed; otherwise None.

    All pods of an epoch must have images of the same version, and an upgrade of the chart changes the default
    images. Pods of an older version of the operator do not record their images, so they are left out.
    """
    origin = epoch.origin
    must_be_recreated = epoch.missing & set(epoch.status.spare_pods)  # spare pods vanished before they ran
    if origin.plan is None or origin.revision is None or not must_be_recreated:
        return None
    images = epoch.context.options.images.images_of_plan(origin.revision.spec, origin.plan)
    old_pod = next((pod for pod in epoch.pods if pod.images and pod.images != images), None)
    if old_pod is None:
        return None
    message = (
        "a pod must be created again, but the operator's worker images have changed from "
        f"{old_pod.images} (pod {old_pod.name}) to {images}; the group restarts with the new images"
    )
    return EpochEnd(reason=IMAGE_CHANGED, message=message, counted=False)


ENDS: Final[tuple[EndCheck, ...]] = (
    pod_ended,
    node_lost,
    kueue_holds_pod_name,
    pod_gone,
    plan_lost,
    key_lost,
    images_changed,
)
"""The checks in order of precedence; the first check that finds a cause decides.

A check may end a Ready group only for a cause that is visible in the pods: `believed_group` ignores any other
end of an epoch whose pods are all Ready.
"""


def find_late_ranks(
    epoch: BegunEpoch, status: StartupStatus | None, report: GroupReport | None
) -> EpochEnd | None:
    """Returns the end if all pods run but their ranks did not connect in time; otherwise None.

    The check needs a report of the leader, because a leader that does not answer the operator may be healthy.
    The check does not use the times in the status, so that neither a change of the clock nor a pause of the
    operator makes a rank late.
    """
    timeout_s = parse_duration_s(epoch.context.life.startup.timeout)
    connecting_s = epoch.context.connecting_s.get((epoch.status.index, epoch.status.epoch), 0.0)
    in_time = connecting_s < timeout_s + _SUPERVISORS_FIRST_S
    if report is None or in_time or not startup.is_connecting(status):
        return None
    return EpochEnd(
        reason=FailureReason.STARTUP_TIMEOUT.value,
        message=f"all pods run, but their ranks did not connect within {timeout_s:g} s (startup.timeout): "
        f"{report.message}. Check the log of the pod that did not connect, and the network between its node "
        "and the leader's node",
    )


def end_because_pod_missing(epoch: BegunEpoch, index: int) -> EpochEnd:
    """Returns the end of an epoch in which a pod is missing that may have been created."""
    name = epoch.context.epoch_ref(epoch.status).pod_name(index)
    message = f"pod {name} disappeared and may already have joined its group; the group restarts"
    return EpochEnd(reason=POD_DELETED, message=message, counted=False)


def end_because_never_seen(epoch: int) -> EpochEnd:
    """Returns the end of an epoch whose pods the operator never saw.

    The wait before the next epoch doubles with each such epoch.
    """
    message = (
        f"the operator never saw a pod of epoch {epoch}: the pods were not created, or another controller "
        "changed or deleted them immediately. Look for a mutating webhook or a controller that changes "
        "labels or owners of pods"
    )
    return EpochEnd(reason=PODS_NEVER_SEEN, message=message, counted=False)
