"""`heteroinfer-worker network` for real: two processes over loopback, with a delay, and with strangers."""

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.network_measurement import NetworkMeasurement
from tests.cluster.folders import REPOSITORY
from tests.ports import free_ports
from vllm_heteroinfer.calibration.network_probe import LARGE_BYTES, MAX_MESSAGES, PROTOCOL

TIMEOUT_S = 60.0
DELAY_S = 0.02
OPENING = json.dumps({"protocol": PROTOCOL, "version": "any"}).encode() + b"\n"

pytestmark = pytest.mark.timeout(120)


class Listener:
    """A process that listens, and the lines that it has written."""

    def __init__(self, *arguments: str) -> None:
        (self.port,) = free_ports(1)
        self.process = start("--listen", "--port", str(self.port), *arguments)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        self.wait_for("listening at port ")

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.strip())

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not any(words in line for line in self.lines):
            assert time.monotonic() < deadline, self.lines
            assert self._reader.is_alive(), self.lines
            time.sleep(0.01)

    def end(self) -> int:
        """Returns the exit code of the process, which must end by itself."""
        code = self.process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        return code

    def stop(self) -> None:
        self.process.kill()
        self.end()
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert self.process.stderr is not None
        self.process.stderr.close()


def start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "vllm_heteroinfer.launch.entry", "network", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextlib.contextmanager
def listening(*arguments: str) -> Iterator[Listener]:
    listener = Listener(*arguments)
    try:
        yield listener
    finally:
        listener.stop()


def connect(host: str, port: int, *arguments: str, code: int = 0) -> tuple[str, str]:
    """Runs a client; returns what it printed, and its log."""
    process = start("--connect", host, "--port", str(port), "--wait", "30", *arguments)
    out, log = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == code, log
    return out, log


class DelayingRelay:
    """A relay between a client and a listener that delivers all bytes late, in each direction."""

    def __init__(self, port: int, delay_s: float) -> None:
        self._port, self._delay_s = port, delay_s
        self._ended = threading.Event()
        self._threads: list[threading.Thread] = []
        self._sockets = [socket.create_server(("127.0.0.1", 0))]

    @property
    def port(self) -> int:
        return int(self._sockets[0].getsockname()[1])

    def __enter__(self) -> "DelayingRelay":
        self._run(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()
        for each in self._sockets:
            each.close()

    def _run(self, target: Callable[..., None], *arguments: object) -> None:
        self._threads.append(threading.Thread(target=target, args=arguments))
        self._threads[-1].start()

    def _accept(self) -> None:
        server = self._sockets[0]
        server.settimeout(0.1)
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                one, other = server.accept()[0], socket.create_connection(("127.0.0.1", self._port))
                self._sockets += (one, other)
                self._run(self._forward, one, other)
                self._run(self._forward, other, one)

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        due: list[tuple[float, bytes]] = []
        with contextlib.suppress(ConnectionError):
            while not self._ended.is_set():
                if select.select([source], [], [], 0.001)[0]:
                    chunk = source.recv(1 << 20)
                    if not chunk:
                        return
                    due.append((time.monotonic() + self._delay_s, chunk))
                while due and due[0][0] <= time.monotonic():
                    sink.sendall(due.pop(0)[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_two_processes_measure_loopback(host: str, tmp_path: Path) -> None:
    file, message = tmp_path / "network.json", tmp_path / "message"
    with listening() as listener:
        out, log = connect(host, listener.port, "-o", str(file), "--termination-message-path", str(message))
        assert listener.end() == names.EXIT_OK, "the listener ends after a measurement"
    measured = NetworkMeasurement.from_json(file.read_text())
    assert NetworkMeasurement.from_json(message.read_text()) == measured
    assert measured.round_trip_s < 0.02
    assert min(measured.to_listener_bytes_per_s, measured.to_client_bytes_per_s) > 20e6
    assert abs(measured.time - time.time()) < TIMEOUT_S
    assert out == ""
    assert "round trip" in log


def test_a_delay_of_the_network_is_in_the_round_trip_and_not_in_the_rate(tmp_path: Path) -> None:
    with listening() as listener, DelayingRelay(listener.port, DELAY_S) as relay:
        slow = NetworkMeasurement.from_json(connect("127.0.0.1", relay.port)[0])
    assert 2 * DELAY_S <= slow.round_trip_s < 3 * DELAY_S
    # 4 MiB would reach only 100 MB/s if the delay counted as transfer.
    assert min(slow.to_listener_bytes_per_s, slow.to_client_bytes_per_s) > 20e6


def test_clients_measure_one_after_another() -> None:
    with listening("--linger", "30") as listener:
        clients = [
            start("--connect", "127.0.0.1", "--port", str(listener.port), "--wait", "60") for _ in "ab"
        ]
        for client in clients:
            out, log = client.communicate(timeout=TIMEOUT_S)
            assert client.returncode == 0, log
            NetworkMeasurement.from_json(out)
        begins = [line for line in listener.lines if line.endswith("measured the network")]
        assert len(begins) == 2


def header(ask_bytes: int, answer_bytes: int) -> bytes:
    return struct.pack(">II", ask_bytes, answer_bytes)


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "first line: must be JSON"),
        (b"x" * 100_000, "first line: must have at most 1024 bytes"),
        (b"\xff\xfe\n", "first line: must be JSON"),
        (b'{"protocol": 99, "version": "1"}\n', "client: must have protocol 1 (got 99)"),
        (OPENING + header(LARGE_BYTES + 1, 1), "message.ask_bytes: must be at most 4194304"),
        (OPENING + header(1, 2**32 - 1), "message.answer_bytes: must be at most 4194304"),
        (OPENING + header(0, 1) * (MAX_MESSAGES + 1), f"sent more than {MAX_MESSAGES} messages"),
        (OPENING + b"\0", "closed the connection"),
        (b"", "closed the connection"),
        (OPENING + header(0, 0), "did not measure the network with version"),
    ],
)
def test_a_stranger_is_refused_and_the_next_client_measures(sent: bytes, words: str) -> None:
    with listening() as listener:
        with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
            with contextlib.suppress(OSError):  # the listener may close the connection earlier
                stranger.sendall(sent)
                stranger.shutdown(socket.SHUT_WR)
            listener.wait_for(words)
        connect("127.0.0.1", listener.port)
        assert listener.end() == names.EXIT_OK


