"""Builds the topology of a group: the device, pod and stage of each rank. Pure."""

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
    """A role, and the device on which its ranks compute.

    Attributes:
        device: the role's own device, or CPU for a GPU role without GPUs.
    """

    role: RoleSpec
    device: Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Seat:
    """The pod of one rank, and its place in this pod. Seats are listed in the order of ranks.

    Attributes:
        pod: index of its pod.
        local_rank: index of the rank in its pod.
        placed: its role and device.
    """

    pod: int
    local_rank: int
    placed: PlacedRole


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """The seats of a group, before they get layers.

    Attributes:
        tensor: number of ranks in a stage.
        stages: the seats of each stage, in rank order.
        notes: notes for the user about roles that run on CPUs.
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
        """Whether any rank computes on a CPU."""
        return bool(self.cpu_roles)

    @property
    def is_mixed(self) -> bool:
        """Whether the group has GPU and CPU ranks."""
        return len({seat.placed.device for stage in self.stages for seat in stage}) > 1

    @property
    def has_mixed_stage(self) -> bool:
        """Whether GPUs and CPUs split the same layers."""
        return any(len({seat.placed.device for seat in stage}) > 1 for stage in self.stages)


def build_topology(spec: HeteroInferenceSpec, inventory: Inventory, *, has_encoder: bool = False) -> Topology:
    """Returns the seats of a group, stage by stage.

    Pods are numbered in rank order: pod 0 holds rank 0, and the ranks of a pod are consecutive. Ranks are
    numbered stage by stage.

    Args:
        has_encoder: whether the group serves an encoder, which runs on the first rank.

    Raises:
        PlanError: the ranks of the roles cannot form the stages, or vLLM does not support the order of their
            devices.
    """
    placed, notes = _place_roles(spec, inventory)
    tensor = tensor_size(spec)
    pods = _order_pods(spec, placed, tensor, has_encoder=has_encoder)
    seats = [
        Seat(pod=pod, local_rank=local_rank, placed=placed_role)
        for pod, placed_role in enumerate(pods)
        for local_rank in range(placed_role.role.ranks_per_pod)
    ]
    stages = tuple(tuple(seats[first : first + tensor]) for first in range(0, len(seats), tensor))
    topology = Topology(tensor=tensor, stages=stages, notes=notes)
    if topology.has_mixed_stage and any(_is_cpu_first(stage) for stage in stages):
        refused = TENSOR_CPU_FIRST
        fix = f"{refused.remedy[0].upper()}{refused.remedy[1:]}"
        raise PlanError(
            f"roles: {refused.feature} is not supported: {refused.why}. {fix}",
            reason=PlanReason.UNSUPPORTED_PARALLELISM,
        )
    return topology


def _order_pods(
    spec: HeteroInferenceSpec, placed: Sequence[PlacedRole], tensor: int, *, has_encoder: bool
) -> list[PlacedRole]:
    """Returns the role of each pod, in the order of pods.

    If the group serves an encoder, which runs on the first rank, GPUs come first.
    """
    if spec.parallelism.stage_order is StageOrder.AS_LISTED:
        return _expand_to_pods(placed)
    pods = _order_by_device(spec, placed, tensor)
    first_gpu_pod = next((index for index, pod in enumerate(pods) if pod.device is Device.GPU), None)
    is_gpu_first = first_gpu_pod == 0
    if not has_encoder or first_gpu_pod is None or is_gpu_first:
        return pods
    # Moves the first stage of GPUs to the front for the encoder: as many GPU pods as have a whole number of
    # stages. All other pods keep their order, so that the head is on another GPU if there is one.
    group_end, num_ranks = first_gpu_pod + 1, pods[first_gpu_pod].role.ranks_per_pod
    while num_ranks % tensor:
        num_ranks += pods[group_end].role.ranks_per_pod
        group_end += 1
    return [*pods[first_gpu_pod:group_end], *pods[:first_gpu_pod], *pods[group_end:]]


def _order_by_device(
    spec: HeteroInferenceSpec, placed: Sequence[PlacedRole], tensor: int
) -> list[PlacedRole]:
    """Returns the role of each pod, in an order in which each stage has devices that suit it."""
    # The last stage is on a GPU, because each step reads the head there (1 GB for an 8B model). A CPU would
    # take 16 to 20 ms more for it (H200 host, 2026-11-20).
    gpus_last = sorted(placed, key=lambda each: each.device is Device.GPU)
    num_stages = spec.world_size // tensor
    # In mode Pipeline, and with `layers` in the roles, each role has whole stages (`_check_role_size`).
    if spec.parallelism.mode is Mode.PIPELINE or placed[0].role.layers is not None:
        return _expand_to_pods(gpus_last)
    gpus_first = sorted(placed, key=lambda each: each.device is Device.CPU)
    if all(each.role.pods % num_stages == 0 for each in placed):
        # Every stage gets equally many pods of each role, and begins with a GPU.
        return [
            each
            for _ in range(num_stages)
            for each in gpus_first
            for _ in range(each.role.pods // num_stages)
        ]
    # If CPU ranks do not fill whole stages, one stage has both devices. Such a stage must begin with a GPU
    # (`build_topology`), so GPUs come first.
    cpu_ranks = sum(each.role.num_ranks for each in placed if each.device is Device.CPU)
    return _expand_to_pods(gpus_first if cpu_ranks % tensor else gpus_last)


def _expand_to_pods(placed: Sequence[PlacedRole]) -> list[PlacedRole]:
    """Returns each role once for each of its pods."""
    return [each for each in placed for _ in range(each.role.pods)]


def _is_cpu_first(stage: Sequence[Seat]) -> bool:
    """Reports whether the first rank of a mixed stage is on a CPU."""
    devices = [seat.placed.device for seat in stage]
    return devices[0] is Device.CPU and Device.GPU in devices


def tensor_size(spec: HeteroInferenceSpec) -> int:
    """Returns the number of ranks in a stage.

    The first field that is set decides: parallelism.tensor, parallelism.pipeline, roles[].layers, or the
    mode.

    Raises:
        PlanError: the number of ranks in the roles does not fit these fields.
    """
    parallelism, num_ranks = spec.parallelism, spec.world_size
    # The lists roles[].layers have one entry for each stage, all lists together. The number of stages is 0 if
    # neither parallelism.pipeline nor layers is set.
    num_stages = parallelism.pipeline or sum(len(role.layers or ()) for role in spec.roles)
    if parallelism.tensor:
        tensor = Fraction(parallelism.tensor)
    elif num_stages:
        tensor = Fraction(num_ranks, num_stages)
    else:
        has_one_stage = parallelism.mode in (Mode.TENSOR, Mode.FEED_FORWARD)
        tensor = Fraction(num_ranks if has_one_stage else 1)
    is_whole_number = tensor.denominator == 1
    if not is_whole_number or num_ranks % tensor:
        stages = f"{num_stages or 'any number of'} stages"
        ranks_per_stage = f", {parallelism.tensor} ranks per stage" if parallelism.tensor else ""
        raise PlanError(
            f"roles: stages x ranks per stage must equal the sum of pods x ranksPerPod (got {num_ranks} "
            f"ranks, {stages}{ranks_per_stage}). Change roles, parallelism or the number of entries of "
            "layers",
            reason=PlanReason.WORLD_SIZE_MISMATCH,
        )
    for role in spec.roles:
        _check_role_size(role, int(tensor), parallelism.mode)
    return int(tensor)


def _check_role_size(role: RoleSpec, tensor: int, mode: Mode | None) -> None:
    """Raises PlanError if a role's pods cannot hold whole stages, or if `layers` has a wrong length."""
    if mode is Mode.PIPELINE and role.ranks_per_pod % tensor:
        raise PlanError(
            f"role {role.name}: ranksPerPod must be a multiple of the {tensor} ranks per stage (got "
            f"{role.ranks_per_pod}), because one pod holds all ranks of a stage. Change ranksPerPod or "
            "parallelism.tensor",
            reason=PlanReason.WORLD_SIZE_MISMATCH,
        )
    if role.layers is not None and role.num_ranks % tensor:
        raise PlanError(
            f"role {role.name}: pods x ranksPerPod must be a multiple of the {tensor} ranks per stage "
            f"(got {role.num_ranks}), because layers has an entry for each stage. Change pods, "
            "ranksPerPod or parallelism.tensor, or remove layers",
            reason=PlanReason.WORLD_SIZE_MISMATCH,
        )
    if role.layers is not None and len(role.layers) * tensor != role.num_ranks:
        raise PlanError(
            f"role {role.name}: layers must have one entry for each stage of the role, that is pods x "
            f"ranksPerPod / {tensor} = {role.num_ranks // tensor} entries (got {len(role.layers)}). "
            "Add or remove entries",
            reason=PlanReason.LAYERS_MISMATCH,
        )


def _place_roles(spec: HeteroInferenceSpec, inventory: Inventory) -> tuple[list[PlacedRole], tuple[str, ...]]:
    """Returns each role with its device, and a note for each GPU role that computes on CPUs."""
    placed = [
        PlacedRole(role=role, device=Device.CPU if role.name in inventory.on_cpus else role.device)
        for role in spec.roles
    ]
    return placed, tuple(
        f"role {name} runs on CPUs, because planning.onGPUShortage.action is CPUOnly: {why}"
        for name, why in inventory.on_cpus.items()
    )
