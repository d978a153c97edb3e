"""How many of a layer's experts a GPU computes itself while CPUs compute the others. PURE."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

LEAST_GAIN: Final = 0.95
"""The GPU takes experts only if the layer's time falls to this part of the CPUs' time alone, or below."""
TRIES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of one layer.

    Attributes:
        wall_s: until the answer.
        cpu_s: of computing on the slowest rank.
        gpu_s: until the GPU has copied and computed its experts.
    """

    wall_s: float
    cpu_s: float
    gpu_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of a layer with these rows.

    Attributes:
        experts: number of the layer's experts.
        cpu_alone_s: if CPUs compute all experts.
        exchange_s: part of `cpu_alone_s` in which rows and answers pass the slab, and no CPU computes.
        gpu_alone_s: if the GPU computes all experts.
        cpu_s: of all experts on CPUs, at the rate that they have while the GPU copies.
        gpu_s: of all experts on the GPU, at the rate that it has while CPUs compute.
    """

    rows: int
    experts: int
    cpu_alone_s: float
    exchange_s: float
    gpu_alone_s: float
    cpu_s: float
    gpu_s: float

    @property
    def part(self) -> float:
        """The GPU's part of the experts with which the layer is fastest; 0 if the GPU does not help."""
        # The GPU copies experts during the exchange, too. With this number both sides end at the same time.
        number = round(self.experts * (self.exchange_s + self.cpu_s) / (self.cpu_s + self.gpu_s))
        part = min(number, self.experts) / self.experts
        both_s = max(part * self.gpu_s, self.exchange_s + (1 - part) * self.cpu_s)
        if min(both_s, self.gpu_alone_s) > LEAST_GAIN * self.cpu_alone_s:
            return 0.0
        return 1.0 if self.gpu_alone_s < both_s else part


def measure(run: Callable[[int, int], LayerTimes], sizes: Sequence[int], experts: int) -> list[Measured]:
    """Measures a layer with each number of rows.

    Args:
        run: computes the layer, given the rows and the number of experts that the GPU computes.
        sizes: numbers of rows, ascending.
        experts: of the layer, at least 2.
    """
    measured: list[Measured] = []
    number = experts // 2
    for rows in sizes:
        run(rows, number)  # compiles vLLM's kernel for this size
        cpu_alone = min((run(rows, 0) for _ in range(2)), key=lambda each: each.wall_s)
        gpu_alone = min((run(rows, experts) for _ in range(2)), key=lambda each: each.wall_s)
        tries = []
        for _ in range(TRIES):
            both = run(rows, number)
            tries.append(
                Measured(
                    rows=rows,
                    experts=experts,
                    cpu_alone_s=cpu_alone.wall_s,
                    exchange_s=max(0.0, cpu_alone.wall_s - cpu_alone.cpu_s),
                    gpu_alone_s=gpu_alone.wall_s,
                    cpu_s=both.cpu_s * experts / (experts - number),
                    gpu_s=both.gpu_s * experts / number,
                )
            )
            number = _clamp(round(tries[-1].part * experts), experts)
        # A try in which a kernel was compiled is much slower than the others.
        measured.append(min(tries, key=lambda each: each.gpu_s))
        number = _clamp(round(measured[-1].part * experts), experts)
    return measured


def _clamp(number: int, experts: int) -> int:
    """Returns the nearest number with which both sides compute an expert."""
    return min(max(number, 1), experts - 1)


class Balance:
    """The GPU's part of the experts by rows, from measurements."""

    def __init__(self, measured: Sequence[Measured]) -> None:
        """Takes measurements by rows, ascending."""
        self.measured = measured
        self._rows = [each.rows for each in measured]

    def gpu_part(self, rows: int) -> float:
        """Returns the GPU's part of the experts; 0 next to a measurement in which the GPU does not help."""
        after = bisect_left(self._rows, rows)
        if after == len(self._rows):
            return self.measured[-1].part
        high = self.measured[after]
        if high.rows == rows:
            return high.part
        if after == 0 or not self.measured[after - 1].part or not high.part:
            return 0.0
        low = self.measured[after - 1]
        nearness = (rows - low.rows) / (high.rows - low.rows)
        return low.part + nearness * (high.part - low.part)

    @property
    def first_rows(self) -> int | None:
        """The fewest measured rows from which on the GPU computes experts; None if it never does."""
        return next((each.rows for each in self.measured if each.part), None)
