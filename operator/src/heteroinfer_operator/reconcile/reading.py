"""Reads stored objects for decisions: pods by group, plans by hash. Pure.

A damaged object is ignored; all other objects are still read.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from heteroinfer_contract import codec, names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import Plan, plan_text_hash
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.cluster import Manifest, PodView, ResourceObservation
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.manifests.signer import Signer
from heteroinfer_operator.planning.engine_settings import with_state_dtype
from heteroinfer_operator.planning.first_token import add_keep_alive
from heteroinfer_operator.reconcile.allowed import Allowed

_MAX_CACHED_PLANS: Final = 4096
"""Number of parsed plans to cache between reconciles: enough for the groups of a cluster."""


def with_complete_labels(pods: Sequence[PodView], owner: Owner) -> tuple[PodView, ...]:
    """Returns the pods whose names belong to the resource, each with the labels that follow from its name."""
    return tuple(labelled for pod in pods if (labelled := with_implied_labels(pod, owner)) is not None)


def with_implied_labels(pod: PodView, owner: Owner) -> PodView | None:
    """Restores the labels that follow from the pod's name, and records the labels that were wrong.

    The name of a worker pod contains group, epoch and index, and no user can change it.

    Returns:
        The pod, or None if its name does not belong to the resource.
    """
    implied_labels = identity.labels_of_name(owner, pod.name)
    if implied_labels is None:
        return None
    lost = {label: value for label, value in implied_labels.items() if pod.labels.get(label) != value}
    if not lost:
        return pod
    labels = {label: value for label, value in {**pod.labels, **implied_labels}.items() if value is not None}
    return replace(pod, labels=labels, lost_labels={**pod.lost_labels, **lost})


def epoch_of(pod: PodView) -> int:
    """Returns the pod's epoch. The pod must come from `with_implied_labels`, so that its label is right."""
    return int(pod.labels[names.LABEL_EPOCH])


def index_of(pod: PodView) -> int:
    """Returns the pod's index in its group. Its label must be right, as in `epoch_of`."""
    return int(pod.labels[names.LABEL_POD_INDEX])


def pods_by_group(pods: Sequence[PodView]) -> dict[int, list[PodView]]:
    """Returns the worker pods of each group, by group index.

    Args:
        pods: pods of `with_complete_labels`, which restores lost labels from the names of the pods.
    """
    groups: dict[int, list[PodView]] = defaultdict(list)
    for pod in pods:
        if pod.labels.get(names.LABEL_COMPONENT) == names.COMPONENT_WORKER:
            groups[int(pod.labels[names.LABEL_GROUP])].append(pod)
    return dict(groups)


def read_trusted_plans(
    observation: ResourceObservation, signer: Signer, allowed: Allowed, specs: Iterable[HeteroInferenceSpec]
) -> dict[str, Plan]:
    """Returns the stored plans that the operator trusts, by the hash in their ConfigMaps' names.

    The hash must match the stored text. A plan without a valid authentication code may come from version
    0.1.0, from an operator with another key, or from another user. It is trusted only if a spec may contain
    all its arguments. Fields that this version does not know are ignored; the hash still covers them.
    """
    args_of_specs = {spec.engine.args for spec in specs}
    plans: dict[str, Plan] = {}
    for manifest in observation.objects:
        plan_hash, text = _read_plan_config_map(manifest, signer.owner)
        if text is None or plan_text_hash(text) != plan_hash:
            continue  # groups with this plan keep serving, and the condition Planned reports PlanLost
        try:
            plan = _parse_plan(text)
        except ContractError:
            continue
        if signer.is_signed_by_us(manifest) or has_only_allowed_args(
            plan.engine.extra_args, args_of_specs, allowed
        ):
            plans[plan_hash] = plan
    return plans


def find_forged_plans(observation: ResourceObservation, signer: Signer) -> tuple[str, ...]:
    """Returns the names of ConfigMaps that are named like a plan but have neither its content nor a code.

    The code is the operator's authentication code of the content. In an installation without a key,
    ConfigMaps have no codes, so the result is empty.
    """
    if signer.key is None:
        return ()
    forged: list[str] = []
    for manifest in observation.objects:
        plan_hash, text = _read_plan_config_map(manifest, signer.owner)
        is_plan = plan_hash != ""
        has_hash = text is not None and plan_text_hash(text) == plan_hash
        if is_plan and not has_hash and not signer.is_signed_by_us(manifest):
            forged.append(manifest["metadata"]["name"])
    return tuple(forged)


def has_only_allowed_args(
    args: tuple[str, ...], args_of_specs: Collection[tuple[str, ...]], allowed: Allowed
) -> bool:
    """Reports whether a plan's arguments come from a known spec or would be allowed in a spec.

    A plan may have more arguments than its spec, because planning appends some.

    Args:
        args: arguments of the plan.
        args_of_specs: arguments of the known specs.
    """
    if any(args in _possible_plan_args(spec_args) for spec_args in args_of_specs):
        return True
    return next(allowed.find_forbidden_arguments(args), None) is None


def _possible_plan_args(spec_args: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Returns each list of arguments that a plan may derive from the arguments of a spec."""
    with_state_dtype_args = with_state_dtype(spec_args)
    return spec_args, with_state_dtype_args, add_keep_alive(spec_args), add_keep_alive(with_state_dtype_args)


def _read_plan_config_map(manifest: Manifest, owner: Owner) -> tuple[str, str | None]:
    """Reads hash and text of a plan from its ConfigMap; returns ("", None) for any other object."""
    prefix, name = identity.plan_config_map(owner, ""), manifest["metadata"]["name"]
    if manifest["kind"] != "ConfigMap" or not name.startswith(prefix):
        return "", None
    return name.removeprefix(prefix), (manifest.get("data") or {}).get(names.PLAN_KEY)


@lru_cache(maxsize=_MAX_CACHED_PLANS)
def _parse_plan(text: str) -> Plan:
    return codec.from_json(Plan, text, tolerant=True)
