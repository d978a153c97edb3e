"""The speed of one rank: bytes per second for each class of weights, and operations per second. Pure.

A calibration of the machine (`heteroinfer-worker calibrate`) has priority. Otherwise the defaults of this
module apply. Each default names the machine on which it was measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import MappingProxyType
from typing import Final

from heteroinfer_contract.calibration import MORE_ROWS, Calibration, KernelPart, KernelRate
from heteroinfer_contract.model import SchemeName
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.network_measurement import NetworkMeasurement
from heteroinfer_contract.plan import EngineSettings
from heteroinfer_contract.pod_launch import engine_cpus
from heteroinfer_operator.api import RoleSpec
from heteroinfer_operator.nodes.calibrations import describe_calibration, describe_network
from heteroinfer_operator.nodes.cpu_features import (
    AMX,
    AVX2,
    AVX512,
    AVX512_BF16,
    best_instructions,
    measured_features,
)
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.quantity import gigabytes_per_s, parse_quantity
from heteroinfer_operator.vllm_support.quantization import FOUR_BITS

CPU_BYTES_PER_S: Final = 115e9
"""Rate at which all threads of a pod read memory: 110 to 120 GB/s with 14 threads of a 16-core Xeon with
AVX512-BF16 and AMX (docs/user/benchmarks.md, 2026-11-21). More cores were not measured."""
CPU_THREAD_BYTES_PER_S: Final = CPU_BYTES_PER_S / 14
"""Rate of one thread; fewer than 14 threads read proportionally less."""
GPU_BYTES_PER_S: Final = 3500e9
"""Rate of reading weights on an H200 with CUDA graphs: 13.3 GB in 3.99 ms (vLLM 0.32.0, bf16, 2026-11-20)."""
GPU_USED: Final = GPU_BYTES_PER_S / 4800e9
"""Part of the nominal rate of a GPU's memory that steps reach, measured on an H200 (4.8 TB/s)."""
GPU_OPERATIONS_USED: Final = 0.5
"""Part of a GPU's nominal rate of operations in dense bf16 that prefill reaches; an estimate."""
GPU_QUANTIZED_RATIO: Final = 0.7
"""Rate of quantized weights on a GPU, relative to bf16: with FP8 in blocks on an H200, 12 layers of an 8B
model and its head took 1.38 ms, with bf16 1.74 ms (2026-11-22). Other formats were not measured."""
GPU_FOUR_BITS_RATIO: Final = 0.37
"""Rate of weights in 4 bits on a GPU, relative to bf16: the same layers in AWQ took 1.34 ms on that H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNominal:
    """Figures of a GPU's data sheet.

    Attributes:
        bytes_per_s: rate of its memory.
        operations_per_s: rate of dense operations in bf16, or in float16 if the GPU has no bf16.
    """

    bytes_per_s: float
    operations_per_s: float


GPU_NOMINAL: Final[Mapping[str, GpuNominal]] = MappingProxyType(
    {
        name: GpuNominal(bytes_per_s=gigabytes * 1e9, operations_per_s=teraflops * 1e12)
        for name, gigabytes, teraflops in (
            ("B200", 8000, 2250),
            ("GH200", 4000, 989),
            ("H200", 4800, 989),
            ("H100-NVL", 3900, 835),
            ("H100-PCIe", 2000, 756),
            ("H100", 3350, 989),
            ("A100-SXM4-80GB", 2039, 312),
            ("A100-80GB-PCIe", 1935, 312),
            ("A100", 1555, 312),
            ("L40S", 864, 362),
            ("L40", 864, 181),
            ("L4", 300, 121),
            ("A40", 696, 150),
            ("A30", 933, 165),
            ("A10G", 600, 70),
            ("A10", 600, 125),
            ("V100", 900, 125),
            ("T4", 320, 65),
        )
    }
)
"""Figures of data sheets, by a part of the product label of GPU feature discovery; the first match counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRange:
    """The range of a measured time, relative to its prediction.

    Attributes:
        least: measured time of the fastest machine, divided by the prediction.
        most: measured time of the slowest machine, divided by the prediction.
    """

    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.least:.2g} to {self.most:.2g} times the predicted time"


