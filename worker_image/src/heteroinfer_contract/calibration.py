"""The results of `heteroinfer-worker calibrate` on one machine. Stdlib only; pure.

They are stored in a pod's termination message (Kubernetes keeps 4096 bytes), in ConfigMaps and in files.
"""

import dataclasses
import hashlib
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model import SchemeName

ALL_NODES: Final = -1
"""`MemoryReading.node` of threads that the kernel spreads over all NUMA nodes."""
AMX_SETS: Final = ("amx_tile", "amx_bf16")
"""Instruction sets that kernels for AMX need, by their Linux names."""
AVX512_SET: Final = "avx512f"
"""The instruction set that kernels for AVX-512 need."""
MORE_ROWS: Final = (4, 16, 64, 512, 2048)
"""Row counts of the products in `KernelRate.more_rows`; one row is measured separately."""
MAX_ENTRIES: Final = 64
"""Maximum length of each list."""
MAX_TEXT: Final = 128
"""Maximum characters of a name; `Skipped.why` may have twice as many."""
_MIN_RATE, _MAX_RATE = 1.0, 1e18
"""Allowed bytes or operations per second. Beyond this range, a predicted time is invalid or too large for
Kubernetes."""
_SHORTEST_S, _LONGEST_S = 1e-9, 3600.0
"""Allowed seconds of a hop."""
_LATEST: Final = 253402300799.0
"""The end of the year 9999, in seconds since 1970: the latest date that Python supports."""


class KernelPart(StrEnum):
    """The part of a layer that a kernel computes."""

    LINEAR = "linear"
    EXPERTS = "experts"


class HopPath(StrEnum):
    """How two ranks on one machine communicate."""

    GLOO = "gloo"
    """A message between two processes over loopback, like hidden states between stages."""
    EXCHANGE = "exchange"
    """A request of a GPU and the answer of a feed-forward rank, inside a CUDA graph."""


