"""Chooses how many of a layer's experts the GPU computes while CPUs compute the others. Pure.

A step computes its layers one after the other. The gap is the time between a layer's answer and the next
layer's ask; CPUs wait then, but copies to the GPU go on.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract.gpu_experts import LEAST_GAIN, LEAST_ROWS

TRIES: Final = 2
"""Number of measurements with GPU and CPUs together, for each number of rows. Each measurement divides the
experts as was best according to the previous measurement."""
LONGEST_S: Final = 0.7
"""If CPUs alone take more seconds for a layer than this, larger numbers of rows are not measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Seconds for one layer, measured while equal layers follow each other without a gap.

    Attributes:
        period_s: seconds from one layer's answer to the next layer's answer.
        cpu_s: seconds in which the slowest rank computed.
        copy_s: seconds in which the GPU copied weights.
        compute_s: seconds in which the GPU unpacked and computed experts.
    """

    period_s: float
    cpu_s: float
    copy_s: float
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Seconds for one layer with this number of rows.

    Attributes:
        experts: number of experts in the layer.
        cpus_alone_s: seconds for the layer if CPUs compute all experts.
        exchange_s: part of `cpus_alone_s` in which no CPU computes, because rows and answers pass the slab.
        gpu_alone_s: seconds for the layer if the GPU computes all experts.
        cpu_s: seconds in which CPUs compute all experts, at their speed while the GPU copies.
        copy_s: seconds in which the GPU copies all experts, at the link's speed while CPUs compute.
        compute_s: seconds in which the GPU unpacks and computes all experts.
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
        """Returns the number of experts on the GPU with which a step takes the least time.

        GPU and CPUs finish together at the best division, so a binary search finds this division. A simpler
        choice wins unless another choice is clearly faster (LEAST_GAIN). No experts on the GPU are the
        simplest choice, then all experts on the GPU, then a division.

        Args:
            gap_s: time between a layer's answer and the next ask.
            ahead: number of experts that the GPU can copy during the gap, before the layer's rows exist.
        """
        low, high = 0, self.experts
        while low < high:  # finds the smallest number with which the GPU finishes last
            middle = (low + high) // 2
            if self._gpu_period_s(middle, gap_s, ahead, self.copy_s) >= self._cpu_period_s(middle, gap_s):
                high = middle
            else:
                low = middle + 1
        # GPU and CPUs finish together between `low - 1` and `low` experts. The faster of the two is best.
        best = min((max(low - 1, 0), low), key=lambda number: self.period_s(number, gap_s, ahead))
        best_s = self.period_s(best, gap_s, ahead)
        gpu_alone_s = self.period_s(self.experts, gap_s, ahead)
        if best < self.experts and best_s > LEAST_GAIN * gpu_alone_s:
            best, best_s = self.experts, gpu_alone_s
        return 0 if best_s > LEAST_GAIN * self.period_s(0, gap_s, ahead) else best

    def period_s(self, gpu_experts: int, gap_s: float, ahead: int) -> float:
        """Returns the time from one layer's answer to the next, with this number of experts on the GPU."""
        if not gpu_experts:
            return gap_s + self.cpus_alone_s
        if gpu_experts == self.experts:
            # CPUs do not compute then, so the measured time of the GPU alone replaces the time of its copies.
            return self._gpu_period_s(gpu_experts, gap_s, ahead, self.gpu_alone_s)
        gpu_s = self._gpu_period_s(gpu_experts, gap_s, ahead, self.copy_s)
        return max(gpu_s, self._cpu_period_s(gpu_experts, gap_s))

    def _cpu_period_s(self, gpu_experts: int, gap_s: float) -> float:
        """Returns the time that a layer takes on the CPUs, which compute the other experts."""
        return gap_s + self.exchange_s + (1 - gpu_experts / self.experts) * self.cpu_s

    def _gpu_period_s(self, gpu_experts: int, gap_s: float, ahead: int, copy_all_s: float) -> float:
        """Returns the time that a layer takes on the GPU.

        The GPU copies and computes at the same time, so the longer of the two counts. The computation begins
        after the gap, and so do the copies of all experts except the first `ahead`.

        Args:
            copy_all_s: seconds to copy all experts: `copy_s` while CPUs compute, `gpu_alone_s` while CPUs are
                idle.
        """
        part = gpu_experts / self.experts
        copied_later_s = max(0, gpu_experts - ahead) / self.experts * copy_all_s
        return max(part * copy_all_s, gap_s + max(part * self.compute_s, copied_later_s))

    def interpolate(self, other: "Measured", rows: int) -> "Measured":
        """Returns the times for a number of rows between this measurement's and the other's."""
        other_part = (rows - self.rows) / (other.rows - self.rows)
        return Measured(
            rows=rows,
            experts=self.experts,
            **{
                name: (1 - other_part) * getattr(self, name) + other_part * getattr(other, name)
                for name in _SECONDS
            },
        )

    def extrapolate(self, rows: int) -> "Measured":
        """Returns the times for more rows: all times grow in proportion, except the time of copies.

        The time of the GPU alone grows only after computing takes longer than copying.
        """
        factor = rows / self.rows
        times = {name: factor * getattr(self, name) for name in _SECONDS}
        times["copy_s"] = self.copy_s
        times["gpu_alone_s"] = max(self.gpu_alone_s, times["compute_s"])
        return Measured(rows=rows, experts=self.experts, **times)


