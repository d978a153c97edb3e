"""What a layer of a CPU stage costs besides reading its weights: norms, attention, router, Python.

    python -m tests.bench.stage_overhead [--shapes tiny-moe,tiny-llama] [--requests 1,16] [--threads 4]

A group of four CPU stages, of which the two in the middle have FEWER and MORE layers of a model so small
that its weights are read in no time: the difference of what the two compute in a step, by the layers between
them. One batch is in flight, so one stage computes at a time. `--arg` is for vLLM, such as
`--arg=--ir-op-priority.rms_norm=native`.

Needs a Python with vLLM's CPU build, and worker_image/src and operator/src.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.bench.model_shapes import make_shape
from tests.bench.offload import ask_group, counters
from tests.integration.worker.groups import Group, build_plan, start_group

FEWER, MORE = 4, 12
LAYERS: Final = (1, FEWER, MORE, 1)
START_TIMEOUT_S: Final = 400.0
WARM_STEPS: Final = 8


def layer_s(group: Group, requests: int, steps: int) -> float:
    """Returns the seconds that a layer costs in a decode step of so many requests."""
    before = [counters(group, rank) for rank in (1, 2)]
    ask_group(group, requests, steps)
    after = [counters(group, rank) for rank in (1, 2)]
    fewer, more = (
        (now["compute"] - then["compute"]) / (now["steps"] - then["steps"])
        for then, now in zip(before, after, strict=True)
    )
    return (more - fewer) / (MORE - FEWER)


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
    env = {"OMP_NUM_THREADS": str(options.threads)}
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
    """Runs it; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.stage_overhead")
    parser.add_argument("--shapes", type=lambda text: text.split(","), default=["tiny-moe", "tiny-llama"])
    parser.add_argument(
        "--requests", type=lambda text: [int(each) for each in text.split(",")], default=[1, 16]
    )
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--arg", action="append", default=[])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="hi-") as scratch:
        for shape in options.shapes:
            run(shape, options, Path(scratch))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
