"""What is stored, as decisions read it: pods by group, plans by hash; damage loses only itself. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from heteroinfer_contract import codec, names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import Plan
from heteroinfer_operator.cluster import PodView, ResourceObservation
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import Owner

_PLANS_AT_HAND: Final = 4096
"""Plans that are not read anew at each reconcile: of the groups that a cluster may have."""


def with_complete_labels(pods: Sequence[PodView], owner: Owner) -> tuple[PodView, ...]:
    """Returns the pods that are ours by their names, each as `read_labels` gives it."""
    return tuple(found for pod in pods if (found := read_labels(pod, owner)) is not None)


def read_labels(pod: PodView, owner: Owner) -> PodView | None:
    """Returns a pod with the labels that its name says, whatever somebody made of them, and which those are.

    Args:
        pod: of the resource.
        owner: the resource.

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


def pods_by_group(pods: Sequence[PodView]) -> dict[int, list[PodView]]:
    """Returns the workers of each group, whose labels are complete."""
    groups: dict[int, list[PodView]] = defaultdict(list)
    for pod in pods:
        if pod.labels.get(names.LABEL_COMPONENT) == names.COMPONENT_WORKER:
            groups[int(pod.labels[names.LABEL_GROUP])].append(pod)
    return dict(groups)


def kept_plans(observation: ResourceObservation, owner: Owner) -> dict[str, Plan]:
    """Returns the plans that are kept, by the hash in the names of their ConfigMaps.

    What another version has written into one beside what is known here is left out; the hash is the
    name's all the same.
    """
    prefix, plans = identity.plan_config_map(owner, ""), {}
    for manifest in observation.objects:
        name, text = manifest["metadata"]["name"], (manifest.get("data") or {}).get(names.PLAN_KEY)
        if manifest["kind"] != "ConfigMap" or text is None or not name.startswith(prefix):
            continue
        try:
            plans[name.removeprefix(prefix)] = _plan(text)
        except ContractError:
            continue  # its group serves on, and the status says so
    return plans


@lru_cache(maxsize=_PLANS_AT_HAND)
def _plan(text: str) -> Plan:
    return codec.from_json(Plan, text, tolerant=True)
