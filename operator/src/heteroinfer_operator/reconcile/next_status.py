"""Builds the complete next status of a resource. Pure."""

from collections.abc import Sequence

from heteroinfer_operator.api import (
    MAX_PLANS,
    ConditionType,
    GroupPhase,
    HeteroInferenceStatus,
    ModelPhase,
    PlanStatus,
    merge_conditions,
    storable_status,
)
from heteroinfer_operator.api.base import MAX_TEXT
from heteroinfer_operator.cluster import PatchStatus, Refusal, ResourceObservation
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.service import client_ports
from heteroinfer_operator.reconcile import conditions, older_statuses
from heteroinfer_operator.reconcile.effective_values import add_effective_values
from heteroinfer_operator.reconcile.group_planner import GroupPlanner, gpus_missing_since
from heteroinfer_operator.reconcile.life import ConditionFacts, find_serving, find_worst
from heteroinfer_operator.reconcile.model_decision import ModelDecision
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision
from heteroinfer_operator.reconcile.reconcile_context import Context
from heteroinfer_operator.reconcile.refusals import (
    NOT_ANSWERED,
    REASONS_OF_CHILDREN,
    REPORTED_TRIES,
    REVISION,
    WRITTEN_BY_OTHERS,
)
from heteroinfer_operator.reconcile.retired import build_retired_groups
from heteroinfer_operator.reconcile.rollout import find_unfinished_rollout
from heteroinfer_operator.reconcile.scopes import CLIENTS_SCOPE, MODEL_SCOPE, group_scope
from heteroinfer_operator.reconcile.status_size import fit_groups, fit_plans
from heteroinfer_operator.reconcile.status_summary import build_plan_status, build_summary


def build_next_status(
    observation: ResourceObservation,
    status: HeteroInferenceStatus,
    context: Context,
    model: ModelDecision,
    wanted: Sequence[GroupDecision],
    unwanted: Sequence[GroupDecision],
) -> HeteroInferenceStatus:
    """Builds the next status from the decisions about the model and the groups."""
    generation, target = observation.resource.generation, context.target
    decisions = [*wanted, *unwanted]
    groups = fit_groups([decision.status for decision in decisions])
    num_updated = sum(each.runs and each.status.revision == target.name for each in wanted)
    plans = add_effective_values(
        _build_plans(status, wanted, context.planner),
        groups,
        target.spec,
        observation,
        revision=target.name,
    )
    model_failure = model.message if model.status.phase is ModelPhase.FAILED else ""
    ports = _client_ports(observation, context)
    is_port_reachable = target.spec is None or target.spec.engine.port in ports
    clients_refusal = context.clients_refusal or _restore_clients_refusal(status, context)
    facts = ConditionFacts(
        decisions=wanted,
        serving=find_serving(wanted),
        kept=next(iter(find_serving(unwanted)), None),
        worst=find_worst(wanted),
        wanted=context.replicas,
        draining=any(each.deletes or each.status.phase is GroupPhase.STOPPING for each in decisions),
        blocked_pod=context.node_loss.describe_finalizer(observation.pods),
        suspended=context.life.suspend,
        target=target.name,
        problem=context.problem,
        rollout=find_unfinished_rollout(wanted, target.name, model_problem=model_failure),
        plan_notes=older_statuses.planned_message(plans),
        refusals=_wanted_refusals(context, decisions),
        unreachable=clients_refusal if not ports else None,
        port_unreachable=None if is_port_reachable else clients_refusal,
        now=context.now,
        generation=generation,
    )
    num_ready = len(facts.serving)
    next_conditions = (
        facts.build(ConditionType.MODEL_READY, model.is_ready, model.reason, model.message),
        *conditions.build_life_conditions(facts),
        *conditions.build_plan_conditions(facts),
    )
    all_updated = target.name is not None and num_updated == num_ready == context.replicas
    refusals = [decision.refusal for decision in wanted if decision.refusal is not None]
    return HeteroInferenceStatus(
        observed_generation=generation,
        replicas=sum(1 for decision in decisions if decision.runs or decision.deletes),
        ready_replicas=num_ready,
        updated_replicas=num_updated,
        selector=",".join(f"{key}={value}" for key, value in identity.leader_labels(context.owner).items()),
        endpoint=_choose_endpoint(status, context) if facts.unreachable is None else None,
        current_revision=target.name if all_updated else status.current_revision,
        update_revision=target.name or status.update_revision,
        summary=build_summary(wanted, groups, plans, serving=num_ready, wanted=context.replicas),
        conditions=merge_conditions(status.conditions, next_conditions, now=context.now),
        records_signed_by=context.records_signed_by,
        gpus_missing_since=gpus_missing_since(status, refusals, context.now),
        model=model.status,
        plans=fit_plans(plans),
        groups=groups,
        retired_groups=build_retired_groups(context, status, {group.index for group in groups}),
    )


