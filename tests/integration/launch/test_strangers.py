"""Tests that a stranger on the network cannot end a group, replace a pod or learn data of the group."""

import asyncio
import contextlib
import dataclasses
import json
import socket
import time
from http import HTTPStatus
from pathlib import Path

from heteroinfer_contract import codec, names
from heteroinfer_contract.group_key import GroupKey
from tests.integration.launch.groups import (
    TinyGroup,
    tiny_group,
    wait_until,
)
from tests.integration.launch.wire import wired
from tests.ports import free_port
from vllm_heteroinfer.launch.handshake import build_opening
from vllm_heteroinfer.launch.supervisor_messages import Hello, Message
from vllm_heteroinfer.pod.health_server import MAX_CONNECTIONS, REQUEST_TIMEOUT_S, HealthAnswer, HealthServer

IDLE = 300
ON_THEIR_WAY = 32
"""Connections that one turn of the loop accepts before it closes the oldest ones."""
LONGER_THAN_A_HEARTBEAT_S = 2.0
STRANGER = GroupKey.of_group(b"s" * 32, "uid-1")


def answer_to(port: int, sent: bytes, timeout_s: float = 10.0) -> bytes:
    """Sends bytes to a port, and returns the whole answer until the connection is closed."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), 5) as stranger:
        stranger.sendall(sent)
        stranger.settimeout(timeout_s)
        with contextlib.suppress(ConnectionResetError):
            while chunk := stranger.recv(65536):
                got += chunk
    return got


def lives_on(group: TinyGroup) -> None:
    assert all(pod.is_ready() for pod in group.pods), group.logs()
    assert [pod.process.poll() for pod in group.pods] == [None, None]


def test_idle_connections_forged_and_replayed_hellos_end_nothing(tmp_path: Path) -> None:
    with tiny_group(tmp_path) as group, wired(group) as wire, contextlib.ExitStack() as idle:
        group.wait_ready()
        control, health = group.launches[0].leader.control_port, group.launches[0].leader.health_port
        started = time.monotonic()
        for port in (control, health, group.launches[1].address.health_port):
            for _ in range(IDLE):
                idle.enter_context(socket.create_connection(("127.0.0.1", port), 5))
        wait_until(lambda: time.monotonic() - started > LONGER_THAN_A_HEARTBEAT_S, 10)
        lives_on(group)
        launch = group.launches[1]
        hello = Hello(group_uid="uid-1", epoch=launch.epoch, plan_hash=group.plan.hash, pod=1)
        plain = codec.to_json(Message(hello=hello)).encode() + b"\n"
        forged = codec.to_json(build_opening(STRANGER.of_epoch(launch.epoch), 1)).encode() + b"\n"
        for sent in (plain, forged, b"GET / HTTP/1.1\r\n\r\n", b"\x00" * 5000 + b"\n", b"\n"):
            assert answer_to(control, sent) == b""
        recorded = b"".join(wire.sent)
        answer = json.loads(answer_to(control, recorded))
        assert set(answer) == {"code", "nonce"}, "a recorded hello gets a new challenge, and no connection"
        lives_on(group)
        assert "connected again" not in group.pods[0].log.read_text()


def test_disconnects_and_counts_clients_that_do_not_read(tmp_path: Path) -> None:
    """A report of 256 ranks exceeds the kernel's buffer, so such connections would stay open forever."""
    with tiny_group(tmp_path, (1, 255)) as group, contextlib.ExitStack() as strangers:
        leader = group.start_pod(0)
        wait_until(lambda: "started api" in leader.log.read_text(), 20, group.logs)
        assert len(leader.get(names.PATH_GROUP)[1]) > 40_000
        files = Path(f"/proc/{leader.process.pid}/fd")
        before, most = len(list(files.iterdir())), 0
        for _ in range(IDLE):
            ask_and_read_nothing(strangers, leader.address.health_port)
            most = max(most, len(list(files.iterdir())))
        assert most <= before + MAX_CONNECTIONS + ON_THEIR_WAY
        # The last connections are accepted after the first ones have been answered.
        wait_until(lambda: len(list(files.iterdir())) <= before, 3 * REQUEST_TIMEOUT_S, group.logs)
        assert leader.is_alive()


async def test_many_simultaneous_clients_are_accepted_a_few_at_a_time() -> None:
    """If the kernel's queue is full, a client tries again only after a second.

    A heartbeat may not take that long.
    """
    health = HealthServer(lambda request: HealthAnswer(status=HTTPStatus.OK, body="ok"))
    port = free_port()
    await health.start("127.0.0.1", port)
    with contextlib.ExitStack() as strangers:
        for _ in range(IDLE):  # the loop of this process does not run in the meantime
            strangers.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.5))
        tasks = len(asyncio.all_tasks())
        most = 0
        for _ in range(IDLE):
            await asyncio.sleep(0)
            most = max(most, len(asyncio.all_tasks()) - tasks)
            tasks = len(asyncio.all_tasks())
        assert 0 < most <= ON_THEIR_WAY
    health.close()
    await asyncio.sleep(0.1)


def ask_and_read_nothing(strangers: contextlib.ExitStack, port: int) -> None:
    stranger = strangers.enter_context(socket.socket())
    stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
    stranger.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 88)
    stranger.settimeout(5)
    stranger.connect(("127.0.0.1", port))
    stranger.sendall(f"GET {names.PATH_GROUP} HTTP/1.1\r\n\r\n".encode())


