"""Defines every shape of group that must give the right tokens, and makes its plan and environments."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from heteroinfer_contract import names
from heteroinfer_contract.plan import Device, Mode, Plan
from tests.gpu.reference import BLOCK_SIZE, MAX_MODEL_LEN
from tests.integration.worker.groups import build_plan

GPU, CPU = Device.GPU, Device.CPU
CPUS_PER_THREAD = 8
"""Number of CPUs for each thread of a CPU rank. Several groups of up to four ranks run together, and more
threads than CPUs would compete in their busy waits."""

SLEEPERS_KV_BYTES = 3 << 30
"""Bytes of the KV cache of each rank of a group that sleeps on a GPU. vLLM asserts that the GPU has more free
memory after the sleep, while other groups start on it
(vllm/v1/worker/gpu_worker.py::Worker.sleep@v0.32.0)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """One shape of group.

    Attributes:
        name: name of the test.
        pods: device and number of ranks of each pod.
        layers: number of layers of each stage; 8 in all.
        mode: pipeline or tensor.
        tensor: number of ranks of each stage.
        graphs: whether GPU ranks compile and capture CUDA graphs.
        dtype: dtype of weights and hidden states.
        gpus: required GPUs: one for each GPU rank, or 1 if GPU ranks of different pods may share a GPU.
        env: variables of every pod.
        kill: rank that is killed at the end, while it decodes, or None.
        sleeps: whether the group sleeps and wakes.
    """

    name: str
    pods: tuple[tuple[Device, int], ...]
    layers: tuple[int, ...]
    mode: Mode = Mode.PIPELINE
    tensor: int = 1
    graphs: bool = False
    dtype: str = "float32"
    gpus: int = 1
    env: tuple[tuple[str, str], ...] = ()
    kill: int | None = None
    sleeps: bool = False


SINGLE_GPU = (
    # Topologies whose first start compiles come first, while others start at the same time.
    Topology(
        name="cpu+gpu-graphs",
        pods=((CPU, 1), (GPU, 1)),
        layers=(3, 5),
        graphs=True,
        kill=0,
    ),
    Topology(
        name="gpu+cpu-graphs",
        pods=((GPU, 1), (CPU, 1)),
        layers=(5, 3),
        graphs=True,
        kill=0,
    ),
    Topology(name="cpu+gpu-eager", pods=((CPU, 1), (GPU, 1)), layers=(3, 5), kill=1),
    Topology(name="gpu+cpu-eager", pods=((GPU, 1), (CPU, 1)), layers=(5, 3)),
    Topology(name="cpu+gpu+cpu-graphs", pods=((CPU, 1), (GPU, 1), (CPU, 1)), layers=(2, 4, 2), graphs=True),
    # Two pods of one GPU rank each may share a GPU, because they do not use NCCL.
    Topology(name="gpu+gpu+cpu-graphs", pods=((GPU, 1), (GPU, 1), (CPU, 1)), layers=(3, 3, 2), graphs=True),
    Topology(name="cpu+gpu+gpu-graphs", pods=((CPU, 1), (GPU, 1), (GPU, 1)), layers=(2, 3, 3), graphs=True),
    Topology(
        name="cpu+gpu-graphs-sleep",
        pods=((CPU, 1), (GPU, 1)),
        layers=(3, 5),
        graphs=True,
        env=(("VLLM_SERVER_DEV_MODE", "1"),),
        sleeps=True,
    ),
    Topology(
        name="cpu+gpu-bf16",
        pods=((CPU, 1), (GPU, 1)),
        layers=(3, 5),
        graphs=True,
        dtype="bfloat16",
    ),
    Topology(
        name="tp2-gpu.cpu",
        pods=((GPU, 1), (CPU, 1)),
        layers=(8,),
        mode=Mode.TENSOR,
        tensor=2,
        kill=1,
    ),
    Topology(
        name="tp2-gpu.cpu-gloo",
        pods=((GPU, 1), (CPU, 1)),
        layers=(8,),
        mode=Mode.TENSOR,
        tensor=2,
        env=((names.ENV_BRIDGE, "gloo"), ("VLLM_SERVER_DEV_MODE", "1")),
        sleeps=True,
    ),
    Topology(
        name="tp4-gpu.cpu.cpu.cpu",
        pods=((GPU, 1), (CPU, 3)),
        layers=(8,),
        mode=Mode.TENSOR,
        tensor=4,
        kill=0,
    ),
    Topology(
        name="tp2xpp2-gpu.cpu+cpu.cpu",
        pods=((GPU, 1), (CPU, 1), (CPU, 2)),
        layers=(5, 3),
        mode=Mode.TENSOR,
        tensor=2,
    ),
    Topology(
        name="tp2xpp2-gpu.cpu+gpu.cpu",
        pods=((GPU, 1), (CPU, 1), (GPU, 1), (CPU, 1)),
        layers=(4, 4),
        mode=Mode.TENSOR,
        tensor=2,
    ),
    Topology(
        name="tp2-gpu.cpu-bf16",
        pods=((GPU, 1), (CPU, 1)),
        layers=(8,),
        mode=Mode.TENSOR,
        tensor=2,
        dtype="bfloat16",
    ),
)

