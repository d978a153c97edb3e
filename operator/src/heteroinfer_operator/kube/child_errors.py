"""Why a child is not as it should be, though the API server refuses nothing: what users read of it. Pure."""

import re
from collections.abc import Mapping, Sequence
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
_OF_LIMIT_RANGE: Final = re.compile(
    r"(maximum|minimum) [a-z.-]+ usage per (Container|Pod) is|max limit to request ratio per|"
    r"must be less than or equal to [a-z.-]+ limit"
)
"""Source: `plugin/pkg/admission/limitranger/admission.go`; the last is of a default limit below a request."""


class ChildError(HeteroInferError):
    """A child cannot be as it should, for a reason of `refusals`; it is tried again later."""


def refused_words(action: Action, said: str) -> str:
    """Returns who refuses what, in the API server's words."""
    advice = _image_volume_advice(action, said) or _resources_advice(action, said)
    return f"the API server refuses {_written(action)}: {said}" + (f". {advice}" if advice else "")


def _resources_advice(action: Action, said: str) -> str:
    """Returns how to have a pod taken whose resources a ResourceQuota or LimitRange refuses, or ""."""
    if not isinstance(action, CreateObject) or action.manifest["kind"] != "Pod":
        return ""
    labels = action.manifest["metadata"].get("labels", {})
    component = labels.get(names.LABEL_COMPONENT)
    if component == names.COMPONENT_WORKER:
        role = f"role {labels.get(names.LABEL_ROLE)}"
        limits = f"Set resources.limits of {role}, or podResources.worker of the chart"
        lower = f"Raise the quota, or lower resources of {role}"
        fitting = f"Set resources of {role} that the LimitRange of the namespace takes"
    else:
        what = "fetches" if component == names.COMPONENT_FETCH else "reads"
        own = f"The operator makes this pod: it {what} the model. "
        limits = fitting = f"{own}Set spec.model.resources, or podResources.{component} of the chart"
        lower = f"{own}Raise the quota, or lower spec.model.resources"
    if "exceeded quota:" in said:
        return lower
    if "failed quota:" in said:
        return limits
    return fitting if _OF_LIMIT_RANGE.search(said) else ""


def _image_volume_advice(action: Action, said: str) -> str:
    """Returns what to do if the API server drops image volumes and then finds a volume of no kind, or ""."""
    if not isinstance(action, CreateObject) or "must specify a volume type" not in said:
        return ""
    if not any("image" in each for each in action.manifest.get("spec", {}).get("volumes", ())):
        return ""
    return (
        "This cluster has no image volumes: they need Kubernetes 1.35, or 1.33 with the feature gate "
        "ImageVolume. Use hf:// or pvc:// in model.uri, and no volumes of kind image"
    )


def unanswered_words(action: Action, why: str) -> str:
    """Returns what the API server does not answer, and that the write is tried again."""
    return f"the API server has not answered the write of {_written(action)}, which is tried again: {why}"


def _written(action: Action) -> str:
    match action:
        case CreateObject() | ApplyObject():
            return f"{action.manifest['kind']} {action.manifest['metadata']['name']}"
        case DeleteObject():
            return f"the deletion of {action.kind} {action.name}"
        case PatchStatus():
            return "the status"
    return "the finalizer"


def name_taken(what: str) -> ChildError:
    """Returns the error of an object that belongs to somebody else, by its kind and name."""
    return ChildError(
        f"{what} exists and does not belong to this {names.KIND}: delete it, or give the {names.KIND} "
        "another name",
        reason=NAME_TAKEN,
    )


def name_held(what: str, stored: Manifest) -> ChildError:
    """Returns the error of an object that has the name of a child and will go."""
    return ChildError(f"{what} {_describe_going(stored)}; its name is needed", reason=NAME_HELD)


def changed(what: str, drift: Manifest) -> ChildError:
    """Returns the error of an object that others change, by the patch that would mend it."""
    return ChildError(
        f"{what} gets another {_fields(drift)} than was written: a webhook or another "
        "controller changes it; have it leave this object alone",
        reason=CHANGED_BY_OTHERS,
    )


def changed_on_creation(what: str, fields: Sequence[str]) -> ChildError:
    """Returns the error of a pod that was changed while it was created, and so was deleted."""
    return ChildError(
        f"{what} was created with another {', '.join(fields[:_NAMED_FIELDS])} than was sent, and deleted "
        "again: a mutating webhook changes pods. Exempt the pods of this namespace from the webhook, or "
        "have the webhook leave these fields alone",
        reason=CHANGED_BY_OTHERS,
    )


def deleted_each_time(what: str) -> ChildError:
    """Returns the error of a child that is made again and again."""
    return ChildError(
        f"{what} is made again and again, and deleted each time: have whoever deletes it leave this "
        "object alone",
        reason=DELETED_BY_OTHERS,
    )


def made_each_time(what: str) -> ChildError:
    """Returns the error of an object that is not wanted, and deleted again and again."""
    return ChildError(
        f"{what} is not wanted any more, deleted again and again, and made each time: have whoever makes "
        "it leave it out",
        reason=MADE_BY_OTHERS,
    )


def finalizer_set_each_time(resource: ResourceView) -> ChildError:
    """Returns the error of a resource that gets its former finalizer back after each removal."""
    others = ", ".join(sorted(resource.finalizer_managers)) or "unknown"
    return ChildError(
        f"finalizer {names.FINALIZER} is set again each time this operator removes it (by field manager "
        f"{others}). If an operator of an earlier version sets it, uninstall that operator, or have it watch "
        "other namespaces. If a tool sets it, remove the finalizer from the tool's manifest",
        reason=MADE_BY_OTHERS,
    )


def not_answered(what: str) -> ChildError:
    """Returns the error of a revision of which it is not known whether it would be taken, and why."""
    return ChildError(
        f"the API server has not said whether it takes pods and ConfigMaps of the new revision ({what}); "
        "nothing is taken down before",
        reason=NOT_ANSWERED,
    )


def _describe_going(stored: Manifest) -> str:
    metadata = stored["metadata"]
    if "deletionTimestamp" not in metadata:
        return f"belongs to an earlier {names.KIND} of this name, and is not gone yet"
    finalizers = ", ".join(metadata.get("finalizers") or ())
    if not finalizers:
        return "is being deleted"
    return f"is being deleted, and held by {finalizers}: whoever set that must let go of it"


def _fields(drift: Manifest) -> str:
    return ", ".join(_paths(drift)[:_NAMED_FIELDS]) or "content"


def _paths(patch: Manifest, prefix: str = "") -> list[str]:
    """Returns the paths of the fields that a patch writes."""
    found: list[str] = []
    for key, value in patch.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        # Of labels and owners a patch has all, whichever differs.
        whole = prefix == "metadata" or not isinstance(value, Mapping) or not value
        found += [path] if whole else _paths(value, path)
    return found
