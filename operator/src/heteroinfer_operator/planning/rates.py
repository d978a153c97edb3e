"""How fast one rank works: bytes read a second by what they are, and operations. Pure.

Measured on the machine itself where there is a calibration (`heteroinfer-worker calibrate`); otherwise these
defaults, each with the machine it was measured on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from types import MappingProxyType
from typing import Final

from heteroinfer_contract.calibration import MORE_ROWS, Calibration, KernelPart, KernelRate
from heteroinfer_contract.model import SchemeName
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import EngineSettings
from heteroinfer_contract.pod_launch import engine_cpus
from heteroinfer_operator.api import RoleSpec
from heteroinfer_operator.nodes.calibrations import describe
from heteroinfer_operator.quantity import gigabytes_per_s, parse_quantity
from heteroinfer_operator.vllm_support.quantization import FOUR_BITS

CPU_BYTES_PER_S: Final = 115e9
"""By all threads of a pod with our bf16 kernels: 110 to 120 GB/s by 14 threads of a 16-core Xeon with
AVX512-BF16 and AMX (docs/user/benchmarks.md, 2026-11-21). More cores than that were not measured."""
CPU_THREAD_BYTES_PER_S: Final = CPU_BYTES_PER_S / 14
"""By one thread of those 14; fewer threads read less, by about that much each."""
CPU_OPERATIONS_PER_S: Final = 2e12
"""In bf16 with AMX by 16 cores (2026-11-20)."""
GPU_BYTES_PER_S: Final = 3500e9
"""H200 with CUDA graphs: 13.3 GB in 3.99 ms (vLLM 0.32.0, bf16, 2026-11-20)."""
GPU_USED: Final = GPU_BYTES_PER_S / 4800e9
"""Of the memory's nominal rate, as on that H200 (4.8 TB/s)."""
GPU_OPERATIONS_USED: Final = 0.5
"""Of the nominal rate of dense bf16, in prefill; not measured by us."""
GPU_QUANTIZED: Final = 0.7
"""Of the rate of bf16, for weights that are unpacked on the way: FP8 in blocks on an H200, 12 layers of an 8B
model and its head in 1.38 ms where bf16 took 1.74 (2026-11-22). Others were not measured."""
GPU_FOUR_BITS: Final = 0.37
"""The same for 4 bits: AWQ took 1.34 ms there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNominal:
    """What a data sheet says.

    Attributes:
        bytes_per_s: of its memory.
        operations_per_s: of dense bf16, or float16 where it has no bf16.
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
"""By whole words of the product as GPU feature discovery labels it, the first that matches; data sheets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """How far a time may be from what is predicted.

    Attributes:
        least: of the prediction, where a machine did best.
        most: of it, where a machine did worst.
    """

    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.least:.2g} to {self.most:.2g} times as long"


CPU_ERROR: Final = Error(least=0.9, most=1.6)
"""Steps with CPU stages took so much of the prediction on three hosts of one kind: 19.8 to 30.2 ms where 21.1
are predicted (docs/user/benchmarks.md, 4 layers off the GPU)."""
GPU_ERROR: Final = Error(least=0.9, most=1.3)
"""Where the product is known; H200s alone were measured, others are taken from data sheets."""
CPU_DEFAULTS_ERROR: Final = Error(least=0.3, most=3.0)
"""Of CPUs that were not measured. By data sheets of memory: theirs that was had 307 GB/s (8 channels of
DDR5-4800), of which our kernels read 115; 12 channels of DDR5-6000 have 576, and 2 of DDR4-3200 51, of which
more can be read."""
GPU_UNKNOWN_ERROR: Final = Error(
    least=GPU_NOMINAL["H200"].bytes_per_s / max(known.bytes_per_s for known in GPU_NOMINAL.values()),
    most=GPU_NOMINAL["H200"].bytes_per_s / min(known.bytes_per_s for known in GPU_NOMINAL.values()),
)
"""Of GPUs of which nothing is known, taken for an H200: from the fastest to the slowest of the list."""
CPU_DEFAULTS: Final = (
    f"defaults for CPUs ({gigabytes_per_s(CPU_BYTES_PER_S)} by 14 threads; may take {CPU_DEFAULTS_ERROR})"
)
"""What is said of CPUs that were not measured."""
GPU_UNKNOWN: Final = (
    f"defaults for an H200, since the GPU is not known ({gigabytes_per_s(GPU_BYTES_PER_S)}; may take "
    f"{GPU_UNKNOWN_ERROR})"
)
"""What is said of GPUs of which nothing is known."""

CPU_PARTS: Final[Mapping[tuple[KernelPart, SchemeName], tuple[float, ...]]] = MappingProxyType(
    {
        (KernelPart.LINEAR, SchemeName.NONE): (1.0, 0.98, 0.92, 0.43, 0.068),
        (KernelPart.LINEAR, SchemeName.AWQ): (0.4, 0.33, 0.17, 0.11, 0.0165),
        (KernelPart.LINEAR, SchemeName.GPTQ): (0.4, 0.33, 0.17, 0.11, 0.0165),
        (KernelPart.LINEAR, SchemeName.INT4): (0.4, 0.33, 0.17, 0.11, 0.0165),
        (KernelPart.LINEAR, SchemeName.FP8_BLOCK): (0.65, 0.38, 0.2, 0.13, 0.025),
        (KernelPart.LINEAR, SchemeName.FP8_CHANNEL): (0.015,),
        (KernelPart.LINEAR, SchemeName.INT8): (1.0,),
        (KernelPart.EXPERTS, SchemeName.NONE): (1.0, 1.0, 1.0, 0.41, 0.15),
        (KernelPart.EXPERTS, SchemeName.FP8_BLOCK): (0.85,),
        (KernelPart.EXPERTS, SchemeName.AWQ): (0.65,),
        (KernelPart.EXPERTS, SchemeName.GPTQ): (0.65,),
        (KernelPart.EXPERTS, SchemeName.INT4): (0.65,),
        (KernelPart.EXPERTS, SchemeName.MXFP4): (0.5,),
    }
)
"""Bytes that a rank reads of weights in a format, for each byte that it reads of ours in bf16 with one row:
with one row, and with each of MORE_ROWS as far as they are given, of experts for each of them.

