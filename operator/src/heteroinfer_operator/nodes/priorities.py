"""Priorities of pods. The scheduler may preempt pods of lower priority for a group. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from heteroinfer_operator.nodes.demand import Manifest
from heteroinfer_operator.stored_fields import as_integer, as_name, as_object

_NO_CLASS: Final = 0
"""Priority of a pod without a class if the cluster has no default class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityClassView:
    """The fields of a PriorityClass that plans read.

    Attributes:
        preempts: whether the scheduler preempts pods of lower priority for a pod of this class.
        is_default: whether pods without a class get this class.
    """

    name: str
    value: int
    preempts: bool = True
    is_default: bool = False

    @classmethod
    def of(cls, stored: Manifest) -> "PriorityClassView":
        """Reads a stored PriorityClass.

        Raises:
            UnreadableError: the name is missing, or a field has the wrong type.
        """
        return cls(
            name=as_name(as_object(stored.get("metadata"), "metadata").get("name"), "name"),
            value=as_integer(stored.get("value"), "value"),
            preempts=stored.get("preemptionPolicy") != "Never",
            is_default=bool(stored.get("globalDefault")),
        )


def preempting_priority(class_name: str, classes: Sequence[PriorityClassView] | None) -> int | None:
    """Returns the priority below which the scheduler may preempt other pods for a pod of this class.

    Returns None if the scheduler preempts no pods for such a pod, or if the classes are unknown.

    Args:
        class_name: name of the class; "" for the cluster's default class.
        classes: classes of the cluster; None if unknown.
    """
    if classes is None:
        return None
    if class_name:
        class_of_pod = next((class_ for class_ in classes if class_.name == class_name), None)
        return class_of_pod.value if class_of_pod is not None and class_of_pod.preempts else None
    # If several classes are the default, the API server uses the lowest
    # (plugin/pkg/admission/priority/admission.go@v1.35.4).
    default = min(
        (class_ for class_ in classes if class_.is_default), key=lambda each: each.value, default=None
    )
    if default is None:
        return _NO_CLASS
    return default.value if default.preempts else None
