"""The speed of one rank: bytes per second by class of weights, and operations per second. Pure.

A calibration of the machine (`heteroinfer-worker calibrate`) has priority. Otherwise the defaults of this
module apply, each with the machine that it was measured on.
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
"""Rate of all threads of a pod with our bf16 kernels: 110 to 120 GB/s with 14 threads of a 16-core Xeon with
AVX512-BF16 and AMX (docs/user/benchmarks.md, 2026-11-21). More cores were not measured."""
CPU_THREAD_BYTES_PER_S: Final = CPU_BYTES_PER_S / 14
"""Rate of one thread; fewer than 14 threads read proportionally less."""
CPU_OPERATIONS_PER_S: Final = 2e12
"""Operations of 16 cores in bf16 with AMX (2026-11-20)."""
GPU_BYTES_PER_S: Final = 3500e9
"""Rate of reading weights on an H200 with CUDA graphs: 13.3 GB in 3.99 ms (vLLM 0.32.0, bf16, 2026-11-20)."""
GPU_USED: Final = GPU_BYTES_PER_S / 4800e9
"""Share of a GPU memory's nominal rate that steps reach, from that H200 (4.8 TB/s)."""
GPU_OPERATIONS_USED: Final = 0.5
"""Share of a GPU's nominal rate of dense bf16 that prefill reaches; not measured by us."""
GPU_QUANTIZED: Final = 0.7
"""Rate of weights that kernels unpack, relative to bf16: with FP8 in blocks on an H200, 12 layers of an 8B
model and its head took 1.38 ms, with bf16 1.74 ms (2026-11-22). Other formats were not measured."""
GPU_FOUR_BITS: Final = 0.37
"""The same for 4 bits: AWQ took 1.34 ms on that H200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNominal:
    """Figures of a GPU's data sheet.

    Attributes:
        bytes_per_s: rate of its memory.
        operations_per_s: rate of dense bf16, or of float16 if it has no bf16.
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
"""Figures by words of the product label of GPU feature discovery; the first match counts (data sheets)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Error:
    """The range of a time relative to its prediction.

    Attributes:
        least: factor of the fastest measured machine.
        most: factor of the slowest measured machine.
    """

    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.least:.2g} to {self.most:.2g} times as long"


CPU_ERROR: Final = Error(least=0.9, most=1.6)
"""Range of steps with CPU stages on three hosts of one kind: 19.8 to 30.2 ms with a prediction of 21.1 ms
(docs/user/benchmarks.md, 4 layers off the GPU)."""
GPU_ERROR: Final = Error(least=0.9, most=1.3)
"""Range for a known product. Only H200s were measured; the others use data sheets."""
CPU_DEFAULTS_ERROR: Final = Error(least=0.3, most=3.0)
"""Range for CPUs that were not measured, by data sheets of memory. The measured CPU has 307 GB/s (8 channels
of DDR5-4800), and our kernels read 115 GB/s. 12 channels of DDR5-6000 have 576 GB/s. 2 channels of DDR4-3200
have 51 GB/s, and kernels read a larger share of them."""
GPU_UNKNOWN_ERROR: Final = Error(
    least=GPU_NOMINAL["H200"].bytes_per_s / max(known.bytes_per_s for known in GPU_NOMINAL.values()),
    most=GPU_NOMINAL["H200"].bytes_per_s / min(known.bytes_per_s for known in GPU_NOMINAL.values()),
)
"""Range for an unknown GPU, which counts as an H200: from the fastest to the slowest GPU of the list."""
CPU_DEFAULTS: Final = (
    f"defaults for CPUs ({gigabytes_per_s(CPU_BYTES_PER_S)} by 14 threads; may take {CPU_DEFAULTS_ERROR})"
)
"""Source of the rates of CPUs that were not measured, for people."""
GPU_UNKNOWN: Final = (
    f"defaults for an H200, since the GPU is not known ({gigabytes_per_s(GPU_BYTES_PER_S)}; may "
    f"take {GPU_UNKNOWN_ERROR})"
)
"""Source of the rates of an unknown GPU, for people."""

CPU_PARTS: Final[Mapping[tuple[KernelPart, SchemeName], tuple[float, ...]]] = MappingProxyType(
    {
        (KernelPart.LINEAR, SchemeName.NONE): (1.0, 0.98, 0.92, 0.43, 0.068),
        (KernelPart.LINEAR, SchemeName.AWQ): (0.4, 0.33, 0.17, 0.11, 0.0165),
        (KernelPart.LINEAR, SchemeName.GPTQ): (0.4, 0.33, 0.17, 0.11, 0.0165),
        (KernelPart.LINEAR, SchemeName.INT4): (0.4, 0.33, 0.17, 0.11, 0.0165),
        (KernelPart.LINEAR, SchemeName.FP8_BLOCK): (0.65, 0.38, 0.2, 0.13, 0.025),
        (KernelPart.LINEAR, SchemeName.FP8_CHANNEL): (0.65, 0.38, 0.2, 0.13, 0.025),
        (KernelPart.LINEAR, SchemeName.FP8_TENSOR): (0.65, 0.38, 0.2, 0.13, 0.025),
        (KernelPart.LINEAR, SchemeName.INT8): (1.0,),
        (KernelPart.EXPERTS, SchemeName.NONE): (1.0, 1.0, 1.0, 0.41, 0.15),
        (KernelPart.EXPERTS, SchemeName.FP8_BLOCK): (0.85,),
        (KernelPart.EXPERTS, SchemeName.AWQ): (0.65,),
        (KernelPart.EXPERTS, SchemeName.GPTQ): (0.65,),
        (KernelPart.EXPERTS, SchemeName.INT4): (0.65,),
        (KernelPart.EXPERTS, SchemeName.MXFP4): (0.5,),
    }
)
"""Rates of weights by part and format, relative to our bf16 kernels with one row: with one row, then with
each of MORE_ROWS that has a value. Rows of experts are counted per expert.

