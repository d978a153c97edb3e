"""Removes commits of a model from a cache that no resource uses, as far as the operator allows it.

The operator's list may be old by the time it is read: another resource may have begun to use a commit. So
a commit stays that a fetch has confirmed later than an hour before the list. What goes is taken away as a
whole, under its lock.
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
"""Clocks of nodes, and what an operator has heard of, differ by less."""
_REMOVING: Final = ".removing-"
"""Before the commit in the name of a folder that goes: no commit begins so."""


def remove_unused(model: Path, commit: str, cleanup: CacheCleanup) -> tuple[str, ...]:
    """Returns the commits that were removed from a model's folder in a cache.

    What cannot be removed is logged and stays.

    Args:
        model: folder of all commits.
        commit: that is fetched now.
        cleanup: what may go.
    """
    removed: list[str] = []
    if time.time() - cleanup.listed_s > RECENT_S:
        logger.info("the list of commits in use is over an hour old: none is removed now")
        return ()
    try:
        _remove_taken(model)
        for folder in _rest(model, commit, cleanup.keep):
            if folder.name not in cleanup.in_use and _take_away(folder, cleanup.listed_s - RECENT_S):
                removed.append(folder.name)  # noqa: PERF401 - what was removed before an error is reported
        _remove_taken(model)
    except OSError as error:
        logger.warning("cannot remove unused commits from %s: %s; they stay", model, error)
    if removed:
        logger.info("removed commits that no resource uses: %s", ", ".join(removed))
    return tuple(removed)


def _remove_taken(model: Path) -> None:
    for folder in model.glob(f"{_REMOVING}*"):
        shutil.rmtree(folder)


def _rest(model: Path, commit: str, keep: int) -> list[Path]:
    """Returns the complete commits beside those that stay as the last ones."""
    others = [
        (confirmed_s, folder)
        for folder in model.iterdir()
        if folder.name != commit and is_commit(folder.name) and not folder.is_symlink()
        if read_marker(folder) is not None and (confirmed_s := _confirmed_s(folder)) is not None
    ]
    newest_first = sorted(others, key=lambda each: (each[0], each[1].name), reverse=True)
    return [folder for _, folder in newest_first[keep - 1 :]]


def _take_away(folder: Path, before_s: float) -> bool:
    """Returns whether a commit is gone: nobody holds its lock, or has confirmed it lately."""
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    except FileNotFoundError:
        return False
    try:
        confirmed_s = _confirmed_s(folder)
        if try_lock_file(descriptor) is False or confirmed_s is None or confirmed_s >= before_s:
            return False
        # One step, so that no fetch or rank ever finds half of it.
        folder.rename(folder.with_name(f"{_REMOVING}{folder.name}"))
    finally:
        os.close(descriptor)
    return True


def _confirmed_s(folder: Path) -> float | None:
    """Returns when a fetch last found a commit complete, in seconds of Unix time; None if it is gone."""
    try:
        return (folder / MARKER_FILE).stat().st_mtime
    except OSError:
        return None
