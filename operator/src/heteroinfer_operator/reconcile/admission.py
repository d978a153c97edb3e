"""Validates the objects of a rollout by a dry run before the rollout stops running groups. Pure."""

from collections.abc import Mapping, Sequence

from heteroinfer_operator.api import GroupStatus
from heteroinfer_operator.cluster import Manifest, PodView, ResourceObservation, TryObjects
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.manifests.plan_config_map import build_plan_config_map
from heteroinfer_operator.manifests.revision_record import build_revision_record
from heteroinfer_operator.reconcile import transitions
from heteroinfer_operator.reconcile.epoch_pods import build_epoch_gang_object, build_pod_creates
from heteroinfer_operator.reconcile.one_group.made import revision_of
from heteroinfer_operator.reconcile.reconcile_context import POD, Admission, Context
from heteroinfer_operator.reconcile.refusals import NOT_ANSWERED, REVISION
from heteroinfer_operator.reconcile.revisions import Revision


def decide_admission(
    context: Context,
    observation: ResourceObservation,
    last_statuses: Mapping[int, GroupStatus],
    by_group: Mapping[int, Sequence[PodView]],
) -> Admission:
    """Decides whether to send a dry run of the objects of the current spec's revision now.

    Also returns the answer to the last dry run. No dry run is needed while all groups have this revision, or
    after the API server has accepted the revision. A refused revision is tried again as seldom as a refused
    pod. Until the API server answers, no group is replaced, and a group that is down starts again with its
    own revision.
    """
    target_name, admitted_revisions = context.target.name, observation.admitted
    if admitted_revisions is None or target_name is None:  # no API server, or an unreadable spec
        return Admission()
    if target_name in admitted_revisions or context.life.suspend or context.problem is not None:
        return Admission()
    revision = context.revisions.get(target_name)
    outdated = _find_outdated_group(context, last_statuses, by_group)
    if revision is None or outdated is None:
        return Admission()
    # A dry run without an answer is stored as a refusal with the reason NOT_ANSWERED, so that its retry also
    # waits. Such a refusal is not a problem of the spec.
    refusal = next(
        (known for known in context.refusals if (known.kind, known.name) == (REVISION, target_name)), None
    )
    is_unanswered = refusal is not None and refusal.reason == NOT_ANSWERED
    problem = None
    if refusal is not None and not is_unanswered:
        problem = PlanError(refusal.message, reason=refusal.reason)
    dry_run = None
    if refusal is None or refusal.retry_at <= context.now:
        dry_run = TryObjects(
            revision=target_name, manifests=_build_example_objects(context, revision, outdated)
        )
    return Admission(dry_run=dry_run, problem=problem, is_unanswered=is_unanswered)


def _find_outdated_group(
    context: Context, last_statuses: Mapping[int, GroupStatus], by_group: Mapping[int, Sequence[PodView]]
) -> GroupStatus | None:
    """Returns the status of the first wanted group that runs, or would start with, another revision.

    Returns None if there is no such group.
    """
    for index in range(context.replicas):
        status, pods = last_statuses.get(index, GroupStatus(index=index)), by_group.get(index, ())
        revision = revision_of(context, status, pods)
        can_start_again = revision in context.revisions  # pods can be created from this revision
        if revision != context.target.name and (pods or can_start_again):
            return status
    return None


def _build_example_objects(context: Context, revision: Revision, status: GroupStatus) -> tuple[Manifest, ...]:
    """Builds the objects that a group's next epoch needs, with one pod of each role and device.

    The other pods of a role and device have the same form, so the API server would treat them alike.
    """
    planned = context.planner.make_for_any_nodes()
    plan = planned.plan
    revision = revision.with_mode(None if planned.choice is None else planned.choice.chosen)
    next_epoch = transitions.with_dry_run_epoch(status, plan_hash=plan.hash)
    # Reversed, so that the first pod of each role and device replaces the later pods in the dictionary.
    example_pods = {(pod.role, pod.device): pod.index for pod in reversed(plan.pods)}
    creates = build_pod_creates(
        context, revision, next_epoch, plan, set(example_pods.values()), planned.node_assignment
    )
    gang = build_epoch_gang_object(context, revision, next_epoch, plan, planned.node_assignment.gang)
    return (
        build_revision_record(context.owner, revision.record),
        build_plan_config_map(context.owner, plan),
        *([gang] if gang is not None else []),
        *(create.manifest for create in creates if create.manifest["kind"] == POD),
    )
