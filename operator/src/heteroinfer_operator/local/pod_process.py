"""Translates a Pod manifest into a process on this machine, or refuses it with the reason. Pure.

There are no containers here, so every field of a Pod is in one of three lists:

- applied: the worker container's command, args, env (literal values, keys of ConfigMaps and of the operator's
  Secrets), readinessProbe, GPUs of its resources (as CUDA_VISIBLE_DEVICES) and terminationGracePeriodSeconds;
- accepted without effect: names, labels, images, ports (env and args contain them already), CPU and memory of
  resources (the plan counts them, nothing enforces them), security contexts (the process is the user's own),
  emptyDir (the machine's /tmp and /dev/shm), tolerations (this machine has no taints), livenessProbe (peers
  notice a hanging supervisor by its missing heartbeats);
- refused: every other field, which would otherwise be ignored silently.
"""

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.plan import Device, Plan
from heteroinfer_contract.pod_launch import CpuBinding, engine_cpus
from heteroinfer_operator.api import DEFAULT_GPU_RESOURCE
from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.nodes.demand import REQUIRED, require_label
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.role_demand import unshared_gpu_requirement
from heteroinfer_operator.quantity import parse_quantity

DEFAULT_GRACE_S: Final = 30
"""Kubernetes' own terminationGracePeriodSeconds."""

_POD_FIELDS: Final = frozenset({"apiVersion", "kind", "metadata", "spec"})
_SPEC_FIELDS: Final = frozenset(
    {
        "automountServiceAccountToken", "containers", "enableServiceLinks", "hostname", "restartPolicy",
        "securityContext", "subdomain", "terminationGracePeriodSeconds", "tolerations", "volumes",
    }
)  # fmt: skip
_CONTAINER_FIELDS: Final = frozenset(
    {
        "args", "command", "env", "image", "imagePullPolicy", "livenessProbe", "name", "ports",
        "readinessProbe", "resources", "securityContext", "terminationMessagePolicy", "volumeMounts",
    }
)  # fmt: skip
_SHARED_FOLDERS: Final = frozenset({"/tmp", "/dev/shm"})  # noqa: S108 - they replace the emptyDirs of workers
_NOT_ENFORCED: Final = frozenset({"cpu", "memory", "ephemeral-storage"})
_NO_SECRETS: Final[Mapping[str, Manifest]] = MappingProxyType({})


class UnsupportedPodFieldError(HeteroInferError):
    """A Pod has a field that a process on this machine cannot have.

    Attributes:
        field: path of the field in the manifest.
    """

    reason = "UnsupportedPodField"

    def __init__(self, pod: str, field: str, problem_and_fix: str) -> None:
        super().__init__(f"pod {pod}: {field}: {problem_and_fix}")
        self.field = field


@dataclass(frozen=True, slots=True, kw_only=True)
class PodProcess:
    """The process that runs as one pod.

    Attributes:
        arguments: arguments of the worker's command.
        env: variables that are added to the environment of `heteroinfer up`.
        grace_s: seconds between SIGTERM and SIGKILL.
        health_port: port of the readiness probe; None if the pod has no readinessProbe.
        readiness_path: URL path of the readiness probe.
    """

    name: str
    arguments: tuple[str, ...]
    env: Mapping[str, str]
    num_gpus: int
    grace_s: int
    health_port: int | None
    readiness_path: str


def parse_pod(
    manifest: Manifest,
    config_maps: Mapping[str, Manifest],
    secrets: Mapping[str, Manifest] = _NO_SECRETS,
    node_labels: Mapping[str, str] = IMAGE_PLATFORM,
) -> PodProcess:
    """Translates a Pod into a process.

    Args:
        config_maps: ConfigMaps by name.
        secrets: the operator's Secrets by name. `heteroinfer up` has no Secrets of users.
        node_labels: labels of this machine.

    Raises:
        UnsupportedPodFieldError: the Pod has a field that a process cannot have.
    """
    pod = _FieldReader(manifest["metadata"]["name"], config_maps, secrets)
    pod.refuse_other_fields(manifest, _POD_FIELDS, "")
    spec = manifest["spec"]
    pod.refuse_other_fields(
        {key: value for key, value in spec.items() if not _is_satisfied_by_machine(key, value, node_labels)},
        _SPEC_FIELDS,
        "spec",
    )
    if spec.get("restartPolicy") != "Never":
        pod.refuse(
            "spec.restartPolicy",
            f"must be Never (got {spec.get('restartPolicy')!r}). Report this error with your resource",
        )
    if len(spec["containers"]) != 1:
        pod.refuse(
            "spec.containers",
            f"must have one container (got {len(spec['containers'])}). Remove the others from the role's "
            "template",
        )
    pod.check_volumes(spec)
    container = spec["containers"][0]
    pod.refuse_other_fields(container, _CONTAINER_FIELDS, "spec.containers[0]")
    if container.get("name") != names.CONTAINER_WORKER or len(container.get("command", ())) != 1:
        pod.refuse(
            "spec.containers[0]",
            f"must be container {names.CONTAINER_WORKER} with a command of one word (got "
            f"{container.get('name')!r} with {list(container.get('command', ()))}). Report this error with "
            "your resource",
        )
    port, path = pod.read_readiness_probe(container)
    return PodProcess(
        name=pod.name,
        arguments=tuple(container.get("args", ())),
        env=pod.read_env(container.get("env", ())),
        num_gpus=pod.read_num_gpus(container.get("resources", {})),
        grace_s=spec.get("terminationGracePeriodSeconds", DEFAULT_GRACE_S),
        health_port=port,
        readiness_path=path,
    )


