"""What is stored, as decisions read it: pods by group, plans by hash; damage loses only itself. Pure."""

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
"""Plans that are not read anew at each reconcile: of the groups that a cluster may have."""


def with_complete_labels(pods: Sequence[PodView], owner: Owner) -> tuple[PodView, ...]:
    """Returns the pods that are ours by their names, each as `read_labels` gives it."""
    return tuple(found for pod in pods if (found := read_labels(pod, owner)) is not None)


def read_labels(pod: PodView, owner: Owner) -> PodView | None:
    """Returns a pod with the labels that its name says, whatever somebody made of them, and which those are.

    Returns:
        None for a pod that is none of ours by its name.
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
    """Returns the epoch in a pod's labels, which are complete."""
    return int(pod.labels[names.LABEL_EPOCH])


def index_of(pod: PodView) -> int:
    """Returns the index of a pod in its group, by its complete labels."""
    return int(pod.labels[names.LABEL_POD_INDEX])


def pods_by_group(pods: Sequence[PodView]) -> dict[int, list[PodView]]:
    """Returns the workers of each group, whose labels are complete."""
    groups: dict[int, list[PodView]] = defaultdict(list)
    for pod in pods:
        if pod.labels.get(names.LABEL_COMPONENT) == names.COMPONENT_WORKER:
            groups[int(pod.labels[names.LABEL_GROUP])].append(pod)
    return dict(groups)


def kept_plans(
    observation: ResourceObservation, signer: Signer, allowed: Allowed, specs: Iterable[HeteroInferenceSpec]
) -> dict[str, Plan]:
    """Reads the plans that are kept, by the hash in the names of their ConfigMaps.

    The hash is the hash of the stored text. A plan without a valid code was written by version 0.1.0, with
    another key, or by someone else: it may ask for nothing but what a spec may ask for.
    What another version has written into one beside what is known here is left out; the hash is the
    name's all the same.
    """
    given, plans = {spec.engine.args for spec in specs}, {}
    for manifest in observation.objects:
        plan_hash, text = _plan_text(manifest, signer.owner)
        if text is None or plan_text_hash(text) != plan_hash:
            continue  # its group serves on, and the status says so
        try:
            plan = _plan(text)
        except ContractError:
            continue
        if signer.vouches(manifest) or has_only(plan.engine.extra_args, given, allowed):
            plans[plan_hash] = plan
    return plans


def forged_plans(observation: ResourceObservation, signer: Signer) -> tuple[str, ...]:
    """Finds the ConfigMaps whose names are those of plans, and whose texts are other ones, by name."""
    if signer.key is None:
        return ()
    found = ((manifest, *_plan_text(manifest, signer.owner)) for manifest in observation.objects)
    return tuple(
        manifest["metadata"]["name"]
        for manifest, plan_hash, text in found
        if plan_hash and (text is None or plan_text_hash(text) != plan_hash) and not signer.vouches(manifest)
    )


def has_only(args: tuple[str, ...], given: Collection[tuple[str, ...]], allowed: Allowed) -> bool:
    """Checks whether a plan's arguments are those of a spec that is accepted, or may be.

    Planning appends to the arguments of a spec (`given`).
    """
    if any(args in _planned(own) for own in given):
        return True
    return next(allowed.forbidden_arguments(args), None) is None


def _planned(own: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    with_state = with_state_dtype(own)
    return own, with_state, add_keep_alive(own), add_keep_alive(with_state)


def _plan_text(manifest: Manifest, owner: Owner) -> tuple[str, str | None]:
    """Finds the hash in the name of a plan's ConfigMap, and the text; None for any other object."""
    prefix, name = identity.plan_config_map(owner, ""), manifest["metadata"]["name"]
    if manifest["kind"] != "ConfigMap" or not name.startswith(prefix):
        return "", None
    return name.removeprefix(prefix), (manifest.get("data") or {}).get(names.PLAN_KEY)


@lru_cache(maxsize=_PLANS_AT_HAND)
def _plan(text: str) -> Plan:
    return codec.from_json(Plan, text, tolerant=True)
