"""Messages to users about objects of a resource that the operator cannot write as wanted. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract import names
from heteroinfer_operator.cluster import (
    Action,
    ApplyObject,
    CreateObject,
    DeleteObject,
    Manifest,
    PatchStatus,
    ResourceView,
)
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.reconcile.refusals import (
    CHANGED_BY_OTHERS,
    DELETED_BY_OTHERS,
    MADE_BY_OTHERS,
    NAME_HELD,
    NAME_TAKEN,
    NOT_ANSWERED,
)

_NAMED_FIELDS: Final = 5
_LIMIT_RANGE_ERROR: Final = re.compile(
    r"(maximum|minimum) [a-z.-]+ usage per (Container|Pod) is|max limit to request ratio per|"
    r"must be less than or equal to [a-z.-]+ limit"
)
"""Messages of a LimitRange (`plugin/pkg/admission/limitranger/admission.go`).

The last alternative is the message about a default limit below a request.
"""


_EXCEEDED_QUOTA: Final = re.compile(r"exceeded quota: ([^, ]+), requested: (\S+)")
"""Message of a ResourceQuota: its name and the exceeded amounts (`plugin/pkg/admission/resourcequota`)."""
_CLAIM_LIMIT: Final = re.compile(r"(maximum|minimum) storage usage per PersistentVolumeClaim is")
_MISSING_RUNTIME_CLASS: Final = re.compile(r'RuntimeClass "([^"]+)" not found')
_MISSING_PRIORITY_CLASS: Final = re.compile(r"no PriorityClass with name (\S+) was found")
_NUMBERS_OF_PODS: Final = frozenset({"pods", "count/pods"})
"""Amounts of a ResourceQuota that count pods."""


class ChildError(HeteroInferError):
    """A child cannot be stored as wanted, for a reason of `refusals`. The operator tries again later."""


def refusal_message(action: Action, reason: str) -> str:
    """Returns the message of a refused write: the object, the API server's reason and a known fix."""
    fix = _image_volume_fix(action, reason) or _class_fix(action, reason) or _resources_fix(action, reason)
    return f"the API server refuses {_describe_write(action)}: {reason}" + (f". {fix}" if fix else "")


def _resources_fix(action: Action, reason: str) -> str:
    """Returns a fix if a ResourceQuota or LimitRange refuses an object, or "".

    A user writes the resources of a worker pod into its role. Other pods fetch or read the model, and users
    may not know these pods, so their fix begins with an explanation.
    """
    if not isinstance(action, CreateObject | ApplyObject):
        return ""
    quota_advice, exceeded_amounts = _describe_quota(action.manifest, reason)
    if action.manifest["kind"] == "PersistentVolumeClaim":
        return _claim_fix(reason, quota_advice, exceeded_amounts)
    if action.manifest["kind"] != "Pod":
        return quota_advice
    labels = action.manifest["metadata"].get("labels", {})
    component = labels.get(names.LABEL_COMPONENT)
    if component == names.COMPONENT_WORKER:
        fixes = _worker_fixes(labels.get(names.LABEL_ROLE), quota_advice)
    else:
        fixes = _model_pod_fixes(component, quota_advice)
    if quota_advice:
        return fixes.full_pod_quota if exceeded_amounts & _NUMBERS_OF_PODS else fixes.full_quota
    if "failed quota:" in reason:  # the quota requires that each pod sets limits
        return fixes.missing_limits
    return fixes.limit_range if _LIMIT_RANGE_ERROR.search(reason) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PodFixes:
    """Fixes for a refused pod, by the cause of the refusal.

    Attributes:
        missing_limits: a ResourceQuota requires limits that the pod does not set.
        full_quota: the pod requests more resources than the ResourceQuota has left.
        full_pod_quota: the ResourceQuota allows no more pods.
        limit_range: the pod's resources are outside of the LimitRange.
    """

    missing_limits: str
    full_quota: str
    full_pod_quota: str
    limit_range: str


def _worker_fixes(role: str | None, quota_advice: str) -> _PodFixes:
    """Returns the fixes for a worker pod of this role."""
    return _PodFixes(
        missing_limits=f"Set resources.limits of role {role}, or podResources.worker of the chart",
        full_quota=f"{quota_advice}, or lower resources of role {role}",
        full_pod_quota=f"{quota_advice}, or lower pods of the roles or spec.replicas",
        limit_range=f"Set resources of role {role} that the namespace's LimitRange allows",
    )


