"""Compares the planner's predictions of steps and first tokens with measured times of groups.

    python -m tests.bench.predictions [--groups dense,moe,fp8,awq] [--results FILE]
    python -m tests.bench.predictions --again FILE    predicts the measurements of FILE with this planner

The program calibrates this machine like `heteroinfer-worker calibrate`, plans each group with this
calibration, starts this plan with dummy weights, and measures it. Between the steps of a cell, it measures
the kernel of the group's CPU ranks again, with as many threads, and also predicts the cell from these
measurements. The reason: on a shared host, a calibration is true only for its own moment.

A step is the time between two tokens of one of the requests that decode together: the median of `--steps` of
them. A first token is the first token of a stream. `--devices-as-cpu` is a dry run with tiny models, for a
machine without a GPU. Needs a Python with vLLM's CUDA and CPU builds, pydantic, and worker_image/src and
operator/src.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from heteroinfer_contract import metric_names as names
from heteroinfer_contract.calibration import Calibration, KernelPart, KernelRate
from heteroinfer_contract.model import SchemeName
from heteroinfer_contract.model_files import read_profile
from heteroinfer_contract.pod_launch import engine_cpus
from heteroinfer_operator.api import parse_spec
from heteroinfer_operator.planning import GroupRequest, Inventory, Planned, make_plan
from heteroinfer_operator.planning.first_token import build_feed_forward_wait
from heteroinfer_operator.planning.prediction import StepLoad, forecast, forecast_first_token
from tests.bench.feed_forward_cells import CAPTURE, ROUTING
from tests.bench.kernel_rates import KernelRates, kernel_rates, mean_of, rate_of, with_kernel
from tests.bench.model_shapes import make_shape
from tests.bench.offload import counters, explain
from tests.gpu.scrape import scrape
from tests.integration.worker.groups import WORKER_PYTHON, Group, start_group
from tests.shapes.corpus import Shape, write_shape

START_TIMEOUT_S: Final = 400.0
CALIBRATE_TIMEOUT_S: Final = 120.0
WARM_STEPS: Final = 20
SHORT: Final = 16
"""Number of tokens of the prompts of many requests."""
LONGEST: Final = 17408
KV_TOKENS: Final = 40960
WITHIN: Final = 0.15
TURNS: Final = 3
"""Number of turns. In each turn, a cell's steps or prompts follow a measurement of the kernel."""
SETTLE_S: Final = 0.5
"""Seconds after which threads that have measured a kernel sleep."""
_TINY: Final[Mapping[str, Any]] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
}
_TINY_EXPERTS: Final[Mapping[str, Any]] = {"moe_intermediate_size": 256, "num_experts": 32}
_AWQ: Final[Mapping[str, Any]] = {
    "quantization_config": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
    }
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One group.

    Attributes:
        shape: name of a shape in `tests.bench.model_shapes`.
        layers: number of layers of the model.
        off: number of layers whose weights, or experts and MLPs, are on CPUs.
        feed_forward: whether mode FeedForward computes them there. Otherwise a CPU stage has them.
        fp8: whether weights are FP8 in blocks.
        awq: whether they are AWQ.
    """

    shape: str = "llama-8b"
    layers: int = 16
    off: int = 4
    feed_forward: bool = False
    fp8: bool = False
    awq: bool = False

    @property
    def kernel(self) -> tuple[KernelPart, SchemeName]:
        """Returns the kernel that its CPU ranks use nearly all of the time."""
        scheme = SchemeName.FP8_BLOCK if self.fp8 else SchemeName.AWQ if self.awq else SchemeName.NONE
        return (KernelPart.EXPERTS if self.feed_forward else KernelPart.LINEAR, scheme)


CASES: Final[Mapping[str, Case]] = {
    "dense": Case(),
    "moe": Case(shape="qwen3-30b-a3b", feed_forward=True),
    "fp8": Case(fp8=True),
    "awq": Case(awq=True),
    "moe-fp8": Case(shape="qwen3-30b-a3b", feed_forward=True, fp8=True),
    "moe-pipeline": Case(shape="qwen3-30b-a3b"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A predicted and measured number.

    Attributes:
        what: "step" or "first token".
        requests: number of requests at the same time.
        context: tokens of each request before the step, or of the prompt for a first token.
    """

    what: str
    requests: int
    context: int

    def predict(self, planned: Planned) -> float:
        """Returns the planner's prediction in seconds."""
        plan, sizes, rates = planned.plan, planned.sizes, planned.rates

        feed_forward_wait = build_feed_forward_wait(plan, sizes, rates, planned.remote)
        if self.what == "step":
            load = StepLoad(requests=self.requests, context=self.context)
            return forecast(plan, sizes, rates, load, feed_forward_wait).step_s
        return forecast_first_token(plan, sizes, rates, self.context, feed_forward_wait).step_s


