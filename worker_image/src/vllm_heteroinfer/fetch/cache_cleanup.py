"""Removes a model's unused commits from a cache, if the operator allows it.

The operator's list may be outdated when it is read: another resource may have begun to use a commit. So a
commit stays if a fetch confirmed it less than an hour before the list was made, or later. The folder of a
commit is renamed in one step, under its lock, before its files are removed.
"""

import logging
import os
import shutil
import time
from pathlib import Path
from typing import Final

from heteroinfer_contract.model_cache import read_marker
from heteroinfer_contract.model_fetch import LOCK_FILE, MARKER_FILE, CacheCleanup, is_commit
from vllm_heteroinfer.fetch.locking import try_lock_file

logger = logging.getLogger(__name__)

RECENT_S: Final = 3600.0
"""A commit stays for this time after its last use: longer than the clocks of nodes differ, and longer than
the operator takes to learn of a new use."""
_REMOVING: Final = ".removing-"
"""Prefix for the name of a folder to remove; no commit begins like this."""


def remove_unused(model_folder: Path, commit: str, cleanup: CacheCleanup) -> tuple[str, ...]:
    """Removes unused commits from a model's folder in a cache. Returns the removed commits.

    A commit stays if a fetch confirmed it less than RECENT_S before the operator listed the used commits, or
    later. The function first renames folders, then deletes them, so that no reader finds an incomplete
    commit. It also deletes folders that an earlier call only renamed. If it cannot remove a folder, it logs
    this and stops.

    Args:
        model_folder: folder of all commits.
        commit: the commit to keep, because the calling fetch needs it.
        cleanup: lists the commits in use, and how many other commits to keep.
    """
    removed: list[str] = []
    if time.time() - cleanup.listed_s > RECENT_S:
        logger.info("the list of commits in use is over an hour old: no commit is removed")
        return ()
    try:
        _delete_renamed(model_folder)
        for folder in _other_complete_commits(model_folder, commit, cleanup.keep):
            if folder.name not in cleanup.in_use and _rename_for_removal(folder, cleanup.listed_s - RECENT_S):
                removed.append(folder.name)  # noqa: PERF401 - keeps the commits that were removed before an error
        _delete_renamed(model_folder)
    except OSError as error:
        logger.warning("cannot remove unused commits from %s: %s. The commits stay", model_folder, error)
    if removed:
        logger.info("removed commits that no resource uses: %s", ", ".join(removed))
    return tuple(removed)


def _delete_renamed(model_folder: Path) -> None:
    """Deletes the folders that were renamed for removal."""
    for folder in model_folder.glob(f"{_REMOVING}*"):
        shutil.rmtree(folder)


def _other_complete_commits(model_folder: Path, commit: str, keep: int) -> list[Path]:
    """Returns the complete commits except `commit` and the newest `keep - 1` other commits."""
    others = [
        (confirmed_s, folder)
        for folder in model_folder.iterdir()
        if folder.name != commit and is_commit(folder.name) and not folder.is_symlink()
        if read_marker(folder) is not None and (confirmed_s := _confirmed_s(folder)) is not None
    ]
    newest_first = sorted(others, key=lambda each: (each[0], each[1].name), reverse=True)
    return [folder for _, folder in newest_first[keep - 1 :]]


def _rename_for_removal(folder: Path, before_s: float) -> bool:
    """Renames the folder of a commit for removal, unless the commit is locked or was confirmed recently.

    Returns whether the folder was renamed.
    """
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        return False
    try:
        confirmed_s = _confirmed_s(folder)
        if try_lock_file(descriptor) is False or confirmed_s is None or confirmed_s >= before_s:
            return False
        # Renaming is one step, so no fetch or rank ever finds an incomplete folder.
        folder.rename(folder.with_name(f"{_REMOVING}{folder.name}"))
    finally:
        os.close(descriptor)
    return True


def _confirmed_s(folder: Path) -> float | None:
    """Returns the Unix time at which a fetch last found a commit complete; None if the commit is gone."""
    try:
        return (folder / MARKER_FILE).stat().st_mtime
    except OSError:
        return None
