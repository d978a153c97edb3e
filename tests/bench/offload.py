"""Compares a group with vLLM's two offloads of weights, for an 8B model with some layers off the GPU.

    python -m tests.bench.offload [--layers 4,8,16] [--requests 1,4,16,64] [--results FILE] [--write FILE]

If one command may not run for long, `--only` runs a part, and `--results FILE` collects the results of
several commands. Needs one GPU and a Python with vLLM's CUDA and CPU builds (the worker image's). One run
measures these ways one after another, with dummy bf16 weights, torch.compile and CUDA graphs:

    ours        these layers in a CPU stage, the others in a GPU stage after it
    uva         stock vLLM --cpu-offload-gb with the same bytes
    prefetch    stock vLLM --offload-group-size with the same layers
    alone       the layers of our GPU stage as a model of its own: the cost of that stage without a peer

A step is (time of long answers - time of short ones) / (difference in tokens). All requests run at the same
time, so that the time of prefill and start-up cancels out. The result is the median over rounds.
"""

import argparse
import contextlib
import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from heteroinfer_contract import metric_names as names
from heteroinfer_contract.plan import Device, Plan
from tests.bench.model_shapes import SHAPES, make_shape
from tests.bench.offload_tables import Load, Times, read_results, to_markdown, write_results
from tests.gpu.scrape import scrape
from tests.integration.worker.groups import Group, build_plan, start_group

