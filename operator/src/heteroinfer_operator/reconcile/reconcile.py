"""One reconcile of one resource: collects the decisions of all parts in a safe order. Pure.

The status comes first: it is built from the pods, even if the spec, a plan or a child is invalid. Deletes
follow, then creates and updates of each child.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from heteroinfer_contract import names
from heteroinfer_contract.group_key import CleanupKey
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Plan
from heteroinfer_operator.api import (
    ConditionStatus,
    ConditionType,
    GroupPhase,
    GroupStatus,
    HeteroInferenceSpec,
    HeteroInferenceStatus,
    ModelStatus,
    RestartSpec,
    parse_lifecycle,
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
from heteroinfer_operator.manifests.addressing import ModelSource
from heteroinfer_operator.manifests.egress_policy import Isolation, describe_closed_ports
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.manifests.revision_record import RevisionRecord
from heteroinfer_operator.manifests.signer import Signer
from heteroinfer_operator.planning import GroupRequest
from heteroinfer_operator.quantity import parse_duration_s
from heteroinfer_operator.reconcile import restarts, startup
from heteroinfer_operator.reconcile.admission import decide_admission
from heteroinfer_operator.reconcile.believed_group import check_against_pods
from heteroinfer_operator.reconcile.cache_use import find_blocking_cleanup, find_cleanup
from heteroinfer_operator.reconcile.children import decide_children, find_children
from heteroinfer_operator.reconcile.group_planner import GroupPlanner, shortage_age_s
from heteroinfer_operator.reconcile.image_models import find_image_nodes, with_image_volume_advice
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
    join_events,
    lost_label_events,
)
from heteroinfer_operator.reconcile.next_status import build_next_status, build_status_write
from heteroinfer_operator.reconcile.node_loss import NodeLoss
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision
from heteroinfer_operator.reconcile.options import Options
from heteroinfer_operator.reconcile.rank_entries import with_rank_entries
from heteroinfer_operator.reconcile.reading import (
    epoch_of,
    find_forged_plans,
    pods_by_group,
    read_trusted_plans,
    with_complete_labels,
)
from heteroinfer_operator.reconcile.reconcile_context import Context
from heteroinfer_operator.reconcile.refusals import limit_retry_times
from heteroinfer_operator.reconcile.retired import known_groups
from heteroinfer_operator.reconcile.revisions import (
    Revision,
    Target,
    find_revisions,
    find_target,
    read_records,
    with_modes_of_plans,
)
from heteroinfer_operator.reconcile.rollout import decide_eviction_block, decide_wanted
from heteroinfer_operator.reconcile.scale_down import decide_unwanted
from heteroinfer_operator.reconcile.scopes import MODEL_SCOPE
from heteroinfer_operator.reconcile.silent_leaders import with_silence, with_silence_by_report
from heteroinfer_operator.reconcile.teardown import decide_teardown

_CHECK_SHORTAGE_EVERY_S = 60.0
"""Seconds between checks of a group without capacity, if no event reports free capacity."""
_CHECK_STEP_TIMES_EVERY_S = 60.0
"""Seconds between checks of a serving group's step times."""


def reconcile(observation: ResourceObservation, now: datetime, options: Options) -> Decision:
    """Decides the actions that bring a resource closer to its spec."""
    resource = observation.resource
    status = parse_status(resource.status)
    if resource.deleting:
        decision = decide_teardown(observation, status, now)
    else:
        decision = _decide_living_resource(observation, status, now, options)
    if names.FINALIZER not in resource.finalizers:  # only earlier versions set it
        return decision
    return replace(decision, actions=(RemoveFinalizer(), *decision.actions))


