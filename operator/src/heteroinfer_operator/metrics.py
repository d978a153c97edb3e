"""Metrics of the operator and of resources. `heteroinfer_contract.metric_names` defines the names.

This module keeps a few small values of each resource. When Prometheus reads /metrics, the module builds
samples from these values. The values of a thousand resources take some hundred kilobytes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from heteroinfer_contract import metric_names
from heteroinfer_operator.api import (
    ConditionStatus,
    GroupPhase,
    GroupStatus,
    HeteroInferenceStatus,
)
from heteroinfer_operator.cluster import ResourceKey

_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_CONDITION_VALUE: Final = {
    ConditionStatus.TRUE: 1.0,
    ConditionStatus.FALSE: 0.0,
    ConditionStatus.UNKNOWN: -1.0,
}


class OperatorMetrics:
    """The operator's metrics, in their own registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            metric_names.OPERATOR_RECONCILE_SECONDS,
            "Seconds that one reconcile took.",
            registry=self.registry,
            buckets=_BUCKETS_S,
        )
        self.reconcile_errors = Counter(
            metric_names.OPERATOR_RECONCILE_ERRORS_TOTAL,
            "Reconciles that failed, by the reason of the error.",
            ("reason",),
            registry=self.registry,
        )
        self.reconcile_errors.labels("Conflict")  # creates this series, so that it begins at 0
        self.queue_length = Gauge(
            metric_names.OPERATOR_QUEUE_LENGTH, "Resources waiting for a reconcile.", registry=self.registry
        )
        self.writes = Counter(
            metric_names.OPERATOR_WRITES_TOTAL,
            "Writes to the API server.",
            ("verb", "kind"),
            registry=self.registry,
        )
        self.held_back = Counter(
            metric_names.OPERATOR_HELD_BACK_TOTAL,
            "Actions that a resource's budget of new pods or status writes delayed.",
            ("kind",),
            registry=self.registry,
        )
        self.unanswered = Counter(
            metric_names.OPERATOR_UNANSWERED_WRITES_TOTAL,
            "Writes without an answer from the API server. The operator retries them.",
            ("verb", "kind"),
            registry=self.registry,
        )
        self.events_dropped = Counter(
            metric_names.OPERATOR_EVENTS_DROPPED_TOTAL,
            "Events that the operator did not write, because the resource had too many events, or because "
            "the API server refused the request or did not answer.",
            registry=self.registry,
        )
        self._unwritten: set[ResourceKey] = set()
        self.unwritten = Gauge(
            metric_names.OPERATOR_UNWRITTEN_STATUSES,
            "Resources whose stored status is old, because the API server has not accepted the new status.",
            registry=self.registry,
        )
        self.last_resync = Gauge(
            metric_names.OPERATOR_LAST_PASS_TIMESTAMP_SECONDS,
            "Unix time of the end of the last resync.",
            registry=self.registry,
        )
        self.caches = Gauge(
            metric_names.OPERATOR_CACHES,
            "Number of the operator's caches that are not healthy, by state: unlisted (never listed since "
            "the start), failing (the last list or watch failed) or stale.",
            ("state",),
            registry=self.registry,
        )
        self._resources = _ResourceCollector()
        self.registry.register(self._resources)
        ProcessCollector(registry=self.registry)

    def observe_status(self, key: ResourceKey, status: HeteroInferenceStatus | None) -> None:
        """Stores the values of a resource's status that metrics need; removes them if there is no status."""
        if status is None:
            self._resources.known.pop(key, None)
            self.observe_status_write(key, written=True)
        else:
            self._resources.known[key] = _values_of_resource(status)

    def observe_status_write(self, key: ResourceKey, written: bool) -> None:
        """Records whether the stored status of a resource is up to date."""
        if written:
            self._unwritten.discard(key)
        else:
            self._unwritten.add(key)
        self.unwritten.set(len(self._unwritten))

    def exposition(self) -> bytes:
        """Returns all metrics in Prometheus' text format. Thread-safe."""
        return generate_latest(self.registry)


def counting(counter: Counter) -> Callable[..., None]:
    """Returns a function that takes values of the counter's labels, and increments the counter."""
    return lambda *labels: counter.labels(*labels).inc()


@dataclass(frozen=True, slots=True, kw_only=True)
class _GroupValues:
    """The values of a group's status that metrics need.

    Attributes:
        index: from 0.
        phase: a value of GroupPhase.
        epoch: 0 before the first start.
        ranks: number of ranks in the plan; None without a plan.
        restarts: number of restarts that count towards restart.maxRestarts.
        failed_at: Unix time of the newest failure, in seconds; None without a failure.
        reason: reason of the newest failure, or "".
        rank: rank that failed, or "".
    """

    index: int
    phase: str
    epoch: int
    ranks: int | None
    restarts: int
    failed_at: float | None
    reason: str
    rank: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _ResourceValues:
    """The values of a status that metrics need.

    Attributes:
        conditions: type, reason and value of each condition.
    """

    conditions: tuple[tuple[str, str, float], ...]
    groups: tuple[_GroupValues, ...]


