"""One reconcile of one resource: collects the decisions of all parts in a safe order. Pure.

The status comes first: it is built from the pods, even if the spec, a plan or a child is invalid. Deletes
follow, then creates and updates of each child.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from heteroinfer_contract import names
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.api import (
    ConditionStatus,
    ConditionType,
    GroupPhase,
    GroupStatus,
    HeteroInferenceStatus,
    ModelStatus,
    parse_life,
    parse_status,
)
from heteroinfer_operator.cluster import (
    Action,
    Decision,
    PodView,
    RemoveFinalizer,
    ResourceKey,
    ResourceObservation,
)
from heteroinfer_operator.errors import SpecError
from heteroinfer_operator.manifests.egress_policy import Isolation, describe_closed_ports
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.manifests.signer import Signer
from heteroinfer_operator.planning import GroupRequest
from heteroinfer_operator.quantity import parse_duration_s
from heteroinfer_operator.reconcile import restarts, startup
from heteroinfer_operator.reconcile.admission import find_admission
from heteroinfer_operator.reconcile.believed_group import believe
from heteroinfer_operator.reconcile.cache_use import find_cleanup
from heteroinfer_operator.reconcile.children import decide_children, find_children
from heteroinfer_operator.reconcile.group_planner import GroupPlanner, shortage_age_s
from heteroinfer_operator.reconcile.lost_labels import with_lost_labels
from heteroinfer_operator.reconcile.model_decision import COMPONENTS as MODEL_COMPONENTS
from heteroinfer_operator.reconcile.model_decision import (
    ModelContext,
    ModelDecision,
    decide_model,
    unreadable_since,
)
from heteroinfer_operator.reconcile.new_events import (
    condition_events,
    forgery_events,
    joined,
    lost_label_events,
)
from heteroinfer_operator.reconcile.next_status import build_next_status, status_write
from heteroinfer_operator.reconcile.node_loss import NodeLoss
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision
from heteroinfer_operator.reconcile.one_group.stopping import stop_group
from heteroinfer_operator.reconcile.options import Options
from heteroinfer_operator.reconcile.rank_entries import with_rank_entries
from heteroinfer_operator.reconcile.reading import (
    epoch_of,
    forged_plans,
    kept_plans,
    pods_by_group,
    with_complete_labels,
)
from heteroinfer_operator.reconcile.reconcile_context import Context
from heteroinfer_operator.reconcile.refusals import due_in_time
from heteroinfer_operator.reconcile.retired import known_groups
from heteroinfer_operator.reconcile.revisions import (
    Revision,
    Target,
    find_revisions,
    find_target,
    read_records,
    with_modes_of_plans,
)
from heteroinfer_operator.reconcile.rollout import decide_wanted, find_closing
from heteroinfer_operator.reconcile.scopes import MODEL_SCOPE
from heteroinfer_operator.reconcile.silent_leaders import with_report_alone, with_silence
from heteroinfer_operator.reconcile.teardown import decide_teardown

_SHORTAGE_EVERY_S = 60.0
"""Seconds between checks of a group without capacity, if no event reports free capacity."""
_MEASURE_EVERY_S = 60.0
"""Seconds between checks of a serving group's step times."""


def reconcile(observation: ResourceObservation, now: datetime, options: Options) -> Decision:
    """Decides the actions that bring a resource closer to its spec."""
    resource = observation.resource
    status = parse_status(resource.status)
    if resource.deleting:
        decision = decide_teardown(observation, status, now)
    else:
        decision = _decide(observation, status, now, options)
    if names.FINALIZER not in resource.finalizers:
        return decision
    return replace(decision, actions=(RemoveFinalizer(), *decision.actions))


