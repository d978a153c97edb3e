"""Measures when changes happened by the API server's watches, in seconds after the fault."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from heteroinfer_contract import names
from tests.e2e.watching import Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The replacement of an epoch's pods by those of the next epoch, in Unix time.

    Attributes:
        epoch: number of the next epoch.
        old_gone: when the last pod of the epoch was removed.
        first_created: when the first pod of the next epoch existed.
        last_created: when the last pod of the next epoch existed.
    """

    epoch: int
    old_gone: float
    first_created: float
    last_created: float

    @property
    def wait_s(self) -> float:
        """Returns the seconds from the end of the last old pod until all new pods existed."""
        return self.last_created - self.old_gone


def find_turn(pods: Sequence[Change], epoch: int, count: int) -> Turn:
    """Returns how the `count` pods of an epoch were replaced by those of the next.

    Args:
        pods: changes of the group's pods, in order.
        epoch: number of the epoch that ended.
        count: pods of each epoch.

    Raises:
        AssertionError: not all old pods are gone, or not all new pods exist.
    """
    gone = {change.name: change.at for change in pods if change.kind == "DELETED" and _epoch(change) == epoch}
    following = next(iter(find_epochs(pods, after=epoch)), 0)
    created: dict[str, float] = {}
    for change in pods:
        if change.kind == "ADDED" and _epoch(change) == following:
            created.setdefault(change.name, change.at)
    assert len(gone) == count, f"expected the end of {count} pods of epoch {epoch}, got {gone}"
    assert len(created) == count, f"expected {count} pods of epoch {following}, got {created}"
    return Turn(
        epoch=following,
        old_gone=max(gone.values()),
        first_created=min(created.values()),
        last_created=max(created.values()),
    )


def find_epochs(pods: Sequence[Change], *, after: int) -> list[int]:
    """Returns the later epochs that had pods, in order."""
    return sorted({_epoch(change) for change in pods if _epoch(change) > after})


def _epoch(change: Change) -> int:
    return int(change.stored["metadata"]["labels"][names.LABEL_EPOCH])


def keep(name: str, text: str) -> None:
    """Writes a file into the folder $OUT, which it creates.

    Without OUT in the environment, it writes nothing.
    """
    if given := os.environ.get("OUT"):
        folder = Path(given)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
