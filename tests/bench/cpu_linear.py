"""Compares our kernels for bf16 linear layers with few rows with oneDNN, in GB/s of weights.

Needs torch and the worker package, on a CPU with AVX-512. Uses vLLM's CPU build if it is installed:

    PYTHONPATH=worker_image/src python3 tests/bench/cpu_linear.py --quick --threads 8,12,14,16

oneDNN is called as vLLM calls it (vllm/_custom_ops.py::onednn_mm@v0.32.0) if vLLM's library can be loaded,
otherwise through torch's own linear. Each weight is one of several copies. All copies together are larger
than the caches, and each copy is read once in a round.
"""

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import torch

from vllm_heteroinfer.kernels import build, linear
from vllm_heteroinfer.kernels.library import KernelLibrary

SHAPES = {
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
}
"""Layers of a Llama with 8B weights: columns (n), inputs (k)."""
FLAGS = ("avx512f", "avx512_bf16", "amx_bf16", "amx_tile")

Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """Several weights of one shape, in the form that each compared kernel reads.

    Attributes:
        weight: the first weight, [n, k], bf16.
        ours: for each copy, a product with our kernels.
        theirs: for each copy, a product with oneDNN.
    """

    weight: torch.Tensor
    ours: list[Product]
    theirs: list[Product]

    @property
    def nbytes(self) -> int:
        """Returns the bytes that a round over all copies reads."""
        return self.weight.nbytes * len(self.ours)


def onednn_source() -> str:
    """Loads vLLM's oneDNN if possible, and returns the name of the measured oneDNN."""
    name = "vllm._C" if torch.cpu._is_avx512_bf16_supported() else "vllm._C_AVX512"
    with contextlib.suppress(ImportError):  # _C_AVX512 has no module of its name, only operations
        __import__(name)
    if hasattr(torch.ops._C, "create_onednn_mm_handler"):
        return f"{name} (onednn_mm)"
    return "torch (functional.linear)"


def onednn_product(weight: torch.Tensor) -> Product:
    """Returns a function for a product with oneDNN: vLLM's, or torch's if vLLM's library is missing."""
    columns = weight.shape[0]
    if not hasattr(torch.ops._C, "create_onednn_mm_handler"):
        return lambda x: torch.nn.functional.linear(x, weight)
    handler = torch.tensor(torch.ops._C.create_onednn_mm_handler(weight.t(), 32), dtype=torch.int64)

    def product(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty((x.shape[0], columns), dtype=x.dtype)
        torch.ops._C.onednn_mm(out, x, None, handler)
        return out

    return product


def our_product(weight: torch.Tensor) -> Product:
    columns, packed = weight.shape[0], linear.pack(weight)
    return lambda x: linear.linear(x, packed, None, columns)


def build_layers(shape: str, total_bytes: int) -> Layers:
    columns, inputs = SHAPES[shape]
    few = torch.randn(columns // 32, inputs, generator=torch.Generator().manual_seed(0)) * 0.02
    weight = few.to(torch.bfloat16).repeat(32, 1)
    copies = max(2, -(-total_bytes // weight.nbytes))
    return Layers(
        weight=weight,
        ours=[our_product(weight) for _ in range(copies)],
        theirs=[onednn_product(weight) for _ in range(copies)],
    )


def measure(products: Sequence[Product], x: torch.Tensor, rounds: int) -> float:
    """Returns the median seconds of a round over all copies."""
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for product in products:
            product(x)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])  # the first round starts threads and allocates buffers


def compare(library: KernelLibrary, layers: Layers, shape: str, args: argparse.Namespace) -> None:
    """Prints a row for each number of rows and threads: rates, ratio and errors of both kernels."""
    inputs = layers.weight.shape[1]
    x = torch.randn(max(args.rows), inputs, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    reference = x.float() @ layers.weight.float().t()
    for rows in args.rows:
        batch = x[:rows].contiguous()
        errors = [
            (products[-1](batch).float() - reference[:rows]).abs().max().item()
            for products in (layers.ours, layers.theirs)
        ]
        for threads in args.threads:
            torch.set_num_threads(threads)
            ours, theirs = (measure(p, batch, args.rounds) for p in (layers.ours, layers.theirs))
            rates = [layers.nbytes / round_s / 1e9 for round_s in (ours, theirs)]
            print(
                f"{shape:8} {rows:5} {threads:7} {rates[0]:9.1f} {rates[1]:11.1f} {theirs / ours:5.2f} "
                f"{ours / len(layers.ours) * 1e3:8.3f} {errors[0]:9.4f} {errors[1]:10.4f} "
                f"{library.kernel(rows)}",
                flush=True,
            )


def describe(library: KernelLibrary) -> str:
    """Describes the CPU, the huge pages, the OpenMP settings and the versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(": ")[1] for line in lines if line.startswith("model name")), "?")
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    settings = {
        name: value for name, value in os.environ.items() if name.startswith(("OMP_", "GOMP_", "KMP_"))
    }
    return (
        f"{model}, {len(os.sched_getaffinity(0))} CPUs, {[flag for flag in FLAGS if flag in flags]}\n"
        f"huge pages: {huge.read_text().strip() if huge.exists() else '?'}; {settings}\n"
        f"torch {torch.__version__}; kernels: {library.path.name} {library.paths}"
    )


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(argv: Sequence[str]) -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="cpu_linear.py", description=__doc__)
    parser.add_argument("--threads", type=numbers, default=[torch.get_num_threads()])
    parser.add_argument("--rows", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="GB of weights of each shape")
    parser.add_argument("--quick", action="store_true", help="5 rounds over 0.9 GB")
    args = parser.parse_args(argv)
    if args.quick:
        args.rounds, args.gigabytes = 5, 0.9
    print("compiled:", build.build().name)
    library = linear.prepare()
    print(describe(library))
    start = time.perf_counter()
    print("oneDNN:", onednn_source())
    torch.set_num_threads(max(args.threads))
    print("shape     rows threads ours GB/s oneDNN GB/s ratio  ours ms  err ours err oneDNN path")
    with torch.inference_mode():
        for shape in args.shapes:
            torch.set_num_threads(max(args.threads))
            compare(library, build_layers(shape, int(args.gigabytes * 1e9)), shape, args)
    print(f"{time.perf_counter() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
