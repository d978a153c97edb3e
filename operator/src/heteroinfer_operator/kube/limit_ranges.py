"""Finds the requests and limits that a LimitRange of the namespace set in a worker pod. Pure."""

from collections.abc import Mapping
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.printable import printable
from heteroinfer_operator.stored_fields import as_object, as_objects, as_text_map

_ANNOTATION: Final = "kubernetes.io/limit-ranger"
"""Annotation that lists the values set by a LimitRange.

Source: `plugin/pkg/admission/limitranger/admission.go`.
"""
_PREFIX: Final = "LimitRanger plugin set:"
_MAX_TEXT: Final = 200


def find_limit_range_values(stored: Mapping[str, Any]) -> str:
    """Returns a text with the requests and limits that a LimitRange set for the worker container, or "".

    An example: `requests cpu=100m, memory=256Mi and limits memory=512Mi`.

    Raises:
        UnreadableError: a field has another type than in a Pod.
    """
    metadata = as_object(stored.get("metadata"), "metadata")
    annotation = as_text_map(metadata.get("annotations"), "annotations").get(_ANNOTATION, "")
    if not annotation:
        return ""
    spec = as_object(stored.get("spec"), "spec")
    containers = as_objects(spec.get("containers"), "containers")
    worker = next(
        (container for container in containers if container.get("name") == names.CONTAINER_WORKER), {}
    )
    resources = as_object(worker.get("resources"), "resources")
    texts = []
    for kind in ("requests", "limits"):
        amounts = as_object(resources.get(kind), kind)
        resource_names = sorted(_read_resource_names(annotation, kind) & amounts.keys())
        if resource_names:
            texts.append(f"{kind} {', '.join(f'{name}={amounts[name]}' for name in resource_names)}")
    return printable(" and ".join(texts))[:_MAX_TEXT]


def _read_resource_names(annotation: str, kind: str) -> set[str]:
    """Returns the resources whose requests or limits a LimitRange set for the worker container.

    An example of the annotation: `LimitRanger plugin set: cpu, memory request for container worker; cpu limit
    for container worker`.

    Args:
        kind: `requests` or `limits`.
    """
    suffix = f" {kind.removesuffix('s')} for container {names.CONTAINER_WORKER}"
    parts = [part.strip() for part in annotation.removeprefix(_PREFIX).split(";")]
    matching = (part.removesuffix(suffix) for part in parts if part.endswith(suffix))
    return {name.strip() for part in matching for name in part.split(",")}
