"""Tests the client that queries leaders for reports about their groups, with real HTTP on loopback."""

import asyncio
import contextlib
import errno
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from http import HTTPStatus

import pytest
import pytest_asyncio
from aiohttp import web

from heteroinfer_contract import names
from heteroinfer_contract.group_key import GroupKey
from heteroinfer_contract.group_report import GroupReport, RankStatus
from heteroinfer_contract.plan import MAX_WORLD_SIZE
from heteroinfer_contract.report_access import CHALLENGE_HEADER, CODE_HEADER, SCHEME, ReportGuard
from heteroinfer_operator.cluster import PodView, ResourceKey
from heteroinfer_operator.kube.leader_client import (
    REPORT_VALID_S,
    TEST_EVERY_S,
    UNREADY_TIMEOUT_S,
    LeaderClient,
)
from heteroinfer_operator.kube.trim import PodRecord
from heteroinfer_operator.manifests.group_key_secret import group_key_secret_name
from heteroinfer_operator.manifests.identity import GroupRef, Owner
from heteroinfer_operator.reconcile.silent_leaders import MIN_SILENT_S
from heteroinfer_operator.report_client import MAX_REPORT_BYTES
from tests.integration.operator.own_servers import stream_server
from tests.ports import free_port
from vllm_heteroinfer.pod.health_server import HealthAnswer, HealthRequest, HealthServer

SAID = GroupReport(group_uid="u/0", epoch=1, plan_hash="p", ready=True, message="", ranks=())


