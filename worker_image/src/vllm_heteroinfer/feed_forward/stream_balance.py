"""How many of a layer's experts a GPU computes itself while CPUs compute the others. PURE."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

LEAST_GAIN: Final = 0.95
"""A division of experts is used only if a layer's time falls to this part of the simpler division's."""
TRIES: Final = 2
LEAST_ROWS: Final = 64
LONGEST_S: Final = 0.7
"""Seconds of a layer on CPUs alone. Longer layers are not measured with more rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds of a layer among equal layers without anything between them.

    Attributes:
        period_s: from one layer's answer to the next one's.
        cpu_s: of computing on the slowest rank.
        copy_s: of copies to the GPU.
        compute_s: in which the GPU unpacks and computes experts.
    """

    period_s: float
    cpu_s: float
    copy_s: float
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds of a layer with these rows.

    Attributes:
        experts: number of the layer's experts.
        cpus_alone_s: if CPUs compute all experts.
        exchange_s: part of `cpus_alone_s` in which rows and answers pass the slab, and no CPU computes.
        gpu_alone_s: if the GPU computes all experts.
        cpu_s: of all experts on CPUs, at the rate that they have while the GPU copies.
        copy_s: of copies of all experts, at the rate that the link has while CPUs compute.
        compute_s: in which the GPU unpacks and computes all experts.
    """

    rows: int
    experts: int
    cpus_alone_s: float
    exchange_s: float
    gpu_alone_s: float
    cpu_s: float
    copy_s: float
    compute_s: float

    def gpu_experts(self, gap_s: float, ahead: int) -> int:
        """Returns the number of experts on the GPU with which layers follow each other fastest.

        Args:
            gap_s: time between a layer's answer and the next ask.
            ahead: experts that the GPU can copy before their layer's rows exist.
        """
        low, high = 0, self.experts
        while low < high:  # the first number with which the GPU is the later side
            middle = (low + high) // 2
            if self._gpu_period_s(middle, gap_s, ahead, self.copy_s) >= self._cpu_period_s(middle, gap_s):
                high = middle
            else:
                low = middle + 1
        number = min((max(low - 1, 0), low), key=lambda each: self.period_s(each, gap_s, ahead))
        both_s, alone_s = (self.period_s(each, gap_s, ahead) for each in (number, self.experts))
        if number < self.experts and both_s > LEAST_GAIN * alone_s:
            number, both_s = self.experts, alone_s
        return 0 if both_s > LEAST_GAIN * self.period_s(0, gap_s, ahead) else number

    def period_s(self, number: int, gap_s: float, ahead: int) -> float:
        """Returns the time from one layer's answer to the next one's, with `number` experts on the GPU."""
        if not number:
            return gap_s + self.cpus_alone_s
        if number == self.experts:
            return self._gpu_period_s(number, gap_s, ahead, self.gpu_alone_s)
        gpu_s = self._gpu_period_s(number, gap_s, ahead, self.copy_s)
        return max(gpu_s, self._cpu_period_s(number, gap_s))

    def _cpu_period_s(self, number: int, gap_s: float) -> float:
        return gap_s + self.exchange_s + (1 - number / self.experts) * self.cpu_s

    def _gpu_period_s(self, number: int, gap_s: float, ahead: int, copy_s: float) -> float:
        """Returns the GPU's time. `copy_s` is the time to copy all experts."""
        copied_later_s = max(0, number - ahead) / self.experts * copy_s
        computed_s = number / self.experts * self.compute_s
        return max(number / self.experts * copy_s, gap_s + max(computed_s, copied_later_s))

    def mixed_with(self, other: "Measured", rows: int) -> "Measured":
        """Returns the times for a number of rows between those of two measurements."""
        nearness = (rows - self.rows) / (other.rows - self.rows)
        return Measured(
            rows=rows,
            experts=self.experts,
            **{
                name: (1 - nearness) * getattr(self, name) + nearness * getattr(other, name)
                for name in _SECONDS
            },
        )

    def with_more(self, rows: int) -> "Measured":
        """Returns the times for more rows, from this measurement alone: all grow but those of copies."""
        factor = rows / self.rows
        copies = {"copy_s": self.copy_s, "gpu_alone_s": max(self.gpu_alone_s, factor * self.compute_s)}
        grown = {name: factor * getattr(self, name) for name in _SECONDS if name not in copies}
        return Measured(rows=rows, experts=self.experts, **grown, **copies)


_SECONDS: Final = ("cpus_alone_s", "exchange_s", "gpu_alone_s", "cpu_s", "copy_s", "compute_s")


