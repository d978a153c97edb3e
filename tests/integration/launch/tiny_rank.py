"""Replaces a rank: it reports to the supervisor, computes, talks with its peers, and dies on request.

The peers are chained by TCP (rank r connects to rank r - 1). So a neighbour notices a death by a real
ConnectionResetError or EOF, as in a process group. Environment:

    TINY_PORTS: JSON list of a free port for each rank.
    TINY_DO: JSON object from rank to its behaviour once it is ready:
        `idle` (default), `compute`, `raise`, `exit3`, `accuse`, `hang`, `wait`, `late` (never ready), `await`
        (waits for the next rank instead), `engine` (waits for the engine instead), `crawl` (reads until the
        trigger), `grandchild`, `allocate`, `chat`. From the trigger on: `wait_on_cue` (for rank 1), `mute`
        (its interpreter stops), `give_up` (accuses rank 1), `raise_late` (rank 1 raises after that), `nfs`
        (raises like a lost file system).
    TINY_IMPORT: behaviour of a pod's first rank before it forks: `exit3`, `hang`, or `refuse` (no forks).
    TINY_TRIGGER: path of a file. `raise`, `exit3`, `accuse`, `mute`, `give_up` and `nfs` wait for this file.
"""

import ctypes
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from heteroinfer_contract import codec, names
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.group_report import RankPhase
from vllm_heteroinfer.pod.channel import RankReporter
from vllm_heteroinfer.pod.forking import MAX_MESSAGE_BYTES, ForkAnswer, run_or_fork
from vllm_heteroinfer.pod.lost_peer import Lost


def main() -> None:
    """Runs the rank: it connects, loads, becomes ready unless `do` prevents this, and acts."""
    reporter = RankReporter.from_env(os.environ)
    rank = reporter.rank
    assert rank is not None
    do = json.loads(os.environ.get("TINY_DO", "{}")).get(str(rank), "idle")
    reporter.set_phase(RankPhase.CONNECTING)
    try:
        peers = connect(rank, json.loads(os.environ["TINY_PORTS"]))
        for peer in peers:
            threading.Thread(target=watch_peer, args=(reporter, peer), daemon=True).start()
        print(f"rank {rank} is connected", flush=True)
        reporter.set_phase(RankPhase.LOADING, 50, 100)
        if do == "crawl":
            crawl(reporter)
        if do == "await":
            reporter.set_awaited_rank(rank + 1)
        elif do == "engine":
            reporter.report_engine_wait()
        elif do != "late":
            reporter.set_phase(RankPhase.READY, 100, 100)
        act(do, reporter)
    except OSError as error:
        fail(reporter, error)


def connect(rank: int, ports: list[int]) -> list[socket.socket]:
    """Connects to the rank before, and accepts a connection of the rank after."""
    peers = []
    with socket.create_server(("127.0.0.1", ports[rank])) as server:
        if rank > 0:
            peers.append(reach(ports[rank - 1]))
        if rank + 1 < len(ports):
            server.settimeout(60)
            peers.append(server.accept()[0])
    return peers


def reach(port: int) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=60)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def watch_peer(reporter: RankReporter, peer: socket.socket) -> None:
    """Raises like gloo in torch.distributed when its peer has closed the connection."""
    peer.settimeout(None)
    try:
        ended = not peer.recv(1)
    except OSError:
        ended = True
    if ended:
        fail(reporter, RuntimeError("the other end is gone"), Lost.RANK)


def fail(reporter: RankReporter, error: Exception, lost: Lost | None = None) -> None:
    print(f"{type(error).__name__}: {error}", flush=True)
    failure = Failure(reason=FailureReason.RANK_RAISED, message=f"{type(error).__name__}: {error}")
    reporter.send_failure(failure, lost)
    os._exit(1)


def act(do: str, reporter: RankReporter) -> None:
    acts[do](reporter)
    while True:
        time.sleep(1)


def compute(reporter: RankReporter) -> None:
    steps = 0
    while True:
        steps += 1
        reporter.set_work(f"step {steps}")
        end = time.monotonic() + 0.05
        while time.monotonic() < end:
            pass
        reporter.set_step_times(steps, 0.05, 0.04, 0.005, 0.005)
        reporter.set_work(None)


