"""Predicts the time of a stage's collectives, and of kernel launches without CUDA graphs. Pure.

Each layer has two all-reduces: after attention, and after its MLP or experts.
"""

from typing import Final

from heteroinfer_contract.plan import Device, Plan

_ALL_REDUCES_PER_LAYER: Final = 2
_CPU_IN_POD_S: Final = 25e-6
"""Seconds of a small all-reduce in one pod if a CPU rank takes part: 24.4 to 26.7 us for 8 to 64 KiB through
the bridge's shared memory (GPU and CPU rank, docs/user/benchmarks.md, H200 host, 2026-11-21)."""
_CPU_IN_POD_BYTES_PER_S: Final = 10e9
"""Rate of a large all-reduce in one pod if a CPU rank takes part: 1 MiB in 116 us, 16 MiB in 830 us."""
_CPU_BETWEEN_PODS_S: Final = 150e-6
"""Seconds of a small all-reduce between pods: 72 to 141 us with gloo over loopback
(docs/user/benchmarks.md). No network was measured."""
_BETWEEN_PODS_BYTES_PER_S: Final = 2.4e9
"""Rate of a large all-reduce between pods: 64 MiB in 27.2 ms with gloo over loopback."""
_GPU_IN_POD_S: Final = 15e-6
"""Seconds of a small all-reduce of GPUs in one pod, by NCCL inside a CUDA graph; an estimate."""
_GPU_IN_POD_BYTES_PER_S: Final = 50e9
"""Rate of a large all-reduce of GPUs in one pod; an estimate."""
_GPU_BETWEEN_PODS_S: Final = 80e-6
"""Seconds of a small all-reduce of GPUs in several pods; an estimate."""
EAGER_LAYER_S: Final = 0.35e-3
"""Seconds in which a GPU launches the kernels of a dense layer without CUDA graphs; an estimate."""


def collectives_s(plan: Plan, stage: int, message_bytes: float = 0.0) -> float:
    """Returns the seconds that the ranks of a stage spend on all-reduces in one step.

    Args:
        message_bytes: bytes of the hidden states of all rows, which each all-reduce sends.
    """
    ranks = plan.stage(stage)
    if len(ranks) == 1:
        return 0.0
    in_pod = len({rank.pod for rank in ranks}) == 1
    has_cpu = any(rank.device is Device.CPU for rank in ranks)
    if in_pod:
        all_reduce_s = _CPU_IN_POD_S if has_cpu else _GPU_IN_POD_S
        bytes_per_s = _CPU_IN_POD_BYTES_PER_S if has_cpu else _GPU_IN_POD_BYTES_PER_S
    else:
        all_reduce_s = _CPU_BETWEEN_PODS_S if has_cpu else _GPU_BETWEEN_PODS_S
        bytes_per_s = _BETWEEN_PODS_BYTES_PER_S
    return _ALL_REDUCES_PER_LAYER * ranks[0].num_layers * (all_reduce_s + message_bytes / bytes_per_s)


def eager_launch_s(plan: Plan, stage: int) -> float:
    """Returns the least seconds of a step on a stage whose GPUs launch kernels one by one.

    Returns 0 if no rank of the stage is a GPU, or if GPUs use CUDA graphs.
    """
    ranks = plan.stage(stage)
    has_gpu = any(rank.device is Device.GPU for rank in ranks)
    return ranks[0].num_layers * EAGER_LAYER_S if has_gpu and plan.engine.eager_gpu else 0.0
