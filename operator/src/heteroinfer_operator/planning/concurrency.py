"""The requests that the KV cache of a plan holds at the same time. Pure."""

from dataclasses import replace

from heteroinfer_operator.api import LoadSpec
from heteroinfer_operator.planning.kv_cache import build_kv_cache
from heteroinfer_operator.planning.planner import Planned


def num_kv_blocks(planned: Planned) -> int:
    """Returns the number of KV cache blocks of the group: the lowest number of all ranks."""
    kv = planned.sizes.kv
    blocks_by_rank = []
    for rank in planned.plan.stage_ranks:  # feed-forward ranks have no KV cache
        block_bytes = kv.block_bytes(rank.first_layer, rank.end_layer)
        if block_bytes:
            blocks_by_rank.append(rank.kv_cache_bytes // block_bytes)
    return min(blocks_by_rank, default=0)


def sequence_blocks(planned: Planned, tokens: int) -> int:
    """Returns the KV cache blocks that one request of this many tokens takes."""
    plan, sizes = planned.plan, planned.sizes
    # A KV cache is built for sequences of max_model_len tokens.
    engine = replace(plan.engine, max_model_len=tokens)
    kv = build_kv_cache(
        sizes.profile, engine, ranks_of_stage=sizes.tensor, batches_at_once=plan.batches_at_once
    )
    return kv.sequence_blocks


def requests_at_once(planned: Planned, tokens: int) -> int:
    """Returns the number of requests of this many tokens that run at the same time."""
    usable_blocks = max(num_kv_blocks(planned) - 1, 0)  # vLLM keeps one block for itself
    return min(usable_blocks // max(sequence_blocks(planned, tokens), 1), planned.plan.engine.max_num_seqs)


def concurrent_requests(planned: Planned, load: LoadSpec) -> int:
    """Returns how many requests of a load run at the same time; at least 1.

    Each request counts with all tokens of its prompt and output, as shortly before the end of the request.
    """
    tokens = min(load.prompt_tokens + load.output_tokens, planned.plan.engine.max_model_len)
    return max(min(load.requests, requests_at_once(planned, tokens)), 1)
