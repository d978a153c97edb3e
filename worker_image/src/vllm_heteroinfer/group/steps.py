"""What a step of vLLM's scheduler holds; read alike by the scheduler and by every rank."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


def count_tokens(output: "SchedulerOutput") -> tuple[int, int]:
    """Returns a step's prompt tokens and its other tokens."""
    cached = output.scheduled_cached_reqs
    decode = sum(
        1
        for request, outputs in zip(cached.req_ids, cached.num_output_tokens, strict=True)
        if outputs > 0 and output.num_scheduled_tokens[request] == 1
    )
    return output.total_num_scheduled_tokens - decode, decode
