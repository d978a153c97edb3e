"""Reads the operators of a cluster and its CustomResourceDefinition."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.api.crd import build_schema
from heteroinfer_operator.kube.paths import Kind, NamespacedName
from heteroinfer_operator.kube.server import NOT_FOUND, ApiError, ApiServer

_DEPLOYMENT: Final = Kind(name="Deployment", api_version="apps/v1", plural="deployments")
_CRD: Final = Kind(
    name="CustomResourceDefinition",
    api_version="apiextensions.k8s.io/v1",
    plural="customresourcedefinitions",
    namespaced=False,
)
_VERSION_LABEL: Final = "app.kubernetes.io/version"
"""The chart labels its objects, the CRD too, with the version of HeteroInfer."""
_OPERATORS: Final = f"app.kubernetes.io/name={names.MANAGER}"
UNKNOWN_VERSION: Final = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledOperator:
    """The Deployment of an operator.

    Attributes:
        account: name of its service account, in its own namespace.
        environment: variables of its container that have a plain value.
    """

    name: NamespacedName
    version: str
    image: str
    replicas: int
    ready: int
    account: str
    environment: Mapping[str, str]

    def dump(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {
            "namespace": self.name.namespace,
            "name": self.name.name,
            "version": self.version,
            "image": self.image,
            "replicas": self.replicas,
            "ready": self.ready,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledCrd:
    """The CustomResourceDefinition.

    Attributes:
        version: of HeteroInfer, if the chart installed it, else UNKNOWN_VERSION.
        same_schema: whether its schema equals the one that this client generates.
    """

    version: str
    same_schema: bool

    def __str__(self) -> str:
        compared = "equals" if self.same_schema else "differs from"
        return f"{self.version} (the schema {compared} this client's)"

    def dump(self) -> dict[str, Any]:
        """Returns JSON values."""
        return {"version": self.version, "sameSchema": self.same_schema}


async def read_operators(server: ApiServer) -> tuple[InstalledOperator, ...]:
    """Lists the operators of all namespaces, by namespace and name; raises ApiError."""
    listed = await server.get(_DEPLOYMENT.path(), {"labelSelector": _OPERATORS})
    found = (_operator(item) for item in listed["items"])
    return tuple(sorted(found, key=lambda each: each.name))


async def read_crd(server: ApiServer) -> InstalledCrd | None:
    """Reads the CustomResourceDefinition; None if it is not installed.

    Raises:
        ApiError: the user lacks the right, or the API server does not answer.
    """
    try:
        stored = await server.get(_CRD.path(None, f"{names.PLURAL}.{names.API_GROUP}"))
    except ApiError as error:
        if error.status == NOT_FOUND:
            return None
        raise
    served = [each for each in stored["spec"]["versions"] if each["name"] == names.API_VERSION]
    return InstalledCrd(
        version=_version(stored),
        same_schema=[each["schema"]["openAPIV3Schema"] for each in served] == [build_schema()],
    )


def skew_warnings(
    client: str, operators: tuple[InstalledOperator, ...], crd: InstalledCrd | None
) -> tuple[str, ...]:
    """Compares the versions of an installation; returns a warning for each pair that differs."""
    warnings = [
        f"operator {each.name} has version {each.version}, this client {client}. "
        f"Use a client of version {each.version}"
        for each in operators
        if each.version != client
    ]
    if crd is None:
        warnings.append("the CRD is not installed. Install the chart with crds.install=true")
    elif crd.version != UNKNOWN_VERSION:
        warnings += [
            f"operator {each.name} has version {each.version}, the CRD {crd.version}. Upgrade the chart that "
            "installs the CRD"
            for each in operators
            if each.version != crd.version
        ]
    elif not crd.same_schema:
        warnings.append(
            "the CRD has no label with its version, and its schema differs from this client's. Apply the CRD "
            "of the operator's version: heteroinfer crd | kubectl apply --server-side -f -"
        )
    return tuple(warnings)


def _version(manifest: Mapping[str, Any]) -> str:
    return str((manifest["metadata"].get("labels") or {}).get(_VERSION_LABEL) or UNKNOWN_VERSION)


def _operator(manifest: Mapping[str, Any]) -> InstalledOperator:
    pod = manifest["spec"]["template"]["spec"]
    (container, *_) = pod["containers"]
    variables = {each["name"]: each["value"] for each in container.get("env") or () if "value" in each}
    return InstalledOperator(
        name=NamespacedName.of(manifest),
        version=_version(manifest),
        image=str(container.get("image", "")),
        replicas=int(manifest["spec"].get("replicas", 1)),
        ready=int((manifest.get("status") or {}).get("readyReplicas") or 0),
        account=str(pod.get("serviceAccountName") or "default"),
        environment=MappingProxyType(variables),
    )
