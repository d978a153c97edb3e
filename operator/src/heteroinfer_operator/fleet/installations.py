"""Reads the operators of a cluster and the CustomResourceDefinition of HeteroInference."""

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
"""Label with the version of HeteroInfer on all objects of the chart, including the CRD."""
_OPERATOR_SELECTOR: Final = f"app.kubernetes.io/name={names.MANAGER}"
UNKNOWN_VERSION: Final = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstalledOperator:
    """The Deployment of an operator.

    Attributes:
        replicas: wanted pods.
        ready: ready pods.
        account: name of the operator's service account, in the operator's namespace.
        environment: environment variables of the operator's container, except those that Kubernetes fills in.
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
    """The installed CustomResourceDefinition.

    Attributes:
        version: version of the chart that installed it; UNKNOWN_VERSION if another tool did.
        same_schema: whether its schema equals the schema that this client generates.
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
    """Lists the operators of all namespaces, sorted by namespace and name; raises ApiError."""
    listed = await server.get(_DEPLOYMENT.path(), {"labelSelector": _OPERATOR_SELECTOR})
    operators = (_parse_operator(item) for item in listed["items"])
    return tuple(sorted(operators, key=lambda each: each.name))


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
    schemas = {each["name"]: each["schema"]["openAPIV3Schema"] for each in stored["spec"]["versions"]}
    return InstalledCrd(
        version=_version_of(stored), same_schema=schemas.get(names.API_VERSION) == build_schema()
    )


def describe_crd_skew(operator: InstalledOperator, crd_version: str) -> str:
    """Describes the difference between the versions of an operator and of the CRD, and its fix."""
    return (
        f"{operator.name} has version {operator.version}, but the CRD has version {crd_version}. Upgrade the "
        "older of the two. The release with crds.install=true installs the CRD"
    )


def skew_warnings(
    client_version: str, operators: tuple[InstalledOperator, ...], crd: InstalledCrd | None
) -> tuple[str, ...]:
    """Returns a warning for each difference between the versions of client, operators and CRD."""
    warnings = [
        f"operator {operator.name} has version {operator.version}, but this client has version "
        f"{client_version}. Use a client of version {operator.version}"
        for operator in operators
        if operator.version != client_version
    ]
    if crd is None:
        warnings.append("the CRD is not installed. Install the chart with crds.install=true")
    elif crd.version != UNKNOWN_VERSION:  # the version decides, so the schemas need no comparison
        warnings += [
            f"operator {describe_crd_skew(operator, crd.version)}"
            for operator in operators
            if operator.version != crd.version
        ]
    elif not crd.same_schema:
        warnings.append(
            "the CRD has no label with its version, and its schema differs from this client's schema. With a "
            "client of the operator's version, run: heteroinfer crd | kubectl apply --server-side -f -"
        )
    return tuple(warnings)


def _version_of(manifest: Mapping[str, Any]) -> str:
    return str((manifest["metadata"].get("labels") or {}).get(_VERSION_LABEL) or UNKNOWN_VERSION)


def _parse_operator(manifest: Mapping[str, Any]) -> InstalledOperator:
    """Reads an installed operator from its Deployment."""
    pod = manifest["spec"]["template"]["spec"]
    container = pod["containers"][0]
    variables = {each["name"]: each["value"] for each in container.get("env") or () if "value" in each}
    return InstalledOperator(
        name=NamespacedName.from_object(manifest),
        version=_version_of(manifest),
        image=str(container.get("image", "")),
        replicas=int(manifest["spec"].get("replicas", 1)),
        ready=int((manifest.get("status") or {}).get("readyReplicas") or 0),
        account=str(pod.get("serviceAccountName") or "default"),
        environment=MappingProxyType(variables),
    )
