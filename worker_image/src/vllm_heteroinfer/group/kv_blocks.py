"""Computes KV blocks per rank and describes which rank limits the group. Stdlib only; pure."""

from collections.abc import Sequence
from typing import Any

from heteroinfer_contract.plan import Plan
from heteroinfer_contract.printable import format_bytes


def size_bytes(kv_cache_config: Any) -> int:
    """Returns the bytes of the KV cache in vLLM's KVCacheConfig.

    All tensors share one allocation, and each contains the size of the whole allocation
    (vllm/v1/worker/utils.py::allocate_kv_cache@v0.32.0).
    """
    return max((tensor.size for tensor in kv_cache_config.kv_cache_tensors), default=0)


def headroom_blocks(*, blocks: int, size_bytes: int, headroom_bytes: int) -> int:
    """Returns the blocks that fit into the headroom if `blocks` take `size_bytes`; 0 without a KV cache."""
    return headroom_bytes * blocks // size_bytes if size_bytes else 0


def describe(plan: Plan, *, blocks: int, sizes_bytes: Sequence[int], headrooms_bytes: Sequence[int]) -> str:
    """Returns one line with the number of KV blocks, its limit (plan or rank), and each rank's headroom."""
    fitting_blocks = [
        headroom_blocks(blocks=blocks, size_bytes=size, headroom_bytes=headroom)
        for size, headroom in zip(sizes_bytes, headrooms_bytes, strict=True)
    ]
    limiting = min(plan.stage_ranks, key=lambda rank: fitting_blocks[rank.rank])
    limiting_blocks = fitting_blocks[limiting.rank]
    name = f"{limiting.rank} (role {limiting.role}, {limiting.device})"
    headroom = format_bytes(headrooms_bytes[limiting.rank])
    if headrooms_bytes[limiting.rank] >= limiting.kv_cache_bytes:
        limit = (
            f"The plan limits this number. Rank {name} has space for the fewest blocks: {limiting_blocks} in "
            f"{headroom} of headroom"
        )
    else:
        limit = (
            f"Rank {name} limits this number: the rank's {headroom} of headroom have space for "
            f"{limiting_blocks} blocks"
        )
    blocks_by_rank = ", ".join(f"rank {rank.rank} {fitting_blocks[rank.rank]}" for rank in plan.stage_ranks)
    return (
        f"KV cache: {blocks} blocks of {plan.engine.block_size} tokens on every rank. {limit}. "
        f"Headroom in blocks: {blocks_by_rank}"
    )