By 13 threads of an H200's host, 2026-11-22 (docs/user/benchmarks.md): bf16 of linear layers and one row of
experts are the kernels alone (experts by 14 threads: bf16 84 to 106 GB/s, FP8 89 to 93, 4 bits 61 to 80,
MXFP4 45 to 51, where ours read 100); AWQ, FP8 in blocks,
and many rows of bf16 experts are what was left of the steps and
first tokens of whole groups, so that the rest of a layer is in them. GPTQ and int4 are taken for AWQ. FP8 per
channel: 0.5 GB/s by 2 threads, through torch. int8 was not measured."""
CPU_PLAIN_OTHER: Final = 60 / 115
"""Of it, for element types other than bf16, through vLLM's oneDNN: 57 to 60 GB/s (2026-11-20)."""
CPU_INT4_FLOAT16: Final = 0.14
"""Of it, for 4 bits with float16: 4.5 GB/s by 2 threads, another kernel that vLLM takes by itself."""
CPU_EXPERTS_OTHER: Final = 0.6
"""Of it, for experts in formats that were not measured."""
_COMPUTING_ROWS: Final = 512
"""Of MORE_ROWS, those from which on a kernel computes for longer than it reads."""
EXCHANGE_S: Final = 20e-6
"""What a layer's exchange between GPU and CPU takes besides computing (H200 host, 2026-11-22: 7 to 20 us)."""
EXCHANGE_BYTES_PER_S: Final = 14e9
"""Of rows to a feed-forward rank and back: 12 to 16 GB/s beyond the first row (docs/user/benchmarks.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What one rank does in a second while its whole stage computes.

    Attributes:
        plain: bytes of weights that are not quantized.
        quantized: of quantized ones that are no routed experts.
        experts: of routed experts, as they are stored.
        cache: of KV cache and states.
        operations: multiplications and additions, two for each weight and token.
        source: what it was taken from, for people.
        error: how far a time by these rates may be off.
        exchange_s: of a layer between a GPU and this feed-forward rank, besides computing, in seconds.
        plain_kernel: how `plain` grows slower with rows, where that was measured.
        quantized_kernel: the same of `quantized`.
        experts_kernel: the same of `experts`, by rows of each expert.
    """

    plain: float
    quantized: float
    experts: float
    cache: float
    operations: float
    source: str
    error: Error
    exchange_s: float = EXCHANGE_S
    plain_kernel: KernelRate | None = None
    quantized_kernel: KernelRate | None = None
    experts_kernel: KernelRate | None = None


