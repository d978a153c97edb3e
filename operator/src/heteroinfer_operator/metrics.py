"""The operator's own metrics; names stand in heteroinfer_contract.metrics."""

from collections import Counter as Count
from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from heteroinfer_contract import metrics as names
from heteroinfer_operator.cluster import ResourceKey

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class OperatorMetrics:
    """What the operator counts of itself, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.reconcile_seconds = Histogram(
            names.OPERATOR_RECONCILE_SECONDS,
            "Time of one reconcile.",
            registry=self.registry,
            buckets=_SECONDS,
        )
        self.reconcile_errors = Counter(
            names.OPERATOR_RECONCILE_ERRORS_TOTAL,
            "Reconciles that failed, by the reason of the error.",
            ("reason",),
            registry=self.registry,
        )
        self.queue_length = Gauge(
            names.OPERATOR_QUEUE_LENGTH, "Resources that wait for a reconcile.", registry=self.registry
        )
        self.writes = Counter(
            names.OPERATOR_WRITES_TOTAL, "Writes to the API server.", ("verb", "kind"), registry=self.registry
        )
        self.last_pass = Gauge(
            names.OPERATOR_LAST_PASS_TIMESTAMP_SECONDS,
            "Unix time at which a pass over all resources last ended.",
            registry=self.registry,
        )
        self._groups_gauge = Gauge(
            names.OPERATOR_GROUPS, "Groups, by phase of their status.", ("phase",), registry=self.registry
        )
        self._groups: dict[ResourceKey, Count[str]] = {}

    def observe_status(self, key: ResourceKey, status: Mapping[str, Any] | None) -> None:
        """Counts the groups of a resource by phase; None forgets a resource that is gone."""
        before = self._groups.pop(key, Count[str]())
        after = Count[str](str(group.get("phase", "Unknown")) for group in (status or {}).get("groups") or ())
        if after:
            self._groups[key] = after
        for phase in before.keys() | after.keys():
            self._groups_gauge.labels(phase).inc(after[phase] - before[phase])

    def observe_write(self, verb: str, kind: str) -> None:
        """Counts an accepted write: verb and plural as in RBAC."""
        self.writes.labels(verb, kind).inc()

    def exposition(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self.registry)