def _decide_living_resource(
    observation: ResourceObservation, status: HeteroInferenceStatus, now: datetime, options: Options
) -> Decision:
    """Returns the decision about a resource that is not being deleted.

    The decision about the model comes first, because plans need the model's profile. Then the context is
    built, which all decisions about groups share.
    """
    resource = observation.resource
    owner = Owner(key=resource.key, uid=resource.uid)
    observation = replace(observation, pods=with_complete_labels(observation.pods, owner))
    life = parse_lifecycle(resource.spec)
    node_loss = NodeLoss.from_observation(observation, life.restart, now)
    signer = Signer.for_owner(options.operator_key, owner)
    stored_records = read_records(observation, status, signer, options.allowed)
    target = find_target(observation, status, owner, options, stored_records.records)
    if target.spec is not None:
        advised_pods = with_image_volume_advice(target.spec, observation.pods, observation.nodes)
        observation = replace(observation, pods=advised_pods)
    model = _decide_model(observation, status, target, node_loss, options)
    revisions, plans = _find_revisions_and_plans(
        observation, stored_records.records, target, model, signer, options
    )
    accepted_target = revisions.get(target.name or "") if target.refusal is None else None
    replicas = _num_wanted_groups(life.replicas, status, observation.pods)
    planner = GroupPlanner(
        request=_build_group_request(resource.key, accepted_target, model.profile, options),
        waits_for=model.message,
        observation=observation,
        shortage_age_s=shortage_age_s(status, now) if options.nodes_may_come else None,
        prefers_nodes=options.nodes_may_come,
        groups=replicas,
    )
    context = Context(
        life=life,
        replicas=replicas,
        owner=owner,
        now=now,
        options=options,
        target=target,
        target_failed=_has_target_used_up_restarts(status, target, life.restart),
        revisions=revisions,
        recorded=frozenset(record.name for record in stored_records.records),
        records_signed_by=stored_records.signed_by(signer, status, revisions),
        signer=signer,
        forged=(*stored_records.forged, *find_forged_plans(observation, signer)),
        plans=plans,
        planner=planner,
        node_loss=node_loss,
        first_epoch=options.first_epoch(resource.resource_version, now),
        largest_epoch=options.largest_epoch(resource.resource_version, now),
        connecting_s=observation.connecting_s,
        refusals=limit_retry_times(observation.refusals, now),
        never_created=observation.never_created,
        never_requested=observation.never_requested,
        never_placed=observation.never_placed,
        isolation=_build_isolation(observation, options),
        fetches=_is_fetch_pod_wanted(observation, model),
    )
    return _decide_groups(observation, status, context, model)


def _find_revisions_and_plans(
    observation: ResourceObservation,
    records: Sequence[RevisionRecord],
    target: Target,
    model: ModelDecision,
    signer: Signer,
    options: Options,
) -> tuple[Mapping[str, Revision], Mapping[str, Plan]]:
    """Returns the revisions from which pods can be created, by name, and the trusted plans, by hash.

    Args:
        records: stored revisions.
    """
    # The commit belongs to the model of an accepted spec only.
    commit = model.status.commit if target.refusal is None else None
    revisions = find_revisions(records, target, commit, signer.owner, options)
    specs = [revision.spec for revision in revisions.values()]
    plans = read_trusted_plans(observation, signer, options.allowed, specs)
    # A revision whose record is lost gets its mode from the plan of its pods.
    return with_modes_of_plans(revisions, observation.pods, plans, options.pod_resources), plans


def _build_isolation(observation: ResourceObservation, options: Options) -> Isolation | None:
    """Returns which pods have restricted egress; None while the policies of the namespace are unknown."""
    if observation.restricted_selectors is None:
        return None
    return Isolation.from_setting(options.egress, observation.restricted_selectors)


def _has_target_used_up_restarts(status: HeteroInferenceStatus, target: Target, restart: RestartSpec) -> bool:
    """Reports whether a group of the target revision has used up its restarts."""
    return any(
        group.revision == target.name and restarts.used_up(group.failures, restart) for group in status.groups
    )


def _is_fetch_pod_wanted(observation: ResourceObservation, model: ModelDecision) -> bool:
    """Reports whether a pod fetches the model, or is about to."""
    components = [pod.labels.get(names.LABEL_COMPONENT) for pod in observation.pods if not pod.ended]
    components_to_create = [
        creation.manifest["metadata"]["labels"][names.LABEL_COMPONENT] for creation in model.creates
    ]
    return names.COMPONENT_FETCH in (*components, *components_to_create)


def _build_group_request(
    key: ResourceKey, revision: Revision | None, profile: ModelProfile | None, options: Options
) -> GroupRequest | None:
    """Returns the request for a plan; None while the spec is refused or the model is unknown.

    Args:
        revision: revision of the current spec; None if the spec is refused.
        profile: sizes of the model; None while they are unknown.
    """
    if profile is None or revision is None:
        return None
    served_name = revision.spec.model.served_name or key.name
    path = revision.source.path
    spec = revision.spec_of_pods(options.pod_resources)
    return GroupRequest(spec=spec, profile=profile, served_name=served_name, model_path=path)


def _num_wanted_groups(
    spec_replicas: int | None, status: HeteroInferenceStatus, pods: Sequence[PodView]
) -> int:
    """Returns the number of wanted groups.

    If `spec.replicas` is unreadable (None), the groups up to the highest existing index are wanted.
    """
    if spec_replicas is not None:
        return spec_replicas
    groups_with_pods = pods_by_group([pod for pod in pods if not pod.ended])
    highest_index = max([0, *groups_with_pods, *(group.index for group in status.groups)])
    return highest_index + 1