def _model_pod_fixes(component: str | None, quota_advice: str) -> _PodFixes:
    """Returns the fixes for a pod that fetches or reads the model."""
    verb = "fetches" if component == names.COMPONENT_FETCH else "reads"
    explanation = f"The operator creates this pod, which {verb} the model. "
    set_resources = f"{explanation}Set spec.model.resources, or podResources.{component} of the chart"
    return _PodFixes(
        missing_limits=set_resources,
        full_quota=f"{explanation}{quota_advice}, or lower spec.model.resources",
        full_pod_quota=f"{explanation}{quota_advice}",
        limit_range=set_resources,
    )


def _describe_quota(manifest: Manifest, reason: str) -> tuple[str, frozenset[str]]:
    """Returns the advice to raise the exceeded quota, and the names of the exceeded amounts.

    Returns "" and no amounts if no quota is exceeded.
    """
    if "exceeded quota:" not in reason:
        return "", frozenset()
    namespace = manifest["metadata"].get("namespace", "")
    found = _EXCEEDED_QUOTA.search(reason)
    name = f" {found[1]}" if found is not None else ""
    amounts = found[2].rstrip(",").split(",") if found is not None else []  # such as pods=1
    place = f" of namespace {namespace}" if namespace else ""
    return f"Raise the quota{name}{place}", frozenset(each.partition("=")[0] for each in amounts)


def _claim_fix(reason: str, quota_advice: str, exceeded_amounts: frozenset[str]) -> str:
    """Returns a fix if a ResourceQuota or LimitRange refuses the claim of the model cache, or "".

    Args:
        reason: message of the API server.
        quota_advice: advice to raise the exceeded quota, or "" if no quota is exceeded.
        exceeded_amounts: names of the quota's exceeded amounts, such as requests.storage.
    """
    if quota_advice:
        is_size = any(amount.endswith("requests.storage") for amount in exceeded_amounts)
        return f"{quota_advice}, or " + (
            "lower spec.model.cache.size"
            if is_size
            else "set spec.model.cache.claimName to an existing claim instead of size"
        )
    limit = _CLAIM_LIMIT.search(reason)
    if limit is None:
        return ""
    if limit[1] == "maximum":
        return "Lower spec.model.cache.size, or raise the limit of the namespace's LimitRange"
    return "Raise spec.model.cache.size, or lower the minimum of the namespace's LimitRange"


def _class_fix(action: Action, reason: str) -> str:
    """Returns a fix if a pod names a RuntimeClass or PriorityClass that does not exist, or ""."""
    if not isinstance(action, CreateObject):
        return ""
    if (missing := _MISSING_RUNTIME_CLASS.search(reason)) is not None:
        role = action.manifest["metadata"].get("labels", {}).get(names.LABEL_ROLE)
        field = "roles[].template.runtimeClassName" + (f" of role {role}" if role else "")
        return f"Create RuntimeClass {missing[1]}, or correct {field}"
    if (missing := _MISSING_PRIORITY_CLASS.search(reason)) is not None:
        return f"Create PriorityClass {missing[1]}, or correct spec.scheduling.priorityClassName"
    return ""


def _image_volume_fix(action: Action, reason: str) -> str:
    """Returns a fix if the cluster does not support image volumes, or "".

    Such an API server drops the `image` field and then refuses the volume because it has no type.
    """
    if not isinstance(action, CreateObject) or "must specify a volume type" not in reason:
        return ""
    if not any("image" in volume for volume in action.manifest.get("spec", {}).get("volumes", ())):
        return ""
    return (
        "This cluster does not support image volumes: they need Kubernetes 1.35, or 1.33 with the feature "
        "gate ImageVolume. Use hf:// or pvc:// in model.uri, and remove image volumes from the spec"
    )


def unanswered_message(action: Action, why: str) -> str:
    """Returns the message about a write without an answer. The operator tries such a write again.

    Args:
        why: why the answer is missing.
    """
    return f"{_describe_write(action)}: the API server has not answered this write ({why}). Trying again"


def _describe_write(action: Action) -> str:
    """Returns the object that an action writes, or the deletion, as words of a message."""
    match action:
        case CreateObject() | ApplyObject():
            return f"{action.manifest['kind']} {action.manifest['metadata']['name']}"
        case DeleteObject():
            return f"the deletion of {action.kind} {action.name}"
        case PatchStatus():
            return "the status"
    return "the finalizer"


