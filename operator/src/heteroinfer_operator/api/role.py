"""`spec.roles`: the pods of a group. Pure."""

from typing import Annotated, ClassVar, Final

from pydantic import Field

from heteroinfer_contract.plan import MAX_WORLD_SIZE, Device
from heteroinfer_contract.pod_launch import CpuBinding
from heteroinfer_operator.api.base import ByteSize, Model, ResourceQuantity, ValidationRule
from heteroinfer_operator.api.pod_fields import RESOURCE_NAME, keys_rule
from heteroinfer_operator.api.template import PodTemplate
from heteroinfer_operator.quantity import exact_quantity

MAX_PODS_PER_ROLE: Final = 64
MAX_RANKS_PER_POD: Final = 16
"""Feed-forward ranks among them."""
DEFAULT_GPU_RESOURCE: Final = "nvidia.com/gpu"


def _resource_names(name: str) -> ValidationRule:
    words = "resources of a container: cpu, memory, ephemeral-storage, hugepages-SIZE or PREFIX/NAME"
    return keys_rule(name, name, words, RESOURCE_NAME)


def _above_limits(resources: "Resources") -> list[str]:
    """Returns which resources are asked for beyond their limits."""
    limits = resources.limits or {}
    return [
        name
        for name, asked in (resources.requests or {}).items()
        if name in limits and exact_quantity(asked) > exact_quantity(limits[name])
    ]


class Resources(Model):
    """Requests and limits of a worker container, as in a Pod."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        _resource_names("requests"),
        _resource_names("limits"),
        ValidationRule(
            cel="!has(self.requests) || !has(self.limits) || self.requests.all(k, !(k in self.limits) || "
            "quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) <= 0)",
            message="requests: expected no more than limits; lower requests, or raise limits",
            holds=lambda own: not _above_limits(own),
        ),
    )

    requests: Annotated[dict[str, ResourceQuantity], Field(max_length=16)] | None = None
    """What the scheduler sets aside."""
    limits: Annotated[dict[str, ResourceQuantity], Field(max_length=16)] | None = None
    """What the container may use at most."""


class FeedForwardSpec(Model):
    """Ranks in a role's own pods that compute experts and MLPs on CPUs for the pod's other ranks."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="self.ranks >= 1",
            message="feedForward has at least 1 rank; set feedForward.ranks, or remove feedForward",
            holds=lambda own: own.ranks >= 1,
        ),
        ValidationRule(
            cel="!has(self.layers) || self.layers >= 1",
            message="feedForward computes for at least 1 layer; set feedForward.layers to 1 or more, or "
            "leave it out to have it planned",
            holds=lambda own: own.layers is None or own.layers >= 1,
        ),
    )

    ranks: Annotated[int, Field(ge=0, le=MAX_RANKS_PER_POD)] = 1
    """Feed-forward ranks of each pod, at least 1: as many as the node has NUMA nodes is best."""
    cpu: ResourceQuantity
    """Cores of each of them, added to the pod's requests, and to its limits where it has one."""
    memory: ByteSize
    """Memory of each of them, added to the pod's requests, and to its limits where it has one."""
    layers: Annotated[int, Field(ge=0, le=4096)] | None = None
    """Layers whose experts or MLPs they compute; as few as the GPU's memory asks for if not given."""


