"""How the pods of a group reach each other, their model, and their clients. Pure.

On a cluster these are DNS names and fixed ports; `local.py` gives loopback and free
ports instead (`heteroinfer up`), with the same manifests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from heteroinfer_contract import names
from heteroinfer_contract.launch import PodAddress
from heteroinfer_contract.plan import Plan
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import GroupRef, Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a pod finds the model.

    Attributes:
        path: inside the pod.
        volume: the pod's volume without its name, mounted read-only at MODEL_MOUNT, or
            None where the path is the host's own.
    """

    path: str
    volume: Mapping[str, Any] | None


class Addressing(Protocol):
    """Addresses of groups in one world."""

    def pods(self, spec: HeteroInferenceSpec, group: GroupRef, plan: Plan) -> tuple[PodAddress, ...]:
        """Returns the address of each pod, by pod index."""
        ...

    def model(self, spec: HeteroInferenceSpec) -> ModelSource:
        """Returns where pods find the model; raises PlanError if they can't."""
        ...

    def endpoint(self, spec: HeteroInferenceSpec, owner: Owner) -> str:
        """Returns the base URL of the OpenAI API for clients."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAddressing:
    """Addresses on Kubernetes.

    Attributes:
        allow_host_paths: whether `file://` may mount a path of the node.
    """

    allow_host_paths: bool = False

    def pods(self, spec: HeteroInferenceSpec, group: GroupRef, plan: Plan) -> tuple[PodAddress, ...]:
        """Returns DNS names that the headless Service answers before the pods are ready."""
        domain = f"{identity.group_service(group.owner, group.index)}.{group.owner.key.namespace}.svc"
        return tuple(
            PodAddress(
                host=f"{group.pod_name(pod.index)}.{domain}",
                api_port=spec.engine.port,
                rendezvous_port=spec.network.rendezvous_port,
            )
            for pod in plan.pods
        )

    def model(self, spec: HeteroInferenceSpec) -> ModelSource:
        """Returns the mounted claim or host path.

        Raises:
            PlanError: the URI cannot be served on this cluster; the message says what to do.
        """
        scheme, _, rest = spec.model.uri.partition("://")
        if scheme == "pvc":
            claim, _, path = rest.partition("/")
            volume = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
            return ModelSource(path=f"{names.MODEL_MOUNT}/{path}".rstrip("/"), volume=volume)
        if scheme == "file":
            if not self.allow_host_paths:
                raise PlanError(
                    f"model.uri {spec.model.uri} is a path of the nodes, which this operator does not allow: "
                    "use pvc://CLAIM/PATH, or install the chart with allowHostPaths=true",
                    reason="HostPathNotAllowed",
                )
            return ModelSource(
                path=names.MODEL_MOUNT, volume={"hostPath": {"path": rest, "type": "Directory"}}
            )
        raise PlanError(
            f"model.uri {spec.model.uri} is not supported yet: download the model into a volume "
            "(hf download ORG/MODEL --local-dir DIR) and use pvc://CLAIM/PATH",
            reason="ModelSourceNotSupported",
        )

    def endpoint(self, spec: HeteroInferenceSpec, owner: Owner) -> str:
        """Returns the URL of the clients' Service."""
        return f"http://{identity.client_service(owner)}.{owner.key.namespace}.svc:{spec.engine.port}/v1"