_SECONDS: Final = ("cpus_alone_s", "exchange_s", "gpu_alone_s", "cpu_s", "copy_s", "compute_s")


def measure(run: Callable[[int, int], LayerTimes], sizes: Sequence[int], experts: int) -> list[Measured]:
    """Measures a layer for each number of rows: with CPUs alone, with the GPU alone, and with both.

    Stops after the first number of rows for which CPUs alone take longer than LONGEST_S. Returns a
    measurement for each number of rows before the stop.

    Args:
        run: computes the layer several times. Takes the number of rows and the number of experts on the GPU.
        sizes: numbers of rows, ascending.
        experts: number of experts in the layer, at least 2.
    """
    measured: list[Measured] = []
    gpu_experts = experts // 2
    run(sizes[0], gpu_experts)  # the times of this run do not count: it also builds tables and loads kernels
    for rows in sizes:
        cpus_alone = _run_twice(run, rows, gpu_experts=0)
        gpu_alone = _run_twice(run, rows, gpu_experts=experts)
        tries = []
        for _ in range(TRIES):
            both = run(rows, gpu_experts)
            # Scales the times of each side from its own experts to all experts, so that tries with different
            # divisions are comparable.
            cpu_factor, gpu_factor = experts / (experts - gpu_experts), experts / gpu_experts
            tries.append(
                Measured(
                    rows=rows,
                    experts=experts,
                    cpus_alone_s=cpus_alone.period_s,
                    exchange_s=max(0.0, cpus_alone.period_s - cpus_alone.cpu_s),
                    gpu_alone_s=gpu_alone.period_s,
                    cpu_s=both.cpu_s * cpu_factor,
                    copy_s=both.copy_s * gpu_factor,
                    compute_s=both.compute_s * gpu_factor,
                )
            )
            best = tries[-1].gpu_experts(gap_s=0.0, ahead=experts)
            gpu_experts = min(max(best, 1), experts - 1)  # GPU and CPUs need an expert each, to be measured
        # Keeps the fastest try, because other load on the host only adds time.
        measured.append(min(tries, key=lambda times: times.copy_s + times.cpu_s + times.compute_s))
        if cpus_alone.period_s > LONGEST_S:
            break
    return measured


def _run_twice(run: Callable[[int, int], LayerTimes], rows: int, gpu_experts: int) -> LayerTimes:
    """Returns the faster of two runs. A run that takes longer than LONGEST_S is not repeated."""
    first = run(rows, gpu_experts)
    if first.period_s > LONGEST_S:
        return first
    return min(first, run(rows, gpu_experts), key=lambda times: times.period_s)


