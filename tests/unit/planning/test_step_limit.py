"""The limit of the time between tokens: the tokens of a step, what a plan shows, and the refused values."""

from typing import Any

import pytest

from heteroinfer_operator.api import HeteroInferenceSpec, parse_spec
from heteroinfer_operator.commands.plan_text import ShownParts, describe_plan
from heteroinfer_operator.errors import SpecError
from heteroinfer_operator.planning import Planned
from heteroinfer_operator.planning.inventory import Inventory
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
def test_a_step_has_the_most_tokens_that_keep_the_limit(roles: tuple[dict[str, Any], ...]) -> None:
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


def test_a_limit_that_no_step_keeps_gives_the_smallest_step_and_a_note() -> None:
    limited = planned(*EXAMPLE[2], limit="10ms")
    assert tokens(limited) == limited.plan.engine.max_num_seqs
    [note] = [note for note in limited.notes if "maxTimeBetweenTokens" in note]
    assert "exceeds 10ms while it computes prompts, because even the smallest step, 64 tokens, takes" in note


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
    assert steps[2] == (64, False)


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
