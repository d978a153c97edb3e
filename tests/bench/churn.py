"""Starts and stops tiny groups of two ranks many times, and reports what remains of each.

    python -m tests.bench.churn --groups 200 --parallel 5 --modes Pipeline,Tensor [--gpu]
    python -m tests.bench.churn --groups 100 --modes FeedForward --endings TERM,RANK_1,TERM,LEADER,TERM,RANK_0

Each group starts, answers one request with the tokens of transformers, and ends: every second group by
SIGTERM to all pods, the others by SIGKILL of a rank or of a supervisor. After the end, no process, listening
port, shared memory or socket of the group may remain outside the pods' own folder, which is deleted, too. A
start or an end that takes longer than its deadline counts as a hang, and its logs are kept. Exits 1 after any
failure.

If a command may not run for long, limit it with `--seconds`. `--results FILE` adds up the results of several
runs.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from heteroinfer_contract import names
from heteroinfer_contract.plan import Device, Mode, Plan
from tests.bench.leftovers import SHARED_MEMORY, Holdings, observe, unheld_shared_memory, wait_gone
from tests.integration.feed_forward.feed_forward_plans import feed_forward_plan
from tests.integration.worker.conftest import Reference, make
from tests.integration.worker.groups import REPOSITORY, WORKER_PYTHON, Group, build_plan, start_group

END_TIMEOUT_S = 20.0
"""Seconds from the signal until nothing is left. A supervisor gives its API server 3 s, and the kernel needs
time to free memory."""
TOKENS = 16
LAYERS = 8


class Ending(StrEnum):
    """How a group is ended."""

    TERM = "SIGTERM of all"
    RANK_0 = "SIGKILL of rank 0"
    RANK_1 = "SIGKILL of rank 1"
    LEADER = "SIGKILL of the leader's supervisor"
    FOLLOWER = "SIGKILL of the follower's supervisor"


ENDINGS = "TERM,RANK_0,TERM,FOLLOWER,TERM,RANK_1,TERM,LEADER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Life:
    """The life of one group, from its start to its end.

    Attributes:
        mode: mode of its plan.
        ending: how it was ended.
        ready_s: seconds from its start until it would answer a request, or None.
        ended_s: seconds from the signal until nothing of it was left, or None if something was.
        failure: the failure as text, or "".
    """

    mode: str
    ending: str
    ready_s: float | None = None
    ended_s: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The parameters of all groups.

    Attributes:
        model: folder of the model.
        reference: expected answers of the model.
        gpu: whether one of the two ranks is on a GPU.
        env: variables of every pod.
        start_timeout_s: seconds after which a start counts as a hang.
        logs: each group gets a folder in it, which stays if the group failed.
        alive: groups that run now.
    """

    model: Path
    reference: Reference
    gpu: bool
    env: Mapping[str, str]
    start_timeout_s: float
    logs: Path
    alive: list[Group] = field(default_factory=list)


