"""What feed-forward mode needs of its rank, as a port: the context of the package rank has it all."""

from collections.abc import Callable
from typing import Any, NoReturn, Protocol

from prometheus_client import CollectorRegistry

from heteroinfer_contract.group_report import RankPhase
from heteroinfer_contract.plan import Plan, RankAssignment
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.group.deadline import Deadline
from vllm_heteroinfer.group.rendezvous import GroupStore


class Reporter(Protocol):
    """The rank's channel to its supervisor."""

    def phase(self, phase: RankPhase, loaded_bytes: int = 0, total_bytes: int = 0) -> None:
        """Sets how far this rank has come."""

    def step(self, steps: int, step_s: float, compute_s: float, wait_s: float, transfer_s: float) -> None:
        """Sets the number of steps and a step's averages."""

    def busy(self, what: str | None, *, waiting_for_rank: int | None = None) -> None:
        """Says what this rank does for long."""


class MetricsPort(Protocol):
    """The rank's metrics."""

    @property
    def registry(self) -> CollectorRegistry:
        """Returns where metrics are registered."""

    @property
    def counts(self) -> bool:
        """Returns whether metrics are kept."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Returns the values of the labels of every rank's metrics."""

    @property
    def weight_bytes(self) -> Any:
        """Returns the gauge of the weights' size."""


class RankPort(Protocol):
    """What feed-forward mode reads of `vllm_heteroinfer.rank.context.RankContext`."""

    @property
    def plan(self) -> Plan:
        """Returns the group's plan."""

    @property
    def launch(self) -> PodLaunch:
        """Returns the launch of the rank's pod."""

    @property
    def rank(self) -> RankAssignment:
        """Returns the rank."""

    @property
    def reporter(self) -> Reporter:
        """Returns its channel to the supervisor."""

    @property
    def store(self) -> GroupStore:
        """Returns the group's store."""

    @property
    def metrics(self) -> MetricsPort:
        """Returns its meter."""

    @property
    def startup(self) -> Deadline:
        """Returns by when the group must be ready."""

    @property
    def step_timeout_s(self) -> float:
        """Returns after how long a silent peer is given up, in seconds."""

    @property
    def fail(self) -> Callable[[BaseException], NoReturn]:
        """Returns what reports an error and ends this process."""
