"""Kills feed-forward ranks of tiny groups at random moments under load, again and again.

    python -m tests.bench.feed_forward_kills --kills 50 --parallel 8 [--tensor 2] [--seconds 270] [--cpu]

`--parallel` groups run on one GPU at the same time. When one has ended, the next one starts. A group must
first give the answers of transformers, greedily in float32, from CUDA graphs. So each group shows that the
one before left the GPU usable. Then it decodes requests, and after a random time, one of its feed-forward
ranks gets SIGKILL (with --also-asking, sometimes the asking rank). The group must name the rank within 2 s.
Every process, port and shared memory of the group must disappear, and at the end, the GPU must have as much
free memory as before.

Groups alternate between architectures (two mixtures of experts, one with shared experts, and a dense model),
and between one and two feed-forward ranks. Options:

- `--tensor 2`: two ranks ask, each with its own feed-forward ranks.
- `--freeze S`: before the kill, each group is frozen for S seconds under load, and must continue with the
right
  answers.
- `--copies`: the GPU computes half of the experts of mixtures in every step, so that ranks die while it
copies
  from their memory.

Exits 1 after any failure.
"""

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from heteroinfer_contract import metric_names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.plan import BY_RATE, Device
from tests.bench.leftovers import SHARED_MEMORY, observe, unheld_shared_memory, wait_gone
from tests.gpu.scrape import scrape
from tests.integration.feed_forward import tiny_models
from tests.integration.feed_forward.feed_forward_plans import feed_forward_plan
from tests.integration.feed_forward.groups import (
    NAMED_WITHIN_S,
    answers,
    answers_over_freeze,
    make_model,
    reference,
)
from tests.integration.worker.groups import REPOSITORY, Group, start_group

