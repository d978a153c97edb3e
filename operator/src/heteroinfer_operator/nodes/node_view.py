"""The fields of a node that plans read. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from heteroinfer_operator.nodes.demand import Taint


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """The fields of a node that a plan reads.

    Attributes:
        allocatable: by resource name. Bytes for memory, cores for cpu, counts for devices.
        requested: total requests of the node's pods, by resource name.
        by_priority: total requests by priority of the pods; empty if unknown.
        schedulable: Ready and not cordoned.
        problem: why the node is not schedulable, as the words that follow "is".
        unreachable_since: time, by this process's own clock, since which the kubelet has sent no heartbeat;
            None while the kubelet sends heartbeats.
        no_image_volumes: program of the node that is too old for image volumes, as the words that follow
            "has"; "" if there is no such program.
    """

    name: str
    allocatable: Mapping[str, float]
    requested: Mapping[str, float] = field(default_factory=dict)
    by_priority: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    schedulable: bool = True
    problem: str = "not Ready"
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    unreachable_since: datetime | None = None
    no_image_volumes: str = ""