def name_taken(child: str) -> ChildError:
    """Returns the error for a child whose name an object of another owner has.

    Args:
        child: kind and name of the object.
    """
    return ChildError(
        f"{child} exists and does not belong to this {names.KIND}. Delete that object, or give the "
        f"{names.KIND} another name",
        reason=NAME_TAKEN,
    )


def name_held(child: str, stored: Manifest) -> ChildError:
    """Returns the error for a child whose name another object still has.

    That object will disappear: it is being deleted, or its owner is gone.
    """
    return ChildError(
        f"{child} {_describe_deletion(stored)}. The operator needs this name and waits", reason=NAME_HELD
    )


def changed_by_others(child: str, drift: Manifest) -> ChildError:
    """Returns the error for a child that another client changes after each write.

    Args:
        drift: the patch that would restore the object.
    """
    return ChildError(
        f"{child}: a webhook or another controller keeps changing {_list_fields(drift)}. Exclude this object "
        "from that webhook or controller",
        reason=CHANGED_BY_OTHERS,
    )


def changed_on_creation(child: str, fields: Sequence[str]) -> ChildError:
    """Returns the error for a pod that a webhook changed on creation, so the operator deleted it."""
    return ChildError(
        f"{child}: a mutating webhook changed {', '.join(fields[:_NAMED_FIELDS])} on creation, so the "
        "operator deleted the pod. Exempt the pods of this namespace from the webhook, or configure the "
        "webhook not to change these fields",
        reason=CHANGED_BY_OTHERS,
    )


def deleted_each_time(child: str) -> ChildError:
    """Returns the error for a child that another client deletes after each creation."""
    return ChildError(
        f"{child}: another controller or a user deletes this object each time the operator creates it. Stop "
        "that controller or user from deleting the object",
        reason=DELETED_BY_OTHERS,
    )


def created_each_time(child: str) -> ChildError:
    """Returns the error for an obsolete object that another client creates after each deletion."""
    return ChildError(
        f"{child}: another controller or a user creates this object each time the operator deletes it. "
        "The object is no longer needed. Stop that controller or user from creating the object",
        reason=MADE_BY_OTHERS,
    )


def finalizer_set_each_time(resource: ResourceView) -> ChildError:
    """Returns the error for a finalizer of earlier versions that another client sets after each removal."""
    others = ", ".join(sorted(resource.finalizer_managers))
    client = f"field manager {others}" if others else "an unknown client"
    return ChildError(
        f"finalizer {names.FINALIZER}: {client} sets this finalizer again after each removal. "
        "If an operator of an earlier version sets the finalizer, uninstall that operator, or let that "
        "operator watch other namespaces. If a tool sets the finalizer, remove the finalizer from the tool's "
        "manifest",
        reason=MADE_BY_OTHERS,
    )


def not_answered(why: str) -> ChildError:
    """Returns the error for a new revision that the API server has not validated yet.

    Args:
        why: why the answer is missing.
    """
    return ChildError(
        "waiting for the API server to validate the pods and ConfigMaps of the new revision by a dry run "
        f"({why}). Running groups stay up until the API server answers",
        reason=NOT_ANSWERED,
    )


def _describe_deletion(stored: Manifest) -> str:
    """Describes why an object with a needed name will disappear.

    Either the object is being deleted, or it belongs to an earlier resource of this name.
    """
    metadata = stored["metadata"]
    if "deletionTimestamp" not in metadata:
        return f"belongs to an earlier {names.KIND} of this name and still exists"
    finalizers = ", ".join(metadata.get("finalizers") or ())
    if not finalizers:
        return "is being deleted"
    return (
        f"is being deleted, but finalizer {finalizers} blocks it. The controller that owns the finalizer "
        "must remove it"
    )


def _list_fields(drift: Manifest) -> str:
    """Returns the first changed fields as a list for a message."""
    return ", ".join(_field_paths(drift)[:_NAMED_FIELDS]) or "content"


def _field_paths(patch: Manifest, prefix: str = "") -> list[str]:
    """Returns the paths of the fields in a patch."""
    paths: list[str] = []
    for key, value in patch.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        # A patch has all labels and owner references, also the unchanged ones. So name a field of metadata as
        # a whole (metadata.labels).
        is_leaf = prefix == "metadata" or not isinstance(value, Mapping) or not value
        paths += [path] if is_leaf else _field_paths(value, path)
    return paths