class RoleSpec(Model):
    """A list of alike pods of a group."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="self.pods >= 1",
            message="a role has at least 1 pod; remove the role or set pods",
            holds=lambda role: role.pods >= 1,
            got="%s with pods %d",
            got_cel=("self.name", "self.pods"),
            got_values=lambda role: (role.name, role.pods),
        ),
        ValidationRule(
            cel="self.ranksPerPod >= 1",
            message="a pod has at least 1 rank; set ranksPerPod",
            holds=lambda role: role.ranks_per_pod >= 1,
            got="%s with ranksPerPod %d",
            got_cel=("self.name", "self.ranksPerPod"),
            got_values=lambda role: (role.name, role.ranks_per_pod),
        ),
        ValidationRule(
            cel="!has(self.layers) || self.layers.all(n, n >= 1)",
            message="a stage has at least 1 layer; set each entry of layers to 1 or more",
            holds=lambda role: role.layers is None or min(role.layers) >= 1,
            got="%s",
            got_cel=("self.name",),
            got_values=lambda role: (role.name,),
        ),
        ValidationRule(
            cel="self.device == 'GPU' || !(has(self.deviceResourceName) || has(self.deviceMemory))",
            message="deviceResourceName and deviceMemory are for device GPU; remove them "
            "(the memory of a CPU role is that of its resources)",
            holds=lambda role: (
                role.device is Device.GPU or (role.device_resource_name or role.device_memory) is None
            ),
            got="%s with device CPU",
            got_cel=("self.name",),
            got_values=lambda role: (role.name,),
        ),
        ValidationRule(
            cel="self.device == 'CPU' || self.cpuBinding == 'Auto'",
            message="cpuBinding is for device CPU; remove it (the ranks of a GPU role compute on their GPUs)",
            holds=lambda role: role.device is Device.CPU or role.cpu_binding is CpuBinding.AUTO,
            got="%s with device GPU",
            got_cel=("self.name",),
            got_values=lambda role: (role.name,),
        ),
        ValidationRule(
            cel=f"!has(self.feedForward) || self.ranksPerPod + self.feedForward.ranks <= {MAX_RANKS_PER_POD}",
            message=f"a pod has at most {MAX_RANKS_PER_POD} ranks, those of feedForward among them; "
            "use fewer",
            holds=lambda role: role.pod_ranks <= MAX_RANKS_PER_POD,
            got="%s",
            got_cel=("self.name",),
            got_values=lambda role: (role.name,),
        ),
    )

    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=20)]
    """Name of the role, a DNS label."""
    device: Device
    """What the role's ranks compute on."""
    pods: Annotated[int, Field(ge=0, le=MAX_PODS_PER_ROLE)] = 1
    """Pods of the role in each group, at least 1."""
    ranks_per_pod: Annotated[int, Field(ge=0, le=MAX_RANKS_PER_POD)] = 1
    """Ranks of each pod, at least 1; a GPU each for device GPU."""
    layers: (
        Annotated[
            tuple[Annotated[int, Field(ge=0, le=4096)], ...], Field(min_length=1, max_length=MAX_WORLD_SIZE)
        ]
        | None
    ) = None
    """Layers of each of the role's stages, in order, each at least 1: for all roles or for none."""
    cpu_binding: CpuBinding = CpuBinding.AUTO
    """Whether threads of CPU ranks are bound to cores, each rank's to one NUMA node where possible.
    Auto: where the pod's CPUs are its own (static CPU manager, or a cpuset). Always: on nodes where
    nothing else computes; a CPU limit below the CPUs of the node still forbids it. Never."""
    device_resource_name: (
        Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$", max_length=317)] | None
    ) = None
    """Extended resource that a GPU is asked for by; nvidia.com/gpu if not given."""
    device_memory: ByteSize | None = None
    """Memory of one GPU; the nodes' own if not given."""
    feed_forward: FeedForwardSpec | None = None
    """CPU ranks in the same pods that compute experts and MLPs, in mode FeedForward."""
    resources: Resources | None = None
    """CPU and memory of each pod; GPUs, and what feedForward takes, are added by the operator."""
    template: PodTemplate | None = None
    """What else may be set on the pods."""

    @property
    def num_ranks(self) -> int:
        """Returns the ranks of all of the role's pods."""
        return self.pods * self.ranks_per_pod

    @property
    def pod_ranks(self) -> int:
        """Returns the ranks of one of its pods, feed-forward ranks among them."""
        return self.ranks_per_pod + (self.feed_forward.ranks if self.feed_forward else 0)

    @property
    def gpu_resource(self) -> str:
        """Returns the extended resource of a GPU role."""
        return self.device_resource_name or DEFAULT_GPU_RESOURCE
