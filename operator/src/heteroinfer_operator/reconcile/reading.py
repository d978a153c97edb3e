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

_PLANS_AT_HAND: Final = 4096
"""Number of parsed plans to cache between reconciles: enough for the groups of a cluster."""


def with_complete_labels(pods: Sequence[PodView], owner: Owner) -> tuple[PodView, ...]:
    """Keeps the pods whose names belong to the resource, each with the labels from `read_labels`."""
    return tuple(found for pod in pods if (found := read_labels(pod, owner)) is not None)


def read_labels(pod: PodView, owner: Owner) -> PodView | None:
    """Restores the labels that the pod's name implies, and records the labels that differed.

    Returns:
        The pod, or None if its name does not belong to the resource.
    """
    named = identity.named_labels(owner, pod.name)
    if named is None:
        return None
    lost = {label: value for label, value in named.items() if pod.labels.get(label) != value}
    if not lost:
        return pod
    labels = {label: value for label, value in {**pod.labels, **named}.items() if value is not None}
    return replace(pod, labels=labels, lost_labels={**pod.lost_labels, **lost})


def epoch_of(pod: PodView) -> int:
    """Epoch in the labels of a pod from `read_labels`."""
    return int(pod.labels[names.LABEL_EPOCH])


def index_of(pod: PodView) -> int:
    """Index in the group, from the labels of a pod from `read_labels`."""
    return int(pod.labels[names.LABEL_POD_INDEX])


def pods_by_group(pods: Sequence[PodView]) -> dict[int, list[PodView]]:
    """Groups worker pods from `read_labels` by group index."""
    groups: dict[int, list[PodView]] = defaultdict(list)
    for pod in pods:
        if pod.labels.get(names.LABEL_COMPONENT) == names.COMPONENT_WORKER:
            groups[int(pod.labels[names.LABEL_GROUP])].append(pod)
    return dict(groups)


def kept_plans(
    observation: ResourceObservation, signer: Signer, allowed: Allowed, specs: Iterable[HeteroInferenceSpec]
) -> dict[str, Plan]:
    """Reads the stored plans, by the hash in the names of their ConfigMaps.

    The hash must match the stored text. Version 0.1.0, an operator with another key, or another user wrote
    a plan without a valid code: such a plan may contain only arguments that a spec may contain. Fields that
    this version does not know are ignored; the hash still covers them.
    """
    given, plans = {spec.engine.args for spec in specs}, {}
    for manifest in observation.objects:
        plan_hash, text = _plan_text(manifest, signer.owner)
        if text is None or plan_text_hash(text) != plan_hash:
            continue  # its group keeps serving, and Planned reports PlanLost
        try:
            plan = _plan(text)
        except ContractError:
            continue
        if signer.vouches(manifest) or has_only(plan.engine.extra_args, given, allowed):
            plans[plan_hash] = plan
    return plans


def forged_plans(observation: ResourceObservation, signer: Signer) -> tuple[str, ...]:
    """Names of ConfigMaps with the name of a plan but with other content."""
    if signer.key is None:
        return ()
    found = ((manifest, *_plan_text(manifest, signer.owner)) for manifest in observation.objects)
    return tuple(
        manifest["metadata"]["name"]
        for manifest, plan_hash, text in found
        if plan_hash and (text is None or plan_text_hash(text) != plan_hash) and not signer.vouches(manifest)
    )


def has_only(args: tuple[str, ...], given: Collection[tuple[str, ...]], allowed: Allowed) -> bool:
    """Checks whether a plan's arguments come from a known spec (`given`) or would be allowed in a spec.

    Planning appends arguments to those of the spec.
    """
    if any(args in _planned(own) for own in given):
        return True
    return next(allowed.forbidden_arguments(args), None) is None


def _planned(own: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    with_state = with_state_dtype(own)
    return own, with_state, add_keep_alive(own), add_keep_alive(with_state)


def _plan_text(manifest: Manifest, owner: Owner) -> tuple[str, str | None]:
    """Reads hash and text of a plan from its ConfigMap; ("", None) for any other object."""
    prefix, name = identity.plan_config_map(owner, ""), manifest["metadata"]["name"]
    if manifest["kind"] != "ConfigMap" or not name.startswith(prefix):
        return "", None
    return name.removeprefix(prefix), (manifest.get("data") or {}).get(names.PLAN_KEY)


@lru_cache(maxsize=_PLANS_AT_HAND)
def _plan(text: str) -> Plan:
    return codec.from_json(Plan, text, tolerant=True)
