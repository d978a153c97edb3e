"""A node, trimmed to what plans read. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from heteroinfer_operator.nodes.demand import Taint


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """A node, trimmed to what a plan reads.

    Attributes:
        allocatable: by resource name: bytes for memory, cores for cpu, counts for devices.
        requested: of that, by the pods on it.
        by_priority: the same by the priority of the pods; empty where it is not known.
        schedulable: Ready and not cordoned.
        unreachable_since: since when it is known that its kubelet sends no heartbeat, by the clock of
            this process, or None while it does.
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
