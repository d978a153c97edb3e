"""What vLLM's bf16 expert kernel reads on this machine by threads, where they run, pages and busy neighbours.

    python -m tests.bench.expert_threads [--layers 6] [--threads 8,12,13,14,15,16] [--rows 1,4,16]

One process for each kind of page (as they come, and huge), one after the other on the machine: layers of
Qwen3-30B-A3B's experts with dummy weights, uniform routing. For each number of threads and way to bind
them, GB/s of a sum over the same weights (the stream) and of the active experts' bytes at each number of
rows. `free` leaves threads to the kernel's scheduler, `each` has thread i on CPU i, `spread` takes every
second CPU first. Last, free threads beside processes that spin, as an engine and its API server do.
Needs the worker's Python and a CPU with AMX.
"""

import argparse
import contextlib
import fcntl
import importlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.bench.model_shapes import SHAPES
from tests.spinning import spinning

SHAPE = SHAPES["qwen3-30b-a3b"]
REPEATS = {1: 60, 4: 25, 16: 10, 64: 6}
PAGES = {"as they come": {}, "huge": {"THP_MEM_ALLOC_ENABLE": "1"}}


class Experts:
    """Layers of packed weights, and calls of the kernel."""

    def __init__(self, layers: int) -> None:
        """Packs one layer and copies it."""
        import torch
        from vllm.platforms.cpu import CpuPlatform

        torch.cpu._init_amx()
        CpuPlatform.import_kernels()  # also where the build is for GPUs
        import vllm._custom_ops as ops

        hidden, width = SHAPE["hidden_size"], SHAPE["moe_intermediate_size"]
        self._torch, self.count, self.topk = torch, SHAPE["num_experts"], SHAPE["num_experts_per_tok"]
        self.bytes = 3 * hidden * width * 2

        def packed(shape: tuple[int, ...]) -> list[Any]:
            dense = torch.full(shape, 0.001, dtype=torch.bfloat16)
            first = ops.cpu_prepack_moe_weight(dense, "amx")
            return [first, *(first.clone() for _ in range(layers - 1))]

        self.w13 = packed((self.count, 2 * width, hidden))
        self.w2 = packed((self.count, hidden, width))
        self._call = ops.cpu_fused_moe
        draw = torch.Generator().manual_seed(1)
        self._inputs = {rows: self._asks(rows, draw) for rows in REPEATS}

    def _asks(self, rows: int, draw: Any) -> list[tuple[Any, ...]]:
        torch = self._torch
        asks = []
        for _ in range(16):
            ids = torch.rand(rows, self.count, generator=draw).topk(self.topk, -1).indices.to(torch.int32)
            x = torch.randn(rows, SHAPE["hidden_size"], generator=draw).to(torch.bfloat16)
            weights = torch.full((rows, self.topk), 1 / self.topk)
            asks.append((torch.empty_like(x), x, ids.contiguous(), weights, len(ids.unique()) * self.bytes))
        return asks

    def rate(self, rows: int) -> float:
        """Returns GB/s of active experts, the median over calls that take the layers in turn."""
        rates = []
        for number in range(REPEATS[rows]):
            y, x, ids, weights, num_bytes = self._inputs[rows][number % 16]
            layer = number % len(self.w13)
            start = time.perf_counter()
            self._call(y, x, self.w13[layer], self.w2[layer], None, None, weights, ids, "silu", "amx")
            rates.append(num_bytes / (time.perf_counter() - start) / 1e9)
        return sorted(rates)[len(rates) // 2]

    def stream(self) -> float:
        """Returns GB/s of a sum over all weights, the better of two."""
        return self._sum([*self.w13, *self.w2])

    def streams(self) -> list[float]:
        """Returns the same of each layer: whether some lie in slower memory."""
        return [round(self._sum([w13, w2]), 1) for w13, w2 in zip(self.w13, self.w2, strict=True)]

    def _sum(self, weights: Sequence[Any]) -> float:
        words = [weight.view(-1).view(self._torch.int64) for weight in weights]
        total, best = sum(word.nbytes for word in words), 0.0
        for _ in range(2):
            start = time.perf_counter()
            for word in words:
                word.sum()
            best = max(best, total / (time.perf_counter() - start) / 1e9)
        return best


def bind(how: str, cpus: Sequence[int]) -> None:
    """Has each thread of this process run where `how` says; OpenMP's come in the order of their start."""
    order = [*cpus[::2], *cpus[1::2]] if how == "spread" else list(cpus)
    for number, entry in enumerate(sorted(int(task.name) for task in Path("/proc/self/task").iterdir())):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(entry, set(cpus) if how == "free" else {order[number % len(order)]})


def measure(options: argparse.Namespace) -> None:
    """Prints a row for everything with one kind of page, while no other process of this program measures."""
    import torch

    importlib.import_module("vllm._custom_ops")  # before the lock, since it takes seconds
    cpus = sorted(os.sched_getaffinity(0))
    with options.lock.open("w") as file, torch.inference_mode():
        fcntl.flock(file, fcntl.LOCK_EX)
        experts = Experts(options.layers)

        def line(threads: int, how: str, beside: int = 0) -> None:
            torch.set_num_threads(threads)
            bind("free", cpus)
            experts.rate(1)  # starts the threads
            bind(how, cpus)
            stream = "-" if beside else f"{experts.stream():.1f}"
            rates = [f"{experts.rate(rows):.1f}" for rows in options.rows]
            name = f"{how} beside {beside} that spin" if beside else how
            print("| " + " | ".join([options.pages, str(threads), name, stream, *rates]) + " |", flush=True)

        for how in options.bindings:
            for threads in options.threads:
                line(threads, how)
        for beside in options.neighbours:
            with spinning([cpus] * beside):
                for threads in options.threads:
                    if threads + beside > len(cpus) - 3:
                        line(threads, "free", beside)
        torch.set_num_threads(max(options.threads))
        print(f"{options.pages}: each layer's stream, most threads: {experts.streams()} GB/s", flush=True)
        huge = re.search(r"AnonHugePages: +(\d+)", Path("/proc/self/smaps_rollup").read_text())
        print(f"{options.pages}: {int(huge[1]) / 2**20 if huge else 0:.2f} GiB of huge pages", flush=True)


def show(command: Sequence[str], keep: Callable[[str], bool]) -> None:
    """Prints lines of what a command says."""
    with contextlib.suppress(OSError):
        said = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30).stdout
        print("\n".join(line for line in said.splitlines() if keep(line)), flush=True)


