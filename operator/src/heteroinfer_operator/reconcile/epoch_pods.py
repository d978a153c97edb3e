"""The pods of an epoch, and the events at its start. Pure."""

from typing import Any

from heteroinfer_contract.plan import Plan
from heteroinfer_operator.api import GroupStatus
from heteroinfer_operator.cluster import CreateObject, RecordEvent
from heteroinfer_operator.manifests.gang import build_gang_object
from heteroinfer_operator.manifests.group_key_secret import build_group_key_secret, derive_group_key
from heteroinfer_operator.manifests.worker_pods import WorkerPods
from heteroinfer_operator.nodes.node_assignment import Gang, NodeAssignment
from heteroinfer_operator.planning import EpochPlan
from heteroinfer_operator.reconcile.reconcile_context import Context
from heteroinfer_operator.reconcile.revisions import Revision
from heteroinfer_operator.reconcile.scopes import group_scope


def describe_epoch(status: GroupStatus) -> str:
    """Returns the name of a group's epoch for events."""
    return f"group {status.index} epoch {status.epoch}"


def build_start_events(status: GroupStatus, planned: EpochPlan) -> tuple[RecordEvent, ...]:
    """Returns the events that report the start of an epoch."""
    epoch = describe_epoch(status)
    plan = planned.plan
    events = [
        RecordEvent(
            reason="EpochStarted",
            message=f"{epoch}: creating {len(plan.pods)} pods for {plan.world_size} ranks",
        )
    ]
    if planned.choice is not None:
        events.append(RecordEvent(reason="ModeChosen", message=f"mode {planned.choice}"[:1000]))
    if planned.on_cpus:
        events.append(RecordEvent(reason="RunsOnCPUs", message=planned.on_cpus[:1000], warning=True))
    if planned.hybrid_not_needed:
        events.append(RecordEvent(reason="HybridNotNeeded", message=planned.hybrid_not_needed[:1000]))
    return tuple(events)


def build_epoch_gang_object(
    context: Context, revision: Revision, status: GroupStatus, plan: Plan, gang: Gang | None
) -> dict[str, Any] | None:
    """Returns the object that gives a gang scheduler the size of an epoch, or None.

    Returns None without a gang scheduler, and if the cluster does not serve the scheduler's API.
    """
    if gang not in context.planner.observation.gangs:
        return None
    return build_gang_object(revision.spec, context.epoch_ref(status), gang, len(plan.pods))


def build_pod_creates(
    context: Context,
    revision: Revision,
    status: GroupStatus,
    plan: Plan,
    indices: set[int],
    node_assignment: NodeAssignment,
) -> tuple[CreateObject, ...]:
    """Returns the actions that create the pods with these indices, after the Secret with the group's key.

    The pods read the key from this Secret.
    """
    group = context.epoch_ref(status)
    key = derive_group_key(context.options.operator_key, group)
    pods = WorkerPods(
        spec=revision.spec_of_pods(context.options.pod_resources),
        group=group,
        plan=plan,
        stored_plan_hash=status.plan_hash or "",
        revision=revision.name,
        addresses=context.options.addressing.pods(revision.spec, group, plan),
        source=revision.source,
        images=context.options.images,
        security=context.options.pod_security,
        node_assignment=node_assignment,
        key=key,
    )
    scopes = frozenset({group_scope(status.index)})
    creates = [
        CreateObject(manifest=pods.build_pod(pod), scopes=scopes) for pod in plan.pods if pod.index in indices
    ]
    return (*build_key_create(context, status), *creates) if creates else ()


def build_key_create(context: Context, status: GroupStatus) -> tuple[CreateObject, ...]:
    """Returns the action that creates the Secret with the group's key; empty if the group has no key.

    The Secret may already exist.
    """
    group = context.epoch_ref(status)
    key = derive_group_key(context.options.operator_key, group)
    if key is None:
        return ()
    scopes = frozenset({group_scope(status.index)})
    return (CreateObject(manifest=build_group_key_secret(group, key), may_exist=True, scopes=scopes),)
