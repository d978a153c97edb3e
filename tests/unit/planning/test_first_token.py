"""The keep-alive of streams: the default, and the setting of the user."""

import time

import pytest

from heteroinfer_operator.planning.first_token import add_keep_alive
from heteroinfer_operator.reconcile.allowed import Allowed
from heteroinfer_operator.reconcile.reading import has_only_allowed_args
from tests.unit.planning.planned_models import cpu, gpu, plan, profile, spec

KEEP_ALIVE = ("--sse-keep-alive-interval", "15")


def test_a_plan_with_a_slow_first_token_keeps_its_streams_alive() -> None:
    """8,192 tokens through a model of 8B on CPUs take most of a minute."""
    assert plan(spec(cpu())).plan.engine.extra_args == KEEP_ALIVE


@pytest.mark.parametrize(
    ("roles", "max_model_len"), [([cpu()], 64), ([gpu()], 8192)], ids=["short prompts", "a GPU"]
)
def test_a_plan_with_a_fast_first_token_has_no_keep_alive(
    roles: list[dict[str, object]], max_model_len: int
) -> None:
    planned = plan(spec(*roles, engine={"maxModelLen": max_model_len}))
    assert planned.plan.engine.extra_args == ()


@pytest.mark.parametrize(
    "args",
    [
        ["--sse-keep-alive-interval", "0"],
        ["--sse_keep_alive_interval=3"],
        ["--max-log-len=1", "--sse-keep-alive-interval=60"],
    ],
)
def test_the_users_own_keep_alive_counts(args: list[str]) -> None:
    assert plan(spec(cpu(), engine={"args": args})).plan.engine.extra_args == tuple(args)


def test_a_context_of_a_million_tokens_is_planned_quickly() -> None:
    model = profile(max_position_embeddings=2**20)
    began = time.process_time()
    planned = plan(spec(gpu(deviceMemory="400Gi"), engine={"maxModelLen": 2**20}), model)
    assert planned.plan.engine.extra_args == KEEP_ALIVE
    assert time.process_time() - began < 0.5


def test_a_plan_without_a_code_is_read_with_the_keep_alive_that_planning_adds() -> None:
    nothing = Allowed()
    given = ("--profiler-config", "{}")
    assert not has_only_allowed_args(given, (), nothing)
    for args in (given, add_keep_alive(given)):
        assert has_only_allowed_args(args, {given}, nothing)
    assert not has_only_allowed_args(
        (*given, "--sse-keep-alive-interval", "15", "--runner"), {given}, nothing
    )
