"""The known devices and memory of one group's machines. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from heteroinfer_contract.calibration import Calibration
from heteroinfer_contract.network_measurement import NetworkMeasurement


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """The known devices, memory and measurements of the machines on which a group runs.

    Attributes:
        on_cpus: GPU roles that compute on CPUs because GPUs are missing, with the reason.
        gpu_memory_bytes: memory of one GPU, by role; used if the role has no deviceMemory.
        gpu_product: product label of the GPUs, by role.
        cpu_features: features that the CPUs of all nodes of a role have, by role; empty without node labels.
        calibration: calibration of the machines of a role, by role.
        network: measured network between the asking role and a role of feed-forward ranks, by the latter.
        host_memory_bytes: memory of one pod, by role; used if the role's resources have no memory.
    """

    on_cpus: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    gpu_memory_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    gpu_product: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    cpu_features: Mapping[str, frozenset[str]] = field(default_factory=lambda: MappingProxyType({}))
    calibration: Mapping[str, Calibration] = field(default_factory=lambda: MappingProxyType({}))
    network: Mapping[str, NetworkMeasurement] = field(default_factory=lambda: MappingProxyType({}))
    host_memory_bytes: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
