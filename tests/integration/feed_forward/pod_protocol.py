"""Sends asks to feed-forward ranks in other pods, as processes without a model. Prints the results as JSON.

    python -m tests.integration.feed_forward.pod_protocol CASE [--count N] [--pods N] [--times N]

Run it with the worker's Python. The cases that break a connection need root: they run in a network namespace
of their own, whose packets iptables drops.
"""

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from heteroinfer_contract import names
from heteroinfer_contract.plan import RankAssignment
from heteroinfer_contract.pod_launch import PodAddress, PodLaunch
from tests.cluster_epoch import EPOCH
from tests.integration.feed_forward.protocol import LIMIT_NS, answer, ranks
from vllm_heteroinfer.feed_forward import pod_link, slab_library
from vllm_heteroinfer.feed_forward.exchange import FeedForwardWatch, HostExchange, LaneReady
from vllm_heteroinfer.feed_forward.lane_judge import LaneError
from vllm_heteroinfer.feed_forward.relay import Relay, connect_all
from vllm_heteroinfer.feed_forward.slab import Shape, create
from vllm_heteroinfer.group.deadline import Deadline

LAUNCH = PodLaunch(
    group="test/pods/0", group_uid="uid", epoch=EPOCH, pod_index=0, addresses=(PodAddress(host="127.0.0.1"),)
)
SHAPE = Shape(epoch=EPOCH, hidden=256, topk=2, max_rows=64, dtype="bfloat16", lanes=1)
LARGE = Shape(epoch=EPOCH, hidden=7168, topk=8, max_rows=64, dtype="bfloat16", lanes=1)
KEY = "ab" * 32
SPIN_NS = 0 if (os.cpu_count() or 1) < 8 else 2_000_000
"""As the supervisor decides: these processes spin only if each has its own core."""


def serve(host: str, shape: Shape, ready: Any, late_ms: int) -> None:
    """Runs another pod with one rank, which returns the inputs of each ask until its connection ends."""
    listener = pod_link.Listener(host)
    ready.put(listener.port)
    connection = listener.accept(LAUNCH, 0, Deadline.after(60))
    connection.answer_trials()
    slab, _ = create(shape)
    link, layout = connection.link(0), slab.layout
    link_at, layout_at = ctypes.byref(link), ctypes.byref(layout)
    calls, layer, rows = slab_library.load(), ctypes.c_uint32(), ctypes.c_uint32()
    while True:
        got = calls.heteroinfer_ff_receive(
            link_at,
            slab.address,
            layout_at,
            shape.max_rows,
            SPIN_NS,
            LIMIT_NS,
            ctypes.byref(layer),
            ctypes.byref(rows),
        )
        if got == slab_library.STOPPED:
            return
        if got != slab_library.ASKED:
            continue
        began_ns, size = time.monotonic_ns(), rows.value * shape.row_bytes
        time.sleep(late_ms / 1000)
        ctypes.memmove(slab.address + layout.y, slab.address + layout.x, size)
        calls.heteroinfer_ff_answer(slab.address, 0, 0, rows.value, None, 0, 0)
        if calls.heteroinfer_ff_reply(link_at, slab.address, layout_at, began_ns, SPIN_NS, LIMIT_NS):
            return


class Pods:
    """A slab of an asking rank. Its lanes belong to ranks of other pods and of its own pod."""

    def __init__(self, pods: int, *, own: int = 0, shape: Shape = SHAPE, late_ms: int = 0) -> None:
        context = multiprocessing.get_context("spawn")
        ready = context.Queue()
        self.own, lanes = own, own + pods
        self.shape = replace(shape, lanes=lanes)
        self.slab, offer = create(self.shape)
        self.lanes: list[RankAssignment] = [
            replace(rank, pod=0 if lane < own else 1 + lane - own) for lane, rank in enumerate(ranks(lanes))
        ]
        self.processes = [
            context.Process(target=answer, args=(offer.to_json(), lane, 0, ready)) for lane in range(own)
        ]
        others = [(own + pod, context.Queue()) for pod in range(pods)]
        self.processes += [
            context.Process(target=serve, args=("127.0.0.1", shape, port, late_ms)) for _, port in others
        ]
        for process in self.processes:
            process.start()
        for _ in range(own):
            ready.get(timeout=120)
        reports = [LaneReady(nonce="", ask_s=0.0, row_s=0.0)] * own
        reports += [
            LaneReady(nonce="", ask_s=0.0, row_s=0.0, host="127.0.0.1", port=port.get(timeout=120))
            for _, port in others
        ]
        asking = replace(self.lanes[0], rank=0, pod=0)
        relayed, self.reports = connect_all(
            [(lane, self.lanes[lane]) for lane, _ in others], reports, self.shape, LAUNCH, asking
        )
        self.failures: queue.Queue[BaseException] = queue.Queue()
        cpus = frozenset[int]()
        self.relay = Relay(self.slab, relayed, spin_ns=SPIN_NS, cpus=cpus, fail=self.failures.put)
        self.exchange = HostExchange(self.slab, self.lanes, self.reports, self.relay.describe_ask)

    def stress(self, count: int, rows: int) -> int:
        """Sends `count` asks of 1 to `rows` rows. Returns the number of correct answers."""
        call = slab_library.load().heteroinfer_ff_stress
        return int(call(self.slab.address, ctypes.byref(self.slab.layout), count, rows, 100_000, LIMIT_NS))

    def ask(self, rows: int = 4) -> None:
        """Sends one ask, and checks the sum."""
        x = torch.ones((rows, self.shape.hidden), dtype=torch.bfloat16)
        ids = torch.zeros((rows, self.shape.topk), dtype=torch.int32)
        weights = torch.zeros((rows, self.shape.topk))
        assert torch.equal(self.exchange.ask(0, x, ids, weights, None), x * len(self.lanes))

    def ask_until_named(self) -> tuple[int, str]:
        """Sends asks until the exchange or the relay accuses a rank. Returns the rank and the message."""

        def ask_on() -> None:
            with contextlib.suppress(RuntimeError):  # the relay was faster and has stopped the slab
                while self.failures.empty():
                    try:
                        self.ask()
                    except LaneError as error:
                        self.failures.put(error)

        threading.Thread(target=ask_on, daemon=True).start()
        error = self.failures.get(timeout=60)
        assert isinstance(error, LaneError), error
        return error.rank, str(error)

    def end(self) -> list[int | None]:
        """Stops the slab, and kills the other pods. Returns the exit codes of the own pod's ranks."""
        self.slab.stop()
        for process in self.processes[self.own :]:
            process.kill()
        for process in self.processes:
            process.join(30)
        return [process.exitcode for process in self.processes[: self.own]]


