"""The rows of `heteroinfer top` for given statuses and reports of leaders."""

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from rich.console import Console

from heteroinfer_contract.group_report import GroupReport, RankPhase, RankStatus
from heteroinfer_operator.api import HeteroInferenceStatus, parse_status
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.fleet.fleet_reader import kv_use_of
from heteroinfer_operator.fleet.lines import LeaderAnswer, ResourceLine, build_line
from heteroinfer_operator.fleet.screen import (
    TOP_COLUMNS,
    build_rows,
    build_screen,
    describe_predictions,
    describe_waits,
)
from tests.unit.planning.planned_models import plan
from tests.unit.planning.test_feed_forward import feed_forward, mixture

KEY = ResourceKey(namespace="ml", name="llama")
SEEN = datetime(2026, 11, 21, 8, 0, tzinfo=UTC).isoformat()


def status(
    ready: str = "True", reason: str = "GroupsReady", available: str = "True"
) -> HeteroInferenceStatus:
    common = {"reason": reason, "message": "as it is", "lastTransitionTime": SEEN}
    conditions = [
        {"type": "Available", "status": available, **common},
        {"type": "Ready", "status": ready, **common},
    ]
    failure = {
        "epoch": 2, "time": SEEN, "reason": "RankExited", "message": "rank 1 was killed", "rank": 1,
        "exitCode": -9,
    }  # fmt: skip
    ranks = [
        {"rank": 0, "role": "cpu", "pod": "llama-0-3-0", "node": "a", "ready": True},
        {
            "rank": 1, "role": "gpu", "pod": "llama-0-3-1", "node": "b", "ready": True, "stepMs": 20.0,
            "computeMs": 15.0, "waitMs": 4.0, "lockedMemoryBytes": 4096, "lockedMemoryLimitBytes": 65536,
            "transports": ["ranks:nccl_net_socket"],
        },
    ]  # fmt: skip
    kv = {
        "blocks": 8, "tokens": 256, "limitingRank": 0, "limitingRole": "cpu", "limitedBy": "Plan",
        "roomBlocks": 8,
    }  # fmt: skip
    group = {
        "index": 0, "epoch": 3, "phase": "Ready", "restarts": 2, "failures": [failure], "kv": kv,
        "members": ranks, "planHash": "p",
    }  # fmt: skip
    plan = {
        "hash": "p", "worldSize": 2, "predictedStepMs": 19.0, "calibration": "role cpu: calibration abc",
        "longPrompts": "in steps of 129 tokens or more, the GPU helps",
        "ranks": [
            {
                "rank": 1, "stage": 1, "role": "gpu", "device": "GPU", "layers": 2, "memory": "1Mi",
                "predictedStepMs": 14.0,
            },
        ],
    }  # fmt: skip
    value = {"conditions": conditions, "summary": {"groups": "1/1"}, "groups": [group], "plans": [plan]}
    return parse_status(value)


def report(epoch: int = 3) -> GroupReport:
    ranks = (
        RankStatus(rank=0, pod=0, phase=RankPhase.LOADING, loaded_bytes=1, total_bytes=4),
        RankStatus(rank=1, pod=1, phase=RankPhase.READY, steps=7, step_s=0.03, compute_s=0.025, wait_s=0.004),
    )
    return GroupReport(group_uid="u", epoch=epoch, plan_hash="p", ready=True, message="", ranks=ranks)


def rows(line: ResourceLine) -> list[list[str]]:
    return [[row.get(column, "").strip() for column in TOP_COLUMNS] for row in build_rows(line)]


def test_locked_memory_and_transports_come_from_the_status_or_the_leader() -> None:
    stored = build_line(KEY, status(), {}).lines[0].ranks
    assert (stored[0].locked_memory_bytes, stored[0].transports) == (None, None)
    assert (stored[1].locked_memory_limit_bytes, stored[1].transports) == (65536, ("ranks:nccl_net_socket",))
    told = report()
    first = replace(told.ranks[0], locked_memory_bytes=8192, transports=("stages:gloo",))
    answer = LeaderAnswer(report=replace(told, ranks=(first, told.ranks[1])))
    live = build_line(KEY, status(), {0: answer}).lines[0].ranks
    assert (live[0].locked_memory_bytes, live[0].transports) == (8192, ("stages:gloo",))
    assert live[1].locked_memory_bytes == 4096, "an earlier worker does not report it"


def test_without_reports_of_leaders_ranks_and_the_last_failure_come_from_the_status() -> None:
    resource, group, first, second = rows(build_line(KEY, status(), {}))
    assert resource[:3] == ["ml/llama", "", "Available, 1/1 groups ready (GroupsReady)"]
    last_failure_text = "RankExited rank 1 (-9) at 11-21 08:00:00Z"
    assert group == [
        "group 0 epoch 3", "", "Ready", "", "20.0", "", "", "19.0", "256 tokens", "2", last_failure_text,
    ]  # fmt: skip
    assert first[:7] == ["rank 0 cpu", "a", "Ready", "", "", "", ""]
    assert second[:7] == ["rank 1 gpu", "b", "Ready", "", "20.0", "15.0", "4.0"]


