"""What `heteroinfer-worker calibrate` measured of one machine. Stdlib only; pure.

It travels as a pod's termination message, of which Kubernetes keeps 4096 bytes, in ConfigMaps and files.
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
"""Instruction sets, as Linux names them, that kernels for AMX need."""
AVX512_SET: Final = "avx512f"
"""The one that kernels for AVX-512 need."""
MORE_ROWS: Final = (4, 16, 64, 512, 2048)
"""Rows of a product, besides one, that `KernelRate.more_rows` is of."""
MAX_ENTRIES: Final = 64
"""Of each list."""
MAX_TEXT: Final = 128
"""Characters of a name; of why something was not measured, twice as many."""
_LEAST_RATE, _MOST_RATE = 1.0, 1e18
"""Bytes or operations a second: with others a prediction is no number that Kubernetes holds, or no time."""
_SHORTEST_S, _LONGEST_S = 1e-9, 3600.0
_LATEST: Final = 253402300799.0
"""The end of the year 9999, in seconds since 1970: dates of Python end there."""


class KernelPart(StrEnum):
    """What of a layer a kernel computes."""

    LINEAR = "linear"
    EXPERTS = "experts"


class HopPath(StrEnum):
    """How two ranks of a machine speak."""

    GLOO = "gloo"
    """A message between two processes over loopback, as hidden states go from stage to stage."""
    EXCHANGE = "exchange"
    """An ask and its answer between a GPU and a feed-forward rank, inside a CUDA graph."""


class Direction(StrEnum):
    """Of a copy between pinned memory and a GPU."""

    TO_GPU = "to GPU"
    FROM_GPU = "from GPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """The machine.

    Attributes:
        cpu: model of its CPUs, as the kernel names it.
        instruction_sets: those that kernels ask for, as the kernel names them.
        cores: physical cores of these.
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
    """What measured, and was measured."""

    heteroinfer: str
    vllm: str
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """How fast threads read memory that no cache holds.

    Attributes:
        bytes_per_s: by all of them together.
        node: NUMA node of threads and memory, or ALL_NODES.
    """

    threads: int
    bytes_per_s: float
    node: int = ALL_NODES


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRate:
    """How fast a kernel reads weights.

    Attributes:
        scheme: format of the weights; SchemeName.NONE for those of type `dtype`.
        dtype: of activations.
        bytes_per_s: of the weights as the checkpoint stores them, by all threads together, for one row.
        more_rows: the same for so many rows each as MORE_ROWS says, of experts for each of them; the first
            ones, as far as they were measured.
    """

    part: KernelPart
    scheme: SchemeName
    dtype: str
    kernel: str
    threads: int
    bytes_per_s: float
    more_rows: tuple[float, ...] = ()

    def rate(self, rows: float) -> float:
        """Returns bytes a second for so many rows; beyond those measured it computes, in proportion."""
        known = [(1.0, self.bytes_per_s), *zip(map(float, MORE_ROWS), self.more_rows, strict=False)]
        if len(known) == 1:
            return self.bytes_per_s
        most, last = known[-1]
        if rows >= most:
            return last * most / rows
        return 1 / _between([(at, 1 / rate) for at, rate in known], max(rows, 1.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """A copy between pinned memory and the GPU.

    Attributes:
        contended: whether CPU threads read memory, and another copy went the other way, meanwhile.
    """

    direction: Direction
    bytes_per_s: float
    contended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A message, one way, or an exchange of feed-forward ranks.

    Attributes:
        seconds: until it was there; of an exchange, until its answer was.
    """

    path: HopPath
    message_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuRate:
    """The GPU by itself.

    Attributes:
        bytes_per_s: of its memory, read by a product with one row, bf16.
        operations_per_s: of a product with many rows, bf16.
    """

    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """What could not be measured."""

    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration(codec.JsonValue):
    """One run on one machine.

    Attributes:
        time: when it ended, in seconds since 1970 (UTC).
        readings: of memory, ascending by node and threads.
        operations_per_s: multiplications and additions of a bf16 linear layer with many rows, by all cores.
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
        """Returns what tells it from others, for people and names."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:12]

    @property
    def has_amx(self) -> bool:
        """Returns whether kernels for AMX run."""
        return set(AMX_SETS) <= set(self.hardware.instruction_sets)

    @property
    def has_avx512(self) -> bool:
        """Returns whether kernels for AVX-512 run."""
        return AVX512_SET in self.hardware.instruction_sets

    def reading(self, threads: float, *, of_nodes: Callable[[Sequence[float]], float] = min) -> float:
        """Returns how fast so many threads read, in bytes a second, between what was measured.

        Threads that fit on one NUMA node are bound to one.

        Args:
            of_nodes: what counts of several nodes: the slowest, for whoever waits for it.
        """
        nodes = sorted({each.node for each in self.readings if each.node != ALL_NODES})
        fits = threads <= self.hardware.cores / max(self.hardware.numa_nodes, 1)
        curves = [self._curve(node) for node in nodes] if nodes and fits else []
        curve = self._curve(ALL_NODES)
        return of_nodes([_between(each, threads) for each in (curves or [curve])])

    def _curve(self, node: int) -> list[tuple[float, float]]:
        return sorted((float(e.threads), e.bytes_per_s) for e in self.readings if e.node == node)

    def kernel(self, part: KernelPart, scheme: SchemeName, dtype: str) -> KernelRate | None:
        """Returns the fastest kernel measured of a part in a format, or None."""
        found = [k for k in self.kernels if (k.part, k.scheme, k.dtype) == (part, scheme, dtype)]
        return max(found, key=lambda kernel: kernel.bytes_per_s, default=None)

    def hop_s(self, path: HopPath, message_bytes: int = 0) -> float | None:
        """Returns how long a message takes: that of the smallest measured of that size; None without."""
        found = sorted((hop.message_bytes, hop.seconds) for hop in self.hops if hop.path is path)
        return next((s for size, s in found if size >= message_bytes), found[-1][1] if found else None)

    def to_json(self) -> str:
        """Returns the one JSON text of this calibration; what is at its default is left out of lists."""
        value = dataclasses.asdict(self)
        for name, kind in (("readings", MemoryReading), ("kernels", KernelRate), ("transfers", Transfer)):
            bare = {
                f.name: f.default for f in dataclasses.fields(kind) if f.default is not dataclasses.MISSING
            }
            value[name] = [
                {k: v for k, v in item.items() if k not in bare or v != bare[k]} for item in value[name]
            ]
        return codec.text_of(value)

    def check(self) -> None:
        """Checks what every reader relies on.

        Raises:
            ContractError: nothing was read, a list or a text is too long, or a number is one that there
                cannot be; the message names the field.
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
                f"Calibration.readings: got none of node {ALL_NODES} (all nodes), expected at least one"
            )
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
        self._check_texts()

    def _check_texts(self) -> None:
        hardware, versions = self.hardware, self.versions
        texts = [hardware.cpu, hardware.gpu, *hardware.instruction_sets]
        texts += [versions.heteroinfer, versions.vllm, versions.torch, *(k.kernel for k in self.kernels)]
        texts += [k.dtype for k in self.kernels] + [each.what for each in self.skipped]
        codec.at_most(MAX_TEXT, "Calibration", text_length=max(map(len, texts)))
        longest = max((len(each.why) for each in self.skipped), default=0)
        codec.at_most(2 * MAX_TEXT, "Skipped", why_length=longest)


def cpu_fields(cpuinfo: str) -> dict[str, str]:
    """Returns what /proc/cpuinfo says of its last CPU, by name."""
    lines = (line.partition(":") for line in cpuinfo.splitlines())
    return {key.strip(): value.strip() for key, has, value in lines if has}


def cpu_name(fields: Mapping[str, str]) -> str:
    """Returns the model of a CPU, as `Hardware.cpu` has it; Arm's are numbers of implementer and part."""
    implementer, part = fields.get("CPU implementer", "?"), fields.get("CPU part", "?")
    return (fields.get("model name") or f"implementer {implementer} part {part}")[:MAX_TEXT]


def _check_rates(where: str, **values: float) -> None:
    codec.at_least(_LEAST_RATE, where, **values)
    codec.at_most(_MOST_RATE, where, **values)


def _between(curve: Sequence[tuple[float, float]], at: float) -> float:
    """Returns the value of a curve of ascending points; before the first one in proportion."""
    index = bisect_left([point[0] for point in curve], at)
    if index == len(curve):
        return curve[-1][1]
    if index == 0:
        return curve[0][1] * min(at / curve[0][0], 1.0)
    (left, low), (right, high) = curve[index - 1], curve[index]
    return low + (high - low) * (at - left) / (right - left)
