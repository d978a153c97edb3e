"""URL paths of the kinds of objects that the operator reads and writes. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

from heteroinfer_contract import names
from heteroinfer_operator.nodes.node_assignment import Gang


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of Kubernetes object."""

    name: str
    api_version: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str = "") -> str:
        """Returns the URL path of a collection, an object or a subresource.

        Args:
            namespace: None for all namespaces and for cluster-scoped kinds.
            name: None for the collection.
            subresource: for example `status`.
        """
        root = "/api" if "/" not in self.api_version else "/apis"
        parts = [root, self.api_version]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        parts.append(self.plural)
        if name is not None:
            parts.append(quote(name, safe=""))
        if subresource:
            parts.append(subresource)
        return "/".join(parts)


HETERO_INFERENCE: Final = Kind(
    name=names.KIND, api_version=f"{names.API_GROUP}/{names.API_VERSION}", plural=names.PLURAL
)
POD: Final = Kind(name="Pod", api_version="v1", plural="pods")
SERVICE: Final = Kind(name="Service", api_version="v1", plural="services")
CONFIG_MAP: Final = Kind(name="ConfigMap", api_version="v1", plural="configmaps")
NETWORK_POLICY: Final = Kind(
    name="NetworkPolicy", api_version="networking.k8s.io/v1", plural="networkpolicies"
)
CLAIM: Final = Kind(name="PersistentVolumeClaim", api_version="v1", plural="persistentvolumeclaims")
SECRET: Final = Kind(name="Secret", api_version="v1", plural="secrets")
NODE: Final = Kind(name="Node", api_version="v1", plural="nodes", namespaced=False)
PRIORITY_CLASS: Final = Kind(
    name="PriorityClass", api_version="scheduling.k8s.io/v1", plural="priorityclasses", namespaced=False
)
EVENT: Final = Kind(name="Event", api_version="events.k8s.io/v1", plural="events")
LEASE: Final = Kind(name="Lease", api_version="coordination.k8s.io/v1", plural="leases")

DISRUPTION_BUDGET: Final = Kind(
    name="PodDisruptionBudget", api_version="policy/v1", plural="poddisruptionbudgets"
)
VOLCANO_POD_GROUP: Final = Kind(
    name="PodGroup", api_version="scheduling.volcano.sh/v1beta1", plural="podgroups"
)
COSCHEDULING_POD_GROUP: Final = Kind(
    name="PodGroup", api_version="scheduling.x-k8s.io/v1alpha1", plural="podgroups"
)
WORKLOAD: Final = Kind(name="Workload", api_version="scheduling.k8s.io/v1alpha1", plural="workloads")
POD_GROUP_ALPHA2: Final = Kind(name="PodGroup", api_version="scheduling.k8s.io/v1alpha2", plural="podgroups")
POD_GROUP_BETA: Final = Kind(name="PodGroup", api_version="scheduling.k8s.io/v1beta1", plural="podgroups")

CHILDREN: Final = (SERVICE, NETWORK_POLICY, CONFIG_MAP, DISRUPTION_BUDGET, CLAIM)
"""Kinds of children other than pods. The operator caches them, and writes them by server-side apply."""
GANG_CHILDREN: Final[Mapping[Gang, Kind]] = MappingProxyType(
    {
        Gang.VOLCANO: VOLCANO_POD_GROUP,
        Gang.COSCHEDULING: COSCHEDULING_POD_GROUP,
        Gang.NATIVE: WORKLOAD,
        Gang.NATIVE_ALPHA2: POD_GROUP_ALPHA2,
        Gang.NATIVE_BETA: POD_GROUP_BETA,
    }
)
"""Kinds that describe an epoch to a gang scheduler. Used only if the cluster serves them."""

_WRITABLE: Final = (POD, SECRET, *CHILDREN, *GANG_CHILDREN.values())


def writable_kind(name: str, api_version: str = "") -> Kind:
    """Returns the kind of a child by its name.

    Args:
        api_version: "" if the name is unambiguous.

    Raises:
        ValueError: the operator has no rights to write this kind.
    """
    matching = [kind for kind in _WRITABLE if kind.name == name and api_version in ("", kind.api_version)]
    if len(matching) != 1:
        names_of_kinds = ", ".join(dict.fromkeys(kind.name for kind in _WRITABLE))
        raise ValueError(f"action: kind must be one of {names_of_kinds} (got {name!r})")
    return matching[0]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class NamespacedName:
    """Namespace ("" for cluster-scoped kinds) and name of an object."""

    namespace: str
    name: str

    @classmethod
    def from_object(cls, stored: Mapping[str, Any]) -> "NamespacedName":
        """Returns namespace and name from a stored object's metadata."""
        metadata = stored["metadata"]
        return cls(namespace=metadata.get("namespace", ""), name=metadata["name"])

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"
