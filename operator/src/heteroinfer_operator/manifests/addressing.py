"""How the pods of a group reach each other, their model, and their clients. Pure.

On a cluster these are DNS names and fixed ports; the package `local` gives loopback and free
ports instead (`heteroinfer up`), with the same manifests.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from heteroinfer_contract import names
from heteroinfer_contract.model_fetch import HUB_SCHEME, model_folder
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodAddress
from heteroinfer_operator.api import HeteroInferenceSpec, TokenReference
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import EpochRef, Owner

HOST_PATH_REASON: Final = "HostPathNotAllowed"
DEFAULT_REVISION = "main"
"""Of hubs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFetch:
    """A model that is on a hub, and how a pod fetches it.

    Attributes:
        repository: ORG/MODEL.
        revision: branch, tag or commit.
        cache: root of the cache, inside the pod.
        token: of the hub; None without one, or where pods inherit it.
        health_host: where the pod is reached.
        health_port: of its progress.
    """

    repository: str
    revision: str
    cache: str
    token: TokenReference | None
    health_host: str
    health_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """Where a pod finds the model.

    Attributes:
        path: inside the pod; of a hub's model whose commit is not known yet, the cache's.
        volume: the pod's volume without its name, mounted read-only at MODEL_MOUNT, or
            None where the path is the host's own.
        fetch: how it gets there, or None if it is there.
    """

    path: str
    volume: Mapping[str, Any] | None
    fetch: ModelFetch | None = None

    def at(self, commit: str | None) -> "ModelSource":
        """Returns where pods find the model of this commit of a hub; the same where it comes from none."""
        if self.fetch is None or commit is None:
            return self
        folder = model_folder(self.fetch.repository, commit)
        return replace(self, path=f"{self.fetch.cache}/{folder}")

    def of_revision(self, revision: str | None) -> "ModelSource":
        """Returns the source with another revision to fetch, unless None is given or it comes from no hub."""
        if self.fetch is None or revision is None:
            return self
        return replace(self, fetch=replace(self.fetch, revision=revision))


def host_path_refusal(spec: HeteroInferenceSpec) -> PlanError:
    """Returns the refusal of a model that lies in a folder of the nodes."""
    return PlanError(
        f"model.uri {spec.model.uri} is a path of the nodes, which this operator does not allow: "
        "use pvc://CLAIM/PATH, or install the chart with allowHostPaths=true",
        reason=HOST_PATH_REASON,
    )


def hub_repository(spec: HeteroInferenceSpec) -> str:
    """Returns ORG/MODEL of a hub's model."""
    return spec.model.uri.removeprefix(HUB_SCHEME)


class Addressing(Protocol):
    """Addresses of groups in one world."""

    def pods(self, spec: HeteroInferenceSpec, group: EpochRef, plan: Plan) -> tuple[PodAddress, ...]:
        """Returns the address of each pod, by pod index."""
        ...

    def model(self, spec: HeteroInferenceSpec, owner: Owner) -> ModelSource:
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

    def pods(self, spec: HeteroInferenceSpec, group: EpochRef, plan: Plan) -> tuple[PodAddress, ...]:
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

    def model(self, spec: HeteroInferenceSpec, owner: Owner) -> ModelSource:
        """Returns the mounted claim or host path.

        Raises:
            PlanError: the URI cannot be served on this cluster; the message says what to do.
        """
        scheme, _, rest = spec.model.uri.partition("://")
        if scheme == "pvc":
            claim, _, path = rest.partition("/")
            volume = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
            return ModelSource(path=f"{names.MODEL_MOUNT}/{path}".rstrip("/"), volume=volume)
        if scheme == "oci":
            image, _, folder = rest.partition("#")
            volume = {"image": {"reference": image}}
            return ModelSource(path=f"{names.MODEL_MOUNT}/{folder}".rstrip("/"), volume=volume)
        if scheme == "file":
            if not self.allow_host_paths:
                raise host_path_refusal(spec)
            return ModelSource(
                path=names.MODEL_MOUNT, volume={"hostPath": {"path": rest, "type": "Directory"}}
            )
        return self._hub_model(spec, owner)

    def _hub_model(self, spec: HeteroInferenceSpec, owner: Owner) -> ModelSource:
        cache = spec.model.cache
        if cache is None:
            raise PlanError(
                f"model.uri {spec.model.uri} is fetched into a volume, and spec.model.cache names none: "
                "give cache.claimName (an existing PersistentVolumeClaim) or cache.size (one that is made)",
                reason="ModelCacheNotGiven",
            )
        claim = cache.claim_name or identity.model_claim(owner, cache)
        fetch = ModelFetch(
            repository=hub_repository(spec),
            revision=spec.model.revision or DEFAULT_REVISION,
            cache=names.MODEL_MOUNT,
            token=spec.model.token_secret_ref,
            health_host="0.0.0.0",  # noqa: S104 - the operator and the kubelet ask for its progress
            health_port=names.DEFAULT_HEALTH_PORT,
        )
        volume = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        return ModelSource(path=names.MODEL_MOUNT, volume=volume, fetch=fetch)

    def endpoint(self, spec: HeteroInferenceSpec, owner: Owner) -> str:
        """Returns the URL of the clients' Service."""
        return f"http://{identity.client_service(owner)}.{owner.key.namespace}.svc:{spec.engine.port}/v1"