TWO_GPUS = (
    Topology(
        name="tp2xpp2-gpu.gpu+cpu.cpu-graphs",
        pods=((GPU, 2), (CPU, 2)),
        layers=(5, 3),
        tensor=2,
        graphs=True,
        gpus=2,
        kill=1,
    ),
    Topology(
        name="tp2xpp2-cpu.cpu+gpu.gpu-graphs",
        pods=((CPU, 2), (GPU, 2)),
        layers=(3, 5),
        tensor=2,
        graphs=True,
        gpus=2,
    ),
    Topology(
        name="tp2xpp2-cpu.cpu+gpu.gpu-eager", pods=((CPU, 2), (GPU, 2)), layers=(3, 5), tensor=2, gpus=2
    ),
    Topology(
        name="gpu+gpu+cpu-graphs-2gpus",
        pods=((GPU, 2), (CPU, 1)),
        layers=(3, 3, 2),
        graphs=True,
        gpus=2,
    ),
    Topology(
        name="cpu+gpu+gpu-eager-2gpus",
        pods=((CPU, 1), (GPU, 1), (GPU, 1)),
        layers=(2, 3, 3),
        gpus=2,
    ),
    Topology(
        name="tp4-gpu.gpu.cpu.cpu",
        pods=((GPU, 2), (CPU, 2)),
        layers=(8,),
        mode=Mode.TENSOR,
        tensor=4,
        gpus=2,
        kill=2,
    ),
    Topology(
        name="tp2xpp2-gpu.cpu+gpu.cpu-2gpus",
        pods=((GPU, 1), (CPU, 1), (GPU, 1), (CPU, 1)),
        layers=(4, 4),
        mode=Mode.TENSOR,
        tensor=2,
        gpus=2,
    ),
)

TOPOLOGIES = (*SINGLE_GPU, *TWO_GPUS)


def plan_of(topology: Topology, model: Path, *, devices_as_cpu: bool) -> Plan:
    """Returns the plan of a topology. `devices_as_cpu` replaces GPU ranks by CPU ranks."""
    args: list[str] = []
    if topology.dtype == "float32":
        # A GPU backend that multiplies in float32. CPU ranks have only one backend.
        args += ["--attention-backend", "TRITON_ATTN"]
    if topology.sleeps:
        args.append("--enable-sleep-mode")
    plan = build_plan(
        model,
        layers=topology.layers,
        pods=[ranks for _, ranks in topology.pods],
        tensor=topology.tensor,
        mode=topology.mode,
        devices=[device for device, _ in topology.pods],
        dtype=topology.dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        eager_gpu=not topology.graphs,
        extra_args=tuple(args),
    )
    if topology.sleeps and not devices_as_cpu:
        ranks = tuple(replace(rank, kv_cache_bytes=SLEEPERS_KV_BYTES) for rank in plan.ranks)
        return replace(plan, ranks=ranks)
    if not devices_as_cpu:
        return plan
    return replace(plan, ranks=tuple(replace(rank, device=CPU) for rank in plan.ranks))


def environment(topology: Topology, caches: Path) -> dict[str, str]:
    """Returns the variables of every pod of a topology. Compilers keep their results in `caches`."""
    env = {
        "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // CPUS_PER_THREAD)),
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        **dict(topology.env),
    }
    if topology.dtype == "float32":
        env["TRITON_F32_DEFAULT"] = "ieee"  # its tl.dot uses TF32 by default (facts: Hybrid on a real GPU)
    return env


def pod_environments(topology: Topology, gpus: Sequence[str]) -> Mapping[int, Mapping[str, str]]:
    """Returns the devices of each GPU pod: different ones if there are enough, otherwise shared ones.

    Args:
        topology: whose pods.
        gpus: possible values of CUDA_VISIBLE_DEVICES; empty if GPU ranks run on the CPU.
    """
    if not gpus:
        return {}
    found: dict[int, dict[str, str]] = {}
    first = 0
    for pod, (device, ranks) in enumerate(topology.pods):
        if device is GPU:
            own = [gpus[(first + i) % len(gpus)] for i in range(ranks)]
            found[pod] = {"CUDA_VISIBLE_DEVICES": ",".join(own)}
            first += ranks
    return found
