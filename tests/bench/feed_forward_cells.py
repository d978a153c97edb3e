"""Measures several ways to keep a model's experts off the GPU, in turns, cell by cell.

    python -m tests.bench.feed_forward_cells ours:24 gpu uva:24 [--requests 1,4,16,64] [--fp8] [...]
    python -m tests.bench.feed_forward_cells ours:6 ours:6:OMP_NUM_THREADS=14,OMP_PROC_BIND=true uva:6 gpu

A way is KIND[:LAYERS OFF[:NAME=VALUE,...]]. Kinds:

- `ours`: our group. The variables are for its pods.
- `shared`: our group, whose GPU computes a part of the experts of prompts.
- `gpu`: stock vLLM with all experts on the GPU.
- `uva`, `prefetch`: stock vLLM with offloaded experts.

Our groups start first, one after another, because they measure the CPUs at their start. Then the stock ones
start. During a measurement, all other ways are idle. Weights are random, routing is uniform, and the format
is bf16 or FP8 in blocks. A step is the time between two steps while all requests decode.

Before each cell of ours, a process with the rank's variables measures the rate of memory (the stream). Once,
a process copies pinned memory to the GPU (the link). A stock cell that is faster than the link is void,
because copying whole layers cannot take less time than their bytes over the link.

Results are printed and appended to `--results` at the same time. The tables are printed at the end, also
after `--deadline-seconds`. Needs one GPU and a Python with vLLM's CUDA and CPU builds, pydantic, and
operator/src. `--cpu` runs `ours` and `gpu` on the CPU with a tiny shape, to try the program.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from heteroinfer_contract import metric_names as names
from heteroinfer_contract.plan import BY_RATE, Device, Plan
from heteroinfer_operator.planning.moved_layers import spread_evenly
from tests.bench.exchange_trace import read_steps, to_table
from tests.bench.model_shapes import SHAPES, make_shape
from tests.gpu.scrape import scrape
from tests.integration.feed_forward.feed_forward_plans import feed_forward_plan
from tests.integration.worker.groups import Group, start_group

MAX_SEQS, BLOCK = 64, 32
MAX_LEN, PROMPTS_MAX_LEN = 512, 4096
"""Seconds of a run of decode steps, at least, if it also times first tokens."""
OURS = ("ours", "shared")
PROMPT_TOKENS = 16
PROMPT_TRIES = 3
CAPTURE = json.dumps({"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]})
ROUTING = {"VLLM_MOE_ROUTING_SIMULATION_STRATEGY": "uniform_random"}
GIB = 1 << 30
TRACING = Path(__file__).parent / "traced_exchange"
WARM_STEPS = 8
POLL_S = 0.02
CELL_LIMIT_S = 150.0
ABOUT_MS, DENSE_MS = {1: 1.0, 4: 3.0, 16: 8.0, 64: 14.0}, 5.0
"""Seconds for a layer off the GPU, from which a cell derives the tokens beyond the measured ones."""
EXCHANGE_MS = 0.02
SLACK = 1.15
"""A layer's bound is this factor of its active bytes at the stream's rate, plus an exchange."""
OUR_COLUMNS = (
    "| way | N | compute of CPU ranks, ms/layer | active bytes, MB/layer "
    "| reading rate of HeteroInfer's CPU ranks, GB/s | memory bandwidth of the host, GB/s | bound, ms/layer "
    "| within the bound | HeteroInfer, ms/layer | stock's best, ms/layer | speedup per layer "
    "| speedup per step |"
)
OUR_ENV = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
STOCK_ENV = {
    **OUR_ENV,
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",
}


def off_bytes(shape: str, *, fp8: bool) -> int:
    """Returns the bytes of a layer's experts, or of its MLP."""
    config = SHAPES[shape]
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    elements = 3 * config["hidden_size"] * width * config.get("num_experts", 1)
    return int(elements * (1 + 4 / 128**2 if fp8 else 2))


def prompts(requests: int) -> list[list[int]]:
    """Returns prompts that share no prefix."""
    return [[(7 * i + j) % 500 + 1 for j in range(PROMPT_TOKENS)] for i in range(requests)]


