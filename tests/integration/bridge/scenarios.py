"""Defines the calls and checks for every group of ranks, on CPUs and with a GPU."""

from typing import Any

from tests.integration.bridge.calls import DTYPES, OPERATIONS, Call

Difference = tuple[tuple[Call, ...], tuple[Call, ...], tuple[str, str]]

DIFFERENCES: dict[str, Difference] = {
    "operation": (
        (Call(operation="all_reduce", step=12),),
        (Call(operation="broadcast", step=12),),
        ("all_reduce #1 of step 12 [16, 64] bfloat16", "broadcast #1 of step 12 [16, 64] bfloat16"),
    ),
    "shape": ((Call(shape=(16, 64)),), (Call(shape=(15, 64)),), ("[16, 64]", "[15, 64]")),
    "shape of several parts": (
        (Call(shape=(2048, 4096)),),
        (Call(shape=(4096, 4096)),),
        ("[2048, 4096]", "[4096, 4096]"),
    ),
    "dtype": ((Call(dtype="bfloat16"),), (Call(dtype="float16"),), ("bfloat16", "float16")),
    "step": ((Call(step=3),), (Call(step=4),), ("of step 3", "of step 4")),
    "history": ((Call(history=1),), (Call(history=2),), (f"history {1:016x}", f"history {2:016x}")),
    "root": (
        (Call(operation="broadcast", root=0),),
        (Call(operation="broadcast", root=1),),
        ("root 0", "root 1"),
    ),
    "count": (
        (Call(step=4), Call(), Call()),
        (Call(step=4), Call(), Call(step=5)),
        ("#3 of step 4", "#1 of step 5"),
    ),
}
"""For each difference: the calls of all ranks except the last, those of the last, and the error's words."""


def check_thousand_calls(done: list[dict[str, Any]]) -> None:
    """Checks that each rank made a thousand calls with the same results, and reported its times."""
    assert [one["done"] for one in done] == [1000] * len(done)
    assert len({one["digest"] for one in done}) == 1
    assert all(one["transferred_s"] > 0 for one in done)
    assert sum(one["waited_s"] for one in done) > 0  # a rank that always comes last waits for no other rank


def every_operation(world: int) -> list[Call]:
    """Returns each operation in each dtype along each of three dimensions. Sizes differ by rank."""
    calls = []
    for operation in OPERATIONS:
        for dtype in DTYPES:
            for dim, shape in enumerate([(world * 3, 5, 7), (3, world * 5, 2), (1, 2, world)]):
                sizes: tuple[int, ...] = ()
                if operation.endswith("v"):
                    sizes = (*range(world - 1), shape[dim] - sum(range(world - 1)))
                calls.append(
                    Call(
                        operation=operation, dtype=dtype, shape=shape, dim=dim, root=dim % world, sizes=sizes
                    )
                )
    return calls


def LARGE(world: int) -> list[Call]:  # noqa: N802 - reads as the constant that it is but for `world`
    """Returns calls of tensors that need several parts of 4 MiB. No tensor is a whole number of parts."""
    rows = world * 1031
    return [
        Call(operation="all_reduce", shape=(rows, 4099), dtype="bfloat16"),
        Call(operation="all_reduce_in_place", shape=(rows, 4099), dtype="float32"),
        Call(operation="all_reduce", shape=((4 << 20) // 2,), dtype="bfloat16"),
        Call(operation="all_reduce", shape=((4 << 20) // 2 + 1,), dtype="bfloat16"),
        Call(operation="all_gather", shape=(rows, 1025), dim=1, dtype="float32"),
        Call(
            operation="all_gatherv",
            shape=(rows, 2049),
            sizes=(1, *(0,) * (world - 2), rows - 1),
            dtype="float32",
        ),
        Call(operation="reduce_scatter", shape=(rows, 2049), dtype="float32"),
        Call(operation="reduce_scatterv", shape=(rows, 2049), sizes=(rows - 3, *(0,) * (world - 2), 3)),
        Call(operation="gather", shape=(rows, 2049), root=world - 1, dtype="float32"),
        Call(operation="broadcast", shape=(rows, 2049), root=1, dtype="int64"),
    ]


def differing_calls(ranks: int) -> dict[str, list[list[dict[str, Any]]]]:
    """Returns the calls of each difference, by rank. The last rank's calls differ from the others'."""
    return {
        name: [[call.to_json() for call in side] for side in (*[here] * (ranks - 1), there)]
        for name, (here, there, _) in DIFFERENCES.items()
    }


def check_differences(reported: list[dict[str, Any]]) -> None:
    """Checks that every rank named both sides of every difference within 2 s."""
    last = len(reported) - 1
    for name, (*_, words) in DIFFERENCES.items():
        for rank, events in enumerate(reported):
            assert name in events, (name, rank, events.get("error"))
            one = events[name]
            context = (name, rank, one)
            assert "peer" in one, context
            assert one["seconds"] < 2, context
            own, other = reversed(words) if rank == last else words
            here, there = one["message"].split(". ")[0].split(", but ")
            assert here.startswith(f"process group test: rank {rank} is at"), context
            assert own in here, context
            assert there.startswith(f"rank {one['peer']} is at"), context
            assert other in there, context
            assert (one["peer"] == last) == (rank != last), context
