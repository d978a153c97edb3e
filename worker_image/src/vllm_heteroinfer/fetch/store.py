"""A model's folder in a cache: parts that grow, files that were verified, and the marker last.

A file has its own name only once its hash is the hub's, so that whatever happens to two
fetches at once, or to a node, no wrong file is ever taken for a model's. The lock saves work;
on file systems where it does nothing, the hashes still hold.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.model_cache import damaged_files, read_marker
from heteroinfer_contract.model_fetch import (
    LOCK_FILE,
    MARKER_FILE,
    PARTS_FOLDER,
    CompleteModel,
    FetchedFile,
    model_folder,
)
from heteroinfer_contract.printable import format_bytes
from vllm_heteroinfer.fetch.errors import FetchError
from vllm_heteroinfer.fetch.locking import try_lock_file

_BLOCK_BYTES: Final = 8 * 2**20
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_MOST_NAME_BYTES: Final = 200
"""Of a part's name before its hash; a file system has 255."""
_MOST_TRIES: Final = 100
"""To lock a folder; a clean-up takes a commit away once."""
_FREE_SPACE: Final = (
    "set a larger spec.model.cache.size (a new claim is made), or remove models from the claim"
)


class ModelStore:
    """The folder of one commit of a model in a cache; made with it.

    Raises:
        FetchError: the cache cannot be written.
    """

    def __init__(self, cache: Path, repository: str, commit: str) -> None:
        self.cache = cache
        self.folder = cache / model_folder(repository, commit)
        self._repository = repository
        self._commit = commit
        self._parts = self.folder / PARTS_FOLDER
        self._alone = uuid.uuid4().hex
        self._descriptor: int | None = None
        with self.in_words():
            self._make_folder()

    def _make_folder(self) -> None:
        for tries_left in reversed(range(_MOST_TRIES)):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except FileExistsError:  # a clean-up took the folder away meanwhile, or it is a file
                if not tries_left:
                    raise
            else:
                return

    @contextlib.contextmanager
    def try_lock(self) -> Iterator[bool]:
        """Yields whether this fetch alone works in the folder now; the kernel frees it with the process.

        A clean-up may take the folder away until it is locked: then the folder is made anew.
        """
        with self.in_words():
            descriptor, alone = self._open_lock()
        self._descriptor = descriptor
        try:
            yield alone
        finally:
            self._descriptor = None
            os.close(descriptor)

    def _open_lock(self) -> tuple[int, bool]:
        """Returns a descriptor of the folder's lock, and whether this fetch alone has it."""
        path = self.folder / LOCK_FILE
        for _ in range(_MOST_TRIES):
            self._make_folder()
            with contextlib.suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    alone = self._lock(descriptor)
                    if os.path.samestat(os.fstat(descriptor), path.stat()):
                        return descriptor, alone
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)  # the lock of a folder that was taken away
        raise FileNotFoundError(
            errno.ENOENT, f"the folder was removed {_MOST_TRIES} times as a fetch began", str(self.folder)
        )

    def share_lock(self) -> int:
        """Returns a descriptor that keeps the lock until it is closed, even after `try_lock` has ended."""
        assert self._descriptor is not None
        return os.dup(self._descriptor)

    def _lock(self, descriptor: int) -> bool:
        locked = try_lock_file(descriptor)
        if locked is None:
            # Two fetches may do the same work here, each in a folder of its own; each file is verified
            # before it gets its name.
            self._parts = self.folder / PARTS_FOLDER / self._alone
        return locked is not False

    def complete(self) -> CompleteModel | None:
        """Returns what the folder holds if it is a complete model, with every file of its size."""
        marker = read_marker(self.folder)
        return None if marker is None or damaged_files(self.folder, marker) else marker

    def confirm(self) -> CompleteModel | None:
        """Returns what `complete` does, and notes that it is wanted: no clean-up removes it within an hour.

        Call it with the lock, which a clean-up takes too.
        """
        with contextlib.suppress(OSError):  # of a cache that cannot be written: nobody removes anything there
            os.utime(self.folder / MARKER_FILE)
        return self.complete()

    def done_bytes(self, files: Sequence[FetchedFile]) -> int:
        """Returns how much of these files is here."""
        return sum(min(self._present_bytes(file), file.size_bytes) for file in files)

    def used_bytes(self) -> int:
        """Returns the size of all files in the folder now; grows as long as another fetch works there.

        Files and folders that vanish meanwhile, or that cannot be read now, do not count.
        """
        used = 0
        for folder, _, files in os.walk(self.folder):  # which leaves out folders that it cannot list
            for name in files:
                with contextlib.suppress(OSError):
                    used += (Path(folder) / name).lstat().st_size
        return used

    def _present_bytes(self, file: FetchedFile) -> int:
        for path in (self.folder / file.path, self._part(file)):
            with contextlib.suppress(OSError):
                return path.stat().st_size
        return 0

    def missing(self, files: Sequence[FetchedFile]) -> list[FetchedFile]:
        """Returns the files that do not have their name and size; one of another size is removed."""
        missing = []
        with self.in_words():
            for file in files:
                path = self.folder / file.path
                if not path.is_file() or path.stat().st_size != file.size_bytes:
                    path.unlink(missing_ok=True)
                    missing.append(file)
        return missing

    def check_capacity(self, files: Sequence[FetchedFile]) -> None:
        """Checks that what is missing of these files fits.

        Raises:
            FetchError: it has not; by how much.
        """
        needed_bytes = sum(file.size_bytes for file in files) - self.done_bytes(files)
        with self.in_words():
            free_bytes = shutil.disk_usage(self.folder).free
        if needed_bytes > free_bytes:
            raise FetchError(
                FailureReason.MODEL_CACHE_FULL,
                f"the cache has {format_bytes(free_bytes)} free, and {format_bytes(needed_bytes)} are "
                f"still to come: {_FREE_SPACE}",
            )

    def open_part(self, file: FetchedFile) -> Path:
        """Returns the path of what is there of a file, made empty if there is nothing yet."""
        part = self._part(file)
        with self.in_words():
            part.parent.mkdir(parents=True, exist_ok=True)
            part.touch()
            if part.stat().st_size > file.size_bytes:
                os.truncate(part, 0)
        return part

    def keep(self, file: FetchedFile) -> bool:
        """Gives a fetched file its name if it is what the hub says; else it is removed. Returns which."""
        part = self._part(file)
        with self.in_words():
            if part.stat().st_size != file.size_bytes or digest_of(part, file.digest) != file.digest:
                part.unlink()
                return False
            path = self.folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(PermissionError):  # another user of the group began it
                part.chmod(0o644)
            part.rename(path)
        return True

    def adopt(self, file: FetchedFile) -> bool:
        """Links a file from another commit of the model that has the same; returns whether there was one."""
        with self.in_words():
            others = sorted(self.folder.parent.iterdir())
        for other in others:
            marker = read_marker(other) if other != self.folder else None
            for candidate in marker.files if marker else ():
                if (candidate.digest, candidate.size_bytes) == (file.digest, file.size_bytes):
                    return self._link(other / candidate.path, file)
        return False

    def _link(self, source: Path, file: FetchedFile) -> bool:
        path = self.folder / file.path
        try:
            if source.stat().st_size != file.size_bytes:
                return False
            path.parent.mkdir(parents=True, exist_ok=True)
            path.hardlink_to(source)
        except OSError:  # a file system without hard links: it is fetched
            return False
        return True

    def mark_complete(self, files: Sequence[FetchedFile]) -> CompleteModel:
        """Returns the marker, written so that it is there as a whole or not at all."""
        marker = CompleteModel(repository=self._repository, commit=self._commit, files=tuple(files))
        unfinished = self.folder / f"{MARKER_FILE}.{os.getpid()}"
        with self.in_words():
            with unfinished.open("w") as file:
                file.write(marker.to_json())
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(self.folder / MARKER_FILE)
            shutil.rmtree(self._parts, ignore_errors=True)
            with contextlib.suppress(OSError):  # of another fetch, or gone
                (self.folder / PARTS_FOLDER).rmdir()
        return marker

    def _part(self, file: FetchedFile) -> Path:
        # With its hash: what came of one version of a file is never continued with another.
        name = file.path.replace("/", "--")
        if len(name.encode()) > _MOST_NAME_BYTES:
            name = hashlib.sha256(name.encode()).hexdigest()
        return self._parts / f"{name}.{file.digest.partition(':')[2][:16]}"

    @contextlib.contextmanager
    def in_words(self) -> Iterator[None]:
        """Tells in words what the cache's file system refuses.

        Raises:
            FetchError: instead of an OSError.
        """
        try:
            yield
        except OSError as error:
            raise self.refusal(error) from error

    def refusal(self, error: OSError) -> FetchError:
        """Returns the words for an error of the cache's file system."""
        if error.errno in _FULL:
            return FetchError(
                FailureReason.MODEL_CACHE_FULL,
                f"the cache is full ({error.strerror}); what was fetched is kept: {_FREE_SPACE}",
            )
        return FetchError(
            FailureReason.MODEL_CACHE_NOT_WRITABLE,
            f"the cache cannot be written as user {os.getuid()}: {error.strerror} "
            f"({error.filename or self.folder}); take a volume that honours fsGroup, "
            "or make its folder writable for that user",
        )


def digest_of(path: Path, like: str) -> str:
    """Returns the hash of a file, of the kind that `like` begins with: `sha256:`, or `git:` of a blob."""
    kind = like.partition(":")[0]
    digest = hashlib.sha256()
    if kind == "git":  # as git hashes a blob
        digest = hashlib.sha1(usedforsecurity=False)
        digest.update(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return f"{kind}:{digest.hexdigest()}"
