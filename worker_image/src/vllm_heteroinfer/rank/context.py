"""The state of a rank besides vLLM's configuration. The rank passes it to its worker once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from heteroinfer_contract.plan import Plan, RankAssignment
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.group.deadline import Deadline
from vllm_heteroinfer.group.rendezvous import GroupStore
from vllm_heteroinfer.pod.channel import RankReporter
from vllm_heteroinfer.rank.step_metrics import RankMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """The state of a rank besides vLLM's configuration.

    Attributes:
        startup: deadline for the group to become ready.
        step_timeout_s: seconds after which a silent neighbour counts as failed.
        fail: reports an error and ends this process.
        memory_nodes: NUMA nodes of the rank's cores; empty if the machine has only one node.
    """

    plan: Plan
    launch: PodLaunch
    rank: RankAssignment
    reporter: RankReporter
    store: GroupStore
    metrics: RankMetrics
    startup: Deadline
    step_timeout_s: float
    fail: Callable[[BaseException], NoReturn]
    memory_nodes: tuple[int, ...] = ()
