"""Describes collectives as data: the calls of the ranks of a test group. Does not import torch."""

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

OPERATIONS = (
    "all_reduce",
    "all_reduce_in_place",
    "all_gather",
    "all_gatherv",
    "reduce_scatter",
    "reduce_scatterv",
    "gather",
    "broadcast",
)
DTYPES = ("float32", "bfloat16", "float16", "int64", "int32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One collective of one rank.

    Attributes:
        operation: name from OPERATIONS.
        shape: shape of every rank's tensor. With `sizes`, the length along `dim` is their sum.
        dtype: name from DTYPES.
        dim: dimension of gathers and scatters.
        root: rank in the group that sends or gathers.
        sizes: sizes of the ranks along `dim`, for collectives with different sizes.
        step: number of the step, which the bridge gets before the call. It restarts the count of calls.
        history: value that the bridge gets before the call.
    """

    operation: str = "all_reduce"
    shape: tuple[int, ...] = (16, 64)
    dtype: str = "bfloat16"
    dim: int = 0
    root: int = 0
    sizes: tuple[int, ...] = ()
    step: int | None = None
    history: int | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Call":
        return replace(cls(**value), shape=tuple(value["shape"]), sizes=tuple(value["sizes"]))


def random_calls(seed: int, count: int, world: int, max_elements: int) -> list[Call]:
    """Returns random calls for every rank of a group of `world`. Most are small, and some are empty."""
    draw = random.Random(seed)
    return [_random_call(draw, index, world, max_elements) for index in range(count)]


def _random_call(draw: random.Random, index: int, world: int, max_elements: int) -> Call:
    """Draws one call with a valid shape for its operation."""
    operation = draw.choice(OPERATIONS)
    shape = [draw.choice((1, 2, 3, 5, 8, 17)) for _ in range(draw.randint(1, 3))]
    dim = draw.randrange(len(shape))
    shape[dim] = draw.randint(0, max(1, max_elements // 300))
    if operation == "reduce_scatter":
        shape[dim] *= world
    sizes: tuple[int, ...] = ()
    if operation.endswith("v"):
        sizes = tuple(draw.randint(0, 9) for _ in range(world))
        shape[dim] = sum(sizes)
    return Call(
        operation=operation,
        shape=tuple(shape),
        dtype=draw.choice(DTYPES),
        dim=dim - len(shape) if draw.random() < 0.5 else dim,
        root=draw.randrange(world),
        sizes=sizes,
        step=index // 7 if draw.random() < 0.3 else None,
        history=draw.getrandbits(64) if draw.random() < 0.1 else None,
    )