class Balance:
    """Chooses the number of experts on the GPU for each number of rows, from measurements of equal layers."""

    def __init__(self, measured: Sequence[Measured]) -> None:
        """Takes measurements sorted by their number of rows, the fewest rows first."""
        self.measured = measured
        self._rows = [each.rows for each in measured]

    def gpu_experts(self, rows: int, gap_s: float, ahead: int) -> int:
        """Returns the number of experts on the GPU; 0 for fewer rows than the first measurement has.

        Args:
            gap_s: time between a layer's answer and the next ask.
            ahead: number of experts that the GPU can copy during the gap, before the layer's rows exist.
        """
        if rows < self._rows[0]:
            return 0
        return self._times_for(rows).gpu_experts(gap_s, ahead)

    def min_gpu_rows(self, ahead: int, max_rows: int) -> int:
        """Returns the minimum number of rows with which the GPU computes some experts.

        Returns 0 if the GPU computes no experts with up to `max_rows` rows.
        Assumes no gap between layers. With gaps, the GPU may compute experts with fewer rows.
        """
        possible = range(self._rows[0], max_rows + 1)
        return next((rows for rows in possible if self.gpu_experts(rows, 0.0, ahead)), 0)

    def _times_for(self, rows: int) -> Measured:
        """Returns the times for `rows`, which must be at least the first measurement's number of rows."""
        index = bisect_left(self._rows, rows)  # index of the first measurement with at least `rows` rows
        if index == len(self._rows):
            return self.measured[-1].extrapolate(rows)
        above = self.measured[index]
        return above if above.rows == rows else self.measured[index - 1].interpolate(above, rows)

    def describe(self) -> str:
        """Returns the measurements as text for the log."""
        return " | ".join(
            f"{each.rows} rows: the GPU computes {each.gpu_experts(0.0, each.experts)} of {each.experts} "
            f"experts. CPUs only: {each.cpus_alone_s * 1e3:.1f} ms ({each.exchange_s * 1e3:.1f} ms of it for "
            f"the exchange). GPU only: {each.gpu_alone_s * 1e3:.1f} ms. While both work, all experts would "
            f"take {each.cpu_s * 1e3:.1f} ms on CPUs; on the GPU {each.copy_s * 1e3:.1f} ms to copy and "
            f"{each.compute_s * 1e3:.1f} ms to compute"
            for each in self.measured
        )


class Gaps:
    """The measured time between a layer's answer and the next layer's ask, by the number of rows.

    The time grows with the rows, but not evenly. So numbers of rows with the same highest bit share a value.
    """

    def __init__(self) -> None:
        self._by_size: dict[int, float] = {}

    def note(self, rows: int, seconds: float) -> None:
        """Adds a measured gap to the moving average, with a weight of a quarter."""
        size = rows.bit_length()
        average_s = self._by_size.get(size, seconds)
        self._by_size[size] = average_s + (seconds - average_s) / 4

    def gap_s(self, rows: int) -> float:
        """Returns the gap for about this number of rows.

        Without such a measurement, returns the gap for the next smaller number of rows; 0 if there is none.
        """
        sizes = [size for size in self._by_size if size <= rows.bit_length()]
        return self._by_size[max(sizes)] if sizes else 0.0


def rows_to_measure(captured_rows: int, most: int) -> Iterator[int]:
    """Yields the numbers of rows for which the worker measures a layer, in ascending order.

    The first number is the smallest for which the GPU may compute experts: at least LEAST_ROWS, and more
    than the rows of the largest captured CUDA graph, because a captured graph cannot copy experts. Powers of
    two follow, then `most`. Yields only `most` if it is smaller than the first number.

    Args:
        captured_rows: rows of the largest captured CUDA graph; 0 without graphs.
        most: rows of the largest step.
    """
    rows = max(LEAST_ROWS, captured_rows + 1)
    while rows < most:
        yield rows
        rows = 1 << rows.bit_length()  # the next power of two
    yield most


def first_of_each_kind(kind: Callable[[int], object], numbers: Sequence[int]) -> list[int]:
    """Returns, for each kind of number, the first number of this kind, in the order of `numbers`.

    Args:
        kind: returns the kind of a number.
    """
    found: dict[object, int] = {}
    for number in numbers:
        found.setdefault(kind(number), number)
    return list(found.values())
