"""With any status that the schema accepts, reconciles succeed and serving groups keep serving."""

import copy
import functools
import json
from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from heteroinfer_contract import names
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.api import MAX_EPOCH, MAX_GROUPS, parse_status
from heteroinfer_operator.api.crd import build_schema
from heteroinfer_operator.cluster import DeleteObject, PatchStatus, ResourceKey
from heteroinfer_operator.metrics import OperatorMetrics
from tests.integration.crd.strategies import from_schema, paths
from tests.unit.reconcile.structural_schema import find_problems
from tests.unit.reconcile.world import PROFILE, World, cpu_pair

Json: TypeAlias = dict[str, Any]
STATUS = build_schema()["properties"]["status"]
KEY = ResourceKey(namespace="default", name="demo")
TIMES = (
    "2026-01-01t00:00:00z",
    "2026-01-01T00:00:00+24:00",
    "0000-01-01T00:00:00Z",
    "0001-01-01T00:00:00Z",
    "0001-01-01T00:00:00+14:00",
    "9999-12-31T23:59:59Z",
    "9999-12-31T23:59:59-23:59",
    "2125-01-01T00:00:00Z",
    "1970-01-01T00:00:00.999999999Z",
)
INTEGERS = (0, 1, 2, 3, 63, 64, 1000, 10**14, 10**14 + 1, MAX_EPOCH - 1, MAX_EPOCH, 10**15, 2**53 - 1, 2**53)
TEXTS = ("", "a b", "\x1b[31mred", "é" * 64, "True", "demo-0-1-1", "demo-0-2-0", "demo-1-1-0", "demo-0-1-7")


@functools.cache
def _worlds() -> dict[str, World]:
    """Returns a resource in each possible state."""
    found: dict[str, World] = {}

    def world(name: str, **spec: Any) -> World:
        found[name] = World(spec=cpu_pair(**spec))
        return found[name]

    world("serves", replicas=2).serve()
    was_down = world("serves again")
    was_down.serve()
    was_down.end_pod(was_down.workers()[0], message="boom")
    for _ in range(3):
        was_down.settle()
        was_down.reap()
    found["starts"] = copy.deepcopy(was_down)
    was_down.all_ready()
    was_down.settle()
    stops = world("stops")
    stops.serve()
    stops.end_pod(stops.workers()[0], message="boom")
    stops.step()
    failed = world("failed", restart={"maxRestarts": 0})
    failed.serve()
    failed.end_pod(failed.workers()[0])
    failed.settle()
    scaled = world("scaled", replicas=2)
    scaled.serve()
    scaled.end_pod(scaled.workers()[0])
    scaled.step()
    scaled.change_spec(replicas=1)
    scaled.settle()
    without_model = world("model failed")
    without_model.settle()
    without_model.answer_inspection("nonsense", 1)
    without_model.settle()
    world("no capacity").nodes = ()
    found["no capacity"].settle()
    found["no capacity"].answer_inspection()
    found["no capacity"].settle()
    suspended = world("suspended")
    suspended.serve()
    suspended.change_spec(suspend=True)
    suspended.step()
    deleted = world("deleted")
    deleted.serve()
    deleted.deleting = True
    refused = world("refused", replicas=2)
    refused.serve()
    refused.change_spec(replicas="what is this")
    refused.settle()
    return found


SERVING = ("serves", "serves again", "refused")
OTHERS = ("starts", "stops", "failed", "scaled", "model failed", "no capacity", "suspended", "deleted")
WORLDS = (*SERVING, *OTHERS)


def _schema_at(path: tuple[str | int, ...]) -> Json:
    schema: Json = STATUS
    for part in path:
        schema = schema["items"] if isinstance(part, int) else schema["properties"][part]
    return schema


def _at(value: Any, path: tuple[str | int, ...]) -> Any:
    for part in path:
        value = value[part]
    return value


def _odd(schema: Json) -> list[Any]:
    """Returns values at the edges of the schema."""
    values: tuple[Any, ...] = {"integer": INTEGERS, "number": (0.0, 1e-300, 1e12), "array": ([],)}.get(
        schema["type"], TEXTS
    )
    if schema.get("format") == "date-time":
        values = TIMES
    return [value for value in values if not list(find_problems(schema, value))]


@st.composite
def damaged(draw: st.DrawFn, stored: Json) -> Json:
    """Changes, repeats or removes parts of a stored status, within the schema."""
    status: Json = json.loads(json.dumps(stored))
    for _ in range(draw(st.integers(1, 6))):
        path = draw(st.sampled_from(paths(status) or [()]))
        if not path:
            break
        schema, parent = _schema_at(path), _at(status, path[:-1])
        before = copy.deepcopy(status)
        odd = _odd(schema)
        how = draw(st.sampled_from(["odd", "odd", "odd", "other", "lost", "twice"]))
        if how == "odd" and odd:
            parent[path[-1]] = draw(st.sampled_from(odd))
        elif how == "other":
            parent[path[-1]] = draw(from_schema(schema))
        elif how == "twice" and isinstance(parent, list):
            parent.append(copy.deepcopy(_at(status, path)))
        else:
            del parent[path[-1]]
        if list(find_problems(STATUS, status)):
            status = before
    return status


@st.composite
def cases(draw: st.DrawFn) -> tuple[str, Json]:
    """Returns the name of a world, and a stored status for it."""
    name = draw(st.sampled_from(WORLDS))
    if draw(st.integers(0, 4)) == 0:
        return name, draw(from_schema(STATUS))
    of = draw(st.sampled_from([name, name, name, *WORLDS]))
    return name, draw(damaged(_worlds()[of].status))


