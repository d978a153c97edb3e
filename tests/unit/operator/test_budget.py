"""The budget of a resource: no window exceeds its bound, and every wait ends."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_operator.cluster import CreateObject, PatchStatus, ResourceKey, ResourceView
from heteroinfer_operator.reconcile.budget import Budget, Spending, Window, wanted_pods
from heteroinfer_operator.reconcile.refusals import TOO_MANY_PODS, ActionPermits

NOW = datetime(2026, 1, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def build_resource(
    spec: dict[str, Any], status: dict[str, Any] | None = None, uid: str = "uid"
) -> ResourceView:
    return ResourceView(
        key=ResourceKey(namespace="default", name="demo"),
        uid=uid,
        generation=1,
        resource_version="1",
        finalizers=(),
        deleting=False,
        spec=spec,
        status=status or {},
    )


def create_pod(name: str, group: int = 0) -> CreateObject:
    manifest = {"kind": "Pod", "metadata": {"name": name}}
    return CreateObject(manifest=manifest, scopes=frozenset({f"group/{group}"}))


@given(
    asked=st.lists(st.tuples(st.integers(0, 100), st.integers(1, 7)), max_size=40),
    most=st.integers(1, 12),
)
def test_a_window_never_exceeds_its_limit_and_each_wait_ends(asked: list[tuple[int, int]], most: int) -> None:
    window, now, done = Window(MINUTE), NOW, []
    for later_s, count in asked:
        now += timedelta(seconds=later_s)
        wait = window.time_until_space(count, most, now)
        assert timedelta() <= wait <= MINUTE
        now += wait
        assert not window.time_until_space(count, most, now), "the wait was long enough"
        for _ in range(count):
            window.add(now)
            done.append(now)
        within = [moment for moment in done if now - moment < MINUTE]
        assert len(within) <= max(most, count)


def test_setting_the_clock_back_does_not_prolong_a_wait() -> None:
    window = Window(MINUTE)
    window.add(NOW)
    assert window.time_until_space(1, 1, NOW - timedelta(days=1)) == MINUTE


@pytest.mark.parametrize(
    ("spec", "wanted"),
    [
        ({"replicas": 3, "roles": [{"pods": 2}, {"pods": 1}]}, 9),
        ({"roles": [{}]}, 1),
        ({"replicas": "many", "roles": "none"}, 2),
        ({"replicas": 0, "roles": [{"pods": "x"}, 7]}, 1),
        ({}, 1),
    ],
)
def test_counts_wanted_pods_of_unreadable_specs(spec: dict[str, Any], wanted: int) -> None:
    assert wanted_pods(build_resource(spec, {"groups": [{"index": 0}, {"index": 1}]})) == wanted


def test_the_pods_of_a_group_are_created_together_or_not_at_all() -> None:
    """A partly created group would be deleted and created again."""
    resource, budget = build_resource({"roles": [{"pods": 4}]}), Budget()
    pods = [create_pod(f"demo-{group}-1-{index}", group) for group in range(5) for index in range(4)]
    permits = ActionPermits("demo", (), NOW, Spending(budget, resource, pods, NOW))
    created = [pod.manifest["metadata"]["name"] for pod in pods if permits.may_run(pod)]
    assert created == [f"demo-{group}-1-{index}" for group in range(4) for index in range(4)]
    (refusal,) = permits.known.values()
    assert refusal.reason == TOO_MANY_PODS
    assert refusal.retry_at == NOW + MINUTE
    assert "at most 18 pods a minute for this resource (2 x 4 wanted pods + 10)" in refusal.message


def test_waiting_pods_name_the_newest_failure_of_their_groups() -> None:
    newest = {"time": "2026-01-01T00:00:02Z", "reason": "OutOfMemory"}
    groups = [
        {"index": 0, "failures": [newest]},
        {"index": 1, "failures": [{"time": "2026-01-01T00:00:01Z"}]},
    ]
    resource = build_resource({"roles": [{"pods": 1}]}, {"groups": groups})
    text = Spending(Budget(), resource, [], NOW).describe_waiting_pods(frozenset({"group/0", "group/1"}))
    assert "Fix the cause of the last failure: OutOfMemory" in text


def test_refused_pods_cost_no_budget() -> None:
    resource, budget = build_resource({"roles": [{"pods": 1}]}), Budget()
    for index in range(50):
        pod = create_pod(f"demo-0-{index}-0")
        permits = ActionPermits("demo", (), NOW, Spending(budget, resource, [pod], NOW))
        assert permits.may_run(pod)
        permits.record_refused(pod, "ObjectRefused", "exceeded quota")


def test_unsent_pods_cost_no_budget() -> None:
    resource, budget = build_resource({"roles": [{"pods": 1}]}), Budget()
    for index in range(50):
        pod = create_pod(f"demo-0-{index}-0")
        permits = ActionPermits("demo", (), NOW, Spending(budget, resource, [pod], NOW))
        assert permits.may_run(pod)
        permits.record_unsent(pod)


@pytest.mark.parametrize("stored", [1, 2, 3])
def test_own_statuses_without_an_answer_do_not_count_as_writes_of_another_operator(stored: int) -> None:
    """The API server may store a write of this operator and answer late or never."""
    budget, statuses = Budget(), [{"replicas": index} for index in range(30)]
    for index in range(3, 30):
        now = NOW + timedelta(seconds=index)
        resource = build_resource({}, statuses[index - stored])
        write = PatchStatus(status=statuses[index], resource_version="1")
        spending = Spending(budget, resource, [write], now)
        assert ActionPermits("demo", (), now, spending).may_run(write)
        assert spending.describe_other_writer() == ""


def test_a_status_with_numbers_in_another_format_does_not_count_as_a_write_of_another_operator() -> None:
    budget = Budget()
    for index in range(20):
        now = NOW + timedelta(seconds=index)
        resource = build_resource({}, {"groups": [{"members": [{"stepMs": index - 1}]}]})
        write = PatchStatus(
            status={"groups": [{"members": [{"stepMs": float(index)}]}]}, resource_version="1"
        )
        spending = Spending(budget, resource, [write], now)
        assert ActionPermits("demo", (), now, spending).may_run(write)
        assert spending.describe_other_writer() == ""


def test_a_group_larger_than_the_budget_is_created_if_the_budget_is_unused() -> None:
    """The group still has the revision of an earlier spec, which had more pods."""
    resource, budget = build_resource({"roles": [{"pods": 1}]}), Budget()
    pods = [create_pod(f"demo-0-1-{index}") for index in range(40)]
    permits = ActionPermits("demo", (), NOW, Spending(budget, resource, pods, NOW))
    assert all(permits.may_run(pod) for pod in pods)


def test_actions_that_depend_on_a_status_wait_until_the_status_may_be_written() -> None:
    held: list[str] = []
    budget = Budget(report=held.append)
    resource = build_resource({"roles": [{"pods": 1}]})
    for index in range(3):
        status = PatchStatus(status={"replicas": index}, resource_version="1")
        pod = create_pod(f"demo-0-{index}-0")
        permits = ActionPermits("demo", (), NOW, Spending(budget, resource, [status, pod], NOW))
        assert [permits.may_run(action) for action in (status, pod)] == [index < 2] * 2
    assert permits.look_again_s() == 1.0
    assert held == ["status writes"]
    assert ActionPermits("demo", (), NOW, Spending(Budget(), resource, [], NOW)).may_run(status)


def test_permits_of_an_earlier_decision_do_not_keep_its_resource_and_actions_in_memory() -> None:
    """Each resource keeps its permits until the next decision, because late answers still need them."""
    budget, long = Budget(), "a long text"
    resource = build_resource({"roles": [{"pods": 1, "name": long}]}, {"groups": [{"message": long}]})
    status = PatchStatus(status={"replicas": 1}, resource_version="1")
    pod = create_pod(f"demo-0-1-{long}")
    permits = ActionPermits("demo", (), NOW, Spending(budget, resource, [status, pod], NOW))
    assert permits.may_run(status)
    assert permits.may_run(pod)
    assert long in repr(permits)
    permits.release_inputs()
    assert long not in repr(permits)
    permits.record_success(status)
    permits.record_refused(pod, "ObjectRefused", "exceeded quota")
    assert not budget.pods.time_until_space(1, 1, NOW), "a refused pod costs nothing"