def long_prompts(tokens: int) -> list[list[int]]:
    """Returns prompts of this number of tokens. Their first blocks differ."""
    return [[(seed * 31 + 7 * j) % 500 + 1 for j in range(tokens)] for seed in range(PROMPT_TRIES)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to serve the model.

    Attributes:
        kind: ours, gpu, uva or prefetch.
        off: number of layers whose experts or MLPs are off the GPU.
        env: variables of our pods.
    """

    kind: str
    off: int = 0
    env: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> "Way":
        """Parses KIND[:OFF[:NAME=VALUE,...]]."""
        kind, off, env = (*text.split(":", 2), "", "")[:3]
        pairs = tuple(
            (name, value) for name, _, value in (pair.partition("=") for pair in env.split(",")) if name
        )
        return cls(kind=kind, off=int(off or 0), env=pairs)

    @property
    def name(self) -> str:
        """Returns the way as the user wrote it."""
        parts = [self.kind, str(self.off) if self.off else "", ",".join("=".join(pair) for pair in self.env)]
        return ":".join(parts).rstrip(":")


class Running(Protocol):
    """A way that has been started."""

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """Waits until the way can be measured. Returns facts about its start."""

    def measure(self, requests: int, steps: int) -> dict[str, Any]:
        """Measures one cell of this way."""

    def first_tokens(self, tokens: int) -> list[float]:
        """Returns the seconds until the first token of each of some prompts of this number of tokens."""

    def close(self) -> None:
        """Ends the processes of the way."""


@dataclass(slots=True)
class Ours:
    """Our group."""

    way: Way
    options: argparse.Namespace
    model: Path
    logs: Path
    stream: "Child | None" = None
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    _group: Group | None = None

    def start(self) -> None:
        """Starts the group, and a process that reads memory like its feed-forward rank."""
        options = self.options
        ring_mib = options.ring_mib if self.way.kind == "shared" else 0
        plan = plan_of(self.model, self.way.off, options, ring_mib=ring_mib)
        if options.cpu:
            plan = on_cpu(plan)
        env = {**OUR_ENV, **routing(options.shape), **dict(self.way.env), **self._tracing()}
        self._group = self._stack.enter_context(
            start_group(plan, self.logs, env=env, startup_timeout_s=options.start_timeout)
        )
        threads = dict(self.way.env).get("OMP_NUM_THREADS", str(options.threads))
        stream = {**dict(self.way.env), "OMP_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": "-1"}
        self.stream = Child("stream", {"gib": options.stream_gib}, stream)

    @property
    def trace(self) -> Path:
        """Returns the file with the timelines of long steps."""
        return self.logs / "trace.jsonl"

    def _tracing(self) -> dict[str, str]:
        """Returns the variables that make the GPU rank write timelines."""
        if not self.options.trace or self.way.kind != "shared":
            return {}
        path = os.pathsep.join(filter(None, [str(TRACING), os.environ.get("PYTHONPATH", "")]))
        return {"PYTHONPATH": path, "EXCHANGE_TRACE": str(self.trace.resolve())}

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """See `Running`."""
        assert self._group is not None
        assert self.stream is not None
        ready = self._group.wait_ready(timeout_s)
        self.stream.wait("READY", timeout_s)
        return {"ready_s": ready, **pages(self._group.rank_pid(1))}

    def measure(self, requests: int, steps: int) -> dict[str, Any]:
        """See `Running`."""
        assert self._group is not None
        assert self.stream is not None
        found = self.stream.ask({}, 60.0)
        about_ms = ABOUT_MS.get(requests, DENSE_MS) if routing(self.options.shape) else DENSE_MS
        about_s, max_len = self.way.off * about_ms / 1e3, max_len_of(self.options)
        return {**found, **measure_group(self._group, requests, steps, about_s, max_len)}

    def first_tokens(self, tokens: int) -> list[float]:
        """See `Running`."""
        assert self._group is not None
        times = []
        for prompt in long_prompts(tokens):
            start = time.perf_counter()
            self._group.complete(prompt, 1)
            times.append(time.perf_counter() - start)
        return times

    def close(self) -> None:
        """See `Running`."""
        if self.stream is not None:
            self.stream.close()
        self._stack.close()
        if self.trace.exists():
            print(f"{self.way.name}, {self.trace}:\n{to_table(read_steps(self.trace))}", flush=True)
            shown = ("measured", "GPU computes", "compute all experts")
            text = (self.logs / "pod-0.log").read_text(errors="replace")
            print(
                "\n".join(line for line in text.splitlines() if any(word in line for word in shown)),
                flush=True,
            )


def max_len_of(options: argparse.Namespace) -> int:
    """Returns the number of tokens of the longest request of a run."""
    longest = max([*options.prompts, PROMPTS_MAX_LEN - BLOCK]) + BLOCK
    return longest if options.prompts else MAX_LEN


def plan_of(
    model: Path, off: int, options: argparse.Namespace, share: int = BY_RATE, ring_mib: int = 0
) -> Plan:
    """Returns a plan with one GPU rank. Feed-forward ranks have `off` layers, spread as in a real plan."""
    plan = feed_forward_plan(
        model,
        num_layers=options.layers,
        remote=spread_evenly(range(options.layers), off),
        shares=[share] * options.lanes,
        device=Device.GPU,
        dtype="bfloat16",
        max_model_len=max_len_of(options),
        max_num_batched_tokens=options.chunk,
        max_num_seqs=MAX_SEQS,
        block_size=BLOCK,
        eager_gpu=False,
        ring_bytes=ring_mib << 20,
        extra_args=("--load-format", "dummy", "--compilation-config", CAPTURE, "--no-enable-prefix-caching"),
    )
    kv_bytes = int(options.kv_gib * GIB)
    return replace(plan, ranks=(replace(plan.ranks[0], kv_cache_bytes=kv_bytes), *plan.ranks[1:]))


def lane_counters(group: Group, rank: int) -> dict[str, float]:
    """Returns the sums of a feed-forward rank's counters."""
    total = scrape(group, rank).total
    return {
        "compute_s": total(names.FEED_FORWARD_COMPUTE_SECONDS_TOTAL),
        "asks": total(names.FEED_FORWARD_ASKS_TOTAL),
        "rows": total(names.FEED_FORWARD_ROWS_TOTAL),
        "experts": total(names.FEED_FORWARD_EXPERTS_TOTAL),
        "bytes": total(names.FEED_FORWARD_BYTES_TOTAL),
    }


def on_cpu(plan: Plan) -> Plan:
    """Returns the plan for a try without a GPU."""
    asking = replace(plan.ranks[0], device=Device.CPU, kv_cache_bytes=GIB // 4, ring_bytes=0)
    ranks = (asking, *plan.ranks[1:])
    return replace(plan, ranks=ranks)


def routing(shape: str) -> dict[str, str]:
    """Returns the variables for uniform routing, if the model is a mixture of experts."""
    return ROUTING if SHAPES[shape].get("num_experts") else {}


def measure_group(group: Group, requests: int, steps: int, about_s: float, max_len: int) -> dict[str, Any]:
    """Returns the time of a step while `requests` decode, and the share of the first feed-forward rank.

    Args:
        group: a group without other requests.
        requests: number of concurrent requests.
        steps: number of steps to measure.
        about_s: expected seconds of a step, so that requests need few tokens beyond the measured ones.
        max_len: tokens of the longest request.
    """
    tokens = min(max_len - 32, WARM_STEPS + steps + 12 + int(0.8 / max(0.002, about_s)))
    threads = [
        threading.Thread(target=group.complete, args=(prompt, tokens), daemon=True)
        for prompt in prompts(requests)
    ]

    def count() -> float:
        return scrape(group, 0).total(names.STEP_SECONDS + "_count", phase=names.PHASE_DECODE)

    first, deadline = count(), time.monotonic() + CELL_LIMIT_S
    for thread in threads:
        thread.start()
    while count() < first + WARM_STEPS and time.monotonic() < deadline:
        time.sleep(POLL_S)
    time.sleep(0.3)  # ranks publish their counters four times a second
    begin = count()
    while (before := count()) == begin and time.monotonic() < deadline:
        time.sleep(POLL_S / 10)  # until the counters change, at the end of a step
    start, lanes = time.perf_counter(), lane_counters(group, 1)
    now, end = before, start
    while now < before + steps and time.monotonic() < deadline and any(t.is_alive() for t in threads):
        time.sleep(POLL_S / 10 if now >= before + steps - 2 else POLL_S)
        found = count()
        if found > now:
            now, end = found, time.perf_counter()
    after = lane_counters(group, 1)
    for thread in threads:
        thread.join(CELL_LIMIT_S)
    spent = {key: after[key] - lanes[key] for key in after}
    asks = max(1.0, spent["asks"])
    return {
        "step_ms": (end - start) / max(1.0, now - before) * 1e3,
        "steps": now - before,
        "compute_ms": spent["compute_s"] / asks * 1e3,
        "rows": spent["rows"] / asks,
        "experts": spent["experts"] / asks,
        "active_mb": spent["bytes"] / asks / 1e6,
        "gb_s": spent["bytes"] / max(1e-9, spent["compute_s"]) / 1e9,
    }


def pages(pid: int) -> dict[str, float]:
    """Returns the GiB of a process's memory that are in huge pages."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            key, _, value = line.partition(":")
            if key in {"Rss", "AnonHugePages"}:
                found[f"{key}_gib"] = round(int(value.split()[0]) / 2**20, 2)
    return found


# Child processes of this program


class Child:
    """Runs a part of this module in a process. Questions are lines of JSON, answers are lines RESULT."""

    def __init__(
        self, part: str, given: Mapping[str, Any], env: Mapping[str, str], log: Path | None = None
    ) -> None:
        """Starts the process. Its output is appended to `log`."""
        command = [
            sys.executable,
            "-m",
            "tests.bench.feed_forward_cells",
            f"--part={part}",
            json.dumps(given),
        ]
        self._process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._lines: list[str] = []
        self._came = threading.Condition()
        self._log = log
        self._part = part
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Collects the lines of the process's output, and at its end an empty line."""
        assert self._process.stdout is not None
        with self._log.open("w") if self._log else contextlib.nullcontext() as log:
            for line in self._process.stdout:
                if log:
                    log.write(line)
                    log.flush()
                with self._came:
                    self._lines.append(line)
                    self._came.notify_all()
        with self._came:
            self._lines.append("")
            self._came.notify_all()

    def wait(self, word: str, timeout_s: float) -> str:
        """Waits for the next line that begins with `word`, and returns the rest of the line.

        Raises:
            RuntimeError: the process has ended, or there was no such line in time.
        """
        deadline, at = time.monotonic() + timeout_s, 0
        with self._came:
            while True:
                for number in range(at, len(self._lines)):
                    line = self._lines[number]
                    if line.startswith(word):
                        del self._lines[: number + 1]
                        return line[len(word) :].strip()
                    if not line:
                        raise RuntimeError(f"{self._part} ended:\n{''.join(self._lines[-25:])}")
                at = len(self._lines)
                if not self._came.wait(deadline - time.monotonic()):
                    raise RuntimeError(
                        f"{self._part}: no {word} in {timeout_s:.0f} s:\n{''.join(self._lines[-9:])}"
                    )

    def ask(self, what: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Sends one line, and returns the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        found: dict[str, Any] = json.loads(self.wait("RESULT", timeout_s))
        return found

    def last_line_with(self, word: str) -> str:
        """Returns the last line so far that contains `word`."""
        with self._came:
            return next((line.strip() for line in reversed(self._lines) if word in line), "")

    def close(self) -> None:
        """Ends the process and everything that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, 9)
        self._process.wait(30)


def answering(answer: Any) -> None:
    """Answers lines of JSON until stdin ends."""
    print("READY", flush=True)
    for line in sys.stdin:
        print("RESULT " + json.dumps(answer(**json.loads(line))), flush=True)


def stream_part(given: Mapping[str, Any]) -> None:
    """Reads memory with this process's threads: our linear kernel with one row, and a sum of integers."""
    import torch

    from vllm_heteroinfer.kernels import linear

    linear.prepare()
    rows, inputs = 16384, 4096
    dense = torch.full((rows, inputs), 0.001, dtype=torch.bfloat16)
    first = linear.pack(dense)
    weights = [first.clone() for _ in range(max(2, round(given["gib"] * GIB / first.nbytes)))]
    total = sum(weight.nbytes for weight in weights)
    x = torch.ones((1, inputs), dtype=torch.bfloat16)
    words = [weight.view(-1).view(torch.int64) for weight in weights]

    def best(read: Any) -> float:
        times = []
        for _ in range(4):
            start = time.perf_counter()
            read()
            times.append(time.perf_counter() - start)
        return total / sorted(times)[1] / 1e9

    def read(**_: Any) -> dict[str, Any]:
        with torch.inference_mode():
            product = best(lambda: [linear.linear(x, weight, None, rows) for weight in weights])
            added = best(lambda: [word.sum() for word in words])
        return {
            "stream_gb_s": round(max(product, added), 1),
            "stream_product": round(product, 1),
            "stream_sum": round(added, 1),
            "stream_threads": torch.get_num_threads(),
        }

    answering(read)


def link_part(given: Mapping[str, Any]) -> None:
    """Copies pinned memory to the GPU."""
    import torch

    del given
    if not torch.cuda.is_available():
        answering(lambda **_: {"link_gb_s": 0.0})
        return
    host = torch.empty(512 << 20, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(host, device="cuda")
    rates = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        rates.append(host.nbytes / (time.perf_counter() - start) / 1e9)
    answering(lambda **_: {"link_gb_s": round(max(rates), 1)})


@dataclass(slots=True)
class Stock:
    """Stock vLLM."""

    way: Way
    options: argparse.Namespace
    model: Path
    logs: Path
    _child: Child | None = None

    def start(self) -> None:
        """Starts its process."""
        options = self.options
        given = {
            "model": str(self.model),
            "offload": offload(self.way, options),
            "cpu": options.cpu,
            "max_len": max_len_of(options),
            "chunk": options.chunk,
            "kv_gib": options.kv_gib,
        }
        self.logs.mkdir(parents=True, exist_ok=True)
        env = {**STOCK_ENV, **routing(options.shape)}
        if options.cpu:  # if vLLM's simulated routing has ids that vLLM's experts refuse
            env = {**STOCK_ENV, "CUDA_VISIBLE_DEVICES": "-1"}
        self._child = Child("stock", given, env, self.logs / "stock.log")

    def wait_ready(self, timeout_s: float) -> dict[str, Any]:
        """See `Running`."""
        assert self._child is not None
        start = time.monotonic()
        self._child.wait("READY", timeout_s)
        text = (self.logs / "stock.log").read_text(errors="replace")
        notes = [
            line.split("]")[-1].strip() for line in text.splitlines() if "ffload" in line and "otal" in line
        ]
        return {"ready_s": round(time.monotonic() - start, 1), "said": " | ".join(notes)[-200:]}

    def measure(self, requests: int, steps: int) -> dict[str, Any]:
        """See `Running`."""
        assert self._child is not None
        return self._child.ask({"requests": requests, "steps": steps}, CELL_LIMIT_S)

    def first_tokens(self, tokens: int) -> list[float]:
        """See `Running`."""
        assert self._child is not None
        return [
            float(self._child.ask({"prompt": prompt}, CELL_LIMIT_S)["first_s"])
            for prompt in long_prompts(tokens)
        ]

    def close(self) -> None:
        """See `Running`."""
        if self._child is not None:
            self._child.close()


def offload(way: Way, options: argparse.Namespace) -> dict[str, Any]:
    """Returns vLLM's settings for a stock way."""
    what = "experts" if SHAPES[options.shape].get("num_experts") else "mlp"
    per_layer = off_bytes(options.shape, fp8=options.fp8)
    if way.kind == "uva":
        return {"cpu_offload_gb": way.off * per_layer / GIB, "cpu_offload_params": [what]}
    if way.kind == "prefetch":
        return {
            "offload_backend": "prefetch",
            "offload_group_size": options.layers // way.off,
            "offload_num_in_group": 1,
            "offload_prefetch_step": 1,
            "offload_params": [what],
        }
    return {}


def stock_part(given: Mapping[str, Any]) -> None:
    """Serves with stock vLLM, and runs its engine step by step."""
    import vllm

    settings: dict[str, Any] = {
        "kv_cache_memory_bytes": GIB // 4 if given["cpu"] else int(given["kv_gib"] * GIB),
        "gpu_memory_utilization": 0.1,  # other processes use the GPU, so the size of the KV cache is fixed
        "compilation_config": json.loads(CAPTURE),
        **{k: set(v) if isinstance(v, list) else v for k, v in given["offload"].items()},
    }
    if given["cpu"]:
        settings |= {"enforce_eager": True}
        del settings["gpu_memory_utilization"]
    llm = vllm.LLM(
        model=given["model"],
        dtype="bfloat16",
        load_format="dummy",
        max_model_len=given["max_len"],
        max_num_seqs=MAX_SEQS,
        max_num_batched_tokens=given["chunk"],
        enable_prefix_caching=False,
        **settings,
    )
    engine = llm.llm_engine
    cells = 0

    def decode(requests: int, steps: int) -> dict[str, Any]:
        """Decodes `requests` requests, and measures `steps` steps after WARM_STEPS steps.

        Only steps in which every request gets a token count.
        """
        nonlocal cells
        cells += 1
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=WARM_STEPS + steps + 4, ignore_eos=True, detokenize=False
        )
        for number, prompt in enumerate(prompts(requests)):
            engine.add_request(f"{cells}-{number}", {"prompt_token_ids": prompt}, sampling)
        times: list[float] = []
        while engine.has_unfinished_requests():
            outputs = engine.step()
            if len(outputs) == requests and all(output.outputs[0].token_ids for output in outputs):
                times.append(time.perf_counter())
        steady = times[WARM_STEPS : WARM_STEPS + steps + 1]
        return {"step_ms": (steady[-1] - steady[0]) / (len(steady) - 1) * 1e3, "steps": len(steady) - 1}

    one = vllm.SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)

    def answer(prompt: list[int] | None = None, **asked: int) -> dict[str, Any]:
        if prompt is None:
            return decode(**asked)
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt}], one, use_tqdm=False)
        return {"first_s": time.perf_counter() - start}

    decode(1, 4)
    answering(answer)


