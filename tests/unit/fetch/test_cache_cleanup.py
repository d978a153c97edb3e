"""A fetch removes whole unused commits from a cache, and keeps all commits that may be in use."""

import fcntl
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from heteroinfer_contract import names
from heteroinfer_contract.model_cache import read_marker
from heteroinfer_contract.model_fetch import (
    LOCK_FILE,
    MARKER_FILE,
    REMOVE_WITHIN_S,
    CacheCleanup,
    hash_token,
)
from vllm_heteroinfer.fetch.cache_cleanup import RECENT_S, CleanupQuestion, clock_s, remove_unused
from vllm_heteroinfer.fetch.errors import FetchError
from vllm_heteroinfer.fetch.fetch_pod import read_cleanup
from vllm_heteroinfer.fetch.locking import try_lock_file
from vllm_heteroinfer.fetch.store import ModelStore

NOW_S = time.time()
REPOSITORY = "acme/tiny"


def commit_of(number: int) -> str:
    return f"{number:040x}"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache with five complete commits, all confirmed more than an hour ago, commit 1 first."""
    for number in range(1, 6):
        store = ModelStore(tmp_path, REPOSITORY, commit_of(number))
        (store.folder / "model.safetensors").write_bytes(b"weights")
        store.mark_complete([])
        confirmed_s = NOW_S - RECENT_S - 1000 + 10 * number
        os.utime(store.folder / MARKER_FILE, (confirmed_s, confirmed_s))
    return tmp_path


def confirmed() -> float:
    """Answers like an operator that confirms the question."""
    return clock_s() + 60


def clean(
    cache: Path,
    *in_use: int,
    keep: int = 2,
    listed_s: float = NOW_S,
    ask: Callable[[], float | None] = confirmed,
) -> list[int]:
    """Fetches commit 9; returns the numbers of the commits that stay."""
    ModelStore(cache, REPOSITORY, commit_of(9)).mark_complete([])
    cleanup = CacheCleanup(keep=keep, in_use=tuple(map(commit_of, in_use)), listed_s=listed_s)
    model = cache / "acme--tiny"
    removed = remove_unused(model, commit_of(9), cleanup, ask)
    assert {path.name for path in model.iterdir()}.isdisjoint(removed)
    assert all(read_marker(path) is not None for path in model.iterdir()), (
        "every remaining commit is complete"
    )
    return sorted(int(path.name, 16) for path in model.iterdir())


def test_the_newest_and_the_used_commits_stay(cache: Path) -> None:
    assert clean(cache, 2) == [2, 5, 9]
    assert clean(cache, keep=1) == [9]


def test_keeps_commits_confirmed_after_the_list(cache: Path) -> None:
    """Another resource began to use the commit after the operator made the list."""
    store = ModelStore(cache, REPOSITORY, commit_of(1))
    assert store.confirm_complete() is not None
    assert clean(cache, keep=1) == [1, 9]
    assert clean(cache, keep=1, listed_s=time.time() + RECENT_S + 60) == [9]


def test_nothing_is_removed_without_an_answer_of_the_operator(cache: Path) -> None:
    questions: list[str] = []
    assert clean(cache, keep=1, ask=lambda: questions.append("asked")) == [1, 2, 3, 4, 5, 9]
    assert clean(cache, 1, 2, 3, 4, 5, keep=1, ask=lambda: questions.append("nothing to ask")) == [
        1,
        2,
        3,
        4,
        5,
        9,
    ]
    assert questions == ["asked"]


def test_nothing_is_removed_after_the_time_that_the_operator_waits(cache: Path) -> None:
    """For example, the node was suspended after the operator's answer."""
    assert clean(cache, keep=1, ask=clock_s) == [1, 2, 3, 4, 5, 9]


@pytest.mark.parametrize("clock_error_s", [0.0, -7200.0])
def test_a_commit_that_a_fetch_confirms_after_the_question_stays(cache: Path, clock_error_s: float) -> None:
    """The clock of the node that confirms the commit may be wrong by hours."""

    def ask() -> float:
        found_s = time.time() + clock_error_s
        os.utime(cache / "acme--tiny" / commit_of(3) / MARKER_FILE, (found_s, found_s))
        return confirmed()

    assert clean(cache, keep=1, ask=ask) == [3, 9]


def test_only_the_answer_to_the_open_question_counts() -> None:
    question = CleanupQuestion([hash_token("first"), hash_token("second")])
    answers: list[float | None] = []

    def ask() -> int | None:
        thread = threading.Thread(target=lambda: answers.append(question.ask()))
        thread.start()
        deadline = time.monotonic() + 10
        while question.number is None and time.monotonic() < deadline:
            time.sleep(0.001)
        threads.append(thread)
        return question.number

    threads: list[threading.Thread] = []
    asked_s = clock_s()
    assert not question.confirm("first"), "the fetch has not asked yet"
    assert ask() == 0
    for wrong in ("", "0", "guessed", hash_token("first"), "second", "\udcff"):
        assert not question.confirm(wrong)
    assert not answers
    assert question.confirm("first")
    threads[0].join(10)
    (until_s,) = answers
    assert until_s is not None
    assert asked_s + REMOVE_WITHIN_S <= until_s <= clock_s() + REMOVE_WITHIN_S
    assert question.number is None, "the fetch has ended its question"
    assert ask() == 1
    assert not question.confirm("first"), "this answers an earlier question"
    assert len(answers) == 1
    assert question.confirm("second")
    threads[1].join(10)
    assert len(answers) == 2
    assert question.ask() is None, "no token is left"


