"""Worker pods, and the parts that all pods of the operator have in common. Pure.

Pods have no controller, and restartPolicy Never, because a group restarts as a whole. The name of a pod, and
so its address, contains the epoch. So ranks of a new epoch never connect to pods of an old epoch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.group_key import GroupKey
from heteroinfer_contract.plan import Device, Plan, PodAssignment
from heteroinfer_contract.pod_launch import PodAddress, PodLaunch
from heteroinfer_operator.api import HeteroInferenceSpec, PodTemplate, RoleSpec
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.addressing import ModelSource
from heteroinfer_operator.manifests.gang import gang_annotations, gang_fields, gang_labels
from heteroinfer_operator.manifests.group_key_secret import build_key_variable
from heteroinfer_operator.manifests.identity import EpochRef, Owner
from heteroinfer_operator.manifests.image_pulls import ImagePulls
from heteroinfer_operator.manifests.mounted_files import (
    MountedFiles,
    ca_bundle,
    engine_files,
    template_volumes,
)
from heteroinfer_operator.manifests.pod_resources import scratch_limit, shm_limit
from heteroinfer_operator.manifests.pod_security import PodSecurity
from heteroinfer_operator.manifests.scheduling import assigned_fields
from heteroinfer_operator.nodes.node_assignment import NodeAssignment
from heteroinfer_operator.nodes.role_demand import role_resources, template_fields
from heteroinfer_operator.quantity import parse_duration_s

WORKER_COMMAND = "heteroinfer-worker"
_STOP_SIGNAL_GRACE_S = 30
"""Time in which a pod's processes must end after a stop signal. A worker pod first drains its requests."""
_SHM = "shm"
_SCRATCH = "scratch"
_SCRATCH_LIMIT = "16Gi"
"""Limit for compiled code, sockets and files of libraries. A pod that writes more is evicted; without a limit
the node could evict other pods."""
MODEL_VOLUME = "model"
NO_MESH_LABELS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "istio.io/dataplane-mode": "none",
        "kuma.io/sidecar-injection": "disabled",
        "sidecar.istio.io/inject": "false",
    }
)
"""Labels that exclude pods from Istio (ambient and sidecars) and Kuma. Proxies in both pods would delay each
message between ranks, and a sidecar would keep a pod running after its worker has ended."""
NO_MESH_ANNOTATIONS: Final[Mapping[str, str]] = MappingProxyType({"linkerd.io/inject": "disabled"})
"""The same for Linkerd, which reads no labels."""
_OFFLINE = {names.ENV_HUB_OFFLINE: "1"}
"""The model is on a volume, so workers do not connect to a hub unless the user enables it in engine.env."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerImages:
    """Default images of workers."""

    cpu: str
    gpu: str
    pulls: ImagePulls = ImagePulls()  # noqa: RUF009 - frozen

    def default_image(self, device: Device) -> str:
        """Returns the default image for a device."""
        return self.gpu if device is Device.GPU else self.cpu

    def image_for(self, spec: HeteroInferenceSpec, device: Device) -> str:
        """Returns the image of pods with this device: the spec's image, or the default."""
        return spec.engine.image or self.default_image(device)

    def images_of_plan(self, spec: HeteroInferenceSpec, plan: Plan) -> str:
        """Returns the images of all pods of a plan, without duplicates."""
        return ", ".join(dict.fromkeys(self.image_for(spec, pod.device) for pod in plan.pods))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPods:
    """Inputs of all pods of one epoch of a group.

    Attributes:
        images: the operator's default images.
        security: security contexts of the installation.
        key: key of the group, or None without one.
        stored_plan_hash: hash in the name of the plan's stored ConfigMap; "" for the plan's own hash. They
            differ if another version wrote the plan.
    """

    spec: HeteroInferenceSpec
    group: EpochRef
    plan: Plan
    revision: str
    addresses: tuple[PodAddress, ...]
    source: ModelSource
    images: WorkerImages
    security: PodSecurity = PodSecurity()  # noqa: RUF009 - frozen
    node_assignment: NodeAssignment = NodeAssignment()  # noqa: RUF009 - frozen
    key: GroupKey | None = None
    stored_plan_hash: str = ""

    @property
    def plan_hash(self) -> str:
        """Hash in the name of the plan's ConfigMap."""
        return self.stored_plan_hash or self.plan.hash

    def build_pod(self, pod: PodAssignment) -> dict[str, Any]:
        """Returns the manifest of one pod."""
        role = next(role for role in self.spec.roles if role.name == pod.role)
        name = self.group.pod_name(pod.index)
        labels = {
            **gang_labels(self.spec, self.group, self.node_assignment.gang),
            **identity.pod_labels(self.group, pod, self.plan_hash, self.revision),
        }
        metadata = build_metadata(self.group.owner, name, labels, role.template)
        annotations = {
            **metadata.get("annotations", {}),
            **gang_annotations(self.group, self.node_assignment.gang, len(self.plan.pods)),
            names.ANNOTATION_IMAGES: self.images.images_of_plan(self.spec, self.plan),
        }
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**metadata, "annotations": annotations},
            "spec": self.images.pulls.add_to(
                {
                    **build_pod_spec(self.spec, role.template, self.security),
                    **assigned_fields(self.spec, self.group, role, pod, self.node_assignment),
                    **gang_fields(self.spec, self.group, self.node_assignment.gang),
                    "terminationGracePeriodSeconds": termination_grace_s(self.spec),
                    "hostname": name,
                    "subdomain": identity.group_service(self.group.owner, self.group.index),
                    "containers": [self._build_container_of(pod, role)],
                    **_spread_and_claim_fields(role.template),
                    "volumes": [
                        *build_volumes(self.spec, self.source, role_resources(role, pod.device)),
                        *self._mounted_files(role).volumes,
                    ],
                }
            ),
        }

    def _mounted_files(self, role: RoleSpec) -> MountedFiles:
        """Returns the files that the pods of a role mount in addition to the model."""
        return ca_bundle(self.spec) + engine_files(self.spec) + template_volumes(role.template)

    def _build_container_of(self, pod: PodAssignment, role: RoleSpec) -> dict[str, Any]:
        """Returns the container of a pod."""
        address = self.addresses[pod.index]
        container = build_container(self.images.image_for(self.spec, pod.device), self.source, self.security)
        return {
            **container,
            "volumeMounts": [*container["volumeMounts"], *self._mounted_files(role).mounts],
            "args": ["run"],
            "env": self._build_env(pod.index, role),
            "ports": _build_ports(pod, address),
            "resources": {**role_resources(role, pod.device), **_container_claims(role.template)},
            # The client Service ceases to use a leader about 2 s after its last answer.
            "readinessProbe": {
                "httpGet": {"path": names.PATH_READYZ, "port": names.PORT_HEALTH},
                "periodSeconds": 1,
                "timeoutSeconds": 1,
                "failureThreshold": 1,
            },
            # The kubelet ends a container whose supervisor has not answered for about a minute.
            "livenessProbe": {
                "httpGet": {"path": names.PATH_HEALTHZ, "port": names.PORT_HEALTH},
                "periodSeconds": 10,
                "timeoutSeconds": 5,
                "failureThreshold": 6,
            },
        }

    def _build_env(self, pod_index: int, role: RoleSpec) -> list[dict[str, Any]]:
        """Returns the environment of a pod.

        The operator's variables override the user's, and the user's override the defaults (_OFFLINE).
        """
        own_by_name = {variable["name"]: variable for variable in self._own_variables(pod_index, role)}
        user_by_name = {
            variable.name: variable.dump()
            for variable in self.spec.engine.env
            if variable.name not in own_by_name
        }
        defaults = [
            variable for variable in literal_variables(_OFFLINE) if variable["name"] not in user_by_name
        ]
        return [*defaults, *user_by_name.values(), *own_by_name.values()]

    def _own_variables(self, pod_index: int, role: RoleSpec) -> list[dict[str, Any]]:
        """Returns the environment variables that the operator sets in a pod."""
        launch = self._build_launch(pod_index, role)
        plan_variable = {
            "name": names.ENV_PLAN,
            "valueFrom": {
                "configMapKeyRef": {
                    "name": identity.plan_config_map(self.group.owner, self.plan_hash),
                    "key": names.PLAN_KEY,
                }
            },
        }
        fetched_marker = {names.ENV_MODEL_FETCHED: "1"} if self.source.fetch is not None else {}
        timeout = self.spec.step_timeout
        step_timeout = (
            {names.ENV_STEP_TIMEOUT: repr(parse_duration_s(timeout))} if timeout is not None else {}
        )
        key_variables = [build_key_variable(self.group, self.key)] if self.key is not None else []
        # The hash is a literal value. So the worker notices if another user replaced the plan's ConfigMap
        # before the container started.
        plan_hash_variable = {names.ENV_PLAN_HASH: self.plan_hash}
        return [
            plan_variable,
            *key_variables,
            *literal_variables(
                {
                    **plan_hash_variable,
                    **launch.to_env(),
                    **fetched_marker,
                    **step_timeout,
                    **self._mounted_files(role).env,
                }
            ),
        ]

    def _build_launch(self, pod_index: int, role: RoleSpec) -> PodLaunch:
        """Returns the settings of a pod that are not in the plan."""
        launch = PodLaunch(
            group=self.group.display,
            group_uid=self.group.uid,
            epoch=self.group.epoch,
            pod_index=pod_index,
            addresses=self.addresses,
            startup_timeout_s=parse_duration_s(self.spec.startup.timeout),
            drain_timeout_s=parse_duration_s(self.spec.drain_timeout),
            network_interface=self.spec.network.interface,
            cpu_binding=role.cpu_binding,
        )
        if self.spec.network.heartbeat_timeout is None:
            return launch
        return replace(launch, heartbeat_timeout_s=parse_duration_s(self.spec.network.heartbeat_timeout))