@dataclass(slots=True)
class Leader:
    """Serves a leader's health port."""

    port: int = 0
    asked: int = 0
    body: str = field(default_factory=SAID.to_json)
    status: int = 200
    runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.add_routes([web.get(names.PATH_GROUP, self._group)])
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        await web.TCPSite(self.runner, "127.0.0.1", port).start()
        self.port = self.runner.addresses[0][1]

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()

    async def _group(self, request: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(text=self.body, status=self.status)


@contextlib.asynccontextmanager
async def serving(port: int = 0) -> AsyncIterator[Leader]:
    leader = Leader()
    await leader.start(port)
    yield leader
    await leader.stop()


@pytest_asyncio.fixture
async def leader() -> AsyncIterator[Leader]:
    async with serving() as leader:
        yield leader


@contextlib.contextmanager
def deaf(port: int) -> Iterator[int]:
    """Opens a port whose kernel drops connections after the first one in its queue."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", port), backlog=0))
        port = server.getsockname()[1]
        for _ in range(2):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        yield port


def pod(port: int, *, uid: str = "a", ready: bool = True, leads: bool = True, epoch: int = 1) -> PodRecord:
    labels = {names.LABEL_GROUP: "3", names.LABEL_EPOCH: str(epoch)} | (
        {names.LABEL_LEADER: "true"} if leads else {}
    )
    view = PodView(name=uid, uid=uid, labels=labels, created=datetime.now(UTC), ready=ready)
    key = ResourceKey(namespace="ns", name="llama")
    return PodRecord(view=view, key=key, owner_uid="o", ip="127.0.0.1", health_port=port)


async def test_a_ready_leader_is_queried_rarely(leader: Leader) -> None:
    now = 100.0
    client = LeaderClient(clock=lambda: now)
    try:
        assert await client.observe([pod(leader.port), pod(1, uid="b", leads=False)]) == {3: SAID}
        assert await client.observe([pod(leader.port)]) == {3: SAID}
        assert leader.asked == 1
        now += REPORT_VALID_S
        assert await client.observe([pod(leader.port)]) == {3: SAID}
        assert leader.asked == 2
        assert await client.observe([pod(leader.port, uid="next-epoch")]) == {3: SAID}
        assert leader.asked == 3
    finally:
        await client.close()


async def test_a_leader_with_a_key_identifies_itself_to_its_operator() -> None:
    """Without the key, or with another key, the report contains no group, epoch or plan."""
    operator_key, sent = b"k" * 32, replace(SAID, group_uid="o/3")
    owner = Owner(key=ResourceKey(namespace="ns", name="llama"), uid="o")
    group = GroupRef(owner=owner, index=3)
    key = GroupKey.of_group(operator_key, group.uid)
    guard, now = ReportGuard(key.of_epoch(7)), time.monotonic

    def answer(request: HealthRequest) -> HealthAnswer:
        challenge = guard.accepted_challenge(request.credentials, now())
        headers = {CHALLENGE_HEADER: f"{SCHEME} {guard.challenge(now())}"}
        if challenge is None:
            body = replace(sent, group_uid="", epoch=0, plan_hash="").to_json()
            return HealthAnswer(status=HTTPStatus.OK, body=body, headers=headers)
        headers[CODE_HEADER] = guard.code_of_report(challenge, sent.to_json() + "\n")
        return HealthAnswer(status=HTTPStatus.OK, body=sent.to_json(), headers=headers)

    server, port = HealthServer(answer), free_port()
    await server.start("127.0.0.1", port)
    leader = pod(port)
    labels = {**leader.view.labels, names.LABEL_EPOCH: "7"}
    secret = group_key_secret_name(group, key)
    leader = replace(leader, view=replace(leader.view, labels=labels, key_secret=secret))
    try:
        for own, whole in ((operator_key, True), (b"x" * 32, False), (None, False)):
            client = LeaderClient(own)
            for _ in range(2):
                unready = replace(leader, view=replace(leader.view, ready=False))
                (report,) = (await client.observe([unready])).values()
                assert (report == sent, report.epoch) == (whole, 1 if whole else 0)
            await client.close()
    finally:
        server.close()


async def test_an_unreadable_answer_of_a_leader_is_ignored(leader: Leader) -> None:
    client = LeaderClient()
    try:
        leader.body = '{"ready": "yes"}'
        assert await client.observe([pod(leader.port, uid="b")]) == {}
        leader.body, leader.status = SAID.to_json(), 503
        assert await client.observe([pod(leader.port, uid="c")]) == {}
        assert leader.asked == 2
        assert await client.observe([pod(1, uid="nobody-listens")]) == {}
    finally:
        await client.close()


async def test_an_answer_in_pieces_is_read_completely() -> None:
    """From 64 ranks on, the answer arrives in several pieces."""
    ranks = tuple(RankStatus(rank=rank, pod=rank) for rank in range(MAX_WORLD_SIZE))
    sent = replace(SAID, ranks=ranks)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = sent.to_json().encode()
        writer.write(f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        for start in range(0, len(body), 8192):
            writer.write(body[start : start + 8192])
            await writer.drain()
            await asyncio.sleep(0.005)

    client = LeaderClient()
    async with stream_server(answer) as server:
        try:
            assert await client.observe([pod(server.sockets[0].getsockname()[1])]) == {3: sent}
        finally:
            await client.close()


@pytest.mark.parametrize(
    "body", ["<html>sorry</html>", "[" * 100_000, "x" * (2 * MAX_REPORT_BYTES), "\ufffd"]
)
async def test_a_200_answer_without_a_report_is_ignored(leader: Leader, body: str) -> None:
    leader.body = body
    client = LeaderClient()
    try:
        for _ in range(2):
            assert await client.observe([pod(leader.port, ready=False)]) == {}
        (reported,) = client.take_invalid_reports(pod(leader.port).key)
        assert reported.startswith("pod a: the operator ignores this pod's report, which is invalid: ")
        assert client.take_invalid_reports(pod(leader.port).key) == []
    finally:
        await client.close()


async def test_an_unready_leader_is_queried_each_time(leader: Leader) -> None:
    """The group may sleep, or may have just been Ready."""
    client = LeaderClient()
    try:
        assert await client.observe([pod(leader.port)]) == {3: SAID}
        for asked in (2, 3):
            assert await client.observe([pod(leader.port, ready=False)]) == {3: SAID}
            assert leader.asked == asked
        follower = pod(1, uid="b", ready=False, leads=False)
        assert await client.observe([pod(leader.port), follower]) == {3: SAID}
        assert leader.asked == 4
    finally:
        await client.close()


async def test_an_unready_leader_is_not_waited_for() -> None:
    client = LeaderClient()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        try:
            started = time.monotonic()
            assert await client.observe([pod(silent.getsockname()[1], ready=False)]) == {}
            assert time.monotonic() - started < 5 * UNREADY_TIMEOUT_S
        finally:
            await client.close()


@pytest.mark.parametrize("ready", [True, False])
async def test_a_leader_that_timed_out_is_skipped_for_a_while(ready: bool) -> None:
    now, asked = 100.0, 0

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        asked += 1
        await reader.read()  # until the client gives up

    client = LeaderClient(clock=lambda: now)
    async with stream_server(take) as silent:
        try:
            leader = pod(silent.sockets[0].getsockname()[1], ready=ready)
            for _ in range(3):
                assert await client.observe([leader]) == {}
            assert asked == 1
            now += REPORT_VALID_S
            assert await client.observe([leader]) == {}
            assert asked == 2
        finally:
            await client.close()


async def test_the_leader_of_a_failing_group_is_not_queried(leader: Leader) -> None:
    client = LeaderClient()
    try:
        follower = pod(1, uid="b", ready=False, leads=False)
        gone = replace(follower, view=replace(follower.view, deleting=True))
        assert await client.observe([pod(leader.port), gone]) == {}
        assert leader.asked == 0
    finally:
        await client.close()


async def ask_for(client: LeaderClient, leader: PodRecord, clock: list[float], seconds: int) -> float | None:
    """Queries the leader once a second for some seconds of the client's clock.

    Returns the leader's silence.
    """
    for _ in range(seconds):
        clock[0] += 1.0
        await client.observe([leader])
    return client.silences([leader]).get((3, 1))


async def test_a_leader_that_no_longer_accepts_connections_is_silent(leader: Leader) -> None:
    clock = [100.0]
    client = LeaderClient(clock=lambda: clock[0])
    gone, never_reached = pod(leader.port), pod(1, uid="b")
    try:
        assert await client.observe([gone]) == {3: SAID}
        clock[0] += REPORT_VALID_S
        gone = replace(gone, health_port=1)  # no process listens there
        assert await ask_for(client, gone, clock, 2) == 0.0, "two failed connections prove nothing"
        assert await ask_for(client, gone, clock, 2) == 3.0
        assert await ask_for(client, never_reached, clock, 9) is None, "it never answered this operator"
        gone = replace(gone, health_port=leader.port)
        clock[0] += REPORT_VALID_S
        assert await client.observe([gone]) == {3: SAID}
        assert client.silences([gone]) == {}
    finally:
        await client.close()


async def test_an_unreachable_node_is_silent_and_queried_rarely(leader: Leader) -> None:
    clock = [100.0]
    client = LeaderClient(clock=lambda: clock[0])
    with deaf(0) as port:
        try:
            assert await client.observe([pod(leader.port)]) == {3: SAID}
            clock[0] += REPORT_VALID_S
            assert await ask_for(client, pod(port), clock, 4) == 3.0
            started = time.monotonic()
            await ask_for(client, pod(port), clock, 2)
            before = time.monotonic()
            await ask_for(client, pod(port), clock, int(REPORT_VALID_S) - 1)
            assert time.monotonic() - before < 2 * (before - started), (
                "once in REPORT_VALID_S, not each second"
            )
        finally:
            await client.close()


async def test_a_busy_leader_is_not_silent(leader: Leader) -> None:
    """Its kernel accepts connections, but the leader answers too late."""

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()  # until the client gives up

    clock = [100.0]
    client = LeaderClient(clock=lambda: clock[0])
    async with stream_server(take) as busy:
        try:
            assert await client.observe([pod(leader.port)]) == {3: SAID}
            clock[0] += REPORT_VALID_S
            assert await ask_for(client, pod(busy.sockets[0].getsockname()[1]), clock, 15) is None
        finally:
            await client.close()


async def test_an_idle_groups_unreachable_leader_is_silent_within_two_seconds() -> None:
    """No reconcile queries it: the client tries each leader that has answered before."""
    client, changed, port = LeaderClient(), asyncio.Queue[ResourceKey](), free_port()
    known = pod(port)
    try:
        async with serving(port) as leader, asyncio.TaskGroup() as group:
            watch = group.create_task(client.test_connections(changed.put_nowait))
            assert await client.observe([known]) == {3: SAID}
            assert await client.observe([pod(1, uid="never reached")]) == {}
            await asyncio.sleep(2 * TEST_EVERY_S)
            assert (leader.asked, changed.empty()) == (1, True)
            await leader.stop()
            with deaf(port):
                before = time.monotonic()
                assert await asyncio.wait_for(changed.get(), 5) == known.key
                assert time.monotonic() - before < 2.1
                assert client.silences([known])[3, 1] >= MIN_SILENT_S
                await asyncio.sleep(2 * TEST_EVERY_S)
                assert changed.empty(), "the change is reported once"
            await leader.start(port)
            assert await asyncio.wait_for(changed.get(), 5) == known.key
            assert client.silences([known]) == {}
            client.limit_tests_to(known.key, [])
            await leader.stop()
            await asyncio.sleep(2 * TEST_EVERY_S)
            assert changed.empty(), "a pod that is gone is not watched"
            watch.cancel()
    finally:
        await client.close()


async def test_retries_of_refused_connections_wait_as_long_as_timeouts(leader: Leader) -> None:
    """Three refusals within a millisecond prove no more than one."""
    client, changed = LeaderClient(), asyncio.Queue[ResourceKey]()
    known = pod(leader.port)
    try:
        assert await client.observe([known]) == {3: SAID}
        await leader.stop()
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(client.test_connections(changed.put_nowait))
            assert await asyncio.wait_for(changed.get(), 5) == known.key
            assert client.silences([known])[3, 1] >= MIN_SILENT_S
            watch.cancel()
    finally:
        await client.close()


async def test_running_out_of_descriptors_neither_ends_the_watch_nor_blames_a_leader(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, changed, known = LeaderClient(), asyncio.Queue[ResourceKey](), pod(leader.port)

    def no_socket(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    try:
        assert await client.observe([known]) == {3: SAID}
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(client.test_connections(changed.put_nowait))
            with monkeypatch.context() as patch:
                patch.setattr("heteroinfer_operator.report_client.socket.socket", no_socket)
                await asyncio.sleep(2 * TEST_EVERY_S)
            assert (changed.empty(), client.silences([known])) == (True, {})
            await leader.stop()
            assert await asyncio.wait_for(changed.get(), 5) == known.key
            watch.cancel()
    finally:
        await client.close()


async def test_a_leader_that_was_busy_before_it_became_ready_is_watched() -> None:
    """Earlier, a missing answer during the start counted as the state of the Ready group."""
    client, changed, busy = LeaderClient(), asyncio.Queue[ResourceKey](), asyncio.Event()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        if not busy.is_set():
            await asyncio.sleep(1)
        body = SAID.to_json().encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

    try:
        async with stream_server(take) as server, asyncio.TaskGroup() as group:
            port = server.sockets[0].getsockname()[1]
            watch = group.create_task(client.test_connections(changed.put_nowait))
            assert await client.observe([pod(port, ready=False)]) == {}
            busy.set()
            assert await client.observe([pod(port)]) == {3: SAID}
            server.close()
            assert await asyncio.wait_for(changed.get(), 5) == pod(port).key
            watch.cancel()
    finally:
        await client.close()


async def test_silence_persists_while_another_pod_is_unready() -> None:
    client, port = LeaderClient(), free_port()
    known, other = pod(port), pod(port, uid="b", leads=False)
    late = replace(other, view=replace(other.view, ready=False))
    try:
        async with serving(port):
            assert await client.observe([known, other]) == {3: SAID}
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(client.test_connections(lambda key: None))
            await asyncio.sleep(2.5 * TEST_EVERY_S)
            for pods in ([known, late], [known, other]):
                client.limit_tests_to(known.key, pods)
                await client.observe(pods)
            assert client.silences([known, other])[3, 1] >= MIN_SILENT_S
            watch.cancel()
    finally:
        await client.close()


async def test_silence_belongs_to_the_epoch_of_the_leader(leader: Leader) -> None:
    client, port = LeaderClient(), free_port()
    mine, other = pod(leader.port), pod(port, uid="other", epoch=2)
    try:
        async with serving(port):
            await client.observe([mine])
            await client.observe([other])
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(client.test_connections(lambda key: None))
            await asyncio.sleep(2.5 * TEST_EVERY_S)
            watch.cancel()
        assert list(client.silences([mine, other])) == [(3, 2)]
    finally:
        await client.close()
