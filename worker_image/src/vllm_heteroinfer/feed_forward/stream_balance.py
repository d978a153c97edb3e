"""How many of a layer's experts a GPU computes itself while CPUs compute the others. PURE."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

LEAST_GAIN: Final = 0.95
"""The GPU takes experts only if the layer's time falls to this part of the CPUs' time alone, or below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of a layer with these rows.

    Attributes:
        alone_s: if CPUs compute all experts, and the GPU none.
        exchange_s: part of `alone_s` in which rows and answers pass the slab, and no CPU computes.
        cpu_s: of all experts on CPUs, at the rate that they have while the GPU copies.
        gpu_s: of all experts on the GPU, at the rate that it has while CPUs compute.
    """

    rows: int
    alone_s: float
    exchange_s: float
    cpu_s: float
    gpu_s: float

    @property
    def part(self) -> float:
        """The GPU's part of the experts with which both sides end at the same time.

        The GPU copies experts during the exchange, too.
        """
        return min(1.0, (self.exchange_s + self.cpu_s) / (self.cpu_s + self.gpu_s))

    @property
    def pays(self) -> bool:
        """Whether the layer is faster if the GPU takes its part."""
        return self.part * self.gpu_s <= LEAST_GAIN * self.alone_s


class Balance:
    """The GPU's part of the experts by rows, from measurements."""

    def __init__(self, measured: Sequence[Measured]) -> None:
        """Takes measurements by rows, ascending."""
        self.measured = measured
        self._rows = [each.rows for each in measured]

    def gpu_part(self, rows: int) -> float:
        """Returns the GPU's part of the experts: the nearest measurement below decides whether it pays."""
        after = bisect_left(self._rows, rows)
        if after == len(self._rows) or self._rows[after] == rows:
            last = self.measured[min(after, len(self._rows) - 1)]
            return last.part if last.pays else 0.0
        if after == 0 or not self.measured[after - 1].pays:
            return 0.0
        low, high = self.measured[after - 1], self.measured[after]
        nearness = (rows - low.rows) / (high.rows - low.rows)
        return low.part + nearness * (high.part - low.part)

    @property
    def first_rows(self) -> int | None:
        """The fewest measured rows from which on the GPU computes experts; None if it never does."""
        return next((each.rows for each in self.measured if each.pays), None)
