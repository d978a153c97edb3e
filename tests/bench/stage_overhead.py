"""Measures the time of a CPU stage's layer besides reading its weights: norms, attention, router, Python.

    python -m tests.bench.stage_overhead [--shapes tiny-moe,tiny-llama] [--requests 1,16] [--threads 4]

A group has four CPU stages of a model so small that reading its weights takes almost no time. The two stages
in the middle have FEWER and MORE layers. The result is the difference of their times in a step, divided by
the difference in layers. One batch is in flight, so one stage computes at a time. `--arg` is for vLLM, such
as `--arg=--ir-op-priority.rms_norm=native`.

For a mixture, the program also prints the time of the experts' own kernel without other work between its
calls, with as many threads, as many layers in turn, and uniform routing. Needs a Python with vLLM's CPU
build, and worker_image/src and operator/src.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from heteroinfer_contract import names
from tests.bench.model_shapes import SHAPES, make_shape
from tests.bench.offload import ask_group, counters
from tests.integration.worker.groups import Group, build_plan, start_group

FEWER, MORE = 4, 12
LAYERS: Final = (1, FEWER, MORE, 1)
START_TIMEOUT_S: Final = 400.0
WARM_STEPS: Final = 8
CALLS, WARM_CALLS = 2000, 200


def layer_s(group: Group, requests: int, steps: int) -> float:
    """Returns the seconds of a layer in a decode step of this number of requests."""
    before = [counters(group, rank) for rank in (1, 2)]
    ask_group(group, requests, steps)
    after = [counters(group, rank) for rank in (1, 2)]
    fewer, more = (
        (now["compute"] - then["compute"]) / (now["steps"] - then["steps"])
        for then, now in zip(before, after, strict=True)
    )
    return (more - fewer) / (MORE - FEWER)


def time_experts(shape: str, requests: int) -> float:
    """Returns the median seconds of a call of the experts' kernel, with this process's threads."""
    import torch

    from vllm_heteroinfer.kernels import linear
    from vllm_heteroinfer.kernels.experts import PackedExperts, experts, pack_experts

    sizes, library = SHAPES[shape], linear.prepare()
    count, topk, hidden = sizes["num_experts"], sizes["num_experts_per_tok"], sizes["hidden_size"]
    inner = sizes["moe_intermediate_size"]
    draw = torch.Generator().manual_seed(0)

    def weight(columns: int, inputs: int) -> torch.Tensor:
        return torch.randn(count, columns, inputs, generator=draw).mul_(0.02).to(torch.bfloat16)

    layers = [
        PackedExperts(
            w13=pack_experts(library, weight(2 * inner, hidden), gates=True),
            w2=pack_experts(library, weight(hidden, inner), gates=False),
        )
        for _ in range(MORE)
    ]
    x = torch.randn(requests, hidden, generator=draw).to(torch.bfloat16)
    y, weights = torch.empty_like(x), torch.full((requests, topk), 1 / topk)
    taken = []
    for call in range(WARM_CALLS + CALLS):
        ids = torch.rand(requests, count, generator=draw).topk(topk, -1).indices.to(torch.int32).contiguous()
        began = time.perf_counter()
        experts(library, y, x, layers[call % MORE], weights=weights, ids=ids)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[WARM_CALLS:])


def print_experts_time(shape: str, options: argparse.Namespace) -> None:
    """Prints the time of a mixture's experts alone, in a process with as many threads as a rank."""
    requests = ",".join(map(str, options.requests))
    command = (
        sys.executable,
        "-m",
        "tests.bench.stage_overhead",
        "--experts-of",
        shape,
        "--requests",
        requests,
    )
    env = {**os.environ, names.ENV_OMP_THREADS: str(options.threads), names.ENV_VISIBLE_GPUS: "-1"}
    subprocess.run(command, check=True, env=env, timeout=START_TIMEOUT_S)


def run(shape: str, options: argparse.Namespace, folder: Path) -> None:
    """Prints the cells of one shape."""
    model = make_shape(folder / shape, shape, sum(LAYERS))
    plan = build_plan(
        model,
        layers=LAYERS,
        pods=[1] * len(LAYERS),
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=64,
        eager_cpu=True,
        batches_in_flight=1,
        extra_args=("--load-format", "dummy", "--no-enable-prefix-caching", *options.arg),
    )
    env = {names.ENV_OMP_THREADS: str(options.threads)}
    with start_group(plan, folder / f"{shape}-logs", env=env, startup_timeout_s=START_TIMEOUT_S) as group:
        group.wait_ready(START_TIMEOUT_S)
        for requests in options.requests:
            ask_group(group, requests, WARM_STEPS)
            found = [layer_s(group, requests, options.steps) for _ in range(options.rounds)]
            print(
                f"CELL {shape} N={requests}: {statistics.median(found) * 1e6:.0f} us a layer "
                f"({min(found) * 1e6:.0f} to {max(found) * 1e6:.0f}), {options.threads} threads",
                flush=True,
            )


def main(argv: Sequence[str]) -> int:
    """Runs the benchmark; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.stage_overhead")
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=["tiny-moe", "tiny-llama"])
    parser.add_argument(
        "--requests", type=lambda text: [int(each) for each in text.split(",")], default=[1, 16]
    )
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--arg", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--experts-of", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.experts_of:
        for requests in options.requests:
            taken = time_experts(options.experts_of, requests)
            print(f"CELL {options.experts_of} N={requests}: experts {taken * 1e6:.0f} us a call", flush=True)
        return 0
    with tempfile.TemporaryDirectory(prefix="hi-") as scratch:
        for shape in options.shapes:
            run(shape, options, Path(scratch))
            if "num_experts" in SHAPES[shape]:
                print_experts_time(shape, options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
