"""The fields of a node that plans read. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from heteroinfer_operator.nodes.demand import Taint


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node's fields that a plan reads.

    Attributes:
        allocatable: by resource name. Bytes for memory, cores for cpu, counts for devices.
        requested: total requests of the node's pods, by resource name.
        by_priority: total requests by priority of the pods; empty if unknown.
        schedulable: Ready and not cordoned.
        problem: why the node is not schedulable, after "is".
        unreachable_since: when this process first knew that the kubelet sends no heartbeat, by its own
            clock; None while the kubelet does.
        no_image_volumes: program of the node that is too old for image volumes, after "has"; "" without one.
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