def _decide(
    observation: ResourceObservation, status: HeteroInferenceStatus, now: datetime, options: Options
) -> Decision:
    resource = observation.resource
    owner = Owner(key=resource.key, uid=resource.uid)
    observation = replace(observation, pods=with_complete_labels(observation.pods, owner))
    life = parse_life(resource.spec)
    node_loss = NodeLoss.of(observation, life.restart, now)
    signer = Signer.of(options.operator_key, owner)
    kept = read_records(observation, status, signer, options.allowed)
    target = find_target(observation, status, owner, options, kept.records)
    model = _decide_model(observation, status, target, node_loss, options)
    commit = model.status.commit if target.refusal is None else None
    revisions = find_revisions(kept.records, target, commit, owner, options)
    plans = kept_plans(
        observation, signer, options.allowed, [revision.spec for revision in revisions.values()]
    )
    revisions = with_modes_of_plans(revisions, observation.pods, plans, options.pod_resources)
    accepted = revisions.get(target.name or "") if target.refusal is None else None
    replicas = _replicas(life.replicas, status, observation.pods)
    planner = GroupPlanner(
        request=_group_request(resource.key, accepted, model.profile, options),
        waits_for=model.message,
        observation=observation,
        shortage_age_s=shortage_age_s(status, now) if options.nodes_may_come else None,
        hints=options.nodes_may_come,
        groups=replicas,
    )
    context = Context(
        life=life,
        replicas=replicas,
        owner=owner,
        now=now,
        options=options,
        target=target,
        target_failed=any(
            group.revision == target.name and restarts.used_up(group.failures, life.restart)
            for group in status.groups
        ),
        revisions=revisions,
        recorded=frozenset(record.name for record in kept.records),
        records_signed_by=kept.signed_by(signer, status, revisions),
        signer=signer,
        forged=(*kept.forged, *forged_plans(observation, signer)),
        plans=plans,
        planner=planner,
        node_loss=node_loss,
        first_epoch=options.first_epoch(resource.resource_version, now),
        largest_epoch=options.largest_epoch(resource.resource_version, now),
        connecting_s=observation.connecting_s,
        refusals=due_in_time(observation.refusals, now),
        unmade=observation.unmade,
        unasked=observation.unasked,
        never_placed=observation.never_placed,
        isolation=None if observation.kept_in is None else Isolation.of(options.egress, observation.kept_in),
        fetches=_fetches(observation, model),
    )
    return _decide_actions(observation, status, context, model)


def _fetches(observation: ResourceObservation, model: ModelDecision) -> bool:
    """Checks whether a pod fetches the model, or is about to."""
    pods = [pod.labels.get(names.LABEL_COMPONENT) for pod in observation.pods if not pod.ended]
    created = [each.manifest["metadata"]["labels"][names.LABEL_COMPONENT] for each in model.creates]
    return names.COMPONENT_FETCH in (*pods, *created)


def _group_request(
    key: ResourceKey, revision: Revision | None, profile: ModelProfile | None, options: Options
) -> GroupRequest | None:
    if profile is None or revision is None:
        return None
    served_name = revision.spec.model.served_name or key.name
    path = revision.source.path
    spec = revision.spec_of_pods(options.pod_resources)
    return GroupRequest(spec=spec, profile=profile, served_name=served_name, model_path=path)


def _replicas(asked: int | None, status: HeteroInferenceStatus, pods: Sequence[PodView]) -> int:
    """Number of wanted groups; if the field is unreadable, the number of existing groups, at least 1."""
    if asked is not None:
        return asked
    living = pods_by_group([pod for pod in pods if not pod.ended])
    return max([0, *living, *(group.index for group in status.groups)]) + 1


def _decide_model(
    observation: ResourceObservation,
    status: HeteroInferenceStatus,
    target: Target,
    node_loss: NodeLoss,
    options: Options,
) -> ModelDecision:
    """Decides about the model; while the spec is refused, keeps the last result."""
    if target.refusal is not None or target.spec is None or target.source is None:
        return _last_model_decision(status, target)
    context = ModelContext(
        spec=target.spec,
        owner=Owner(key=observation.resource.key, uid=observation.resource.uid),
        source=target.source,
        images=options.images,
        resources=options.pod_resources,
        pod_security=options.pod_security,
        node_loss=node_loss,
        progress=observation.fetch,
        unreadable_since=unreadable_since(status.groups),
        now=node_loss.now,
        cleanup=find_cleanup(target.spec, observation, node_loss.now),
    )
    pods = [pod for pod in observation.pods if pod.labels.get(names.LABEL_COMPONENT) in MODEL_COMPONENTS]
    decision = decide_model(context, status.model, pods)
    if observation.kept_in is None or not context.fetches or decision.holds or decision.status.bytes_total:
        return decision
    isolation = Isolation.of(options.egress, observation.kept_in)
    closed = describe_closed_ports(target.spec, context.owner, isolation, options.fetch_egress)
    return replace(decision, message="; ".join(filter(None, (decision.message, closed))))


def _last_model_decision(status: HeteroInferenceStatus, target: Target) -> ModelDecision:
    before, problem = status.condition(ConditionType.MODEL_READY.value), target.refusal
    kept = status.model or ModelStatus()
    if problem is not None and not isinstance(problem, SpecError) and target.source is None:
        return ModelDecision(status=kept, holds=False, reason=problem.reason, message=problem.message)
    if before is None:
        return ModelDecision(status=kept, holds=None, reason="SpecRefused")
    holds = {ConditionStatus.TRUE: True, ConditionStatus.FALSE: False}.get(before.status)
    return ModelDecision(status=kept, holds=holds, reason=before.reason, message=before.message)


