"""Both ends of the channel between supervisor and rank, over a real socket pair."""

import fcntl
import os
import socket
import struct
import termios
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import MAX_TERMINATION_MESSAGE_BYTES, Failure, FailureReason
from heteroinfer_contract.group_report import RankPhase
from vllm_heteroinfer.pod import channel as pod_channel
from vllm_heteroinfer.pod.channel import (
    MAX_LINE_BYTES,
    LineBuffer,
    LineSender,
    RankChannel,
    RankMessage,
    RankReporter,
    SupervisorMessage,
)
from vllm_heteroinfer.pod.lost_peer import Lost

LIMIT_S = 5.0


@pytest.fixture
def ends() -> Iterator[tuple[RankChannel, RankReporter]]:
    channel, theirs = RankChannel.open_pair()
    env = {names.ENV_RANK_CHANNEL_FD: str(os.dup(theirs.fileno())), names.ENV_RANK: "3"}
    theirs.close()
    reporter = RankReporter.from_env(env, on_supervisor_lost=lambda: None)
    yield channel, reporter
    reporter.close()
    channel.close()


def read_until(channel: RankChannel, count: int) -> list[RankMessage]:
    messages: list[RankMessage] = []
    deadline = time.monotonic() + LIMIT_S
    while len(messages) < count and time.monotonic() < deadline:
        messages += channel.read()
    return messages


def test_the_reporter_sends_the_newest_state_at_intervals(ends: tuple[RankChannel, RankReporter]) -> None:
    channel, reporter = ends
    assert reporter.rank == 3
    read_until(channel, 1)
    reporter.set_phase(RankPhase.LOADING, 5, 10)
    reporter.set_phase(RankPhase.READY, 10, 10)
    reporter.set_step_times(4, 0.5, 0.25, 0.125, 0.0625)
    reporter.set_work("step 5", waiting_for_rank=2)
    report = read_until(channel, 2)[-1].report
    assert report is not None
    assert (report.phase, report.loaded_bytes, report.total_bytes) == (RankPhase.READY, 10, 10)
    assert (report.steps, report.step_s, report.compute_s, report.wait_s, report.transfer_s) == (
        4,
        0.5,
        0.25,
        0.125,
        0.0625,
    )
    assert (report.busy, report.waiting_for_rank) == ("step 5", 2)


def test_failure_is_sent_before_the_call_returns(ends: tuple[RankChannel, RankReporter]) -> None:
    channel, reporter = ends
    failure = Failure(reason=FailureReason.RANK_RAISED, message="no", rank=3)
    reporter.send_failure(failure)
    assert [m.failure for m in channel.read() if m.failure] == [failure]


def test_the_heartbeat_age_is_that_of_the_group_and_grows_without_messages(
    ends: tuple[RankChannel, RankReporter],
) -> None:
    channel, reporter = ends
    channel.send(SupervisorMessage(group_age_s=40.0))
    deadline = time.monotonic() + LIMIT_S
    while reporter.heartbeat_age_s() < 40.0 and time.monotonic() < deadline:
        pass
    first = reporter.heartbeat_age_s()
    assert 40.0 <= first < 40.0 + LIMIT_S
    assert reporter.heartbeat_age_s() > first


def test_a_rank_keeps_a_request_to_drain_and_reports_when_it_has_drained(
    ends: tuple[RankChannel, RankReporter],
) -> None:
    channel, reporter = ends
    assert not reporter.asked_to_drain()
    channel.send(SupervisorMessage(group_age_s=0.0, drain=True))
    channel.send(SupervisorMessage(group_age_s=0.0))
    deadline = time.monotonic() + LIMIT_S
    while not reporter.asked_to_drain() and time.monotonic() < deadline:
        pass
    assert reporter.asked_to_drain()
    reporter.report_drained()
    said: list[bool] = []
    while True not in said and time.monotonic() < deadline:
        said += [message.report.drained for message in channel.read() if message.report]
    assert said[-1]


def test_messages_to_a_closed_channel_are_dropped(ends: tuple[RankChannel, RankReporter]) -> None:
    channel, reporter = ends
    channel.close()
    reporter.send_failure(Failure(reason=FailureReason.RANK_RAISED, message="nobody hears this"))
    reporter.set_phase(RankPhase.READY)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes reporters send a hundred times as often, so that a buffer is full within a moment."""
    monkeypatch.setattr(pod_channel, "BEAT_INTERVAL_S", 0.002)


@contextmanager
def reporting() -> Iterator[tuple[RankChannel, RankReporter, threading.Event]]:
    """Yields both ends, and an event that is set once the rank's end sees that the supervisor is gone."""
    channel, theirs = RankChannel.open_pair()
    gone = threading.Event()
    reporter = RankReporter(theirs, 0, gone.set)
    try:
        yield channel, reporter, gone
    finally:
        reporter.close()
        channel.close()