class Direction(StrEnum):
    """Direction of a copy between pinned host memory and a GPU."""

    TO_GPU = "to GPU"
    FROM_GPU = "from GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machine.

    Attributes:
        cpu: CPU model, as Linux names it.
        instruction_sets: instruction sets that compute kernels check for, by their Linux names.
        cores: physical cores of these CPUs.
        gpu: name of the first GPU, or "".
    """

    cpu: str
    instruction_sets: tuple[str, ...]
    cpus: int
    cores: int
    numa_nodes: int = 1
    gpu: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Versions of the software that measured the machine."""

    heteroinfer: str
    vllm: str
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """How fast threads read uncached memory.

    Attributes:
        bytes_per_s: sum over all threads.
        node: NUMA node of threads and memory, or ALL_NODES.
    """

    threads: int
    bytes_per_s: float
    node: int = ALL_NODES


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRate:
    """How fast a kernel reads weights.

    Attributes:
        scheme: format of the weights; SchemeName.NONE if the weights have type `dtype`.
        dtype: type of the activations.
        bytes_per_s: bytes of weights, as stored in the checkpoint, that all threads together read in a second
            to compute one row.
        more_rows: the same rate for each row count in MORE_ROWS (for experts: rows per expert). Shorter than
            MORE_ROWS if only the first counts were measured.
    """

    part: KernelPart
    scheme: SchemeName
    dtype: str
    kernel: str
    threads: int
    bytes_per_s: float
    more_rows: tuple[float, ...] = ()

    def rate(self, rows: float) -> float:
        """Returns the bytes per second for `rows` rows.

        Beyond the last measured count, the rate falls in proportion to the rows, because computation is the
        limit. If only one row was measured, all numbers of rows have the same rate.
        """
        points = [(1.0, self.bytes_per_s), *zip(map(float, MORE_ROWS), self.more_rows, strict=False)]
        if len(points) == 1:
            return self.bytes_per_s
        most_rows, last_rate = points[-1]
        if rows >= most_rows:
            return last_rate * most_rows / rows
        # The time per byte is interpolated, because it grows evenly with the rows. The rate does not.
        return 1 / _interpolate([(count, 1 / rate) for count, rate in points], max(rows, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A copy between pinned host memory and the GPU.

    Attributes:
        contended: whether CPU threads read memory, and another copy ran in the other direction, at the same
            time.
    """

    direction: Direction
    bytes_per_s: float
    contended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """The measured time of a one-way message, or of an exchange with a feed-forward rank.

    Attributes:
        seconds: time until the message arrived; for an exchange, time until the answer arrived.
    """

    path: HopPath
    message_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRate:
    """Speed of the GPU without transfers.

    Attributes:
        bytes_per_s: bytes of memory that a bf16 product with one row reads in a second.
        operations_per_s: operations that a bf16 product with many rows computes in a second.
    """

    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """A measurement that was not possible."""

    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration(codec.JsonValue):
    """One run on one machine.

    Attributes:
        time: end of the run, in seconds since 1970 (UTC).
        readings: memory readings, ascending by node and threads.
        operations_per_s: multiplications and additions that all cores together compute in a second in a bf16
            linear layer with many rows; 0 if not measured.
    """

    hardware: Hardware
    versions: Versions
    time: float
    duration_s: float
    readings: tuple[MemoryReading, ...]
    kernels: tuple[KernelRate, ...] = ()
    operations_per_s: float = 0.0
    transfers: tuple[Transfer, ...] = ()
    hops: tuple[Hop, ...] = ()
    gpu: GpuRate | None = None
    skipped: tuple[Skipped, ...] = ()

    @property
    def hash(self) -> str:
        """Short hash of this calibration, for messages and for names of objects."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    @property
    def has_amx(self) -> bool:
        """Whether kernels for AMX can run."""
        return set(AMX_SETS) <= set(self.hardware.instruction_sets)

    @property
    def has_avx512(self) -> bool:
        """Whether kernels for AVX-512 can run."""
        return AVX512_SET in self.hardware.instruction_sets

    def read_rate(self, threads: float, *, combine: Callable[[Sequence[float]], float] = min) -> float:
        """Returns the bytes per second that `threads` threads read, interpolated between measurements.

        Threads that fit on one NUMA node are bound to one node, so the readings of single nodes count.

        Args:
            combine: combines the rates of several nodes; by default the slowest node counts.
        """
        nodes = sorted({reading.node for reading in self.readings if reading.node != ALL_NODES})
        cores_per_node = self.hardware.cores / max(self.hardware.numa_nodes, 1)
        if not nodes or threads > cores_per_node:
            nodes = [ALL_NODES]
        return combine([_interpolate(self._curve(node), threads) for node in nodes])

    def _curve(self, node: int) -> list[tuple[float, float]]:
        """Returns (threads, bytes per second) of each reading of a node, ascending by threads."""
        readings = [reading for reading in self.readings if reading.node == node]
        return sorted((float(reading.threads), reading.bytes_per_s) for reading in readings)

    def fastest_kernel(self, part: KernelPart, scheme: SchemeName, dtype: str) -> KernelRate | None:
        """Returns the fastest measured kernel for a part, a format and one row; None if none was measured."""
        kernels = [k for k in self.kernels if (k.part, k.scheme, k.dtype) == (part, scheme, dtype)]
        return max(kernels, key=lambda kernel: kernel.bytes_per_s, default=None)

    def link_rate(self) -> float | None:
        """Returns the bytes per second of copies to the GPU; None if they were not measured.

        Prefers the rate that was measured while CPUs read memory.
        """
        rates = {t.contended: t.bytes_per_s for t in self.transfers if t.direction is Direction.TO_GPU}
        return rates.get(True, rates.get(False))

    def hop_s(self, path: HopPath, message_bytes: int = 0) -> float | None:
        """Returns the seconds of a message, measured at this size or the next larger size.

        A message larger than all measured sizes takes the time of the largest. None if no hop of this path
        was measured.
        """
        measured = sorted((hop.message_bytes, hop.seconds) for hop in self.hops if hop.path is path)
        for size_bytes, seconds in measured:
            if size_bytes >= message_bytes:
                return seconds
        return measured[-1][1] if measured else None

    def to_json(self) -> str:
        """Returns the canonical JSON text; items of lists omit fields that are at their default."""
        value = dataclasses.asdict(self)
        # The other lists (hops, skipped) have items without defaults.
        for name, kind in (("readings", MemoryReading), ("kernels", KernelRate), ("transfers", Transfer)):
            defaults = {field.name: field.default for field in dataclasses.fields(kind)}
            value[name] = [
                {field: setting for field, setting in item.items() if setting != defaults[field]}
                for item in value[name]
            ]
        return codec.as_json_text(value)

    def check(self) -> None:
        """Checks the properties that every reader relies on.

        Raises:
            ContractError: no memory reading covers all nodes, a list or a text is too long, or a number is
                outside its range. The message names the field.
        """
        codec.at_least(0, "Calibration", time=self.time, duration_s=self.duration_s)
        codec.at_most(_LATEST, "Calibration", time=self.time)
        if self.operations_per_s:
            _check_rates("Calibration", operations_per_s=self.operations_per_s)
        codec.at_least(1, "Calibration.hardware", cpus=self.hardware.cpus, cores=self.hardware.cores)
        codec.at_least(1, "Calibration.hardware", numa_nodes=self.hardware.numa_nodes)
        for name in ("readings", "kernels", "transfers", "hops", "skipped"):
            codec.at_most(MAX_ENTRIES, "Calibration", **{name: len(getattr(self, name))})
        codec.at_most(MAX_ENTRIES, "Calibration.hardware", sets=len(self.hardware.instruction_sets))
        if not any(each.node == ALL_NODES for each in self.readings):
            raise ContractError(
                f"Calibration.readings: must contain a reading of all NUMA nodes (node {ALL_NODES}). Measure "
                "again with heteroinfer-worker calibrate"
            )
        self._check_measurements()
        self._check_texts()

    def _check_measurements(self) -> None:
        """Checks that the numbers of all measurements are in range; raises ContractError."""
        for reading in self.readings:
            _check_rates("MemoryReading", bytes_per_s=reading.bytes_per_s)
            codec.at_least(1, "MemoryReading", threads=reading.threads)
        for kernel in self.kernels:
            _check_rates("KernelRate", bytes_per_s=kernel.bytes_per_s)
            codec.at_least(1, "KernelRate", threads=kernel.threads)
            codec.at_most(len(MORE_ROWS), "KernelRate", more_rows=len(kernel.more_rows))
            for rate in kernel.more_rows:
                _check_rates("KernelRate", more_rows=rate)
        for transfer in self.transfers:
            _check_rates("Transfer", bytes_per_s=transfer.bytes_per_s)
        for hop in self.hops:
            codec.at_least(0, "Hop", message_bytes=hop.message_bytes)
            codec.at_least(_SHORTEST_S, "Hop", seconds=hop.seconds)
            codec.at_most(_LONGEST_S, "Hop", seconds=hop.seconds)
        if self.gpu is not None:
            _check_rates("GpuRate", **dataclasses.asdict(self.gpu))

    def _check_texts(self) -> None:
        """Checks that texts are not longer than MAX_TEXT; raises ContractError."""
        hardware, versions = self.hardware, self.versions
        texts = [hardware.cpu, hardware.gpu, *hardware.instruction_sets]
        texts += [versions.heteroinfer, versions.vllm, versions.torch, *(k.kernel for k in self.kernels)]
        texts += [k.dtype for k in self.kernels] + [each.what for each in self.skipped]
        codec.at_most(MAX_TEXT, "Calibration", text_length=max(map(len, texts)))
        longest = max((len(each.why) for each in self.skipped), default=0)
        codec.at_most(2 * MAX_TEXT, "Skipped", why_length=longest)


def cpu_fields(cpuinfo: str) -> dict[str, str]:
    """Returns the fields of the last CPU in /proc/cpuinfo, by name."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    # The file repeats each name for each CPU, and a dict keeps the last value.
    return {name.strip(): value.strip() for name, colon, value in lines if colon}


def cpu_name(fields: Mapping[str, str]) -> str:
    """Returns the model name of a CPU, for `Hardware.cpu`.

    An Arm CPU has no model name in /proc/cpuinfo; the numbers of its implementer and its part replace the
    name.

    Args:
        fields: result of `cpu_fields`.
    """
    implementer, part = fields.get("CPU implementer", "?"), fields.get("CPU part", "?")
    return (fields.get("model name") or f"implementer {implementer} part {part}")[:MAX_TEXT]


def _check_rates(where: str, **values: float) -> None:
    """Checks that rates are in the allowed range; raises ContractError that names the field."""
    codec.at_least(_MIN_RATE, where, **values)
    codec.at_most(_MAX_RATE, where, **values)


def _interpolate(curve: Sequence[tuple[float, float]], at: float) -> float:
    """Returns the value of a piecewise linear curve at `at`.

    Before the first point, the value is in proportion to `at`. After the last point, the value stays the
    same.

    Args:
        curve: points (argument, value), ascending by argument.
    """
    index = bisect_left([point[0] for point in curve], at)
    if index == len(curve):
        return curve[-1][1]
    if index == 0:
        return curve[0][1] * min(at / curve[0][0], 1.0)
    (left, low), (right, high) = curve[index - 1], curve[index]
    return low + (high - low) * (at - left) / (right - left)