def plan_of(mode: Mode, site: Site) -> Plan:
    """Returns a plan of two ranks: in two pods, or in mode FeedForward in one."""
    if mode is Mode.FEED_FORWARD:
        layers = range(LAYERS)
        device = Device.GPU if site.gpu else Device.CPU
        return feed_forward_plan(site.model, num_layers=LAYERS, remote=layers, device=device, eager_gpu=True)
    # The GPU rank leads a stage. A pipeline ends with its GPU stage, which has the head.
    devices = [Device.GPU, Device.CPU] if mode is Mode.TENSOR else [Device.CPU, Device.GPU]
    return build_plan(
        site.model,
        layers=[LAYERS] if mode is Mode.TENSOR else [LAYERS // 2] * 2,
        pods=[1, 1],
        tensor=2 if mode is Mode.TENSOR else 1,
        mode=mode,
        devices=devices if site.gpu else None,
        eager_gpu=True,
        extra_args=("--attention-backend", "TRITON_ATTN") if site.gpu else (),
    )


def live(number: int, mode: Mode, ending: Ending, site: Site) -> Life:
    """Runs one group. Never raises: a failure is in the result."""
    folder = site.logs / f"{number:04d}-{mode.value}-{ending.name}"
    life = Life(mode=mode.value, ending=ending.value)
    try:
        with start_group(
            plan_of(mode, site), folder, env=site.env, startup_timeout_s=site.start_timeout_s
        ) as group:
            site.alive.append(group)
            life = replace(life, ready_s=group.wait_ready(site.start_timeout_s))
            check_answer(group, site.reference, number)
            life = replace(life, ended_s=end(group, ending))
            site.alive.remove(group)
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        # the text contains the last lines of each pod's log
        return replace(life, failure=f"{folder}: {error}")
    shutil.rmtree(folder)
    return life


def check_answer(group: Group, reference: Reference, number: int) -> None:
    """Sends one prompt. Raises AssertionError if the answer differs from the expected one."""
    answers = list(reference.values())
    answer = answers[number % len(answers)]
    got = group.complete(answer["prompt_token_ids"], TOKENS)
    expected = answer["token_ids"][:TOKENS]
    assert got == expected, f"got tokens {got}, expected {expected}"


def end(group: Group, ending: Ending) -> float:
    """Ends a group. Returns the seconds until nothing of the group was left.

    Raises AssertionError if something stays, or if an exit code is wrong.
    """
    held = observe_held(group)
    start = time.monotonic()
    if ending is Ending.TERM:
        group.terminate()
    else:
        os.kill(process_to_kill(group, ending), signal.SIGKILL)
    for child in group.children:
        try:
            child.process.wait(max(0.1, start + END_TIMEOUT_S - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"{child.name} still runs {END_TIMEOUT_S} s after {ending.value}:\n{group.logs()}"
            ) from None
    left = wait_gone(held, group.log_dir, group.scratch, start + END_TIMEOUT_S)
    assert not left, f"left after {ending.value}: {'; '.join(left)}\n{group.logs()}"
    ended_s = time.monotonic() - start
    codes = [child.process.returncode for child in group.children]
    if ending is Ending.TERM:
        assert codes == [names.EXIT_OK] * len(codes), f"got exit codes {codes}\n{group.logs()}"
    else:
        assert names.EXIT_OK not in codes, f"got exit codes {codes} after {ending.value}\n{group.logs()}"
    return ended_s


def observe_held(group: Group) -> Holdings:
    """Returns the resources that a group holds. Raises AssertionError if one is missing."""
    held = observe([child.process.pid for child in group.children], group.log_dir)
    ports = set(held.ports.values())
    api, health = group.addresses[0].api_port, {address.health_port for address in group.addresses}
    assert {api, *health} <= ports, f"expected ports {api} and {health} among the listening {ports}"
    # Supervisors, ranks, the API server and its engine.
    expected = len(group.children) + len(group.plan.ranks) + 2
    found = len(held.processes)
    assert found >= expected, f"found {found} processes, expected at least {expected}"
    return held


def process_to_kill(group: Group, ending: Ending) -> int:
    """Returns the process that the ending kills."""
    if ending is Ending.LEADER:
        return group.children[0].process.pid
    if ending is Ending.FOLLOWER:
        return group.children[1].process.pid
    return group.rank_pid(0 if ending is Ending.RANK_0 else 1)


def run(site: Site, options: argparse.Namespace) -> list[Life]:
    """Runs all groups, prints each as it ends, and returns their lives.

    A signal ends the running groups, and then this program.
    """
    began = time.monotonic()
    lock, stopped = threading.Lock(), threading.Event()
    lives: list[Life] = []
    modes = [Mode(mode) for mode in options.modes.split(",")]
    endings = [Ending[ending] for ending in options.endings.split(",")]
    turns = ((turn, mode) for turn in itertools.count() for mode in modes)

    def one(number: int, turn: int, mode: Mode) -> None:
        """Runs one group and records its life, unless the time is up or the program ends."""
        if options.seconds and time.monotonic() - began > options.seconds:
            return
        life = live(number, mode, endings[turn % len(endings)], site)
        if stopped.is_set():  # this program's own end has ended the group, so the result proves nothing
            return
        with lock:
            lives.append(life)
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps(asdict(life)) + "\n")
            print(f"{len(lives)} of {options.groups}: {describe(life)}", flush=True)

    with ThreadPoolExecutor(options.parallel) as pool:
        futures = [
            pool.submit(one, number, turn, mode)
            for number, (turn, mode) in zip(range(options.groups), turns, strict=False)
        ]
        try:
            for future in futures:
                future.result()
        except KeyboardInterrupt:
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for group in list(site.alive):
                group.terminate()
            raise
    return lives


def describe(life: Life) -> str:
    """Returns a life as one line, with its failure."""
    times = ", ".join(
        f"{what} {seconds:.1f} s"
        for what, seconds in (("ready", life.ready_s), ("gone", life.ended_s))
        if seconds is not None
    )
    return f"{life.mode}, {life.ending}: {times}" + (f"\nFAILED: {life.failure}" if life.failure else "")


def to_markdown(lives: Sequence[Life]) -> str:
    """Returns a table with a row for each mode and ending, and one for all."""
    keys = sorted({(life.mode, life.ending) for life in lives})
    rows = [
        _row(mode, ending, [x for x in lives if (x.mode, x.ending) == (mode, ending)])
        for mode, ending in keys
    ]
    head = "| mode | ended by | groups | failures | Ready p50, s | p99 | nothing left p50, s | p99 |"
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows, _row("all", "", lives)])