def stress(options: argparse.Namespace) -> dict[str, Any]:
    """Sends asks of all sizes, to other pods alone and together with a rank of the same pod."""
    pods = Pods(options.pods, own=options.own)
    return {"right": pods.stress(options.count, 16), "exit_codes": pods.end()}


def measure_cost(options: argparse.Namespace) -> dict[str, Any]:
    """Measures the microseconds of an ask of 1 and 16 rows of 7,168 elements.

    One rank is in the same pod, the other is reached over loopback.
    """
    found: dict[str, Any] = {"spins": bool(SPIN_NS)}
    for name, own, other in (("same pod", 1, 0), ("one pod", 0, 1), ("two pods", 0, 2)):
        pods = Pods(other, own=own, shape=LARGE)
        found[name] = {}
        for rows in (1, 16):
            for _ in range(50):
                pods.ask(rows)
            times = []
            for _ in range(options.count):
                start = time.perf_counter()
                pods.ask(rows)
                times.append(time.perf_counter() - start)
            found[name][str(rows)] = round(sorted(times)[len(times) // 2] * 1e6, 1)
        pods.end()
    return found


def _hurt(options: argparse.Namespace, how: Callable[[Pods, int], object], own: int = 1) -> list[Any]:
    """Damages each pod in turn while asks run.

    Returns the pod's rank, the named rank, the seconds and the message.
    """
    found = []
    for time_number in range(options.times):
        pods = Pods(options.pods, own=own)
        victim = own + time_number % options.pods
        for _ in range(20):
            pods.ask()
        hurt_at: list[float] = []

        def hurt(pods: Pods = pods, victim: int = victim, at: list[float] = hurt_at) -> None:
            at.append(time.monotonic())
            how(pods, victim)

        threading.Timer(0.05 + 0.01 * (time_number % 7), hurt).start()
        rank, words = pods.ask_until_named()
        found.append([1 + victim, rank, time.monotonic() - hurt_at[0], words])
        pods.end()
    return found


def killed(options: argparse.Namespace) -> dict[str, Any]:
    return {"named": _hurt(options, lambda pods, lane: pods.processes[lane].kill())}


def stopped(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "named": _hurt(options, lambda pods, lane: os.kill(pods.processes[lane].pid or 0, signal.SIGSTOP))
    }


def cut(options: argparse.Namespace) -> dict[str, Any]:
    """Drops all packets of a pod's connection in both directions, so that neither end notices the loss."""

    def drop(pods: Pods, lane: int) -> None:
        for side in ("--sport", "--dport"):
            rule = ["-A", "INPUT", "-p", "tcp", side, str(pods.reports[lane].port), "-j", "DROP"]
            subprocess.run(["iptables", *rule], check=True)

    return {"named": _hurt(options, drop)}


@contextlib.contextmanager
def _delayed(port: int, delay_s: float) -> Iterator[int]:
    """Yields the port of a relay in user space that forwards to `port` with a delay in each direction."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, target: socket.socket) -> None:
        """Copies data from a socket to another, each chunk after the delay."""
        waiting: queue.Queue[tuple[float, bytes]] = queue.Queue()

        def send() -> None:
            while True:
                due, chunk = waiting.get()
                time.sleep(max(0.0, due - time.monotonic()))
                target.sendall(chunk)

        threading.Thread(target=send, daemon=True).start()
        with contextlib.suppress(OSError):
            while chunk := source.recv(1 << 16):
                waiting.put((time.monotonic() + delay_s, chunk))

    def accept() -> None:
        inner, outer = listener.accept()[0], socket.create_connection(("127.0.0.1", port))
        for each in (inner, outer):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=pump, args=(inner, outer), daemon=True).start()
        pump(outer, inner)

    threading.Thread(target=accept, daemon=True).start()
    with listener:
        yield int(listener.getsockname()[1])


def delayed(options: argparse.Namespace) -> dict[str, Any]:
    """Checks answers with a delay of 1 and 3 ms in each direction, which a relay in user space adds."""
    found = {}
    real: Any = pod_link.connect
    for delay_ms in (1, 3):

        def through(host: str, port: int, *rest: Any, delay_ms: int = delay_ms) -> pod_link.Connection:
            return real(host, stack.enter_context(_delayed(port, delay_ms / 1000)), *rest)

        with contextlib.ExitStack() as stack:
            pod_link.connect = through  # type: ignore[assignment]
            pods = Pods(options.pods, own=1)
            watch = FeedForwardWatch(
                pods.slab, pods.lanes, pods.reports, pods.failures.put, pods.relay.describe_ask
            )
            start = time.monotonic()
            for _ in range(options.count):
                pods.ask()
            seconds = (time.monotonic() - start) / options.count
            failures = pods.failures.qsize()
            watch.close()
            pods.end()
        found[str(delay_ms)] = [seconds * 1e3, pods.reports[1].ask_s * 1e3, failures]
    pod_link.connect = real
    return found


def late(options: argparse.Namespace) -> dict[str, Any]:
    """Makes one pod exceed its time limit. Its rank must be named, and its machine must not be blamed."""
    pods = Pods(options.pods, late_ms=4000)
    start = time.monotonic()
    rank, words = pods.ask_until_named()
    seconds = time.monotonic() - start
    pods.end()
    return {"rank": rank, "words": words, "seconds": seconds}


def strangers(options: argparse.Namespace) -> dict[str, Any]:
    """Connects as strangers, which must be refused.

    They are a port scanner, a client with another epoch's key, and a client that repeats a line.
    """
    del options  # all cases have the same parameters
    listener, accepted = pod_link.Listener("127.0.0.1"), queue.Queue[Any]()
    accepting = threading.Thread(
        target=lambda: accepted.put(listener.accept(LAUNCH, 0, Deadline.after(60))), daemon=True
    )
    accepting.start()
    peer, port, refused = ranks(1)[0], listener.port, []
    socket.create_connection(("127.0.0.1", port)).close()
    with socket.create_connection(("127.0.0.1", port)) as noisy:
        noisy.sendall(b"GET / HTTP/1.1\r\n\r\n")
        noisy.settimeout(10)
        with contextlib.suppress(ConnectionError):
            assert noisy.recv(1) == b""
    os.environ[names.ENV_GROUP_KEY] = KEY
    for launch, rank in ((replace(LAUNCH, epoch=EPOCH + 1), 0), (LAUNCH, 1)):
        try:
            pod_link.connect("127.0.0.1", port, launch, rank, peer)
            refused.append("")
        except OSError as error:
            refused.append(type(error).__name__)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(3)]
        threading.Thread(target=_drip, args=(silent[0],), daemon=True).start()
        start = time.monotonic()
        proven = pod_link.connect("127.0.0.1", port, LAUNCH, 0, peer)
        other = accepted.get(timeout=10)
        seconds = time.monotonic() - start
    tokens = {"same_token": proven.token == other.token, "token": proven.token != 0}
    return {"refused": refused, **tokens, "seconds": seconds, "late_s": _wait_beside_a_dripping_client()}


def _drip(client: socket.socket) -> None:
    """Sends a byte now and then, and never a whole line."""
    with contextlib.suppress(OSError):
        while True:
            client.sendall(b"{")
            time.sleep(0.5)


def _wait_beside_a_dripping_client() -> float:
    """Returns how long a listener with a deadline of 1 s waits while a stranger sends single bytes."""
    listener = pod_link.Listener("127.0.0.1")
    with socket.create_connection(("127.0.0.1", listener.port)) as client:
        threading.Thread(target=_drip, args=(client,), daemon=True).start()
        start = time.monotonic()
        with contextlib.suppress(TimeoutError):
            listener.accept(LAUNCH, 0, Deadline.after(1))
        return time.monotonic() - start


CASES: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "stress": stress,
    "cost": measure_cost,
    "killed": killed,
    "stopped": stopped,
    "cut": cut,
    "delayed": delayed,
    "late": late,
    "strangers": strangers,
}


def main(argv: list[str]) -> int:
    """Runs one case."""
    parser = argparse.ArgumentParser(prog="python -m tests.integration.feed_forward.pod_protocol")
    parser.add_argument("case", choices=sorted(CASES))
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--pods", type=int, default=1)
    parser.add_argument("--own", type=int, default=0)
    parser.add_argument("--times", type=int, default=1)
    options = parser.parse_args(argv)
    os.environ[names.ENV_GROUP_KEY] = KEY
    print(json.dumps(CASES[options.case](options)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
