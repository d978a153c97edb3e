"""Feed-forward ranks of which one has busy cores: equal shares against shares by rate, in one run.

    python -m tests.bench.feed_forward_shares [--busy 3] [--off 8] [--requests 1,4,16] [--rounds 3]

Processes that spin are bound to the machine's last `--busy` CPUs, which the last rank computes on, as another
pod's would. Two groups start one after the other and are measured in turn: one whose plan gives equal shares,
and one that shares by the rate that its ranks measure. Dummy weights, uniform routing, bf16; a step is the
time between steps while all requests decode.

Needs one GPU and a Python with vLLM's CUDA and CPU builds; `--cpu` is a try without.
"""

import argparse
import contextlib
import os
import re
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Final

from heteroinfer_contract.plan import BY_RATE
from tests.bench.feed_forward_cells import (
    ABOUT_MS,
    DENSE_MS,
    OUR_ENV,
    max_len_of,
    measure_group,
    on_cpu,
    plan_of,
    routing,
)
from tests.bench.model_shapes import SHAPES, make_shape
from tests.integration.worker.groups import Group, start_group
from tests.spinning import spinning

EQUAL: Final = 1
START_TIMEOUT_S: Final = 300.0
NAMES: Final = {EQUAL: "equal", BY_RATE: "by rate"}


def main() -> int:
    """Prints a table; see the module."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m tests.bench.feed_forward_shares")
    parser.add_argument("--busy", type=int, default=3, help="CPUs that others compute on")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--off", type=int, default=8, help="layers whose experts are on CPUs")
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--requests", type=numbers, default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--cpu", action="store_true", help="a try without a GPU")
    options = parser.parse_args()
    options.prompts = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        model = make_shape(Path(folder) / "model", options.shape, options.layers)
        cpus = sorted(os.sched_getaffinity(0))
        stack.enter_context(spinning([{cpu} for cpu in cpus[len(cpus) - options.busy :]]))
        groups = {share: start(share, model, Path(folder), options, stack) for share in NAMES}
        print("| requests | shares | a step, ms (each round) |", "|---|---|---|", sep="\n")
        for requests in options.requests:
            measure(groups, requests, options)
    return 0


def start(
    share: int, model: Path, folder: Path, options: argparse.Namespace, stack: contextlib.ExitStack
) -> Group:
    """Returns a group that is ready; it ends with the stack."""
    plan = plan_of(model, options.off, options, share)
    logs = folder / NAMES[share].replace(" ", "-")
    logs.mkdir()
    env = {**OUR_ENV, **routing(options.shape)}
    group = stack.enter_context(
        start_group(on_cpu(plan) if options.cpu else plan, logs, env=env, startup_timeout_s=START_TIMEOUT_S)
    )
    group.wait_ready(START_TIMEOUT_S)
    for said in re.findall("feed-forward ranks? .*", group.children[0].log.read_text()):
        print(f"{NAMES[share]}: {said}", flush=True)
    return group


def measure(groups: dict[int, Group], requests: int, options: argparse.Namespace) -> None:
    """Prints the lines of so many requests, the groups in turns."""
    about_ms = ABOUT_MS.get(requests, DENSE_MS) if routing(options.shape) else DENSE_MS
    times: dict[int, list[float]] = {share: [] for share in groups}
    for _ in range(options.rounds):
        for share, group in groups.items():
            cell = measure_group(
                group, requests, options.steps, options.off * about_ms / 1e3, max_len_of(options)
            )
            times[share].append(cell["step_ms"])
    for share, found in times.items():
        each = " ".join(f"{ms:.1f}" for ms in found)
        print(f"| {requests} | {NAMES[share]} | {statistics.median(found):.1f} ({each}) |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
