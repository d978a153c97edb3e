"""Runs a fetch: lists the model, downloads missing files, verifies them, retries temporary errors."""

import contextlib
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.model.weights import INDEX_FILE
from heteroinfer_contract.model_fetch import (
    CacheCleanup,
    CompleteModel,
    FetchedFile,
    FetchedModel,
    FetchProgress,
)
from heteroinfer_contract.model_files import read_profile
from vllm_heteroinfer.fetch.cache_cleanup import CleanupQuestion, remove_unused
from vllm_heteroinfer.fetch.errors import FetchError
from vllm_heteroinfer.fetch.hub import HubModel
from vllm_heteroinfer.fetch.selection import describing_files, parse_index, weight_files
from vllm_heteroinfer.fetch.store import ModelStore

FILES_AT_ONCE: Final = 4
_PAUSES_S: Final = (2.0, 5.0, 15.0, 30.0)
_LOCK_POLL_S: Final = 1.0
_LOCK_POLLS: Final = 5
"""Limit of tries to lock a complete commit. A clean-up holds the lock for a much shorter time."""
_WRONG_HASHES: Final = 3
_COMMIT_HASH: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """Options of the command line.

    Attributes:
        revision: branch, tag or commit. A commit that is already complete needs no request to the hub.
        cleanup: lists the commits that must stay in the cache; None removes no commit.
        stall_limit_s: maximum time without a new byte, in seconds. After this time, the fetch fails and the
            operator starts another fetch.
        termination_message_path: file for the result; None for no file.
    """

    repository: str
    revision: str
    cache: Path
    health_host: str
    health_port: int
    stall_limit_s: float
    termination_message_path: Path | None
    cleanup: CacheCleanup | None = None