def _decide_model(
    observation: ResourceObservation,
    status: HeteroInferenceStatus,
    target: Target,
    node_loss: NodeLoss,
    options: Options,
) -> ModelDecision:
    """Returns the decision about the model; while the spec is refused, the last decision."""
    if target.refusal is not None or target.spec is None or target.source is None:
        return _keep_model_decision(status, target)
    context = _build_model_context(observation, status, target.spec, target.source, node_loss, options)
    image_nodes = context.image_nodes
    pods = [pod for pod in observation.pods if pod.labels.get(names.LABEL_COMPONENT) in MODEL_COMPONENTS]
    decision = decide_model(context, status.model, pods)
    if image_nodes.problem and decision.creates:
        return replace(
            decision,
            creates=(),
            is_ready=False,
            reason="ImageVolumesNotSupported",
            message=image_nodes.problem,
            look_again_s=_CHECK_SHORTAGE_EVERY_S,
        )
    has_progress = decision.is_ready or decision.status.bytes_total
    isolation = _build_isolation(observation, options)
    if isolation is None or not context.fetches or has_progress:
        return decision
    # A closed port may be the reason why the fetch has no progress.
    closed_ports = describe_closed_ports(target.spec, context.owner, isolation, options.fetch_egress)
    return replace(decision, message="; ".join(filter(None, (decision.message, closed_ports))))


def _build_model_context(
    observation: ResourceObservation,
    status: HeteroInferenceStatus,
    spec: HeteroInferenceSpec,
    source: ModelSource,
    node_loss: NodeLoss,
    options: Options,
) -> ModelContext:
    """Builds the input of the decision about the model of an accepted spec."""
    return ModelContext(
        spec=spec,
        owner=Owner(key=observation.resource.key, uid=observation.resource.uid),
        source=source,
        images=options.images,
        resources=options.pod_resources,
        pod_security=options.pod_security,
        node_loss=node_loss,
        progress=observation.fetch,
        unreadable_since=unreadable_since(status.groups),
        now=node_loss.now,
        cleanup=find_cleanup(spec, observation, node_loss.now, _derive_cleanup_key(options)),
        image_nodes=find_image_nodes(spec, observation.nodes),
        blocking_pod=find_blocking_cleanup(observation),
    )


def _derive_cleanup_key(options: Options) -> CleanupKey | None:
    """Returns the key that confirms removals from caches; None in an installation without a key."""
    return None if options.operator_key is None else CleanupKey.of_operator(options.operator_key)


def _keep_model_decision(status: HeteroInferenceStatus, target: Target) -> ModelDecision:
    """Returns the last decision about the model, which stays while the spec is refused.

    If the installation does not allow the model itself, the condition reports that refusal instead.
    """
    last_condition, problem = status.condition(ConditionType.MODEL_READY.value), target.refusal
    last_status = status.model or ModelStatus()
    is_model_refused = target.source is None and not isinstance(problem, SpecError)
    if problem is not None and is_model_refused:
        return ModelDecision(
            status=last_status, is_ready=False, reason=problem.reason, message=problem.message
        )
    if last_condition is None:
        return ModelDecision(status=last_status, is_ready=None, reason="SpecRefused")
    is_ready = {ConditionStatus.TRUE: True, ConditionStatus.FALSE: False}.get(last_condition.status)
    return ModelDecision(
        status=last_status, is_ready=is_ready, reason=last_condition.reason, message=last_condition.message
    )


def _decide_groups(
    observation: ResourceObservation, status: HeteroInferenceStatus, context: Context, model: ModelDecision
) -> Decision:
    """Returns the decision about all groups and children, with the next status."""
    by_group, last_statuses, strangers = _check_groups(context, observation.pods, status)
    context = replace(context, admission=decide_admission(context, observation, last_statuses, by_group))
    context = replace(context, eviction_block=decide_eviction_block(context, last_statuses, by_group))
    wanted_groups = decide_wanted(context, last_statuses, by_group, observation.groups)
    context = context.with_chosen_mode()  # `decide_wanted` may have chosen the mode with a new plan
    unwanted_groups = decide_unwanted(context, last_statuses, by_group, observation.groups, wanted_groups)
    decisions = [
        _with_live_state(observation, context, decision, by_group)
        for decision in (*wanted_groups, *unwanted_groups)
    ]
    wanted_groups, unwanted_groups = decisions[: context.replicas], decisions[context.replicas :]
    key_creates = [key for decision in wanted_groups for key in decision.key_creates]
    creates = [create for decision in wanted_groups for create in decision.creates]
    before_pods, after_pods = decide_children(
        find_children(context, decisions, by_group),
        observation.objects,
        used_plans=_find_used_plans(observation, decisions),
        has_pods=bool(creates or by_group),
    )
    next_status = build_next_status(observation, status, context, model, wanted_groups, unwanted_groups)
    # The operator runs the actions in this order. So the objects that pods need exist before the pods.
    actions: list[Action] = [*build_status_write(observation, next_status)]
    actions += join_events([event for decision in decisions for event in decision.events])
    actions += forgery_events(context, [*before_pods, *after_pods])
    actions += lost_label_events(status, last_statuses, wanted_groups, model)
    actions += condition_events(status, next_status)
    actions += [delete for decision in decisions for delete in decision.deletes]
    actions += context.node_loss.build_deletes(strangers, grace_s=None, after_status=True)
    actions += [*model.events, *model.deletes]
    actions += before_pods
    actions += [replace(create, scopes=frozenset({MODEL_SCOPE})) for create in model.creates]
    actions += [*key_creates, *creates]
    actions += after_pods
    if context.admission.dry_run is not None:
        actions.append(context.admission.dry_run)
    return Decision(
        actions=tuple(actions),
        look_again_s=_next_check_s(decisions, model, context, next_status),
        connecting=frozenset(
            (each.status.index, each.status.epoch)
            for each in decisions
            if startup.is_connecting(each.status.startup)
        ),
    )


