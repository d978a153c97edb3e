"""The planned placement of a group's pods. The manifests of the pods contain this placement. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Gang(StrEnum):
    """A gang scheduler, which places all pods of a group at the same time or none."""

    KUEUE = "Kueue"
    VOLCANO = "Volcano"
    COSCHEDULING = "Coscheduling"
    """The coscheduling plugin of kubernetes-sigs/scheduler-plugins."""
    NATIVE = "Native"
    """kube-scheduler with scheduling.k8s.io/v1alpha1 Workload (alpha in Kubernetes 1.35)."""
    NATIVE_ALPHA2 = "NativeV1alpha2"
    """kube-scheduler with v1alpha2 PodGroup (alpha in Kubernetes 1.36)."""
    NATIVE_BETA = "NativeV1beta1"
    """kube-scheduler with v1beta1 PodGroup (beta in Kubernetes 1.37)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAssignment:
    """The decision about the nodes of a group's pods.

    Attributes:
        gang: gang scheduler that places the pods together, or None.
        nodes: preferred node of each pod, by pod index. The scheduler makes the final choice.
        expected_nodes: nodes on which the plan found capacity, also if the pods do not prefer these nodes.
        domain: key and value of a label that all nodes must have, or None.
        gpu_memory_mib: lowest value of the node label with the memory of a GPU (MiB) that a pod accepts, by
            pod index.
        apart: whether the pods prefer nodes and zones without other groups of the resource.
        nodes_of_others: nodes with other groups of the resource, which pods avoid if their preferred node
            has become full.
    """

    gang: Gang | None = None
    nodes: Mapping[int, str] = field(default_factory=dict)
    expected_nodes: frozenset[str] = frozenset()
    domain: tuple[str, str] | None = None
    gpu_memory_mib: Mapping[int, int] = field(default_factory=dict)
    apart: bool = False
    nodes_of_others: frozenset[str] = frozenset()
