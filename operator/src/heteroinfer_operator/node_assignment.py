"""Where the pods of a group shall go: what planning decides and manifests write down. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from heteroinfer_operator.cluster import Gang


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAssignment:
    """What was decided about the nodes of a group's pods.

    Attributes:
        gang: who places them together, or None.
        nodes: a node that it fits on, by pod index: a hint, since the scheduler decides.
        domain: key and value of a node label that all of them must have, or None.
        gpu_memory_mib: memory that the GPUs of a pod must have at least by their node's label, by
            pod index.
    """

    gang: Gang | None = None
    nodes: Mapping[int, str] = field(default_factory=dict)
    domain: tuple[str, str] | None = None
    gpu_memory_mib: Mapping[int, int] = field(default_factory=dict)
