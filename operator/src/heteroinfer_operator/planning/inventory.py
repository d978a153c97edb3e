"""What there is to plan with. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Devices and memory for one group, as far as they are known.

    Attributes:
        gpus: GPUs that the group may take, by resource name (`nvidia.com/gpu`); a name
            that isn't here has none. None where devices are unknown: then there are
            as many as the roles ask for.
        gpu_memory_bytes: memory of one GPU, by role; used where the role has no deviceMemory.
        host_memory_bytes: memory of one pod, by role; used where the role's resources say none.
        shortage_age_s: how long GPUs have been missing, in seconds; None where waiting
            is of no use, so that CPUOnly is done at once.
    """

    gpus: Mapping[str, int] | None = None
    gpu_memory_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    host_memory_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    shortage_age_s: float | None = None