Measured with 13 threads of an H200's host, 2026-11-22 (docs/user/benchmarks.md). bf16 linear layers and
experts with one row are the kernels alone (experts with 14 threads: bf16 84 to 106 GB/s, FP8 89 to 93, 4 bits
61 to 80, MXFP4 45 to 51, when our bf16 kernels read 100). AWQ, FP8 in blocks and bf16 experts with many rows
were derived from steps and first tokens of whole groups, so they include the rest of a layer. GPTQ and int4
use the values of AWQ. FP8 per channel and per tensor use the values of FP8 in blocks. int8 was not
measured."""
CPU_PLAIN_OTHER: Final = 60 / 115
"""Rate of element types other than bf16, relative to bf16, through vLLM's oneDNN: 57 to 60 GB/s
(2026-11-20)."""
CPU_INT4_FLOAT16: Final = 0.14
"""Rate of 4 bits with float16, relative to bf16: 4.5 GB/s with 2 threads, in another kernel that vLLM
chooses."""
CPU_EXPERTS_OTHER: Final = 0.6
"""Rate of experts in formats that were not measured, relative to bf16 experts."""
_COMPUTING_ROWS: Final = 512
"""Number of rows from which a kernel takes longer to compute than to read."""
EXCHANGE_S: Final = 20e-6
"""Time of a layer's exchange between GPU and CPU besides computing (H200 host, 2026-11-22: 7 to 20 us)."""
EXCHANGE_BYTES_PER_S: Final = 14e9
"""Rate of rows to a feed-forward rank and back: 12 to 16 GB/s after the first row
(docs/user/benchmarks.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The work of one rank per second while its whole stage computes.

    Attributes:
        plain: bytes of unquantized weights.
        quantized: bytes of quantized weights outside of routed experts.
        experts: bytes of routed experts, as stored.
        cache: bytes of KV cache and states.
        operations: multiplications and additions, two per weight and token.
        source: source of the rates, for people.
        error: range of a time that is predicted with these rates.
        exchange_s: seconds of a layer's exchange between a GPU and this feed-forward rank, besides computing.
        plain_kernel: measured decrease of `plain` with the number of rows, or None.
        quantized_kernel: the same for `quantized`.
        experts_kernel: the same for `experts`, by rows of each expert.
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
    """Returns the rates of one CPU rank: measured ones of its machine, otherwise defaults.

    Args:
        role: role of the rank; its resources have the CPUs of a pod.
        leads: whether its pod also has the engine and the API server.
        together: ranks of its stage in its pod, which read from the same memory.
        by_rate: whether these ranks share work by their rates, so that none waits for the slowest.
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
    """Returns part and format of plain weights, of quantized weights, and of experts."""
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
    """Returns the default rate of a kernel; `ours` is the rate of our bf16 kernels in bytes per second."""
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
    """Returns the rates of one CPU rank on a measured machine.

    A kernel was measured with one number of threads. For another number, its rate is scaled with the memory's
    rate, or with the threads if the kernel computes longer than it reads. A kernel without a measurement has
    its default rate relative to the measured memory.
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
    """Returns the rates of a GPU: measured ones of its machine, otherwise defaults.

    Args:
        product: product label of GPU feature discovery, or "".
        scheme: format of the model's quantized weights.
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
    """Returns the compute threads of one rank of a role, or None if its resources have no CPUs."""
    for amounts in (role.resources.limits, role.resources.requests) if role.resources else ():
        if amounts and "cpu" in amounts:
            cpus = float(parse_quantity(amounts["cpu"]))
            kept = engine_cpus(cpus) if leads else 0
            return max((cpus - kept) / role.ranks_per_pod, 1.0)
    return None