def _spread_and_claim_fields(template: PodTemplate | None) -> dict[str, Any]:
    """Returns the fields of a pod's spec for topology spread and resource claims, if the user set them."""
    if template is None:
        return {}
    fields = {
        "topologySpreadConstraints": [
            constraint.dump() for constraint in template.topology_spread_constraints
        ],
        "resourceClaims": [claim.dump() for claim in template.resource_claims],
    }
    return {field: entries for field, entries in fields.items() if entries}


def _container_claims(template: PodTemplate | None) -> dict[str, Any]:
    """Returns the resource claims of the container, which are all claims of the pod."""
    claims = template.resource_claims if template is not None else ()
    return {"claims": [{"name": claim.name} for claim in claims]} if claims else {}


def termination_grace_s(spec: HeteroInferenceSpec) -> int:
    """Returns the seconds in which a worker pod must complete its requests and end its processes."""
    return math.ceil(parse_duration_s(spec.drain_timeout)) + _STOP_SIGNAL_GRACE_S


def build_metadata(
    owner: Owner, name: str, labels: Mapping[str, str], template: PodTemplate | None
) -> dict[str, Any]:
    """Returns a pod's metadata, with the user's labels and annotations.

    The user's values override the operator's defaults that exclude service meshes. The operator's own labels
    override the user's.
    """
    metadata = identity.metadata(owner, name, labels)
    user_labels = (template.labels if template is not None else None) or {}
    user_annotations = (template.annotations if template is not None else None) or {}
    metadata["labels"] = {**NO_MESH_LABELS, **user_labels, **metadata["labels"]}
    metadata["annotations"] = {**NO_MESH_ANNOTATIONS, **user_annotations}
    return metadata


