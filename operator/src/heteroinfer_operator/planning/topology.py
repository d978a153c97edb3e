"""Which rank sits where: devices of the roles, order of the stages, seats in rank order. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from heteroinfer_contract.plan import Device, Mode
from heteroinfer_contract.refused_args import TENSOR_CPU_FIRST
from heteroinfer_operator.api import HeteroInferenceSpec, RoleSpec, StageOrder
from heteroinfer_operator.errors import PlanError, PlanReason
from heteroinfer_operator.planning.inventory import Inventory


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedRole:
    """A role and what its ranks really compute on.

    Attributes:
        device: the role's own, or CPU for a GPU role when GPUs are missing.
    """

    role: RoleSpec
    device: Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The position of a rank; its rank is its number among all seats.

    Attributes:
        pod: index of its pod.
    """

    pod: int
    local_rank: int
    placed: PlacedRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Who sits where, before anyone has layers.

    Attributes:
        tensor: ranks of a stage.
        stages: the seats of each stage, in rank order.
    """

    tensor: int
    stages: tuple[tuple[Seat, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def cpu_roles(self) -> frozenset[str]:
        """Roles with ranks that compute on CPUs."""
        placed = [seat.placed for stage in self.stages for seat in stage]
        return frozenset(each.role.name for each in placed if each.device is Device.CPU)

    @property
    def has_cpu(self) -> bool:
        """Returns whether any rank computes on a CPU."""
        return bool(self.cpu_roles)

    @property
    def is_mixed(self) -> bool:
        """Returns whether GPUs and CPUs compute together."""
        return len({seat.placed.device for stage in self.stages for seat in stage}) > 1

    @property
    def has_mixed_stage(self) -> bool:
        """Returns whether GPUs and CPUs split the same layers."""
        return any(len({seat.placed.device for seat in stage}) > 1 for stage in self.stages)


def lay_out(spec: HeteroInferenceSpec, inventory: Inventory, *, has_encoder: bool = False) -> Topology:
    """Returns the seats of a group.

    Pods number in rank order, so that pod 0 holds rank 0 and the ranks of a pod are
    together; ranks number through the stages, then within a stage.

    Args:
        has_encoder: whether an encoder is served, which runs on the first rank.

    Raises:
        PlanError: the sizes don't fit the roles.
    """
    placed, notes = _place(spec, inventory)
    tensor = tensor_size(spec)
    pods = _order(spec, placed, tensor, has_encoder=has_encoder)
    seats = [
        Seat(pod=pod, local_rank=local_rank, placed=p)
        for pod, p in enumerate(pods)
        for local_rank in range(p.role.ranks_per_pod)
    ]
    stages = tuple(tuple(seats[i : i + tensor]) for i in range(0, len(seats), tensor))
    topology = Topology(tensor=tensor, stages=stages, notes=notes)
    if topology.has_mixed_stage and any(_is_cpu_first(stage) for stage in stages):
        refused = TENSOR_CPU_FIRST
        raise PlanError(
            f"roles: got {refused.feature}, but {refused.why}; {refused.remedy}",
            reason=PlanReason.UNSUPPORTED_PARALLELISM,
        )
    return topology


def _order(
    spec: HeteroInferenceSpec, placed: Sequence[PlacedRole], tensor: int, *, has_encoder: bool
) -> list[PlacedRole]:
    """Returns the role of each pod, in the order of pods."""
    if spec.parallelism.stage_order is StageOrder.AS_LISTED:
        return _pods(placed)
    pods = _order_by_device(spec, placed, tensor)
    first_gpu = next((index for index, pod in enumerate(pods) if pod.device is Device.GPU), None)
    if not has_encoder or not first_gpu:
        return pods
    # A stage of GPUs first for the encoder; all other pods keep their places, so that the head is on another
    # GPU if any.
    end, ranks = first_gpu + 1, pods[first_gpu].role.ranks_per_pod
    while ranks % tensor:
        ranks += pods[end].role.ranks_per_pod
        end += 1
    return [*pods[first_gpu:end], *pods[:first_gpu], *pods[end:]]


def _order_by_device(
    spec: HeteroInferenceSpec, placed: Sequence[PlacedRole], tensor: int
) -> list[PlacedRole]:
    # The head (1 GB for an 8B model) is read each step: on the CPU that costs 16-20 ms
    # more (H200 host, 2026-11-20), so that the last stage is a GPU's.
    gpus_last = sorted(placed, key=lambda p: p.device is Device.GPU)
    stages = spec.world_size // tensor
    if spec.parallelism.mode is Mode.PIPELINE or placed[0].role.layers is not None:
        return _pods(gpus_last)
    gpus_first = sorted(placed, key=lambda p: p.device is Device.CPU)
    if all(p.role.pods % stages == 0 for p in placed):
        # Every stage the same mix, each led by a GPU.
        return [p for _ in range(stages) for p in gpus_first for _ in range(p.role.pods // stages)]
    cpu_ranks = sum(p.role.num_ranks for p in placed if p.device is Device.CPU)
    return _pods(gpus_first if cpu_ranks % tensor else gpus_last)


def _pods(placed: Sequence[PlacedRole]) -> list[PlacedRole]:
    return [p for p in placed for _ in range(p.role.pods)]


def _is_cpu_first(stage: Sequence[Seat]) -> bool:
    devices = [seat.placed.device for seat in stage]
    return devices[0] is Device.CPU and Device.GPU in devices


def tensor_size(spec: HeteroInferenceSpec) -> int:
    """Returns the ranks of a stage: as given, or as follows from pipeline or layers, or by mode.

    Raises:
        PlanError: the sizes don't fit the roles.
    """
    sizes, world = spec.parallelism, spec.world_size
    stages = sizes.pipeline or sum(len(role.layers or ()) for role in spec.roles)
    tensor = Fraction(sizes.tensor or (Fraction(world, stages) if stages else 1))
    if sizes.mode is Mode.TENSOR and not sizes.tensor and not stages:
        tensor = Fraction(world)
    if tensor.denominator != 1 or world % tensor:
        raise PlanError(
            f"roles: got {world} ranks for {stages or 'any number of'} stages"
            f"{f' of {sizes.tensor} ranks' if sizes.tensor else ''}, expected stages x ranks a stage to be "
            "the sum of pods x ranksPerPod; change roles, parallelism or the number of entries of layers",
            reason=PlanReason.WORLD_SIZE_MISMATCH,
        )
    for role in spec.roles:
        _check_role(role, int(tensor), sizes.mode)
    return int(tensor)


def _check_role(role: RoleSpec, tensor: int, mode: Mode) -> None:
    if mode is Mode.PIPELINE and role.ranks_per_pod % tensor:
        raise PlanError(
            f"role {role.name}: got ranksPerPod {role.ranks_per_pod} with {tensor} ranks a stage, "
            "expected a multiple, since the ranks of a stage are in one pod; "
            "change ranksPerPod or parallelism.tensor",
            reason=PlanReason.WORLD_SIZE_MISMATCH,
        )
    if role.layers is not None and len(role.layers) * tensor != role.num_ranks:
        raise PlanError(
            f"role {role.name}: got {len(role.layers)} entries of layers, "
            f"expected {Fraction(role.num_ranks, tensor)}, one for each stage "
            f"(pods x ranksPerPod / {tensor}); add or remove entries",
            reason=PlanReason.LAYERS_MISMATCH,
        )


def _place(spec: HeteroInferenceSpec, inventory: Inventory) -> tuple[list[PlacedRole], tuple[str, ...]]:
    placed = [
        PlacedRole(role=role, device=Device.CPU if role.name in inventory.on_cpus else role.device)
        for role in spec.roles
    ]
    return placed, tuple(
        f"role {name} runs on CPUs, since planning.onGPUShortage.action is CPUOnly: {why}"
        for name, why in inventory.on_cpus.items()
    )
