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
"""Part of a worker pod's name after the resource's name: group, epoch and index of the pod.

Numbers have no leading zeros, so that a pod has only one name.
"""
_MODEL_POD: Final = re.compile(rf"({names.COMPONENT_INSPECT}|{names.COMPONENT_FETCH})-[0-9a-f]{{10}}")
"""Part of a model pod's name after the resource's name: the component (inspect or fetch) and a hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The HeteroInference that owns objects."""

    key: ResourceKey
    uid: str

    @property
    def reference(self) -> dict[str, Any]:
        """The ownerReference with which garbage collection deletes children together with the resource."""
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
    """A group, without its epoch.

    Attributes:
        index: index of the group, from 0.
    """

    owner: Owner
    index: int

    @property
    def display(self) -> str:
        """Text `namespace/name/index`."""
        return f"{self.owner.key}/{self.index}"

    @property
    def uid(self) -> str:
        """Text that distinguishes this group from an earlier group with the same name."""
        return f"{self.owner.uid}/{self.index}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochRef(GroupRef):
    """An epoch of a group.

    Attributes:
        epoch: at least 1; grows with each start.
    """

    epoch: int

    def pod_name(self, pod: int) -> str:
        """Returns the name and hostname of a pod, which no other epoch uses."""
        return f"{self.owner.key.name}-{self.index}-{self.epoch}-{pod}"


def client_service(owner: Owner) -> str:
    """Returns the name of the Service for clients."""
    return owner.key.name


def group_service(owner: Owner, index: int) -> str:
    """Returns the name of a group's headless Service, and of its NetworkPolicy."""
    return f"{owner.key.name}-{index}-ranks"


def shared_budget(owner: Owner) -> str:
    """Returns the name of the PodDisruptionBudget of all groups."""
    return f"{owner.key.name}-groups"


def plan_config_map(owner: Owner, plan_hash: str) -> str:
    """Returns the name of the ConfigMap with a plan."""
    return f"{owner.key.name}-plan-{plan_hash}"