def fill(channel: RankChannel) -> None:
    """Waits until the reporter's messages fill the buffer, which no process reads."""
    unread, since = 0, time.monotonic()
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() - since < 0.2:
        assert time.monotonic() < deadline
        now = struct.unpack("i", fcntl.ioctl(channel.fileno(), termios.FIONREAD, bytes(4)))[0]
        if now != unread:
            unread, since = now, time.monotonic()
    assert unread


def test_a_stopped_supervisor_gets_the_newest_state_after_it_resumes(quick: None) -> None:
    """While the buffer is full, whole lines are dropped. The next line has the newest state."""
    with reporting() as (channel, reporter, gone):
        reporter.set_work("step 1")
        fill(channel)
        reporter.set_work("step 2")
        deadline, said = time.monotonic() + LIMIT_S, ""
        while said != "step 2" and time.monotonic() < deadline:
            said = "".join(m.report.busy or "" for m in channel.read()[-1:] if m.report)
        assert said == "step 2"
        channel.send(SupervisorMessage(group_age_s=0.0, drain=True))
        while not reporter.asked_to_drain() and time.monotonic() < deadline:
            pass
        assert reporter.asked_to_drain()
        assert not gone.is_set()


def test_a_failure_is_delivered_once_a_stopped_supervisor_resumes(quick: None) -> None:
    failure = Failure(reason=FailureReason.RANK_RAISED, message="no", rank=0)
    with reporting() as (channel, reporter, _):
        fill(channel)
        sending = threading.Thread(target=reporter.send_failure, args=(failure, Lost.RANK))
        sending.start()
        last: list[tuple[Failure, Lost | None]] = []
        deadline = time.monotonic() + LIMIT_S
        while not last and time.monotonic() < deadline:
            last = [(m.failure, m.lost) for m in channel.read() if m.failure]
        sending.join(LIMIT_S)
        assert last == [(failure, Lost.RANK)]


def test_the_end_of_the_supervisor_ends_the_process() -> None:
    with reporting() as (channel, _, gone):
        channel.close()
        assert gone.wait(LIMIT_S)


def test_a_supervisor_of_another_version_ends_the_process() -> None:
    """If only the channel's thread ended, the process would continue without a channel."""
    ours, theirs = socket.socketpair()
    gone = threading.Event()
    reporter = RankReporter(theirs, 0, gone.set)
    ours.send(b'{"unknown": 1}\n')
    assert gone.wait(LIMIT_S)
    reporter.close()
    ours.close()


@given(
    lines=st.lists(
        st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=3000), max_size=60
    ),
    pauses=st.sets(st.integers(0, 59)),
)
def test_only_whole_lines_are_read(lines: list[str], pauses: set[int]) -> None:
    """The reader may pause at any time. It then reads whole lines in the order in which they were sent."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        ours.setblocking(False)
        theirs.setblocking(False)
        sender, buffer = LineSender(theirs), LineBuffer()
        taken, got = [], []

        def read() -> None:
            with suppress(BlockingIOError):
                while True:
                    got.extend(buffer.feed(ours.recv(65536)))

        for number, line in enumerate(lines):
            if sender.send(line):
                taken.append(line)
            if number not in pauses:
                read()
        while not sender.flush():
            read()
        read()
    assert got == taken


def test_notices_a_closed_channel(ends: tuple[RankChannel, RankReporter]) -> None:
    channel, reporter = ends
    reporter.close()
    channel.read()
    assert channel.closed


@pytest.mark.parametrize("env", [{}, {names.ENV_RANK_CHANNEL_FD: "x"}, {names.ENV_RANK_CHANNEL_FD: "999"}])
def test_a_rank_without_a_supervisor_is_refused_with_a_message(env: dict[str, str]) -> None:
    with pytest.raises(ContractError, match="Start the pod with `heteroinfer-worker`"):
        RankReporter.from_env(env)


def test_reads_lines_that_arrive_in_pieces() -> None:
    buffer = LineBuffer()
    pieces = [buffer.feed(bytes([byte])) for byte in "one\ntwö\n".encode()]
    assert [line for piece in pieces for line in piece] == ["one", "twö"]


def test_refuses_an_endless_line() -> None:
    with pytest.raises(ContractError, match="another program uses this port"):
        LineBuffer().feed(b"x" * (MAX_LINE_BYTES + 1))


@pytest.mark.parametrize("at", ["front", "end"])
def test_an_error_of_150000_characters_keeps_its_culprit(
    ends: tuple[RankChannel, RankReporter], at: str
) -> None:
    channel, reporter = ends
    word = "Connection closed by peer"
    text = f"{word} {'x' * 150_000}" if at == "front" else f"{'x' * 150_000} {word}"
    reporter.send_failure(Failure(reason=FailureReason.CONFIG_MISMATCH, message=text, rank=1))
    (failure,) = [m.failure for m in channel.read() if m.failure]
    assert (failure.reason, failure.rank) == (FailureReason.CONFIG_MISMATCH, 1)
    assert word in failure.message
    assert len(failure.to_json()) <= MAX_TERMINATION_MESSAGE_BYTES
