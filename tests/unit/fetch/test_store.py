"""A model's folder in a cache: complete and incomplete models, and errors of the file system."""

import errno
import fcntl
import hashlib
import os
import shutil
import threading
from pathlib import Path

import pytest

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.model_cache import check_complete, read_marker
from heteroinfer_contract.model_fetch import (
    MARKER_FILE,
    CompleteModel,
    FetchedFile,
    FetchProgress,
    model_folder,
)
from vllm_heteroinfer.fetch.fetch_pod import _UMASK
from vllm_heteroinfer.fetch.store import ModelStore

CONTENT = b"weights" * 1000
FILE = FetchedFile(
    path="sub/model.safetensors",
    size_bytes=len(CONTENT),
    digest=f"sha256:{hashlib.sha256(CONTENT).hexdigest()}",
)


@pytest.fixture
def store(tmp_path: Path) -> ModelStore:
    return ModelStore(tmp_path, "acme/tiny", "abc")


def test_a_file_gets_its_name_after_its_hash_is_verified(store: ModelStore) -> None:
    part = store.open_part(FILE)
    part.write_bytes(CONTENT[:-1] + b"!")
    assert not store.finish_part(FILE)
    assert store.list_missing([FILE]) == [FILE]
    assert not part.exists(), "a part with a wrong hash is not continued"
    store.open_part(FILE).write_bytes(CONTENT)
    assert store.finish_part(FILE)
    assert store.list_missing([FILE]) == []
    assert store.done_bytes([FILE]) == len(CONTENT)


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become two users")
def test_a_part_of_another_user_of_the_group_is_continued(tmp_path: Path) -> None:
    """Two users fetch into one folder that their group may write, as with a volume's fsGroup."""
    os.chown(tmp_path, 0, 3000)
    tmp_path.chmod(0o2770)
    for folder in tmp_path.parents:
        if folder.stat().st_uid == 0 and str(folder).startswith("/tmp/"):
            folder.chmod(folder.stat().st_mode | 0o011)
    cases = ((1000, CONTENT[:10], False), (2000, CONTENT, True))
    for user, content, whole in cases:
        child = os.fork()
        if child == 0:
            try:
                os.umask(_UMASK)
                os.setgroups([])
                os.setgid(3000)
                os.setuid(user)
                own = ModelStore(tmp_path, "acme/tiny", "abc")
                with own.try_lock() as alone:
                    own.open_part(FILE).write_bytes(content)
                    done = alone and (
                        not whole or (own.finish_part(FILE) and bool(own.mark_complete([FILE])))
                    )
                os._exit(0 if done else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, user
    check_complete(tmp_path / model_folder("acme/tiny", "abc"))


def test_a_path_longer_than_a_file_name_gets_a_partial_file(store: ModelStore) -> None:
    long, other = ("/".join([letter * 200] * 3) for letter in "ab")
    for path in (long, other):
        file = FetchedFile(path=path, size_bytes=FILE.size_bytes, digest=FILE.digest)
        assert store.open_part(file).stat().st_size == 0
        store.open_part(file).write_bytes(CONTENT)
        assert store.finish_part(file)
        assert (store.folder / path).read_bytes() == CONTENT


def test_git_hashes_are_those_of_git(store: ModelStore) -> None:
    # `echo hello | git hash-object --stdin`
    file = FetchedFile(
        path="config.json", size_bytes=6, digest="git:ce013625030ba8dba906f756967f9e9ca394464a"
    )
    store.open_part(file).write_bytes(b"hello\n")
    assert store.finish_part(file)


def test_only_the_marker_shows_a_complete_model(store: ModelStore) -> None:
    store.open_part(FILE).write_bytes(CONTENT)
    assert store.finish_part(FILE)
    assert store.complete() is None
    with pytest.raises(ContractError, match=MARKER_FILE):
        check_complete(store.folder)
    store.mark_complete([FILE])
    assert store.complete() == CompleteModel(repository="acme/tiny", commit="abc", files=(FILE,))
    assert sorted(path.name for path in store.folder.iterdir()) == [MARKER_FILE, "sub"]
    check_complete(store.folder)
    (store.folder / FILE.path).write_bytes(b"short")
    assert store.complete() is None
    with pytest.raises(
        ContractError, match=f"1 of 1 files are missing or truncated; the first is {FILE.path}"
    ):
        check_complete(store.folder)


def test_a_truncated_marker_is_ignored(store: ModelStore) -> None:
    text = store.mark_complete([FILE]).to_json()
    (store.folder / MARKER_FILE).write_text(text[: len(text) // 2])
    assert read_marker(store.folder) is None


def test_a_marker_that_is_not_a_file_is_ignored(store: ModelStore) -> None:
    marker = store.folder / MARKER_FILE
    os.mkfifo(marker)
    writer = os.open(marker, os.O_RDWR)  # the marker can be opened, but contains nothing
    try:
        assert read_marker(store.folder) is None
    finally:
        os.close(writer)
    assert read_marker(store.folder) is None
    marker.unlink()
    marker.mkdir()
    assert read_marker(store.folder) is None


def test_only_one_fetch_holds_the_lock(store: ModelStore, tmp_path: Path) -> None:
    other = ModelStore(tmp_path, "acme/tiny", "abc")
    with store.try_lock() as first, other.try_lock() as second:
        assert (first, second) == (True, False)
    with other.try_lock() as again:
        assert again


def test_a_part_that_is_too_long_starts_over(store: ModelStore) -> None:
    part = store.open_part(FILE)
    part.write_bytes(CONTENT * 2)
    assert store.done_bytes([FILE]) == len(CONTENT), "no more than the size of the files"
    assert store.open_part(FILE).stat().st_size == 0
    assert part.parent.name == ".parts"


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, FailureReason.MODEL_CACHE_FULL),
        (errno.EDQUOT, FailureReason.MODEL_CACHE_FULL),
        (errno.EACCES, FailureReason.MODEL_CACHE_NOT_WRITABLE),
        (errno.EROFS, FailureReason.MODEL_CACHE_NOT_WRITABLE),
    ],
)
def test_reports_errors_of_the_file_system(store: ModelStore, number: int, reason: FailureReason) -> None:
    refusal = store.cache_error(OSError(number, "refused", "/model/x"))
    assert refusal.reason is reason
    assert not refusal.is_temporary