LAYERS = 32
SHAPE = "llama-8b"
HIDDEN, INTERMEDIATE, KV_HEADS, HEAD_DIM = (
    SHAPES[SHAPE][name] for name in ("hidden_size", "intermediate_size", "num_key_value_heads", "head_dim")
)
LAYER_BYTES = 2 * (
    HIDDEN * HIDDEN * 2 + 2 * KV_HEADS * HEAD_DIM * HIDDEN + 3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN
)
GIB = 1 << 30
MAX_LEN, MAX_SEQS, MAX_TOKENS, BLOCK = 256, 64, 2048, 32
KV_LAYER_BYTES = 2 * KV_HEADS * HEAD_DIM * 2 * MAX_LEN * (MAX_SEQS + 1)
SHORT, START_TIMEOUT_S = 8, 500.0
PROMPT_TOKENS = 16
CAPTURE = json.dumps({"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]})


def prompts(requests: int) -> list[list[int]]:
    """Returns prompts that share no prefix."""
    return [[(7 * i + j) % 500 + 1 for j in range(PROMPT_TOKENS)] for i in range(requests)]


def measure(
    load: Load, ask: Callable[[int, int], float], read: Callable[[], list[dict[str, float]]] | None = None
) -> Times:
    """Returns the time of a step.

    Args:
        load: the requests.
        ask: (requests, tokens of each) -> seconds until the last answer.
        read: returns the ranks' counters. Called before and after the last round's long answers.
    """
    ask(load.requests, SHORT)  # warms up
    steps: list[float] = []
    ranks: tuple[Mapping[str, float], ...] = ()
    for _ in range(load.rounds):
        short = ask(load.requests, SHORT)
        before = read() if read else []
        long = ask(load.requests, SHORT + load.steps)
        if read:
            ranks = tuple(explain(a, b) for a, b in zip(before, read(), strict=True))
        steps.append((long - short) / load.steps)
    return Times(step_s=statistics.median(steps), ranks=ranks)


def explain(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Returns the seconds of one rank in a decode step by part, and the parts' share of the wall time."""
    spent = {key: after[key] - before[key] for key in after}
    steps = max(1.0, spent["steps"])
    parts = ("compute", "wait", "transfer", "idle")
    explained = sum(spent[part] for part in parts) + spent["prefill"]
    return {
        **{part: spent[part] / steps for part in (*parts, "device")},
        "explained": explained / spent["wall"],
    }


def counters(group: Group, rank: int) -> dict[str, float]:
    """Returns the sums of a rank's counters, in seconds: decode steps by part, and all other wall time."""
    wall = time.perf_counter()
    total = scrape(group, rank).total
    decode = {"phase": names.PHASE_DECODE}
    return {
        "wall": wall,
        "steps": total(names.STEP_SECONDS + "_count", **decode),
        "prefill": total(names.STEP_SECONDS + "_sum", phase=names.PHASE_PREFILL),
        "compute": total(names.COMPUTE_SECONDS + "_sum", **decode),
        "wait": total(names.WAIT_SECONDS + "_sum", **decode),
        "transfer": total(names.STEP_SECONDS + "_sum", **decode)
        - total(names.COMPUTE_SECONDS + "_sum", **decode)
        - total(names.WAIT_SECONDS + "_sum", **decode),
        "idle": total(names.IDLE_SECONDS_TOTAL),
        "device": total(names.DEVICE_SECONDS + "_sum", **decode),
    }


def plan_of(
    model: Path, layers: Sequence[int], devices: Sequence[Device], options: argparse.Namespace
) -> Plan:
    """Returns the plan of a pipeline with one rank and one pod for each stage."""
    plan = build_plan(
        model,
        layers=layers,
        pods=[1] * len(layers),
        dtype="bfloat16",
        max_model_len=MAX_LEN,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=MAX_SEQS,
        block_size=BLOCK,
        eager_gpu=False,
        eager_cpu=not options.compile_cpu,
        batches_in_flight=options.batches_in_flight,
        extra_args=("--load-format", "dummy", "--compilation-config", CAPTURE),
    )
    ranks = tuple(
        replace(rank, device=device, kv_cache_bytes=KV_LAYER_BYTES * rank.num_layers)
        for rank, device in zip(plan.ranks, devices, strict=True)
    )
    return replace(plan, ranks=ranks)


def run_group(
    plan: Plan, loads: Sequence[Load], folder: Path, options: argparse.Namespace
) -> dict[Load, Times]:
    """Returns the times of one of our groups."""
    env = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    env |= dict(setting.split("=", 1) for setting in options.env)
    with start_group(plan, folder, env=env, startup_timeout_s=START_TIMEOUT_S) as group:
        print(f"  ready after {group.wait_ready(START_TIMEOUT_S):.0f} s", flush=True)

        def ask(requests: int, tokens: int) -> float:
            return ask_group(group, requests, tokens)

        def read() -> list[dict[str, float]]:
            return [counters(group, rank.rank) for rank in plan.ranks]

        try:
            return {load: show(load, measure(load, ask, read)) for load in loads}
        except Exception:
            print(group.logs(), flush=True)
            raise


def ask_group(group: Group, requests: int, tokens: int) -> float:
    """Returns the seconds until all requests were answered."""
    with ThreadPoolExecutor(requests) as pool:
        start = time.perf_counter()
        answers = list(pool.map(lambda prompt: group.complete(prompt, tokens), prompts(requests)))
        seconds = time.perf_counter() - start
    assert all(len(answer) == tokens for answer in answers)
    return seconds


def show(load: Load, times: Times) -> Times:
    """Prints `times`, and returns it."""
    print(f"  N={load.requests}: {times.step_s * 1e3:.2f} ms", *map(_rank_text, times.ranks), flush=True)
    return times


def _rank_text(parts: Mapping[str, float]) -> str:
    return " ".join(
        f"{name}={value:.1%}" if name == "explained" else f"{name}={value * 1e3:.2f}"
        for name, value in parts.items()
    )


def run_stock(
    model: Path, offload: Mapping[str, Any], loads: Sequence[Load], folder: Path, name: str
) -> dict[Load, Times]:
    """Returns the times of stock vLLM in a separate process."""
    command = [sys.executable, "-m", "tests.bench.offload", "--stock", json.dumps({
        "model": str(model),
        "offload": offload,
        "loads": [[load.requests, load.steps, load.rounds] for load in loads],
    })]  # fmt: skip
    env = {
        **os.environ,
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    log = folder / f"{name}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        with ending(process):
            code = process.wait(START_TIMEOUT_S + 200)
    text = log.read_text(errors="replace")
    if code:
        raise RuntimeError(f"stock vLLM with {offload} exited {code}:\n{text[-4000:]}")
    steps = re.findall(r"^STEP (\d+) (\S+)$", text, re.MULTILINE)
    found = {int(requests): float(step) for requests, step in steps}
    return {load: show(load, Times(step_s=found[load.requests])) for load in loads}


@contextlib.contextmanager
def ending(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Ends a process and its whole session at the end of the context."""
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 9)
        process.wait(30)


def stock_main(text: str) -> None:
    """Runs stock vLLM offline, in a separate process."""
    import vllm

    given = json.loads(text)
    llm = vllm.LLM(
        model=given["model"],
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=MAX_LEN,
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=MAX_TOKENS,
        block_size=BLOCK,
        kv_cache_memory_bytes=KV_LAYER_BYTES * LAYERS,
        compilation_config=json.loads(CAPTURE),
        **given["offload"],
    )

    def ask(requests: int, tokens: int) -> float:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        batch: Any = [{"prompt_token_ids": prompt} for prompt in prompts(requests)]
        start = time.perf_counter()
        answers = llm.generate(batch, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(answer.outputs[0].token_ids) == tokens for answer in answers)
        return seconds

    for requests, steps, rounds in given["loads"]:
        times = measure(Load(requests=requests, steps=steps, rounds=rounds), ask)
        print(f"\nSTEP {requests} {times.step_s}", flush=True)


def run(options: argparse.Namespace) -> dict[str, dict[Load, Times]]:
    """Returns the times of everything that was requested, by `kind/layers off the GPU`."""
    loads = [Load(requests=n, steps=options.steps, rounds=options.rounds) for n in options.requests]
    results: dict[str, dict[Load, Times]] = {}
    with tempfile.TemporaryDirectory(prefix="hi-") as scratch:
        folder = Path(scratch)
        whole = make_shape(folder / "whole", SHAPE, LAYERS)

        def one(name: str, work: Callable[[], dict[Load, Times]]) -> None:
            print(f"{name}", flush=True)
            try:
                results[name] = work()
            except (AssertionError, RuntimeError, OSError) as error:
                print(f"  FAILED: {str(error)[-6000:]}", flush=True)

        if "gpu" in options.only:
            one("gpu/0", partial(run_stock, whole, {}, loads, folder, "gpu"))
        for off in options.layers:
            on = LAYERS - off
            uva = {"cpu_offload_gb": off * LAYER_BYTES / GIB}
            prefetch = {"offload_backend": "prefetch", "offload_group_size": LAYERS // off}
            part = make_shape(folder / f"part-{on}", SHAPE, on)
            ours = plan_of(whole, [off, on], [Device.CPU, Device.GPU], options)
            alone = plan_of(part, [on], [Device.GPU], options)
            works: dict[str, Callable[[], dict[Load, Times]]] = {
                "ours": partial(run_group, ours, loads, folder / f"ours-{off}", options),
                "uva": partial(run_stock, whole, uva, loads, folder, f"uva-{off}"),
                "prefetch": partial(run_stock, whole, prefetch, loads, folder, f"prefetch-{off}"),
                "alone": partial(run_group, alone, loads, folder / f"alone-{off}", options),
            }
            for kind in options.only:
                if kind in works:
                    one(f"{kind}/{off}", works[kind])
    return results


def main() -> int:
    """Runs the comparison; see the module."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m tests.bench.offload")
    parser.add_argument("--layers", type=numbers, default=[4, 8, 16])
    parser.add_argument("--requests", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=["gpu", "ours", "uva", "prefetch", "alone"]
    )
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for our pods")
    parser.add_argument("--batches-in-flight", type=int, default=1)
    parser.add_argument("--compile-cpu", action="store_true")
    parser.add_argument("--results", type=Path, help="append to these results, and print all of them")
    parser.add_argument("--write", type=Path, help="write the tables to this file")
    parser.add_argument("--stock", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stock:
        stock_main(options.stock)
        return 0
    start = time.monotonic()
    results = read_results(options.results) | run(options)
    if options.results:
        write_results(options.results, results)
    page = to_markdown(results, options.layers)
    date = datetime.datetime.now(tz=datetime.UTC).date()
    print(f"\n{date}, {os.cpu_count()} cores, {time.monotonic() - start:.0f} s\n{page}")
    if options.write:
        options.write.write_text(page + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
