"""The time to the first token of a plan, and the keep-alive that its streams send until then. Pure.

Proxies end a silent stream, many after 60 s, some after 30. A long prompt takes longer on CPU ranks.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from heteroinfer_contract.plan import Plan
from heteroinfer_operator.planning.feed_forward import Remote, feed_forward_seconds
from heteroinfer_operator.planning.memory import Sizes
from heteroinfer_operator.planning.prediction import Elsewhere, Load, forecast_first_token
from heteroinfer_operator.planning.rates import Rates
from heteroinfer_operator.vllm_support.engine_options import KEEP_ALIVE, EngineOptions

KEEP_ALIVE_S: Final = 15
"""Half of the shortest time-out that is common among proxies: docs/user/expose.md#streams-behind-proxies."""
_FROM_S: Final = 5.0
"""Time to the first token above which streams send a keep-alive. Queueing is not included."""


def waits_elsewhere(plan: Plan, rates: Sequence[Rates], remote: Remote | None) -> Elsewhere:
    """Returns the function that predicts how long a step waits for feed-forward ranks."""

    def seconds(load: Load) -> float:
        if remote is None:
            return 0.0
        return max(feed_forward_seconds(remote, plan.engine, rates[-remote.ranks :], load))

    return seconds


def with_keep_alive(plan: Plan, sizes: Sizes, rates: Sequence[Rates], remote: Remote | None) -> Plan:
    """Returns the plan, with a keep-alive for its streams if a first token may take long.

    The user's own `--sse-keep-alive-interval` has priority, including 0. Otherwise the longest prompt at the
    slowest predicted speed decides.
    """
    engine = plan.engine
    if EngineOptions.of(engine.extra_args).keep_alive is not None:
        return plan
    if not _may_take_long(plan, sizes, rates, waits_elsewhere(plan, rates, remote)):
        return plan
    return replace(plan, engine=replace(engine, extra_args=add_keep_alive(engine.extra_args)))


def add_keep_alive(args: tuple[str, ...]) -> tuple[str, ...]:
    """Adds the default keep-alive of streams."""
    return (*args, KEEP_ALIVE, str(KEEP_ALIVE_S))


def _may_take_long(plan: Plan, sizes: Sizes, rates: Sequence[Rates], elsewhere: Elsewhere) -> bool:
    longest = plan.engine.max_model_len
    prompt = min(plan.engine.max_num_batched_tokens, longest)
    while True:  # shorter prompts first, because a million tokens are many chunks
        if forecast_first_token(plan, sizes, rates, prompt, elsewhere).most_s > _FROM_S:
            return True
        if prompt == longest:
            return False
        prompt = min(2 * prompt, longest)