def test_each_model_and_commit_has_its_own_folder() -> None:
    assert model_folder("acme/tiny", "abc") == "acme--tiny/abc"
    assert model_folder("gpt2", "abc") == "gpt2/abc"


def test_invalid_progress_is_refused() -> None:
    progress = FetchProgress(commit="abc", done_bytes=1, total_bytes=2, message="m")
    assert FetchProgress.from_json(progress.to_json()) == progress
    with pytest.raises(ContractError, match="done_bytes"):
        FetchProgress.from_json('{"done_bytes": "1"}')


def test_two_fetches_without_locks_do_not_take_each_others_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "no locks on this file system")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    first, second = (ModelStore(tmp_path, "acme/tiny", "abc") for _ in range(2))
    with first.try_lock() as one, second.try_lock() as other:
        assert (one, other) == (True, True)
        slow = second.open_part(FILE)
        slow.write_bytes(CONTENT[:10])
        first.open_part(FILE).write_bytes(CONTENT)
        assert first.finish_part(FILE)
        first.mark_complete([FILE])
        slow.write_bytes(CONTENT)
        assert second.finish_part(FILE), "the other fetch was faster, which is no fault of the volume"
        second.mark_complete([FILE])
    assert second.complete() is not None
    assert {path.name for path in second.folder.iterdir()} == {MARKER_FILE, "sub", ".lock"}


def test_a_vanished_folder_does_not_end_the_measurement_of_the_cache(store: ModelStore) -> None:
    """For example, another fetch of the model removes its parts."""
    stop = threading.Event()

    def churn() -> None:
        part = store.folder / "other" / "parts"
        while not stop.is_set():
            part.mkdir(parents=True, exist_ok=True)
            (part / "file").touch()
            shutil.rmtree(store.folder / "other", ignore_errors=True)

    (store.folder / "model.safetensors").write_bytes(CONTENT)
    thread = threading.Thread(target=churn)
    thread.start()
    try:
        assert {store.used_bytes() for _ in range(5000)} == {len(CONTENT)}
    finally:
        stop.set()
        thread.join(10)


def test_a_shared_lock_outlives_its_fetch(store: ModelStore, tmp_path: Path) -> None:
    other = ModelStore(tmp_path, "acme/tiny", "abc")
    with store.try_lock() as alone:
        assert alone
        descriptor = store.share_lock()
    with other.try_lock() as alone:
        assert not alone
    os.close(descriptor)
    with other.try_lock() as alone:
        assert alone