CPU_ERROR: Final = ErrorRange(least=0.9, most=1.6)
"""Range of steps with CPU stages on three hosts of one kind: 19.8 to 30.2 ms with a prediction of 21.1 ms
(docs/user/benchmarks.md, 4 layers on CPUs)."""
GPU_ERROR: Final = ErrorRange(least=0.9, most=1.3)
"""Range for a GPU of a known product. Only H200s were measured; other GPUs have figures of data sheets."""
CPU_DEFAULTS_ERROR: Final = ErrorRange(least=0.3, most=3.0)
"""Range for CPUs that were not measured, by data sheets of memory. The measured CPU has 307 GB/s (8 channels
of DDR5-4800), and our kernels read 115 GB/s. 12 channels of DDR5-6000 have 576 GB/s. 2 channels of DDR4-3200
have 51 GB/s, and kernels read a larger share of them."""
GPU_UNKNOWN_ERROR: Final = ErrorRange(
    least=GPU_NOMINAL["H200"].bytes_per_s / max(known.bytes_per_s for known in GPU_NOMINAL.values()),
    most=GPU_NOMINAL["H200"].bytes_per_s / min(known.bytes_per_s for known in GPU_NOMINAL.values()),
)
"""Range for an unknown GPU, which counts as an H200: from the fastest to the slowest GPU of the list."""
GPU_UNKNOWN: Final = (
    f"default rates for an H200, because the GPU is unknown ({gigabytes_per_s(GPU_BYTES_PER_S)}; a step may "
    f"take {GPU_UNKNOWN_ERROR})"
)
"""Description of the rates of an unknown GPU for users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionRates:
    """Rates of one thread of our CPU kernels with one instruction set, if memory does not limit them.

    Attributes:
        products: multiplications of weights with inputs per second, with many rows.
        decoded: bytes of weights per second with one row, by format.
        other: bytes of weights per second with one row, in a format that `decoded` lacks.
        plain: bytes per second with one row in unquantized linear layers, which vLLM computes without
            AVX-512.
        plain_products: multiplications per second with many rows in unquantized linear layers.
    """

    products: float
    decoded: Mapping[SchemeName, float]
    other: float
    plain: float
    plain_products: float


_FOUR_BIT_FLOATS: Final = (SchemeName.MXFP4, SchemeName.NVFP4)
CPU_INSTRUCTIONS: Final[Mapping[str, InstructionRates]] = MappingProxyType(
    {
        name: InstructionRates(
            products=products * 1e9,
            decoded={
                **dict.fromkeys((SchemeName.NONE, SchemeName.INT8), wide * 1e9),
                **dict.fromkeys(FOUR_BITS, int4 * 1e9),
                **dict.fromkeys(_FOUR_BIT_FLOATS, fp4 * 1e9),
            },
            other=fp8 * 1e9,
            plain=plain * 1e9,
            plain_products=plain_products * 1e9,
        )
        for name, products, wide, fp8, int4, fp4, plain, plain_products in (
            (AMX, 150, 33, 32, 18, 18, 33, 150),
            (AVX512_BF16, 85, 33, 32, 18, 18, 33, 85),
            (AVX512, 30, 31, 34, 16, 14, 31, 30),
            (AVX2, 28, 19, 11, 7, 4.6, 5.9, 4.7),
        )
    }
)
"""Rates of a thread by instruction set. The slowest of similar formats counts.

