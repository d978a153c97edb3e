"""Whether a child is written or deleted again and again, since somebody undoes it each time. Pure.

A controller that wants a child otherwise answers each write of ours with one of its own: without a bound the
two write 25 to 40 times a second.
"""

import hashlib
import json
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final

from heteroinfer_operator.cluster import Manifest

WITHIN: Final = timedelta(seconds=60)
"""Two writes of the same that are further apart are not in a row."""
MOST: Final = 5
"""Times in a row that one is written at once; what people change by hand is mended without a word."""


@dataclass(frozen=True, slots=True)
class _Written:
    digest: bytes
    last: datetime
    times: int


@dataclass(slots=True)
class WrittenAgain:
    """Which children of a resource were written or deleted of late, and how often the same in a row."""

    _written: dict[tuple[str, str], _Written] = field(default_factory=dict)

    def note(self, manifest: Manifest, now: datetime) -> bool:
        """Notes that a child was written; returns whether it was so often in a row that others undo it."""
        digest = hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).digest()
        return self._note((manifest["kind"], manifest["metadata"]["name"]), digest, now)

    def note_deleted(self, kind: str, name: str, now: datetime) -> bool:
        """Notes that a child was deleted; returns whether it was so often in a row that others make it."""
        return self._note((f"deletion of {kind}", name), b"", now)

    def _note(self, key: tuple[str, str], digest: bytes, now: datetime) -> bool:
        self._written = {key: each for key, each in self._written.items() if abs(now - each.last) < WITHIN}
        before = self._written.get(key)
        times = before.times + 1 if before is not None and before.digest == digest else 1
        self._written[key] = _Written(digest, now, times)
        return times >= MOST
