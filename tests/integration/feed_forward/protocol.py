"""Runs the slab's protocol between processes, without a model. Prints the results as JSON.

    python -m tests.integration.feed_forward.protocol CASE [--count N] [--lanes N]

Run it with the worker's Python. Each lane of the slab has a process, which stands for a feed-forward rank.
"""

import argparse
import ctypes
import dataclasses
import json
import multiprocessing
import os
import queue
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from heteroinfer_contract.plan import Device, FeedForwardShare, RankAssignment
from tests.cluster_epoch import EPOCH
from vllm_heteroinfer.feed_forward import slab_library
from vllm_heteroinfer.feed_forward.exchange import (
    NAMING_LIMIT_S,
    WATCH_INTERVAL_S,
    FeedForwardWatch,
    HostExchange,
    LaneReady,
    check_ask,
    probe,
    stall_limit_s,
)
from vllm_heteroinfer.feed_forward.lane_judge import LaneError
from vllm_heteroinfer.feed_forward.slab import (
    ASK_OFFSET,
    END_OFFSET,
    FAILED_OFFSET,
    GIVEN_UP_OFFSET,
    LANE_BYTES,
    LANES_OFFSET,
    Offer,
    Shape,
    Slab,
    connect,
    create,
)

SPIN_NS = 20_000
LIMIT_NS = 5_000_000_000
SETTLE_S = 1.5
IDLE_S = 3.0
FREEZE_S = 3.0
LANE_TURN_S = 0.05
"""Seconds between two processes that are stopped or resumed one after another."""


def answer(offer: str, lane: int, skip: int, ready: Any) -> None:
    """Runs the rank of a lane: it returns the inputs of each ask until it is stopped."""
    shape = Offer.from_json(offer).shape
    slab, _ = connect(Offer.from_json(offer), lane, shape)
    ready.put(lane)
    slab_library.load().heteroinfer_ff_echo(slab.address, ctypes.byref(slab.layout), lane, SPIN_NS, skip)


def idle(offer: str, lane: int, spin_ns: int, ready: Any) -> None:
    """Runs the rank of a lane that gets no asks. Reports its CPU time after it has settled."""
    shape = Offer.from_json(offer).shape
    slab, _ = connect(Offer.from_json(offer), lane, shape)
    threading.Timer(SETTLE_S, lambda: ready.put(_cpu_s())).start()
    threading.Timer(SETTLE_S + IDLE_S, lambda: ready.put(_cpu_s())).start()
    threading.Timer(SETTLE_S + IDLE_S + 0.2, slab.stop).start()
    slab_library.load().heteroinfer_ff_echo(slab.address, ctypes.byref(slab.layout), lane, spin_ns, 0)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def ranks(lanes: int) -> list[RankAssignment]:
    """Returns the ranks of the lanes, from 1."""
    return [
        RankAssignment(
            rank=1 + lane,
            local_rank=1 + lane,
            pod=0,
            role="r",
            device=Device.CPU,
            stage=0,
            tensor_rank=lane,
            first_layer=0,
            end_layer=1,
            kv_cache_bytes=0,
            feed_forward=FeedForwardShare(layers=(0,)),
        )
        for lane in range(lanes)
    ]


READY = LaneReady(nonce="", ask_s=0.0, row_s=0.0)


