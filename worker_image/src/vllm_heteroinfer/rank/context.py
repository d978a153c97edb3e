"""What a rank knows besides vLLM's configuration: handed to its worker once, whole."""

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
    """What a rank knows besides vLLM's configuration.

    Attributes:
        startup: by when the group must be ready.
        step_timeout_s: after which a silent neighbour is given up, in seconds.
        memory_nodes: NUMA nodes of its cores; empty where the machine has one only.
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
