"""The limit of the time between tokens: the tokens of a step, what a plan shows, and the refused values."""

from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract.plan import Mode
from heteroinfer_operator.api import HeteroInferenceSpec, LoadSpec, parse_spec
from heteroinfer_operator.commands.plan_text import ShownParts, describe_plan
from heteroinfer_operator.errors import SpecError
from heteroinfer_operator.planning import Planned, auto_mode
from heteroinfer_operator.planning.auto_mode import predict_load
from heteroinfer_operator.planning.first_token import build_feed_forward_wait
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.mode_choice import LoadFigures
from heteroinfer_operator.planning.prediction import StepLoad, forecast
from heteroinfer_operator.planning.step_limit import time_between_tokens
from heteroinfer_operator.quantity import parse_duration_s
from tests.unit.planning.planned_models import cpu, gpu, plan, profile, spec
from tests.unit.planning.test_ring_choice import asked, qwen

H200 = Inventory(gpu_product={"gpu": "NVIDIA-H200"})
EXAMPLE = ((gpu(deviceMemory="12Gi"), cpu()), (gpu(deviceMemory="80Gi"),), (cpu(),))


def planned(*roles: dict[str, Any], limit: str | None = None, **engine: Any) -> Planned:
    limited = {} if limit is None else {"maxTimeBetweenTokens": limit}
    return plan(spec(*roles, engine={"maxModelLen": 8192, **engine, **limited}), profile(), H200)


def tokens(of: Planned) -> int:
    return of.plan.engine.max_num_batched_tokens