def test_open_ports_do_not_reveal_the_group(tmp_path: Path) -> None:
    with tiny_group(tmp_path) as group:
        group.start()
        group.wait_ready()
        answer = group.pods[0].get(names.PATH_GROUP)[1]
        report = json.loads(answer)
        assert (report["group_uid"], report["epoch"], report["plan_hash"]) == ("", 0, "")
        assert group.plan.hash not in answer
        assert len(report["ranks"]) == 2, "progress and step times are open, as the metrics are"
        whole = group.status()
        assert (whole.group_uid, whole.epoch, whole.plan_hash) == ("uid-1", 2, group.plan.hash)


def test_a_head_request_is_answered_without_a_body(tmp_path: Path) -> None:
    with tiny_group(tmp_path, (1,)) as group:
        group.start()
        group.wait_ready()
        port = group.launches[0].address.health_port
        wholes = [
            answer_to(port, f"{method} /readyz HTTP/1.1\r\n\r\n".encode()) for method in ("GET", "HEAD")
        ]
    (head, body), (only_head, nothing) = (whole.split(b"\r\n\r\n", 1) for whole in wholes)
    assert (body, nothing) == (b"ready\n", b"")
    assert only_head == head, "the same headers as for a GET"


def test_a_group_without_a_key_shows_its_uid_to_everyone(tmp_path: Path) -> None:
    with tiny_group(tmp_path, key=None) as group:
        group.start()
        group.wait_ready()
        assert json.loads(group.pods[0].get(names.PATH_GROUP)[1])["group_uid"] == "uid-1"


def test_a_pod_with_another_key_waits_and_the_group_keeps_running(tmp_path: Path) -> None:
    with tiny_group(tmp_path) as group:
        group.start_pod(0)
        group.env[names.ENV_GROUP_KEY] = STRANGER.text
        stray = group.start_pod(1)
        wait_until(lambda: "without an answer" in stray.log.read_text(), 20, group.logs)
        leader = group.pods[0].log
        wait_until(lambda: "does not have this epoch's key" in leader.read_text(), 5, group.logs)
        assert (group.pods[0].process.poll(), stray.process.poll()) == (None, None)


def test_a_reset_connection_ends_no_epoch(tmp_path: Path) -> None:
    with tiny_group(tmp_path, do=dict.fromkeys(range(2), "compute")) as group, wired(group) as wire:
        group.wait_ready()
        log = group.pods[1].log
        for _ in range(3):
            before = log.read_text().count("reconnected to the leader")
            wire.reset()
            wait_until(lambda: log.read_text().count("reconnected to the leader") > before, 5, group.logs)  # noqa: B023 - called immediately
            wait_until(lambda: all(pod.is_ready() for pod in group.pods), 2, group.logs)
        started = time.monotonic()
        wait_until(lambda: time.monotonic() - started > LONGER_THAN_A_HEARTBEAT_S, 10)
        lives_on(group)


def test_a_lost_hello_ends_no_epoch(tmp_path: Path) -> None:
    with tiny_group(tmp_path, do=dict.fromkeys(range(2), "compute")) as group, wired(group) as wire:
        group.wait_ready()
        wire.swallows = 1
        wire.reset()
        log = group.pods[1].log
        wait_until(lambda: "reconnected to the leader" in log.read_text(), 5, group.logs)
        assert wire.swallows == 0
        started = time.monotonic()
        wait_until(lambda: time.monotonic() - started > LONGER_THAN_A_HEARTBEAT_S, 10)
        lives_on(group)


def test_a_pod_is_queried_at_its_own_address(tmp_path: Path) -> None:
    """The connection comes from another address, at which no process listens.

    The pod connects again after 0.5 s.
    """
    with tiny_group(tmp_path, do=dict.fromkeys(range(2), "compute")) as group:
        leader, follower = group.launches[0].addresses
        hosts = (leader, dataclasses.replace(follower, host="127.0.0.2"))
        group.launches = [dataclasses.replace(launch, addresses=hosts) for launch in group.launches]
        with wired(group) as wire:
            wait_until(group.pods[0].is_ready, 60, group.logs)
            wire.refuses = True
            wire.reset()
            cut = time.monotonic()
            wait_until(lambda: time.monotonic() - cut > 0.5, 10)
            wire.refuses = False
            log = group.pods[1].log
            wait_until(lambda: "reconnected to the leader" in log.read_text(), 5, group.logs)
            wait_until(group.pods[0].is_ready, 2, group.logs)
            assert [pod.process.poll() for pod in group.pods] == [None, None], group.logs()


def test_a_dns_answer_of_5_seconds_ends_no_epoch(tmp_path: Path) -> None:
    """Each DNS answer takes 5 s, longer than the limit for heartbeats.

    The group still starts, and a reset connection ends no epoch.
    """
    slow = {"PYTHONPATH": str(Path(__file__).parent / "slow_names"), "SLOW_NAMES_SECONDS": "5.1"}
    with tiny_group(tmp_path, env=slow) as group:
        named = tuple(dataclasses.replace(a, host="localhost") for a in group.launches[0].addresses)
        group.launches = [dataclasses.replace(launch, addresses=named) for launch in group.launches]
        started = time.monotonic()
        with wired(group) as wire:
            group.wait_ready()
            assert time.monotonic() - started > 5, "no name was resolved"
            log = group.pods[1].log
            for again in (1, 2):
                asked = log.read_text().count("asks for localhost")
                wire.reset()
                wait_until(
                    lambda: log.read_text().count("reconnected to the leader") == again,  # noqa: B023 - called immediately
                    LONGER_THAN_A_HEARTBEAT_S,
                    group.logs,
                )
                assert log.read_text().count("asks for localhost") == asked, "its address is known"
            since = time.monotonic()
            wait_until(lambda: time.monotonic() - since > LONGER_THAN_A_HEARTBEAT_S, 10)
            lives_on(group)