class Bench:
    """A slab and the processes of its lanes."""

    def __init__(self, lanes: int, *, skip: int = 0) -> None:
        self.slab: Slab
        self.slab, offer = create(
            Shape(epoch=EPOCH, hidden=256, topk=2, max_rows=64, dtype="bfloat16", lanes=lanes)
        )
        context = multiprocessing.get_context("spawn")
        ready = context.Queue()
        self.processes = [
            context.Process(target=answer, args=(offer.to_json(), lane, skip, ready)) for lane in range(lanes)
        ]
        for process in self.processes:
            process.start()
        for _ in self.processes:
            ready.get(timeout=60)
        self.exchange = HostExchange(self.slab, ranks(lanes), [READY] * lanes)

    def stress(self, count: int) -> int:
        """Sends `count` asks, and returns the number of correct answers."""
        call = slab_library.load().heteroinfer_ff_stress
        layout = ctypes.byref(self.slab.layout)
        return int(call(self.slab.address, layout, count, 16, SPIN_NS, LIMIT_NS))

    def end(self) -> list[int | None]:
        """Stops the slab, and returns the exit codes of the lanes' processes."""
        self.slab.stop()
        for process in self.processes:
            process.join(10)
        return [process.exitcode for process in self.processes]


def stress(count: int, lanes: int) -> dict[str, Any]:
    """Sends `count` asks after the probe. Returns their results, times and counters."""
    bench = Bench(lanes)
    probe(bench.exchange, bench.slab.shape, torch.device("cpu"), lanes)
    start = time.monotonic()
    right = bench.stress(count)
    seconds = time.monotonic() - start
    views = [bench.slab.read_lane(lane) for lane in range(lanes)]
    return {
        "right": right,
        "us": seconds / count * 1e6,
        "asks": [view.asks for view in views],
        "rows": [view.rows for view in views],
        "exit_codes": bench.end(),
    }