@pytest.mark.parametrize("sent", [b"", b'{"proto', OPENING, OPENING + header(LARGE_BYTES, 1)])
def test_a_silent_stranger_occupies_the_listener_for_a_limited_time(sent: bytes) -> None:
    with listening("--limit", "8") as listener:
        with socket.create_connection(("127.0.0.1", listener.port)) as stranger:
            stranger.sendall(sent)
            start_s = time.monotonic()
            connect("127.0.0.1", listener.port)  # waits for its turn
            assert time.monotonic() - start_s < 30
        assert any("the other end was not done within" in line for line in listener.lines)


def test_a_listener_without_a_client_ends() -> None:
    with listening("--wait", "0.5") as listener:
        assert listener.end() == names.EXIT_USAGE
        assert listener.lines[-1] == (
            "heteroinfer-worker network: listener: no client measured the network within 0.5 s. Run "
            "`heteroinfer-worker network --connect HOST` on the other machine, and let that machine reach "
            "this port"
        )


def test_sigterm_ends_a_listener() -> None:
    with listening() as listener:
        listener.process.send_signal(signal.SIGTERM)
        assert listener.end() == 128 + signal.SIGTERM


def test_a_port_in_use_is_reported() -> None:
    with listening() as listener:
        other = start("--listen", "--port", str(listener.port))
        _, log = other.communicate(timeout=TIMEOUT_S)
        assert other.returncode == names.EXIT_USAGE
        assert f"port {listener.port}: cannot be opened (Address already in use). End the program" in log


def test_a_client_without_a_listener_ends_and_reports_how_to_start_one(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    message = tmp_path / "message"
    arguments = ("--wait", "1", "--termination-message-path", str(message))
    _, log = connect("127.0.0.1", port, *arguments, code=names.EXIT_USAGE)
    assert f"127.0.0.1 port {port}: no listener answered within 1 s (" in log
    assert "Run `heteroinfer-worker network --listen` on the other machine" in log
    assert json.loads(message.read_text())["message"] in log
    _, log = connect("no-such-host.invalid", port, "--wait", "1", code=names.EXIT_USAGE)
    assert "no listener answered within 1 s" in log
    _, log = connect("a" * 70, port, "--wait", "1", code=names.EXIT_USAGE)
    assert "must be a host name or an address" in log or "no listener answered" in log


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.6\n", "another program answers (first line: must be JSON"),
        (b"{}\n", "another program answers (first line: field 'protocol' is missing"),
        (b'{"protocol": 2, "version": "1"}\n', "must have protocol 1 (got 2)"),
        (b'{"protocol": 1, "version": "0.0.9"}\n', "the listener has version '0.0.9' of HeteroInfer"),
    ],
)
def test_a_client_refuses_another_program_and_another_version(answer: bytes, words: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with server.accept()[0] as accepted:
                accepted.recv(1024)
                accepted.sendall(answer)
                accepted.recv(1)

        other = threading.Thread(target=serve)
        other.start()
        try:
            _, log = connect("127.0.0.1", server.getsockname()[1], code=names.EXIT_USAGE)
        finally:
            other.join(TIMEOUT_S)
    assert words in log


def test_a_measurement_that_takes_too_long_fails_with_a_message() -> None:
    with listening() as listener, DelayingRelay(listener.port, 0.3) as relay:
        _, log = connect("127.0.0.1", relay.port, "--limit", "1", code=names.EXIT_USAGE)
        assert f"127.0.0.1 port {relay.port}: the measurement failed (" in log
        assert "or raise --limit of both (got 1 s)" in log


@pytest.mark.parametrize(
    "arguments",
    [
        ("--listen", "--connect", "a"),
        (),
        ("--listen", "--port", "0"),
        ("--listen", "--wait", "nan"),
        ("--connect", "a", "--limit", "-1"),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...]) -> None:
    process = start(*arguments)
    _, log = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, "usage: heteroinfer-worker network" in log) == (2, True)


@pytest.mark.parametrize("prefix", ["10.7.0.0/16", "fd07::/56"])
def test_the_rate_of_a_slow_direction_is_measured(prefix: str) -> None:
    user = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    apart = ("unshare", *user, "--net", "--kill-child", "--fork")
    module = "tests.integration.calibration.limited_network"
    done = subprocess.run(
        [*apart, sys.executable, "-m", module, prefix],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    measured = NetworkMeasurement.from_json(done.stdout)
    assert 0.7 * 12.5e6 < measured.to_listener_bytes_per_s < 1.1 * 12.5e6
    assert measured.to_client_bytes_per_s > 2 * 12.5e6