def build_pod_spec(
    spec: HeteroInferenceSpec, template: PodTemplate | None, security: PodSecurity
) -> dict[str, Any]:
    """Returns the fields that every pod's spec has: scheduling, security context, and no API access."""
    fields = template_fields(template)
    context = template.security_context if template is not None else None
    user_context = context.dump() if context is not None else {}
    if spec.scheduling.priority_class_name:
        fields["priorityClassName"] = spec.scheduling.priority_class_name
    return {
        **fields,
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _STOP_SIGNAL_GRACE_S,
        "securityContext": {**security.pod, **user_context},
    }


def build_container(image: str, source: ModelSource, security: PodSecurity) -> dict[str, Any]:
    """Returns the fields that every container has, such as the mounts of scratch folder and model."""
    mounts = [{"name": _SCRATCH, "mountPath": "/tmp"}, {"name": _SHM, "mountPath": "/dev/shm"}]  # noqa: S108
    if source.volume is not None:
        mounts.append({"name": MODEL_VOLUME, "mountPath": names.MODEL_MOUNT, "readOnly": True})  # type: ignore[dict-item]  # a mount's values are of two types
    return {
        "name": names.CONTAINER_WORKER,
        "image": image,
        "command": [WORKER_COMMAND],
        "terminationMessagePolicy": "File",
        "securityContext": dict(security.container),
        "volumeMounts": mounts,
    }


def build_volumes(
    spec: HeteroInferenceSpec, source: ModelSource, resources: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns the volumes that `build_container` mounts, for a container with these resources."""
    shm_size = shm_limit(spec.engine.shm_size, resources)
    volumes: list[dict[str, Any]] = [
        {"name": _SCRATCH, "emptyDir": {"sizeLimit": scratch_limit(_SCRATCH_LIMIT, resources)}},
        {"name": _SHM, "emptyDir": {"medium": "Memory", "sizeLimit": shm_size}},
    ]
    if source.volume is not None:
        volumes.append({"name": MODEL_VOLUME, **source.volume})
    return volumes


def _build_ports(pod: PodAssignment, address: PodAddress) -> list[dict[str, Any]]:
    """Returns the ports of a pod: health, metrics of each rank, and in the leader the API for clients."""
    ports = {names.PORT_HEALTH: address.health_port}
    if pod.index == 0:  # the leader
        ports[names.PORT_API] = address.api_port
    for rank in pod.ranks:
        ports[f"{names.PORT_METRICS}-{rank.local_rank}"] = address.metrics_port + rank.local_rank
    return [{"name": name, "containerPort": port, "protocol": "TCP"} for name, port in ports.items()]


def literal_variables(env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns environment variables with literal values."""
    return [{"name": name, "value": value} for name, value in env.items()]
