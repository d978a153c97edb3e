"""How long a decode step takes: weights read over what the device reads a second. Pure.

A decode step of one request reads every weight once, so that memory bounds it. Rates are measured
ones; what is not known of a device is taken from the machine that was measured, and `Prediction`
says how far off steps were on machines of one kind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from heteroinfer_contract.engine_cpus import engine_cpus
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, EngineSettings, Plan
from heteroinfer_operator.api import RoleSpec
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.topology import Seat
from heteroinfer_operator.quantity import parse_quantity

CPU_BYTES_PER_S: Final = 115e9
"""By all threads of a pod with our bf16 kernels: 110 to 120 GB/s by 14 threads of a 16-core Xeon with
AVX512-BF16 and AMX (docs/benchmarks.md, 2026-11-21). More cores than that were not measured."""
CPU_OTHER_BYTES_PER_S: Final = 60e9
"""With other element types or quantized weights, through vLLM's oneDNN: 57 to 60 GB/s (2026-11-20)."""
CPU_THREAD_BYTES_PER_S: Final = CPU_BYTES_PER_S / 14
"""By one thread of those 14; fewer threads read less, by about that much each."""
GPU_BYTES_PER_S: Final = 3500e9
"""H200 with CUDA graphs: 13.3 GB in 3.99 ms (vLLM 0.32.0, bf16, 2026-11-20)."""
GPU_USED: Final = GPU_BYTES_PER_S / 4800e9
"""Of the memory's nominal rate, as on that H200 (4.8 TB/s)."""
GPU_NOMINAL_BYTES_PER_S: Final[Mapping[str, float]] = MappingProxyType(
    {
        "B200": 8000e9,
        "GH200": 4000e9,
        "H200": 4800e9,
        "H100-NVL": 3900e9,
        "H100-PCIe": 2000e9,
        "H100": 3350e9,
        "A100-SXM4-80GB": 2039e9,
        "A100-80GB-PCIe": 1935e9,
        "A100": 1555e9,
        "L40S": 864e9,
        "L40": 864e9,
        "L4": 300e9,
        "A40": 696e9,
        "A30": 933e9,
        "A10": 600e9,
        "A10G": 600e9,
        "V100": 900e9,
        "T4": 320e9,
    }
)
"""By whole words of the product as GPU feature discovery labels it, the first that matches; data sheets."""
STEP_OVERHEAD_S: Final = 2.1e-3
"""Between a step's answer and the next call, with scheduling, sampling and messages (docs/benchmarks.md)."""
CPU_ERROR: Final = (0.9, 1.6)
"""Steps with CPU stages took so much of the prediction, least and most, on three hosts of one kind:
19.8 to 30.2 ms where 21.1 are predicted (docs/benchmarks.md, 4 layers off the GPU)."""
GPU_ERROR: Final = (0.9, 1.3)
"""For GPUs only; H200s alone were measured, others are taken from data sheets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """A decode step of one request.

    Attributes:
        step_s: through all stages, and back to the first.
        least_s: of it, where a machine did best.
        most_s: of it, where a machine did worst.
    """

    step_s: float
    least_s: float
    most_s: float

    def __str__(self) -> str:
        """Returns it for people, in milliseconds."""
        return f"{_ms(self.step_s)} ms ({_ms(self.least_s)} to {_ms(self.most_s)})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def predict(plan: Plan) -> Prediction:
    """Returns a step of this plan; one batch is in flight, so that stages wait for each other."""
    stages = [plan.stage(stage) for stage in range(plan.pipeline_parallel_size)]
    step_s = sum(max(rank.predicted_step_s for rank in ranks) for ranks in stages) + STEP_OVERHEAD_S
    least, most = CPU_ERROR if any(rank.device is Device.CPU for rank in plan.ranks) else GPU_ERROR
    return Prediction(step_s=step_s, least_s=step_s * least, most_s=step_s * most)


def read_bytes_per_s(
    seat: Seat, stage: Sequence[Seat], profile: ModelProfile, engine: EngineSettings, inventory: Inventory
) -> float:
    """Returns the bytes of weights that a rank reads a second while its whole stage computes.

    Args:
        seat: of the rank.
        stage: the seats of its stage; those in its pod read from the same memory at the same time.
        profile: of the model.
        engine: the group's settings.
        inventory: what is known of devices.
    """
    role = seat.placed.role
    if seat.placed.device is Device.GPU:
        return _gpu_bytes_per_s(inventory.gpu_product.get(role.name, ""))
    ours = engine.dtype == "bfloat16" and not profile.quantization
    pod = CPU_BYTES_PER_S if ours else CPU_OTHER_BYTES_PER_S
    together = sum(1 for other in stage if other.pod == seat.pod)
    threads = _threads(role, leads=seat.pod == 0)
    if threads is None:
        return pod / together
    thread = CPU_THREAD_BYTES_PER_S * pod / CPU_BYTES_PER_S
    return min(pod / together, threads * thread)


def _gpu_bytes_per_s(product: str) -> float:
    for part, nominal in GPU_NOMINAL_BYTES_PER_S.items():
        if f"-{part}-".lower() in f"-{product}-".lower():
            return nominal * GPU_USED
    return GPU_BYTES_PER_S


def _threads(role: RoleSpec, *, leads: bool) -> float | None:
    """Returns the compute threads of one of a role's ranks, or None if its pod's CPUs are not stated."""
    for amounts in (role.resources.limits, role.resources.requests) if role.resources else ():
        if amounts and "cpu" in amounts:
            cpus = float(parse_quantity(amounts["cpu"]))
            kept = engine_cpus(cpus) if leads else 0
            return max((cpus - kept) / role.ranks_per_pod, 1.0)
    return None
