"""The time that the ranks of a stage spend on collectives, and GPUs on launches without CUDA graphs. Pure.

Each layer has two all-reduces: after attention, and after its MLP or experts.
"""

from typing import Final

from heteroinfer_contract.plan import Device, Plan

_PER_LAYER: Final = 2
_IN_POD_S: Final = 25e-6
"""An all-reduce of 8 to 64 KiB through the bridge's shared memory: 24.4 to 26.7 us
(docs/user/benchmarks.md, H200 host, 2026-11-21). CPU ranks of one pod count as much."""
_IN_POD_BYTES_PER_S: Final = 10e9
"""Rate of larger ones there: 1 MiB in 116 us, 16 MiB in 830 us."""
_BETWEEN_PODS_S: Final = 150e-6
"""An all-reduce over gloo takes 72 to 141 us over loopback (same table). Networks were not measured."""
_BETWEEN_PODS_BYTES_PER_S: Final = 2.4e9
"""Rate of larger ones: 64 MiB in 27.2 ms over loopback."""
_GPUS_S: Final = 15e-6
"""An all-reduce of GPUs in one pod by NCCL inside a CUDA graph; not measured by us."""
_GPUS_BYTES_PER_S: Final = 50e9
"""Rate of larger ones; not measured by us."""
_GPUS_BETWEEN_PODS_S: Final = 80e-6
"""An all-reduce of GPUs in several pods; not measured by us."""
EAGER_LAYER_S: Final = 0.35e-3
"""Launches of a dense layer without CUDA graphs, which a GPU's step takes at least; not measured by us."""


def collectives_s(plan: Plan, stage: int, message_bytes: float = 0.0) -> float:
    """Returns the seconds of a stage's collectives in one step.

    Args:
        message_bytes: bytes of the hidden states of all rows.
    """
    ranks = plan.stage(stage)
    if len(ranks) == 1:
        return 0.0
    in_pod = len({rank.pod for rank in ranks}) == 1
    if all(rank.device is Device.GPU for rank in ranks):
        each_s, rate = (
            (_GPUS_S, _GPUS_BYTES_PER_S) if in_pod else (_GPUS_BETWEEN_PODS_S, _BETWEEN_PODS_BYTES_PER_S)
        )
    elif in_pod:
        each_s, rate = _IN_POD_S, _IN_POD_BYTES_PER_S
    else:
        each_s, rate = _BETWEEN_PODS_S, _BETWEEN_PODS_BYTES_PER_S
    return _PER_LAYER * ranks[0].num_layers * (each_s + message_bytes / rate)


def eager_s(plan: Plan, stage: int) -> float:
    """Returns the least seconds of a step of a stage whose GPUs launch kernels one by one."""
    ranks = plan.stage(stage)
    has_gpu = any(rank.device is Device.GPU for rank in ranks)
    return ranks[0].num_layers * EAGER_LAYER_S if has_gpu and plan.engine.eager_gpu else 0.0
