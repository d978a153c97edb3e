"""Which rank limits a group's KV cache, in words. Stdlib only; pure."""

from collections.abc import Sequence

from heteroinfer_contract.plan import Plan


def describe(plan: Plan, *, blocks: int, sizes_bytes: Sequence[int], rooms_bytes: Sequence[int]) -> str:
    """Returns one line: the group's blocks, the rank with the least room, and what each could hold.

    Args:
        plan: of the group.
        blocks: that every rank has.
        sizes_bytes: of each rank's KV cache.
        rooms_bytes: that each rank measured for it.
    """
    could = [
        room * blocks // size if size else 0 for size, room in zip(sizes_bytes, rooms_bytes, strict=True)
    ]
    tightest = min(plan.ranks, key=lambda rank: could[rank.rank])
    room = could[tightest.rank]
    by_plan = f", of which the plan gives {blocks}" if room > blocks else ""
    each = ", ".join(f"rank {rank.rank} {could[rank.rank]}" for rank in plan.ranks)
    return (
        f"KV cache: {blocks} blocks of {plan.engine.block_size} tokens on every rank; rank {tightest.rank} "
        f"(role {tightest.role}, {tightest.device}) limits it: "
        f"{rooms_bytes[tightest.rank] / 2**20:.0f} MiB are room for {room} blocks{by_plan}; "
        f"room in blocks: {each}"
    )
