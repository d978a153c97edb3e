"""Text from pods is data: with any content, reconciles succeed and the status can be stored."""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.group_report import GroupReport, RankPhase, RankStatus
from heteroinfer_operator.api import parse_status
from heteroinfer_operator.cluster import ContainerTermination
from tests.unit.reconcile.world import PROFILE, World, cpu_pair, waits

FAILURE = Failure(
    reason=FailureReason.RANK_EXITED, message="rank 1 ended", pod=1, rank=1, exit_code=-9, last_log="log"
)
REPORT = GroupReport(
    group_uid="uid-demo/0",
    epoch=1,
    plan_hash="h",
    ready=True,
    message="",
    ranks=tuple(
        RankStatus(
            rank=rank, pod=rank, phase=RankPhase.READY, steps=9, step_s=0.1, compute_s=0.1,
            kv_blocks=4, kv_room_blocks=5, kv_room_bytes=6,
            gpu_experts_from=7,
        )
        for rank in (0, 1)
    ),
)  # fmt: skip
HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 300, 9999, 2**31, 2**53 + 1, 2**63, 10**400, -0.5, 1e300, float("nan"),
    float("inf"), "", "x" * 5000, "\ud800", "\0", [], {}, [1], [[]], {"rank": 0},
)  # fmt: skip


def paths(value: Any, here: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Returns the path of every value inside a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [here] + [path for key, found in inner for path in paths(found, (*here, key))]


def changed(text: str, path: tuple[Any, ...], value: Any, *, remove: bool = False) -> str:
    """Replaces or removes one value of a JSON text."""
    if not path:
        return json.dumps(value)
    root = copy.deepcopy(json.loads(text))
    inner = root
    for key in path[:-1]:
        inner = inner[key]
    if remove:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return json.dumps(root)


@st.composite
def words(draw: st.DrawFn, text: str) -> str:
    """Draws a damaged variant of `text`."""
    path = draw(st.sampled_from(paths(json.loads(text))))
    return changed(text, path, draw(st.sampled_from(HOSTILE)), remove=bool(path) and draw(st.booleans()))


def check_storable(world: World) -> None:
    """Checks that the CRD and JSON accept the status."""
    assert parse_status(json.loads(json.dumps(world.status, allow_nan=False).encode()))
    json.dumps(world.status, ensure_ascii=False).encode()


@given(words(FAILURE.to_json()) | st.just("[" * 4000) | st.text(max_size=40))
@example(changed(FAILURE.to_json(), ("exit_code",), 300))
@example(changed(FAILURE.to_json(), ("rank",), 9999))
@example(changed(FAILURE.to_json(), ("time",), float("nan")))
@example(changed(FAILURE.to_json(), ("message",), "\ud800"))
@example("[" * 100_000)
@settings(max_examples=60, deadline=None)
def test_any_termination_message_of_a_pod_gives_a_storable_status(message: str) -> None:
    world = World(spec=cpu_pair())
    world.serve()
    world.end_pod(world.workers()[0], message=message)
    world.settle()
    check_storable(world)
    assert world.condition("Ready")[0] == "False"


@given(words(REPORT.to_json()))
@example(changed(REPORT.to_json(), ("ranks", 1), None, remove=True))
@example(changed(REPORT.to_json(), ("ranks",), []))
@example(changed(REPORT.to_json(), ("ranks", 0, "step_s"), float("nan")))
@example(changed(REPORT.to_json(), ("ranks", 0, "rank"), 1))
@settings(max_examples=60, deadline=None)
def test_any_report_of_a_leader_gives_a_storable_status(said: str) -> None:
    world = World(spec=cpu_pair())
    world.serve()
    try:
        world.reports[0] = GroupReport.from_json(said)
    except ContractError:
        return
    for seconds in (0, 400):
        world.advance_time(seconds)
        world.step()
        check_storable(world)
    assert world.condition("Ready") == ("True", "Serving")


@pytest.mark.parametrize("number", [2**31, 2**40, 2**53, 2**63])
@pytest.mark.parametrize("phase", [RankPhase.LOADING, RankPhase.READY])
@pytest.mark.parametrize("name", ["loaded_bytes", "total_bytes", "steps", "kv_blocks", "kv_room_blocks"])
def test_large_numbers_of_ranks_end_no_reconcile(name: str, phase: RankPhase, number: int) -> None:
    """The status also contains sums and products of reported numbers."""
    world = World(spec=cpu_pair())
    world.serve()
    if phase is RankPhase.LOADING:
        world.pods = {name: replace(pod, ready=False) for name, pod in world.pods.items()}
    ranks = [{**rank, "phase": phase.value, "total_bytes": 9, name: number} for rank in _ranks()]
    try:
        world.reports[0] = GroupReport.from_json(changed(REPORT.to_json(), ("ranks",), ranks))
    except ContractError:
        return
    world.step()
    check_storable(world)
    assert (world.condition("Ready")[0] == "True") == (phase is RankPhase.READY)


def _ranks() -> list[dict[str, Any]]:
    return list(json.loads(REPORT.to_json())["ranks"])


@pytest.mark.parametrize("exit_code", [-257, 257, 300, 3221225477, -1073741819])
def test_an_impossible_exit_code_is_reported_and_the_status_stays_storable(exit_code: int) -> None:
    world = World(spec=cpu_pair())
    world.serve()
    world.end_pod(world.workers()[0], exit_code=exit_code)
    world.settle()
    check_storable(world)
    (failure,) = world.status["groups"][0]["failures"]
    assert failure["reason"] == "PodFailed"
    assert str(exit_code) in failure["message"]


@pytest.mark.parametrize(
    "waiting", ["why not", "no such runtime/class", "R" * 129, "Größe: ist so", ": of it"]
)
def test_an_invalid_reason_from_the_kubelet_is_replaced(waiting: str) -> None:
    world = World(spec=cpu_pair())
    world.settle()
    (name,) = world.pods
    world.pods[name] = replace(world.pods[name], node="node", waiting=waits(waiting))
    world.settle()
    check_storable(world)
    assert world.condition("ModelReady")[1] == "ModelPodWaits"
    assert waiting[:100] in next(
        c["message"] for c in world.status["conditions"] if c["type"] == "ModelReady"
    )


def test_a_model_inspection_that_fails_for_days_keeps_retrying() -> None:
    world = World(spec=cpu_pair())
    world.settle()
    world.status["model"] = {**world.status["model"], "phase": "Failed", "failures": 100_000}
    (name,) = world.pods
    world.pods[name] = replace(
        world.pods[name],
        started=True,
        termination=ContainerTermination(exit_code=1, message="no such volume"),
    )
    world.settle()
    check_storable(world)
    world.advance_time(301)
    world.settle()
    assert world.status["model"]["failures"] == 100_001


@given(words(PROFILE.to_json()) | st.just("[" * 100_000))
@example(changed(PROFILE.to_json(), ("num_kv_heads",), 0))
@example(changed(PROFILE.to_json(), ("num_attention_heads",), 0))
@example(changed(PROFILE.to_json(), ("layer_bytes",), []))
@example(changed(PROFILE.to_json(), ("embedding_bytes",), -(10**15)))
@example(changed(PROFILE.to_json(), ("scheme", "group"), -1))
@settings(max_examples=60, deadline=None)
def test_any_answer_of_a_model_pod_gives_a_valid_status(answer: str) -> None:
    world = World(spec=cpu_pair())
    world.settle()
    world.answer_inspection(answer)
    world.settle()
    check_storable(world)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("num_kv_heads",), 0, "ModelProfile.num_kv_heads: must be at least 1 (got 0)"),
        (("layer_bytes",), [1, 2], "ModelProfile.layer_bytes: must have num_layers (8) entries (got 2)"),
        (("head_bytes",), -1, "ModelProfile.head_bytes: must be at least 0 (got -1)"),
        (("scheme", "group"), -1, "Scheme.group: must be at least 0 (got -1)"),
    ],
)
def test_an_impossible_profile_is_reported(path: tuple[str, ...], value: object, message: str) -> None:
    world = World(spec=cpu_pair())
    world.settle()
    world.answer_inspection(changed(PROFILE.to_json(), path, value))
    world.settle()
    (condition,) = [c for c in world.status["conditions"] if c["type"] == "ModelReady"]
    assert (condition["status"], condition["reason"]) == ("False", "ModelNotReadable")
    assert f"{message}. Use the same version of operator and worker" in condition["message"]