def test_a_question_without_an_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_heteroinfer.fetch.cache_cleanup.REMOVE_WITHIN_S", 0.01)
    question = CleanupQuestion([hash_token("late"), hash_token("next")])
    assert question.ask() is None
    assert not question.confirm("late")
    assert question.ask() is None
    assert CleanupQuestion([]).ask() is None, "an operator without tokens created the pod"


def test_keeps_commits_locked_by_another_fetch(cache: Path) -> None:
    with (cache / "acme--tiny" / commit_of(3) / LOCK_FILE).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert clean(cache, keep=1) == [3, 9]
    assert clean(cache, keep=1) == [9]


@pytest.mark.parametrize("moment", ["before the lock is opened", "before it is locked"])
def test_a_fetch_starts_over_if_its_folder_disappears(
    cache: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    store = ModelStore(cache, REPOSITORY, commit_of(1))
    cleanup = CacheCleanup(keep=1, in_use=(), listed_s=time.time())
    removed: list[str] = []

    def remove() -> None:
        removed.extend(
            remove_unused(cache / "acme--tiny", commit_of(5), cleanup, confirmed) if not removed else ()
        )

    def take(descriptor: int) -> bool | None:
        remove()
        return try_lock_file(descriptor)

    if moment == "before it is locked":
        monkeypatch.setattr("vllm_heteroinfer.fetch.store.try_lock_file", take)
    else:
        remove()
    with store.try_lock() as alone, ModelStore(cache, REPOSITORY, commit_of(1)).try_lock() as other:
        assert commit_of(1) in removed
        assert (alone, other) == (True, False), "both fetches use the lock of the new folder"
        assert store.confirm_complete() is None
        assert store.mark_complete([]) == store.complete()


def test_a_lock_that_is_removed_again_and_again_ends_the_fetch(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = ModelStore(cache, REPOSITORY, commit_of(1))

    def take(descriptor: int) -> bool:
        (store.folder / LOCK_FILE).unlink()
        return True

    monkeypatch.setattr("vllm_heteroinfer.fetch.store.try_lock_file", take)
    with (
        pytest.raises(FetchError, match="another program removed this folder 100 times while a fetch tried"),
        store.try_lock(),
    ):
        pass


def test_a_cache_with_a_file_in_place_of_the_folder_is_refused(cache: Path) -> None:
    (cache / "acme--tiny" / commit_of(7)).write_text("no folder")
    with pytest.raises(FetchError, match="File exists"):
        ModelStore(cache, REPOSITORY, commit_of(7))


def test_removes_leftovers_of_a_killed_clean_up(cache: Path) -> None:
    model = cache / "acme--tiny"
    (model / commit_of(1)).rename(model / f".removing-{commit_of(1)}")
    assert clean(cache, keep=5) == [2, 3, 4, 5, 9]


def test_a_clean_up_changes_nothing_else_in_the_cache(cache: Path) -> None:
    model, other = cache / "acme--tiny", cache / "acme--other" / commit_of(1)
    other.mkdir(parents=True)
    unfinished = model / commit_of(7)
    unfinished.mkdir()
    (model / commit_of(8)).symlink_to(model / commit_of(4))
    cleanup = CacheCleanup(keep=1, in_use=(commit_of(4),), listed_s=NOW_S)
    remove_unused(model, commit_of(5), cleanup, confirmed)
    assert sorted(path.name for path in model.iterdir()) == [commit_of(number) for number in (4, 5, 7, 8)]
    assert other.exists()


def test_files_that_a_kept_commit_shares_stay(cache: Path) -> None:
    first = cache / "acme--tiny" / commit_of(1) / "model.safetensors"
    new = ModelStore(cache, REPOSITORY, commit_of(9)).folder / "model.safetensors"
    new.hardlink_to(first)
    assert clean(cache, keep=1) == [9]
    assert new.read_bytes() == b"weights"


def test_a_cache_that_cannot_be_written_keeps_all_commits(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = cache / "acme--tiny"
    (model / f".removing-{commit_of(2)}").write_text("no folder")
    cleanup = CacheCleanup(keep=1, in_use=(), listed_s=NOW_S)
    assert remove_unused(model, commit_of(9), cleanup, confirmed) == ()
    assert "cannot remove all unused commits" in caplog.text
    assert len(list(model.iterdir())) == 6


@pytest.mark.parametrize("text", ["", "[", '{"keep": 0, "in_use": [], "listed_s": 1.0}', '{"keep": 2}'])
def test_a_fetch_removes_no_commit_if_it_cannot_read_the_list_of_commits_in_use(text: str) -> None:
    assert read_cleanup({names.ENV_CACHE_CLEANUP: text}) is None


def test_a_fetch_removes_no_commit_by_the_list_of_an_earlier_operator() -> None:
    """Earlier operators put the list into another variable, and send no tokens."""
    earlier = CacheCleanup(keep=1, in_use=(), listed_s=NOW_S)
    assert read_cleanup({"HETEROINFER_CACHE_CLEANUP": earlier.to_json()}) is None
    without_tokens = read_cleanup({names.ENV_CACHE_CLEANUP: earlier.to_json()})
    assert without_tokens is not None
    assert CleanupQuestion(without_tokens.token_hashes).ask() is None
