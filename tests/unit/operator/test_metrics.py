"""The operator's metrics of resources, computed from their status alone."""

from typing import Any

import pytest

from heteroinfer_contract import metric_names as names
from heteroinfer_operator.api import HeteroInferenceStatus, parse_status
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.metrics import OperatorMetrics

KEY = ResourceKey(namespace="ns", name="tiny")
GROUP = {"namespace": "ns", "name": "tiny", "group": "ns/tiny/0"}
STATUS: dict[str, Any] = {
    "conditions": [
        {
            "type": kind,
            "status": status,
            "reason": reason,
            "message": "",
            "lastTransitionTime": "2026-11-21T08:00:00Z",
        }
        for kind, status, reason in (
            ("Ready", "False", "RankExited"),
            ("Failed", "False", "NotFailed"),
            ("Planned", "True", "PlanReady"),
            ("ModelReady", "Unknown", "Inspecting"),
        )
    ],
    "plans": [{"hash": "p1", "worldSize": 3}],
    "groups": [
        {
            "index": 0,
            "phase": "Starting",
            "epoch": 3,
            "planHash": "p1",
            "restarts": 2,
            "failures": [
                {"epoch": 1, "time": "2026-11-21T08:00:00Z", "reason": "PodLost", "message": "m"},
                {
                    "epoch": 2,
                    "time": "2026-11-21T08:01:00Z",
                    "reason": "RankExited",
                    "message": "m",
                    "rank": 1,
                },
            ],
        }
    ],
}


def status_of(*phases: str) -> HeteroInferenceStatus:
    return parse_status({"groups": [{"index": i, "phase": phase} for i, phase in enumerate(phases)]})


def test_groups_are_counted_by_phase_until_their_resource_is_gone() -> None:
    metrics = OperatorMetrics()
    a, b = (ResourceKey(namespace="ns", name=name) for name in "ab")

    def count(phase: str) -> float | None:
        return metrics.registry.get_sample_value(names.OPERATOR_GROUPS, {"phase": phase})

    metrics.observe_status(
        a, parse_status({"groups": [{"index": 0, "phase": "Ready"}, {"index": 1, "phase": "Starting"}]})
    )
    metrics.observe_status(b, status_of("Ready"))
    assert (count("Ready"), count("Starting"), count("Failed")) == (2, 1, 0)
    metrics.observe_status(
        a, parse_status({"groups": [{"index": 0, "phase": "Ready"}, {"index": 1, "phase": "Ready"}]})
    )
    assert (count("Ready"), count("Starting")) == (3, 0)
    metrics.observe_status(a, None)
    metrics.observe_status(b, parse_status({}))
    assert (count("Ready"), count("Starting")) == (0, 0)


def test_metrics_show_the_state_and_failures_of_a_group() -> None:
    metrics = OperatorMetrics()
    metrics.observe_status(KEY, parse_status(STATUS))

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, {**GROUP, **labels})

    assert value(names.GROUP_READY) == 0
    assert value(names.GROUP_PHASE, phase="Starting") == 1
    assert value(names.GROUP_EPOCH) == 3
    assert value(names.GROUP_RANKS) == 3
    assert value(names.GROUP_RESTARTS_TOTAL) == 2
    newest = {"reason": "RankExited", "rank": "1"}
    assert value(names.GROUP_LAST_FAILURE_TIMESTAMP_SECONDS, **newest) == 1795248060
    served = {**STATUS, "groups": [{**STATUS["groups"][0], "phase": "Ready"}]}
    metrics.observe_status(KEY, parse_status(served))
    assert value(names.GROUP_READY) == 1
    assert value(names.GROUP_PHASE, phase="Starting") is None


def test_metrics_of_conditions_are_1_0_or_minus_1() -> None:
    metrics = OperatorMetrics()
    metrics.observe_status(KEY, parse_status(STATUS))
    found = {
        item["type"]: metrics.registry.get_sample_value(
            names.RESOURCE_CONDITION,
            {"namespace": "ns", "name": "tiny", "condition": item["type"], "reason": item["reason"]},
        )
        for item in STATUS["conditions"]
    }
    assert found == {"Ready": 0, "Failed": 0, "Planned": 1, "ModelReady": -1}


def test_series_end_with_their_resource() -> None:
    metrics = OperatorMetrics()
    metrics.observe_status(KEY, parse_status(STATUS))
    assert b"ns/tiny/0" in metrics.exposition()
    metrics.observe_status(KEY, None)
    assert b"ns/tiny" not in metrics.exposition()


def test_metrics_contain_the_operators_own_memory() -> None:
    held = OperatorMetrics().registry.get_sample_value(names.PROCESS_RESIDENT_MEMORY_BYTES)
    assert held is not None
    assert held > 1 << 20


@pytest.mark.parametrize(
    "damaged",
    [
        {"plans": [{"worldSize": 1}]},
        {"conditions": [{"type": "Ready", "status": "True"}]},
        {"groups": {"a": 1}, "plans": 7},
        {"groups": [{"index": 1, "failures": None}, {"index": 1}, {"index": 0, "epoch": 1e308}]},
        *(
            {"groups": [{"index": 0, "failures": [{"epoch": 1, "reason": "X", "message": "", "time": time}]}]}
            for time in ("2026-01-01t00:00:00z", "2026-01-01T00:00:00+24:00", "0000-01-01T00:00:00Z")
        ),
    ],
    ids=str,
)
def test_a_damaged_status_loses_only_its_unreadable_parts(damaged: dict[str, Any]) -> None:
    metrics = OperatorMetrics()
    metrics.observe_status(KEY, parse_status({**STATUS, **damaged}))
    page = metrics.exposition().decode()
    samples = [line.rpartition(" ")[0] for line in page.splitlines() if not line.startswith("#")]
    assert len(samples) == len(set(samples)), "Prometheus refuses a page with duplicate series"
    kept = "heteroinfer_group_epoch" if "groups" not in damaged else 'condition="Planned"'
    assert any(kept in sample for sample in samples)


def test_unwritten_statuses_are_counted_until_they_are_written() -> None:
    metrics = OperatorMetrics()
    keys = [ResourceKey(namespace="default", name=name) for name in ("a", "b")]

    def unwritten() -> float | None:
        return metrics.registry.get_sample_value(names.OPERATOR_UNWRITTEN_STATUSES)

    assert unwritten() == 0
    for key in (*keys, keys[0]):
        metrics.observe_status_write(key, False)
    assert unwritten() == 2
    metrics.observe_status_write(keys[0], True)
    assert unwritten() == 1
    metrics.observe_status(keys[1], None)
    assert unwritten() == 0, "the resource is gone"
