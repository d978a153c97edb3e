"""One fetch: lists the model, fetches what is missing, verifies, marks; waits out what may heal."""

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
from vllm_heteroinfer.fetch.cache_cleanup import remove_unused
from vllm_heteroinfer.fetch.errors import FetchError
from vllm_heteroinfer.fetch.hub import HubModel
from vllm_heteroinfer.fetch.selection import describing_files, parse_index, weight_files
from vllm_heteroinfer.fetch.store import ModelStore

FILES_AT_ONCE: Final = 4
_PAUSES_S: Final = (2.0, 5.0, 15.0, 30.0)
_LOCK_POLL_S: Final = 1.0
_LOCK_POLLS: Final = 5
"""A clean-up holds the lock of a commit for a moment only."""
_WRONG_HASHES: Final = 3
_WHOLE_HASH: Final = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchOptions:
    """What the command line says.

    Attributes:
        revision: branch, tag or commit; a commit that is complete already needs no hub.
        cleanup: which commits may be removed from the cache; None removes none.
        patience_s: without a new byte for so long the fetch ends; the operator starts another.
        termination_message_path: where the answer is left, or None for nowhere.
    """

    repository: str
    revision: str
    cache: Path
    health_host: str
    health_port: int
    patience_s: float
    termination_message_path: Path | None
    cleanup: CacheCleanup | None = None


