"""Removes a model's unused commits from a cache, if the operator confirms it.

The pod of a fetch has the operator's list of commits in use. The list may be outdated: another resource may
have begun to use a commit. So a fetch asks the operator before it removes anything, and removes nothing
without an answer. A resource that begins to use a commit after the answer either waits (`pvc://`), or its own
fetch touches the marker of the commit. The folder of a commit is renamed in one step, under its lock, before
its files are removed.

Any process that reaches the fetch pod could send an answer. So each question has a token that only the
operator can compute, and the pod's environment has the hash of each token. A token confirms one question.
"""

import hmac
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from heteroinfer_contract.model_cache import read_marker
from heteroinfer_contract.model_fetch import (
    LOCK_FILE,
    MARKER_FILE,
    REMOVE_WITHIN_S,
    CacheCleanup,
    hash_token,
    is_commit,
)
from vllm_heteroinfer.fetch.locking import try_lock_file

logger = logging.getLogger(__name__)

RECENT_S: Final = 3600.0
"""A commit stays for this time after a fetch last found it complete, because another resource may be starting
a group with the commit."""
_REMOVING: Final = ".removing-"
"""Prefix for the name of a folder to remove; no commit begins like this."""


class CleanupQuestion:
    """The question to the operator whether a fetch may remove commits now. Thread-safe.

    Args:
        token_hashes: hash of the token that confirms each question, by number. If all tokens are used, the
            operator can confirm no further question.

    Attributes:
        number: number of the open question; None if there is none.
    """

    def __init__(self, token_hashes: Sequence[str]) -> None:
        self._token_hashes = tuple(token_hashes)
        self._changed = threading.Condition()
        self._num_asked = 0
        self._is_confirmed = False
        self._was_refused = False
        self.number: int | None = None

    def confirm(self, token: str) -> bool:
        """Confirms the open question if `token` belongs to this question. Returns whether it does.

        Logs only the first wrong token, so that strangers cannot fill the log.
        """
        with self._changed:
            if self.number is None:
                return False
            if not hmac.compare_digest(hash_token(token), self._token_hashes[self.number]):
                if not self._was_refused:
                    logger.warning(
                        "clean-up of the cache: refused a confirmation without the token of question %d. "
                        "Check which clients connect to the health port of this pod",
                        self.number,
                    )
                self._was_refused = True
                return False
            self._is_confirmed = True
            self._changed.notify_all()
            return True

    def ask(self) -> float | None:
        """Asks the operator. Returns the time until which commits may be removed; None without an answer.

        The time is on the clock of `clock_s`. It is counted from the question, so a late answer gives no more
        time. Returns None at once if no token is left.
        """
        until_s = clock_s() + REMOVE_WITHIN_S
        with self._changed:
            if self._num_asked == len(self._token_hashes):
                return None
            self.number, self._is_confirmed = self._num_asked, False
            self._num_asked += 1
            self._changed.wait_for(lambda: self._is_confirmed, REMOVE_WITHIN_S)
            self.number = None
            return until_s if self._is_confirmed else None


def clock_s() -> float:
    """Returns the time since boot in seconds, including the time in which the machine slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def remove_unused(
    model_folder: Path, commit: str, cleanup: CacheCleanup, ask_operator: Callable[[], float | None]
) -> tuple[str, ...]:
    """Removes unused commits from a model's folder in a cache. Returns the removed commits.

    A commit stays if a fetch found it complete in the last RECENT_S before the operator listed the used
    commits, or after that time. The function first renames folders, then deletes them, so that no reader
    finds an incomplete commit. It also deletes folders that an earlier call only renamed. If it cannot remove
    a folder, it logs this and stops.

    Args:
        model_folder: folder of all commits.
        commit: the commit to keep, because the calling fetch needs it.
        cleanup: lists the commits in use, and the number of newest commits that stay too, with `commit`.
        ask_operator: asks the operator whether its list is still complete. Called only if there are commits
            to remove. Returns the time of `clock_s` until which folders may be renamed, or None without an
            answer.
    """
    removed: list[str] = []
    try:
        _delete_renamed(model_folder)
        unused = _find_unused(model_folder, commit, cleanup)
        if not unused:
            return ()
        remove_until_s = ask_operator()
        if remove_until_s is None:
            logger.info(
                "the operator did not confirm the list of commits in use, so this fetch removes no commit"
            )
            return ()
        for last_complete_s, folder in unused:
            if _rename_for_removal(folder, last_complete_s, remove_until_s):
                removed.append(folder.name)
        _delete_renamed(model_folder)
    except OSError as error:
        logger.warning(
            "cannot remove all unused commits from %s: %s. The next download tries again", model_folder, error
        )
    if removed:
        logger.info("removed commits that no resource uses: %s", ", ".join(removed))
    return tuple(removed)


def _find_unused(model_folder: Path, commit: str, cleanup: CacheCleanup) -> list[tuple[float, Path]]:
    """Returns the folders of the commits that `remove_unused` may remove.

    With each folder comes the Unix time at which a fetch last found the commit complete.
    """
    return [
        (last_complete_s, folder)
        for last_complete_s, folder in _other_complete_commits(model_folder, commit, cleanup.keep)
        if folder.name not in cleanup.in_use and last_complete_s < cleanup.listed_s - RECENT_S
    ]


def _delete_renamed(model_folder: Path) -> None:
    """Deletes the folders that were renamed for removal."""
    for folder in model_folder.glob(f"{_REMOVING}*"):
        shutil.rmtree(folder)


def _other_complete_commits(model_folder: Path, commit: str, keep: int) -> list[tuple[float, Path]]:
    """Returns the complete commits except the `keep` commits that stay: `commit` and the newest others.

    With each commit comes the Unix time at which a fetch last found the commit complete.
    """
    others = []
    for folder in model_folder.iterdir():
        if folder.name == commit or not is_commit(folder.name) or folder.is_symlink():
            continue
        last_complete_s = _last_complete_s(folder)
        if last_complete_s is not None and read_marker(folder) is not None:
            others.append((last_complete_s, folder))
    newest_first = sorted(others, key=lambda other: (other[0], other[1].name), reverse=True)
    return newest_first[keep - 1 :]


def _rename_for_removal(folder: Path, last_complete_s: float, until_s: float) -> bool:
    """Renames the folder of a commit for removal.

    The folder stays if the commit is locked, if a fetch has found it complete since `last_complete_s`, or if
    the time is over.

    Args:
        last_complete_s: time at which a fetch found the commit complete, before the operator was asked.
        until_s: time of `clock_s` after which the folder stays.

    Returns:
        Whether the folder was renamed.
    """
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:  # another fetch has removed the commit
        return False
    try:
        is_locked = try_lock_file(descriptor) is False  # None on a file system without locks
        if is_locked or _last_complete_s(folder) != last_complete_s or clock_s() >= until_s:
            return False
        # Renaming is one step, so no fetch or rank ever finds an incomplete folder.
        folder.rename(folder.with_name(f"{_REMOVING}{folder.name}"))
    finally:
        os.close(descriptor)
    return True


def _last_complete_s(folder: Path) -> float | None:
    """Returns the Unix time at which a fetch last found a commit complete; None if the commit is gone."""
    try:
        return (folder / MARKER_FILE).stat().st_mtime
    except OSError:
        return None