def build_status_write(observation: ResourceObservation, status: HeteroInferenceStatus) -> list[PatchStatus]:
    """Returns the write of the status; empty if the API server already stores the same status."""
    stored = dict(observation.resource.status)
    if status.dump() == stored:
        return []
    body, defect = storable_status(status)
    if body == stored:
        return []
    version = observation.resource.resource_version
    return [PatchStatus(status=body, resource_version=version, defect=defect)]


def _wanted_refusals(context: Context, decisions: Sequence[GroupDecision]) -> list[Refusal]:
    """Returns the refusals to report: those of the resource itself and of groups that still exist.

    - A refused dry run is reported only for the revision of the current spec.
    - A dry run without an answer is reported immediately, because it delays a rollout.
    - Another write without an answer is reported only after several attempts, because most of them pass.
    """
    scopes = {group_scope(decision.status.index) for decision in decisions}
    refusals: list[Refusal] = []
    for refusal in context.refusals:
        is_of_group = bool(scopes & refusal.scopes)
        is_of_resource = refusal.scopes <= {CLIENTS_SCOPE, MODEL_SCOPE}  # also if it has no scopes
        if refusal.kind == REVISION:
            is_reported = refusal.name == context.target.name
        else:
            is_reported = refusal.reason != NOT_ANSWERED or refusal.tries >= REPORTED_TRIES
        if (is_of_group or is_of_resource) and is_reported:
            refusals.append(refusal)
    # A second operator that writes the status also causes other refusals. So the refusal about this operator
    # comes first.
    return sorted(refusals, key=lambda refusal: (refusal.reason != WRITTEN_BY_OTHERS, not refusal.blocks))


def _client_ports(observation: ResourceObservation, context: Context) -> frozenset[int]:
    """Returns the ports at which the stored Service for clients forwards to the leaders."""
    name = identity.client_service(context.owner)
    services = (stored_object for stored_object in observation.objects if stored_object["kind"] == "Service")
    stored = next((service for service in services if service["metadata"]["name"] == name), None)
    return frozenset() if stored is None else client_ports(stored, context.owner)


def _restore_clients_refusal(status: HeteroInferenceStatus, context: Context) -> Refusal | None:
    """Returns the refusal of the clients' Service that the last status reports, or None.

    The operator keeps refusals in memory only. A restart of the operator loses them, and a change of the spec
    clears them, but the Service still does not exist. Available must not become True before the next attempt.
    """
    before = status.condition(ConditionType.AVAILABLE.value)
    was_child_refused = before is not None and before.reason in REASONS_OF_CHILDREN
    if before is None or not was_child_refused or status.endpoint is not None:
        return None
    name = identity.client_service(context.owner)
    message = (
        f"Service {name}: the API server refused an earlier attempt, so clients have no address yet. "
        "The operator tries again now"
    )
    return Refusal(kind="Service", name=name, reason=before.reason, message=message, retry_at=context.now)


def _choose_endpoint(status: HeteroInferenceStatus, context: Context) -> str | None:
    """Returns the address of the clients' Service; while the spec is unreadable, the last address or None."""
    spec = context.target.spec
    return context.options.addressing.endpoint(spec, context.owner) if spec else status.endpoint


def _build_plans(
    status: HeteroInferenceStatus, wanted: Sequence[GroupDecision], planner: GroupPlanner
) -> tuple[PlanStatus, ...]:
    """Returns the plans of running groups. A plan whose ConfigMap is gone keeps its last reported values."""
    before = {plan.hash: plan for plan in status.plans}
    plans: dict[str, PlanStatus] = {}
    for decision in wanted:
        name = decision.status.plan_hash
        if not decision.runs or name is None or name in plans:
            continue
        if decision.plan is not None:
            predicted = planner.predict_again(decision.plan, decision.status)
            notes = _choose_notes(decision, before.get(name), status)
            plans[name] = build_plan_status(decision.plan, predicted).changed(hash=name, notes=notes)
        elif name in before:
            plans[name] = before[name]
    return tuple(sorted(plans.values(), key=lambda plan: plan.hash))[:MAX_PLANS]


def _choose_notes(
    decision: GroupDecision, last_plan: PlanStatus | None, status: HeteroInferenceStatus
) -> str | None:
    """Returns the notes on a plan from this reconcile, otherwise from the last status; None without notes."""
    if decision.notes is not None:
        return "; ".join(dict.fromkeys(decision.notes))[:MAX_TEXT] or None
    if last_plan is None:
        return None
    # Older versions stored the notes only in a message of a condition.
    return older_statuses.plan_notes(status) if last_plan.notes is None else last_plan.notes