class TimeIsOverError(Exception):
    """The deadline has passed."""


def make_model(case: Case, folder: Path, *, tiny: bool) -> Path:
    """Returns a folder with a case's model: its configuration, and a sparse file as weights."""
    make_shape(folder, case.shape, 4 if tiny else case.layers, fp8=case.fp8)
    config = json.loads((folder / "config.json").read_text())
    config |= {"max_position_embeddings": 32768, **(_AWQ if case.awq else {})}
    if tiny:
        config |= {**_TINY, **(_TINY_EXPERTS if "num_experts" in config else {})}
    return write_shape(Shape(name=case.shape, config=config), folder)


def compute_cpus(cpus: int) -> int:
    """Returns the CPUs for CPU ranks: all except one for the GPU rank, and those of the engine."""
    return max(cpus - 1 - engine_cpus(cpus), 1)


def plan_of(case: Case, model: Path, calibration: Calibration | None, cpus: int, *, tiny: bool) -> Planned:
    """Returns the planner's plan of a case, with enough KV cache for its requests.

    Args:
        case: the group.
        model: folder of the model.
        calibration: calibration of this machine.
        cpus: CPUs that this process may use.
        tiny: whether all ranks are on CPUs, with two of four layers off.
    """
    layers, off = (4, 2) if tiny else (case.layers, case.off)
    compute = compute_cpus(cpus)
    device: dict[str, Any] = {"device": "CPU"} if tiny else {"device": "GPU", "deviceMemory": "80Gi"}
    memory = {"memory": "8Gi" if tiny else "64Gi"}
    gpu: dict[str, Any] = {"name": "gpu", **device}
    if tiny:
        gpu["resources"] = {"requests": {"cpu": "1"}, "limits": memory}
    roles = [gpu]
    if case.feed_forward:
        gpu["feedForward"] = {"cpu": str(compute), "layers": off, **memory}
    else:
        gpu["layers"] = [layers - off]
        wanted = {"requests": {"cpu": str(compute)}, "limits": memory}
        roles.append({"name": "cpu", "device": "CPU", "layers": [off], "resources": wanted})
    capture = [] if tiny else ["--compilation-config", CAPTURE]
    spec = parse_spec(
        {
            "model": {"uri": f"file://{model}"},
            "engine": {
                "dtype": "bfloat16",
                "maxModelLen": LONGEST,
                "args": ["--load-format", "dummy", "--no-enable-prefix-caching", *capture],
            },
            "parallelism": {"mode": "FeedForward" if case.feed_forward else "Pipeline"},
            "roles": roles,
        }
    )
    inventory = Inventory(
        calibration={} if calibration is None else {role.name: calibration for role in spec.roles},
        cpu_features={role.name: frozenset({"AMX"}) for role in spec.roles},
    )
    request = GroupRequest(spec=spec, profile=read_profile(model), served_name="tiny", model_path=str(model))
    planned = make_plan(request, inventory)
    kv = planned.sizes.kv
    blocks = KV_TOKENS // kv.block_tokens
    ranks = tuple(
        rank
        if rank.feed_forward is not None
        else replace(rank, kv_cache_bytes=blocks * kv.block_bytes(rank.first_layer, rank.end_layer))
        for rank in planned.plan.ranks
    )
    return replace(planned, plan=replace(planned.plan, ranks=ranks))


# Measuring


def prompt(seed: int, tokens: int) -> list[int]:
    """Returns a prompt that shares no prefix with prompts of other seeds."""
    return [(131 * seed + 7 * j) % 500 + 1 for j in range(tokens)]