END_TIMEOUT_S = 20.0
LONG_ANSWER = 400
FIXED_DIVISION = REPOSITORY / "tests/gpu/fixed_division"
DRIVERS_OWN_MIB = 64
"""MiB. A group's smallest context on a GPU is several times as large."""
ARCHITECTURES = ("qwen3_moe", "qwen2_moe", "llama")
MIXTURES = ARCHITECTURES[:2]
RING_BYTES = 1 << 20
LANES = (1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """The life of one group.

    Attributes:
        number: number of the group.
        architecture: architecture of its model.
        lanes: number of feed-forward ranks of each asking rank.
        killed: killed rank.
        ready_s: seconds from its start until it served.
        tokens: whether its answers equal those of transformers.
        frozen_s: seconds for which the group was frozen under load before the kill.
        after_s: seconds under load until the kill.
        named_s: seconds from the kill until the failure that names the rank.
        gone_s: seconds from the kill until nothing was left.
        failure: the failure as text, or "".
    """

    number: int
    architecture: str
    lanes: int
    killed: int = 0
    ready_s: float | None = None
    tokens: bool = False
    frozen_s: float | None = None
    after_s: float | None = None
    named_s: float | None = None
    gone_s: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A tiny model and its expected answers."""

    architecture: str
    folder: Path
    expected: list[list[int]]


def environment(*, cpu: bool, copies: bool) -> dict[str, str]:
    """Returns the variables of every pod. Compilers store their results for later groups."""
    folders = [str(FIXED_DIVISION), os.environ.get("PYTHONPATH", "")]
    division = {"PYTHONPATH": os.pathsep.join(filter(None, folders)), "GPU_PART": "0.5"} if copies else {}
    caches = Path(tempfile.gettempdir()) / "heteroinfer-kills"
    env = {
        "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(caches / "inductor"),
        "TRITON_CACHE_DIR": str(caches / "triton"),
        "VLLM_CACHE_ROOT": str(caches / "vllm"),
        **division,
    }
    return env if cpu else env | {"VLLM_USE_FLASHINFER_SAMPLER": "0", "TRITON_F32_DEFAULT": "ieee"}


ALIVE: list[Group] = []
"""Groups that run now. This program ends them at its own end."""


def live(kill: Kill, model: Model, options: argparse.Namespace, logs: Path) -> Kill:
    """Runs one group to its end. Never raises: a failure is in the result."""
    folder = logs / f"{kill.number:04d}-{kill.architecture}-{kill.lanes}"
    first = tiny_models.first_remote_layer(kill.architecture)
    plan = feed_forward_plan(
        model.folder,
        num_layers=tiny_models.LAYERS,
        remote=range(first, tiny_models.LAYERS),
        shares=[BY_RATE] * kill.lanes * options.tensor,
        tensor=options.tensor,
        # Two GPUs divide the 64 columns of these experts, and ranks cannot divide 32 columns.
        by_experts=kill.architecture in MIXTURES and options.tensor * kill.lanes > 2,
        device=Device.CPU if options.cpu else Device.GPU,
        eager_gpu=options.copies,
        ring_bytes=RING_BYTES if options.copies else 0,
        extra_args=() if options.cpu else ("--attention-backend", "TRITON_ATTN"),
    )
    try:
        with start_group(
            plan,
            folder,
            env=environment(cpu=options.cpu, copies=options.copies),
            startup_timeout_s=options.start_timeout,
        ) as group:
            ALIVE.append(group)
            kill = replace(kill, ready_s=group.wait_ready(options.start_timeout))
            got = answers(group)
            kill = replace(kill, tokens=got == model.expected)
            assert kill.tokens, f"got tokens {got}, expected {model.expected}"
            if options.freeze:
                got = answers_over_freeze(group, options.freeze)
                kill = replace(kill, tokens=got == model.expected, frozen_s=options.freeze)
                assert kill.tokens, f"got tokens {got} during a freeze, expected {model.expected}"
            return kill_rank_and_check(group, kill)
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        return replace(kill, failure=f"{folder}: {str(error)[-3000:]}")


def kill_rank_and_check(group: Group, kill: Kill) -> Kill:
    """Kills the rank under load. Raises AssertionError if the group does not end as required."""
    over = threading.Event()

    def load(prompt: Sequence[int]) -> None:
        while not over.is_set():
            try:
                group.complete(prompt, LONG_ANSWER)
            except OSError:  # the group has ended
                return

    held = observe([child.process.pid for child in group.children], group.log_dir)
    loads = [threading.Thread(target=load, args=(prompt,)) for prompt in tiny_models.PROMPTS]
    for thread in loads:
        thread.start()
    try:
        wait_for_steps(group)
        if group.plan.ranks[0].ring_bytes:
            assert scrape(group, 0).total(metric_names.GPU_EXPERT_BYTES_TOTAL) > 0, "the GPU copied no expert"
        after_s = random.Random().uniform(0.0, 1.5)
        time.sleep(after_s)
        sent, start = time.time(), time.monotonic()
        os.kill(group.rank_pid(kill.killed), signal.SIGKILL)
        try:
            group.children[0].process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"the pod still runs {END_TIMEOUT_S}s after the kill\n{group.logs()}"
            ) from None
        left = wait_gone(held, group.log_dir, group.scratch, start + END_TIMEOUT_S)
        gone_s = time.monotonic() - start
    finally:
        over.set()
    for thread in loads:
        thread.join(30)
    failure = group.failure(0)
    named_s = failure.time - sent if failure is not None else None
    wrong = [*wrong_words(failure, kill.killed, named_s), *(["left: " + "; ".join(left)] if left else [])]
    kill = replace(kill, after_s=after_s, named_s=named_s, gone_s=gone_s)
    return replace(kill, failure="; ".join(wrong) + (f"\n{group.logs()}" if wrong else ""))


def wait_for_steps(group: Group) -> None:
    """Waits until the group decodes."""
    before, deadline = group.status().ranks[0].steps, time.monotonic() + 60
    while group.status().ranks[0].steps < before + 3:
        assert time.monotonic() < deadline, f"no steps under load\n{group.logs()}"
        time.sleep(0.02)


def wrong_words(failure: Failure | None, killed: int, named_s: float | None) -> list[str]:
    """Returns a description of a wrong failure that the pod left, or ""."""
    wrong = []
    if failure is None or failure.rank != killed or failure.reason is not FailureReason.RANK_EXITED:
        wrong.append(f"got {failure}, expected rank {killed} named as exited")
    if named_s is not None and named_s >= NAMED_WITHIN_S:
        wrong.append(f"named after {named_s:.2f} s")
    return wrong


def gpu_memory() -> int:
    """Returns the used MiB of all GPUs by the driver, or 0 without a GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        printed = subprocess.run(query, check=True, capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    return sum(int(line) for line in printed.split())


def run(models: Sequence[Model], options: argparse.Namespace, logs: Path) -> list[Kill]:
    """Runs all groups, prints each as it ends, and returns their lives."""
    began, lock = time.monotonic(), threading.Lock()
    kills: list[Kill] = []
    turns = itertools.cycle(itertools.product(LANES, models))

    def one(number: int, lanes: int, model: Model) -> None:
        """Runs one group, chooses the rank to kill, and records the result."""
        if options.seconds and time.monotonic() - began > options.seconds:
            return
        # Ranks below options.tensor ask. The others are their feed-forward ranks.
        killed = options.tensor + number % (lanes * options.tensor)
        if options.also_asking and number % 7 == 6:
            killed = number % options.tensor
        planned = Kill(number=number, architecture=model.architecture, lanes=lanes, killed=killed)
        done = live(planned, model, options, logs)
        with lock:
            kills.append(done)
            if options.results:
                with options.results.open("a") as file:
                    file.write(json.dumps(asdict(done)) + "\n")
            print(
                f"{len(kills)} of {options.kills} after {time.monotonic() - began:.0f} s: {describe(done)}",
                flush=True,
            )

    with ThreadPoolExecutor(options.parallel) as pool:
        futures = [
            pool.submit(one, number, lanes, model)
            for number, (lanes, model) in zip(range(options.kills), turns, strict=False)
        ]
        try:
            for future in futures:
                future.result()
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            for group in ALIVE:
                group.terminate()
            raise
    return kills


def describe(kill: Kill) -> str:
    """Returns a life as one line, with its failure."""
    times = ", ".join(
        f"{what} {seconds:.2f} s"
        for what, seconds in (
            ("ready", kill.ready_s),
            ("frozen", kill.frozen_s),
            ("load", kill.after_s),
            ("named", kill.named_s),
            ("gone", kill.gone_s),
        )
        if seconds is not None
    )
    right = "right tokens" if kill.tokens else "no tokens"
    failed = f"\nFAILED: {kill.failure}" if kill.failure else ""
    return f"{kill.architecture}, rank {kill.killed} of {kill.lanes}: {right}, {times}{failed}"


def to_markdown(kills: Sequence[Kill]) -> str:
    """Returns a table with a row for each kind of group, and one for all."""
    head = (
        "| model | lanes | groups | right tokens | failures | ready, s | named at most, s | gone at most, s |"
    )
    kinds = sorted({(kill.architecture, kill.lanes) for kill in kills})
    rows = [head, "|---" * (head.count("|") - 1) + "|"]
    for architecture, lanes in [*kinds, ("all", 0)]:
        own = [
            k for k in kills if (k.architecture, k.lanes) == (architecture, lanes) or architecture == "all"
        ]
        most = [
            max((getattr(k, name) or 0.0 for k in own), default=0.0)
            for name in ("ready_s", "named_s", "gone_s")
        ]
        cells = [
            architecture,
            lanes or "",
            len(own),
            sum(k.tokens for k in own),
            sum(bool(k.failure) for k in own),
        ]
        rows.append("| " + " | ".join([*map(str, cells), *(f"{value:.2f}" for value in most)]) + " |")
    return "\n".join(rows)


def main() -> int:
    """Runs the kills; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.feed_forward_kills")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--parallel", type=int, default=8, help="groups alive at the same time")
    parser.add_argument("--tensor", type=int, default=1, help="number of asking ranks, with a GPU each")
    parser.add_argument("--seconds", type=float, help="start no more groups after this time")
    parser.add_argument(
        "--start-timeout", type=float, default=240.0, help="seconds after which a start counts as a hang"
    )
    parser.add_argument(
        "--also-asking", action="store_true", help="kill the asking rank in every seventh group"
    )
    parser.add_argument("--freeze", type=float, help="seconds for which to freeze each group before its kill")
    parser.add_argument("--results", type=Path, help="append each result to this file")
    parser.add_argument("--logs", type=Path, help="folder for the groups' logs; default: a new folder")
    parser.add_argument("--cpu", action="store_true", help="run the asking rank on a CPU")
    parser.add_argument("--copies", action="store_true", help="let the GPU copy experts of mixtures")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    logs = options.logs or Path(tempfile.mkdtemp(prefix="kills-"))
    before, memory = frozenset(SHARED_MEMORY.iterdir()), gpu_memory()
    with tempfile.TemporaryDirectory(prefix="hi-") as scratch:

        def make(architecture: str) -> Model:
            folder = make_model(architecture, Path(scratch))
            return Model(architecture=architecture, folder=folder, expected=reference(folder))

        with ThreadPoolExecutor(len(ARCHITECTURES)) as pool:
            models = list(pool.map(make, MIXTURES if options.copies else ARCHITECTURES))
        kills = run(models, options, logs)
    time.sleep(1.0)
    print(to_markdown(kills))
    orphaned, after = unheld_shared_memory(before), gpu_memory()
    print(
        f"GPU memory before {memory!r}, after {after!r}; files in /dev/shm that no process holds: "
        f"{list(map(str, orphaned))}"
    )
    wrong = bool(orphaned) or memory != after or any(kill.failure for kill in kills)
    return 1 if wrong or not kills else 0


if __name__ == "__main__":
    sys.exit(main())
