"""Runs the kernels in the worker's own Python: `python -m tests.integration.kernels.probe [LIBRARY]`.

Questions and answers are lines of JSON (`answering.serve`). LIBRARY replaces the package's own library.
"""

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.integration.kernels.answering import serve
from tests.integration.kernels.tuning import tune
from vllm_heteroinfer.kernels import coded, linear
from vllm_heteroinfer.kernels.library import KernelsUnavailableError

LIBRARY = Path(sys.argv[1]) if len(sys.argv) > 1 else None


def paths(question: dict[str, Any]) -> Any:
    """Returns the instruction sets that the library has found, or its error about this CPU."""
    try:
        paths, refusal = linear.prepare(LIBRARY).paths, None
    except KernelsUnavailableError as error:
        paths, refusal = (), str(error)
    try:
        return {"paths": paths, "refusal": refusal, "coded": coded.register(LIBRARY).coded_paths}
    except KernelsUnavailableError as error:
        return {"paths": paths, "refusal": refusal, "coded": str(error)}


def compute(case: dict[str, Any], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a case's product, the exact product, and the sum of its terms' absolute values."""
    library = linear.prepare(LIBRARY)
    generator = torch.Generator().manual_seed(seed)
    tune(library, case.get("path"), case.get("streams", -1), case.get("prefetch", -1))
    torch.set_num_threads(case["threads"])
    rows, columns, inputs, scale = case["rows"], case["columns"], case["inputs"], case.get("scale", 1.0)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    x = draw(rows, inputs + case.get("stride", 0))[:, :inputs]
    weight = draw(columns, inputs)
    bias = draw(columns) if case["bias"] else None
    got = linear.linear(x, linear.pack(weight), bias, columns)
    tune(library)
    exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
    size = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
    return got, exact, size


def products(question: dict[str, Any]) -> Any:
    """Returns the worst error of each case.

    It is a share of the largest possible error of bf16 outputs and float32 sums.
    """
    answers = []
    for seed, case in enumerate(question["cases"]):
        got, exact, size = compute(case, seed)
        allowed = exact.abs() * 2.0**-8 + size * 2.0**-20
        answers.append(((got.double() - exact).abs() / allowed).max().item())
    return {"errors": answers}


def bits(question: dict[str, Any]) -> Any:
    """Returns a digest of each case's product, bit by bit."""
    products = (compute(case, seed)[0] for seed, case in enumerate(question["cases"]))
    return {
        "digests": [
            hashlib.sha256(product.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()
            for product in products
        ]
    }


def special(question: dict[str, Any]) -> Any:
    """Returns the product of each pair of a weight and an input, by one path: [inputs][weights]."""
    library = linear.prepare(LIBRARY)
    weight = torch.tensor(question["weights"]).reshape(-1, 1).to(torch.bfloat16)
    x = torch.tensor(question["inputs"]).reshape(-1, 1).to(torch.bfloat16)
    tune(library, question["path"])
    got = linear.linear(x, linear.pack(weight), None, weight.shape[0])
    tune(library)
    exact = (x.double() @ weight.double().t()).float().to(torch.bfloat16)
    return {
        "inputs": x.flatten().tolist(),
        "weights": weight.flatten().tolist(),
        "got": got.tolist(),
        "exact": exact.tolist(),
    }


def refused(question: dict[str, Any]) -> Any:
    """Returns the errors for arguments that must not become raw pointers."""
    linear.prepare(LIBRARY)
    packed = linear.pack(torch.zeros(100, 64, dtype=torch.bfloat16))
    x = torch.zeros(2, 64, dtype=torch.bfloat16)
    bias = torch.zeros(100, dtype=torch.bfloat16)
    calls: dict[str, Callable[[], Any]] = {
        "dtype": lambda: linear.linear(x.float(), packed, None, 100),
        "inputs": lambda: linear.linear(x[:, :30], packed, None, 100),
        "columns": lambda: linear.linear(x, packed, None, 129),
        "bias": lambda: linear.linear(x, packed, bias[:99], 100),
        "weight": lambda: linear.pack(torch.zeros(100, 64)),
    }
    output = {}
    for name, call in calls.items():
        try:
            call()
        except (RuntimeError, ValueError) as error:
            output[name] = str(error)
    return output


def compiled(question: dict[str, Any]) -> Any:
    """Returns the difference between the op under torch.compile and the op alone, for two batch sizes."""
    linear.prepare(LIBRARY)
    weight = torch.randn(96, 64).to(torch.bfloat16)
    packed, bias = linear.pack(weight), torch.randn(96).to(torch.bfloat16)

    def block(x: torch.Tensor) -> torch.Tensor:
        return linear.linear(torch.nn.functional.silu(x), packed, bias, 96) * 2

    fast = torch.compile(block, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        gaps = [
            (fast(x) - block(x)).abs().max().item()
            for x in (torch.randn(r, 64).to(torch.bfloat16) for r in (3, 9))
        ]
    torch.library.opcheck(
        torch.ops.heteroinfer.linear, (torch.randn(3, 64).to(torch.bfloat16), packed, bias, 96)
    )
    return {"gaps": gaps}


def threads(question: dict[str, Any]) -> Any:
    """Returns the process's OpenMP libraries, and its threads before and after our op joins torch's pool."""
    count = question["threads"]
    torch.set_num_threads(count)
    big = torch.randn(1024, 1024)
    for _ in range(3):
        (big + 1).sum()
    before = len(os.listdir("/proc/self/task"))
    library = linear.prepare(LIBRARY)
    packed = linear.pack(torch.randn(512, 512).to(torch.bfloat16))
    for rows in (1, 5, 100):
        linear.linear(torch.randn(rows, 512).to(torch.bfloat16), packed, None, 512)
    after = len(os.listdir("/proc/self/task"))
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    openmp = [file for file in mapped if any(name in Path(file).name for name in ("gomp", "iomp", "libomp"))]
    return {
        "openmp": openmp,
        "before": before,
        "after": after,
        "team": library.calls.heteroinfer_threads(),
        "torch": str(Path(torch.__file__).parent.parent),
    }


QUESTIONS = {f.__name__: f for f in (paths, products, bits, special, refused, compiled, threads)}

if __name__ == "__main__":
    serve(QUESTIONS)
