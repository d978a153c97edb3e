"""The operator's own metrics, and what it knows of resources; names stand in the contract's metric_names.

Of each resource only a few small values are kept, and made into samples when they are asked
for: a thousand resources are some hundred kilobytes.
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

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_CONDITION_VALUE: Final = {
    ConditionStatus.TRUE: 1.0,
    ConditionStatus.FALSE: 0.0,
    ConditionStatus.UNKNOWN: -1.0,
}


class OperatorMetrics:
    """What the operator counts of itself and sees of resources, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            metric_names.OPERATOR_RECONCILE_SECONDS,
            "Time of one reconcile.",
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.reconcile_errors = Counter(
            metric_names.OPERATOR_RECONCILE_ERRORS_TOTAL,
            "Reconciles that failed, by the reason of the error.",
            ("reason",),
            registry=self.registry,
        )
        self.reconcile_errors.labels("Conflict")  # so that the series is there from the start
        self.queue_length = Gauge(
            metric_names.OPERATOR_QUEUE_LENGTH, "Resources that wait for a reconcile.", registry=self.registry
        )
        self.writes = Counter(
            metric_names.OPERATOR_WRITES_TOTAL,
            "Writes to the API server.",
            ("verb", "kind"),
            registry=self.registry,
        )
        self.held_back = Counter(
            metric_names.OPERATOR_HELD_BACK_TOTAL,
            "Actions that a resource's budget of new pods or status writes held back.",
            ("kind",),
            registry=self.registry,
        )
        self.unanswered = Counter(
            metric_names.OPERATOR_UNANSWERED_WRITES_TOTAL,
            "Writes that the API server could not answer; each is tried again.",
            ("verb", "kind"),
            registry=self.registry,
        )
        self.events_dropped = Counter(
            metric_names.OPERATOR_EVENTS_DROPPED_TOTAL,
            "Events that were not written: too many of one resource, or the API server did not take them.",
            registry=self.registry,
        )
        self._unwritten: set[ResourceKey] = set()
        self.unwritten = Gauge(
            metric_names.OPERATOR_UNWRITTEN_STATUSES,
            "Resources whose stored status is old, since the API server does not take the new one.",
            registry=self.registry,
        )
        self.last_resync = Gauge(
            metric_names.OPERATOR_LAST_PASS_TIMESTAMP_SECONDS,
            "Unix time at which a resync last ended.",
            registry=self.registry,
        )
        self.caches = Gauge(
            metric_names.OPERATOR_CACHES,
            "Copies of collections of the API server that are not as they should be.",
            ("state",),
            registry=self.registry,
        )
        self._resources = _ResourceCollector()
        self.registry.register(self._resources)
        ProcessCollector(registry=self.registry)

    def observe_status(self, key: ResourceKey, status: HeteroInferenceStatus | None) -> None:
        """Keeps a resource's status; None forgets a resource that is gone."""
        if status is None:
            self._resources.known.pop(key, None)
            self.observe_status_write(key, written=True)
        else:
            self._resources.known[key] = _resource(status)

    def observe_status_write(self, key: ResourceKey, written: bool) -> None:
        """Notes whether the status of a resource could be written, or is true as it is stored."""
        (self._unwritten.discard if written else self._unwritten.add)(key)
        self.unwritten.set(len(self._unwritten))

    def exposition(self) -> bytes:
        """Returns all metrics in Prometheus' text format; any thread may ask."""
        return generate_latest(self.registry)


def counting(counter: Counter) -> Callable[..., None]:
    """Returns a function that counts one more with the labels that it is called with."""
    return lambda *labels: counter.labels(*labels).inc()


@dataclass(frozen=True, slots=True, kw_only=True)
class _KeptGroup:
    """What is kept of a group's status.

    Attributes:
        index: from 0.
        phase: of GroupPhase.
        epoch: grows with each start; 0 before the first.
        ranks: that its plan has; None without a plan.
        restarts: that count.
        failed_at: Unix time of its newest failure, in seconds; None without one.
        reason: of that failure.
        rank: that it was, or "".
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
class _Resource:
    """What is kept of a status: conditions as type, reason and value; groups."""

    conditions: tuple[tuple[str, str, float], ...]
    groups: tuple[_KeptGroup, ...]


def _resource(status: HeteroInferenceStatus) -> _Resource:
    ranks = {plan.hash: plan.world_size for plan in status.plans}
    # One sample a condition and group: Prometheus refuses a page with the same series twice.
    conditions = {condition.type: condition for condition in status.conditions}
    groups = {group.index: group for group in status.groups}
    return _Resource(
        conditions=tuple(
            (condition.type, condition.reason, _CONDITION_VALUE[condition.status])
            for condition in conditions.values()
        ),
        groups=tuple(_group(group, ranks) for group in groups.values()),
    )


def _group(group: GroupStatus, ranks: Mapping[str, int]) -> _KeptGroup:
    failure = group.failures[-1] if group.failures else None
    return _KeptGroup(
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
    """Samples of all known resources, made when they are collected."""

    def __init__(self) -> None:
        self.known: dict[ResourceKey, _Resource] = {}

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yields the families, all of one moment."""
        known = list(self.known.items())
        groups = [
            ((key.namespace, key.name, f"{key}/{group.index}"), group)
            for key, resource in known
            for group in resource.groups
        ]
        yield _phases(group for _, group in groups)
        yield _conditions(known)
        yield from _of_groups(groups)

    def describe(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """Yields the families without samples: their names are taken."""
        return self.collect()


def _phases(groups: Iterable[_KeptGroup]) -> GaugeMetricFamily:
    counts = {phase.value: 0 for phase in GroupPhase}
    for group in groups:
        counts[group.phase] = counts.get(group.phase, 0) + 1
    family = GaugeMetricFamily(
        metric_names.OPERATOR_GROUPS, "Groups, by phase of their status.", labels=("phase",)
    )
    for phase, count in sorted(counts.items()):
        family.add_metric((phase,), count)
    return family


def _conditions(known: Iterable[tuple[ResourceKey, _Resource]]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(
        metric_names.RESOURCE_CONDITION,
        "Conditions of a resource: 1 True, 0 False, -1 Unknown.",
        labels=(*metric_names.RESOURCE_LABELS, "condition", "reason"),
    )
    for key, resource in known:
        for kind, reason, value in resource.conditions:
            family.add_metric((key.namespace, key.name, kind, reason), value)
    return family


def _of_groups(
    groups: list[tuple[tuple[str, str, str], _KeptGroup]],
) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
    def gauge(name: str, text: str, *labels: str) -> GaugeMetricFamily:
        return GaugeMetricFamily(name, text, labels=(*metric_names.GROUP_LABELS, *labels))

    ready = gauge(
        metric_names.GROUP_READY,
        "1 while all ranks of the group are ready; clients reach it while Available is True.",
    )
    phase = gauge(metric_names.GROUP_PHASE, "The phase that the group is in; always 1.", "phase")
    epoch = gauge(metric_names.GROUP_EPOCH, "Incarnation of the group; grows with each start.")
    ranks = gauge(metric_names.GROUP_RANKS, "Ranks that the group's plan has.")
    failed = gauge(
        metric_names.GROUP_LAST_FAILURE_TIMESTAMP_SECONDS,
        "Unix time of the group's newest failure, and what failed.",
        "reason",
        "rank",
    )
    restarts = CounterMetricFamily(
        metric_names.GROUP_RESTARTS_TOTAL,
        "Restarts because of failures that count.",
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