def stream(group: Group, tokens_of_prompt: Sequence[int], tokens: int) -> tuple[float, list[float]]:
    """Returns the time of a request, and of each of its tokens, in seconds of one clock."""
    body = {
        "model": group.plan.engine.served_name,
        "prompt": list(tokens_of_prompt),
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "max_tokens": tokens,
        "stream": True,
    }
    request = urllib.request.Request(
        group.url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    times: list[float] = []
    start = time.perf_counter()
    with urllib.request.urlopen(request, timeout=180) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                choices = json.loads(line[6:])["choices"]
                count = len(choices[0].get("token_ids") or ()) if choices else 0
                times += [now] * count
    return start, times


def steps_of(times: Sequence[float]) -> list[float]:
    """Returns the times between a stream's tokens. Tokens that arrive together share the time before them."""
    arrivals = list(Counter(times).items())
    return [
        (after - before) / tokens
        for (before, _), (after, tokens) in pairwise(arrivals)
        for _ in range(tokens)
    ]


def summary(steps: Sequence[float]) -> dict[str, float]:
    """Returns the median, the mean and the number of steps."""
    return {"step_s": statistics.median(steps), "mean_s": statistics.fmean(steps), "steps": len(steps)}


def measure_steps(
    group: Group, requests: int, steps: int, look: Callable[[], None] | None = None
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """Measures steps while this number of requests decodes. Also returns the parts of ranks' mean steps.

    One of the requests is a stream, whose times are measured. Nothing reads metrics in the meantime, because
    that takes time from a rank.

    Args:
        group: a ready group.
        requests: number of requests at the same time.
        steps: number of steps to measure, in TURNS turns.
        look: called before each turn, and after the last one.
    """
    tokens = 2 * WARM_STEPS + steps // TURNS + 1
    ranks = range(len(group.plan.ranks))
    before = [counters(group, rank) for rank in ranks]
    found: list[float] = []
    for turn in range(TURNS):
        if look is not None:
            look()
        others = [
            threading.Thread(target=group.complete, args=(prompt(number, SHORT), tokens), daemon=True)
            for number in range(1 + turn * requests, (turn + 1) * requests)
        ]
        for thread in others:
            thread.start()
        _, times = stream(group, prompt(turn * requests, SHORT), tokens)
        for thread in others:
            thread.join(120)
        found += steps_of(times[WARM_STEPS : WARM_STEPS + steps // TURNS + 1])
    if look is not None:
        look()
    parts = [explain(then, counters(group, rank)) for rank, then in zip(ranks, before, strict=True)]
    return summary(found), parts


def measure_prompts(
    group: Group, length: int, steps: int, look: Callable[[], None]
) -> tuple[list[float], list[float], list[dict[str, float]]]:
    """Measures first tokens of prompts and the steps after them.

    Also returns the parts of ranks' mean prompts.

    Args:
        group: a ready group.
        length: tokens of each prompt.
        steps: number of steps to measure, in TURNS turns.
        look: called before each turn, and after the last one.
    """
    first: list[float] = []
    found: list[float] = []
    ranks = range(len(group.plan.ranks))
    before = [prompt_seconds(group, rank) for rank in ranks]
    for turn in range(TURNS):
        look()
        start, times = stream(group, prompt(3000 + turn + length, length), WARM_STEPS + steps // TURNS + 1)
        first.append(times[0] - start)
        found += steps_of(times[WARM_STEPS:])
    look()  # after that, the ranks have counted all steps
    parts = [
        {part: round((now - then[part]) / TURNS, 6) for part, now in prompt_seconds(group, rank).items()}
        for rank, then in zip(ranks, before, strict=True)
    ]
    return first, found, parts


def prompt_seconds(group: Group, rank: int) -> dict[str, float]:
    """Returns a rank's seconds in prompts' steps, and in all asks that it has answered.

    The asks include those of decode steps.
    """
    total = scrape(group, rank).total
    prefill = {"phase": names.PHASE_PREFILL}
    return {
        "step": total(names.STEP_SECONDS + "_sum", **prefill),
        "compute": total(names.COMPUTE_SECONDS + "_sum", **prefill),
        "wait": total(names.WAIT_SECONDS + "_sum", **prefill),
        "device": total(names.DEVICE_SECONDS + "_sum", **prefill),
        "asks": total(names.FEED_FORWARD_COMPUTE_SECONDS_TOTAL),
    }


@dataclass(slots=True, kw_only=True)
class Predictor:
    """Predicts a group from the calibration, and from measurements of its kernel during a cell.

    Attributes:
        name: name of the case.
        model: folder of the model.
        planned: plan by the calibration.
        cpus: CPUs that this process may use.
        tiny: see `plan_of`.
        rates: measures the kernels.
        looks: measurements since the cell began.
    """

    name: str
    model: Path
    planned: Planned
    cpus: int
    tiny: bool
    rates: KernelRates
    looks: list[KernelRate] = field(default_factory=list)

    def look(self) -> None:
        """Measures the group's kernel again."""
        self.looks.append(self.rates.now(*CASES[self.name].kernel))
        time.sleep(SETTLE_S)

    def plan_now(self) -> tuple[Planned, KernelRate]:
        """Returns the plan by the mean of the measurements, and this mean. Then the next cell begins."""
        mean = mean_of(self.looks)
        self.looks.clear()
        calibration = with_kernel(self.rates.calibration, mean)
        return plan_of(CASES[self.name], self.model, calibration, self.cpus, tiny=self.tiny), mean


@dataclass(slots=True, kw_only=True)
class Results:
    """The results so far. The file is written after each cell.

    Attributes:
        file: file, or None.
        value: calibration, settings, and a list of cells.
    """

    file: Path | None
    value: dict[str, Any]

    def add(self, name: str, cell: Cell, predictor: "Predictor", measured_s: float, **more: Any) -> None:
        """Records and prints a cell."""
        planned_now, kernel = predictor.plan_now()
        predicted_s, now_s = cell.predict(predictor.planned), cell.predict(planned_now)
        self.value["cells"].append(
            {
                "group": name,
                "what": cell.what,
                "requests": cell.requests,
                "context": cell.context,
                "predicted_s": predicted_s,
                "now_s": now_s,
                "measured_s": measured_s,
                "kernel": asdict(kernel),
                **more,
            }
        )
        self.keep()
        print(
            f"CELL {name} {cell.what} N={cell.requests} context={cell.context}: predicted "
            f"{predicted_s * 1e3:.1f} ms, by the kernel's rates {now_s * 1e3:.1f} ms, measured "
            f"{measured_s * 1e3:.1f} ms, ratio {measured_s / now_s:.2f} "
            f"{json.dumps(asdict(kernel))} {json.dumps(more)}",
            flush=True,
        )

    def keep(self) -> None:
        """Writes the file."""
        if self.file is not None:
            self.file.write_text(json.dumps(self.value, indent=1) + "\n")


def measure_group(
    name: str, predictor: Predictor, group: Group, options: argparse.Namespace, results: Results
) -> None:
    """Measures a ready group, the most valuable cells first."""
    stream(group, prompt(1000, SHORT), 4)
    measure_steps(group, max(options.requests), 5)  # warms up
    for requests in options.requests:
        cell = Cell(what="step", requests=requests, context=SHORT + WARM_STEPS + options.steps // TURNS // 2)
        found, parts = measure_steps(group, requests, options.steps, predictor.look)
        rounded = [{key: round(value, 6) for key, value in each.items()} for each in parts]
        results.add(name, cell, predictor, found.pop("step_s"), **found, ranks=rounded)
    for length in options.contexts:
        stream(group, prompt(2000 + length, min(length, 4096)), 2)  # warms up
        first, steps, parts = measure_prompts(group, length, options.steps, predictor.look)
        looks = list(predictor.looks)
        cell = Cell(what="first token", requests=1, context=length)
        results.add(name, cell, predictor, statistics.median(first), prompts=first, ranks=parts)
        predictor.looks += looks
        found = summary(steps)
        cell = Cell(what="step", requests=1, context=length + WARM_STEPS + options.steps // TURNS // 2)
        results.add(name, cell, predictor, found.pop("step_s"), **found)


@dataclass(slots=True, kw_only=True)
class Started:
    """A group that starts, or has started."""

    name: str
    model: Path
    planned: Planned
    closing: contextlib.ExitStack
    group: Group | None = None
    ready_s: float = 0.0


def start(
    name: str, model: Path, planned: Planned, options: argparse.Namespace, started: list[Started]
) -> Started:
    """Starts a group, and waits until it is ready."""
    caches = options.caches
    env = {
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        # vLLM's own CPU kernels for experts refuse the indices of simulated routing, but feed-forward ranks
        # accept them.
        **(ROUTING if CASES[name].feed_forward and not options.devices_as_cpu else {}),
        **dict(setting.split("=", 1) for setting in options.env),
    }
    folder = Path(tempfile.mkdtemp(prefix=f"hi-{name}-"))
    this = Started(name=name, model=model, planned=planned, closing=contextlib.ExitStack())
    started.append(this)
    this.group = this.closing.enter_context(
        start_group(planned.plan, folder, env=env, startup_timeout_s=START_TIMEOUT_S)
    )
    try:
        this.ready_s = this.group.wait_ready(START_TIMEOUT_S)
    except BaseException:
        print(f"FAILED {name} did not start:\n{this.group.logs()[-6000:]}", flush=True)
        this.closing.close()
        raise
    print(f"  {name}: ready after {this.ready_s:.0f} s", flush=True)
    return this


def end_all(started: Sequence[Started]) -> None:
    """Ends every group at the same time, also those that are starting."""
    for each in started:
        for child in each.group.children if each.group else ():
            with contextlib.suppress(ProcessLookupError):
                child.process.send_signal(signal.SIGTERM)
    limit = time.monotonic() + 10
    for each in started:
        for child in each.group.children if each.group else ():
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(max(limit - time.monotonic(), 0.1))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.process.pid, signal.SIGKILL)


def run(options: argparse.Namespace, results: Results, calibration: Calibration, cpus: int) -> None:
    """Starts and measures the groups. Some run at the same time, but only the measured one gets requests."""
    wanted = list(options.groups)
    started: list[Started] = []
    try:
        with (
            tempfile.TemporaryDirectory(prefix="hi-shapes-") as scratch,
            kernel_rates(calibration, compute_cpus(cpus)) as rates,
        ):
            while wanted:
                batch, wanted = wanted[: options.at_once], wanted[options.at_once :]
                pool = ThreadPoolExecutor(len(batch))
                futures: list[tuple[str, Future[Started]]] = []
                for name in batch:
                    model = make_model(CASES[name], Path(scratch) / name, tiny=options.devices_as_cpu)
                    planned = plan_of(CASES[name], model, calibration, cpus, tiny=options.devices_as_cpu)
                    futures.append((name, pool.submit(start, name, model, planned, options, started)))
                for name, future in futures:
                    with _telling(name):
                        future.result()
                for name, future in futures:
                    if future.exception() is None:
                        _measure_started(name, future.result(), rates, cpus, options, results)
    except BaseException:
        end_all(started)
        raise


def _measure_started(
    name: str, this: Started, rates: KernelRates, cpus: int, options: argparse.Namespace, results: Results
) -> None:
    """Measures a group that has started, and ends it. An error is printed with the end of its logs."""
    with _telling(name), this.closing:
        assert this.group is not None
        predictor = Predictor(
            name=name,
            model=this.model,
            planned=this.planned,
            cpus=cpus,
            tiny=options.devices_as_cpu,
            rates=rates,
        )
        try:
            measure_group(name, predictor, this.group, options, results)
        except Exception:
            print(this.group.logs()[-6000:], flush=True)
            raise


@contextlib.contextmanager
def _telling(name: str) -> Iterator[None]:
    """Prints the error of a failed group, and continues with the next one."""
    try:
        yield
    except (AssertionError, RuntimeError, OSError, IndexError) as error:
        print(f"FAILED {name}: {str(error)[-2000:]}", flush=True)


def calibrate(file: Path) -> Calibration:
    """Runs the worker's own calibration of this machine, and stores it."""
    command = [str(WORKER_PYTHON), "-m", "vllm_heteroinfer.launch.cli", "calibrate", "-o", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CALIBRATE_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError(f"calibrate ended with {done.returncode}: {done.stderr[-3000:]}")
    return Calibration.from_json(file.read_text())


def table(value: Mapping[str, Any]) -> str:
    """Returns the table of cells, and how many are within the limit."""
    lines = [
        "| group | what | requests | context | predicted ms | by the looks ms | measured ms | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    by_calibration = by_now = 0
    for cell in value["cells"]:
        measured_s, predicted_s, now_s = cell["measured_s"], cell["predicted_s"], cell["now_s"]
        within = abs(now_s / measured_s - 1) <= WITHIN
        by_now += within
        by_calibration += abs(predicted_s / measured_s - 1) <= WITHIN
        bold = "**" if within else ""
        lines.append(
            f"| {cell['group']} | {cell['what']} | {cell['requests']} | {cell['context']} "
            f"| {predicted_s * 1e3:.1f} | {now_s * 1e3:.1f} | {measured_s * 1e3:.1f} "
            f"| {bold}{measured_s / now_s:.2f}{bold} |"
        )
    summary_line = (
        f"{by_now} of {len(value['cells'])} cells within {WITHIN:.0%} of the measured time as predicted by "
        f"the looks, {by_calibration} as predicted by the calibration"
    )
    return "\n".join([*lines, "", summary_line])


def again(file: Path) -> str:
    """Returns the table of stored measurements, predicted again from the stored calibration."""
    value = json.loads(file.read_text())
    calibration = Calibration.from_json(json.dumps(value["calibration"]))
    with tempfile.TemporaryDirectory(prefix="hi-shapes-") as scratch:
        models = {
            name: make_model(CASES[name], Path(scratch) / name, tiny=value["tiny"])
            for name in {cell["group"] for cell in value["cells"]}
        }
        for each in value["cells"]:
            case, model = CASES[each["group"]], models[each["group"]]
            cell = Cell(what=each["what"], requests=each["requests"], context=each["context"])
            for name, known in (
                ("predicted_s", calibration),
                ("now_s", with_kernel(calibration, rate_of(each["kernel"]))),
            ):
                planned = plan_of(case, model, known, value["cpus"], tiny=value["tiny"])
                each[name] = cell.predict(planned)
    return table(value)


def main() -> int:
    """Runs the benchmark; see the module."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    def groups(text: str) -> list[str]:
        unknown = set(text.split(",")) - set(CASES)
        if unknown:
            raise argparse.ArgumentTypeError(f"got {sorted(unknown)}, expected some of {', '.join(CASES)}")
        return text.split(",")

    parser = argparse.ArgumentParser(prog="python -m tests.bench.predictions")
    parser.add_argument("--groups", type=groups, default=["dense", "moe", "fp8", "awq"])
    parser.add_argument("--requests", type=numbers, default=[1, 4, 16, 64])
    parser.add_argument("--contexts", type=numbers, default=[1024, 16384])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--at-once", type=int, default=2, help="groups that start at the same time")
    parser.add_argument(
        "--deadline-seconds", type=float, help="print the results so far after this time, and end"
    )
    parser.add_argument("--calibration", type=Path, help="use this calibration of this machine")
    parser.add_argument("--results", type=Path, help="file for all cells and the calibration")
    parser.add_argument("--caches", type=Path, default=Path(tempfile.gettempdir()) / "hi-caches")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for our pods")
    parser.add_argument("--devices-as-cpu", action="store_true", help="a dry run with tiny models")
    parser.add_argument(
        "--again", type=Path, metavar="FILE", help="predict FILE's cells again, without measurements"
    )
    options = parser.parse_args()
    if options.again is not None:
        print(again(options.again))
        return 0
    from vllm_heteroinfer.calibration.hardware import usable_cpus

    begin, cpus = time.monotonic(), len(usable_cpus())

    def over(*_: object) -> None:
        raise TimeIsOverError

    results = Results(file=options.results, value={"tiny": options.devices_as_cpu, "cpus": cpus, "cells": []})
    if options.deadline_seconds:
        signal.signal(signal.SIGALRM, over)
        signal.setitimer(signal.ITIMER_REAL, options.deadline_seconds)
    try:
        with tempfile.TemporaryDirectory(prefix="hi-calibration-") as scratch:
            calibration = (
                calibrate(Path(scratch) / "calibration.json")
                if options.calibration is None
                else Calibration.from_json(options.calibration.read_text())
            )
        results.value["calibration"] = json.loads(calibration.to_json())
        results.keep()
        print(f"calibration after {time.monotonic() - begin:.0f} s: {calibration.to_json()}", flush=True)
        run(options, results, calibration, cpus)
    except TimeIsOverError:
        print(f"the time of {options.deadline_seconds:.0f} s is over", flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(f"\n{cpus} CPUs, {time.monotonic() - begin:.0f} s\n{table(results.value)}", flush=True)
    sys.stdout.flush()
    os._exit(0)  # so that no remaining thread keeps this process alive


if __name__ == "__main__":
    sys.exit(main())
