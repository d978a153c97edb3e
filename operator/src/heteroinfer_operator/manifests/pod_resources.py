"""Requests and limits of pods: those of the spec, completed by the chart's podResources. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Final

from heteroinfer_contract.failure import FailureReason
from heteroinfer_operator.api import HeteroInferenceSpec, Resources, RoleSpec, parse_resources
from heteroinfer_operator.errors import HeteroInferError, SpecError
from heteroinfer_operator.quantity import parse_quantity
from heteroinfer_operator.stored_fields import read_json_parts

EPHEMERAL_STORAGE: Final = "ephemeral-storage"
_ENV: Final = "HETEROINFER_POD_RESOURCES"
_PARTS: Final = ("fetch", "inspect", "worker")
Amounts = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class PodResources:
    """Default requests and limits of an installation.

    Attributes:
        fetch: for the pod that downloads a hub's model. This pod holds pieces of 10 MiB of four files at a
            time; the rest of its memory is page cache, which the kernel can reclaim.
        inspect: for the pod that only reads a model.
        worker: for workers.
    """

    fetch: Resources = field(
        default=Resources(requests={"cpu": "250m", "memory": "512Mi"}, limits={"memory": "2Gi"})
    )
    inspect: Resources = field(
        default=Resources(requests={"cpu": "100m", "memory": "128Mi"}, limits={"memory": "512Mi"})
    )
    worker: Resources = field(default=Resources())

    @classmethod
    def from_json(cls, text: str) -> "PodResources":
        """Reads the chart's podResources; "" gives the defaults.

        Raises:
            HeteroInferError: the text is not valid.
        """
        try:
            parts = read_json_parts(text, _PARTS)
        except ValueError as error:
            raise _build_error(str(error)) from error
        return cls(**{name: _parse_part(name, part) for name, part in parts.items() if part is not None})

    def of_model_pod(self, spec: HeteroInferenceSpec, *, fetches: bool) -> dict[str, Any]:
        """Returns the resources of the pod that downloads or reads the model."""
        return add_defaults(spec.model.resources, self.fetch if fetches else self.inspect)

    def complete_roles(self, spec: HeteroInferenceSpec) -> HeteroInferenceSpec:
        """Returns a spec with default resources in its roles, for pods and plans.

        Revisions are computed from the spec without these defaults, so another default gives no new revision.
        """
        if self.worker == Resources():
            return spec
        return spec.changed(roles=tuple(self._complete_role(role) for role in spec.roles))

    def _complete_role(self, role: RoleSpec) -> RoleSpec:
        """Returns a role with default resources in place of those that the role does not set."""
        resources = add_defaults(role.resources, self.worker)
        return role.changed(
            resources=Resources(requests=resources.get("requests"), limits=resources.get("limits"))
        )


def add_defaults(given: Resources | None, defaults: Resources) -> dict[str, Any]:
    """Returns the given resources with defaults for missing amounts.

    The API server refuses a request above its limit. So a default limit is raised to the given request, and a
    default request is lowered to the given limit.
    """
    given = given or Resources()
    limits = _with_defaults(given.limits, defaults.limits, given.requests, max)
    requests = _with_defaults(given.requests, defaults.requests, given.limits, min)
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def scratch_limit(limit: str, resources: Mapping[str, Any]) -> str:
    """Returns the size limit of a scratch volume: `limit`, or less if the container may use less storage.

    The volume counts as ephemeral storage of the container.
    """
    return _lower_limit(limit, resources, EPHEMERAL_STORAGE)


def shm_limit(limit: str, resources: Mapping[str, Any]) -> str:
    """Returns the size limit of /dev/shm: `limit`, or the memory limit of the container if it is lower.

    The volume counts as memory of the container. The kubelet mounts it with the lower of both limits, too
    (`calculateEmptyDirMemorySize` in Kubernetes 1.35.4), so the pod shows the size that it really gets.
    """
    return _lower_limit(limit, resources, "memory")


def _lower_limit(limit: str, resources: Mapping[str, Any], name: str) -> str:
    """Returns the container's limit for a resource if this is below `limit`, else `limit`.

    A limit of 0 means no limit, both for containers and for volumes.
    """
    container_limit = (resources.get("limits") or {}).get(name, "0")
    is_lower = 0 < parse_quantity(container_limit) < parse_quantity(limit)
    return str(container_limit) if is_lower else limit


def _with_defaults(
    given: Amounts | None, defaults: Amounts | None, bounds: Amounts | None, choose: Any
) -> Any:
    """Returns the given amounts, with defaults for missing amounts. A default beyond its bound is the bound.

    Args:
        bounds: bounds of the defaults: the given requests for limits, the given limits for requests.
        choose: `max` if the bounds are lower bounds, `min` if they are upper bounds.
    """

    def amount(text: str) -> Fraction:
        return parse_quantity(text)

    bounds, given = bounds or {}, given or {}
    missing = {name: value for name, value in (defaults or {}).items() if name not in given}
    bounded_defaults = {
        name: choose(value, bounds[name], key=amount) if name in bounds else value
        for name, value in missing.items()
    }
    return {**bounded_defaults, **given}


def _parse_part(name: str, part: object) -> Resources:
    """Parses the requests and limits for one kind of pod (fetch, inspect or worker)."""
    if not isinstance(part, Mapping):
        raise _build_error(f"{name}: must be an object with requests and limits")
    try:
        return parse_resources(_numbers_as_texts(part), name)
    except SpecError as error:
        raise _build_error("; ".join(error.problems)) from error


def _numbers_as_texts(part: Any) -> Any:
    """Converts numbers to texts, because Helm writes an amount such as 0.5 as a number."""
    if isinstance(part, dict):
        return {key: _numbers_as_texts(value) for key, value in part.items()}
    is_number = isinstance(part, int | float) and not isinstance(part, bool)
    return str(part) if is_number else part


def _build_error(message: str) -> HeteroInferError:
    """Returns the error for an invalid podResources of the chart."""
    return HeteroInferError(
        f"{_ENV} (podResources of the chart): {message}. Correct podResources in the chart's values",
        reason=FailureReason.BAD_SETTINGS.value,
    )