def _row(mode: str, ending: str, lives: Sequence[Life]) -> str:
    ready = [life.ready_s for life in lives if life.ready_s is not None]
    ended = [life.ended_s for life in lives if life.ended_s is not None]
    failures = sum(bool(life.failure) for life in lives)
    cells = [mode, ending, len(lives), failures, *_percentiles(ready), *_percentiles(ended)]
    return "| " + " | ".join(map(str, cells)) + " |"


def _percentiles(seconds: Sequence[float]) -> tuple[str, str]:
    if not seconds:
        return "-", "-"
    ordered = sorted(seconds)
    return f"{statistics.median(ordered):.1f}", f"{ordered[math.ceil(0.99 * len(ordered)) - 1]:.1f}"


def environment(*, gpu: bool) -> dict[str, str]:
    """Returns the variables of every pod.

    Compilers store their results outside of the group's own folders.
    """
    caches = Path(tempfile.gettempdir()) / "heteroinfer-churn"
    env = {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
    }
    if gpu:
        env |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "TRITON_F32_DEFAULT": "ieee"}
    return env


def main() -> int:
    """Runs the churn; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.churn")
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--parallel", type=int, default=5, help="groups alive at the same time")
    parser.add_argument("--modes", default="Pipeline,Tensor")
    parser.add_argument("--endings", default=ENDINGS, help="used in turn; default: %(default)s")
    parser.add_argument("--gpu", action="store_true", help="run one rank of each group on a GPU")
    parser.add_argument(
        "--start-timeout", type=float, default=240.0, help="seconds after which a start counts as a hang"
    )
    parser.add_argument("--seconds", type=float, help="start no more groups after this time")
    parser.add_argument("--results", type=Path, help="append to these results, and print all of them")
    parser.add_argument("--logs", type=Path, help="folder for logs of failed groups; default: a new folder")
    options = parser.parse_args()
    if Mode.FEED_FORWARD.value in options.modes and Ending.FOLLOWER.name in options.endings:
        parser.error(f"mode FeedForward has one pod: give --endings without {Ending.FOLLOWER.name}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="churn-"))
    before = frozenset(SHARED_MEMORY.iterdir())
    with tempfile.TemporaryDirectory(prefix="hi-") as scratch:
        model = make(Path(scratch) / "model")
        asked = [str(WORKER_PYTHON), "-m", "tests.models", "reference", str(model)]
        done = subprocess.run(asked, cwd=REPOSITORY, check=True, timeout=300, stdout=subprocess.PIPE)
        site = Site(
            model=model,
            reference=json.loads(done.stdout),
            gpu=options.gpu,
            env=environment(gpu=options.gpu),
            start_timeout_s=options.start_timeout,
            logs=logs,
        )
        lives = run(site, options)
    with contextlib.suppress(OSError):
        logs.rmdir()  # empty: nothing failed
    if options.results:
        lives = [Life(**json.loads(line)) for line in options.results.read_text().splitlines()]
    print(to_markdown(lives))
    orphaned = unheld_shared_memory(before)
    if orphaned:
        print(f"FAILED: files in /dev/shm that no process holds: {', '.join(map(str, orphaned))}")
    return 1 if orphaned or any(life.failure for life in lives) else 0


if __name__ == "__main__":
    sys.exit(main())