def test_ranks_of_a_plan_show_their_layers() -> None:
    planned = plan(feed_forward(own={"layers": 3}, device_memory="80Gi"), mixture()).plan
    line = build_line(KEY, status(), {}, {"p": planned})
    assert [rank.layers for group in line.lines for rank in group.ranks] == ["0-23", "7, 15, 23"]


@pytest.mark.parametrize(
    ("ready", "available", "words"),
    [
        ("False", "True", "Available, 1/1 groups ready (RollingOut)"),
        ("False", "False", "not Available, 1/1 groups ready (RollingOut)"),
        ("True", "False", "not Available, 1/1 groups ready (RollingOut)"),
        ("Unknown", "Unknown", "1/1 groups ready (RollingOut)"),
    ],
)
def test_availability_is_shown_with_the_reason(ready: str, available: str, words: str) -> None:
    line = build_line(KEY, status(ready, "RollingOut", available), {})
    assert rows(line)[0][2] == words
    assert (line.dump()["available"], line.dump()["ready"]) == (available, ready)


def test_a_leaders_report_overrides_the_status() -> None:
    _, group, first, second = rows(
        build_line(KEY, status(), {0: LeaderAnswer(report=report(), kv_use=0.374)})
    )
    assert group[8] == "37 % of 256 tokens"
    assert first[:7] == ["rank 0 cpu", "a", "Loading 25 %", "0", "", "", ""]
    assert second[:7] == ["rank 1 gpu", "b", "Ready", "7", "30.0", "25.0", "4.0"]


def test_a_leader_of_another_epoch_is_ignored() -> None:
    line = build_line(KEY, status(), {0: LeaderAnswer(report=report(epoch=2), kv_use=0.5)})
    assert line == build_line(KEY, status(), {})
    assert not line.lines[0].live


def test_json_has_the_same_values_without_empty_values() -> None:
    value = build_line(KEY, status(), {0: LeaderAnswer(report=report(), kv_use=0.5)}).dump()
    assert (value["namespace"], value["name"], value["ready"]) == ("ml", "llama", "True")
    (group,) = value["groups"]
    assert (group["kvUse"], group["kvTokens"], group["live"]) == (0.5, 256, True)
    assert group["failure"]["exitCode"] == -9
    assert group["ranks"][0] == {
        "rank": 0, "role": "cpu", "pod": "llama-0-3-0", "node": "a", "phase": "Loading 25 %", "steps": 0
    }  # fmt: skip
    assert group["ranks"][1]["computeMs"] == 25.0


def test_each_resource_that_is_not_ready_has_a_line() -> None:
    assert list(describe_waits([build_line(KEY, status(), {})])) == []
    waiting = build_line(KEY, status("False", "Starting"), {})
    new = build_line(ResourceKey(namespace="ml", name="new"), HeteroInferenceStatus(), {})
    assert list(describe_waits([waiting, new])) == [
        "ml/llama: Starting: as it is",
        "ml/new: no operator has acted on this resource yet. Run `heteroinfer check`",
    ]


def test_a_resource_without_a_status_is_shown_as_a_sentence() -> None:
    new = build_line(ResourceKey(namespace="ml", name="new"), HeteroInferenceStatus(), {})
    console = Console(width=200)
    with console.capture() as shown:
        console.print(build_screen([new], ""))
    assert shown.get().splitlines() == [
        "ml/new: no operator has acted on this resource yet. Run `heteroinfer check`"
    ]
    with console.capture() as both:
        console.print(build_screen([new, build_line(KEY, status(), {})], ""))
    assert both.get().count("ml/new") == 1
    assert "rank 1 gpu" in both.get()


def test_the_table_does_not_interpret_markup() -> None:
    console = Console(width=160, record=True, file=None)
    with console.capture() as said:
        console.print(build_screen([build_line(KEY, status(), {})], "a note [bold]as it is[/bold]"))
    assert "rank 1 gpu" in said.get()
    assert "a note [bold]as it is[/bold]" in said.get()
    with console.capture() as nothing:
        console.print(build_screen([], ""))
    assert nothing.get().strip() == "found no HeteroInference. To search all namespaces, add -A"


def test_top_shows_the_rates_of_predictions_and_the_rule_of_long_prompts() -> None:
    assert list(describe_predictions([build_line(KEY, status(), {})])) == [
        "ml/llama: predictions use role cpu: calibration abc",
        "ml/llama: in steps of 129 tokens or more, the GPU helps",
    ]


def test_the_measurement_of_a_group_replaces_the_predicted_rule_of_long_prompts() -> None:
    group = status().groups[0].changed(long_prompts="CPUs compute all experts")
    line = build_line(KEY, status().changed(groups=(group,)), {})
    assert list(describe_predictions([line]))[-1] == "ml/llama: CPUs compute all experts"


def test_kv_cache_use_comes_from_vllms_gauge() -> None:
    text = '# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25\n'
    assert kv_use_of(text) == 0.25
    assert kv_use_of("vllm:other 1\n") is None