AVX2: one thread of an EPYC of the 3rd generation, with one row in its caches and with 64 rows
(`python -m tests.bench.kernels --busy`), and torch's product in bf16 (2026-11-27). AVX-512 and AVX-512 BF16:
one thread of an EPYC of the 5th generation (docs/decisions/2026-11-27-coded-weights.md). AMX: products in
bf16 with 512 rows and 13 threads of an H200's host (2026-11-22); with few rows as AVX-512 BF16, whose
instructions it then uses. Other formats than bf16 were not measured with AMX."""
CPU_OTHER_TYPES_RATIO: Final = 60 / 115
"""Rate of weights of other element types than bf16, relative to bf16: 57 to 60 GB/s with vLLM's oneDNN
(2026-11-20)."""
_COMPUTING_ROWS: Final = 512
"""Number of rows from which a kernel takes longer to compute than to read."""
EXCHANGE_S: Final = 20e-6
"""Seconds of a layer's exchange between GPU and feed-forward ranks, besides computing: 7 to 20 us (H200 host,
2026-11-22)."""
EXCHANGE_BYTES_PER_S: Final = 14e9
"""Rate at which rows go to a feed-forward rank and back: 12 to 16 GB/s after the first row
(docs/user/benchmarks.md)."""
NETWORK_S: Final = 100e-6
"""Time of one row to another pod and back, besides computing: 30 to 150 us over TCP (data sheets of
networks; a group measures it when it starts)."""
NETWORK_BYTES_PER_S: Final = 3e9
"""Rate of rows to another pod: a network of 25 Gbit/s."""

LINK_BYTES_PER_S: Final = 55e9
"""Rate of copies from pinned host memory to a GPU with 16 lanes of PCIe 5 (H200, 2026-11-27)."""
_OLDER_LINKS: Final[Mapping[str, float]] = MappingProxyType(
    {
        **dict.fromkeys(("A100", "L40S", "L40", "L4", "A40", "A30", "A10G", "A10"), LINK_BYTES_PER_S / 2),
        **dict.fromkeys(("V100", "T4"), LINK_BYTES_PER_S / 4),
    }
)
"""Rates of copies to GPUs with PCIe 4 and 3, by products of GPU_NOMINAL: each generation doubled the rate.

GPUs of unknown products count as GPUs with PCIe 4, as most workstations have it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkRates:
    """The speed of the network between a rank with attention and a feed-forward rank of another pod.

    Attributes:
        round_trip_s: seconds of a small message and its answer.
        bytes_per_s: rate of rows and answers.
        source: description of the rates for users: a measurement, or defaults.
    """

    round_trip_s: float
    bytes_per_s: float
    source: str

    @classmethod
    def of(cls, measured: NetworkMeasurement | None) -> "NetworkRates":
        """Returns the measured rates; the default rates without a measurement."""
        if measured is None:
            return DEFAULT_NETWORK
        return cls(
            round_trip_s=measured.round_trip_s,
            bytes_per_s=measured.bytes_per_s,
            source=describe_network(measured),
        )

    def exchange_s(self, num_bytes: float) -> float:
        """Returns the seconds in which a question and its answer pass the network.

        Args:
            num_bytes: bytes of both together.
        """
        return self.round_trip_s + num_bytes / self.bytes_per_s