def wrong(count: int, lanes: int) -> dict[str, Any]:
    bench = Bench(lanes, skip=count // 2)
    return {"right": bench.stress(count), "exit_codes": bench.end()}


def killed(count: int, lanes: int) -> dict[str, Any]:
    """Kills the process of the last lane while asks run."""
    bench = Bench(lanes)
    victim = bench.processes[-1].pid
    assert victim is not None
    threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()
    x = torch.ones((4, 256), dtype=torch.bfloat16)
    ids, weights = torch.zeros((4, 2), dtype=torch.int32), torch.zeros((4, 2))
    start, asks = time.monotonic(), 0
    try:
        while time.monotonic() - start < 30:
            bench.exchange.ask(0, x, ids, weights, None)
            asks += 1
    except LaneError as error:
        seconds = time.monotonic() - start - 0.2
        return {"asks": asks, "rank": error.rank, "seconds": seconds, "exit_codes": bench.end()}
    raise AssertionError("the killed process was not reported")


def stopped(count: int, lanes: int) -> dict[str, Any]:
    """Stops the slab while the asking side waits for a lane without an answer."""
    bench = Bench(lanes)
    os.kill(bench.processes[0].pid or 0, signal.SIGSTOP)
    threading.Timer(0.2, bench.slab.stop).start()
    start = time.monotonic()
    right = bench.stress(count)
    seconds = time.monotonic() - start
    os.kill(bench.processes[0].pid or 0, signal.SIGCONT)
    return {"right": right, "seconds": seconds, "exit_codes": bench.end()}


def gave_up(count: int, lanes: int) -> dict[str, Any]:
    """Records in the slab that the device gave up the last lane. After that, every lane answers."""
    del count  # all cases have the same parameters
    slab, _ = create(Shape(epoch=EPOCH, hidden=256, topk=2, max_rows=64, dtype="bfloat16", lanes=lanes))
    failures: queue.Queue[BaseException] = queue.Queue()
    watch = FeedForwardWatch(slab, ranks(lanes), [READY] * lanes, failures.put)
    time.sleep(3 * WATCH_INTERVAL_S)
    watch.check_steps()
    before = failures.qsize()
    ctypes.c_uint32.from_address(slab.address + GIVEN_UP_OFFSET).value = lanes
    ctypes.c_uint32.from_address(slab.address + END_OFFSET + 4).value = 1
    refused = ""
    try:
        watch.check_steps()
    except RuntimeError as error:
        refused = str(error)
    failure = failures.get_nowait()
    watch.close()
    assert isinstance(failure, LaneError)
    return {"before": before, "rank": failure.rank, "words": str(failure), "refused": refused}


def given_up_late(count: int, lanes: int) -> dict[str, Any]:
    """Delays the last lane until the device gives up. The lane answers before the watch checks again."""
    del count  # all cases have the same parameters
    found = {}
    for case in ("seen late", "named by the device"):
        slab, _ = create(Shape(epoch=EPOCH, hidden=256, topk=2, max_rows=64, dtype="bfloat16", lanes=lanes))
        failures: queue.Queue[BaseException] = queue.Queue()
        watch = FeedForwardWatch(slab, ranks(lanes), [READY] * lanes, failures.put)
        _set_words(slab, range(lanes - 1), answered=1)
        _number(slab, ASK_OFFSET).value = 1
        if case == "seen late":
            time.sleep(5 * WATCH_INTERVAL_S)
        else:
            # The device continues with the next ask, in which the first lanes are late.
            ctypes.c_uint32.from_address(slab.address + GIVEN_UP_OFFSET).value = lanes
            _number(slab, ASK_OFFSET).value = 2
        ctypes.c_uint32.from_address(slab.address + FAILED_OFFSET).value = 1
        _set_words(slab, [lanes - 1], answered=_number(slab, ASK_OFFSET).value)
        failure = failures.get(timeout=NAMING_LIMIT_S)
        watch.close()
        assert isinstance(failure, LaneError), failure
        found[case] = failure.rank
    return found


def _number(slab: Slab, offset: int) -> ctypes.c_uint64:
    return ctypes.c_uint64.from_address(slab.address + offset)


def _set_words(slab: Slab, lanes: Iterable[int], *, answered: int) -> None:
    for lane in lanes:
        _number(slab, LANES_OFFSET + lane * LANE_BYTES).value = answered


def _freeze(lanes: Sequence[int], asker: int, over: Any) -> None:
    """Stops all processes for FREEZE_S.

    The asking process waits for the others: it stops last and resumes first.
    """
    for pid in (*lanes, asker):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(LANE_TURN_S)
    time.sleep(FREEZE_S)
    for pid in (asker, *lanes):
        os.kill(pid, signal.SIGCONT)
        time.sleep(LANE_TURN_S)
    over.set()


def frozen(count: int, lanes: int) -> dict[str, Any]:
    """Freezes all processes while an ask runs, as the cgroup of a pod, and continues."""
    del count  # all cases have the same parameters
    bench = Bench(lanes)
    failures: queue.Queue[BaseException] = queue.Queue()
    watch = FeedForwardWatch(bench.slab, ranks(lanes), [READY] * lanes, failures.put)
    context = multiprocessing.get_context("spawn")
    over = context.Event()
    pids = [process.pid for process in bench.processes]
    freezer = context.Process(target=_freeze, args=(pids, os.getpid(), over))
    freezer.start()
    x = torch.ones((4, 256), dtype=torch.bfloat16)
    ids, weights = torch.zeros((4, 2), dtype=torch.int32), torch.zeros((4, 2))
    named, longest_s, turns = "", 0.0, 0
    try:
        while not over.is_set():
            start, turns_before = time.monotonic(), bench.slab.checks
            assert torch.equal(bench.exchange.ask(0, x, ids, weights, None), x * lanes), (
                "a lane's answer is wrong"
            )
            took_s = time.monotonic() - start
            if took_s > longest_s:
                longest_s, turns = took_s, bench.slab.checks - turns_before
    except LaneError as error:
        named = str(error)
    freezer.join(30)
    watch.close()
    return {
        "named": named,
        "watch": [str(failures.get_nowait()) for _ in range(failures.qsize())],
        "longest_s": longest_s,
        "turns": turns,
        "exit_codes": bench.end(),
    }


def silent(count: int, lanes: int) -> dict[str, Any]:
    """Stops only the last lane while asks run.

    Returns who names the lane: first the exchange, then the watch.
    """
    del count  # all cases have the same parameters
    bench = Bench(lanes)
    failures: queue.Queue[BaseException] = queue.Queue()
    watch = FeedForwardWatch(bench.slab, ranks(lanes), [READY] * lanes, failures.put)
    os.kill(bench.processes[-1].pid or 0, signal.SIGSTOP)
    start = time.monotonic()
    x = torch.ones((4, 256), dtype=torch.bfloat16)
    ids, weights = torch.zeros((4, 2), dtype=torch.int32), torch.zeros((4, 2))
    try:
        bench.exchange.ask(0, x, ids, weights, None)
        raise AssertionError("the stopped process was not reported")
    except LaneError as error:
        found = [(error.rank, time.monotonic() - start)]
    failure = failures.get(timeout=5)
    assert isinstance(failure, LaneError)
    found.append((failure.rank, time.monotonic() - start))
    watch.close()
    os.kill(bench.processes[-1].pid or 0, signal.SIGCONT)
    return {"named": found, "exit_codes": bench.end()}


def misfits(count: int, lanes: int) -> dict[str, Any]:
    """Returns the messages about asks that do not fit the slab, by their fault."""
    del count  # all cases have the same parameters
    fit = Shape(epoch=EPOCH, hidden=256, topk=2, max_rows=64, dtype="bfloat16", lanes=lanes)
    dense = dataclasses.replace(fit, topk=0)
    x, ids = torch.ones((4, 256), dtype=torch.bfloat16), torch.zeros((4, 2), dtype=torch.int32)
    asks = {
        "none": (fit, x, ids),
        "an MLP's": (fit, x, None),
        "an expert's": (dense, x, ids),
        "type": (fit, x.float(), ids),
        "rows": (fit, x.repeat(17, 1), ids),
        "width": (fit, x[:, :128], ids),
    }
    said = {}
    for wrong_in, ask in asks.items():
        try:
            check_ask(*ask)
        except ValueError as error:
            said[wrong_in] = str(error)
    return {"said": said}


def limits(count: int, lanes: int) -> dict[str, Any]:
    """Returns the time limits of lanes for one row and for a prompt, by their times in the warm-up."""
    del count  # all cases have the same parameters
    kinds = {"fast": (0.01, 1e-4), "slow layer": (0.5, 1e-4)}
    found = {}
    for name, (ask_s, row_s) in kinds.items():
        ready = [LaneReady(nonce="", ask_s=ask_s, row_s=row_s)] * lanes
        found[name] = [stall_limit_s(ready, rows) for rows in (1, 1000)]
    return found


def measure_idle(count: int, lanes: int) -> dict[str, Any]:
    """Returns the CPU time of lanes without asks, from a second after their last ask."""
    found = []
    for spin_ns in (0, 2_000_000):
        slab, offer = create(
            Shape(epoch=EPOCH, hidden=256, topk=2, max_rows=64, dtype="bfloat16", lanes=lanes)
        )
        context = multiprocessing.get_context("spawn")
        ready = context.Queue()
        process = context.Process(target=idle, args=(offer.to_json(), 0, spin_ns, ready))
        process.start()
        before, after = ready.get(timeout=60), ready.get(timeout=60)
        process.join(10)
        del slab
        found.append((after - before) / IDLE_S)
    return {"cores": found}


CASES = {
    "stress": stress,
    "wrong": wrong,
    "killed": killed,
    "stopped": stopped,
    "gave up": gave_up,
    "given up late": given_up_late,
    "frozen": frozen,
    "silent": silent,
    "misfits": misfits,
    "limits": limits,
    "idle": measure_idle,
}


def main(argv: list[str]) -> int:
    """Runs one case."""
    parser = argparse.ArgumentParser(prog="python -m tests.integration.feed_forward.protocol")
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--lanes", type=int, default=1)
    args = parser.parse_args(argv)
    print(json.dumps(CASES[args.case](args.count, args.lanes)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