def _decide_actions(
    observation: ResourceObservation, status: HeteroInferenceStatus, context: Context, model: ModelDecision
) -> Decision:
    by_group, old = pods_by_group(observation.pods), known_groups(status)
    believed = {
        index: believe(context, old.get(index, GroupStatus(index=index)), by_group.get(index, ()))
        for index in range(context.replicas)
    }
    strangers = [pod for group in believed.values() for pod in group.strangers]
    by_group |= {index: list(believed[index].pods) for index in by_group if index in believed}
    old |= {index: believed[index].status for index in old if index in believed}
    context = replace(context, admission=find_admission(context, observation, old, by_group))
    context = replace(context, closing=find_closing(context, old, by_group))
    wanted = decide_wanted(context, old, by_group, observation.groups)
    context = context.with_chosen_mode()
    unwanted = [
        stop_group(context, old.get(index, GroupStatus(index=index)), pods, "stopping: scaled down")
        for index, pods in sorted(by_group.items())
        if index >= context.replicas
    ]
    wanted = [
        with_lost_labels(context.owner, _with_rank_entries(observation, context, decision, by_group), pods)
        for decision in wanted
        for pods in [by_group.get(decision.status.index, ())]
    ]
    wanted = [
        with_silence(each, observation.silences.get((each.status.index, each.status.epoch)))
        for each in wanted
    ]
    if observation.pods_unwatched:
        wanted = [with_report_alone(each, observation.groups.get(each.status.index)) for each in wanted]
    decisions = [*wanted, *unwanted]
    keys = [key for decision in wanted for key in decision.keys]
    creates = [create for decision in wanted for create in decision.creates]
    before_pods, after_pods = decide_children(
        find_children(context, decisions, by_group),
        observation.objects,
        used_plans={
            *(pod.labels.get(names.LABEL_PLAN, "") for pod in observation.pods),
            *(decision.status.plan_hash or "" for decision in decisions),
        },
        has_pods=bool(creates or by_group),
    )
    next_status = build_next_status(observation, status, context, model, wanted, unwanted)
    actions: list[Action] = [*status_write(observation, next_status)]
    actions += joined([event for decision in decisions for event in decision.events])
    actions += forgery_events(context, [*before_pods, *after_pods])
    actions += lost_label_events(status, old, wanted, model)
    actions += condition_events(status, next_status)
    actions += [delete for decision in decisions for delete in decision.deletes]
    actions += context.node_loss.deletes(strangers, grace_s=None, after_status=True)
    actions += [*model.events, *model.deletes]
    actions += before_pods
    actions += [replace(create, scopes=frozenset({MODEL_SCOPE})) for create in model.creates]
    actions += [*keys, *creates]
    actions += after_pods
    actions += [context.admission.asks] if context.admission.asks is not None else []
    return Decision(
        actions=tuple(actions),
        look_again_s=_look_again_s(decisions, model, context, next_status),
        connecting=frozenset(
            (d.status.index, d.status.epoch) for d in decisions if startup.connects(d.status.startup)
        ),
    )


def _with_rank_entries(
    observation: ResourceObservation,
    context: Context,
    decision: GroupDecision,
    by_group: Mapping[int, Sequence[PodView]],
) -> GroupDecision:
    if not decision.runs or decision.creates:
        return decision
    index = decision.status.index
    group = with_rank_entries(
        decision.status,
        decision.plan,
        [pod for pod in by_group.get(index, ()) if epoch_of(pod) == decision.status.epoch],
        observation.groups.get(index),
        now=context.now,
        profile=context.planner.profile,
    )
    return replace(decision, status=group)


def _look_again_s(
    decisions: Sequence[GroupDecision], model: ModelDecision, context: Context, status: HeteroInferenceStatus
) -> float | None:
    waits = [d.look_again_s for d in decisions] + [model.look_again_s]
    if context.waits_for_admission and not context.admission.unanswered:
        waits.append(0.0)
    if any(d.status.phase is GroupPhase.READY for d in decisions):
        waits.append(_MEASURE_EVERY_S)
    capacity = status.condition(ConditionType.CAPACITY_AVAILABLE)
    if capacity is not None and capacity.status is ConditionStatus.FALSE:
        waits.append(_SHORTAGE_EVERY_S)
    if status.gpus_missing_since is not None and context.target.spec is not None:
        after_s = parse_duration_s(context.target.spec.planning.on_gpu_shortage.after)
        left_s = after_s - (context.now - status.gpus_missing_since).total_seconds()
        waits += [left_s + 0.1] if left_s > 0 else []
    return min((wait for wait in waits if wait is not None), default=None)