# The run


class Cells:
    """One run: the started ways, and the results so far."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self._began = options, time.monotonic()
        self.found: list[dict[str, Any]] = []
        self.running: dict[Way, Any] = {}

    def note(self, **values: Any) -> None:
        """Prints a result, and appends it to the file."""
        values = {k: round(v, 3) if isinstance(v, float) else v for k, v in values.items()}
        self.found.append(values)
        print("CELL " + json.dumps(values), flush=True)
        if self.options.results:
            with self.options.results.open("a") as file:
                run = {"shape": self.options.shape, "fp8": self.options.fp8}
                file.write(json.dumps({**run, **values}) + "\n")

    def left_s(self) -> float:
        """Returns the seconds until the deadline."""
        return float(self.options.deadline_seconds - (time.monotonic() - self._began))

    def start(self) -> None:
        """Starts every way, and waits until each can be measured. Notes those that fail."""
        options = self.options
        folder = Path(tempfile.mkdtemp(prefix="hi-shape-"))
        model = make_shape(folder, options.shape, options.layers, fp8=options.fp8)
        logs = Path(tempfile.mkdtemp(prefix="hi-cells-"))
        link = Child("link", {}, {})
        for number, way in enumerate(map(Way.parse, options.ways)):
            kind = Ours if way.kind in OURS else Stock
            self.running[way] = kind(way, options, model, logs / str(number))
        ours = [way for way in self.running if way.kind in OURS]
        for way in ours:
            self._bring_up([way])
        self._bring_up([way for way in self.running if way not in ours])
        with contextlib.suppress(RuntimeError):
            link.wait("READY", 60.0)
            self.note(link=True, **link.ask({}, 60.0))
        link.close()
        print(f"  all started after {time.monotonic() - self._began:.0f} s", flush=True)

    def _bring_up(self, ways: Sequence[Way]) -> None:
        """Starts ways at the same time. Notes the note or the error of each."""
        with ThreadPoolExecutor(max(1, len(ways))) as pool:
            limit_s = min(self.options.start_timeout, self.left_s())
            starts = {way: pool.submit(bring_up, self.running[way], limit_s) for way in ways}
        for way, start in starts.items():
            error = start.exception()
            if error is None:
                self.note(way=way.name, kind=way.kind, off=way.off, **start.result())
            else:
                self.fail(way, error)

    def fail(self, way: Way, error: BaseException, **more: Any) -> None:
        """Notes a failed way, and ends it."""
        self.note(way=way.name, kind=way.kind, off=way.off, failed=str(error)[-3000:], **more)
        self.running.pop(way).close()

    def measure(self) -> None:
        """Measures cell by cell, until the deadline: steps, then first tokens."""
        for requests in self.options.requests:
            self._each(partial(step_ms, requests, self.options.steps), N=requests)
        for tokens in self.options.prompts:
            self._each(partial(first_ms, tokens), prompt=tokens)
        print(f"  ended after {time.monotonic() - self._began:.0f} s", flush=True)

    def _each(self, ask: Callable[[Running], dict[str, Any]], **cell: int) -> None:
        """Measures a cell of every running way. Notes ways that fail, or for which no time is left."""
        for way, one in list(self.running.items()):
            if self.left_s() < self.options.cell_seconds:
                self.note(way=way.name, kind=way.kind, off=way.off, **cell, failed="no time left")
                continue
            try:
                found = ask(one)
            except (AssertionError, RuntimeError, OSError) as error:
                self.fail(way, error, **cell)
            else:
                self.note(way=way.name, kind=way.kind, off=way.off, **cell, **found)


def step_ms(requests: int, steps: int, one: Running) -> dict[str, Any]:
    """Measures one cell of a way."""
    return one.measure(requests, steps)


def first_ms(tokens: int, one: Running) -> dict[str, Any]:
    """Returns the milliseconds until the first token of each try."""
    return {"first_ms": [round(seconds * 1e3, 1) for seconds in one.first_tokens(tokens)]}


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts every way, measures cell by cell, and returns the results."""
    cells = Cells(options)
    with closing_all(cells.running), contextlib.suppress(KeyboardInterrupt):
        cells.start()
        cells.measure()
    return cells.found


