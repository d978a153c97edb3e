"""Parallel downloads: a permanent error is raised immediately, and running downloads keep the lock."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.model_fetch import FetchedFile
from vllm_heteroinfer.fetch.errors import FetchError
from vllm_heteroinfer.fetch.job import fetch_in_parallel

LIMIT_S = 10.0


def file(name: str) -> FetchedFile:
    return FetchedFile(path=name, size_bytes=1, digest="sha256:" + "0" * 64)


def no_lock() -> int:
    return os.open(os.devnull, os.O_RDONLY)


def refusal(*, is_temporary: bool) -> FetchError:
    return FetchError(FailureReason.MODEL_ACCESS_DENIED, "gated", is_temporary=is_temporary)


@pytest.mark.parametrize("error", [refusal(is_temporary=False), OSError("a defect")])
def test_a_permanent_refusal_waits_for_no_other_download(error: Exception) -> None:
    release, begun = threading.Event(), threading.Barrier(3)

    def fetch(each: FetchedFile) -> None:
        begun.wait(LIMIT_S)
        if each.path == "refused":
            raise error
        assert release.wait(LIMIT_S)

    files = [file("slow"), file("refused"), file("slow too"), file("never begun")]
    with pytest.raises(type(error), match=str(error)):
        fetch_in_parallel(files, fetch, at_once=3, share_lock=no_lock)
    assert not release.is_set()
    release.set()


def test_after_a_temporary_error_running_downloads_end_and_no_new_one_begins() -> None:
    failed, ended = threading.Event(), []

    def fetch(each: FetchedFile) -> None:
        if each.path == "busy":
            failed.set()
            raise refusal(is_temporary=True)
        assert failed.wait(LIMIT_S)
        ended.append(each.path)

    with pytest.raises(FetchError, match="gated"):
        fetch_in_parallel([file("slow"), file("busy")], fetch, at_once=2, share_lock=no_lock)
    assert ended == ["slow"]


def test_each_running_download_keeps_the_lock(tmp_path: Path) -> None:
    release, begun = threading.Event(), threading.Barrier(2)
    kept: list[int] = []

    def share_lock() -> int:
        kept.append(os.open(tmp_path, os.O_RDONLY))
        return kept[-1]

    def fetch(each: FetchedFile) -> None:
        begun.wait(LIMIT_S)
        if each.path == "refused":
            raise refusal(is_temporary=False)
        assert release.wait(LIMIT_S)

    with pytest.raises(FetchError):
        fetch_in_parallel([file("slow"), file("refused")], fetch, at_once=2, share_lock=share_lock)
    assert [is_open(each) for each in kept] == [True, False]
    release.set()
    wait_until(lambda: not is_open(kept[0]))


def is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def wait_until(condition: Callable[[], bool]) -> None:
    ticks = threading.Event()
    for _ in range(int(LIMIT_S / 0.01)):
        if condition():
            return
        ticks.wait(0.01)
    raise AssertionError("not within the limit")


@given(
    outcomes=st.lists(st.sampled_from(["good", "busy", "refused"]), max_size=12), at_once=st.integers(1, 5)
)
def test_raises_an_error_only_if_a_file_failed_and_fetches_no_file_twice(
    outcomes: list[str], at_once: int
) -> None:
    fetched: list[str] = []

    def fetch(each: FetchedFile) -> None:
        fetched.append(each.path)
        outcome = outcomes[int(each.path)]
        if outcome != "good":
            raise refusal(is_temporary=outcome == "busy")

    files = [file(str(number)) for number in range(len(outcomes))]
    try:
        fetch_in_parallel(files, fetch, at_once=at_once, share_lock=no_lock)
    except FetchError:
        assert set(outcomes) != {"good"}
    else:
        assert set(outcomes) <= {"good"}
        assert sorted(fetched) == sorted(each.path for each in files)
    assert len(set(fetched)) == len(fetched)