def _find_used_plans(observation: ResourceObservation, decisions: Sequence[GroupDecision]) -> set[str]:
    """Returns the hashes of the plans that pods or groups name; contains "" if a pod or group names none."""
    plans_of_pods = {pod.labels.get(names.LABEL_PLAN, "") for pod in observation.pods}
    plans_of_groups = {decision.status.plan_hash or "" for decision in decisions}
    return plans_of_pods | plans_of_groups


def _check_groups(
    context: Context, pods: Sequence[PodView], status: HeteroInferenceStatus
) -> tuple[dict[int, list[PodView]], dict[int, GroupStatus], list[PodView]]:
    """Checks pods and status of each wanted group, in case another user wrote them.

    Returns:
        The pods of each group, the last status of each group, and the pods that the operator did not create.
    """
    by_group, last_statuses = pods_by_group(pods), known_groups(status)
    checked = {
        index: check_against_pods(
            context, last_statuses.get(index, GroupStatus(index=index)), by_group.get(index, ())
        )
        for index in range(context.replicas)
    }
    strangers = [pod for group in checked.values() for pod in group.strangers]
    by_group |= {index: list(checked[index].pods) for index in by_group if index in checked}
    last_statuses |= {index: checked[index].status for index in last_statuses if index in checked}
    return by_group, last_statuses, strangers


def _with_live_state(
    observation: ResourceObservation,
    context: Context,
    decision: GroupDecision,
    by_group: Mapping[int, Sequence[PodView]],
) -> GroupDecision:
    """Adds live state to the decision about a running group.

    This state is the table of ranks, the pods that lost a label, and whether the leader is silent.
    """
    index, epoch = decision.status.index, decision.status.epoch
    decision = _update_rank_entries(observation, context, decision, by_group)
    decision = with_lost_labels(context.owner, decision, by_group.get(index, ()))
    decision = with_silence(decision, observation.silences.get((index, epoch)))
    if not observation.pods_unwatched:
        return decision
    # The API server does not show the pods, so only the leader's report shows whether the group is ready.
    return with_silence_by_report(decision, observation.groups.get(index))


def _update_rank_entries(
    observation: ResourceObservation,
    context: Context,
    decision: GroupDecision,
    by_group: Mapping[int, Sequence[PodView]],
) -> GroupDecision:
    """Updates the table of ranks in the status of a running group, unless its pods are created now."""
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


def _next_check_s(
    decisions: Sequence[GroupDecision], model: ModelDecision, context: Context, status: HeteroInferenceStatus
) -> float | None:
    """Returns the seconds until the next check of the resource; None if only events need a check."""
    waits = [decision.look_again_s for decision in decisions] + [model.look_again_s]
    # This reconcile sends the dry run. The next reconcile follows immediately, to decide with the answer.
    if context.waits_for_admission and not context.admission.is_unanswered:
        waits.append(0.0)
    if any(decision.status.phase is GroupPhase.READY for decision in decisions):
        waits.append(_CHECK_STEP_TIMES_EVERY_S)
    capacity = status.condition(ConditionType.CAPACITY_AVAILABLE)
    if capacity is not None and capacity.status is ConditionStatus.FALSE:
        waits.append(_CHECK_SHORTAGE_EVERY_S)
    if status.gpus_missing_since is not None and context.target.spec is not None:
        after_s = parse_duration_s(context.target.spec.planning.on_gpu_shortage.after)
        left_s = after_s - (context.now - status.gpus_missing_since).total_seconds()
        if left_s > 0:
            waits.append(left_s + 0.1)  # 0.1 s more, so that the time is surely over
    return min((wait for wait in waits if wait is not None), default=None)
