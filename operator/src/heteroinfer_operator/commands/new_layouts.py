"""Chooses the roles and the mode of a group for a user's hardware, or changes that make it fit. Pure."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.model_fetch import HUB_SCHEME
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Mode
from heteroinfer_operator.api import AccessMode, HeteroInference, parse_resource
from heteroinfer_operator.commands.plan_words import count
from heteroinfer_operator.errors import HeteroInferError, PlanError
from heteroinfer_operator.nodes.calibrations import Calibrations
from heteroinfer_operator.planning import Capacity, GroupRequest, Planned, plan_group
from heteroinfer_operator.planning.engine_settings import default_max_model_len
from heteroinfer_operator.quantity import parse_bytes

FILE_SCHEME: Final = "file://"
GIB: Final = 2**30
_CACHED_REVISIONS: Final = 2
"""Revisions of a model for which its cache has space: the current revision, and the download of the next."""
_SPARE_CACHE_GIB: Final = 1
_MAX_GIB: Final = 8192
"""Largest memory of one pod or GPU that `find_fitting_changes` tries."""
_MAX_GPUS: Final = 16
_MIN_TOKENS: Final = 512
"""Smallest value of --max-model-len that `find_fitting_changes` tries."""
_GPU_POD_CPUS: Final = 4
"""Cores of a GPU's pod without its feed-forward ranks: for engine, vLLM's API server and the GPU rank."""
_GPU_POD_GIB: Final = 16
"""Host memory of a GPU's pod without its feed-forward ranks."""
_ADDED_CPUS: Final = 16
"""Cores of the CPU pod that `find_fitting_changes` suggests to a user without CPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenHardware:
    """The user's hardware. Sizes are texts, as the user wrote them.

    Attributes:
        gpus: number of GPUs.
        gpu_memory: memory of one GPU, "" without GPUs.
        cpus: cores for CPU ranks, 0 without CPUs.
        cpu_memory: host memory for CPU ranks, "" without CPUs.
    """

    gpus: int
    gpu_memory: str
    cpus: int
    cpu_memory: str

    def __str__(self) -> str:
        devices = []
        if self.gpus:
            devices.append(f"{count(self.gpus, 'GPU')} of {self.gpu_memory}")
        if self.cpus:
            devices.append(f"{count(self.cpus, 'CPU')} with {self.cpu_memory}")
        return " and ".join(devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLayout:
    """The mode of a group, and the hardware for its roles."""

    mode: Mode
    hardware: GivenHardware

    @property
    def gpu_pod_cpus(self) -> int:
        """Cores of a GPU's pod, without the cores of its feed-forward ranks."""
        if self.mode is not Mode.FEED_FORWARD:
            return _GPU_POD_CPUS
        # In mode FeedForward, all CPUs of the user are for this pod. Its feed-forward rank gets at least
        # three quarters, and the other processes get the remaining CPUs.
        quarter = self.hardware.cpus // 4
        return max(min(_GPU_POD_CPUS, quarter), 1)

    @property
    def gpu_pod_memory(self) -> str:
        """Host memory of a GPU's pod, without the memory of its feed-forward ranks."""
        if self.mode is not Mode.FEED_FORWARD:
            return f"{_GPU_POD_GIB}Gi"
        return _rounded_size(min(_GPU_POD_GIB * GIB, parse_bytes(self.hardware.cpu_memory) // 4))

    @property
    def feed_forward_cpus(self) -> int:
        """Cores of the feed-forward rank."""
        return max(self.hardware.cpus - self.gpu_pod_cpus, 1)

    @property
    def feed_forward_memory(self) -> str:
        """Host memory of the feed-forward rank."""
        return _rounded_size(parse_bytes(self.hardware.cpu_memory) - parse_bytes(self.gpu_pod_memory))

    @property
    def has_cpu_role(self) -> bool:
        """Whether the group has a role for CPU pods."""
        return bool(self.hardware.cpus) and self.mode is not Mode.FEED_FORWARD

    @property
    def num_pods(self) -> int:
        """Pods of a group: one for each GPU, and one for the CPU role."""
        return self.hardware.gpus + (1 if self.has_cpu_role else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A new resource without its layout.

    Attributes:
        model: the resource's spec.model, without a cache.
        max_model_len: tokens of the longest request; None for the planner's default.
    """

    name: str
    model: dict[str, Any]
    profile: ModelProfile
    calibrations: Calibrations
    max_model_len: int | None

    def cache(self, layout: GroupLayout) -> dict[str, str]:
        """Returns spec.model.cache with room for two revisions of a hub's model; {} for other models."""
        if not self.model["uri"].startswith(HUB_SCHEME):
            return {}
        model_bytes = self.profile.total_bytes + self.profile.encoder_bytes
        size_gib = ceil(_CACHED_REVISIONS * model_bytes / GIB) + _SPARE_CACHE_GIB
        mode = AccessMode.READ_WRITE_MANY if layout.num_pods > 1 else AccessMode.READ_WRITE_ONCE
        return {"size": f"{size_gib}Gi", "accessMode": mode.value}

    def resource(self, layout: GroupLayout) -> HeteroInference:
        """Builds the resource with this layout; raises SpecError."""
        cache = self.cache(layout)
        engine = {} if self.max_model_len is None else {"maxModelLen": self.max_model_len}
        return parse_resource(
            {
                "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
                "kind": names.KIND,
                "metadata": {"name": self.name},
                "spec": {
                    "model": {**self.model, **({"cache": cache} if cache else {})},
                    "engine": engine,
                    "parallelism": {"mode": layout.mode.value},
                    "roles": _build_roles(layout),
                },
            }
        )

    def plan(self, layout: GroupLayout) -> Planned:
        """Returns the plan of a layout; raises PlanError if there is none."""
        resource = self.resource(layout)
        request = GroupRequest(
            spec=resource.spec,
            profile=self.profile,
            served_name=resource.served_name,
            model_path=names.MODEL_MOUNT,
        )
        return plan_group(request, Capacity(calibrations=self.calibrations))


def _build_roles(layout: GroupLayout) -> list[dict[str, Any]]:
    """Builds spec.roles for a layout: a CPU role, if the layout has one, then a GPU role."""
    hardware, roles = layout.hardware, []
    if layout.has_cpu_role:
        resources = _build_resources(hardware.cpus, hardware.cpu_memory)
        roles.append({"name": "cpu", "device": "CPU", "resources": resources})
    if hardware.gpus:
        gpu: dict[str, Any] = {
            "name": "gpu",
            "device": "GPU",
            "pods": hardware.gpus,
            "deviceMemory": hardware.gpu_memory,
            "resources": _build_resources(layout.gpu_pod_cpus, layout.gpu_pod_memory),
        }
        if layout.mode is Mode.FEED_FORWARD:
            amounts = {"cpu": str(layout.feed_forward_cpus), "memory": layout.feed_forward_memory}
            gpu["feedForward"] = {"ranks": 1, **amounts}
        roles.append(gpu)
    return roles


def _build_resources(cpus: int, memory: str) -> dict[str, Any]:
    return {"requests": {"cpu": str(cpus), "memory": memory}, "limits": {"memory": memory}}


def _rounded_size(size: int) -> str:
    """Returns a size rounded down to Mi, in Gi if it is a whole number of Gi."""
    return f"{size // GIB}Gi" if size % GIB == 0 else f"{size // 2**20}Mi"


def layouts(hardware: GivenHardware, mode: Mode | None, *, has_experts: bool) -> Iterator[GroupLayout]:
    """Yields the layouts to try, the fastest first.

    Layouts without CPUs come first, because CPU ranks add memory, but no speed. If the user chose no mode,
    FeedForward is tried only for a mixture of experts: CPUs then read only few of the experts in each step.

    Args:
        mode: the mode that the user chose, or None.

    Raises:
        HeteroInferError: the mode needs other hardware.
    """
    gpus_only = replace(hardware, cpus=0, cpu_memory="")
    can_feed_forward = hardware.gpus == 1 and hardware.cpus > 1
    if mode is Mode.FEED_FORWARD and not can_feed_forward:
        raise HeteroInferError(
            "--mode FeedForward needs one GPU (--gpu-memory) and at least 2 CPUs of the same host "
            "(--cpus, --cpu-memory). Add the missing options, or remove --mode",
            reason="Usage",
        )
    if mode is Mode.TENSOR and not (hardware.gpus and hardware.cpus):
        raise HeteroInferError(
            "--mode Tensor needs GPUs (--gpu-memory) and CPUs (--cpus, --cpu-memory). Add the missing "
            "options, or remove --mode",
            reason="Usage",
        )
    if hardware.gpus and mode in (None, Mode.PIPELINE):
        yield GroupLayout(mode=Mode.PIPELINE, hardware=gpus_only)
    if can_feed_forward and (mode is Mode.FEED_FORWARD or (mode is None and has_experts)):
        yield GroupLayout(mode=Mode.FEED_FORWARD, hardware=hardware)
    if mode is Mode.TENSOR:
        yield GroupLayout(mode=Mode.TENSOR, hardware=hardware)
    if hardware.cpus and mode in (None, Mode.PIPELINE):
        yield GroupLayout(mode=Mode.PIPELINE, hardware=hardware)


def choose_layout(draft: Draft, hardware: GivenHardware, mode: Mode | None) -> tuple[GroupLayout, Planned]:
    """Returns the first layout that has a plan.

    Raises:
        PlanError: no layout has a plan. The error is about the layout with the most memory.
        HeteroInferError: the mode needs other hardware.
    """
    last_error: PlanError | None = None  # the last layout has the most memory
    for layout in layouts(hardware, mode, has_experts=bool(draft.profile.experts)):
        try:
            return layout, draft.plan(layout)
        except PlanError as error:
            last_error = error
    assert last_error is not None  # there is a layout, because GivenHardware has a GPU or a CPU
    raise last_error


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingChange:
    """A change of one option with which the model fits.

    Attributes:
        option: the option with its value, such as "--cpu-memory 76Gi".
        change: the difference from the user's hardware, such as "12Gi more".
    """

    option: str
    change: str


def find_fitting_changes(
    draft: Draft, hardware: GivenHardware, mode: Mode | None
) -> tuple[FittingChange, ...]:
    """Returns, for each option, the smallest change of only this option with which the model fits.

    For --max-model-len, tries a half, a quarter and so on of the present length.
    """

    def fits(hardware: GivenHardware, max_model_len: int | None = draft.max_model_len) -> bool:
        """Reports whether the draft has a layout on this hardware."""
        try:
            choose_layout(replace(draft, max_model_len=max_model_len), hardware, mode)
        except HeteroInferError:
            return False
        return True

    cpus = hardware.cpus or _ADDED_CPUS
    cpu_option = "--cpu-memory" if hardware.cpus else f"--cpus {cpus} --cpu-memory"

    def fits_cpu_memory(size: str) -> bool:
        return fits(replace(hardware, cpus=cpus, cpu_memory=size))

    def fits_gpu_memory(size: str) -> bool:
        return fits(replace(hardware, gpu_memory=size))

    def fits_gpus(gpus: int) -> bool:
        return fits(replace(hardware, gpus=gpus))

    changes = [_find_memory(cpu_option, hardware.cpu_memory, fits_cpu_memory)]
    if hardware.gpus:
        changes.append(_find_memory("--gpu-memory", hardware.gpu_memory, fits_gpu_memory))
        changes.append(_find_gpus(hardware.gpus, fits_gpus))
    longest = draft.max_model_len or default_max_model_len(draft.profile)
    changes.append(_find_length(longest, lambda tokens: fits(hardware, tokens)))
    return tuple(change for change in changes if change is not None)


def _find_gpus(present_gpus: int, fits: Callable[[int], bool]) -> FittingChange | None:
    """Returns the change to the smallest number of GPUs that fits; None if _MAX_GPUS is too small."""
    for gpus in range(present_gpus + 1, _MAX_GPUS + 1):
        if fits(gpus):
            return FittingChange(option=f"--gpus {gpus}", change=f"{gpus - present_gpus} more")
    return None


def _find_length(longest: int, fits: Callable[[int], bool]) -> FittingChange | None:
    """Returns the change to the first length that fits of a half, a quarter and so on of `longest`.

    Returns None if no length of at least _MIN_TOKENS fits.
    """
    tokens = longest // 2
    while tokens >= _MIN_TOKENS:
        if fits(tokens):
            change = f"requests of at most {tokens:,} tokens instead of {longest:,}"
            return FittingChange(option=f"--max-model-len {tokens}", change=change)
        tokens //= 2
    return None


def _find_memory(option: str, written_size: str, fits: Callable[[str], bool]) -> FittingChange | None:
    """Returns the change to the smallest memory in whole Gi that fits; None if _MAX_GIB is too small.

    Doubles the size until it fits, then halves the interval between the largest size that is too small and
    the smallest that is enough.
    """
    present_bytes = parse_bytes(written_size) if written_size else 0
    too_small_gib, enough_gib = present_bytes // GIB, max(2 * present_bytes // GIB, 1)
    while enough_gib <= _MAX_GIB and not fits(f"{enough_gib}Gi"):
        too_small_gib, enough_gib = enough_gib, 2 * enough_gib
    if enough_gib > _MAX_GIB:
        return None
    while enough_gib - too_small_gib > 1:
        middle_gib = (too_small_gib + enough_gib) // 2
        if fits(f"{middle_gib}Gi"):
            enough_gib = middle_gib
        else:
            too_small_gib = middle_gib
    more_gib = ceil((enough_gib * GIB - present_bytes) / GIB)
    return FittingChange(option=f"{option} {enough_gib}Gi", change=f"{more_gib}Gi more")
