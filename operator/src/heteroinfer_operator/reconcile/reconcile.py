"""One reconcile of one resource: gather what the parts decide, in the order that is safe. Pure."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Plan
from heteroinfer_operator.api import (
    MAX_PLANS,
    Condition,
    ConditionStatus,
    ConditionType,
    GroupPhase,
    GroupStatus,
    HeteroInferenceSpec,
    HeteroInferenceStatus,
    ModelPhase,
    merge_conditions,
    parse_spec,
    parse_status,
)
from heteroinfer_operator.cluster import (
    Action,
    Decision,
    PodView,
    RecordEvent,
    ResourceKey,
    ResourceObservation,
    SetFinalizer,
)
from heteroinfer_operator.errors import PlanError, SpecError
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.addressing import ModelSource
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.planning import GroupRequest
from heteroinfer_operator.quantity import parse_duration_s
from heteroinfer_operator.reconcile import conditions
from heteroinfer_operator.reconcile.children import build_children, decide_children
from heteroinfer_operator.reconcile.context import Context, Options
from heteroinfer_operator.reconcile.group import GroupDecision, stop_group
from heteroinfer_operator.reconcile.group_planner import CAPACITY_REASONS, GroupPlanner, shortage_age_s
from heteroinfer_operator.reconcile.model import COMPONENTS as MODEL_COMPONENTS
from heteroinfer_operator.reconcile.model import (
    ModelContext,
    ModelDecision,
    decide_model,
    unreadable_since,
)
from heteroinfer_operator.reconcile.node_loss import NodeLoss
from heteroinfer_operator.reconcile.rollout import decide_wanted, find_rollout
from heteroinfer_operator.reconcile.teardown import decide_teardown

_SHORTAGE_EVERY_S = 60.0
"""A group without free capacity is looked at this often, should nothing have said that some became free."""
_MEASURE_EVERY_S = 60.0
"""A serving group is looked at this often for its step times."""


def reconcile(observation: ResourceObservation, now: datetime, options: Options) -> Decision:
    """Returns what brings a resource closer to what its user asks for.

    Args:
        observation: all that is known of the resource and its children.
        now: time of the reconcile, in UTC.
        options: of the installation.
    """
    resource = observation.resource
    if resource.deleting:
        return decide_teardown(observation, _old_status(observation), now)
    decision = _decide(observation, now, options)
    if names.FINALIZER in resource.finalizers:
        return decision
    return replace(decision, actions=(SetFinalizer(present=True), *decision.actions))


def _decide(observation: ResourceObservation, now: datetime, options: Options) -> Decision:
    resource, status = observation.resource, _old_status(observation)
    try:
        spec = parse_spec(resource.spec)
        owner = Owner(key=resource.key, uid=resource.uid)
        source = options.addressing.model(spec, owner)
    except (SpecError, PlanError) as error:
        kind = ConditionType.PLANNED if isinstance(error, SpecError) else ConditionType.MODEL_READY
        return _refused(observation, status, kind, error.reason, error.message, now)
    node_loss = NodeLoss.of(observation, spec.restart, now)
    model = decide_model(
        ModelContext(
            spec=spec,
            owner=owner,
            source=source,
            images=options.images,
            node_loss=node_loss,
            progress=observation.fetch,
            unreadable_since=unreadable_since(status.groups),
            now=now,
        ),
        status.model,
        [pod for pod in observation.pods if pod.labels.get(names.LABEL_COMPONENT) in MODEL_COMPONENTS],
    )
    source = source.at(model.status.commit)
    planner = GroupPlanner(
        spec=spec,
        request=_group_request(resource.key, spec, model.profile, source),
        waits_for=model.message,
        observation=observation,
        shortage_age_s=shortage_age_s(status, now) if options.nodes_may_come else None,
        hints=options.nodes_may_come,
    )
    context = Context(
        spec=spec,
        owner=owner,
        revision=identity.revision(spec),
        now=now,
        options=options,
        source=source,
        plans=_kept_plans(observation),
        make_plan=planner.make,
        node_assignment_again=planner.node_assignment_again,
        refusal=planner.refusal,
        node_loss=node_loss,
    )
    return _act(observation, status, context, model)


def _group_request(
    key: ResourceKey, spec: HeteroInferenceSpec, profile: ModelProfile | None, source: ModelSource
) -> GroupRequest | None:
    if profile is None:
        return None
    served_name = spec.model.served_name or key.name
    return GroupRequest(spec=spec, profile=profile, served_name=served_name, model_path=source.path)


def _act(
    observation: ResourceObservation, status: HeteroInferenceStatus, context: Context, model: ModelDecision
) -> Decision:
    by_group = _by_group(observation.pods)
    old = {group.index: group for group in status.groups}
    wanted = decide_wanted(context, old, by_group, observation.groups)
    unwanted = [
        stop_group(context, old.get(index, GroupStatus(index=index)), pods, "stopping: no longer wanted")
        for index, pods in sorted(by_group.items())
        if index >= context.spec.replicas
    ]
    wanted = [_measured(observation, context, decision, by_group) for decision in wanted]
    decisions = [*wanted, *unwanted]
    plans = [decision.plan for decision in wanted if decision.plan is not None]
    creates = [create for decision in wanted for create in decision.creates]
    before_pods, after_pods = decide_children(
        [
            *build_children(context.spec, context.owner, plans, asleep=_asleep(wanted)),
            *(decision.gang_object for decision in wanted if decision.gang_object is not None),
        ],
        observation.objects,
        used_plans={pod.labels.get(names.LABEL_PLAN, "") for pod in observation.pods},
        has_pods=bool(creates or by_group),
        keep_claims=any(
            pod.labels.get(names.LABEL_REVISION, context.revision) != context.revision
            for pod in observation.pods
        ),
    )
    next_status = _next_status(observation, status, context, model, wanted, unwanted)
    actions: list[Action] = [*before_pods]
    actions += conditions.status_write(observation, next_status)
    actions += [event for decision in decisions for event in decision.events]
    actions += _condition_events(status.conditions, next_status.conditions)
    actions += [delete for decision in decisions for delete in decision.deletes]
    actions += [*model.events, *model.deletes, *model.creates]
    actions += creates
    actions += after_pods
    return Decision(
        actions=tuple(actions), look_again_s=_look_again_s(decisions, model, context, next_status)
    )


def _asleep(decisions: Sequence[GroupDecision]) -> set[int]:
    return {d.status.index for d in decisions if d.status.phase is GroupPhase.SLEEPING}


def _measured(
    observation: ResourceObservation,
    context: Context,
    decision: GroupDecision,
    by_group: Mapping[int, Sequence[PodView]],
) -> GroupDecision:
    if decision.plan is None or decision.creates:
        return decision
    index = decision.status.index
    group = conditions.with_rank_entries(
        decision.status,
        decision.plan,
        by_group.get(index, ()),
        observation.groups.get(index),
        now=context.now,
    )
    return replace(decision, status=group)


def _next_status(
    observation: ResourceObservation,
    status: HeteroInferenceStatus,
    context: Context,
    model: ModelDecision,
    wanted: Sequence[GroupDecision],
    unwanted: Sequence[GroupDecision],
) -> HeteroInferenceStatus:
    spec, generation = context.spec, observation.resource.generation
    groups = tuple(decision.status for decision in [*wanted, *unwanted])
    ready = sum(group.phase is GroupPhase.READY for group in groups)
    updated = sum(d.plan is not None and d.status.revision == context.revision for d in wanted)
    unreadable = model.message if model.status.phase is ModelPhase.FAILED else ""
    next_conditions = (
        conditions.condition(
            ConditionType.MODEL_READY,
            model.holds,
            model.reason,
            model.message,
            now=context.now,
            generation=generation,
        ),
        *conditions.group_conditions(
            wanted,
            spec.replicas,
            suspended=spec.suspend,
            rollout=find_rollout(wanted, context.revision, model_problem=unreadable),
            refused=observation.refused,
            now=context.now,
            generation=generation,
        ),
        *conditions.plan_conditions(wanted, status, now=context.now, generation=generation),
    )
    plans = {d.plan.hash: conditions.plan_status(d.plan) for d in wanted if d.plan is not None}
    return HeteroInferenceStatus(
        observed_generation=generation,
        replicas=sum(1 for decision in [*wanted, *unwanted] if decision.plan is not None or decision.deletes),
        ready_replicas=ready,
        updated_replicas=updated,
        selector=",".join(f"{key}={value}" for key, value in identity.leader_labels(context.owner).items()),
        endpoint=context.options.addressing.endpoint(spec, context.owner),
        current_revision=context.revision if updated == ready == spec.replicas else status.current_revision,
        update_revision=context.revision,
        summary=conditions.summary(wanted, groups, spec.replicas),
        conditions=merge_conditions(status.conditions, next_conditions, now=context.now),
        model=model.status,
        plans=tuple(sorted(plans.values(), key=lambda plan: plan.hash))[:MAX_PLANS],
        groups=groups,
    )


def _condition_events(before: Sequence[Condition], after: Sequence[Condition]) -> list[RecordEvent]:
    """Returns an event for each refusal that is new: people look at events first.

    What is free on nodes changes all the time: of missing capacity each reason is reported once.
    """
    reported = {
        _announced_as(condition) for condition in before if condition.status is not ConditionStatus.UNKNOWN
    }
    kinds = {
        ConditionType.PLANNED.value,
        ConditionType.MODEL_READY.value,
        ConditionType.CAPACITY_AVAILABLE.value,
    }
    refused = [c for c in after if c.type in kinds and c.status is ConditionStatus.FALSE]
    refused += [c for c in after if c.type == ConditionType.FAILED.value and c.status is ConditionStatus.TRUE]
    fresh = [c for c in refused if _announced_as(c) not in reported]
    seen = {(c.reason, c.message): c for c in fresh}
    return [RecordEvent(reason=c.reason, message=c.message[:1000], warning=True) for c in seen.values()]


def _announced_as(condition: Condition) -> tuple[str, ...]:
    if condition.reason in CAPACITY_REASONS:
        return (condition.type, condition.reason)
    return (condition.type, condition.reason, condition.message)


def _look_again_s(
    decisions: Sequence[GroupDecision], model: ModelDecision, context: Context, status: HeteroInferenceStatus
) -> float | None:
    waits = [d.look_again_s for d in decisions] + [model.look_again_s]
    if any(d.status.phase is GroupPhase.READY for d in decisions):
        waits.append(_MEASURE_EVERY_S)
    capacity = status.condition(ConditionType.CAPACITY_AVAILABLE)
    if capacity is not None and capacity.status is ConditionStatus.FALSE:
        after_s = parse_duration_s(context.spec.planning.on_gpu_shortage.after)
        left_s = after_s - (context.now - capacity.last_transition_time).total_seconds()
        waits.append(min(left_s + 0.1 if left_s > 0 else _SHORTAGE_EVERY_S, _SHORTAGE_EVERY_S))
    return min((wait for wait in waits if wait is not None), default=None)


def _refused(
    observation: ResourceObservation,
    status: HeteroInferenceStatus,
    kind: ConditionType,
    reason: str,
    message: str,
    now: datetime,
) -> Decision:
    """A spec that cannot be read changes nothing that runs; the status says why."""
    generation = observation.resource.generation
    fresh = conditions.condition(kind, False, reason, message, now=now, generation=generation)
    kept = [condition for condition in status.conditions if condition.type != kind.value]
    if not any(condition.type == ConditionType.READY.value for condition in kept):
        kept.append(
            conditions.condition(ConditionType.READY, False, reason, message, now=now, generation=generation)
        )
    merged = merge_conditions(status.conditions, [*kept, fresh], now=now)
    update = {"observed_generation": generation, "conditions": merged}
    next_status = status.model_copy(update=update)
    patch = conditions.status_write(observation, next_status)
    events = _condition_events(status.conditions, merged) if patch else []
    return Decision(actions=(*patch, *events))


def _old_status(observation: ResourceObservation) -> HeteroInferenceStatus:
    try:
        return parse_status(observation.resource.status)
    except SpecError:
        # Written by a version that cannot be read; everything in it but the epoch is
        # computed anew, and the epoch is in the labels of the pods.
        return HeteroInferenceStatus()


def _kept_plans(observation: ResourceObservation) -> dict[str, Plan]:
    plans = {}
    for manifest in observation.objects:
        if manifest["kind"] != "ConfigMap" or names.PLAN_KEY not in manifest.get("data", {}):
            continue
        try:
            plan = Plan.from_json(manifest["data"][names.PLAN_KEY])
        except ContractError:
            continue  # of a version that cannot be read: its group fails with PlanLost
        plans[plan.hash] = plan
    return plans


def _of_component(pods: Sequence[PodView], component: str) -> list[PodView]:
    return [pod for pod in pods if pod.labels.get(names.LABEL_COMPONENT) == component]


def _by_group(pods: Sequence[PodView]) -> dict[int, list[PodView]]:
    groups: dict[int, list[PodView]] = defaultdict(list)
    for pod in _of_component(pods, names.COMPONENT_WORKER):
        groups[int(pod.labels[names.LABEL_GROUP])].append(pod)
    return dict(groups)
