"""Compares a CPU group of two stages with stock vLLM (`--nnodes 2`): tokens per second and start-up.

    .venv/bin/python -m tests.bench.pipeline_vs_stock [--write FILE]

Both groups run at the same time, and only the group that is measured gets requests. Rounds alternate, so that
other load on the machine affects both. Exits 1 if our group has less than 0.95 of stock vLLM's tokens per
second.
"""

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.integration.worker.conftest import make
from tests.integration.worker.groups import WORKER_PYTHON, build_plan, fetch, start_group
from tests.ports import free_ports

BAR = 0.95
START_TIMEOUT_S = 400.0
STOP_TIMEOUT_S = 20.0
SETTLE_S = 1.2
"""Readers of vLLM's queues spin for 1 s after their last message (shm_broadcast.py::SpinCondition@v0.32.0).
The pause prevents that one group spins during the other group's round."""
PROMPTS = tuple([(100 + i + j) % 500 for j in range(24)] for i in range(64))

STOCK = """
import sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
validate_parsed_serve_args(args)
if args.headless:
    from vllm.entrypoints.cli.serve import run_headless
    args.api_server_count = 0
    run_headless(args)
else:
    import uvloop
    from vllm.entrypoints.launchers.api_server.entry import run_server
    uvloop.run(run_server(args))
"""
"""`vllm serve` without the main function of its command line, which fails in the CPU build (facts:
Install)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests of a round: their number at the same time, and the tokens of each."""

    concurrency: int
    tokens: int