def _values_of_resource(status: HeteroInferenceStatus) -> _ResourceValues:
    """Reads the values for metrics from a status."""
    ranks = {plan.hash: plan.world_size for plan in status.plans}
    # Dicts, because a status that others wrote may list a condition or a group twice, and Prometheus refuses
    # duplicate series.
    conditions = {condition.type: condition for condition in status.conditions}
    groups = {group.index: group for group in status.groups}
    return _ResourceValues(
        conditions=tuple(
            (condition.type, condition.reason, _CONDITION_VALUE[condition.status])
            for condition in conditions.values()
        ),
        groups=tuple(_values_of_group(group, ranks) for group in groups.values()),
    )


def _values_of_group(group: GroupStatus, ranks: Mapping[str, int]) -> _GroupValues:
    """Reads the values for metrics from a group's status.

    Args:
        ranks: number of ranks of each plan, by the plan's hash.
    """
    failure = group.failures[-1] if group.failures else None
    return _GroupValues(
        index=group.index,
        phase=group.phase,
        epoch=group.epoch,
        ranks=ranks.get(group.plan_hash or ""),
        restarts=group.restarts,
        failed_at=None if failure is None else failure.time.timestamp(),
        reason="" if failure is None else failure.reason,
        rank="" if failure is None or failure.rank is None else str(failure.rank),
    )


class _ResourceCollector(Collector):
    """Builds samples of all known resources on each collection."""

    def __init__(self) -> None:
        self.known: dict[ResourceKey, _ResourceValues] = {}

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yields the metric families, all from the same moment."""
        known = list(self.known.items())
        groups = [
            ((key.namespace, key.name, f"{key}/{group.index}"), group)
            for key, resource in known
            for group in resource.groups
        ]
        yield _build_phase_family(group for _, group in groups)
        yield _build_condition_family(known)
        yield from _build_group_families(groups)

    def describe(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yields the metric families. The registry uses only their names."""
        return self.collect()


def _build_phase_family(groups: Iterable[_GroupValues]) -> GaugeMetricFamily:
    """Counts the groups in each phase."""
    counts = {phase.value: 0 for phase in GroupPhase}
    for group in groups:
        counts[group.phase] = counts.get(group.phase, 0) + 1
    family = GaugeMetricFamily(
        metric_names.OPERATOR_GROUPS, "Number of groups in each phase.", labels=("phase",)
    )
    for phase, count in sorted(counts.items()):
        family.add_metric((phase,), count)
    return family


def _build_condition_family(known: Iterable[tuple[ResourceKey, _ResourceValues]]) -> GaugeMetricFamily:
    """Builds a sample for each condition of each resource."""
    family = GaugeMetricFamily(
        metric_names.RESOURCE_CONDITION,
        "Conditions of a resource: 1 True, 0 False, -1 Unknown.",
        labels=(*metric_names.RESOURCE_LABELS, "condition", "reason"),
    )
    for key, resource in known:
        for kind, reason, value in resource.conditions:
            family.add_metric((key.namespace, key.name, kind, reason), value)
    return family


def _build_group_families(
    groups: list[tuple[tuple[str, str, str], _GroupValues]],
) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    """Builds the metrics of groups.

    Args:
        groups: labels (namespace, name and group) and values of each group.
    """

    def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=(*metric_names.GROUP_LABELS, *labels))

    ready = gauge(
        metric_names.GROUP_READY,
        "1 while all ranks of the group are ready. Even then, clients may be unable to reach the group: see "
        "the conditions Available and Stalled.",
    )
    phase = gauge(
        metric_names.GROUP_PHASE, "Phase of the group, in the label phase. The value is always 1.", "phase"
    )
    epoch = gauge(metric_names.GROUP_EPOCH, "Epoch of the group. Increases with each start.")
    ranks = gauge(metric_names.GROUP_RANKS, "Number of ranks in the group's plan.")
    failed = gauge(
        metric_names.GROUP_LAST_FAILURE_TIMESTAMP_SECONDS,
        "Unix time of the group's newest failure, by its reason and rank.",
        "reason",
        "rank",
    )
    restarts = CounterMetricFamily(
        metric_names.GROUP_RESTARTS_TOTAL,
        "Restarts after failures that count towards restart.maxRestarts.",
        labels=metric_names.GROUP_LABELS,
    )
    for labels, group in groups:
        ready.add_metric(labels, group.phase == GroupPhase.READY)
        phase.add_metric((*labels, group.phase), 1)
        epoch.add_metric(labels, group.epoch)
        restarts.add_metric(labels, group.restarts)
        if group.ranks is not None:
            ranks.add_metric(labels, group.ranks)
        if group.failed_at is not None:
            failed.add_metric((*labels, group.reason, group.rank), group.failed_at)
    yield from (ready, phase, epoch, ranks, restarts, failed)
