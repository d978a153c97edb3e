"""What the kernels do, asked in the worker's own Python: `python -m tests.integration.kernels.probe NAME`.

A question comes as JSON on stdin, its answer is the last line of stdout. Imports torch and vLLM.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vllm_heteroinfer.kernels import linear


def products(question: dict[str, Any]) -> Any:
    """Returns the worst error of each case, as a share of what bf16 outputs and float32 sums may err."""
    library = linear.prepare(Path(question["library"]) if "library" in question else None)
    answers = []
    for number, case in enumerate(question["cases"]):
        generator = torch.Generator().manual_seed(number)
        library.tune(case.get("path"), case.get("streams", -1), case.get("prefetch", -1))
        torch.set_num_threads(case["threads"])
        rows, columns, inputs = case["rows"], case["columns"], case["inputs"]
        x = torch.randn(rows, inputs + case.get("stride", 0), generator=generator).to(torch.bfloat16)[
            :, :inputs
        ]
        weight = torch.randn(columns, inputs, generator=generator).to(torch.bfloat16)
        bias = torch.randn(columns, generator=generator).to(torch.bfloat16) if case["bias"] else None
        got = linear.linear(x, linear.pack(weight), bias, columns).double()
        exact = x.double() @ weight.double().t() + (0 if bias is None else bias.double())
        size = x.double().abs() @ weight.double().abs().t() + (0 if bias is None else bias.double().abs())
        allowed = exact.abs() * 2.0**-8 + size * 2.0**-20
        answers.append(((got - exact).abs() / allowed).max().item())
    return {"errors": answers, "paths": library.paths}


def special(question: dict[str, Any]) -> Any:
    """Returns outputs of weights that are no numbers or leave bf16's range, and what torch makes of them."""
    linear.prepare()
    values = [float("nan"), float("inf"), -float("inf"), 3.3e38, 1e-40, -0.0, 1.00390625, 1.01171875]
    weight = torch.tensor(values).reshape(-1, 1).to(torch.bfloat16)
    x = torch.tensor([[1.0], [0.5], [3.0]]).to(torch.bfloat16)
    got = linear.linear(x, linear.pack(weight), None, len(values))
    wide = (x.double() @ weight.double().t()).float().to(torch.bfloat16)
    return {"equal": bool(torch.equal(got.nan_to_num(7.0), wide.nan_to_num(7.0)))}


def refused(question: dict[str, Any]) -> Any:
    """Returns what is said to arguments that raw pointers must not be made of."""
    linear.prepare()
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
    said = {}
    for name, call in calls.items():
        try:
            call()
        except (RuntimeError, ValueError) as error:
            said[name] = str(error)
    return said


def compiled(question: dict[str, Any]) -> Any:
    """Returns how far the op under torch.compile is from the op alone, for two batch sizes."""
    linear.prepare()
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
    library = linear.prepare()
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


QUESTIONS = {f.__name__: f for f in (products, special, refused, compiled, threads)}

if __name__ == "__main__":
    print(json.dumps(QUESTIONS[sys.argv[1]](json.loads(sys.stdin.read() or "{}"))))