def test_a_result_without_json_is_reported_with_a_fix() -> None:
    world = World(spec=cpu_pair())
    world.settle()
    world.answer_inspection("nonsense")
    world.settle()
    (condition,) = [c for c in world.status["conditions"] if c["type"] == "ModelReady"]
    assert "returned no valid result: ModelProfile: must be JSON" in condition["message"]
    assert "Use the same version of operator and worker" in condition["message"]


@pytest.mark.parametrize("uri", ["[" * 5_000 + "]" * 5_000, "[" * 400 + "]" * 400])
def test_a_too_deeply_nested_revision_record_is_ignored(uri: str) -> None:
    """Earlier, a user with write access to ConfigMaps could fail each reconcile of the resource."""
    world = World(spec=cpu_pair())
    world.serve()
    (_, name), record = next((k, v) for k, v in world.objects.items() if k[1].startswith("demo-revision-"))
    (field,) = record["data"]
    another = "demo-revision-0000000000"
    metadata = {**record["metadata"], "name": another}
    text = '{"spec": {"model": {"uri": ' + uri + "}}}"
    world.objects["ConfigMap", another] = {**record, "metadata": metadata, "data": {field: text}}
    world.live(1)
    assert world.condition("Ready") == ("True", "Serving")
    assert ("ConfigMap", name) in world.objects
