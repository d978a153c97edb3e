"""Limits the tokens of a step, so that running requests get their tokens in time beside prompts. Pure.

vLLM puts the next token of each running request and a chunk of the waiting prompts into one step. So the time
between two tokens is at most that of the longest step.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from heteroinfer_contract.plan import EngineSettings, Plan
from heteroinfer_operator.planning.concurrency import concurrent_requests
from heteroinfer_operator.planning.first_token import build_feed_forward_wait
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.planner import GroupRequest, Planned, make_plan
from heteroinfer_operator.planning.prediction import Prediction, StepLoad, forecast
from heteroinfer_operator.planning.ring_choice import least_rows
from heteroinfer_operator.quantity import parse_duration_s

_MAX_TIME_RATIO: Final = 1.05
"""Time of the longest step, relative to the smallest step, if even the smallest step exceeds the limit."""


def plan_within_limit(request: GroupRequest, inventory: Inventory) -> Planned:
    """Makes the plan of a spec that has a mode, with steps as large as its limit of time allows.

    The limit is `engine.maxTimeBetweenTokens`. If even the smallest step exceeds the limit, the plan has a
    note, and the largest steps that take hardly longer than the smallest step. Smaller steps would delay
    first tokens without keeping the limit.

    Raises:
        PlanError: as `make_plan`.
    """
    planned = make_plan(request, inventory)
    limit = request.spec.engine.max_time_between_tokens
    if limit is None or not exceeding_s(planned):
        return planned
    token_limits = list(_smaller_token_limits(planned.plan.engine))
    smallest = _plan_with_tokens(request, inventory, token_limits[0]) if token_limits else planned
    smallest_s = exceeding_s(smallest)  # 0 if the smallest step keeps the limit
    longest_s = _MAX_TIME_RATIO * smallest_s if smallest_s else parse_duration_s(limit)
    best = _find_largest_step(request, inventory, token_limits[1:], longest_s) or smallest
    return replace(best, notes=(*best.notes, _exceeded_note(best, limit))) if smallest_s else best


def _find_largest_step(
    request: GroupRequest, inventory: Inventory, token_limits: list[int], limit_s: float
) -> Planned | None:
    """Returns the plan with the largest of these token limits whose longest step takes at most `limit_s`.

    Returns None if there is no such limit. The time of the longest step grows with the limit, so a binary
    search finds the limit.

    Args:
        token_limits: limits for the tokens of a step, ascending.
    """
    best = None
    low, high = 0, len(token_limits)
    while low < high:
        middle = (low + high) // 2
        tried = _plan_with_tokens(request, inventory, token_limits[middle])
        if time_between_tokens(tried).step_s <= limit_s:
            best, low = tried, middle + 1
        else:
            high = middle
    return best


def time_between_tokens(planned: Planned) -> Prediction:
    """Predicts the longest time between two tokens of a request while prompts of others are computed.

    This time is the sum of two times: the longest step with a chunk at the end of a prompt of the maximum
    length, and the time for reading the KV cache of the requests of `planning.load`, which run at the same
    time.
    """
    plan = planned.plan
    wait = build_feed_forward_wait(plan, planned.sizes, planned.rates, planned.remote)
    longest = plan.engine.max_model_len

    def predict(load: StepLoad) -> Prediction:
        return forecast(plan, planned.sizes, planned.rates, load, wait)

    # On average, a token of the last chunk attends to all earlier chunks and half of its own.
    chunks = [
        predict(StepLoad(context=longest - min(tokens, longest) // 2, tokens=tokens))
        for tokens in _longest_steps(plan)
    ]
    slowest = max(chunks, key=lambda prediction: prediction.step_s)
    load = planned.request.spec.planning.chosen_load
    context = min(load.prompt_tokens + load.output_tokens, longest)
    running = concurrent_requests(planned, load)
    with_cache = predict(StepLoad(requests=running, context=context))
    without_cache = predict(StepLoad(requests=running))
    return slowest + Prediction(
        step_s=max(with_cache.step_s - without_cache.step_s, 0.0),
        least_s=max(with_cache.least_s - without_cache.least_s, 0.0),
        most_s=max(with_cache.most_s - without_cache.most_s, 0.0),
    )


def exceeding_s(planned: Planned) -> float:
    """Returns the predicted time between tokens if it exceeds `engine.maxTimeBetweenTokens`, otherwise 0."""
    limit = planned.request.spec.engine.max_time_between_tokens
    if limit is None:
        return 0.0
    step_s = time_between_tokens(planned).step_s
    return step_s if step_s > parse_duration_s(limit) else 0.0


def _longest_steps(plan: Plan) -> Iterator[int]:
    """Yields the numbers of tokens of the steps that can take longest.

    These are a full step and, if the GPU computes experts only in long steps, the longest step in which CPUs
    compute all experts.
    """
    tokens = plan.engine.max_num_batched_tokens
    yield tokens
    if any(rank.ring_bytes for rank in plan.ranks):
        yield min(least_rows(plan.engine) - 1, tokens)


def _smaller_token_limits(engine: EngineSettings) -> Iterator[int]:
    """Yields limits for the tokens of a step, in ascending order, all below max_num_batched_tokens.

    The first limit allows one token for each running request, and at least the tokens of one KV block. Each
    next limit is about a quarter larger: the difference is a multiple of 64 tokens.
    """
    tokens = max(engine.max_num_seqs, engine.block_size)
    while tokens < engine.max_num_batched_tokens:
        yield tokens
        tokens += max(tokens // 256 * 64, 64)


def _plan_with_tokens(request: GroupRequest, inventory: Inventory, tokens: int) -> Planned:
    """Makes the plan with this many tokens of a step.

    The result has the original request, so its `engine.maxBatchedTokens` stays as the user set it.
    """
    engine = request.spec.engine.changed(max_batched_tokens=tokens)
    planned = make_plan(replace(request, spec=request.spec.changed(engine=engine)), inventory)
    return replace(planned, request=request)


def _exceeded_note(planned: Planned, limit: str) -> str:
    """Returns the note that even the smallest step takes longer than the limit."""
    step_ms = time_between_tokens(planned).step_s * 1e3
    return (
        f"engine.maxTimeBetweenTokens: the time between tokens exceeds {limit} while the group computes "
        "prompts, because even the smallest step takes longer by prediction. The plan uses steps of "
        f"{planned.plan.engine.max_num_batched_tokens:,} tokens, and the longest step takes "
        f"{step_ms:,.0f} ms by prediction. Raise the limit, or move fewer layers to CPUs"
    )
