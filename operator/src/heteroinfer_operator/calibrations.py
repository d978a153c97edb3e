"""What was measured of machines, and which machine a role's pods are on. Pure."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Final

from heteroinfer_contract.calibration import Calibration

INSTANCE_TYPE: Final = "node.kubernetes.io/instance-type"
GPU_PRODUCT: Final = "nvidia.com/gpu.product"
_CPU_LABELS: Final = (
    "kubernetes.io/arch",
    "feature.node.kubernetes.io/cpu-model.vendor_id",
    "feature.node.kubernetes.io/cpu-model.family",
    "feature.node.kubernetes.io/cpu-model.id",
    "feature.node.kubernetes.io/cpu-cpuid.AVX512BF16",
    "feature.node.kubernetes.io/cpu-cpuid.AMXTILE",
)
"""What nodes of bare metal differ in, with node-feature-discovery."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class NodeKind:
    """Nodes that are as fast as each other, as far as labels say.

    Attributes:
        labels: name and value of what they have in common, sorted.
    """

    labels: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, labels: Mapping[str, str]) -> "NodeKind":
        """Returns the kind of a node: its instance type, else its CPUs; and its GPU product."""
        names = (INSTANCE_TYPE,) if INSTANCE_TYPE in labels else _CPU_LABELS
        return cls(labels=tuple(sorted((n, labels[n]) for n in (*names, GPU_PRODUCT) if n in labels)))

    @property
    def key(self) -> str:
        """Returns what stands for it in names of objects: 10 hexadecimal digits."""
        return hashlib.sha256(repr(self.labels).encode()).hexdigest()[:10]

    @property
    def has_gpu(self) -> bool:
        """Returns whether its nodes have GPUs."""
        return any(name == GPU_PRODUCT for name, _ in self.labels)

    def __str__(self) -> str:
        """Returns it for people."""
        return ", ".join(value for _, value in self.labels) or "nodes without labels"


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrations:
    """What was measured.

    Attributes:
        by_kind: by key of the kind of node.
        this_machine: of the only machine there is, or None; then kinds say nothing.
        missing: why there is none, for people; "" if nobody needs to know.
    """

    by_kind: Mapping[str, Calibration] = field(default_factory=lambda: MappingProxyType({}))
    this_machine: Calibration | None = None
    missing: str = ""

    def of_nodes(self, labels: Iterable[Mapping[str, str]]) -> Calibration | None:
        """Returns what holds for pods on these nodes, or None unless all of them were measured.

        Of several kinds, the one that reads slowest: every rank of a role has as much to read.
        """
        if self.this_machine is not None:
            return self.this_machine
        found = [self.by_kind.get(NodeKind.of(each).key) for each in labels]
        known = [each for each in found if each is not None]
        if not known or len(known) < len(found):
            return None
        return min(known, key=lambda each: each.reading(each.hardware.cores))


def describe(calibration: Calibration) -> str:
    """Returns which calibration it is, in a few words."""
    hardware, versions = calibration.hardware, calibration.versions
    day = datetime.fromtimestamp(calibration.time, UTC)
    gpu = f", {hardware.gpu}" if hardware.gpu else ""
    return (
        f"calibration {calibration.hash} of {day:%Y-%m-%d} ({hardware.cpu}, {hardware.cores} cores{gpu}; "
        f"HeteroInfer {versions.heteroinfer}, vLLM {versions.vllm})"
    )