def ask(url: str, load: Load) -> float:
    """Returns the tokens a second of one round."""

    def one(prompt: Sequence[int]) -> int:
        """Sends one request, and returns the number of its tokens."""
        body = {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": load.tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        request = urllib.request.Request(
            url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            return int(json.load(answer)["usage"]["completion_tokens"])

    start = time.perf_counter()
    with ThreadPoolExecutor(load.concurrency) as pool:
        total = sum(pool.map(one, PROMPTS[: load.concurrency]))
    return total / (time.perf_counter() - start)


@contextlib.contextmanager
def start_stock(model: Path, log_dir: Path, env: dict[str, str]) -> Iterator[tuple[str, float]]:
    """Starts stock vLLM on two `nodes`. Yields its URL and its start-up time in seconds."""
    api, master = free_ports(2)
    settings = build_plan(model, layers=[4, 4], pods=[1, 1], eager_cpu=False).engine
    common = [
        *("--model", str(model), "--served-model-name", "tiny", "--dtype", settings.dtype),
        *("--max-model-len", str(settings.max_model_len), "--block-size", str(settings.block_size)),
        *("--max-num-batched-tokens", str(settings.max_num_batched_tokens)),
        *("--max-num-seqs", str(settings.max_num_seqs), "--kv-cache-memory-bytes", str(64 << 20)),
        *("--pipeline-parallel-size", "2", "--nnodes", "2", "--distributed-executor-backend", "mp"),
        *("--master-addr", "127.0.0.1", "--master-port", str(master)),
        *("--host", "127.0.0.1", "--port", str(api)),
    ]
    full = {
        **os.environ,
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        **env,
    }
    start = time.monotonic()
    processes = []
    try:
        for node, extra in enumerate([[], ["--headless"]]):
            with (log_dir / f"stock-{node}.log").open("wb") as out:
                processes.append(
                    subprocess.Popen(
                        [str(WORKER_PYTHON), "-c", STOCK, *common, "--node-rank", str(node), *extra],
                        env=full,
                        stdout=out,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        url = f"http://127.0.0.1:{api}"
        while fetch(url + "/health") is None:
            if time.monotonic() - start > START_TIMEOUT_S or any(p.poll() is not None for p in processes):
                logs = [path.read_text()[-3000:] for path in sorted(log_dir.glob("stock-*.log"))]
                raise RuntimeError("stock vLLM did not start:\n" + "\n---\n".join(logs))
            time.sleep(0.1)
        yield url, time.monotonic() - start
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_TIMEOUT_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # workers of a follower survive a SIGTERM
            process.wait(STOP_TIMEOUT_S)


def measure(
    rounds: int, loads: Sequence[Load]
) -> tuple[dict[str, float], dict[Load, dict[str, list[float]]]]:
    """Returns start-up times, and tokens/s of every round, of `ours` and `stock`."""
    env = {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model = make(folder / "model")
        plan = build_plan(model, layers=[4, 4], pods=[1, 1], eager_cpu=False)
        warm_caches(folder, env, model)
        with (
            start_group(plan, folder / "ours", env=env) as ours,
        ):
            started = {"ours": ours.wait_ready(START_TIMEOUT_S)}
            with start_stock(model, folder, env) as (stock_url, started["stock"]):
                urls = {"ours": ours.url, "stock": stock_url}
                rates: dict[Load, dict[str, list[float]]] = {}
                for load in loads:
                    rates[load] = {"ours": [], "stock": []}
                    for turn in range(rounds + 1):
                        order = ("ours", "stock") if turn % 2 else ("stock", "ours")
                        for name in order:
                            time.sleep(SETTLE_S)
                            rate = ask(urls[name], load)
                            if turn:  # the first round warms up
                                rates[load][name].append(rate)
                            print(f"{load} {name}: {rate:.1f} tokens/s", flush=True)
        return started, rates


def warm_caches(folder: Path, env: dict[str, str], model: Path) -> None:
    """Runs a group once, so that neither measured start has to fill the compiler's caches."""
    plan = build_plan(model, layers=[4, 4], pods=[1, 1], eager_cpu=False)
    with start_group(plan, folder / "warm", env=env) as group:
        group.wait_ready(START_TIMEOUT_S)


def to_markdown(
    started: dict[str, float], rates: dict[Load, dict[str, list[float]]], rounds: int, command: str
) -> str:
    """Returns the section of docs/user/benchmarks.md."""
    rows = [
        f"| {load.concurrency} of {load.tokens} tokens | {statistics.median(by['ours']):.1f} | "
        f"{statistics.median(by['stock']):.1f} | {ratio(by):.2f} |"
        for load, by in rates.items()
    ]
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    busy = os.getloadavg()[1]
    date = datetime.datetime.now(tz=datetime.UTC).date()
    return f"""## Pipeline of two CPU stages against stock vLLM

Ours (two pods under supervisors) against stock vLLM 0.32.0 `--nnodes 2 --pipeline-parallel-size 2`, the same
random Llama-shaped model (8 layers, 256 wide, float32), prompts and settings, torch.compile on, one thread a
stage, prefix caching as by default. Medians of {rounds} alternating rounds, both groups up at the same time.

{os.cpu_count()} cores of {cpu}, load average {busy:.1f} during the run, {date}.
Command: `{command}`

| requests | ours, tokens/s | stock, tokens/s | ours / stock |
|---|---|---|---|
{chr(10).join(rows)}

| start-up to the first answer possible | ours | stock |
|---|---|---|
| seconds, compiler caches warm | {started["ours"]:.1f} | {started["stock"]:.1f} |
"""


def ratio(by: dict[str, list[float]]) -> float:
    """Returns ours / stock, as the median over pairs of neighbouring rounds."""
    return statistics.median(a / b for a, b in zip(by["ours"], by["stock"], strict=True))


def main() -> int:
    """Runs the comparison; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.pipeline_vs_stock")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", type=Path, help="write the section to this file")
    args = parser.parse_args()
    loads = [
        Load(concurrency=1, tokens=128),
        Load(concurrency=4, tokens=128),
        Load(concurrency=16, tokens=128),
    ]
    started, rates = measure(args.rounds, loads)
    command = "python -m tests.bench.pipeline_vs_stock" + (
        f" --rounds {args.rounds}" if args.rounds != 7 else ""
    )
    page = to_markdown(started, rates, args.rounds, command)
    print(page)
    if args.write:
        args.write.write_text(page)
    worst = min(ratio(by) for by in rates.values())
    print(f"worst ratio {worst:.2f}, bar {BAR}")
    return 0 if worst >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