def measure(run: Callable[[int, int], LayerTimes], sizes: Sequence[int], experts: int) -> list[Measured]:
    """Measures a layer with each number of rows, until CPUs alone take longer than LONGEST_S.

    Args:
        run: computes the layer several times, given the rows and the number of experts that the GPU computes.
        sizes: numbers of rows, ascending.
        experts: of the layer, at least 2.
    """
    measured: list[Measured] = []
    number = experts // 2
    run(sizes[0], number)  # its first use makes tables and loads kernels, which takes longer than a layer
    for rows in sizes:
        cpus_alone = _best(run, rows, 0)
        gpu_alone = _best(run, rows, experts)
        tries = []
        for _ in range(TRIES):
            both = run(rows, number)
            on_gpu = experts / number
            tries.append(
                Measured(
                    rows=rows,
                    experts=experts,
                    cpus_alone_s=cpus_alone.period_s,
                    exchange_s=max(0.0, cpus_alone.period_s - cpus_alone.cpu_s),
                    gpu_alone_s=gpu_alone.period_s,
                    cpu_s=both.cpu_s * experts / (experts - number),
                    copy_s=both.copy_s * on_gpu,
                    compute_s=both.compute_s * on_gpu,
                )
            )
            number = min(max(tries[-1].gpu_experts(0.0, experts), 1), experts - 1)
        measured.append(min(tries, key=lambda each: each.copy_s + each.cpu_s + each.compute_s))
        if cpus_alone.period_s > LONGEST_S:
            break
    return measured


def _best(run: Callable[[int, int], LayerTimes], rows: int, number: int) -> LayerTimes:
    """Returns the fastest of two runs, or the first if it takes long."""
    first = run(rows, number)
    return first if first.period_s > LONGEST_S else min(first, run(rows, number), key=lambda t: t.period_s)


class Balance:
    """The number of experts on the GPU by rows, from measurements of one kind of layers."""

    def __init__(self, measured: Sequence[Measured]) -> None:
        """Takes measurements by rows, ascending."""
        self.measured = measured
        self._rows = [each.rows for each in measured]

    def gpu_experts(self, rows: int, gap_s: float, ahead: int) -> int:
        """Returns the number of experts on the GPU; 0 for fewer rows than were measured.

        Args:
            gap_s: time between a layer's answer and the next ask.
            ahead: experts that the GPU can copy before their layer's rows exist.
        """
        if rows < self._rows[0]:
            return 0
        return self._at(rows).gpu_experts(gap_s, ahead)

    def _at(self, rows: int) -> Measured:
        """Returns the times for a number of rows that is not below the first measurement's."""
        after = bisect_left(self._rows, rows)
        if after == len(self._rows):
            return self.measured[-1].with_more(rows)
        high = self.measured[after]
        return high if high.rows == rows else self.measured[after - 1].mixed_with(high, rows)

    def describe(self) -> str:
        """Returns the measurements as text for the log."""
        return " | ".join(
            f"{each.rows} rows: {each.gpu_experts(0.0, each.experts)} of {each.experts} experts on the GPU. "
            f"ms: CPUs alone {each.cpus_alone_s * 1e3:.1f} with an exchange of {each.exchange_s * 1e3:.1f}, "
            f"GPU alone {each.gpu_alone_s * 1e3:.1f}. All experts with both at once: CPUs "
            f"{each.cpu_s * 1e3:.1f}, copies {each.copy_s * 1e3:.1f}, GPU {each.compute_s * 1e3:.1f}"
            for each in self.measured
        )


class Gaps:
    """The time between a layer's answer and the next ask, by rows. It grows with the rows, but not evenly."""

    def __init__(self) -> None:
        self._by_size: dict[int, float] = {}

    def note(self, rows: int, seconds: float) -> None:
        """Notes a measured gap. A newer one counts for a quarter."""
        before = self._by_size.get(rows.bit_length(), seconds)
        self._by_size[rows.bit_length()] = before + (seconds - before) / 4

    def gap_s(self, rows: int) -> float:
        """Returns the gap of about as many rows, or else of the next fewer; 0 if no such gap was measured."""
        sizes = [size for size in self._by_size if size <= rows.bit_length()]
        return self._by_size[max(sizes)] if sizes else 0.0


def measured_sizes(captured_rows: int, most: int) -> Iterator[int]:
    """Yields the numbers of rows to measure: the fewest above captured graphs, powers of two, the most."""
    rows = max(LEAST_ROWS, captured_rows + 1)
    while rows < most:
        yield rows
        rows = 1 << rows.bit_length()
    yield most


def first_of_each_kind(kind: Callable[[int], object], numbers: Sequence[int]) -> list[int]:
    """Returns the numbers whose kind no number before them has."""
    found: dict[object, int] = {}
    for number in numbers:
        found.setdefault(kind(number), number)
    return list(found.values())
