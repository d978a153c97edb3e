"""Adds a keep-alive to a plan's streams if its first tokens take long. Pure.

Proxies end a stream that sends nothing, many after 60 s, some after 30 s. On CPU ranks, the first token of a
long prompt can take longer.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from heteroinfer_contract.plan import Plan
from heteroinfer_operator.planning.feed_forward import FeedForwardPart
from heteroinfer_operator.planning.memory import Sizes
from heteroinfer_operator.planning.prediction import FeedForwardWait, StepLoad, forecast_first_token
from heteroinfer_operator.planning.rates import Rates
from heteroinfer_operator.planning.ring_choice import predict_plan_wait
from heteroinfer_operator.vllm_support.engine_options import KEEP_ALIVE, EngineOptions

KEEP_ALIVE_S: Final = 15
"""Seconds between two keep-alives: half of the shortest time-out that is common among proxies
(docs/user/expose.md#streams-behind-proxies)."""
_KEEP_ALIVE_FROM_S: Final = 5.0
"""Predicted seconds to the first token above which streams send a keep-alive. The prediction does not
include the time in which a request waits for other requests."""


def build_feed_forward_wait(
    plan: Plan, sizes: Sizes, rates: Sequence[Rates], remote: FeedForwardPart | None
) -> FeedForwardWait:
    """Returns a function that predicts how long a stage waits for feed-forward ranks in a step."""

    def seconds(load: StepLoad) -> float:
        if remote is None:
            return 0.0
        return predict_plan_wait(plan, sizes, rates, remote, load).seconds

    return seconds


def with_keep_alive(plan: Plan, sizes: Sizes, rates: Sequence[Rates], remote: FeedForwardPart | None) -> Plan:
    """Returns the plan, with a keep-alive for its streams if the first token of a request may take long.

    If the user set `--sse-keep-alive-interval`, the plan keeps that value, including 0.
    """
    engine = plan.engine
    if EngineOptions.of(engine.extra_args).keep_alive is not None:
        return plan
    if not _needs_keep_alive(plan, sizes, rates, build_feed_forward_wait(plan, sizes, rates, remote)):
        return plan
    return replace(plan, engine=replace(engine, extra_args=add_keep_alive(engine.extra_args)))


def add_keep_alive(args: tuple[str, ...]) -> tuple[str, ...]:
    """Returns the arguments with the default keep-alive of streams."""
    return (*args, KEEP_ALIVE, str(KEEP_ALIVE_S))


def _needs_keep_alive(
    plan: Plan, sizes: Sizes, rates: Sequence[Rates], feed_forward_wait: FeedForwardWait
) -> bool:
    """Reports whether the first token of any prompt may take longer than _KEEP_ALIVE_FROM_S.

    The upper end of the predicted range counts, because proxies end a stream that is silent for too long.
    """
    longest_prompt = plan.engine.max_model_len
    prompt = min(plan.engine.max_num_batched_tokens, longest_prompt)
    # Shorter prompts are tried first: the prediction for a prompt of a million tokens takes long.
    while True:
        if forecast_first_token(plan, sizes, rates, prompt, feed_forward_wait).most_s > _KEEP_ALIVE_FROM_S:
            return True
        if prompt == longest_prompt:
            return False
        prompt = min(2 * prompt, longest_prompt)
