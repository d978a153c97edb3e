"""Keeps the resource below etcd's limit of 1.5 MiB, which includes spec and managedFields. Pure.

Values that decisions read always stay: every rank's pod, and whether it has run. Measurements, nodes,
messages of older failures and rank tables of plans are for users; they stay as long as there is space.
Locked memory and transports of ranks are dropped before nodes and times.
"""

import json
from collections.abc import Sequence
from typing import Final

from heteroinfer_operator.api import FailureStatus, GroupStatus, PlanStatus, RankEntry
from heteroinfer_operator.reconcile import transitions

TABLES_BYTES: Final = 850_000
"""Bytes for the rank entries of all groups. The fields that decisions read take at most 830,000 bytes for
MAX_RANKS ranks."""
FAILURE_BYTES: Final = 96_000
"""Bytes for the messages of failures. The other fields of a failure take another 150 bytes."""
PLAN_BYTES: Final = 128_000
"""Bytes for the ranks of all plans."""
LEFT_OUT: Final = "left out: the status is full"
_RANK_BYTES: Final = 75
"""Size of an entry without names, times and node: {"rank":4095,"role":"","pod":"","started":false,…},"""
_DETAIL_BYTES: Final = 75
"""Size of an entry's times, and of its node without the node's name."""
_LOCKED_MEMORY_BYTES: Final = 125
"""Size of an entry's locked memory with its limit, and of its list of transports without their names."""
_PLAN_RANK_BYTES: Final = 150
_QUOTES_AND_COMMA: Final = 3
"""Bytes around each text of a list in JSON."""


def fit_groups(groups: Sequence[GroupStatus]) -> tuple[GroupStatus, ...]:
    """Shortens the status of the groups until it fits into the groups' share of the status.

    First drops locked memory and transports of ranks, then nodes and times of ranks. Both begin with the last
    group, and a group loses the values of all its ranks. The messages of failures have their own limit; the
    oldest messages are dropped first.
    """
    required_bytes = sum(_required_rank_bytes(rank) for group in groups for rank in group.members)
    free_bytes = TABLES_BYTES - required_bytes
    # Nodes and times get their bytes first. Locked memory and transports get the bytes that are left.
    fitted = []
    for group in groups:
        detail_bytes = sum(_DETAIL_BYTES + _json_bytes(rank.node or "") for rank in group.members)
        free_bytes -= detail_bytes
        fitted.append(group if free_bytes >= 0 else transitions.without_details(group))
    return tuple(_fit_failures(_fit_locked_memory_and_transports(fitted, free_bytes)))


def _fit_locked_memory_and_transports(groups: Sequence[GroupStatus], free_bytes: int) -> list[GroupStatus]:
    """Drops locked memory and transports of the last groups until the groups fit the free bytes."""
    fitted = []
    for group in groups:
        free_bytes -= sum(
            _LOCKED_MEMORY_BYTES
            + sum(_json_bytes(text) + _QUOTES_AND_COMMA for text in rank.transports or ())
            for rank in group.members
            if rank.locked_memory_bytes is not None
        )
        fitted.append(group if free_bytes >= 0 else transitions.without_locked_memory_and_transports(group))
    return fitted


def fit_plans(plans: Sequence[PlanStatus]) -> tuple[PlanStatus, ...]:
    """Drops the rank tables of the last plans until the plans fit."""
    free_bytes, fitted = PLAN_BYTES, []
    for plan in plans:
        free_bytes -= sum(_PLAN_RANK_BYTES + _json_bytes(rank.role) for rank in plan.ranks)
        fitted.append(plan if free_bytes >= 0 else plan.changed(ranks=()))
    return tuple(fitted)


def _fit_failures(groups: Sequence[GroupStatus]) -> list[GroupStatus]:
    """Replaces the messages of the oldest failures by LEFT_OUT until all messages fit FAILURE_BYTES."""
    # Failure j of group i, by (i, j).
    by_position = {
        (i, j): failure for i, group in enumerate(groups) for j, failure in enumerate(group.failures)
    }
    newest_first = sorted(by_position, key=lambda position: by_position[position].time, reverse=True)
    free_bytes, kept = FAILURE_BYTES, set()
    for position in newest_first:
        free_bytes -= _json_bytes(by_position[position].message)
        if free_bytes < 0:
            break
        kept.add(position)
    if len(kept) == len(by_position):  # all messages fit
        return list(groups)

    def fitted(i: int, j: int) -> FailureStatus:
        """Returns failure j of group i, without its message if the message does not fit."""
        failure = by_position[i, j]
        return failure if (i, j) in kept else failure.changed(message=LEFT_OUT)

    return [
        transitions.with_failures(group, [fitted(i, j) for j in range(len(group.failures))])
        for i, group in enumerate(groups)
    ]


def _required_rank_bytes(rank: RankEntry) -> int:
    """Returns the bytes of a rank's entry without the details that may be dropped."""
    return _RANK_BYTES + _json_bytes(rank.role) + _json_bytes(rank.pod)


def _json_bytes(text: str) -> int:
    """Returns the bytes of a text in the API server's JSON, which also escapes <, > and &."""
    html_bytes = 5 * sum(text.count(character) for character in "<>&")
    if text.isascii() and text.isprintable():
        return len(text) + text.count('"') + text.count("\\") + html_bytes
    return _escaped_bytes(text) + html_bytes


def _escaped_bytes(text: str) -> int:
    """Returns the bytes of a text as a JSON string, without the quotes."""
    return len(json.dumps(text, ensure_ascii=False).encode()) - 2
