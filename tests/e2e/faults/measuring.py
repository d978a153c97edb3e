"""When things happened, as the API server reported: from its watches, in seconds after the fault."""

from collections.abc import Sequence
from dataclasses import dataclass

from heteroinfer_contract import names
from tests.e2e.watching import Change


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """From an epoch's pods to the next one's, in Unix time.

    Attributes:
        old_gone: when the last pod of the epoch was removed.
        first_created: when the first pod of the next was there.
        last_created: when the last was.
    """

    old_gone: float
    first_created: float
    last_created: float

    @property
    def wait_s(self) -> float:
        """Returns how long nothing of the group was there, until all of it was."""
        return self.last_created - self.old_gone


def find_turn(pods: Sequence[Change], epoch: int, count: int) -> Turn:
    """Returns how the `count` pods of an epoch gave way to those of the next.

    Args:
        pods: changes of the group's pods, in order.
        epoch: that ended.
        count: pods of each epoch.

    Raises:
        AssertionError: the pods of one of them did not all come, or not all go.
    """
    gone = {change.name: change.at for change in pods if change.kind == "DELETED" and _epoch(change) == epoch}
    created: dict[str, float] = {}
    for change in pods:
        if change.kind == "ADDED" and _epoch(change) == epoch + 1:
            created.setdefault(change.name, change.at)
    assert len(gone) == count, f"expected the end of {count} pods of epoch {epoch}, got {gone}"
    assert len(created) == count, f"expected {count} pods of epoch {epoch + 1}, got {created}"
    return Turn(
        old_gone=max(gone.values()), first_created=min(created.values()), last_created=max(created.values())
    )


def _epoch(change: Change) -> int:
    return int(change.stored["metadata"]["labels"][names.LABEL_EPOCH])