def share_cores(pod: PodProcess, *, cores: float, groups: int, env: Mapping[str, str]) -> PodProcess:
    """Limits the threads of a pod's ranks to their share of this machine's cores, and binds them to no core.

    Supervisors divide the cores among the pods of their group, and do not know of other groups. So ranks of
    two groups could get the same cores. Ranks that spin on the same cores while they wait for each other are
    many times slower. A number of threads that the user set stays (in engine.env, or in `env`).

    Args:
        groups: number of groups on this machine. A single group needs no limit.
        env: the environment of `heteroinfer up`.
    """
    has_ranks = names.ENV_PLAN in pod.env
    if not has_ranks or groups == 1:
        return pod
    plan = Plan.from_json(pod.env[names.ENV_PLAN])
    variables = {names.ENV_CPU_BINDING: CpuBinding.NEVER.value}
    has_user_set_threads = names.ENV_OMP_THREADS in {**env, **pod.env}
    if not has_user_set_threads:
        variables[names.ENV_OMP_THREADS] = str(threads_per_rank(plan, cores=cores, groups=groups))
    return replace(pod, env={**pod.env, **variables})


def threads_per_rank(plan: Plan, *, cores: float, groups: int) -> int:
    """Returns the number of threads of each CPU rank of a group, at least 1.

    The ranks share the group's cores, without the cores of the engine and one core for each GPU rank.
    """
    group_cpus = int(cores / groups)
    num_gpu_ranks = sum(rank.device is Device.GPU for rank in plan.ranks)
    num_cpu_ranks = plan.world_size - num_gpu_ranks
    reserved_cpus = engine_cpus(group_cpus) + num_gpu_ranks
    return max(1, (group_cpus - reserved_cpus) // max(1, num_cpu_ranks))


def _refusal_of_volume(kind: str) -> str:
    """Returns problem and fix of a volume of this kind."""
    if kind in ("persistentVolumeClaim", "image"):
        fix = "Name the model's folder with --model-dir"
    else:
        fix = "Remove model.caBundle, engine.files and the volumes of the role's template, or use a cluster"
    return f"`heteroinfer up` cannot mount a volume of kind {kind}. {fix}"


def _is_satisfied_by_machine(field: str, value: Any, node_labels: Mapping[str, str]) -> bool:
    """Reports whether a field of the pod's spec only selects nodes, and selects this machine.

    Such a field can be ignored. An affinity selects this machine if it has only these terms:

    - a node affinity that excludes nodes with shared GPUs, because this machine shares no GPU
    - a podAffinity to pods of the same group, because they all run on this machine
    """
    if field == "nodeSelector":
        return bool(value.items() <= node_labels.items())
    if field != "affinity":
        return False
    other_terms = {kind: terms for kind, terms in value.items() if kind != "podAffinity"}
    excludes_only_shared_gpus = not other_terms or _only_excludes_shared_gpus(other_terms)
    return excludes_only_shared_gpus and _is_near_own_group_only(value)


def _only_excludes_shared_gpus(affinity: Manifest) -> bool:
    """Reports whether an affinity is the operator's own requirement that GPUs are not shared, and no more.

    The requirement contains the name of the GPU resource, in the label key RESOURCE.sharing-strategy. So this
    function builds the requirement for each label key of the affinity, and compares it with the affinity.
    """
    for expression in _first_expressions(affinity):
        resource = expression["key"].removesuffix(".sharing-strategy")
        unshared_only = require_label({}, unshared_gpu_requirement(resource))
        if affinity == unshared_only:
            return True
    return False


def _is_near_own_group_only(affinity: Manifest) -> bool:
    """Reports whether podAffinity requires only pods of the same group, which run on this machine, too."""
    pod_affinity = affinity.get("podAffinity", {})
    has_only_required_terms = not pod_affinity.keys() - {REQUIRED}
    return has_only_required_terms and all(
        names.LABEL_RESOURCE in term.get("labelSelector", {}).get("matchLabels", {})
        for term in pod_affinity.get(REQUIRED, ())
    )


def _first_expressions(affinity: Manifest) -> list[Manifest]:
    """Returns the first expression of each required node affinity term."""
    terms = affinity.get("nodeAffinity", {}).get(REQUIRED, {}).get("nodeSelectorTerms", ())
    return [term["matchExpressions"][0] for term in terms if term.get("matchExpressions")]


class _FieldReader:
    """Reads the parts of one manifest. Its errors name the pod."""

    def __init__(
        self, name: str, config_maps: Mapping[str, Manifest], secrets: Mapping[str, Manifest]
    ) -> None:
        self.name = name
        self._secrets = secrets
        self._config_maps = config_maps

    def refuse(self, field: str, problem_and_fix: str) -> None:
        """Raises UnsupportedPodFieldError for a field of this pod."""
        raise UnsupportedPodFieldError(self.name, field, problem_and_fix)

    def refuse_other_fields(self, mapping: Manifest, known: frozenset[str], where: str) -> None:
        """Refuses the first field that is not known.

        Args:
            where: path of the mapping in the manifest, for the error.
        """
        for field in sorted(set(mapping) - known):
            self.refuse(
                f"{where}.{field}".lstrip("."),
                "`heteroinfer up` does not support this field. Remove it from the role's template or from "
                "spec.scheduling, or use a cluster",
            )

    def check_volumes(self, spec: Manifest) -> None:
        """Refuses volumes and mounts that a process cannot have.

        A process finds a host path only at the path itself, and emptyDirs only in _SHARED_FOLDERS.
        """
        host_paths = {}
        for index, volume in enumerate(spec.get("volumes", ())):
            if "hostPath" in volume:
                host_paths[volume["name"]] = (volume["hostPath"]["path"], f"spec.volumes[{index}].hostPath")
            elif "emptyDir" not in volume:
                kind = "".join(volume.keys() - {"name"})  # a volume has its name and one kind
                self.refuse(f"spec.volumes[{index}].{kind}", _refusal_of_volume(kind))
        for mount in spec["containers"][0].get("volumeMounts", ()):
            mount_path = mount["mountPath"]
            if mount["name"] in host_paths:
                path, field = host_paths[mount["name"]]
                if path != mount_path:
                    self.refuse(
                        field,
                        f"`heteroinfer up` cannot mount {path} at {mount_path}. Write {path} wherever the "
                        f"resource names {mount_path}, or use a cluster",
                    )
            elif mount_path not in _SHARED_FOLDERS:
                self.refuse(
                    f"spec.containers[0].volumeMounts[{mount['name']}]",
                    f"`heteroinfer up` cannot mount a volume at {mount_path}. Remove the mount from the "
                    "role's template, or use a cluster",
                )

    def read_env(self, variables: Sequence[Manifest]) -> dict[str, str]:
        """Returns the environment variables of the container, with the values of references."""
        env = {}
        for index, variable in enumerate(variables):
            field = f"spec.containers[0].env[{index}]"
            if "valueFrom" in variable:
                env[variable["name"]] = self._read_reference(variable["valueFrom"], f"{field}.valueFrom")
                continue
            value = variable.get("value", "")
            if "$(" in value:  # Kubernetes would expand this reference to another variable
                self.refuse(
                    f"{field}.value",
                    "`heteroinfer up` does not expand $(...). In engine.env, write the value of "
                    f"{variable['name']} without $(...)",
                )
            env[variable["name"]] = value
        return env

    def _read_reference(self, source: Manifest, field: str) -> str:
        """Returns the value that a variable takes from an operator's Secret or a ConfigMap."""
        secret = self._secrets.get(source.get("secretKeyRef", {}).get("name", ""))
        if secret is not None:
            encoded: str = secret["data"][source["secretKeyRef"]["key"]]
            return base64.b64decode(encoded).decode()
        if set(source) != {"configMapKeyRef"}:
            self.refuse(
                field,
                f"`heteroinfer up` cannot read {' or '.join(sorted(source))}. Remove the entry from "
                "engine.env, and export the variable before you start `heteroinfer up`",
            )
        reference = source["configMapKeyRef"]
        config_map = self._config_maps.get(reference["name"], {})
        value = config_map.get("data", {}).get(reference["key"])
        if value is None:
            self.refuse(
                field,
                f"`heteroinfer up` has no ConfigMap {reference['name']} with key {reference['key']}. Write "
                "the value into engine.env",
            )
        return str(value)

    def read_num_gpus(self, resources: Manifest) -> int:
        """Returns the number of GPUs that the container requests; refuses other devices."""
        limits: Mapping[str, Any] = resources.get("limits", {})
        for name in sorted({*limits, *resources.get("requests", {})} - _NOT_ENFORCED):
            if name != DEFAULT_GPU_RESOURCE:
                self.refuse(
                    f"spec.containers[0].resources.limits[{name}]",
                    f"`heteroinfer up` provides only cpu, memory and {DEFAULT_GPU_RESOURCE}. Remove {name} "
                    "from the role's resources, or use a cluster",
                )
        return int(parse_quantity(limits.get(DEFAULT_GPU_RESOURCE, 0)))

    def read_readiness_probe(self, container: Manifest) -> tuple[int | None, str]:
        """Returns port and path of the readiness probe; None and "" without a probe."""
        probe = container.get("readinessProbe")
        if probe is None:
            return None, ""
        if "httpGet" not in probe:
            self.refuse(
                "spec.containers[0].readinessProbe", "must be httpGet. Report this error with your resource"
            )
        number_or_name = probe["httpGet"]["port"]
        numbers = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        return int(numbers.get(number_or_name, number_or_name)), str(probe["httpGet"]["path"])
