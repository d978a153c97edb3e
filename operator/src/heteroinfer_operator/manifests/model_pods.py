"""The pod that downloads a model, or only reads its sizes, before a group starts. Pure.

The pod has no Job, for three reasons:
- The operator must read the pod anyway, for its progress and its termination message.
- The operator itself decides how long to wait after a failure.
- `heteroinfer up` runs the same manifests, and does not support Jobs.
"""

from collections.abc import Mapping
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.model_fetch import CacheCleanup
from heteroinfer_contract.plan import Device
from heteroinfer_operator.api import HeteroInferenceSpec, PodTemplate
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.addressing import ModelFetch, ModelSource
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.manifests.mounted_files import ca_bundle
from heteroinfer_operator.manifests.pod_resources import PodResources
from heteroinfer_operator.manifests.pod_security import PodSecurity
from heteroinfer_operator.manifests.worker_pods import (
    MODEL_VOLUME,
    WorkerImages,
    build_container,
    build_metadata,
    build_pod_spec,
    build_volumes,
    literal_variables,
)

_HOME: Final = {"HOME": "/tmp"}  # noqa: S108 - a volume of the pod


def build_model_pod(
    spec: HeteroInferenceSpec,
    owner: Owner,
    source: ModelSource,
    images: WorkerImages,
    resources: PodResources = PodResources(),  # noqa: B008 - frozen
    cleanup: CacheCleanup | None = None,
    *,
    security: PodSecurity = PodSecurity(),  # noqa: B008 - frozen
) -> dict[str, Any]:
    """Returns the pod that downloads the model (fetch) or only reads its sizes (inspect).

    The termination message of the pod is its result: a FetchedModel after a download, a ModelProfile after an
    inspection, or a Failure.
    """
    template = model_template(spec)
    container = build_container(images.image_for(spec, Device.CPU), source, security)
    amounts = resources.of_model_pod(spec, fetches=source.fetch is not None)
    volumes = build_volumes(spec, source, amounts)
    if source.fetch is None:
        component = names.COMPONENT_INSPECT
        container = {
            **container,
            "args": ["inspect", "--model", source.path],
            "env": literal_variables(_HOME),
        }
    else:
        component = names.COMPONENT_FETCH
        container = _build_fetch_container(spec, container, source.fetch, cleanup)
        volumes = [*map(_without_read_only, volumes), *ca_bundle(spec).volumes]
    container["resources"] = amounts
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": build_metadata(
            owner, model_pod_name(spec, owner), {names.LABEL_COMPONENT: component}, template
        ),
        "spec": images.pulls.add_to(
            {**build_pod_spec(spec, template, security), "containers": [container], "volumes": volumes}
        ),
    }


def model_pod_name(spec: HeteroInferenceSpec, owner: Owner) -> str:
    """Returns the name of the model's pod, with a hash of its inputs: another token gives another name."""
    if identity.is_hub_model(spec):
        return f"{owner.key.name}-fetch-{identity.fetch_key(spec)}"
    return f"{owner.key.name}-inspect-{identity.inspect_key(spec)}"


def model_template(spec: HeteroInferenceSpec) -> PodTemplate | None:
    """Returns the template for the model's pod: that of the first CPU role, because the pod needs no GPU.

    Without a CPU role, returns the template of the first role. Returns None if that role has no template.
    """
    cpu_roles = [role for role in spec.roles if role.device is Device.CPU]
    return (cpu_roles or spec.roles)[0].template


def _build_fetch_container(
    spec: HeteroInferenceSpec,
    container: dict[str, Any],
    fetch: ModelFetch,
    cleanup: CacheCleanup | None,
) -> dict[str, Any]:
    """Returns the container of the pod that downloads a model, with write access to the cache."""
    writable_mounts = [
        {key: value for key, value in mount.items() if key != "readOnly"}
        for mount in container["volumeMounts"]
    ]
    probe = {"httpGet": {"path": names.PATH_HEALTHZ, "port": names.PORT_HEALTH}, "periodSeconds": 10}
    return {
        **container,
        "args": [
            "fetch",
            *("--repository", fetch.repository),
            *("--revision", fetch.revision),
            *("--cache", fetch.cache),
            *("--health-host", fetch.health_host),
            *("--health-port", str(fetch.health_port)),
        ],
        "env": _build_fetch_env(spec, fetch, cleanup),
        "ports": [{"name": names.PORT_HEALTH, "containerPort": fetch.health_port, "protocol": "TCP"}],
        "readinessProbe": probe,
        "volumeMounts": [*writable_mounts, *ca_bundle(spec).mounts],
    }


def _build_fetch_env(
    spec: HeteroInferenceSpec, fetch: ModelFetch, cleanup: CacheCleanup | None
) -> list[dict[str, Any]]:
    """Returns the environment of the pod that downloads a model.

    The user's variables may name a mirror or a proxy. The operator's variables override the user's.
    """
    cleanup_variable = {names.ENV_CACHE_CLEANUP: cleanup.to_json()} if cleanup is not None else {}
    own_variables = literal_variables(
        {**_HOME, names.ENV_HUB_OFFLINE: "0", **cleanup_variable, **ca_bundle(spec).env}
    )
    own_by_name = {variable["name"]: variable for variable in own_variables}
    if fetch.token is not None:
        reference = {"name": fetch.token.name, "key": fetch.token.key}
        own_by_name[names.ENV_HUB_TOKEN] = {
            "name": names.ENV_HUB_TOKEN,
            "valueFrom": {"secretKeyRef": reference},
        }
    user_variables = [variable.dump() for variable in spec.engine.env if variable.name not in own_by_name]
    return [*user_variables, *own_by_name.values()]


def _without_read_only(volume: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a writable copy of the model's claim; returns any other volume unchanged."""
    claim = volume.get("persistentVolumeClaim")
    if volume["name"] != MODEL_VOLUME or claim is None:
        return dict(volume)
    return {"name": MODEL_VOLUME, "persistentVolumeClaim": {"claimName": claim["claimName"]}}