DEFAULT_NETWORK: Final = NetworkRates(
    round_trip_s=NETWORK_S,
    bytes_per_s=NETWORK_BYTES_PER_S,
    source=f"not measured, default rates ({NETWORK_S * 1e6:.0f} us, {gigabytes_per_s(NETWORK_BYTES_PER_S)})",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The speed of one rank while its whole stage computes. All rates are per second.

    Attributes:
        plain: bytes of unquantized weights.
        quantized: bytes of quantized weights outside of routed experts.
        experts: bytes of routed experts, as stored.
        cache: bytes of KV cache and states.
        operations: multiplications and additions, one of each per weight and token.
        source: description of the rates for users: a calibration, or defaults.
        error: range of a time that is predicted with these rates.
        exchange_s: seconds of a layer's exchange between a GPU and this feed-forward rank, besides computing.
        link: bytes that a GPU copies from pinned host memory.
        network: rates of the network to this feed-forward rank; None if it is in the GPU's pod.
        plain_kernel: measured rates of the kernel for `plain` with more rows, or None.
        quantized_kernel: measured rates of the kernel for `quantized` with more rows, or None.
        experts_kernel: measured rates of the kernel for `experts`, by rows of each expert, or None.
    """

    plain: float
    quantized: float
    experts: float
    cache: float
    operations: float
    source: str
    error: ErrorRange
    exchange_s: float = EXCHANGE_S
    link: float = LINK_BYTES_PER_S
    network: NetworkRates | None = None
    plain_kernel: KernelRate | None = None
    quantized_kernel: KernelRate | None = None
    experts_kernel: KernelRate | None = None


def describe_cpu_defaults(instructions: str) -> str:
    """Describes the default rates of CPUs that were not measured."""
    return (
        f"default rates for CPUs with {instructions} ({gigabytes_per_s(CPU_BYTES_PER_S)} by 14 threads; a "
        f"step may take {CPU_DEFAULTS_ERROR})"
    )


def cpu_rates(
    role: RoleSpec,
    profile: ModelProfile,
    engine: EngineSettings,
    inventory: Inventory,
    *,
    has_leader: bool,
    sharing_ranks: int,
    share_by_rate: bool = False,
) -> Rates:
    """Returns the rates of one CPU rank: the rates of its machine's calibration, otherwise defaults.

    Args:
        role: role of the rank; its resources set the CPUs of a pod.
        has_leader: whether the rank's pod also runs the engine and vLLM's API server.
        sharing_ranks: number of ranks in the pod that compute at the same time, with this rank. They share
            the memory's rate.
        share_by_rate: whether these ranks divide work by their rates, so that none waits for the slowest.
    """
    threads = count_compute_threads(role, has_leader=has_leader)
    calibration = inventory.calibration.get(role.name)
    if calibration is not None:
        return _measured_cpu_rates(
            calibration, profile, engine, threads, sharing_ranks, share_by_rate=share_by_rate
        )
    pod_bytes_per_s = CPU_BYTES_PER_S / sharing_ranks
    rank_bytes_per_s = (
        pod_bytes_per_s if threads is None else min(pod_bytes_per_s, threads * CPU_THREAD_BYTES_PER_S)
    )
    instructions = best_instructions(inventory.cpu_features.get(role.name))
    default_kernels = _DefaultKernels(
        profile=profile,
        dtype=engine.dtype,
        known=CPU_INSTRUCTIONS[instructions],
        threads=threads or 16 / sharing_ranks,  # without CPUs in the resources: a machine of 16 cores
    )
    kernels = [
        default_kernels.kernel(part, scheme, rank_bytes_per_s)
        for part, scheme in _kernels_of_weights(profile)
    ]
    return _build_rates(
        kernels,
        rank_bytes_per_s,
        default_kernels.operations,
        describe_cpu_defaults(instructions),
        CPU_DEFAULTS_ERROR,
    )


def _kernels_of_weights(profile: ModelProfile) -> tuple[tuple[KernelPart, SchemeName], ...]:
    """Returns the kernel and format of unquantized weights, of quantized weights, and of experts."""
    linear_format = profile.scheme.name
    has_quantized_experts = any(kind.experts_quantized for kind in profile.layers)
    expert_format = profile.scheme_of_experts.name if has_quantized_experts else SchemeName.NONE
    return (
        (KernelPart.LINEAR, SchemeName.NONE),
        (KernelPart.LINEAR, linear_format),
        (KernelPart.EXPERTS, expert_format),
    )


def _build_rates(
    kernels: Sequence[KernelRate],
    memory_bytes_per_s: float,
    operations: float,
    source: str,
    error: ErrorRange,
) -> Rates:
    """Returns the rates of a rank from its kernels for unquantized weights, quantized weights and experts.

    Args:
        memory_bytes_per_s: rate at which the rank reads memory. The plan assumes that it reads its KV cache
            at the rate of weights in other types than bf16.
        operations: multiplications and additions per second.
    """
    plain, quantized, experts = kernels
    return Rates(
        plain=plain.bytes_per_s,
        quantized=quantized.bytes_per_s,
        experts=experts.bytes_per_s,
        cache=memory_bytes_per_s * CPU_OTHER_TYPES_RATIO,
        operations=operations,
        source=source,
        error=error,
        plain_kernel=plain,
        quantized_kernel=quantized,
        experts_kernel=experts,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _DefaultKernels:
    """Default rates of kernels on `threads` threads, for machines without a measurement."""

    profile: ModelProfile
    dtype: str
    known: InstructionRates
    threads: float

    @property
    def operations(self) -> float:
        """Multiplications and additions per second of all threads."""
        return self.known.products * self.threads

    def kernel(self, part: KernelPart, scheme: SchemeName, memory_bytes_per_s: float) -> KernelRate:
        """Returns the default rate of a kernel, which the rank's memory also limits."""
        rates, bits = self.known, 16
        decoded, products = rates.decoded.get(scheme, rates.other), rates.products
        if scheme is not SchemeName.NONE:
            stored_scheme = (
                self.profile.scheme_of_experts if part is KernelPart.EXPERTS else self.profile.scheme
            )
            bits = stored_scheme.bits or 8  # 8 if the number is unknown
        elif part is KernelPart.LINEAR:  # vLLM computes unquantized linear layers, not our kernels
            decoded, products = rates.plain, rates.plain_products
            if self.dtype != "bfloat16":
                memory_bytes_per_s *= CPU_OTHER_TYPES_RATIO
        one_row = min(memory_bytes_per_s, self.threads * decoded)
        # A byte holds 8 / bits weights, and the kernel multiplies each weight once for each row.
        many_rows = (self.threads * products * bits / 8 / rows for rows in MORE_ROWS)
        return KernelRate(
            part=part,
            scheme=scheme,
            dtype=self.dtype,
            kernel="default",
            threads=1,  # the rates below are those of all threads
            bytes_per_s=one_row,
            more_rows=tuple(min(one_row, each) for each in many_rows),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _MeasuredKernels:
    """Measured rates of kernels, scaled to one rank.

    Attributes:
        defaults: rates of kernels that the calibration lacks.
        threads: compute threads of the rank.
        memory_bytes_per_s: rate at which the rank reads memory.
    """

    calibration: Calibration
    defaults: _DefaultKernels
    threads: float
    memory_bytes_per_s: float

    def kernel(self, part: KernelPart, scheme: SchemeName) -> KernelRate:
        """Returns the measured rate of a kernel, scaled to this rank, or the default rate.

        The calibration measured each kernel with one number of threads. With few rows, memory limits a
        kernel, so its rate is scaled by the rank's memory rate. From _COMPUTING_ROWS rows on, computing
        limits the kernel, so its rate is scaled by the number of threads. If a kernel was measured with one
        row only, its rates with more rows (MORE_ROWS) fall like those of the default kernel.
        """
        default = self.defaults.kernel(part, scheme, self.memory_bytes_per_s)
        kernel = self.calibration.fastest_kernel(part, scheme, self.defaults.dtype)
        if kernel is None:
            return default
        more_rows = kernel.more_rows or tuple(
            kernel.bytes_per_s * each / default.bytes_per_s for each in default.more_rows
        )
        memory_ratio = self.memory_bytes_per_s / self.calibration.read_rate(kernel.threads)
        thread_ratio = self.threads / kernel.threads
        ratios = [thread_ratio if rows >= _COMPUTING_ROWS else memory_ratio for rows in MORE_ROWS]
        # Not strict: a calibration may have rates for only the first counts of MORE_ROWS.
        scaled = tuple(rate * ratio for rate, ratio in zip(more_rows, ratios, strict=False))
        return replace(kernel, bytes_per_s=kernel.bytes_per_s * memory_ratio, more_rows=scaled)


def _rank_memory_rate(
    calibration: Calibration, cores: float, sharing_ranks: int, *, share_by_rate: bool
) -> float:
    """Returns the bytes per second that one rank reads while all ranks of its pod read.

    Ranks that divide work by their rates end at the same time. So the mean rate of the NUMA nodes counts, if
    each NUMA node has a rank. Otherwise all ranks wait for the rank on the slowest NUMA node, so the lowest
    rate counts. Together the ranks read at most at the machine's rate.

    Args:
        cores: cores of one rank.
    """
    each_node_has_rank = sharing_ranks >= calibration.hardware.numa_nodes
    alone_bytes_per_s = calibration.read_rate(
        cores, combine=fmean if share_by_rate and each_node_has_rank else min
    )
    all_cores = min(cores * sharing_ranks, calibration.hardware.cores)
    return min(alone_bytes_per_s, calibration.read_rate(all_cores) / sharing_ranks)


def _measured_cpu_rates(
    calibration: Calibration,
    profile: ModelProfile,
    engine: EngineSettings,
    threads: float | None,
    sharing_ranks: int,
    *,
    share_by_rate: bool,
) -> Rates:
    """Returns the rates of one CPU rank on a measured machine.

    Args:
        threads: compute threads of the rank; None for an equal part of the cores.
        sharing_ranks: number of ranks in the pod that compute at the same time, with this rank.
        share_by_rate: whether these ranks divide work by their rates.
    """
    cores = calibration.hardware.cores
    used_cores = min(cores / sharing_ranks if threads is None else threads, cores)
    rank_bytes_per_s = _rank_memory_rate(calibration, used_cores, sharing_ranks, share_by_rate=share_by_rate)
    instruction_rates = CPU_INSTRUCTIONS[best_instructions(measured_features(calibration))]
    measured_kernels = _MeasuredKernels(
        calibration=calibration,
        defaults=_DefaultKernels(
            profile=profile, dtype=engine.dtype, known=instruction_rates, threads=used_cores
        ),
        threads=used_cores,
        memory_bytes_per_s=rank_bytes_per_s,
    )
    operations = calibration.operations_per_s or instruction_rates.products * cores
    kernels = [measured_kernels.kernel(part, scheme) for part, scheme in _kernels_of_weights(profile)]
    return _build_rates(
        kernels,
        rank_bytes_per_s,
        operations * used_cores / cores,
        describe_calibration(calibration),
        CPU_ERROR,
    )


def gpu_rates(
    product: str, calibration: Calibration | None = None, scheme: SchemeName = SchemeName.NONE
) -> Rates:
    """Returns the rates of a GPU: those of its machine's calibration, otherwise defaults.

    Args:
        product: product label of GPU feature discovery, or "".
        scheme: format of the model's quantized weights.
    """
    # The hyphens prevent that "L4" matches "NVIDIA-L40".
    known = next((name for name in GPU_NOMINAL if f"-{name}-".lower() in f"-{product}-".lower()), "")
    nominal, error = GPU_NOMINAL.get(known), GPU_ERROR
    default_link = LINK_BYTES_PER_S if known else LINK_BYTES_PER_S / 2
    link = _OLDER_LINKS.get(known.partition("-")[0], default_link)  # all variants of a product have one link
    if calibration is not None:  # even a calibration without GPU rates may have a rate of the link
        link = calibration.link_rate() or link
    if calibration is not None and calibration.gpu is not None:
        rate, operations = calibration.gpu.bytes_per_s, calibration.gpu.operations_per_s
        source = describe_calibration(calibration)
    elif nominal is not None:
        rate = nominal.bytes_per_s * GPU_USED
        operations = nominal.operations_per_s * GPU_OPERATIONS_USED
        source = f"default rates for {product} ({gigabytes_per_s(rate)}; a step may take {GPU_ERROR})"
    else:
        rate, operations = GPU_BYTES_PER_S, GPU_NOMINAL["H200"].operations_per_s * GPU_OPERATIONS_USED
        source, error = GPU_UNKNOWN, GPU_UNKNOWN_ERROR
    return Rates(
        plain=rate,
        quantized=rate * (GPU_FOUR_BITS_RATIO if scheme in FOUR_BITS else GPU_QUANTIZED_RATIO),
        experts=rate * GPU_QUANTIZED_RATIO,
        cache=rate,
        operations=operations,
        source=source,
        error=error,
        link=link,
    )


def count_compute_threads(role: RoleSpec, *, has_leader: bool) -> float | None:
    """Returns the compute threads of one rank of a role, or None if its resources set no CPUs.

    Args:
        has_leader: whether the rank's pod also runs the engine and vLLM's API server, which get CPUs of their
            own.
    """
    for amounts in (role.resources.limits, role.resources.requests) if role.resources else ():
        if amounts and "cpu" in amounts:
            cpus = float(parse_quantity(amounts["cpu"]))
            engine_cpus_of_pod = engine_cpus(cpus) if has_leader else 0
            return max((cpus - engine_cpus_of_pod) / role.ranks_per_pod, 1.0)
    return None
