"""What ends an epoch, in the order in which the causes go before each other. Pure."""

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
"""A supervisor's own time-out has the same length, and names the rank."""
EndCheck = Callable[[BegunEpoch], EpochEnd | None]


def find_epoch_end(epoch: BegunEpoch) -> EpochEnd | None:
    """Returns why an epoch has ended, by the first of ENDS that finds a cause, or None if it lives."""
    return next((end for check in ENDS if (end := check(epoch)) is not None), None)


def pod_ended(epoch: BegunEpoch) -> EpochEnd | None:
    """A pod that had run has ended."""
    return find_end_of_pods(epoch.pods)


def node_lost(epoch: BegunEpoch) -> EpochEnd | None:
    """The node of a pod is lost."""
    pods = [pod for pod in epoch.pods if not startup.is_rejected(pod)]
    return epoch.context.node_loss.find_epoch_end(pods)


def held_by_kueue(epoch: BegunEpoch) -> EpochEnd | None:
    """Under Kueue, a pod ended before it ever ran: Kueue keeps its name, so it cannot be replaced alone."""
    if gang_of(epoch.pods) is not Gang.KUEUE or not epoch.spare:
        return None
    spare = epoch.spare
    message = f"{startup.describe_end(spare[0])}; Kueue lets the pods of a group go together only"
    deleted = spare[0].deleting
    lost = epoch.context.node_loss.find_epoch_end(spare)
    return lost or EpochEnd(
        reason=POD_DELETED if deleted else POD_ENDED, message=message, counted=not deleted
    )


def pod_gone(epoch: BegunEpoch) -> EpochEnd | None:
    """A pod that had run is not there any more."""
    present = {pod.name for pod in epoch.pods}
    gone = [pod for pod in had_run(epoch.status) if pod not in present]
    return EpochEnd(reason=POD_DELETED, message=f"pod {gone[0]} is gone") if gone else None


def plan_lost(epoch: BegunEpoch) -> EpochEnd | None:
    """A pod or its container must be created, and the plan or the revision for it is gone."""
    made = epoch.made
    to_be_made = epoch.missing and (made.plan is None or made.revision is None)
    waiting = next((pod.name for pod in epoch.pods if not has_run(pod)), "") if made.plan is None else ""
    if not to_be_made and not waiting:
        return None
    what = f"the container of pod {waiting}" if waiting else f"a pod of epoch {epoch.status.epoch}"
    return EpochEnd(
        reason=PlanReason.PLAN_LOST.value,
        message=f"{what} is to be made, and what it is made with is not kept any more; a new epoch gets a "
        "new plan",
    )


def key_lost(epoch: BegunEpoch) -> EpochEnd | None:
    """A pod or its container must be made, and the operator no longer has the key of the other pods.

    It has another key of its own now, and so has the group. A container would wait for the Secret of the old
    one for ever; a pod with the new one would meet nobody.
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
        f"pod {old.name} was made with {key_of_pod}, and the operator has another one now; a new epoch is "
        "made with that"
    )
    return EpochEnd(reason="KeyLost", message=message, counted=False)


def images_changed(epoch: BegunEpoch) -> EpochEnd | None:
    """A spare pod must be created again, and would get another image than the other pods have.

    The operator has other defaults, after an upgrade of the chart. Pods of an older version don't say
    what they were made with.
    """
    made = epoch.made
    if made.plan is None or made.revision is None or not epoch.missing & set(epoch.status.spare_pods):
        return None
    images = epoch.context.options.images.of_plan(made.revision.spec, made.plan)
    old = next((pod for pod in epoch.pods if pod.images and pod.images != images), None)
    if old is None:
        return None
    message = (
        f"a pod is to be made again, with {images} now, and the epoch of pod {old.name} was made with "
        f"{old.images}; a new epoch is made with what is new"
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
"""The first that finds a cause names it.

The end of a Ready group must show in its pods: `believed_group` takes back any other.
"""


def find_overdue(
    epoch: BegunEpoch, status: StartupStatus | None, report: GroupReport | None
) -> EpochEnd | None:
    """Returns the end of an epoch whose pods all run and have not met in time, or None.

    Nobody is blamed while the leader does not answer the operator: its supervisor may be well. The stamps in
    the status are for people: a clock that is set, or an operator that is stopped, makes no rank late.
    """
    timeout_s = parse_duration_s(epoch.context.life.startup.timeout)
    connecting_s = epoch.context.connecting_s.get((epoch.status.index, epoch.status.epoch), 0.0)
    in_time = connecting_s < timeout_s + _SUPERVISORS_FIRST_S
    if report is None or in_time or not startup.connects(status):
        return None
    return EpochEnd(
        reason=FailureReason.STARTUP_TIMEOUT.value,
        message=f"all pods run, but have not met within {timeout_s:g} s (startup.timeout): {report.message}; "
        "see the logs of that pod, and whether its node reaches the leader's",
    )


def pod_missing(epoch: BegunEpoch, index: int) -> EpochEnd:
    """Returns the end of an epoch that lacks a pod which was made, or may have been."""
    name = epoch.context.epoch_ref(epoch.status).pod_name(index)
    message = f"pod {name} is not there, and nobody saw it end before it ran: it may have met others"
    return EpochEnd(reason=POD_DELETED, message=message, counted=False)


def never_seen(epoch: int) -> EpochEnd:
    """Returns the end of an epoch of which no pod was ever seen: the next one waits longer each time."""
    message = (
        f"no pod of epoch {epoch} was ever seen: the pods were not created, or somebody changed "
        "or deleted them at once. Look for a mutating webhook or a controller that changes labels or owners "
        "of pods"
    )
    return EpochEnd(reason=PODS_NEVER_SEEN, message=message, counted=False)
