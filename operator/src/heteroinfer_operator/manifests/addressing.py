"""Addresses of a group's pods, of their model, and of the API for clients. Pure.

On a cluster these are DNS names and fixed ports. For `heteroinfer up`, the package `local` uses the loopback
address and free ports in the same manifests.
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
"""Default branch on model hubs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFetch:
    """A model on a hub, and the settings of the pod that downloads it.

    Attributes:
        repository: ORG/MODEL.
        revision: branch, tag or commit.
        cache: root folder of the cache inside the pod.
        token: access token of the hub; None if there is none, or if the process inherits one.
        health_host: address on which the pod serves its progress.
        health_port: port on which the pod serves its progress.
    """

    repository: str
    revision: str
    cache: str
    token: TokenReference | None
    health_host: str
    health_port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The place of the model in a pod.

    Attributes:
        path: path inside the pod; for a hub's model with an unknown commit, the root of the cache.
        volume: volume of the pod, without a name, to mount read-only at MODEL_MOUNT; None if the path is a
            path of the host.
        fetch: settings of the download; None if the model needs none.
    """

    path: str
    volume: Mapping[str, Any] | None
    fetch: ModelFetch | None = None

    def at_commit(self, commit: str | None) -> "ModelSource":
        """Returns the source of a commit of a hub's model; any other source stays the same."""
        if self.fetch is None or commit is None:
            return self
        folder = model_folder(self.fetch.repository, commit)
        return replace(self, path=f"{self.fetch.cache}/{folder}")

    def with_revision(self, revision: str | None) -> "ModelSource":
        """Returns the source with another revision to download; unchanged for None or without a download."""
        if self.fetch is None or revision is None:
            return self
        return replace(self, fetch=replace(self.fetch, revision=revision))


def build_host_path_error(spec: HeteroInferenceSpec) -> PlanError:
    """Returns the error for a model in a folder of the nodes."""
    return PlanError(
        "model.uri: must not be a path on the nodes, because the chart's allowHostPaths is false (got "
        f"{spec.model.uri}). Use pvc://CLAIM/PATH, or install the chart with allowHostPaths=true",
        reason=HOST_PATH_REASON,
    )


def hub_repository(spec: HeteroInferenceSpec) -> str:
    """Returns ORG/MODEL of a hub's model."""
    return spec.model.uri.removeprefix(HUB_SCHEME)


class Addressing(Protocol):
    """Addresses of groups on a cluster or on this machine."""

    def pods(self, spec: HeteroInferenceSpec, group: EpochRef, plan: Plan) -> tuple[PodAddress, ...]:
        """Returns the address of each pod, by pod index."""
        ...

    def find_model_source(self, spec: HeteroInferenceSpec, owner: Owner) -> ModelSource:
        """Returns the place of the model in pods; raises PlanError if pods cannot reach the model."""
        ...

    def endpoint(self, spec: HeteroInferenceSpec, owner: Owner) -> str:
        """Returns the base URL of the OpenAI API for clients."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterAddressing:
    """Addresses on Kubernetes.

    Attributes:
        allow_host_paths: whether pods may mount the folder of a `file://` model from the node.
    """

    allow_host_paths: bool = False

    def pods(self, spec: HeteroInferenceSpec, group: EpochRef, plan: Plan) -> tuple[PodAddress, ...]:
        """Returns DNS names, which the headless Service resolves before the pods are ready."""
        domain = f"{identity.group_service(group.owner, group.index)}.{group.owner.key.namespace}.svc"
        return tuple(
            PodAddress(
                host=f"{group.pod_name(pod.index)}.{domain}",
                api_port=spec.engine.port,
                rendezvous_port=spec.network.rendezvous_port,
            )
            for pod in plan.pods
        )

    def find_model_source(self, spec: HeteroInferenceSpec, owner: Owner) -> ModelSource:
        """Returns the claim, image or host path that pods mount.

        Raises:
            PlanError: the cluster cannot serve the URI; the message has the fix.
        """
        scheme, _, location = spec.model.uri.partition("://")
        if scheme == "pvc":
            claim, _, path = location.partition("/")
            volume = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
            return ModelSource(path=f"{names.MODEL_MOUNT}/{path}".rstrip("/"), volume=volume)
        if scheme == "oci":
            image, _, folder = location.partition("#")
            volume = {"image": {"reference": image}}
            return ModelSource(path=f"{names.MODEL_MOUNT}/{folder}".rstrip("/"), volume=volume)
        if scheme == "file":
            if not self.allow_host_paths:
                raise build_host_path_error(spec)
            return ModelSource(
                path=names.MODEL_MOUNT, volume={"hostPath": {"path": location, "type": "Directory"}}
            )
        return self._hub_model(spec, owner)

    def _hub_model(self, spec: HeteroInferenceSpec, owner: Owner) -> ModelSource:
        """Returns the claim with the cache of a hub's model, and how to fetch the model into it.

        Raises:
            PlanError: the spec names no cache.
        """
        cache = spec.model.cache
        if cache is None:
            raise PlanError(
                f"model.cache: must be set, because {spec.model.uri} is downloaded into a volume. Set "
                "cache.claimName (an existing PersistentVolumeClaim) or cache.size (for a new claim)",
                reason="ModelCacheNotGiven",
            )
        claim = cache.claim_name or identity.model_claim(owner, cache)
        fetch = ModelFetch(
            repository=hub_repository(spec),
            revision=spec.model.revision or DEFAULT_REVISION,
            cache=names.MODEL_MOUNT,
            token=spec.model.token_secret_ref,
            health_host="0.0.0.0",  # noqa: S104 - the operator and the kubelet read the pod's progress
            health_port=names.DEFAULT_HEALTH_PORT,
        )
        volume = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        return ModelSource(path=names.MODEL_MOUNT, volume=volume, fetch=fetch)

    def endpoint(self, spec: HeteroInferenceSpec, owner: Owner) -> str:
        """Returns the URL of the Service for clients."""
        return f"http://{identity.client_service(owner)}.{owner.key.namespace}.svc:{spec.engine.port}/v1"
