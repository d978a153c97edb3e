"""Names and labels of the objects of a resource. Pure."""

import hashlib
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.model_fetch import HUB_SCHEME
from heteroinfer_contract.plan import PodAssignment
from heteroinfer_operator.api import MAX_EPOCH, MAX_GROUPS, HeteroInferenceSpec, ModelCache
from heteroinfer_operator.cluster import ResourceKey

_WORKER: Final = re.compile(
    rf"(0|[1-9][0-9]?)-([1-9][0-9]{{0,{len(str(MAX_EPOCH)) - 1}}})-(0|[1-9][0-9]{{0,2}})"
)
"""What follows the resource's name in that of a worker pod: group, epoch, index of the pod.

Each number has one spelling, so that no two names are of one pod.
"""
_LOOKS_AT_MODEL: Final = re.compile(rf"({names.COMPONENT_INSPECT}|{names.COMPONENT_FETCH})-[0-9a-f]{{10}}")
"""The same of a pod that looks at the model: its component, and a hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The HeteroInference that objects belong to."""

    key: ResourceKey
    uid: str

    @property
    def reference(self) -> dict[str, Any]:
        """Returns the ownerReference of its children: garbage collection ends them with it."""
        return {
            "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
            "kind": names.KIND,
            "name": self.key.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRef:
    """One group, whatever its epoch.

    Attributes:
        index: of the group, from 0.
    """

    owner: Owner
    index: int

    @property
    def display(self) -> str:
        """Returns `namespace/name/index`."""
        return f"{self.owner.key}/{self.index}"

    @property
    def uid(self) -> str:
        """Returns what tells this group from any other that had its name."""
        return f"{self.owner.uid}/{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRef(GroupRef):
    """One epoch of one group.

    Attributes:
        epoch: at least 1; grows with each start.
    """

    epoch: int

    def pod_name(self, pod: int) -> str:
        """Returns the name and hostname of a pod; never used again by another epoch."""
        return f"{self.owner.key.name}-{self.index}-{self.epoch}-{pod}"


def client_service(owner: Owner) -> str:
    """Returns the name of the Service that clients use."""
    return owner.key.name


def group_service(owner: Owner, index: int) -> str:
    """Returns the name of a group's headless Service, and of its NetworkPolicy."""
    return f"{owner.key.name}-{index}-ranks"


def shared_budget(owner: Owner) -> str:
    """Returns the name of the PodDisruptionBudget of all groups."""
    return f"{owner.key.name}-groups"


def plan_config_map(owner: Owner, plan_hash: str) -> str:
    """Returns the name of the ConfigMap that keeps a plan."""
    return f"{owner.key.name}-plan-{plan_hash}"


def metadata(owner: Owner, name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Returns metadata of a child: name, labels, owner."""
    return {
        "name": name,
        "namespace": owner.key.namespace,
        "labels": {
            names.LABEL_RESOURCE: owner.key.name,
            names.LABEL_MANAGED_BY: names.MANAGER,
            "app.kubernetes.io/name": "heteroinfer",
            **labels,
        },
        "ownerReferences": [owner.reference],
    }


def group_metadata(group: GroupRef, name: str) -> dict[str, Any]:
    """Returns metadata of an object of one group."""
    return metadata(group.owner, name, {names.LABEL_GROUP: str(group.index)})


def named_labels(owner: Owner, name: str) -> dict[str, str | None] | None:
    """Returns the labels that follow from a pod's name; a label is None if the pod must not have it.

    Returns None for a pod that is none of ours by its name, such as a copy that somebody made of one.
    """
    prefix = f"{owner.key.name}-"
    if not name.startswith(prefix):
        return None
    resource, rest = {names.LABEL_RESOURCE: owner.key.name}, name.removeprefix(prefix)
    if match := _LOOKS_AT_MODEL.fullmatch(rest):
        return {**resource, names.LABEL_COMPONENT: match[1]}
    if place := find_place(owner, name):
        group, epoch, pod = map(str, place)
        return {
            **resource,
            names.LABEL_COMPONENT: names.COMPONENT_WORKER,
            names.LABEL_GROUP: group,
            names.LABEL_EPOCH: epoch,
            names.LABEL_POD_INDEX: pod,
            names.LABEL_LEADER: "true" if pod == "0" else None,
        }
    return None


def find_place(owner: Owner, name: str) -> tuple[int, int, int] | None:
    """Returns group, epoch and index of the worker pod with this name, None if it names none of ours."""
    match = _WORKER.fullmatch(name.removeprefix(f"{owner.key.name}-"))
    if match is None or not name.startswith(f"{owner.key.name}-") or int(match[1]) >= MAX_GROUPS:
        return None
    return int(match[1]), int(match[2]), int(match[3])


def group_labels(group: GroupRef) -> dict[str, str]:
    """Returns the labels that select the pods of a group, whatever their epoch."""
    return {
        names.LABEL_RESOURCE: group.owner.key.name,
        names.LABEL_COMPONENT: names.COMPONENT_WORKER,
        names.LABEL_GROUP: str(group.index),
    }


def leader_labels(owner: Owner) -> dict[str, str]:
    """Returns the labels that select the leaders of all groups: the clients' endpoints."""
    return {
        names.LABEL_RESOURCE: owner.key.name,
        names.LABEL_COMPONENT: names.COMPONENT_WORKER,
        names.LABEL_LEADER: "true",
    }


def pod_labels(group: EpochRef, pod: PodAssignment, plan_hash: str, revision: str) -> dict[str, str]:
    """Returns the labels of one worker pod."""
    labels = {
        **group_labels(group),
        names.LABEL_EPOCH: str(group.epoch),
        names.LABEL_POD_INDEX: str(pod.index),
        names.LABEL_ROLE: pod.role,
        names.LABEL_DEVICE: pod.device.value,
        names.LABEL_REVISION: revision,
        names.LABEL_PLAN: plan_hash,
    }
    return labels | ({names.LABEL_LEADER: "true"} if pod.index == 0 else {})


_REVISION_CHARS: Final = 10
"""40 bits tell revisions apart. They prove nothing: another spec with the same hash can be computed."""
_LIFE = frozenset({"replicas", "suspend", "restart", "rollout", "drainTimeout", "operatorClass"})
"""What no version has ever counted as a part of a revision."""
_NOT_OF_PODS = _LIFE | {"planning", "startup"}
_NOT_OF_WORKERS = frozenset({"tokenSecretRef", "resources"})
"""Fields of a model that only the pod that fetches or reads it sees."""


def revision(spec: HeteroInferenceSpec) -> str:
    """Returns a hash of the part of a spec whose change needs new pods.

    The number of groups, and how groups are planned, started, restarted and rolled, are not in it: a
    scale is no revision. Nor are the token for a hub and the resources of the pod that fetches, which no
    worker sees, nor are defaults, so that an operator that knows one field more leaves running groups alone.
    """
    return _hash(needs_pods(spec))[:_REVISION_CHARS]


def longer_revision(spec: HeteroInferenceSpec) -> str:
    """Makes the name of a revision whose `revision` is the name of another one already."""
    return _hash(needs_pods(spec))[: 2 * _REVISION_CHARS]


def needs_pods(spec: HeteroInferenceSpec) -> dict[str, Any]:
    """Returns the part of a spec whose change needs new pods; equal for what may run on as it is."""
    return _without(spec, _NOT_OF_PODS)


def first_revision(spec: HeteroInferenceSpec) -> str:
    """Returns the hash that version 0.1.0 gave to a spec: `planning` and `startup` were in it."""
    return _hash(_without(spec, _LIFE))[:_REVISION_CHARS]


def _without(spec: HeteroInferenceSpec, left_out: Collection[str]) -> dict[str, Any]:
    kept = {key: value for key, value in spec.given().items() if key not in left_out}
    kept["model"] = {key: value for key, value in kept["model"].items() if key not in _NOT_OF_WORKERS}
    if "cache" in kept["model"]:
        kept["model"]["cache"] = {
            key: value for key, value in kept["model"]["cache"].items() if key != "keep"
        }
    return kept


def revision_record(owner: Owner, name: str) -> str:
    """Returns the name of the ConfigMap that keeps what a revision was."""
    return f"{owner.key.name}-revision-{name}"


def model_key(spec: HeteroInferenceSpec) -> str:
    """Returns a hash of which model is meant and where it is kept: its profile holds as long as this."""
    meant: dict[str, Any] = {"uri": spec.model.uri, "revision": spec.model.revision}
    if spec.model.cache is not None:
        meant["cache"] = spec.model.cache.settings
    return _hash(meant)[:10]


def fetch_key(spec: HeteroInferenceSpec) -> str:
    """Returns a hash of all that a fetch depends on: model, token, authorities, and the pod's resources."""
    token, resources = spec.model.token_secret_ref, spec.model.resources
    bundle = spec.model.ca_bundle
    meant: dict[str, Any] = {"model": model_key(spec), "token": token.dump() if token else None}
    if bundle is not None:
        meant["caBundle"] = bundle.dump()
    if resources is not None:
        meant["resources"] = resources.dump()
    return _hash(meant)[:10]


def inspect_key(spec: HeteroInferenceSpec) -> str:
    """Returns a hash of all that a pod which only reads a model depends on."""
    resources = spec.model.resources
    if resources is None:
        return model_key(spec)
    return _hash({"model": model_key(spec), "resources": resources.dump()})[:10]


def is_hub_model(spec: HeteroInferenceSpec) -> bool:
    """Returns whether the model comes from a hub, and so is fetched first."""
    return spec.model.uri.startswith(HUB_SCHEME)


def model_claim(owner: Owner, cache: ModelCache) -> str:
    """Returns the name of the claim that is made for a model's cache; other settings are another claim."""
    return f"{_model_claim_prefix(owner.key)}{_hash(cache.settings)[:10]}"


def is_model_claim_of(key: ResourceKey, claim: str) -> bool:
    """Checks whether a claim's name is one that claims for the cache of a resource's model have."""
    return claim.startswith(_model_claim_prefix(key))


def _model_claim_prefix(key: ResourceKey) -> str:
    return f"{key.name}-model-"


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
