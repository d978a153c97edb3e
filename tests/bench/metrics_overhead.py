"""Measures the time that a group's metrics add to a decode step, if they are scraped every second.

    python -m tests.bench.metrics_overhead [--shape 8b|tiny] [--rounds 20] [--write FILE]

Two groups of one shape run at the same time, one with metrics and one without. Only the measured group gets
requests. Rounds alternate, so that other load of the machine affects both groups. A step is the time of one
long answer divided by its tokens. The program repeats the measurement with new groups in the other order,
because the memory of two processes of one program differs.

If the noise of the machine is larger than the limit, this comparison shows little. So the program also times
the additional work alone, in one process: the counting of a step and the answer to a scrape, as a share of
the step. Exits 1 if this share is 1 % or more, or if the whole interval of the median of the pairs is above 1
%.

Shapes:

    8b      8B-shaped dummy weights in bf16, 4 layers in a CPU stage and 28 in a GPU stage after it
    tiny    the tests' small model on two CPU ranks, whose step of few milliseconds is the worst case
"""

import argparse
import contextlib
import datetime
import itertools
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from prometheus_client import generate_latest

from heteroinfer_contract import names
from heteroinfer_contract.plan import Device, Plan
from heteroinfer_contract.pod_launch import PodAddress, PodLaunch
from tests.bench import offload
from tests.bench.model_shapes import make_shape
from tests.bench.pipeline_vs_stock import SETTLE_S
from tests.gpu.machine import describe_cpus, describe_gpus, visible_gpus
from tests.integration.worker.conftest import make
from tests.integration.worker.groups import Group, build_plan, fetch, start_group
from vllm_heteroinfer.pod.channel import RankChannel, RankReporter
from vllm_heteroinfer.rank.step_metrics import RankMetrics

BAR = 0.01
SCRAPE_INTERVAL_S = 1.0
START_TIMEOUT_S = 500.0
ON, OFF = "on", "off"
STEPS = 2000
HEADINGS = (
    "| shape | on, ms a step | off, ms a step | median of pairs (95 % interval), pairs "
    f"| counting, us a step | scrape, ms | both, of a step, scraped every {SCRAPE_INTERVAL_S:.0f} s |"
)
LAUNCH = PodLaunch(
    group="bench/x/0", group_uid="u", epoch=1, pod_index=0, addresses=(PodAddress(host="127.0.0.1"),)
)
PROMPT = tuple((100 + i) % 500 for i in range(24))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two neighbouring rounds: seconds of a step with metrics, and without."""

    on_s: float
    off_s: float

    @property
    def overhead(self) -> float:
        """Returns the time that metrics added, as a share of the step without metrics."""
        return self.on_s / self.off_s - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The additional work of metrics: seconds of a step, and of the answer to a scrape."""

    step_s: float
    scrape_s: float

    def share(self, step_s: float) -> float:
        """Returns both as a share of a step of `step_s` seconds."""
        return self.step_s / step_s + self.scrape_s / SCRAPE_INTERVAL_S


def plan_of(shape: str, folder: Path) -> Plan:
    """Returns the plan of both groups."""
    if shape == "tiny":
        return build_plan(make(folder / "tiny"), layers=[4, 4], pods=[1, 1], eager_cpu=False)
    model = make_shape(folder / "model", offload.SHAPE, offload.LAYERS)
    options = argparse.Namespace(compile_cpu=False, batches_in_flight=1)
    return offload.plan_of(model, [4, offload.LAYERS - 4], [Device.CPU, Device.GPU], options)


def step_s(group: Group, tokens: int) -> float:
    """Returns the seconds of a step in one long answer."""
    start = time.perf_counter()
    answer = group.complete(PROMPT, tokens)
    assert len(answer) == tokens
    return (time.perf_counter() - start) / tokens


@contextlib.contextmanager
def scraping(group: Group) -> Iterator[None]:
    """Scrapes every rank of the group at SCRAPE_INTERVAL_S.

    Raises AssertionError if a rank has no metrics.
    """
    stop = threading.Event()
    missing: list[int] = []

    def scrape() -> None:
        while not stop.wait(SCRAPE_INTERVAL_S):
            missing.extend(
                rank.rank
                for rank in group.plan.ranks
                if fetch(group.metrics_url(rank.rank) + "/metrics") is None
            )

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not missing, f"ranks {sorted(set(missing))} served no metrics:\n{group.logs()}"


def check_silent(group: Group) -> None:
    """Raises AssertionError if a rank of a group without metrics serves metrics."""
    for rank in group.plan.ranks:
        assert fetch(group.metrics_url(rank.rank) + "/metrics", timeout_s=1.0) is None, (
            f"rank {rank.rank}serves metrics despite {names.ENV_METRICS}=off"
        )


def measure_pair(plan: Plan, folder: Path, order: Sequence[str], options: argparse.Namespace) -> list[Pair]:
    """Starts a pair of groups in this order, and returns their pairs of rounds."""
    env = {"VLLM_USE_FLASHINFER_SAMPLER": "0"}
    if options.threads:
        env["OMP_NUM_THREADS"] = str(options.threads)
    with contextlib.ExitStack() as stack:
        groups = {}
        for metrics in order:
            own = {**env, names.ENV_METRICS: metrics}
            groups[metrics] = stack.enter_context(
                start_group(plan, folder / metrics, env=own, startup_timeout_s=START_TIMEOUT_S)
            )
            groups[metrics].wait_ready(START_TIMEOUT_S)
        check_silent(groups[OFF])
        pairs = []
        for turn in range(options.rounds + 1):
            pair = one_pair(groups, (ON, OFF) if turn % 2 else (OFF, ON), options.tokens)
            if turn:  # the first round warms up
                pairs.append(pair)
                print(f"on {pair.on_s * 1e3:.3f} ms, off {pair.off_s * 1e3:.3f} ms", flush=True)
        return pairs


