"""Where the pods of a group shall go: what planning decides and manifests write down. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Gang(StrEnum):
    """Who places all pods of a group at once, or none."""

    KUEUE = "Kueue"
    VOLCANO = "Volcano"
    COSCHEDULING = "Coscheduling"
    """The plugin of kubernetes-sigs/scheduler-plugins."""
    NATIVE = "Native"
    """kube-scheduler's own, with scheduling.k8s.io/v1alpha1 Workload (alpha in Kubernetes 1.35)."""
    NATIVE_ALPHA2 = "NativeV1alpha2"
    """The same with v1alpha2 PodGroup (alpha in Kubernetes 1.36)."""
    NATIVE_BETA = "NativeV1beta1"
    """The same with v1beta1 PodGroup (beta in Kubernetes 1.37)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAssignment:
    """What was decided about the nodes of a group's pods.

    Attributes:
        gang: who places them together, or None.
        nodes: a node that it fits on, by pod index: a hint, since the scheduler decides.
        domain: key and value of a node label that all of them must have, or None.
        gpu_memory_mib: memory that the GPUs of a pod must have at least by their node's label, by
            pod index.
        apart: whether the scheduler is to prefer nodes and zones without other groups of the resource.
    """

    gang: Gang | None = None
    nodes: Mapping[int, str] = field(default_factory=dict)
    domain: tuple[str, str] | None = None
    gpu_memory_mib: Mapping[int, int] = field(default_factory=dict)
    apart: bool = False