class FetchJob:
    """Brings one model into a cache.

    Args:
        now_s: a time in seconds that goes on only while this process has its turns, or any.
    """

    def __init__(
        self, source: HubModel, options: FetchOptions, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._source = source
        self._options = options
        self._patience_s = options.patience_s
        self._now_s = now_s
        self._store: ModelStore | None = None
        self._commit = ""
        self._wanted: tuple[FetchedFile, ...] = ()
        self._message = "asking the hub"
        self._moves = _Moves(now_s)

    def find_stall(self) -> FetchError | None:
        """Returns the end of a fetch whose source brings nothing for the whole patience, or None.

        A call of the hub's client tries again by itself, and may never return: `run` cannot end it.
        """
        silent_s = self._moves.silent_s(self._used_bytes())
        if silent_s <= self._patience_s:
            return None
        return FetchError(
            FailureReason.MODEL_HUB_UNREACHABLE,
            f"the hub brought nothing new for {silent_s:.0f} s, though it keeps the connection: "
            "look at the network or the proxy between (HTTPS_PROXY, HF_ENDPOINT in spec.engine.env)",
        )

    def progress(self) -> FetchProgress:
        """Returns how far it is now, as the cache's files tell; from any thread."""
        store, wanted = self._store, self._wanted
        return FetchProgress(
            commit=self._commit,
            done_bytes=store.done_bytes(wanted) if store is not None else 0,
            total_bytes=sum(file.size_bytes for file in wanted),
            message=self._message,
        )

    def run(self) -> FetchedModel:
        """Returns the model once it is complete in the cache.

        Raises:
            FetchError: it cannot be had, or nothing moved for the whole patience. Downloads may still run
                then: end the process.
            ModelFilesError: it is complete, and no model that can be planned.
        """
        failures, most_bytes, moved_at = 0, -1, self._now_s()
        while True:
            try:
                return self._attempt()
            except FetchError as error:
                if not error.may_heal:
                    raise
                done_bytes = self._used_bytes()
                if done_bytes > most_bytes:
                    failures, most_bytes, moved_at = 0, done_bytes, self._now_s()
                if self._now_s() - moved_at > self._patience_s:
                    raise
                pause_s = _PAUSES_S[min(failures, len(_PAUSES_S) - 1)]
                failures += 1
                self._message = f"{error}; trying again"
                time.sleep(min(pause_s, self._patience_s))

    def _attempt(self) -> FetchedModel:
        complete = self._known_complete()
        if complete is None:
            with self._moves.asking():
                commit, files = self._source.files()
            store = self._open(commit)
            self._message = ""
            complete = self._complete(store, files)
        self._wanted = complete.files
        self._clean_up(self._open(complete.commit))
        profile = read_profile(self._open(complete.commit).folder)
        return FetchedModel(commit=complete.commit, size_bytes=complete.size_bytes, profile=profile)

    def _known_complete(self) -> CompleteModel | None:
        """Returns the model if the revision is a commit, and the cache has all of it."""
        revision = self._options.revision
        if not _WHOLE_HASH.fullmatch(revision):
            return None
        store = self._open(revision)
        for _ in range(_LOCK_POLLS):
            if store.complete() is None:
                return None
            try:
                with store.try_lock() as alone:
                    if alone:
                        return store.confirm()
            except FetchError:  # nobody can write this cache, or remove anything from it
                break
            time.sleep(_LOCK_POLL_S)
        return store.complete()

    def _open(self, commit: str) -> ModelStore:
        if self._store is None or self._commit != commit:
            self._store = ModelStore(self._options.cache, self._options.repository, commit)
            self._commit = commit
        return self._store

    def _used_bytes(self) -> int:
        return self._store.used_bytes() if self._store is not None else 0

    def _complete(self, store: ModelStore, files: Sequence[FetchedFile]) -> CompleteModel:
        used_bytes, moved_at, polls = -1, self._now_s(), 0
        while True:
            with store.try_lock() as alone:
                complete = store.confirm() if alone else store.complete()
                # While another has the lock, a clean-up may be taking it away.
                if complete is not None and (alone or polls >= _LOCK_POLLS):
                    return complete
                if alone:
                    self._message = ""
                    return store.mark_complete(self._fetch_all(store, files))
            now_bytes = store.used_bytes()
            if now_bytes > used_bytes:
                used_bytes, moved_at = now_bytes, self._now_s()
            self._message = "another fetch of this model into the same cache is running; waiting for it"
            if self._now_s() - moved_at > self._patience_s:
                raise FetchError(
                    FailureReason.MODEL_CACHE_NOT_WRITABLE,
                    f"another fetch holds the lock of {store.folder.relative_to(store.cache)} and has "
                    f"written nothing for {self._patience_s:.0f} s: end the pod that has it",
                )
            polls += 1
            time.sleep(_LOCK_POLL_S)

    def _fetch_all(self, store: ModelStore, files: Sequence[FetchedFile]) -> Sequence[FetchedFile]:
        describing = describing_files(files)
        store.check_capacity(describing)
        self._fetch_missing(store, describing)
        weights = weight_files(files, _read_index(store.folder, describing))
        wanted = tuple({file.path: file for file in [*describing, *weights]}.values())
        self._wanted = wanted
        # Linked before free space is counted: what another commit has already takes none.
        for file in store.missing(weights):
            store.adopt(file)
        self._clean_up(store)
        store.check_capacity(wanted)
        self._fetch_missing(store, weights)
        return wanted

    def _clean_up(self, store: ModelStore) -> None:
        """Removes commits that no resource uses: after this commit has got its links to their files."""
        if self._options.cleanup is not None:
            remove_unused(store.folder.parent, self._commit, self._options.cleanup)

    def _fetch_missing(self, store: ModelStore, files: Sequence[FetchedFile]) -> None:
        # Large ones first: if the hub sends no parts of them, all that came before was in vain.
        missing = sorted(store.missing(files), key=self._source.is_large, reverse=True)
        fetch_side_by_side(
            missing,
            lambda file: self._fetch_one(store, file),
            at_once=FILES_AT_ONCE,
            share_lock=store.share_lock,
        )

    def _fetch_one(self, store: ModelStore, file: FetchedFile) -> None:
        for _ in range(_WRONG_HASHES):
            part = store.open_part(file)
            try:
                with self._moves.asking():
                    self._source.fetch(self._commit, file, part)
            except OSError as error:
                raise store.refusal(error) from error
            if store.keep(file):
                return
        raise FetchError(
            FailureReason.MODEL_NOT_READABLE,
            f"{file.path} came {_WRONG_HASHES} times with another hash than {file.digest}: "
            "a proxy or mirror (HF_ENDPOINT) changes it, or the volume does not keep what is written",
        )


class _Moves:
    """For how long the source is asked and brings nothing; for any thread."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._lock = threading.Lock()
        self._calls = 0
        self._used_bytes = -1
        self._moved_at_s = self._now_s()

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        """Counts a call of the source; its begin and its end are moves."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, more: int) -> None:
        with self._lock:
            self._calls += more
            self._moved_at_s = self._now_s()

    def silent_s(self, used_bytes: int) -> float:
        """Returns the seconds since anything moved; 0 while nothing is asked."""
        with self._lock:
            if not self._calls or used_bytes != self._used_bytes:
                self._used_bytes, self._moved_at_s = used_bytes, self._now_s()
            return self._now_s() - self._moved_at_s


def fetch_side_by_side(
    files: Sequence[FetchedFile],
    fetch: Callable[[FetchedFile], None],
    *,
    at_once: int,
    share_lock: Callable[[], int],
) -> None:
    """Fetches files, a few at once; after an error no other file is begun.

    Downloads that run when a file is refused for good cannot be ended here: they go on until the process
    ends, and keep the lock of their folder until then, so that another fetch never writes to their parts
    beside them. The process does not wait for their threads.

    Args:
        share_lock: returns a descriptor that keeps the lock of the folder until it is closed.

    Raises:
        FetchError: a file was refused for good, as soon as it was; or another error of `fetch`, once the
            other downloads have ended.
    """
    waiting = iter(list(files))  # each step of a list's iterator is whole, whichever thread takes it
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    failed = threading.Event()

    def work(lock: int) -> None:
        error: BaseException | None = None
        try:
            while not failed.is_set() and (file := next(waiting, None)) is not None:
                fetch(file)
        except BaseException as raised:  # for the thread that waits below
            failed.set()
            error = raised
        finally:
            os.close(lock)
            ended.put(error)

    workers = [
        threading.Thread(target=work, args=(share_lock(),), name=f"fetch-{number}", daemon=True)
        for number in range(min(at_once, len(files)))
    ]
    for worker in workers:
        worker.start()
    first: BaseException | None = None
    for _ in workers:
        error = ended.get()
        if error is not None and not (isinstance(error, FetchError) and error.may_heal):
            raise error
        first = first or error
    if first is not None:
        raise first


def _read_index(folder: Path, files: Sequence[FetchedFile]) -> Any:
    if not any(file.path == INDEX_FILE for file in files):
        return None
    return parse_index((folder / INDEX_FILE).read_bytes())