def cpu_rates(
    role: RoleSpec,
    profile: ModelProfile,
    engine: EngineSettings,
    *,
    leads: bool,
    together: int,
    by_rate: bool = False,
    calibration: Calibration | None = None,
) -> Rates:
    """Returns the rates of one CPU rank: those measured of its machine, else defaults.

    Args:
        role: of the rank; its CPUs are what the pods ask for.
        leads: whether its pod has the engine and the API server, too.
        together: ranks of its stage in its pod, which read from the same memory.
        by_rate: whether these share by how fast each reads, so that the slowest is not waited for.
    """
    threads = compute_threads(role, leads=leads)
    if calibration is not None:
        return _measured_cpu_rates(calibration, profile, engine, threads, together, by_rate=by_rate)
    pod = CPU_BYTES_PER_S / together
    ours = pod if threads is None else min(pod, threads * CPU_THREAD_BYTES_PER_S)
    cores = 16.0 if threads is None else threads
    operations = CPU_OPERATIONS_PER_S * min(cores / 16, 1.0) / (together if threads is None else 1)
    kernels = [_default_kernel(*which, engine.dtype, ours) for which in _which(profile)]
    return _rates_of(kernels, ours, operations, CPU_DEFAULTS, CPU_DEFAULTS_ERROR)


def _which(profile: ModelProfile) -> tuple[tuple[KernelPart, SchemeName], ...]:
    """Returns part and format of plain weights, of quantized ones, and of experts."""
    name = profile.scheme.name
    of_experts = name if any(kind.experts_quantized for kind in profile.layers) else SchemeName.NONE
    return (
        (KernelPart.LINEAR, SchemeName.NONE),
        (KernelPart.LINEAR, name),
        (KernelPart.EXPERTS, of_experts),
    )


def _rates_of(
    kernels: Sequence[KernelRate], ours: float, operations: float, source: str, error: Error
) -> Rates:
    plain, quantized, experts = kernels
    return Rates(
        plain=plain.bytes_per_s,
        quantized=quantized.bytes_per_s,
        experts=experts.bytes_per_s,
        cache=ours * CPU_PLAIN_OTHER,
        operations=operations,
        source=source,
        error=error,
        plain_kernel=plain,
        quantized_kernel=quantized,
        experts_kernel=experts,
    )


def _default_kernel(part: KernelPart, scheme: SchemeName, dtype: str, ours: float) -> KernelRate:
    """Returns what a kernel that was not measured does where ours reads so many bytes of bf16 a second."""
    parts = _default_parts(part, scheme, dtype)
    first, *more = (ours * each for each in parts)
    return KernelRate(
        part=part,
        scheme=scheme,
        dtype=dtype,
        kernel="default",
        threads=1,
        bytes_per_s=first,
        more_rows=tuple(more),
    )


def _default_parts(part: KernelPart, scheme: SchemeName, dtype: str) -> tuple[float, ...]:
    if part is KernelPart.EXPERTS:
        return CPU_PARTS.get((part, scheme), (CPU_EXPERTS_OTHER,))
    if dtype != "bfloat16" and scheme is SchemeName.NONE:
        return (CPU_PLAIN_OTHER,)
    if dtype != "bfloat16" and scheme in FOUR_BITS:
        return (CPU_INT4_FLOAT16,)
    return CPU_PARTS.get((part, scheme), (CPU_PLAIN_OTHER,))


