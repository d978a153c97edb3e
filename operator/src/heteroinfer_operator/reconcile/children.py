"""Children other than pods: which to write, and which to delete. Pure."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.plan import Plan
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.cluster import Action, ApplyObject, CreateObject, DeleteObject, Manifest
from heteroinfer_operator.manifests.disruption_budget import KIND as BUDGET
from heteroinfer_operator.manifests.disruption_budget import build_disruption_budget
from heteroinfer_operator.manifests.identity import GroupRef, Owner
from heteroinfer_operator.manifests.model_claim import KIND as CLAIM
from heteroinfer_operator.manifests.model_claim import build_model_claim
from heteroinfer_operator.manifests.network_policy import build_network_policy
from heteroinfer_operator.manifests.plan_config_map import build_plan_config_map
from heteroinfer_operator.manifests.service import build_client_service, build_group_service


def build_children(
    spec: HeteroInferenceSpec, owner: Owner, plans: Collection[Plan], *, asleep: Collection[int] = ()
) -> list[Manifest]:
    """Returns every child that does not come and go with epochs: Services, policies, budgets and plans.

    Args:
        spec: what the user asks for.
        owner: the resource.
        plans: in use.
        asleep: indices of groups that sleep.
    """
    children: list[Manifest] = [build_client_service(spec, owner)]
    claim = build_model_claim(spec, owner)
    children += [claim] if claim is not None else []
    pods = sum(role.pods for role in spec.roles)
    for index in range(spec.replicas):
        group = GroupRef(owner=owner, index=index)
        children += [build_group_service(group), build_network_policy(spec, group)]
        if pods > 1:
            children.append(build_disruption_budget(group, pods=pods, asleep=index in asleep))
    plan_by_hash = {plan.hash: plan for plan in plans}
    return children + [build_plan_config_map(owner, plan) for plan in plan_by_hash.values()]


def decide_children(
    wanted: Sequence[Manifest],
    stored: Sequence[Manifest],
    *,
    used_plans: Collection[str],
    has_pods: bool,
    keep_claims: bool = False,
) -> tuple[list[Action], list[Action]]:
    """Returns what comes before the pods, and what comes after them: budgets, and deletes.

    An object that already says what it should is not written; drift is mended; plans
    are immutable and only created, and so are claims, which the user may let grow.

    Args:
        wanted: all children there should be.
        stored: all there are.
        used_plans: hashes of plans that some pod still names: these are kept.
        has_pods: whether some group has pods, or gets them now: a budget without any is reported as a
            problem, in an event of its controller.
        keep_claims: whether pods may still mount a claim that is no longer wanted.
    """
    by_name = {_name(manifest): manifest for manifest in stored}
    before: list[Action] = []
    after: list[Action] = []
    for manifest in wanted:
        old = by_name.pop(_name(manifest), None)
        if manifest.get("immutable") or manifest["kind"] == CLAIM:
            if old is None:
                before.append(CreateObject(manifest=manifest))
        elif old is None or not says(old, manifest):
            write = ApplyObject(manifest=manifest)
            if manifest["kind"] != BUDGET:
                before.append(write)
            elif has_pods:
                after.append(write)
    after += [
        DeleteObject(
            kind=manifest["kind"],
            api_version=manifest["apiVersion"],
            name=manifest["metadata"]["name"],
            uid=manifest["metadata"]["uid"],
        )
        for manifest in by_name.values()
        if _spare(manifest, used_plans) and not (keep_claims and manifest["kind"] == CLAIM)
    ]
    return before, after


def _spare(manifest: Manifest, used_plans: Collection[str]) -> bool:
    metadata = manifest["metadata"]
    labels = metadata.get("labels", {})
    return (
        labels.get(names.LABEL_MANAGED_BY) == names.MANAGER
        and labels.get(names.LABEL_PLAN, "") not in used_plans
        and "deletionTimestamp" not in metadata
    )


def says(stored: Any, wanted: Any) -> bool:
    """Returns whether a stored value has everything that a wanted one has; more is allowed.

    Lists are compared item by item and must be of one length: the API server adds
    defaults to fields, never items to a list of ours.
    """
    if isinstance(wanted, Mapping):
        return isinstance(stored, Mapping) and all(
            key in stored and says(stored[key], value) for key, value in wanted.items()
        )
    if isinstance(wanted, list | tuple):
        return (
            isinstance(stored, list | tuple)
            and len(stored) == len(wanted)
            and all(says(a, b) for a, b in zip(stored, wanted, strict=True))
        )
    return bool(stored == wanted)


def _name(manifest: Manifest) -> tuple[str, str]:
    return f"{manifest['apiVersion']}/{manifest['kind']}", manifest["metadata"]["name"]
