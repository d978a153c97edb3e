"""Steps and levels of sleep, read alike by the engine and by every rank."""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

FIRST_REQUEST: Final = "heteroinfer-first-tokens"
"""Id of a group's own first request. vLLM appends to it; ids of clients' requests begin with an endpoint."""
SLEEP_LEVELS = (0, 1)
"""0 stops scheduling only; 1 gives back the KV cache, and moves a GPU's weights to host memory. Level 2
drops the weights, which another call then loads again: packed weights of CPU ranks cannot be."""


def is_first_request(output: "SchedulerOutput") -> bool:
    """Returns whether a step holds the group's own first request and no other."""
    scheduled = output.num_scheduled_tokens
    return len(scheduled) == 1 and next(iter(scheduled)).startswith(FIRST_REQUEST)


def count_tokens(output: "SchedulerOutput") -> tuple[int, int]:
    """Returns a step's prompt tokens and its other tokens."""
    cached = output.scheduled_cached_reqs
    decode = sum(
        1
        for request, outputs in zip(cached.req_ids, cached.num_output_tokens, strict=True)
        if outputs > 0 and output.num_scheduled_tokens[request] == 1
    )
    return output.total_num_scheduled_tokens - decode, decode


def check_level(level: int) -> None:
    """Raises ValueError for a level that a group does not have; it says what to do."""
    if level not in SLEEP_LEVELS:
        raise ValueError(
            f"got sleep level {level}, expected {' or '.join(map(str, SLEEP_LEVELS))}: a group keeps its "
            "weights in host memory while it sleeps; set spec.suspend: true to give back all memory"
        )
