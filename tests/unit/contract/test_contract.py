"""Each value of the contract is equal after writing and reading, and errors name the invalid field."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import MAX_TERMINATION_MESSAGE_BYTES, Failure, FailureReason
from heteroinfer_contract.group_report import GroupReport
from heteroinfer_contract.model_fetch import FetchedModel
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodAddress, PodLaunch
from tests.unit.contract.strategies import failures, group_reports, launches, plans, profiles
from tests.unit.reconcile.world import PROFILE

FEW = settings(max_examples=30)
"""A plan is a big value to draw, and unit tests take 10 s in all."""


@given(plans())
@FEW
def test_a_plan_is_equal_after_writing_and_reading(plan: Plan) -> None:
    assert Plan.from_env(plan.to_env()) == plan
    assert Plan.from_json(plan.to_json()).hash == plan.hash


@given(launches)
def test_a_launch_is_equal_after_writing_and_reading(launch: PodLaunch) -> None:
    assert PodLaunch.from_env(launch.to_env()) == launch


@given(group_reports)
def test_a_group_report_is_equal_after_writing_and_reading(report: GroupReport) -> None:
    assert GroupReport.from_json(report.to_json()) == report


@given(group_reports)
def test_unknown_fields_of_a_newer_group_report_are_ignored(report: GroupReport) -> None:
    raw = {**json.loads(report.to_json()), "colour": "blue"}
    raw["ranks"] = [{**rank, "temperature": [1]} for rank in raw["ranks"]]
    assert GroupReport.from_json(json.dumps(raw)) == report


@given(profiles)
def test_a_profile_is_equal_after_writing_and_reading(profile: ModelProfile) -> None:
    assert ModelProfile.from_json(profile.to_json()) == profile


@given(failures)
@example(Failure(reason=FailureReason.STARTUP_TIMEOUT, message="\U0001f600" * 5000, last_log="\0" * 5000))
@example(Failure(reason=FailureReason.RANK_RAISED, message="", last_log="end" * 5000))
def test_a_failure_always_fits_and_keeps_its_reason(failure: Failure) -> None:
    text = failure.to_json()
    assert len(text.encode()) <= MAX_TERMINATION_MESSAGE_BYTES
    back = Failure.from_json(text)
    assert back is not None
    assert dataclasses.replace(back, message="", last_log="") == dataclasses.replace(
        failure, message="", last_log=""
    )
    front, _, end = back.message.partition(" ... ")
    assert back.message == failure.message or (
        failure.message.startswith(front) and failure.message.endswith(end)
    )
    assert failure.last_log.endswith(back.last_log)
    if len(failure.message) + len(failure.last_log) < 250:
        assert back == failure


def test_a_truncated_failure_uses_the_whole_limit() -> None:
    back = Failure.from_json(
        Failure(reason=FailureReason.RANK_RAISED, message="m" * 9000, last_log="l" * 9000).to_json()
    )
    assert back is not None
    assert len(back.message) > 2500
    assert len(back.last_log) > 900


@given(plans())
@FEW
def test_plan_has_each_rank_once_one_leader_and_all_layers(plan: Plan) -> None:
    assert sorted(rank.rank for pod in plan.pods for rank in pod.ranks) == list(range(plan.world_size))
    assert [pod.index for pod in plan.pods if any(rank.rank == 0 for rank in pod.ranks)] == [0]
    assert sum(plan.layers_by_stage) == plan.stage_ranks[-1].end_layer
    assert len(plan.layers_by_stage) == plan.pipeline_parallel_size
    for stage in range(plan.pipeline_parallel_size):
        sharing = [rank for rank in plan.stage_ranks if rank.stage == stage]
        assert [rank.tensor_rank for rank in sharing] == list(range(plan.tensor_parallel_size))
    for pod in plan.pods:
        assert [rank.local_rank for rank in pod.ranks] == list(range(len(pod.ranks)))


@given(plans(), st.data())
@FEW
def test_rank_out_of_order_is_refused(plan: Plan, data: st.DataObject) -> None:
    number = data.draw(st.integers(0, plan.world_size - 1))
    field = data.draw(st.sampled_from(["rank", "stage", "tensor_rank", "local_rank", "first_layer"]))
    rank = dataclasses.replace(plan.ranks[number], **{field: getattr(plan.ranks[number], field) + 1})
    with pytest.raises(ContractError, match=r"Plan\.ranks"):
        dataclasses.replace(plan, ranks=(*plan.ranks[:number], rank, *plan.ranks[number + 1 :]))


@given(plans(), st.sampled_from(["seed", "max_model_len", "block_size"]))
@FEW
def test_different_plans_have_different_hashes(plan: Plan, field: str) -> None:
    engine = dataclasses.replace(plan.engine, **{field: getattr(plan.engine, field) + 1})
    assert dataclasses.replace(plan, engine=engine).hash != plan.hash


PLAN = json.loads(
    Plan.from_json(
        json.dumps(
            {
                "mode": "Pipeline",
                "tensor_parallel_size": 1,
                "pipeline_parallel_size": 1,
                "ranks": [
                    {
                        "rank": 0,
                        "local_rank": 0,
                        "pod": 0,
                        "role": "cpu",
                        "device": "CPU",
                        "stage": 0,
                        "tensor_rank": 0,
                        "first_layer": 0,
                        "end_layer": 4,
                        "kv_cache_bytes": 1,
                    }
                ],
                "engine": {
                    "model": "/model",
                    "served_name": "m",
                    "dtype": "float32",
                    "max_model_len": 1,
                    "max_num_batched_tokens": 1,
                    "max_num_seqs": 1,
                    "block_size": 32,
                },
            }
        )
    ).to_json()
)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("mode",), "Both", "Plan.mode: must be one of Pipeline, Tensor"),
        (("ranks",), {}, "Plan.ranks: must be a list"),
        (("ranks", 0), 1, r"Plan.ranks\[0\]: must be a JSON object"),
        (("ranks", 0, "kv_cache_bytes"), "1", r"Plan.ranks\[0\].kv_cache_bytes: must be a whole number"),
        (("ranks", 0, "stage"), True, r"Plan.ranks\[0\].stage: must be a whole number"),
        (("ranks", 0, "colour"), 1, r"Plan.ranks\[0\]: has unknown field 'colour'"),
        (("engine", "eager_gpu"), 1, "Plan.engine.eager_gpu: must be true or false"),
        (("engine", "extra_args"), [1], r"Plan.engine.extra_args\[0\]: must be a text"),
        (("tensor_parallel_size",), 2, "number of ranks in stages must be tensor_parallel_size 2 x"),
        (("ranks",), [], r"must be ranks 0..world_size-1"),
        (("tensor_parallel_size",), 0, "Plan.tensor_parallel_size: must be at least 1"),
        (("pipeline_parallel_size",), -1, "Plan.pipeline_parallel_size: must be at least 1"),
        (("ranks", 0, "kv_cache_bytes"), -1, r"Plan.ranks\[0\].kv_cache_bytes: must be at least 0"),
        (("ranks", 0, "weight_bytes"), -7, r"Plan.ranks\[0\].weight_bytes: must be at least 0"),
        (("ranks", 0, "predicted_step_s"), -0.5, "predicted_step_s: must be at least 0"),
        (("engine", "block_size"), 0, "Plan.engine.block_size: must be at least 1"),
        (("engine", "max_model_len"), 0, "Plan.engine.max_model_len: must be at least 1"),
        (("engine", "max_num_batched_tokens"), 0, "max_num_batched_tokens: must be at least 1"),
        (("engine", "max_num_seqs"), -1, "Plan.engine.max_num_seqs: must be at least 1"),
        (("engine", "batches_in_flight"), 0, "Plan.engine.batches_in_flight: must be at least 1"),
    ],
)
def test_mistake_in_a_plan_is_reported(path: tuple[str | int, ...], value: object, message: str) -> None:
    raw: Any = json.loads(json.dumps(PLAN))
    inner = raw
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(ContractError, match=message):
        Plan.from_json(json.dumps(raw))


@pytest.mark.parametrize("field", ["model", "block_size"])
def test_missing_field_is_reported(field: str) -> None:
    raw = json.loads(json.dumps(PLAN))
    del raw["engine"][field]
    with pytest.raises(ContractError, match=f"Plan.engine: field '{field}' is missing"):
        Plan.from_json(json.dumps(raw))


LAUNCH = PodLaunch(
    group="ns/m/0", group_uid="u", epoch=1, pod_index=0, addresses=(PodAddress(host="127.0.0.1"),)
)


@pytest.mark.parametrize("name", sorted(LAUNCH.to_env()))
def test_missing_variable_is_reported(name: str) -> None:
    env = LAUNCH.to_env()
    del env[name]
    with pytest.raises(ContractError, match=f"{name}: must be set"):
        PodLaunch.from_env(env)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (names.ENV_EPOCH, "one", f"{names.ENV_EPOCH}: must be a whole number \\(got 'one'"),
        (names.ENV_STARTUP_TIMEOUT, "", f"{names.ENV_STARTUP_TIMEOUT}: must be a number \\(got ''"),
        (names.ENV_ADDRESSES, "[", f"{names.ENV_ADDRESSES}: must be JSON \\(got '\\['"),
        (names.ENV_ADDRESSES, '[{"host": 1}]', r"PodLaunch.addresses\[0\].host: must be a text"),
    ],
)
def test_mistake_in_the_environment_is_reported(name: str, text: str, message: str) -> None:
    with pytest.raises(ContractError, match=message):
        PodLaunch.from_env({**LAUNCH.to_env(), name: text})


def test_plan_that_is_not_set_is_reported() -> None:
    with pytest.raises(ContractError, match=names.ENV_PLAN):
        Plan.from_env({})


@settings(FEW)
@given(plans(), plans())
def test_a_pod_refuses_another_plan_than_its_own(plan: Plan, other: Plan) -> None:
    env = {**plan.to_env(), names.ENV_PLAN_HASH: plan.hash}
    assert Plan.from_env(env) == plan
    assert Plan.from_env(plan.to_env()) == plan, "a pod of version 0.1.0 has no hash"
    if other != plan:
        with pytest.raises(ContractError, match=f"hash {plan.hash} .*replaced the plan's ConfigMap"):
            Plan.from_env({**env, **other.to_env()})


@pytest.mark.parametrize("text", ["", "OOMKilled", "{}", '{"reason": "New", "message": "x"}', "[1]"])
def test_ignores_a_foreign_termination_message(text: str) -> None:
    assert Failure.from_json(text) is None


@given(profiles)
def test_the_parts_of_a_profile_add_up_to_its_total(profile: ModelProfile) -> None:
    parts = profile.embedding_bytes + profile.head_bytes + profile.other_bytes
    assert profile.total_bytes == parts + sum(profile.layer_bytes)
    assert len(profile.layers) == profile.num_layers


@pytest.mark.parametrize("commit", ["", "../../etc", "a/b", "x" * 65])
def test_a_commit_that_would_leave_the_cache_is_refused(commit: str) -> None:
    profile = json.loads(PROFILE.to_json())
    text = json.dumps({"commit": commit, "size_bytes": 1, "profile": profile})
    with pytest.raises(ContractError, match=r"FetchedModel\.commit"):
        FetchedModel.from_json(text)
