"""Rules about steps and sleep levels that the engine and every rank share."""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

FIRST_REQUEST: Final = "heteroinfer-first-tokens"
"""Prefix of the id of a group's own first request. Ids of clients' requests begin with an endpoint's name."""
SLEEP_LEVELS = (0, 1)
"""Level 0 only stops scheduling. Level 1 frees the KV cache and moves a GPU's weights to host memory. Level 2
would drop the weights, but CPU ranks cannot load their packed weights again."""


def is_first_request(output: "SchedulerOutput") -> bool:
    """Checks whether a step contains only the group's own first request."""
    scheduled = output.num_scheduled_tokens
    return len(scheduled) == 1 and next(iter(scheduled)).startswith(FIRST_REQUEST)


def count_tokens(output: "SchedulerOutput") -> tuple[int, int]:
    """Returns the number of a step's prompt tokens and of its decode tokens.

    A decode token is the only token in the step of a request that has output already. If a request with
    output computes several tokens (after a preemption), these count as prompt tokens.
    """
    cached = output.scheduled_cached_reqs
    decode = sum(
        1
        for request, outputs in zip(cached.req_ids, cached.num_output_tokens, strict=True)
        if outputs > 0 and output.num_scheduled_tokens[request] == 1
    )
    return output.total_num_scheduled_tokens - decode, decode


def check_sleep_level(level: int) -> None:
    """Raises ValueError, with a fix, if groups do not support a sleep level."""
    if level not in SLEEP_LEVELS:
        raise ValueError(
            f"sleep level must be {' or '.join(map(str, SLEEP_LEVELS))} (got {level}): a sleeping group "
            "keeps its weights in host memory. To free all memory, set spec.suspend: true"
        )
