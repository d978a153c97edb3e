"""An API server or engine that does not answer is overdue, unless a rank is busy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract.failure import FailureReason
from vllm_heteroinfer.launch.engine_clock import ANSWERS_WITHIN_S, EngineClock

LIMIT_S = 10.0
TICK_S = 0.2


def update(
    clock: EngineClock,
    now_s: float,
    *,
    busy: bool = False,
    api: bool = True,
    api_silent_s: float = 0.0,
    waits_s: float = 0.0,
) -> None:
    clock.update(
        ranks_busy=busy, api_answers=api, api_silent_s=api_silent_s, engine_unanswered_s=waits_s, now_s=now_s
    )


def test_an_engine_that_does_not_answer_is_reported() -> None:
    clock = EngineClock(LIMIT_S, 100.0)
    answers = []
    for now_s, waits_s in ((110.0, 0.0), (111.5, 1.5), (111.6, 1.6)):
        update(clock, now_s, waits_s=waits_s)
        answers.append(clock.engine_answers)
    assert answers == [True, True, False]
    assert clock.find_overdue() is None
    update(clock, 120.1, waits_s=10.1)
    failure = clock.find_overdue()
    assert failure is not None
    assert (failure.reason, failure.pod, failure.rank) == (FailureReason.ENGINE_STOPPED, 0, None)
    assert "vLLM's engine (pod 0) has not answered for 10 s" in failure.message
    assert "(stepTimeout)" in failure.message


def test_an_api_server_that_does_not_answer_is_reported_before_its_engine() -> None:
    clock = EngineClock(LIMIT_S, 100.0)
    update(clock, 111.0, api=False, waits_s=11.0)
    failure = clock.find_overdue()
    assert failure is not None
    assert failure.message.startswith("vLLM's API server (pod 0) has not answered")


def test_names_an_api_server_that_answers_but_does_not_report() -> None:
    """Such an API server would not learn that the group drains."""
    clock = EngineClock(LIMIT_S, 100.0)
    update(clock, 110.0, api_silent_s=10.0)
    assert clock.find_overdue() is None
    update(clock, 111.0, api_silent_s=11.0)
    failure = clock.find_overdue()
    assert failure is not None
    assert failure.message.startswith("vLLM's API server (pod 0) has not answered")


def test_a_long_step_does_not_count_as_silence() -> None:
    """During a prefill of an hour the engine does not answer. Afterwards it answers the earlier requests."""
    clock = EngineClock(LIMIT_S, 0.0)
    for second in range(3600):
        update(clock, float(second), busy=True, api=False, waits_s=float(second))
        assert clock.engine_answers
        assert clock.find_overdue() is None
    update(clock, 3600.2, waits_s=3600.2)
    assert clock.engine_answers, "the engine may have sent an answer that has not arrived"
    update(clock, 3600.4)
    assert clock.engine_answers


@given(
    ticks=st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=1, max_size=200),
)
def test_an_engine_is_overdue_after_a_silence_without_a_busy_rank(
    ticks: list[tuple[bool, bool, bool]],
) -> None:
    """Events are random.

    Only the last silence without a busy rank counts, as in a simple model of the clock.
    """
    clock = EngineClock(LIMIT_S, 0.0)
    api_silent = engine_silent = waits = 0
    for number, (busy, api, answers) in enumerate(ticks, 1):
        waits = 0 if answers else waits + 1
        api_silent = 0 if busy or api else api_silent + 1
        engine_silent = 0 if busy or answers else engine_silent + 1
        update(clock, number * 1.0, busy=busy, api=api, waits_s=float(waits))
        assert clock.engine_answers is (engine_silent <= ANSWERS_WITHIN_S)
        assert (clock.find_overdue() is not None) is (max(api_silent, engine_silent) > LIMIT_S)


@pytest.mark.parametrize("limit_s", [10.0, 300.0, 86400.0])
def test_an_engine_is_overdue_after_the_step_timeout_of_its_resource(limit_s: float) -> None:
    clock = EngineClock(limit_s, 0.0)
    update(clock, limit_s, waits_s=limit_s)
    assert clock.find_overdue() is None
    update(clock, limit_s + TICK_S, waits_s=limit_s + TICK_S)
    assert clock.find_overdue() is not None
