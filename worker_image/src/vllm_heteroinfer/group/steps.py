"""What a step of vLLM's scheduler holds; read alike by the scheduler and by every rank."""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

FIRST_REQUEST: Final = "heteroinfer-first-tokens"
"""Id of a group's own first request. vLLM appends to it; ids of clients' requests begin with an endpoint."""


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
