"""Security contexts that an installation sets on the pods of resources. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_contract.failure import FailureReason
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.stored_fields import read_json_parts

_USER: Final = 65532
"""Id of the user in the images: `nonroot` by the convention of distroless images."""
_POD_CONTEXT: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "runAsNonRoot": True,
        "runAsUser": _USER,
        "runAsGroup": _USER,
        "fsGroup": _USER,
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }
)
_CONTAINER_CONTEXT: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
)
_PARTS: Final = ("pod", "container")


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSecurity:
    """Security contexts of workers, and of the pods that download or read a model.

    Attributes:
        pod: context of the pod. Clusters with a range of user ids for each namespace add missing ids.
        container: context of the container.
    """

    pod: Mapping[str, Any] = field(default_factory=lambda: dict(_POD_CONTEXT))
    container: Mapping[str, Any] = field(default_factory=lambda: dict(_CONTAINER_CONTEXT))

    @classmethod
    def from_json(cls, text: str) -> "PodSecurity":
        """Reads the chart's workerPods; "" gives the defaults.

        Raises:
            HeteroInferError: the text is not valid.
        """
        try:
            parts = read_json_parts(text, _PARTS)
        except ValueError as error:
            raise _build_error(text) from error
        if not all(isinstance(part, dict) for part in parts.values()):
            raise _build_error(text)
        return cls(**parts)


def _build_error(text: str) -> HeteroInferError:
    """Returns the error for an invalid workerPods of the chart."""
    return HeteroInferError(
        f"HETEROINFER_POD_SECURITY (workerPods of the chart): must be a JSON object with the objects "
        f"{' and '.join(_PARTS)} (got {text[:200]!r}). "
        "Correct workerPods in the chart's values",
        reason=FailureReason.BAD_SETTINGS.value,
    )