def crawl(reporter: RankReporter) -> None:
    """Reads a little now and then, as from slow storage."""
    read = 0
    while not Path(os.environ["TINY_TRIGGER"]).exists():
        read += 1
        reporter.set_phase(RankPhase.LOADING, read, 1_000_000)
        time.sleep(0.1)


def chat(reporter: RankReporter) -> None:
    for number in range(200_000):
        print(f"line {number} {'x' * 60}")
    print("end of chat", flush=True)


def raise_on_cue(reporter: RankReporter) -> None:
    wait_for_trigger()
    fail(reporter, ValueError("weights of layer 3 have shape [4, 4], expected [8, 4]"))


def accuse_on_cue(reporter: RankReporter) -> None:
    """Ends like ranks with different settings, which all accuse the same rank."""
    wait_for_trigger()
    message = "rank 1 has dtype float16, rank 0 has float32"
    reporter.send_failure(Failure(reason=FailureReason.CONFIG_MISMATCH, message=message, rank=1))
    os._exit(1)


def give_up_on_cue(reporter: RankReporter) -> None:
    """Accuses rank 1 of no answer, before rank 1 has reported its own error."""
    wait_for_trigger()
    failure = Failure(reason=FailureReason.STEP_TIMEOUT, message="rank 1 gave no answer", rank=1)
    reporter.send_failure(failure)
    if reporter.rank != 1:
        time.sleep(60)


def raise_late(reporter: RankReporter) -> None:
    wait_for_trigger()
    time.sleep(0.1)
    fail(reporter, RuntimeError("expert weights: Input/output error"))


def lose_a_file_system(reporter: RankReporter) -> None:
    wait_for_trigger()
    fail(reporter, ConnectionResetError(104, "Connection reset by peer while reading /models (NFS), gloo"))


def wait_on_cue(reporter: RankReporter) -> None:
    wait_for_trigger()
    reporter.set_work("step 7", waiting_for_rank=1)


def fall_mute(reporter: RankReporter) -> None:
    """Hangs in a call that holds the interpreter's lock, so that no thread of Python runs any more."""
    wait_for_trigger()
    ctypes.PyDLL(None).sleep(600)


def exit_on_cue(reporter: RankReporter) -> None:
    wait_for_trigger()
    print("about to leave", flush=True)
    os._exit(3)


def start_daemon(reporter: RankReporter) -> None:
    # The process leaves the process group on purpose, like a daemon.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


def allocate(reporter: RankReporter) -> None:
    memory = bytearray(2 << 30)
    memory[::4096] = b"x" * len(memory[::4096])
    print("allocated", flush=True)
    while True:
        time.sleep(len(memory))


acts: dict[str, Callable[[RankReporter], None]] = {
    "idle": lambda reporter: None,
    "late": lambda reporter: None,
    "await": lambda reporter: None,
    "crawl": lambda reporter: None,
    "compute": compute,
    "chat": chat,
    "raise": raise_on_cue,
    "accuse": accuse_on_cue,
    "engine": lambda reporter: None,
    "mute": fall_mute,
    "wait_on_cue": wait_on_cue,
    "give_up": give_up_on_cue,
    "raise_late": raise_late,
    "nfs": lose_a_file_system,
    "exit3": exit_on_cue,
    "hang": lambda reporter: reporter.set_work("step 7"),
    "wait": lambda reporter: reporter.set_work("step 7", waiting_for_rank=1),
    "grandchild": start_daemon,
    "allocate": allocate,
}


def wait_for_trigger() -> None:
    path = Path(os.environ["TINY_TRIGGER"])
    while not path.exists():
        time.sleep(0.01)


def import_all(do: str) -> None:
    """Imports before the forks, and does what `do` requests: exits, hangs, or refuses the forks."""
    if do == "exit3":
        print("no module of that name", flush=True)
        os._exit(3)
    while do == "hang":
        time.sleep(1)
    if do == "refuse":
        with socket.socket(fileno=int(os.environ.pop(names.ENV_FORK_FD))) as channel:
            label = json.loads(channel.recv(MAX_MESSAGE_BYTES))["label"]
            channel.send(codec.to_json(ForkAnswer(label=label, error="Cannot allocate memory")).encode())


if __name__ == "__main__":
    if names.ENV_FORK_FD in os.environ:
        import_all(os.environ.get("TINY_IMPORT", ""))
    run_or_fork(main)