def _measured_cpu_rates(
    calibration: Calibration,
    profile: ModelProfile,
    engine: EngineSettings,
    threads: float | None,
    together: int,
    *,
    by_rate: bool,
) -> Rates:
    """Returns the rates of one CPU rank on a machine that was measured.

    A kernel was measured with so many threads; others have their part of it as they have of memory, or of
    threads where it computes. What was not measured has its default part of what was.
    """
    cores = calibration.hardware.cores
    used = min(cores / together if threads is None else threads, cores)
    on_all_nodes = by_rate and together >= calibration.hardware.numa_nodes
    alone = calibration.reading(used, of_nodes=fmean if on_all_nodes else min)
    ours = min(alone, calibration.reading(min(used * together, cores)) / together)

    def find(part: KernelPart, name: SchemeName) -> KernelRate:
        kernel = calibration.kernel(part, name, engine.dtype)
        if kernel is None:
            return _default_kernel(part, name, engine.dtype, ours)
        first, *more = _default_parts(part, name, engine.dtype)
        slower = kernel.more_rows or tuple(kernel.bytes_per_s * each / first for each in more)
        of_reading, of_cores = ours / calibration.reading(kernel.threads), used / kernel.threads
        shares = [of_cores if rows >= _COMPUTING_ROWS else of_reading for rows in MORE_ROWS]
        scaled = tuple(rate * part for rate, part in zip(slower, shares, strict=False))
        return replace(kernel, bytes_per_s=kernel.bytes_per_s * of_reading, more_rows=scaled)

    operations = calibration.operations_per_s or CPU_OPERATIONS_PER_S * min(cores / 16, 1.0)
    kernels = [find(*which) for which in _which(profile)]
    return _rates_of(kernels, ours, operations * used / cores, describe(calibration), CPU_ERROR)


def gpu_rates(
    product: str, calibration: Calibration | None = None, scheme: SchemeName = SchemeName.NONE
) -> Rates:
    """Returns the rates of a GPU: those measured on its machine, else defaults.

    Args:
        product: as GPU feature discovery labels it, or "".
        scheme: of the model's quantized weights.
    """
    nominal = next(
        (known for part, known in GPU_NOMINAL.items() if f"-{part}-".lower() in f"-{product}-".lower()), None
    )
    error = GPU_ERROR
    if calibration is not None and calibration.gpu is not None:
        rate, operations = calibration.gpu.bytes_per_s, calibration.gpu.operations_per_s
        source = describe(calibration)
    elif nominal is not None:
        rate = nominal.bytes_per_s * GPU_USED
        operations = nominal.operations_per_s * GPU_OPERATIONS_USED
        source = f"defaults for {product} ({gigabytes_per_s(rate)}; may take {GPU_ERROR})"
    else:
        rate, operations = GPU_BYTES_PER_S, GPU_NOMINAL["H200"].operations_per_s * GPU_OPERATIONS_USED
        source, error = GPU_UNKNOWN, GPU_UNKNOWN_ERROR
    return Rates(
        plain=rate,
        quantized=rate * (GPU_FOUR_BITS if scheme in FOUR_BITS else GPU_QUANTIZED),
        experts=rate * GPU_QUANTIZED,
        cache=rate,
        operations=operations,
        source=source,
        error=error,
    )


def compute_threads(role: RoleSpec, *, leads: bool) -> float | None:
    """Returns the compute threads of one of a role's ranks, or None if its pod's CPUs are not stated."""
    for amounts in (role.resources.limits, role.resources.requests) if role.resources else ():
        if amounts and "cpu" in amounts:
            cpus = float(parse_quantity(amounts["cpu"]))
            kept = engine_cpus(cpus) if leads else 0
            return max((cpus - kept) / role.ranks_per_pod, 1.0)
    return None