@pytest.mark.parametrize("roles", EXAMPLE, ids=["GPU and CPU", "GPU", "CPU"])
def test_a_step_has_the_maximum_number_of_tokens_that_keep_the_limit(
    roles: tuple[dict[str, Any], ...],
) -> None:
    unlimited = planned(*roles)
    step_s = time_between_tokens(unlimited).step_s
    seen = []
    for part in (2, 4, 8):
        limit = f"{int(step_s * 1e3 / part)}ms"
        limited = planned(*roles, limit=limit)
        assert time_between_tokens(limited).step_s <= parse_duration_s(limit)
        assert limited.request.spec.engine.max_batched_tokens is None
        assert not any("maxTimeBetweenTokens" in note for note in limited.notes)
        seen.append(tokens(limited))
        # A step that is a quarter larger would not keep it.
        larger = planned(*roles, maxBatchedTokens=max(2048, tokens(limited) * 5 // 4 + 64))
        assert time_between_tokens(larger).step_s > parse_duration_s(limit)
    assert tokens(unlimited) > seen[0] > seen[1] > seen[2]


def test_a_limit_that_the_plan_keeps_anyway_changes_nothing() -> None:
    for roles in EXAMPLE:
        assert planned(*roles, limit="10m").plan == planned(*roles).plan


def test_the_limit_reduces_the_tokens_that_the_user_set() -> None:
    step_s = time_between_tokens(planned(*EXAMPLE[1], maxBatchedTokens=16384)).step_s
    limited = planned(*EXAMPLE[1], maxBatchedTokens=16384, limit=f"{int(step_s * 500)}ms")
    assert tokens(limited) < 16384
    assert limited.request.spec.engine.max_batched_tokens == 16384


def test_a_limit_that_no_step_keeps_gives_steps_that_take_hardly_longer_and_a_note() -> None:
    limited = planned(*EXAMPLE[2], limit="10ms")
    assert tokens(limited) == limited.plan.engine.max_num_seqs
    [note] = [note for note in limited.notes if "maxTimeBetweenTokens" in note]
    assert "exceeds 10ms while the group computes prompts, because even the smallest step" in note
    assert "The plan uses steps of 64 tokens, and the longest step takes" in note


def test_smaller_steps_of_mode_feed_forward_have_a_ring_if_it_pays() -> None:
    parsed = asked()
    steps = []
    for limit in (None, "500ms", "10ms"):
        engine = parsed.engine.changed(max_time_between_tokens=limit)
        limited = plan(parsed.changed(engine=engine), qwen(), H200)
        steps.append((tokens(limited), limited.plan.ranks[0].ring_bytes > 0))
    assert steps[0] == (4096, True)
    assert 128 < steps[1][0] < 4096
    assert steps[1][1]
    # Steps of 64 tokens take as long as these, because CPUs read all experts for them.
    assert 128 < steps[2][0] < steps[1][0]
    assert steps[2][1]


def test_no_step_of_a_chunk_takes_longer_than_the_shown_time() -> None:
    """With a ring, a step just below its first rows takes longer than a full one."""
    parsed = asked()
    for limit in ("290ms", "360ms", "500ms"):
        engine = parsed.engine.changed(max_time_between_tokens=limit)
        limited = plan(parsed.changed(engine=engine), qwen(), H200)
        shown_s = time_between_tokens(limited).step_s
        wait = build_feed_forward_wait(limited.plan, limited.sizes, limited.rates, limited.remote)
        for size in (1, 32, 64, 96, 128, 129, 192, 256, tokens(limited)):
            if size <= tokens(limited):
                load = StepLoad(context=8000, tokens=size)
                step = forecast(limited.plan, limited.sizes, limited.rates, load, wait)
                assert step.step_s <= shown_s


def test_the_limit_counts_the_cache_of_the_requests_of_the_load() -> None:
    alone = planned(*EXAMPLE[2])
    load = {"requests": 32, "promptTokens": 3000, "outputTokens": 500}
    parsed = spec(*EXAMPLE[2], engine={"maxModelLen": 8192}, planning={"load": load})
    together = plan(parsed, profile(), H200)
    assert time_between_tokens(together).step_s > time_between_tokens(alone).step_s


def test_mode_auto_keeps_the_limit() -> None:
    parsed: HeteroInferenceSpec = parse_spec(
        {
            **spec(*EXAMPLE[0], engine={"maxModelLen": 8192, "maxTimeBetweenTokens": "500ms"}).dump(),
            "parallelism": {},
        }
    )
    chosen = plan(parsed, profile(), H200)
    assert chosen.choice is not None
    assert time_between_tokens(chosen).step_s <= 0.5


def test_mode_auto_prefers_the_mode_that_is_nearest_to_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here mode Pipeline takes 5 times as long between tokens, and counts as faster for the load."""

    def prefer_pipeline(of: Planned, load: LoadSpec) -> LoadFigures:
        return replace(predict_load(of, load), total_s=1.0 if of.plan.mode is Mode.PIPELINE else 2.0)

    monkeypatch.setattr(auto_mode, "predict_load", prefer_pipeline)
    roles = [
        gpu(ranksPerPod=2, deviceMemory="12Gi", resources={"requests": {"cpu": "6", "memory": "24Gi"}}),
        {"name": "cpu", "device": "CPU", "resources": {"requests": {"cpu": "28", "memory": "100Gi"}}},
    ]
    chosen = []
    for limit in ({}, {"maxTimeBetweenTokens": "300ms"}):
        engine = {"maxModelLen": 131072, **limit}
        parsed: HeteroInferenceSpec = parse_spec({**spec(*roles, engine=engine).dump(), "parallelism": {}})
        chosen.append(plan(parsed, qwen(), H200).plan.mode)
    assert chosen == [Mode.PIPELINE, Mode.FEED_FORWARD]


def test_the_plan_shows_the_time_between_tokens_and_the_first_token() -> None:
    limited = planned(*EXAMPLE[0], limit="700ms")
    text = describe_plan(limited, "llama", ShownParts())
    [line] = [line for line in text.splitlines() if "between tokens" in line]
    assert f"beside prompts, in steps of {tokens(limited):,} tokens. Limit: 700ms" in line
    assert "first token" in text
    assert "between tokens" not in describe_plan(planned(*EXAMPLE[0]), "llama", ShownParts())


@pytest.mark.parametrize("limit", ["9ms", "11m"])
def test_a_limit_out_of_range_is_refused(limit: str) -> None:
    with pytest.raises(SpecError, match="maxTimeBetweenTokens: must be between 10ms and 10m"):
        parse_spec({**spec(*EXAMPLE[1]).dump(), "engine": {"maxTimeBetweenTokens": limit}})
