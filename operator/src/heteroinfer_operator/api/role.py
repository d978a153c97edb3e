"""`spec.roles`: the pods of a group. Pure."""

from typing import Annotated, ClassVar, Final

from pydantic import Field

from heteroinfer_contract.plan import MAX_WORLD_SIZE, Device
from heteroinfer_contract.pod_launch import CpuBinding
from heteroinfer_operator.api.base import ByteSize, Model, ResourceQuantity, RuleReason, ValidationRule
from heteroinfer_operator.api.pod_fields import RESOURCE_NAME, keys_rule
from heteroinfer_operator.api.template import PodTemplate
from heteroinfer_operator.quantity import exact_quantity

MAX_PODS_PER_ROLE: Final = 64
MAX_RANKS_PER_POD: Final = 16
"""Maximum number of ranks in a pod, including feed-forward ranks."""
DEFAULT_GPU_RESOURCE: Final = "nvidia.com/gpu"


def _resource_names_rule(name: str) -> ValidationRule:
    """Returns the rule that the keys of requests or limits must be names of resources."""
    requirement = "each key must be cpu, memory, ephemeral-storage, hugepages-SIZE or PREFIX/NAME"
    return keys_rule(name, name, requirement, RESOURCE_NAME)


def _requests_above_limits(resources: "Resources") -> list[str]:
    """Returns the resources whose request exceeds the limit."""
    limits = resources.limits or {}
    return [
        name
        for name, request in (resources.requests or {}).items()
        if name in limits and exact_quantity(request) > exact_quantity(limits[name])
    ]


class Resources(Model):
    """Requests and limits of a worker container, as in a Pod."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        _resource_names_rule("requests"),
        _resource_names_rule("limits"),
        ValidationRule(
            field="requests",
            cel="!has(self.requests) || !has(self.limits) || self.requests.all(k, !(k in self.limits) || "
            "quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) <= 0)",
            message="must not exceed limits",
            fix="Lower requests, or raise limits",
            holds=lambda resources: not _requests_above_limits(resources),
        ),
    )

    requests: Annotated[dict[str, ResourceQuantity], Field(max_length=16)] | None = None
    """Resources that the scheduler reserves for the container, by name. Default: none."""
    limits: Annotated[dict[str, ResourceQuantity], Field(max_length=16)] | None = None
    """Resource limits of the container, by name. Default: none."""


class FeedForwardSpec(Model):
    """CPU ranks in the pods of a GPU role that compute experts and MLPs for the GPU."""

    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS_PER_POD)] = 1
    """Number of feed-forward ranks in each pod. Use the number of NUMA nodes of the machine. If the pod has
    several GPUs, this number must be a multiple of ranksPerPod: each GPU has an equal number of these
    ranks."""
    cpu: ResourceQuantity
    """CPU cores for each feed-forward rank. The operator adds these cores to the pod's requests, and to the
    pod's CPU limit if the pod has such a limit."""
    memory: ByteSize
    """Memory for each feed-forward rank. The operator adds this memory to the pod's requests, and to the
    pod's memory limit if the pod has such a limit."""
    layers: Annotated[int, Field(ge=1, le=4096)] | None = None
    """Number of layers whose experts or MLPs these ranks compute. Default: the smallest number with which the
    rest of the model fits into the GPU's memory, or one more if the GPU then computes long prompts faster."""


