"""Calculates the figures of a plan that users compare: concurrent requests, tokens per second. Pure."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Final

from heteroinfer_operator.commands.plan_words import count
from heteroinfer_operator.planning.concurrency import num_kv_blocks, requests_at_once, sequence_blocks
from heteroinfer_operator.planning.first_token import build_feed_forward_wait
from heteroinfer_operator.planning.planner import Planned, kv_blocks_by_stage
from heteroinfer_operator.planning.prediction import (
    Prediction,
    StepLoad,
    forecast,
    forecast_first_token,
    predict,
    slowest_rank,
)

_SHORT: Final = 1024
"""Tokens of a short request, unless engine.maxModelLen is less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures that a user compares.

    Attributes:
        step: one decode step for one request without context.
        slowest: rank that takes most of this step.
        short: tokens of a short request: 1,024, or engine.maxModelLen if that is less.
        short_requests: requests of `short` tokens that run at the same time.
        full_requests: requests of engine.maxModelLen tokens that run at the same time.
        tokens_per_s: tokens that `short_requests` requests get together in a second.
        prompt: tokens of the prompt of `first_token`.
        first_token: time from a request to its first token.
        slowest_for_prompt: rank that takes most of the time to the first token.
    """

    step: Prediction
    slowest: int
    short: int
    short_requests: int
    full_requests: int
    tokens_per_s: float
    prompt: int
    first_token: Prediction
    slowest_for_prompt: int

    @classmethod
    def of(cls, planned: Planned) -> "Figures":
        """Returns the figures of a plan."""
        plan, sizes, rates = planned.plan, planned.sizes, planned.rates
        feed_forward_wait = build_feed_forward_wait(plan, sizes, rates, planned.remote)
        engine = plan.engine
        short = min(_SHORT, engine.max_model_len)
        short_requests = requests_at_once(planned, short)
        load = StepLoad(requests=max(short_requests, 1), context=short)
        prompt = typical_context(engine.max_model_len)
        chunk = min(prompt, engine.max_num_batched_tokens)
        return cls(
            step=predict(plan, rates),
            # StepLoad() is one request without context.
            slowest=slowest_rank(plan, sizes, rates, StepLoad(), feed_forward_wait),
            short=short,
            short_requests=short_requests,
            full_requests=requests_at_once(planned, engine.max_model_len),
            tokens_per_s=load.requests / forecast(plan, sizes, rates, load, feed_forward_wait).step_s,
            prompt=prompt,
            first_token=forecast_first_token(plan, sizes, rates, prompt, feed_forward_wait),
            slowest_for_prompt=slowest_rank(plan, sizes, rates, StepLoad(tokens=chunk), feed_forward_wait),
        )


def typical_context(max_model_len: int) -> int:
    """Returns the number of tokens of a typical request: 1,024, or half of a shorter maximum length."""
    return _SHORT if max_model_len > _SHORT else max(max_model_len // 2, 1)


def full_length_requests(planned: Planned) -> float:
    """Returns for how many requests of the maximum length the KV cache has space.

    Unlike the result of `requests_at_once`, the number has a fraction, and the scheduler does not limit it.
    vLLM keeps one block for itself.
    """
    return max(num_kv_blocks(planned) - 1, 0) / max(planned.sizes.kv.sequence_blocks, 1)


def longest_request(planned: Planned) -> int | None:
    """Returns the tokens of the longest request that memory allows with these layers; None if unknown."""
    stages = [planned.plan.stage(stage)[0] for stage in range(planned.plan.pipeline_parallel_size)]
    layers = [rank.num_layers for rank in stages]
    blocks_by_stage = kv_blocks_by_stage(layers, planned.budgets, planned.sizes)
    known_blocks = [blocks for blocks in blocks_by_stage if blocks is not None]
    if len(known_blocks) < len(stages):
        return None
    usable_blocks = min(known_blocks) - 1  # vLLM keeps one block for itself
    # A longer request never needs fewer blocks. So the lengths from 1 to the longest length fit, and no other
    # length fits. The number of lengths that fit is the longest length.
    lengths = range(1, planned.sizes.profile.max_position_embeddings + 1)
    return bisect_right(lengths, usable_blocks, key=lambda tokens: sequence_blocks(planned, tokens))


def roles_of_unknown_memory(planned: Planned) -> tuple[str, ...]:
    """Returns the roles of stages, and of feed-forward ranks, whose memory is unknown."""
    roles = [rank.role for stage in planned.budgets if not stage.is_known for rank in stage.ranks]
    if planned.remote is not None:
        roles += [rank_set.role.name for rank_set in planned.remote.sets if rank_set.memory_bytes is None]
    return tuple(dict.fromkeys(roles))  # each role once, in this order


def memory_limit(planned: Planned) -> str:
    """Describes the memory that limits the size of the KV cache."""
    if planned.limiting_rank is None:
        roles = name_roles(roles_of_unknown_memory(planned))
        return f"an assumed KV cache, because the memory of {roles} is unknown"
    return f"the memory of {name_rank(planned, planned.limiting_rank)}"


def describe_requests(planned: Planned, figures: Figures) -> str:
    """Describes how many short and full-length requests run at the same time, and what limits them.

    Leaves out short requests if a short request has the full length. Also leaves them out if full-length
    requests reach the scheduler's limit, because short requests then reach the same limit.
    """
    max_requests, full_requests = planned.plan.engine.max_num_seqs, figures.full_requests
    longest = planned.plan.engine.max_model_len
    scheduler = f"{count(max_requests, 'request')} in a step"
    short = _format_requests_at_once(figures.short_requests, figures.short)
    full_length = _format_requests_at_once(full_requests, longest)
    if full_requests >= max_requests:
        return f"{full_length}. Limit: {scheduler}"
    if figures.short == longest:
        return f"{full_length}. Limit: {memory_limit(planned)}"
    if figures.short_requests >= max_requests:
        return f"{short}, or {full_length}. Limits: {scheduler}; {memory_limit(planned)}"
    return f"{short}, or {full_length}. Limit: {memory_limit(planned)}"


def _format_requests_at_once(requests: int, tokens: int) -> str:
    each = " each" if requests != 1 else ""
    return f"{count(requests, 'request')} of {count(tokens, 'token')}{each} at the same time"


def name_rank(planned: Planned, rank: int) -> str:
    """Names a rank with its role, such as "rank 2 (role gpu)"."""
    assigned = planned.plan.ranks[rank]
    kind = ", feed-forward" if assigned.feed_forward is not None else ""
    return f"rank {rank} (role {assigned.role}{kind})"


def name_roles(roles: tuple[str, ...]) -> str:
    """Names roles, such as "roles cpu, gpu"."""
    return f"{'role' if len(roles) == 1 else 'roles'} {', '.join(roles)}"