def _steps(world: World) -> Iterator[list[Any]]:
    """Lets time pass, and yields the actions of each reconcile."""
    for _ in range(3):
        yield list(world.step().actions)
        world.reap()
        world.advance_time(1)


def _check(name: str, status: Json) -> World:
    world = copy.deepcopy(_worlds()[name])
    world.status, world.version = status, world.version + 1
    served = {pod.uid for pod in world.pods.values() if pod.ready and not pod.ended}
    OperatorMetrics().observe_status(KEY, parse_status(status))
    for actions in _steps(world):
        for write in (action for action in actions if isinstance(action, PatchStatus)):
            assert list(find_problems(STATUS, write.status)) == []
            assert write.defect == ""
        if name in SERVING:
            ended = {a.uid for a in actions if isinstance(a, DeleteObject) and a.kind == "Pod"}
            assert not served & ended
    assert len(world.pods) <= 6, sorted(world.pods)
    if name in SERVING:
        assert world.condition("Available") == ("True", "Serving")
        served_groups = [g for g in parse_status(world.status).groups if g.phase == "Ready"]
        assert len(served_groups) == len(served) / 2
    return world


@settings(max_examples=100, deadline=None)
@given(case=cases())
@example(case=("serves", {"groups": [{"index": 0, "epoch": MAX_EPOCH, "phase": "Ready"}, {"index": 1}]}))
@example(case=("refused", {}))
def test_no_valid_status_ends_or_stops_a_group(case: tuple[str, Json]) -> None:
    _check(*case)


@functools.cache
def _edges() -> list[tuple[str, tuple[str | int, ...], Any]]:
    """Yields every part of every world's status with every odd value that the schema accepts there."""
    return [
        (name, path, value)
        for name, world in _worlds().items()
        for path in paths(world.status)
        for value in _odd(_schema_at(path))
    ]


def _with(name: str, path: tuple[str | int, ...], value: Any) -> Json:
    status: Json = json.loads(json.dumps(_worlds()[name].status))
    _at(status, path[:-1])[path[-1]] = value
    return status


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_odd_value_ends_or_stops_a_group(data: st.DataObject) -> None:
    """Each run tests a few of thousands of values at the edges of the schema."""
    name, path, value = data.draw(st.sampled_from(_edges()))
    status = _with(name, path, value)
    if not list(find_problems(STATUS, status)):
        _check(name, status)


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("serves", ("groups", 0, "epoch"), 2),
        ("serves", ("groups", 0, "epoch"), MAX_EPOCH),
        ("serves", ("groups", 0, "epoch"), 2**53),
        ("serves", ("groups", 0, "restarts"), 2**53),
        ("serves", ("groups", 0, "members", 1, "pod"), ""),
        ("serves", ("groups", 0, "members", 1, "pod"), "demo-0-1-7"),
        ("serves", ("groups", 0, "servedTime"), "9999-12-31T23:59:59-23:59"),
        ("serves again", ("groups", 0, "failures", 0, "time"), "0001-01-01T00:00:00Z"),
        ("stops", ("groups", 0, "failures", 0, "time"), "2026-01-01t00:00:00z"),
        ("stops", ("groups", 0, "failures", 0, "reason"), "a b"),
        ("model failed", ("model", "reason"), ""),
        ("model failed", ("model", "failures"), 2**53),
        ("refused", ("groups",), []),
    ],
    ids=str,
)
def test_damaged_values_end_or_stop_no_group(name: str, path: tuple[str | int, ...], value: Any) -> None:
    _check(name, _with(name, path, value))


@settings(max_examples=25, deadline=None)
@given(name=st.sampled_from(SERVING), data=st.data())
def test_a_failure_is_detected_with_any_status(name: str, data: st.DataObject) -> None:
    """No stored value hides a dead rank or prevents the group's next start."""
    world = _check(name, data.draw(damaged(_worlds()[name].status)))
    world.end_pod(world.workers()[0])
    world.step()
    ended = parse_status(world.status).groups[0]
    assert ended.phase in {"Stopping", "Failed"}
    assert ended.failures[-1].reason == "PodFailed"
    assert ended.epoch < MAX_GROUPS, "the next epoch follows the epoch of the pods"


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_resource_is_deleted_with_any_status(data: st.DataObject) -> None:
    world = copy.deepcopy(_worlds()["deleted"])
    world.status = data.draw(from_schema(STATUS) | damaged(_worlds()["serves"].status))
    world.finalizers = (names.FINALIZER,)
    for _ in range(4):
        world.step()
        world.reap()
    assert not world.pods
    assert not world.finalizers


def test_the_schema_checker_refuses_invalid_statuses() -> None:
    """The checker of these tests refuses values that the API server refuses."""
    good = _worlds()["serves"].status
    assert list(find_problems(STATUS, good)) == []
    group: Json = good["groups"][0]
    assert ModelProfile.from_json(good["model"]["profile"]) == PROFILE
    for bad in (
        {"replicas": 2**31},
        {"replicas": True},
        {"unknown": 1},
        {"conditions": [{"type": "Ready"}]},
        {"conditions": [*good["conditions"], good["conditions"][0]]},
        {"conditions": [{**good["conditions"][0], "reason": "a b"}]},
        {"groups": [{**group, "epoch": 2**53 + 1}]},
        {"groups": [{**group, "phase": "Odd"}]},
        {"groups": [{**group, "message": "x" * 1025}]},
        {"groups": [{**group, "servedTime": "yesterday"}]},
        {"groups": [group] * 65},
    ):
        assert list(find_problems(STATUS, {**good, **bad})) != [], bad