def one_pair(groups: dict[str, Group], order: Sequence[str], tokens: int) -> Pair:
    """Runs one round of each group, in this order."""
    seconds = {}
    for metrics in order:
        time.sleep(SETTLE_S)  # the other group's readers of queues spin for a second
        with scraping(groups[ON]) if metrics == ON else contextlib.nullcontext():
            seconds[metrics] = step_s(groups[metrics], tokens)
    return Pair(on_s=seconds[ON], off_s=seconds[OFF])


def own_cost(plan: Plan) -> Cost:
    """Returns the time of counting a step with a hop in and out: with metrics, minus without."""
    seconds = {}
    for counts in (True, False):
        ours, theirs = RankChannel.open_pair()
        reporter = RankReporter(theirs, 0, on_supervisor_lost=lambda: None)
        try:
            metrics = RankMetrics(plan.ranks[-1], LAUNCH, reporter, writes_metrics=counts)
            seconds[counts] = fastest(partial(one_step, metrics), STEPS)
            if counts:
                scrape_s = fastest(partial(generate_latest, metrics.registry), 10)
        finally:
            reporter.close()
            ours.close()
    return Cost(step_s=seconds[True] - seconds[False], scrape_s=scrape_s)


def fastest(call: Callable[[], object], number: int) -> float:
    """Returns the seconds of a call: the smallest of nine means over `number` calls."""
    return min(timeit.repeat(call, number=number, repeat=9)) / number


def one_step(metrics: RankMetrics) -> None:
    """Records the metrics of a decode step, as a GPU rank does."""
    metrics.begin_call()
    for direction in ("recv", "send"):
        metrics.add_wait(1e-3)
        metrics.add_transfer(direction, 1e-4, 8192)
    metrics.set_device_timer(lambda: 1e-3)
    metrics.end_call()
    metrics.finish_step(prefill_tokens=0, decode_tokens=1)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the interval of the values' median with 95 % confidence, by the sign test."""
    ordered, count = sorted(values), len(values)
    # half of the normal quantile, for a binomial distribution with probability one half
    margin = 0.98 * count**0.5
    low, high = int(count / 2 - margin), int(count / 2 + margin)
    return ordered[max(0, low)], ordered[min(count - 1, high)]


def to_markdown(pairs: Sequence[Pair], cost: Cost, options: argparse.Namespace) -> str:
    """Returns the table of docs/user/benchmarks.md."""
    overheads = [pair.overhead for pair in pairs]
    low, high = median_interval(overheads)
    on, off = statistics.median(p.on_s for p in pairs), statistics.median(p.off_s for p in pairs)
    where = ", ".join(filter(None, [describe_gpus(), describe_cpus()]))
    date = datetime.datetime.now(tz=datetime.UTC).date()
    command = f"python -m tests.bench.metrics_overhead --shape {options.shape} --rounds {options.rounds}"
    cells = [
        options.shape,
        f"{on * 1e3:.3f}",
        f"{off * 1e3:.3f}",
        f"{statistics.median(overheads):+.2%} ({low:+.2%} to {high:+.2%}), {len(pairs)}",
        f"{cost.step_s * 1e6:.0f}",
        f"{cost.scrape_s * 1e3:.1f}",
        f"{cost.share(off):.2%}",
    ]
    lines = [
        f"{where}, load average {os.getloadavg()[1]:.1f}; {date}. Command: `{command}`",
        "",
        HEADINGS,
        "|---|---|---|---|---|---|---|",
        "| " + " | ".join(cells) + " |",
        "",
    ]
    return "\n".join(lines)


def main() -> int:
    """Runs the comparison; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.metrics_overhead")
    parser.add_argument("--shape", choices=["8b", "tiny"], default="8b" if visible_gpus() else "tiny")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2, help="number of repetitions with new groups")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of each answer")
    parser.add_argument(
        "--threads", type=int, help="threads of each CPU rank; default: the supervisor's choice"
    )
    parser.add_argument("--write", type=Path, help="write the table here")
    options = parser.parse_args()
    if options.shape == "8b" and not visible_gpus():
        parser.error("--shape 8b needs an NVIDIA GPU: nvidia-smi found none. Use --shape tiny")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the groups, too
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory(prefix="hi-") as scratch:
        plan = plan_of(options.shape, Path(scratch))
        orders = itertools.cycle([(ON, OFF), (OFF, ON)])
        for number, order in zip(range(options.repeats), orders, strict=False):
            pairs += measure_pair(plan, Path(scratch) / f"repeat-{number}", order, options)
        cost = own_cost(plan)
    table = to_markdown(pairs, cost, options)
    print(table)
    if options.write:
        options.write.write_text(table)
    low, _ = median_interval([pair.overhead for pair in pairs])
    share = cost.share(statistics.median(pair.off_s for pair in pairs))
    print(f"overhead {share:.2%} as timed by itself, {low:+.2%} or more between the groups; bar {BAR:.0%}")
    return 0 if max(share, low) < BAR else 1


if __name__ == "__main__":
    sys.exit(main())