def metadata(owner: Owner, name: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Returns the metadata of a child: name, labels and owner."""
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
    """Returns the metadata of an object of a group."""
    return metadata(group.owner, name, {names.LABEL_GROUP: str(group.index)})


def labels_of_name(owner: Owner, name: str) -> dict[str, str | None] | None:
    """Returns the labels that follow from a pod's name; None for a label that the pod must not have.

    Returns None for a name that the operator does not give, for example of a user's copy of a pod.
    """
    prefix = f"{owner.key.name}-"
    if not name.startswith(prefix):
        return None
    resource_label, suffix = {names.LABEL_RESOURCE: owner.key.name}, name.removeprefix(prefix)
    if match := _MODEL_POD.fullmatch(suffix):
        return {**resource_label, names.LABEL_COMPONENT: match[1]}
    if parsed := parse_worker_name(owner, name):
        group, epoch, pod = map(str, parsed)
        return {
            **resource_label,
            names.LABEL_COMPONENT: names.COMPONENT_WORKER,
            names.LABEL_GROUP: group,
            names.LABEL_EPOCH: epoch,
            names.LABEL_POD_INDEX: pod,
            names.LABEL_LEADER: "true" if pod == "0" else None,
        }
    return None


def parse_worker_name(owner: Owner, name: str) -> tuple[int, int, int] | None:
    """Returns group, epoch and index of the worker pod with this name; None for any other name."""
    prefix = f"{owner.key.name}-"
    match = _WORKER.fullmatch(name.removeprefix(prefix)) if name.startswith(prefix) else None
    if match is None:
        return None
    group, epoch, pod = int(match[1]), int(match[2]), int(match[3])
    return (group, epoch, pod) if group < MAX_GROUPS else None


def group_labels(group: GroupRef) -> dict[str, str]:
    """Returns the labels that select the pods of a group in any epoch."""
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
"""Length of a revision. These 40 bits distinguish the specs of honest users, but do not prove the content of
a spec: an attacker can compute another spec with the same hash."""
_KEY_CHARS: Final = 10
"""Length of the hashes in the names of model pods and claims."""
_LIFE_FIELDS = frozenset({"replicas", "suspend", "restart", "rollout", "drainTimeout", "operatorClass"})
"""Fields that are not a part of a revision in any version of the operator."""
_NOT_IN_PODS = _LIFE_FIELDS | {"planning", "startup"}
"""Fields whose change needs no new pods."""
_NOT_IN_WORKERS = frozenset({"tokenSecretRef", "resources"})
"""Fields of a model that only the pod that downloads or reads the model uses."""


def revision(spec: HeteroInferenceSpec) -> str:
    """Returns a hash of the part of a spec whose change needs new pods.

    The hash excludes:
    - the number of groups and the settings of planning, start, restart and rollout, so that scaling gives no
      new revision;
    - the hub token and the resources of the download, which no worker uses;
    - default values, so that an operator with one more field does not replace running groups.
    """
    return _hash(pod_fields_of_spec(spec))[:_REVISION_CHARS]


def longer_revision(spec: HeteroInferenceSpec) -> str:
    """Returns a longer hash, for a spec whose `revision` already belongs to another spec of the resource."""
    return _hash(pod_fields_of_spec(spec))[: 2 * _REVISION_CHARS]


def pod_fields_of_spec(spec: HeteroInferenceSpec) -> dict[str, Any]:
    """Returns the part of a spec whose change needs new pods."""
    return _fields_for_revision(spec, _NOT_IN_PODS)


def first_revision(spec: HeteroInferenceSpec) -> str:
    """Returns the hash that version 0.1.0 gave to a spec, which includes `planning` and `startup`."""
    return _hash(_fields_for_revision(spec, _LIFE_FIELDS))[:_REVISION_CHARS]


def _fields_for_revision(spec: HeteroInferenceSpec, excluded: Collection[str]) -> dict[str, Any]:
    """Returns the fields of a spec whose hash becomes its revision, without the excluded fields.

    The hash of a stored spec must stay the same in later versions. So a field counts only if it differs from
    its first default, that is, from its default in the version that added the field. Fields of the model that
    only a download uses do not count either.
    """
    fields = {key: value for key, value in spec.fields_unlike_first_default().items() if key not in excluded}
    fields["model"] = {key: value for key, value in fields["model"].items() if key not in _NOT_IN_WORKERS}
    if "cache" in fields["model"]:
        fields["model"]["cache"] = {
            key: value for key, value in fields["model"]["cache"].items() if key != "keep"
        }
    return fields


def revision_record(owner: Owner, name: str) -> str:
    """Returns the name of the ConfigMap with a revision's record."""
    return f"{owner.key.name}-revision-{name}"


def model_key(spec: HeteroInferenceSpec) -> str:
    """Returns a hash of the model and its cache. A profile is valid while this hash stays the same."""
    inputs: dict[str, Any] = {"uri": spec.model.uri, "revision": spec.model.revision}
    if spec.model.cache is not None:
        inputs["cache"] = spec.model.cache.settings
    return _hash(inputs)[:_KEY_CHARS]


def fetch_key(spec: HeteroInferenceSpec) -> str:
    """Returns a hash of all inputs of a download: model, token, CA bundle, and the pod's resources."""
    token, resources = spec.model.token_secret_ref, spec.model.resources
    bundle = spec.model.ca_bundle
    inputs: dict[str, Any] = {"model": model_key(spec), "token": token.dump() if token else None}
    if bundle is not None:
        inputs["caBundle"] = bundle.dump()
    if resources is not None:
        inputs["resources"] = resources.dump()
    return _hash(inputs)[:_KEY_CHARS]


def inspect_key(spec: HeteroInferenceSpec) -> str:
    """Returns a hash of all inputs of a pod that only reads a model."""
    resources = spec.model.resources
    if resources is None:
        return model_key(spec)
    return _hash({"model": model_key(spec), "resources": resources.dump()})[:_KEY_CHARS]


def is_hub_model(spec: HeteroInferenceSpec) -> bool:
    """Reports whether the model comes from a hub, so that a pod must download it first."""
    return spec.model.uri.startswith(HUB_SCHEME)


def model_claim(owner: Owner, cache: ModelCache) -> str:
    """Returns the name of the claim for a model's cache. Each combination of settings has its own name."""
    return f"{_model_claim_prefix(owner.key)}{_hash(cache.settings)[:_KEY_CHARS]}"


def is_model_claim_of(key: ResourceKey, claim: str) -> bool:
    """Reports whether `model_claim` could give this name to a claim of the resource."""
    return claim.startswith(_model_claim_prefix(key))


def _model_claim_prefix(key: ResourceKey) -> str:
    return f"{key.name}-model-"


def _hash(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
