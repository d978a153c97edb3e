"""A model's folder in a cache: unfinished parts, verified files, and a marker once all files are there.

A file gets its final name only after its hash matches the hub's. So neither concurrent fetches nor the crash
of a node can leave a wrong file in a model. The lock only avoids duplicate work: on file systems without
locks the hashes still protect the files.
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
_NOT_ALLOWED: Final = frozenset({errno.EACCES, errno.EPERM})
_MAX_NAME_BYTES: Final = 200
"""Limit for a part's name without its hash; file systems allow 255 bytes for the whole name."""
_MAX_TRIES: Final = 100
"""Limit of tries to create or lock a folder. A clean-up removes the folder of a commit at most once, so only
another program can cause this many tries."""
_FREE_SPACE: Final = (
    "Enlarge the PersistentVolumeClaim if its storage class allows it, set a larger spec.model.cache.size "
    "(a new claim and download), or remove models from the claim"
)


class ModelStore:
    """The folder of one commit of a model in a cache. The constructor creates the folder.

    Raises:
        FetchError: the cache is not writable.
    """

    def __init__(self, cache: Path, repository: str, commit: str) -> None:
        self.cache = cache
        self.folder = cache / model_folder(repository, commit)
        self._repository = repository
        self._commit = commit
        self._parts = self.folder / PARTS_FOLDER
        self._own_parts_name = uuid.uuid4().hex
        self._descriptor: int | None = None
        with self.converted_errors():
            self._make_folder()

    def _make_folder(self) -> None:
        """Creates the folder; tries again if a clean-up renames it at the same moment."""
        for tries_left in reversed(range(_MAX_TRIES)):
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                return
            except FileExistsError:  # a clean-up renamed the folder at this moment, or the path is a file
                if not tries_left:
                    raise

    @contextlib.contextmanager
    def try_lock(self) -> Iterator[bool]:
        """Tries to lock the folder; yields whether this fetch may write there.

        Creates the folder again if a clean-up removes the folder before this process locks it. The kernel
        releases the lock if the process ends.
        """
        with self.converted_errors():
            descriptor, has_lock = self._open_lock()
        self._descriptor = descriptor
        try:
            yield has_lock
        finally:
            self._descriptor = None
            os.close(descriptor)

    def _open_lock(self) -> tuple[int, bool]:
        """Opens the lock file and tries to lock it. Returns its descriptor, and whether this fetch may write.

        A clean-up may remove the folder between the two steps. Then the path has another lock file or none,
        and the function tries again.

        Raises:
            FetchError: the folder was removed again after each try.
        """
        path = self.folder / LOCK_FILE
        for _ in range(_MAX_TRIES):
            self._make_folder()
            with contextlib.suppress(FileNotFoundError):  # a clean-up has removed the folder
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
                try:
                    has_lock = self._lock(descriptor)
                    is_file_at_path = os.path.samestat(os.fstat(descriptor), path.stat())
                    if is_file_at_path:
                        return descriptor, has_lock
                except BaseException:
                    os.close(descriptor)
                    raise
                os.close(descriptor)  # this lock file is in a folder that a clean-up removed
        raise FetchError(
            FailureReason.MODEL_CACHE_NOT_WRITABLE,
            f"cache folder {self.folder}: another program removed this folder {_MAX_TRIES} times while a "
            "fetch tried to lock it. Stop the program that removes files from the cache",
        )

    def share_lock(self) -> int:
        """Returns a descriptor that keeps the lock until it is closed, even after `try_lock` has ended."""
        assert self._descriptor is not None
        return os.dup(self._descriptor)

    def _lock(self, descriptor: int) -> bool:
        """Tries to lock the folder. Returns whether this fetch may write there.

        On a file system without locks, every fetch may write, and each uses its own folder of parts.
        """
        has_lock = try_lock_file(descriptor)
        if has_lock is None:
            # Two fetches may now download the same files, each into its own folder of parts. Each file is
            # verified before it gets its final name.
            self._parts = self.folder / PARTS_FOLDER / self._own_parts_name
            return True
        return has_lock

    def complete(self) -> CompleteModel | None:
        """Returns the marker if the model is complete and every file has its size, otherwise None."""
        marker = read_marker(self.folder)
        return None if marker is None or damaged_files(self.folder, marker) else marker

    def confirm_complete(self) -> CompleteModel | None:
        """Returns the marker if the model is complete, otherwise None; also touches the marker.

        A touched marker keeps clean-ups from removing the model within an hour. Hold the lock during the
        call, because a clean-up locks the folder too.
        """
        with contextlib.suppress(OSError):  # in a read-only cache, no clean-up can remove anything
            os.utime(self.folder / MARKER_FILE)
        return self.complete()

    def done_bytes(self, files: Sequence[FetchedFile]) -> int:
        """Returns the number of bytes of these files that the folder already holds."""
        return sum(min(self._present_bytes(file), file.size_bytes) for file in files)

    def used_bytes(self) -> int:
        """Returns the size of all files in the folder, which grows while another fetch writes there.

        Files and folders that vanish during the call, or that cannot be read, do not count.
        """
        used = 0
        for folder, _, files in os.walk(self.folder):  # os.walk skips folders that it cannot list
            for name in files:
                with contextlib.suppress(OSError):  # the file was removed or renamed since the listing
                    used += (Path(folder) / name).lstat().st_size
        return used

    def _present_bytes(self, file: FetchedFile) -> int:
        """Returns the size of a file or of its unfinished part; 0 if neither exists."""
        for path in (self.folder / file.path, self._part(file)):
            with contextlib.suppress(OSError):
                return path.stat().st_size
        return 0

    def list_missing(self, files: Sequence[FetchedFile]) -> list[FetchedFile]:
        """Removes files of a wrong size, and returns these files and all others that the folder lacks."""
        missing = []
        with self.converted_errors():
            for file in files:
                path = self.folder / file.path
                if not path.is_file() or path.stat().st_size != file.size_bytes:
                    path.unlink(missing_ok=True)
                    missing.append(file)
        return missing

    def check_capacity(self, files: Sequence[FetchedFile]) -> None:
        """Checks that the missing bytes of these files fit into the cache.

        Raises:
            FetchError: the free space is too small; the message contains both sizes.
        """
        needed_bytes = sum(file.size_bytes for file in files) - self.done_bytes(files)
        with self.converted_errors():
            free_bytes = shutil.disk_usage(self.folder).free
        if needed_bytes > free_bytes:
            raise FetchError(
                FailureReason.MODEL_CACHE_FULL,
                f"the cache has {format_bytes(free_bytes)} free, but {format_bytes(needed_bytes)} are "
                f"still missing. {_FREE_SPACE}",
            )

    def open_part(self, file: FetchedFile) -> Path:
        """Returns the path of a file's unfinished part; empties a part that is too long, or creates one."""
        part = self._part(file)
        with self.converted_errors():
            part.parent.mkdir(parents=True, exist_ok=True)
            part.touch()
            if part.stat().st_size > file.size_bytes:
                os.truncate(part, 0)
        return part

    def finish_part(self, file: FetchedFile) -> bool:
        """Moves a finished part to its final name if size and hash match the hub's, otherwise deletes it.

        Returns whether they match.
        """
        part = self._part(file)
        with self.converted_errors():
            if part.stat().st_size != file.size_bytes or digest_of(part, file.digest) != file.digest:
                part.unlink()
                return False
            path = self.folder / file.path
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(PermissionError):  # another user of the volume's group owns the part
                part.chmod(0o644)  # all pods may read the file, and only its owner may change it
            part.rename(path)
        return True

    def link_from_other_commit(self, file: FetchedFile) -> bool:
        """Links a file to a file of the same content in another commit. Returns whether this succeeded."""
        with self.converted_errors():
            others = sorted(self.folder.parent.iterdir())
        for other in others:
            marker = read_marker(other) if other != self.folder else None
            for candidate in marker.files if marker else ():
                if (candidate.digest, candidate.size_bytes) == (file.digest, file.size_bytes):
                    return self._link(other / candidate.path, file)
        return False

    def _link(self, source: Path, file: FetchedFile) -> bool:
        """Links a file of another commit. Returns False if its size is wrong or it cannot be linked."""
        path = self.folder / file.path
        try:
            if source.stat().st_size != file.size_bytes:
                return False
            path.parent.mkdir(parents=True, exist_ok=True)
            path.hardlink_to(source)
        except OSError:  # without a link, the fetch downloads the file
            return False
        return True

    def mark_complete(self, files: Sequence[FetchedFile]) -> CompleteModel:
        """Marks the model as complete, and deletes the parts of this fetch. Returns the marker.

        The marker gets its name only when it is complete, so no reader finds an incomplete marker.
        """
        marker = CompleteModel(repository=self._repository, commit=self._commit, files=tuple(files))
        unfinished = self.folder / f"{MARKER_FILE}.{os.getpid()}"
        with self.converted_errors():
            with unfinished.open("w") as file:
                file.write(marker.to_json())
                file.flush()
                os.fsync(file.fileno())
            unfinished.rename(self.folder / MARKER_FILE)
            shutil.rmtree(self._parts, ignore_errors=True)
            with contextlib.suppress(OSError):  # the folder has parts of another fetch, or does not exist
                (self.folder / PARTS_FOLDER).rmdir()
        return marker

    def _part(self, file: FetchedFile) -> Path:
        """Returns the path of a file's unfinished part."""
        # The name contains the hash, so a download never continues with another version of the file.
        name = file.path.replace("/", "--")
        if len(name.encode()) > _MAX_NAME_BYTES:
            name = hashlib.sha256(name.encode()).hexdigest()
        return self._parts / f"{name}.{file.digest.partition(':')[2][:16]}"

    @contextlib.contextmanager
    def converted_errors(self) -> Iterator[None]:
        """Turns errors of the cache's file system into FetchErrors with a fix.

        Raises:
            FetchError: in place of an OSError.
        """
        try:
            yield
        except OSError as error:
            raise self.cache_error(error) from error

    def cache_error(self, error: OSError) -> FetchError:
        """Returns the FetchError for an error of the cache's file system."""
        if error.errno in _FULL:
            return FetchError(
                FailureReason.MODEL_CACHE_FULL,
                f"the cache is full ({error.strerror}). It keeps the data fetched so far. {_FREE_SPACE}",
            )
        fix = "Check this path and the volume of the cache"
        if error.errno in _NOT_ALLOWED:
            fix = "Use a volume that supports fsGroup, or make its folder writable for that user"
        return FetchError(
            FailureReason.MODEL_CACHE_NOT_WRITABLE,
            f"the cache cannot be written as user {os.getuid()}: {error.strerror} "
            f"({error.filename or self.folder}). {fix}",
        )


def digest_of(path: Path, expected: str) -> str:
    """Returns the hash of a file, by the method with which `expected` begins: `sha256:` or `git:` (blob)."""
    kind = expected.partition(":")[0]
    digest = hashlib.sha256()
    if kind == "git":  # git computes the hash of a blob with this prefix
        digest = hashlib.sha1(usedforsecurity=False)
        digest.update(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    return f"{kind}:{digest.hexdigest()}"
