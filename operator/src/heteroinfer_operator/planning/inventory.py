"""What is known of the devices of one group. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from heteroinfer_contract.calibration import Calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """Devices and memory for one group, as far as they are known.

    Attributes:
        on_cpus: GPU roles that have no GPUs and compute on CPUs, with why.
        gpu_memory_bytes: memory of one GPU, by role; used where the role has no deviceMemory.
        gpu_product: product of the GPUs as labelled, by role.
        cpu_features: what the CPUs of every node of a role can do, by role, where nodes say so.
        without_amx: roles whose pods can be on no node with AMX, as far as nodes or calibrations say.
        calibration: what was measured of the machines of a role, by role.
        host_memory_bytes: memory of one pod, by role; used where the role's resources say none.
    """

    on_cpus: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    gpu_memory_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    gpu_product: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    cpu_features: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    without_amx: frozenset[str] = frozenset()
    calibration: Mapping[str, Calibration] = field(default_factory=lambda: MappingProxyType({}))
    host_memory_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