class FetchJob:
    """Fetches one model into a cache.

    Args:
        now_s: a clock in seconds. If possible, it stops while this process does not run.

    Attributes:
        cleanup_question: the question to the operator whether this fetch may remove commits.
    """

    def __init__(
        self, source: HubModel, options: FetchOptions, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._options = options
        self._stall_limit_s = options.stall_limit_s
        self._now_s = now_s
        self._store: ModelStore | None = None
        self._commit = ""
        self._model_files: tuple[FetchedFile, ...] = ()
        self._message = "waiting for the hub's list of files"
        self._progress_clock = _ProgressClock(now_s)
        self.cleanup_question = CleanupQuestion(
            () if options.cleanup is None else options.cleanup.token_hashes
        )

    def find_stall(self) -> FetchError | None:
        """Returns an error if no new byte was stored for longer than `stall_limit_s`, otherwise None.

        A call of the hub's client retries by itself and may never return. So `run` cannot notice the stall.
        Another thread calls this method.
        """
        silent_s = self._progress_clock.silent_s(self._used_bytes())
        if silent_s <= self._stall_limit_s:
            return None
        return FetchError(
            FailureReason.MODEL_HUB_UNREACHABLE,
            f"the download got no new byte for {silent_s:.0f} s. Check the network, and HTTPS_PROXY and "
            "HF_ENDPOINT in spec.engine.env",
        )

    def progress(self) -> FetchProgress:
        """Returns the progress of the fetch, from the sizes of the files in the cache. Thread-safe."""
        store, files = self._store, self._model_files
        return FetchProgress(
            commit=self._commit,
            done_bytes=store.done_bytes(files) if store is not None else 0,
            total_bytes=sum(file.size_bytes for file in files),
            message=self._message,
        )

    def run(self) -> FetchedModel:
        """Fetches the model. Returns when the whole model is in the cache.

        Tries again after a temporary error. Gives up when no new byte was stored for `stall_limit_s`.

        Raises:
            FetchError: the model cannot be fetched, or no new byte was stored for `stall_limit_s`. Downloads
                may still run then: end the process.
            ModelFilesError: the whole model is in the cache, but no plan can be made for the model.
        """
        failures_in_a_row, largest_bytes, progress_at_s = 0, -1, self._now_s()
        while True:
            try:
                return self._attempt()
            except FetchError as error:
                if not error.is_temporary:
                    raise
                used_bytes = self._used_bytes()
                if used_bytes > largest_bytes:  # this attempt has stored new bytes
                    failures_in_a_row, largest_bytes, progress_at_s = 0, used_bytes, self._now_s()
                if self._now_s() - progress_at_s > self._stall_limit_s:
                    raise
                pause_s = _PAUSES_S[min(failures_in_a_row, len(_PAUSES_S) - 1)]
                failures_in_a_row += 1
                self._message = f"{error}. The fetch is trying again"
                time.sleep(min(pause_s, self._stall_limit_s))

    def _attempt(self) -> FetchedModel:
        """Fetches the model once, without retries.

        Sends no request to the hub if the revision is a commit that is complete in the cache. Removes unused
        commits in either case.
        """
        complete = self._find_complete()
        if complete is None:
            with self._progress_clock.counted_call():
                commit, files = self._source.files()
            store = self._open_store(commit)
            self._message = ""
            complete = self._fetch_or_wait(store, files)
        self._model_files = complete.files
        self._clean_up(self._open_store(complete.commit))
        profile = read_profile(self._open_store(complete.commit).folder)
        return FetchedModel(commit=complete.commit, size_bytes=complete.size_bytes, profile=profile)

    def _find_complete(self) -> CompleteModel | None:
        """Returns the model if the revision is a commit that is complete in the cache, otherwise None.

        Confirms the commit under its lock, so that no clean-up removes the commit. A clean-up holds the lock
        only for a moment. So if the lock stays taken for some polls, another fetch has it, and the commit
        stays.
        """
        revision = self._options.revision
        if not _COMMIT_HASH.fullmatch(revision):
            return None
        store = self._open_store(revision)
        for _ in range(_LOCK_POLLS):
            if store.complete() is None:
                return None
            try:
                with store.try_lock() as has_lock:
                    if has_lock:
                        return store.confirm_complete()
            except FetchError:  # in a read-only cache, no clean-up can remove the commit
                break
            time.sleep(_LOCK_POLL_S)
        return store.complete()

    def _open_store(self, commit: str) -> ModelStore:
        """Returns the folder of a commit in the cache, which is the folder of `progress` from now on."""
        if self._store is None or self._commit != commit:
            self._store = ModelStore(self._options.cache, self._options.repository, commit)
            self._commit = commit
        return self._store

    def _used_bytes(self) -> int:
        """Returns the size of all files in the folder; 0 before the commit is known."""
        return self._store.used_bytes() if self._store is not None else 0

    def _fetch_or_wait(self, store: ModelStore, files: Sequence[FetchedFile]) -> CompleteModel:
        """Returns the complete model: fetches it, or waits while another process fetches it.

        Raises:
            FetchError: the model cannot be fetched, or the other fetch makes no progress.
        """
        largest_bytes, progress_at_s, polls = -1, self._now_s(), 0
        while True:
            with store.try_lock() as has_lock:
                complete = store.confirm_complete() if has_lock else store.complete()
                # A clean-up may hold the lock for a moment, because it removes the commit. So without the
                # lock, the commit counts as complete only after some polls.
                if complete is not None and (has_lock or polls >= _LOCK_POLLS):
                    return complete
                if has_lock:
                    self._message = ""
                    return store.mark_complete(self._fetch_all(store, files))
            used_bytes = store.used_bytes()
            if used_bytes > largest_bytes:  # the other fetch has written bytes since the last poll
                largest_bytes, progress_at_s = used_bytes, self._now_s()
            self._message = "waiting for another fetch of this model into the same cache"
            if self._now_s() - progress_at_s > self._stall_limit_s:
                raise FetchError(
                    FailureReason.MODEL_CACHE_NOT_WRITABLE,
                    f"another fetch holds the lock of {store.folder.relative_to(store.cache)} and has "
                    f"written nothing for {self._stall_limit_s:.0f} s. Delete the pod of that fetch",
                )
            polls += 1
            time.sleep(_LOCK_POLL_S)

    def _fetch_all(self, store: ModelStore, files: Sequence[FetchedFile]) -> Sequence[FetchedFile]:
        """Fetches all files that serving needs. Returns these files.

        The small files come first, because the index among them names the weight files. Unused commits are
        removed before the free space is checked for the weights.
        """
        small_files = describing_files(files)
        store.check_capacity(small_files)
        self._fetch_missing(store, small_files)
        weights = weight_files(files, _read_index(store.folder, small_files))
        all_files = tuple({file.path: file for file in [*small_files, *weights]}.values())
        self._model_files = all_files  # the total that `progress` reports
        # A file linked from another commit takes no space. So link before the check of the free space, and
        # before the clean-up removes other commits.
        for file in store.list_missing(weights):
            store.link_from_other_commit(file)
        self._clean_up(store)
        store.check_capacity(all_files)
        self._fetch_missing(store, weights)
        return all_files

    def _clean_up(self, store: ModelStore) -> None:
        """Removes commits that no resource uses. First link the files that this commit shares with them."""
        if self._options.cleanup is not None:
            remove_unused(store.folder.parent, self._commit, self._options.cleanup, self._ask_about_cleanup)

    def _ask_about_cleanup(self) -> float | None:
        """Asks the operator whether commits may be removed, and shows this as the progress.

        Returns the time until which the commits may be removed, or None, like `CleanupQuestion.ask`.
        """
        old_message, self._message = self._message, "asking the operator whether old commits may be removed"
        until_s = self.cleanup_question.ask()
        self._message = old_message
        return until_s

    def _fetch_missing(self, store: ModelStore, files: Sequence[FetchedFile]) -> None:
        """Downloads the files that the folder lacks, several at a time."""
        # Start with the large files: if the hub cannot send them in parts, the fetch fails before it has
        # downloaded the others.
        large_first = sorted(store.list_missing(files), key=self._source.is_large, reverse=True)
        fetch_in_parallel(
            large_first,
            lambda file: self._fetch_file(store, file),
            at_once=FILES_AT_ONCE,
            share_lock=store.share_lock,
        )

    def _fetch_file(self, store: ModelStore, file: FetchedFile) -> None:
        """Downloads and verifies one file. Downloads it again if its hash is wrong.

        Raises:
            FetchError: the download failed, or the hash was wrong _WRONG_HASHES times.
        """
        for _ in range(_WRONG_HASHES):
            part = store.open_part(file)
            try:
                with self._progress_clock.counted_call():
                    self._source.fetch(self._commit, file, part)
            except OSError as error:
                raise store.cache_error(error) from error
            if store.finish_part(file):
                return
        raise FetchError(
            FailureReason.MODEL_NOT_READABLE,
            f"{file.path} arrived {_WRONG_HASHES} times with another hash than {file.digest}: a proxy or "
            "mirror (HF_ENDPOINT) changes the file, or the volume corrupts data. Check the proxy or mirror, "
            "and the volume",
        )


class _ProgressClock:
    """Measures how long a running call of the source has delivered nothing. Thread-safe."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._calls = 0
        self._used_bytes = -1
        self._progress_at_s = self._now_s()

    @contextlib.contextmanager
    def counted_call(self) -> Iterator[None]:
        """Counts a running call of the source. The start and the end of a call count as progress."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        """Adds `change` to the number of running calls, and records progress."""
        with self._lock:
            self._calls += change
            self._progress_at_s = self._now_s()

    def silent_s(self, used_bytes: int) -> float:
        """Seconds since the last progress; 0 while no call runs.

        Args:
            used_bytes: size of all files in the folder. A change since the last call counts as progress.
        """
        with self._lock:
            if not self._calls or used_bytes != self._used_bytes:
                self._used_bytes, self._progress_at_s = used_bytes, self._now_s()
            return self._now_s() - self._progress_at_s


def fetch_in_parallel(
    files: Sequence[FetchedFile],
    fetch: Callable[[FetchedFile], None],
    *,
    at_once: int,
    share_lock: Callable[[], int],
) -> None:
    """Fetches files, `at_once` at a time. Starts no further download after an error.

    A temporary error is raised when all running downloads have ended. A permanent error is raised
    immediately, although other downloads still run, because a download cannot be interrupted. These downloads
    hold the lock of their folder until they or the process end, so another fetch never writes to the same
    parts. A process that ends does not wait for their threads.

    Args:
        share_lock: returns a descriptor that keeps the lock of the folder until it is closed.

    Raises:
        FetchError: a file failed permanently; or a file failed temporarily, and all downloads have ended.
    """
    remaining_files = iter(list(files))  # a list's iterator is thread-safe
    results: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    failed = threading.Event()

    def work(lock: int) -> None:
        """Fetches files until none remains or a thread has failed."""
        error: BaseException | None = None
        try:
            while not failed.is_set() and (file := next(remaining_files, None)) is not None:
                fetch(file)
        except BaseException as raised:  # the thread that waits below raises it
            failed.set()
            error = raised
        finally:
            os.close(lock)
            results.put(error)

    workers = [
        threading.Thread(target=work, args=(share_lock(),), name=f"fetch-{number}", daemon=True)
        for number in range(min(at_once, len(files)))
    ]
    for worker in workers:
        worker.start()
    _wait_for_results(results, len(workers))


def _wait_for_results(results: "queue.SimpleQueue[BaseException | None]", count: int) -> None:
    """Waits for the results of `count` threads: an error, or None for success.

    Raises a permanent error immediately, and the first temporary error after all results.
    """
    first_temporary_error: BaseException | None = None
    for _ in range(count):
        error = results.get()
        if error is not None and not (isinstance(error, FetchError) and error.is_temporary):
            raise error
        first_temporary_error = first_temporary_error or error
    if first_temporary_error is not None:
        raise first_temporary_error


def _read_index(folder: Path, files: Sequence[FetchedFile]) -> Any:
    """Returns the parsed index of the model's weights; None if the model has no index."""
    if not any(file.path == INDEX_FILE for file in files):
        return None
    return parse_index((folder / INDEX_FILE).read_bytes())