def main() -> int:
    """Runs both kinds of pages; see the module."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",") if number]

    parser = argparse.ArgumentParser(prog="python -m tests.bench.expert_threads")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--threads", type=numbers, default=[8, 12, 13, 14, 15, 16])
    parser.add_argument("--rows", type=numbers, default=[1, 4, 16])
    parser.add_argument("--neighbours", type=numbers, default=[2, 3])
    parser.add_argument("--bindings", type=lambda text: text.split(","), default=["free", "each", "spread"])
    parser.add_argument("--pages", help="of this program itself: one kind, in this process")
    parser.add_argument("--lock", type=Path)
    options = parser.parse_args()
    if options.pages:
        measure(options)
        return 0
    wanted = ("Thread(s)", "Core(s)", "Socket", "NUMA", "L2", "L3", "Model name")
    show(["lscpu"], lambda line: line.strip().startswith(wanted))
    head = ["pages", "threads", "bound", "stream, GB/s", *(f"experts, N={rows}" for rows in options.rows)]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|", flush=True)
    own = {"CUDA_VISIBLE_DEVICES": "-1", "VLLM_PLUGINS": "", "VLLM_TARGET_DEVICE": "cpu"}
    command = [sys.executable, "-m", "tests.bench.expert_threads", *sys.argv[1:]]
    with tempfile.NamedTemporaryFile() as lock:
        children = [
            subprocess.Popen(
                [*command, f"--pages={pages}", f"--lock={lock.name}"], env={**os.environ, **env, **own}
            )
            for pages, env in PAGES.items()
        ]
        codes = [child.wait() for child in children]
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