def bring_up(one: Any, timeout_s: float) -> dict[str, Any]:
    """Starts a way. Returns its note when it is ready."""
    one.start()
    found: dict[str, Any] = one.wait_ready(timeout_s)
    return found


@contextlib.contextmanager
def closing_all(running: Mapping[Way, Running]) -> Iterator[None]:
    """Ends the remaining ways at the end of the context."""
    try:
        yield
    finally:
        with ThreadPoolExecutor(max(1, len(running))) as pool:
            list(pool.map(lambda one: one.close(), running.values()))


# Tables


def to_markdown(cells: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> str:
    """Returns a row for each cell, and a row for each cell of ours beside the stock ones."""
    link = next((cell["link_gb_s"] for cell in cells if cell.get("link")), 0.0)
    measured = [cell for cell in cells if "step_ms" in cell]
    alone = {cell["N"]: cell["step_ms"] for cell in measured if cell["kind"] == "gpu"}
    kept = "FP8 block" if options.fp8 else "bf16"
    lines = [
        f"{options.shape}, {options.layers} layers, {kept}; link {link} GB/s",
        "",
        "| way | N | ms/step | steps | additional time of a layer off the GPU, ms | void |",
        "|---|---|---|---|---|---|",
    ]
    for cell in measured:
        layer = beyond(cell, alone)
        shown = "" if layer is None else f"{layer:.3f}"
        void = is_void(cell, alone, link, options)
        step = f"{cell['step_ms']:.2f} | {cell['steps']:.0f}"
        lines.append(f"| {cell['way']} | {cell['N']} | {step} | {shown} | {void} |")
    lines += [
        "",
        OUR_COLUMNS,
        "|---" * 12 + "|",
    ]
    for cell in measured:
        if cell["kind"] in OURS:
            lines.append(our_row(cell, measured, alone, link, options))
    if options.prompts:
        lines += ["", "| way | prompt, tokens | first token, ms: each try |", "|---|---|---|"]
        found = [cell for cell in cells if "first_ms" in cell]
        lines += [f"| {c['way']} | {c['prompt']} | {' '.join(map(str, c['first_ms']))} |" for c in found]
    lines += [f"FAILED {c['way']} N={c.get('N', '-')}: {c['failed'][-400:]}" for c in cells if "failed" in c]
    return "\n".join(lines)


def beyond(cell: Mapping[str, Any], alone: Mapping[int, float]) -> float | None:
    """Returns the additional milliseconds of a layer off the GPU, compared with the GPU alone."""
    if not cell["off"] or cell["N"] not in alone:
        return None
    return (cell["step_ms"] - alone[cell["N"]]) / cell["off"]


def is_void(
    cell: Mapping[str, Any], alone: Mapping[int, float], link: float, options: argparse.Namespace
) -> str:
    """Returns "void" for a stock cell that moved more bytes than the link can."""
    if cell["kind"] not in {"uva", "prefetch"} or not link:
        return ""
    moved = off_bytes(options.shape, fp8=options.fp8) * cell["off"]
    experts = SHAPES[options.shape].get("num_experts", 0)
    if experts and cell["kind"] == "uva":
        moved *= 1 - (1 - SHAPES[options.shape]["num_experts_per_tok"] / experts) ** cell["N"]
    return "void" if moved / 1e9 / (cell["step_ms"] / 1e3) > 1.03 * link else ""


def our_row(
    cell: Mapping[str, Any],
    measured: Sequence[Mapping[str, Any]],
    alone: Mapping[int, float],
    link: float,
    options: argparse.Namespace,
) -> str:
    """Returns a row of a cell of ours, with its bound and the best stock way."""
    bound = SLACK * cell["active_mb"] / max(1e-9, cell["stream_gb_s"]) + EXCHANGE_MS
    layer = beyond(cell, alone)
    stock = [
        other
        for other in measured
        if other["kind"] in {"uva", "prefetch"} and (other["N"], other["off"]) == (cell["N"], cell["off"])
    ]
    steps = [other["step_ms"] for other in stock if not is_void(other, alone, link, options)]
    # Ways that copy whole layers cannot be faster than the link, measured or not.
    if link and not any(other["kind"] == "prefetch" for other in stock):
        steps.append(off_bytes(options.shape, fp8=options.fp8) * cell["off"] / link / 1e6)
    shown = ["-"] * 4
    if layer is not None:
        shown[0] = f"{layer:.3f}"
        if steps:
            best = min(steps)
            others = (best - alone[cell["N"]]) / cell["off"]
            shown[1:] = [f"{others:.3f}", f"{others / layer:.2f}", f"{best / cell['step_ms']:.2f}"]
    within = "yes" if (layer if layer is not None else cell["compute_ms"]) <= bound else "no"
    return (
        "| "
        + " | ".join(
            [
                cell["way"],
                str(cell["N"]),
                f"{cell['compute_ms']:.3f}",
                f"{cell['active_mb']:.1f}",
                f"{cell['gb_s']:.1f}",
                f"{cell['stream_gb_s']:.1f}",
                f"{bound:.3f}",
                within,
                *shown,
            ]
        )
        + " |"
    )


def main() -> int:
    """Runs the cells; see the module."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",") if number]

    parser = argparse.ArgumentParser(prog="python -m tests.bench.feed_forward_cells")
    parser.add_argument("ways", nargs="+", help="KIND[:LAYERS OFF[:NAME=VALUE,...]]")
    parser.add_argument("--part", help="for this program's own child processes")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--requests", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument(
        "--prompts", type=numbers, default=[], help="also time first tokens of prompts with these lengths"
    )
    parser.add_argument("--chunk", type=int, default=2048, help="largest number of tokens of a batch")
    parser.add_argument("--ring-mib", type=int, default=1024, help="MiB of the GPU's ring in `shared`")
    parser.add_argument("--kv-gib", type=float, default=4.0, help="GiB of KV cache of each way on the GPU")
    parser.add_argument("--trace", action="store_true", help="show the parts of the time of `shared`")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lanes", type=int, default=1)
    parser.add_argument(
        "--threads", type=int, default=13, help="threads of a feed-forward rank without OMP_NUM_THREADS"
    )
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--stream-gib", type=float, default=3.0)
    parser.add_argument(
        "--start-timeout", type=float, default=240.0, help="seconds after which a way is left out"
    )
    parser.add_argument(
        "--deadline-seconds", type=float, default=540.0, help="begin no cell shortly before this time"
    )
    parser.add_argument("--cell-seconds", type=float, default=70.0, help="seconds of the longest cell")
    parser.add_argument("--results", type=Path, help="append each cell to this file")
    parser.add_argument("--cpu", action="store_true", help="try the program without a GPU")
    options = parser.parse_args()
    if options.part:
        parts = {"stream": stream_part, "link": link_part, "stock": stock_part}
        parts[options.part](json.loads(options.ways[0]))
        return 0
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    cells = run(options)
    print(to_markdown(cells, options), flush=True)
    return 1 if any("failed" in cell for cell in cells) else 0


if __name__ == "__main__":
    sys.exit(main())