class RoleSpec(Model):
    """Equal pods of a group: their number, their device and their resources."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            field="device",
            reason=RuleReason.FORBIDDEN,
            cel="self.device == 'GPU' || !(has(self.deviceResourceName) || has(self.deviceMemory))",
            message="must be GPU if deviceResourceName or deviceMemory is set",
            fix="Remove deviceResourceName and deviceMemory; resources sets the memory of a CPU role",
            holds=lambda role: (
                role.device is Device.GPU
                or (role.device_resource_name is None and role.device_memory is None)
            ),
            got="CPU in role %s",
            got_cel=("self.name",),
            got_values=lambda role: (role.name,),
        ),
        ValidationRule(
            field="cpuBinding",
            reason=RuleReason.FORBIDDEN,
            cel="self.device == 'CPU' || self.cpuBinding == 'Auto'",
            message="must be Auto or unset for device GPU, because its ranks compute on GPUs",
            fix="Remove cpuBinding",
            holds=lambda role: role.device is Device.CPU or role.cpu_binding is CpuBinding.AUTO,
            got="%s in role %s",
            got_cel=("self.cpuBinding", "self.name"),
            got_values=lambda role: (role.cpu_binding.value, role.name),
        ),
        ValidationRule(
            field="ranksPerPod",
            cel=f"!has(self.feedForward) || self.ranksPerPod + self.feedForward.ranks <= {MAX_RANKS_PER_POD}",
            message=f"the sum of ranksPerPod and feedForward.ranks must be at most {MAX_RANKS_PER_POD}",
            fix="Lower ranksPerPod or feedForward.ranks",
            holds=lambda role: role.pod_ranks <= MAX_RANKS_PER_POD,
            got="%d in role %s",
            got_cel=("self.ranksPerPod + self.feedForward.ranks", "self.name"),
            got_values=lambda role: (role.pod_ranks, role.name),
        ),
    )

    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=20)]
    """Name of the role, a DNS label that no other role has."""
    device: Device
    """Device on which the ranks of this role compute. GPU: each rank gets one GPU. CPU: the ranks of a pod
    share its CPUs."""
    pods: Annotated[int, Field(ge=1, le=MAX_PODS_PER_ROLE)] = 1
    """Number of pods of this role in each group."""
    ranks_per_pod: Annotated[int, Field(ge=1, le=MAX_RANKS_PER_POD)] = 1
    """Number of ranks in each pod, without feed-forward ranks."""
    layers: (
        Annotated[
            tuple[Annotated[int, Field(ge=1, le=4096)], ...], Field(min_length=1, max_length=MAX_WORLD_SIZE)
        ]
        | None
    ) = None
    """Number of layers of each stage of this role, in order. Set layers in all roles or in no role. Default:
    chosen by the plan."""
    cpu_binding: CpuBinding = CpuBinding.AUTO
    """Binds the threads of CPU ranks to cores. If possible, all threads of a rank are on one NUMA node. Auto:
    bound if the pod's CPUs are exclusive (static CPU manager or cpuset). Always: bound, for nodes on which
    nothing else computes. A CPU limit below the node's CPUs still prevents the binding. Never: not bound."""
    device_resource_name: (
        Annotated[str, Field(pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$", max_length=317)] | None
    ) = None
    """Name of the extended resource for one GPU. Only for device GPU. Default: nvidia.com/gpu."""
    device_memory: ByteSize | None = None
    """Memory of one GPU, for the plan. Only for device GPU. Default: the memory that node labels report."""
    feed_forward: FeedForwardSpec | None = None
    """Feed-forward ranks: CPU ranks in the pods of this role that compute experts and MLPs for the GPU. Only
    for parallelism.mode FeedForward, or Auto, with which the plan decides whether to use them. In mode
    FeedForward, the ranks of other CPU roles also compute experts and MLPs. Default: none."""
    resources: Resources | None = None
    """CPU and memory of each pod. The operator adds the GPUs and the resources of feedForward. Default:
    none."""
    template: PodTemplate | None = None
    """Further settings of the pods, such as labels, node selector and volumes. Default: none."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks in all pods of the role."""
        return self.pods * self.ranks_per_pod

    @property
    def pod_ranks(self) -> int:
        """Number of ranks in one pod, including feed-forward ranks."""
        return self.ranks_per_pod + (self.feed_forward.ranks if self.feed_forward else 0)

    @property
    def gpu_resource(self) -> str:
        """Name of the extended resource for one GPU."""
        return self.device_resource_name or DEFAULT_GPU_RESOURCE
