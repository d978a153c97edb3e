"""Decides which children other than pods to write and to delete. Pure.

The operator builds a group's policy, Service and plan from the revision of the group's pods until the last
pod is gone, even if the spec has changed since.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from heteroinfer_contract import names
from heteroinfer_operator.api import GroupPhase
from heteroinfer_operator.cluster import Action, ApplyObject, CreateObject, DeleteObject, Manifest, PodView
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.disruption_budget import build_disruption_budget, build_shared_budget
from heteroinfer_operator.manifests.drift import find_drift, with_creation_fields
from heteroinfer_operator.manifests.egress_policy import POLICY_KIND, build_fetch_policies, build_group_egress
from heteroinfer_operator.manifests.gang import gang_name
from heteroinfer_operator.manifests.identity import GroupRef, Owner
from heteroinfer_operator.manifests.model_claim import KIND as CLAIM
from heteroinfer_operator.manifests.model_claim import build_model_claim
from heteroinfer_operator.manifests.network_policy import build_network_policy
from heteroinfer_operator.manifests.plan_config_map import build_plan_config_map
from heteroinfer_operator.manifests.revision_record import build_revision_record
from heteroinfer_operator.manifests.service import build_client_service, build_group_service
from heteroinfer_operator.manifests.signer import Signer
from heteroinfer_operator.reconcile.one_group.decision import GroupDecision
from heteroinfer_operator.reconcile.one_group.made import revision_of
from heteroinfer_operator.reconcile.reconcile_context import Context
from heteroinfer_operator.reconcile.revisions import Revision
from heteroinfer_operator.reconcile.scopes import CLIENTS_SCOPE, MODEL_SCOPE, group_scope


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """A wanted child: an object that the operator creates for a resource.

    Attributes:
        last: whether the operator writes the child after the pods, as it does with disruption budgets.
    """

    manifest: Manifest
    scopes: frozenset[str] = frozenset()
    last: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Children:
    """All wanted children.

    Attributes:
        kept: names of children that stay as they are, because their content cannot be built now.
        kept_groups: indices of groups whose children stay for the same reason. Children with the number of an
            epoch do not stay.
        kept_kinds: kinds whose existing children all stay. For example, no claim is deleted while the spec
            is refused, because the operator does not know which claims the spec needs.
        readable: names of stored plans and revisions that can be read.
        forged: names of stored plans and revisions that another user wrote or damaged.
    """

    signer: Signer

    wanted: tuple[Child, ...] = ()
    kept: frozenset[str] = field(default=frozenset())
    kept_groups: frozenset[str] = field(default=frozenset())
    kept_kinds: frozenset[str] = field(default=frozenset())
    readable: frozenset[str] = field(default=frozenset())
    forged: frozenset[str] = field(default=frozenset())


def find_children(
    context: Context, decisions: Sequence[GroupDecision], by_group: Mapping[int, Sequence[PodView]]
) -> Children:
    """Returns the children that these decisions need, and the existing children that must stay.

    Args:
        decisions: decisions about all groups, including groups that are no longer wanted.
        by_group: pods of each group, by group index.
    """
    owner = context.owner
    # An unwanted group needs its children until its last pod is gone.
    remaining = [
        decision
        for decision in decisions
        if decision.status.index < context.replicas or by_group.get(decision.status.index)
    ]
    revisions = {
        decision.status.index: _find_revision(context, decision, by_group.get(decision.status.index, ()))
        for decision in remaining
    }
    wanted: list[Child] = []
    for decision in remaining:
        if (revision := revisions[decision.status.index]) is not None:
            wanted += _build_group_children(context, decision, revision)
        if decision.gang_object is not None:
            scopes = frozenset({group_scope(decision.status.index)})
            wanted.append(Child(manifest=decision.gang_object, scopes=scopes))
    wanted += _build_shared_budget(context, decisions, by_group)
    wanted += _build_plan_config_maps(owner, decisions)
    in_use = _find_revisions_in_use(context, remaining, revisions)
    wanted += _build_record_children(context, in_use)
    ports = [revision.spec.engine.port for name in in_use if (revision := context.revisions.get(name))]
    wanted += _build_resource_children(context, tuple(in_use), ports)
    kept_names, kept_kinds = _find_kept(context, remaining, in_use)
    plans = (identity.plan_config_map(owner, name) for name in context.plans)
    records = (identity.revision_record(owner, name) for name in context.recorded)
    return Children(
        wanted=tuple(wanted),
        kept=frozenset(kept_names),
        kept_groups=frozenset(str(index) for index, revision in revisions.items() if revision is None),
        kept_kinds=frozenset(kept_kinds),
        readable=frozenset({*plans, *records}),
        forged=frozenset(context.forged),
        signer=context.signer,
    )


def _find_kept(
    context: Context, remaining: Sequence[GroupDecision], in_use: Collection[str]
) -> tuple[set[str], set[str]]:
    """Returns the names, and the kinds, of existing children that must stay.

    Args:
        remaining: decisions about groups that need children.
        in_use: names of the revisions of these groups.
    """
    # The gang object of a running epoch stays because of its name: a cluster may list it under several API
    # versions.
    running = [decision for decision in remaining if decision.runs]
    kept_names = {gang_name(context.epoch_ref(decision.status)) for decision in running}
    kept_names |= {identity.revision_record(context.owner, name) for name in in_use}
    # While the operator does not know the namespace's policies, its own policies stay.
    kept_kinds: set[str] = set() if context.isolation is not None else {POLICY_KIND}
    if context.target.refusal is not None:
        # A refused spec gives no port and no claim, and a pod may still fetch the model of the last spec. So
        # the clients' Service, the claims and the policies stay.
        kept_names.add(identity.client_service(context.owner))
        kept_kinds |= {CLAIM, POLICY_KIND}
    return kept_names, kept_kinds


def _find_revisions_in_use(
    context: Context, decisions: Sequence[GroupDecision], revisions: Mapping[int, Revision | None]
) -> dict[str, set[str]]:
    """Returns the scopes of the groups that use each revision, by the revision's name, sorted by name.

    A group uses the revision of its pods, and the revision in its status, which may already be the revision
    of the next epoch.

    Args:
        revisions: revision of each group's pods, by group index; None if it is not stored.
    """
    in_use: dict[str, set[str]] = {}
    for decision in decisions:
        index = decision.status.index
        revision = revisions[index]
        names_of_group = {decision.status.revision, revision.name if revision is not None else None}
        for name in names_of_group:
            if name is not None:
                in_use.setdefault(name, set()).add(group_scope(index))
    # The record of the current spec's revision stays even without groups, because it has the chosen mode.
    target = context.revisions.get(context.target.name or "")
    if target is not None and target.chosen is not None:
        in_use.setdefault(target.name, set())
    return dict(sorted(in_use.items()))


def _find_revision(context: Context, decision: GroupDecision, pods: Sequence[PodView]) -> Revision | None:
    """Returns the revision of a group's pods; without pods, the revision in its status or of the spec.

    Returns None if the revision is not stored.
    """
    target_name = context.target.name if context.target.refusal is None else None
    name = revision_of(context, decision.status, pods) or target_name
    return context.revisions.get(name or "")


def _build_group_children(context: Context, decision: GroupDecision, revision: Revision) -> list[Child]:
    """Builds the Service and the policies of a group, and the disruption budget of a single group.

    Several groups share one budget (`_build_shared_budget`). A group of one pod needs no budget.
    """
    index = decision.status.index
    group = GroupRef(owner=context.owner, index=index)
    scopes = frozenset({group_scope(index)})
    spec = revision.spec_of_pods(context.options.pod_resources)
    children = [
        Child(manifest=build_group_service(group), scopes=scopes),
        Child(manifest=build_network_policy(spec, group), scopes=scopes),
    ]
    if context.isolation is not None:
        policies = build_group_egress(spec, group, context.isolation)
        children += [Child(manifest=policy, scopes=scopes) for policy in policies]
    pods = sum(role.pods for role in spec.roles)
    if pods > 1 and context.replicas == 1 and index == 0:
        # Pods of a group that sleeps or cannot start must not block the drain of a node.
        cannot_start = decision.status.stuck_pods or decision.unplaced
        protects_unready_pods = decision.status.phase is not GroupPhase.SLEEPING and not cannot_start
        budget = build_disruption_budget(group, pods=pods, protects_unready_pods=protects_unready_pods)
        children.append(Child(manifest=budget, last=True))
    return children


def _build_shared_budget(
    context: Context, decisions: Sequence[GroupDecision], by_group: Mapping[int, Sequence[PodView]]
) -> list[Child]:
    """Builds the disruption budget that several groups share.

    While all groups with pods serve, the budget allows the eviction of one pod, if at least two groups have
    pods or all other groups sleep. Two kinds of groups do not count, so that they do not block a drain:
    groups without pods, which wait for capacity or for their next start, and sleeping groups. While a rollout
    stops a group, the budget allows no eviction.
    """
    wanted = [decision for decision in decisions if decision.status.index < context.replicas]
    if len(wanted) < 2:
        return []
    awake = [decision for decision in wanted if decision.status.phase is not GroupPhase.SLEEPING]
    # The number of pods of each awake group that has pods or gets them now. The plan's number includes pods
    # that are missing.
    pod_counts = [
        len(decision.plan.pods) if decision.plan is not None else len(by_group.get(decision.status.index, ()))
        for decision in awake
        if decision.runs and (decision.creates or by_group.get(decision.status.index))
    ]
    do_all_others_sleep = len(awake) == 1
    has_reserve = len(pod_counts) > 1 or do_all_others_sleep
    num_evictable = 1 if has_reserve and not context.eviction_block.wanted else 0
    manifest = build_shared_budget(context.owner, min_available=max(sum(pod_counts) - num_evictable, 0))
    return [Child(manifest=manifest, last=True)]


def _build_record_children(context: Context, in_use: Mapping[str, set[str]]) -> list[Child]:
    """Builds the records of the revisions in use whose mode is known.

    A record is immutable and contains the mode, so it cannot be written before the mode is known.

    Args:
        in_use: for each name of a revision, the scopes of the groups that use the revision.
    """
    scoped_revisions = ((context.revisions.get(name), scopes) for name, scopes in in_use.items())
    return [
        Child(manifest=build_revision_record(context.owner, revision.record), scopes=frozenset(scopes))
        for revision, scopes in scoped_revisions
        if revision is not None and revision.has_mode
    ]


def _build_plan_config_maps(owner: Owner, decisions: Sequence[GroupDecision]) -> list[Child]:
    """Builds the ConfigMaps of the plans that groups use."""
    scopes: dict[str, set[str]] = {}
    plans = {}
    for decision in decisions:
        plan = decision.new_plan or decision.plan
        # If the hashes differ, another version wrote the plan. Then the stored ConfigMap stays as it is.
        if plan is not None and plan.hash == decision.status.plan_hash:
            plans[plan.hash] = plan
            scopes.setdefault(plan.hash, set()).add(group_scope(decision.status.index))
    return [
        Child(manifest=build_plan_config_map(owner, plan), scopes=frozenset(scopes[key]))
        for key, plan in plans.items()
    ]


def _build_resource_children(context: Context, in_use: Sequence[str], ports: Sequence[int]) -> list[Child]:
    """Builds the clients' Service, the claims of models, and the policies of a fetch pod.

    Groups with an older revision still need the port and the claim of that revision.

    Args:
        in_use: names of the revisions of groups.
        ports: ports of these revisions.
    """
    spec = context.target.spec if context.target.refusal is None else None
    children: list[Child] = []
    port = spec.engine.port if spec is not None else next(iter(ports), None)
    if port is not None:
        service = build_client_service(context.owner, (port, *ports))
        children.append(Child(manifest=service, scopes=frozenset({CLIENTS_SCOPE})))
    if spec is not None and context.fetches and context.isolation is not None:
        policies = build_fetch_policies(spec, context.owner, context.isolation, context.options.fetch_egress)
        children += [Child(manifest=policy, scopes=frozenset({MODEL_SCOPE})) for policy in policies]
    specs = [spec] if spec is not None else []
    specs += [context.revisions[name].spec for name in in_use if name in context.revisions]
    claims = [build_model_claim(each, context.owner) for each in specs]
    by_name = {claim["metadata"]["name"]: claim for claim in claims if claim is not None}
    return children + [Child(manifest=claim, scopes=frozenset({MODEL_SCOPE})) for claim in by_name.values()]


def decide_children(
    children: Children, stored: Sequence[Manifest], *, used_plans: Collection[str], has_pods: bool
) -> tuple[list[Action], list[Action]]:
    """Decides the writes and deletes of children.

    - The operator writes only objects that are missing or differ from their manifest.
    - It creates claims but never changes them, because the user may enlarge them.
    - It writes a budget only once a group has pods, because the disruption controller reports a budget
      without pods as a problem.
    - It deletes unwanted policies only once all wanted policies exist: the API server may refuse a new
      policy, and a serving pod needs the old or the new one.

    Args:
        used_plans: hashes of plans that pods or groups name; these plans stay.
        has_pods: whether a group has pods, or gets pods now.

    Returns:
        The actions before the creation of pods, and the actions after it (budgets and deletes).
    """
    by_name = {_kind_and_name(manifest): manifest for manifest in stored}
    missing = {_kind_and_name(child.manifest) for child in children.wanted} - by_name.keys()
    before_pods: list[Action] = []
    after_pods: list[Action] = []
    for child in children.wanted:
        # `pop`, so that `by_name` has only the unwanted objects after the loop.
        stored_object = by_name.pop(_kind_and_name(child.manifest), None)
        if stored_object is not None and _is_damaged(stored_object, children.readable):
            if "deletionTimestamp" not in stored_object["metadata"]:
                before_pods.append(_build_delete(stored_object))
            stored_object = None  # so the write creates the object again
        action = _build_write(child, stored_object, children.signer)
        if action is None:
            continue
        if not child.last:
            before_pods.append(action)
        elif has_pods:
            after_pods.append(action)
    creates_policy = any(
        isinstance(action, ApplyObject)
        and action.manifest["kind"] == POLICY_KIND
        and _kind_and_name(action.manifest) in missing
        for action in before_pods
    )
    after_pods += _build_deletes(by_name.values(), children, used_plans, keeps_policies=creates_policy)
    return before_pods, after_pods


def _build_deletes(
    unwanted: Iterable[Manifest], children: Children, used_plans: Collection[str], *, keeps_policies: bool
) -> list[DeleteObject]:
    """Returns the deletes of the unwanted objects that need not stay, and of forged objects.

    Args:
        keeps_policies: whether all policies stay, because a wanted policy does not exist yet.
    """
    deletes: list[DeleteObject] = []
    for manifest in unwanted:
        stays = _must_stay(manifest, children) or (keeps_policies and manifest["kind"] == POLICY_KIND)
        is_unneeded = _may_be_deleted(manifest, used_plans) and not stays
        if is_unneeded or _is_forged(manifest, children.forged):
            deletes.append(_build_delete(manifest))
    return deletes


def _must_stay(manifest: Manifest, children: Children) -> bool:
    """Reports whether an existing child must stay because its content cannot be built now."""
    metadata = manifest["metadata"]
    labels = metadata["labels"]
    # Objects of an epoch, such as gang objects, stay only if their names are in `kept`.
    belongs_to_kept_group = (
        labels.get(names.LABEL_GROUP) in children.kept_groups and names.LABEL_EPOCH not in labels
    )
    return (
        belongs_to_kept_group or metadata["name"] in children.kept or manifest["kind"] in children.kept_kinds
    )


def _build_delete(manifest: Manifest) -> DeleteObject:
    """Returns the delete of a stored object."""
    metadata = manifest["metadata"]
    return DeleteObject(
        kind=manifest["kind"],
        api_version=manifest["apiVersion"],
        name=metadata["name"],
        uid=metadata["uid"],
    )


def _is_damaged(stored: Manifest, readable: Collection[str]) -> bool:
    """Reports whether an object is an unreadable plan or revision, which the operator must create again."""
    return stored["kind"] == "ConfigMap" and stored["metadata"]["name"] not in readable


def _is_forged(stored: Manifest, forged: Collection[str]) -> bool:
    """Reports whether an object is a plan or revision that another user wrote or damaged.

    Returns False while the object is being deleted.
    """
    metadata = stored["metadata"]
    return (
        stored["kind"] == "ConfigMap" and metadata["name"] in forged and "deletionTimestamp" not in metadata
    )


def _build_write(child: Child, stored_object: Manifest | None, signer: Signer) -> Action | None:
    """Returns the action that creates or corrects a child, or None if the stored object is correct."""
    manifest = child.manifest
    if stored_object is None:
        # Plans and records of revisions are ConfigMaps. Only these children need a signature.
        manifest = signer.sign(manifest) if manifest["kind"] == "ConfigMap" else manifest
        if manifest.get("immutable") or manifest["kind"] == CLAIM:
            return CreateObject(manifest=manifest, scopes=child.scopes)
        return ApplyObject(manifest=manifest, scopes=child.scopes)
    if manifest["kind"] == CLAIM:  # the user may have enlarged the claim, so keep it as it is
        return None
    if manifest.get("immutable"):
        # The data of an immutable object cannot change. `read_records` and `read_trusted_plans` have already
        # checked the stored data, so the operator may sign it.
        stored_data = {"data": stored_object["data"]} if "data" in stored_object else {}
        signed = signer.sign({**manifest, **stored_data})
        drift = find_drift(stored_object, signed).get("metadata")
        return ApplyObject(manifest=signed, scopes=child.scopes) if drift else None
    if not find_drift(stored_object, manifest):
        return None
    return ApplyObject(manifest=with_creation_fields(stored_object, manifest), scopes=child.scopes)


def _may_be_deleted(manifest: Manifest, used_plans: Collection[str]) -> bool:
    """Reports whether an unwanted object is deletable: `_must_stay` may still forbid the deletion.

    The operator must have created the object, no group may use the object as its plan, and the object's
    deletion must not have begun.
    """
    metadata = manifest["metadata"]
    labels = metadata.get("labels", {})
    return (
        labels.get(names.LABEL_MANAGED_BY) == names.MANAGER
        and not any(metadata["name"].endswith(f"-plan-{used}") for used in used_plans if used)
        and "deletionTimestamp" not in metadata
    )


def _kind_and_name(manifest: Manifest) -> tuple[str, str]:
    return f"{manifest['apiVersion']}/{manifest['kind']}", manifest["metadata"]["name"]
