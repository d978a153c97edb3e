"""Limits the tokens of a step, so that running requests get their tokens in time beside prompts. Pure.

vLLM puts the next token of each running request and a chunk of the waiting prompts into one step. So the time
between two tokens is at most that of a step with `max_num_batched_tokens` tokens.
"""

from collections.abc import Iterator
from dataclasses import replace

from heteroinfer_contract.plan import EngineSettings
from heteroinfer_operator.planning.first_token import build_feed_forward_wait
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.planner import GroupRequest, Planned, make_plan
from heteroinfer_operator.planning.prediction import Prediction, StepLoad, forecast
from heteroinfer_operator.quantity import parse_duration_s


def plan_within_limit(request: GroupRequest, inventory: Inventory) -> Planned:
    """Makes the plan of a spec that has a mode, with the most tokens of a step that its limit allows.

    A limit that even the smallest step exceeds gives the smallest step, and a note.

    Raises:
        PlanError: as `make_plan`.
    """
    planned = make_plan(request, inventory)
    limit = request.spec.engine.max_time_between_tokens
    if limit is None or _keeps(planned, limit):
        return planned
    sizes = list(_smaller_steps(planned.plan.engine))
    tried, best = planned, None
    low, high = 0, len(sizes)
    while low < high:  # finds the largest step that keeps the limit; larger steps take longer
        middle = (low + high) // 2
        tried = _plan_with_tokens(request, inventory, sizes[middle])
        if _keeps(tried, limit):
            best, low = tried, middle + 1
        else:
            high = middle
    # Without a step that keeps the limit, the last try was the smallest step.
    return best or replace(tried, notes=(*tried.notes, _exceeded_note(tried, limit)))


def time_between_tokens(planned: Planned) -> Prediction:
    """Predicts the longest time between two tokens of a request while prompts of others are computed.

    It is the time of a step with the most tokens, at the end of a prompt of the maximum length.
    """
    plan = planned.plan
    tokens, longest = plan.engine.max_num_batched_tokens, plan.engine.max_model_len
    load = StepLoad(context=longest - min(tokens, longest) // 2, tokens=tokens)
    wait = build_feed_forward_wait(plan, planned.sizes, planned.rates, planned.remote)
    return forecast(plan, planned.sizes, planned.rates, load, wait)


def _keeps(planned: Planned, limit: str) -> bool:
    """Reports whether a plan keeps the limit, by prediction."""
    return time_between_tokens(planned).step_s <= parse_duration_s(limit)


def _smaller_steps(engine: EngineSettings) -> Iterator[int]:
    """Yields numbers of tokens below those of the settings, ascending.

    vLLM needs a token for each running request, and a whole block of a recurrent state.
    """
    tokens = max(engine.max_num_seqs, engine.block_size)
    while tokens < engine.max_num_batched_tokens:
        yield tokens
        tokens += max(tokens // 256 * 64, 64)


def _plan_with_tokens(request: GroupRequest, inventory: Inventory, tokens: int) -> Planned:
    """Makes the plan with this many tokens of a step. The result has the request as the user wrote it."""
    engine = request.spec.engine.changed(max_batched_tokens=tokens)
    planned = make_plan(replace(request, spec=request.spec.changed(engine=engine)), inventory)
    return replace(planned, request=request)


def _exceeded_note(planned: Planned, limit: str) -> str:
    """Returns the note that even the smallest step takes longer than the limit."""
    step_ms = time_between_tokens(planned).step_s * 1e3
    return (
        f"engine.maxTimeBetweenTokens: the plan exceeds {limit} while it computes prompts, because even the "
        f"smallest step, {planned.plan.engine.max_num_batched_tokens:,} tokens, takes {step_ms:,.0f} ms by "
        "prediction. Raise the limit, or move fewer layers to CPUs"
    )
