"""Both ends of the channel, over a real socket pair."""

import os
import time
from collections.abc import Iterator

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import MAX_TERMINATION_MESSAGE_BYTES, Failure, FailureReason
from heteroinfer_contract.group_report import RankPhase
from vllm_heteroinfer.pod.channel import (
    MAX_LINE_BYTES,
    LineBuffer,
    RankChannel,
    RankMessage,
    RankReporter,
    SupervisorMessage,
)

LIMIT_S = 5.0


@pytest.fixture
def ends() -> Iterator[tuple[RankChannel, RankReporter]]:
    channel, theirs = RankChannel.open_pair()
    env = {names.ENV_RANK_CHANNEL_FD: str(os.dup(theirs.fileno())), names.ENV_RANK: "3"}
    theirs.close()
    reporter = RankReporter.from_env(env)
    yield channel, reporter
    reporter.close()
    channel.close()


def read_until(channel: RankChannel, count: int) -> list[RankMessage]:
    messages: list[RankMessage] = []
    deadline = time.monotonic() + LIMIT_S
    while len(messages) < count and time.monotonic() < deadline:
        messages += channel.read()
    return messages


def test_reports_come_by_themselves_and_hold_the_last_word(ends: tuple[RankChannel, RankReporter]) -> None:
    channel, reporter = ends
    assert reporter.rank == 3
    read_until(channel, 1)
    reporter.phase(RankPhase.LOADING, 5, 10)
    reporter.phase(RankPhase.READY, 10, 10)
    reporter.step(4, 0.5, 0.25, 0.125, 0.0625)
    reporter.busy("step 5", waiting_for_rank=2)
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
    reporter.failure(failure)
    assert [m.failure for m in channel.read() if m.failure] == [failure]


def test_heartbeat_age_is_the_groups_and_grows_in_silence(ends: tuple[RankChannel, RankReporter]) -> None:
    channel, reporter = ends
    channel.send(SupervisorMessage(group_age_s=40.0))
    deadline = time.monotonic() + LIMIT_S
    while reporter.heartbeat_age_s() < 40.0 and time.monotonic() < deadline:
        pass
    first = reporter.heartbeat_age_s()
    assert 40.0 <= first < 40.0 + LIMIT_S
    assert reporter.heartbeat_age_s() > first


def test_a_word_to_drain_holds_and_is_answered(ends: tuple[RankChannel, RankReporter]) -> None:
    channel, reporter = ends
    assert not reporter.asked_to_drain()
    channel.send(SupervisorMessage(group_age_s=0.0, drain=True))
    channel.send(SupervisorMessage(group_age_s=0.0))
    deadline = time.monotonic() + LIMIT_S
    while not reporter.asked_to_drain() and time.monotonic() < deadline:
        pass
    assert reporter.asked_to_drain()
    reporter.drained()
    said: list[bool] = []
    while True not in said and time.monotonic() < deadline:
        said += [message.report.drained for message in channel.read() if message.report]
    assert said[-1]


def test_supervisor_that_is_gone_does_not_disturb_the_rank(ends: tuple[RankChannel, RankReporter]) -> None:
    channel, reporter = ends
    channel.close()
    reporter.failure(Failure(reason=FailureReason.RANK_RAISED, message="nobody hears this"))
    reporter.phase(RankPhase.READY)


def test_closed_channel_is_seen(ends: tuple[RankChannel, RankReporter]) -> None:
    channel, reporter = ends
    reporter.close()
    channel.read()
    assert channel.closed


@pytest.mark.parametrize("env", [{}, {names.ENV_RANK_CHANNEL_FD: "x"}, {names.ENV_RANK_CHANNEL_FD: "999"}])
def test_rank_without_supervisor_is_refused_in_words(env: dict[str, str]) -> None:
    with pytest.raises(ContractError, match="ranks are started by `heteroinfer-worker`"):
        RankReporter.from_env(env)


def test_lines_in_any_pieces() -> None:
    buffer = LineBuffer()
    pieces = [buffer.feed(bytes([byte])) for byte in "one\ntwö\n".encode()]
    assert [line for piece in pieces for line in piece] == ["one", "twö"]


def test_endless_line_is_refused() -> None:
    with pytest.raises(ContractError, match="does another program use this port"):
        LineBuffer().feed(b"x" * (MAX_LINE_BYTES + 1))


@pytest.mark.parametrize("at", ["front", "end"])
def test_an_error_of_150000_characters_keeps_its_culprit(
    ends: tuple[RankChannel, RankReporter], at: str
) -> None:
    channel, reporter = ends
    word = "Connection closed by peer"
    text = f"{word} {'x' * 150_000}" if at == "front" else f"{'x' * 150_000} {word}"
    reporter.failure(Failure(reason=FailureReason.CONFIG_MISMATCH, message=text, rank=1))
    (failure,) = [m.failure for m in channel.read() if m.failure]
    assert (failure.reason, failure.rank) == (FailureReason.CONFIG_MISMATCH, 1)
    assert word in failure.message
    assert len(failure.to_json()) <= MAX_TERMINATION_MESSAGE_BYTES
