"""A copy of one collection of the API server, kept by list and watch.

kopf's index is not used: after a 410 and a relist it keeps objects that are gone
(`kopf/_cogs/clients/watching.py@1.45.2`, lines 205-211). Here a relist replaces everything.
"""

import asyncio
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Generic, TypeVar

from heteroinfer_contract.printable import printable
from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.kube.paths import NamespacedName
from heteroinfer_operator.kube.server import FORBIDDEN, GONE, NOT_FOUND, ApiError, ApiServer
from heteroinfer_operator.stored_fields import UnreadableError, as_name, as_object, as_text, version_number

T = TypeVar("T")

logger = logging.getLogger(__name__)

WATCH_S: Final = 290
"""The server ends a watch after this or up to twice as long; the next goes on where it stopped."""
STALE_SILENCES: Final = 3
"""After so many silences in a row, listing did not help either."""
BACKOFF_FIRST_S: Final = 0.2
BACKOFF_MOST_S: Final = 5.0
UNCONFIRMED_S: Final = 60.0
"""How long an object that we wrote survives relists that don't show it yet."""
MOST_REPORTED: Final = 1000
"""Unreadable objects of one collection that are remembered, so that each is logged once."""
_NAMELESS: Final = NamespacedName(namespace="", name="an object without a name, uid or resourceVersion")
_ADDED: Final = "ADDED"
_MODIFIED: Final = "MODIFIED"
_DELETED: Final = "DELETED"
_BOOKMARK: Final = "BOOKMARK"


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    uid: str
    version: int
    value: T
    unconfirmed_since: float | None = None


@dataclass(frozen=True, slots=True)
class _StoredObject:
    """What a cache reads of any object.

    Attributes:
        version: its resourceVersion as a number, or 0 if the API server does not count.
    """

    name: NamespacedName
    uid: str
    version: int
    body: Manifest

    @classmethod
    def of(cls, body: object) -> "_StoredObject":
        """Returns an object with what its metadata says; raises UnreadableError."""
        whole = as_object(body, "object")
        metadata = as_object(whole.get("metadata"), "metadata")
        name = NamespacedName(
            namespace=as_text(metadata.get("namespace"), "namespace"),
            name=as_name(metadata.get("name"), "name"),
        )
        version = as_name(metadata.get("resourceVersion"), "resourceVersion")
        return cls(name, as_name(metadata.get("uid"), "uid"), version_number(version), whole)


def _is_newer(version: int, other: int) -> bool:
    """Returns whether a version is known to be later than another."""
    return version > other > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """What a cache holds a copy of.

    Attributes:
        namespace: of the objects; None for all namespaces, and for kinds without one.
        watch_s: seconds after which, or up to twice as long, the server is asked to end a watch: not
            all at the same time.
    """

    label: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    namespace: str | None = None
    watch_s: int = WATCH_S


class WatchCache(Generic[T]):
    """Objects of one collection, each trimmed to a value at once.

    An object never goes back: of two states the one with the higher resourceVersion stands
    (they are ordered numbers by KEP-5504), so that what `note_written` says is not undone by a
    watch that lags behind.

    An object that `trim` cannot read is logged once and left out, or kept as `unreadable` has it. Nothing
    that an API server sends ends a cache: after any error it lists again.

    Attributes:
        synced: set after the first full list.

    Args:
        trim: an object to its value; None for objects that don't belong here.
        changed: called with the value before and after each change that `trim` shows.
        index: what `under` finds a value by; None where nobody asks for it.
        unreadable: the value of an object at which `trim` raised UnreadableError; None leaves it out.
        failing: called when a list or watch fails after one that worked.
    """

    def __init__(
        self,
        server: ApiServer,
        collection: Collection,
        *,
        trim: Callable[[Manifest], T | None],
        changed: Callable[[T | None, T | None], None],
        index: Callable[[T], Hashable] | None = None,
        unreadable: Callable[[Manifest], T | None] = lambda stored: None,
        failing: Callable[[], None] = lambda: None,
    ) -> None:
        self.collection = collection
        self.synced = asyncio.Event()
        self._server = server
        self._trim = trim
        self._changed = changed
        self._index = index
        self._unreadable = unreadable
        self._failing = failing
        self._reported: dict[NamespacedName, str] = {}
        self._broke_off = False
        self._entries: dict[NamespacedName, _Entry[T]] = {}
        self._indexed: defaultdict[Hashable, dict[NamespacedName, T]] = defaultdict(dict)
        self._version = ""
        self._relist_wanted = False
        self._following: asyncio.Timeout | None = None
        self._problem: ApiError | None = None
        self._following_since = 0.0
        self._last_answer_at = time.monotonic()

    @property
    def is_failing(self) -> bool:
        """Returns whether the last list or watch failed, and none has worked since."""
        if self._problem is None or self._following is None:
            return self._problem is not None
        # A watch says nothing for up to a minute: that it lasts is the sign that it works.
        return time.monotonic() - self._following_since < 2 * BACKOFF_MOST_S

    @property
    def refusal(self) -> str:
        """The API server's words if it refuses to let the operator read this collection, else ""."""
        problem = self._problem if self.is_failing else None
        return problem.message if problem is not None and problem.status in (FORBIDDEN, NOT_FOUND) else ""

    @property
    def version(self) -> int:
        """The resourceVersion up to which this cache has seen all; 0 before the first list."""
        return version_number(self._version)

    @property
    def is_stale(self) -> bool:
        """Returns whether for long neither a watch nor a list said anything: what is kept may be the past."""
        return self._silent_s() > STALE_SILENCES * self._server.watch_silence_s

    def get(self, name: NamespacedName) -> T | None:
        """Returns the value of an object, or None if there is none."""
        entry = self._entries.get(name)
        return entry.value if entry else None

    def version_of(self, name: NamespacedName) -> int:
        """Returns the resourceVersion that an object has here, or 0 if it is not here."""
        entry = self._entries.get(name)
        return entry.version if entry else 0

    def has_seen(self, name: NamespacedName, version: int) -> bool:
        """Returns whether what happened to an object up to a resourceVersion is known here, its end too."""
        return max(version_number(self._version), self.version_of(name)) >= version

    def uid_of(self, name: NamespacedName) -> str:
        """Returns the uid that an object has here, or "" if it is not here."""
        entry = self._entries.get(name)
        return entry.uid if entry else ""

    def values(self) -> list[T]:
        """Returns all values, in order of their names."""
        return [self._entries[name].value for name in sorted(self._entries)]

    def under(self, indexed: Hashable) -> list[T]:
        """Returns the values with this index, in order of their names; costs no look at any other."""
        found = self._indexed.get(indexed, {})
        return [found[name] for name in sorted(found)]

    def note_written(self, stored: Manifest) -> None:
        """Takes in the API server's answer to a write, unless the watch is past it already.

        Raises:
            UnreadableError: the answer has no metadata.
        """
        written = _StoredObject.of(stored)
        value = self._read(written)
        if value is not None and written.version > version_number(self._version):
            entry = _Entry(written.uid, written.version, value, time.monotonic())
            self._put(written.name, entry)

    def note_gone(self, name: NamespacedName, uid: str) -> None:
        """Takes in that the API server says that an object is gone; one of another uid stays."""
        kept = self._entries.get(name)
        if kept is not None and kept.uid == uid:
            self._drop(name)

    async def run(self) -> None:
        """Lists and watches until cancelled; what goes wrong is logged and tried again."""
        backoff_s = BACKOFF_FIRST_S
        while True:
            started = time.monotonic()
            try:
                if self._problem is not None and self._version:
                    await self._check_version()
                # An event or list that was at hand may have set the version since relist() was called.
                while self._relist_wanted or not self._version:
                    await self._relist()
                await self._follow()
            except ApiError as error:
                # A watch that says nothing may go on so from the same version: only a list is sure.
                if error.status == GONE or self._silent_s() > self._server.watch_silence_s / 2:
                    self._version = ""
                self._report(error)
            except UnreadableError as error:
                self._version = ""
                logger.warning("%s: %s; listing again", self.collection.label, printable(error.message))
            except Exception:  # the one boundary of a cache: its end would be the end of the process
                self._version, self._broke_off = "", True
                logger.exception(
                    "%s: a defect of the operator, please report it; listing again", self.collection.label
                )
            if time.monotonic() - started > BACKOFF_MOST_S:
                backoff_s = BACKOFF_FIRST_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, BACKOFF_MOST_S)

    def relist(self) -> None:
        """Ends the watch, and has all listed anew: what is kept here may be of a store that was replaced."""
        self._version, self._relist_wanted = "", True
        for name, entry in self._entries.items():
            self._entries[name] = replace(entry, unconfirmed_since=None)
        if self._following is not None:
            self._following.reschedule(asyncio.get_running_loop().time())

    async def _check_version(self) -> None:
        """Has all listed anew if the store is older than what was seen: etcd was restored from a backup.

        A watch from a version that is still to come would get nothing until the store has reached it.
        """
        listed = await self._server.get(self.collection.path, {**self.collection.query, "limit": 1})
        metadata = as_object(listed["metadata"], "metadata")
        now = version_number(as_name(metadata.get("resourceVersion"), "resourceVersion"))
        if 0 < now < self.version:
            logger.warning("%s: the store went back to an older state; listing again", self.collection.label)
            self.relist()

    def _read(self, stored: _StoredObject) -> T | None:
        """Returns the value of an object; None if it does not belong here, or nothing of it can be read."""
        try:
            return self._trim(stored.body)
        except UnreadableError as error:
            self._report_unreadable(stored.name, stored.uid, error)
            return self._read_metadata(stored)

    def _read_metadata(self, stored: _StoredObject) -> T | None:
        try:
            return self._unreadable(stored.body)
        except UnreadableError:  # reported before
            return None

    def _report_unreadable(self, name: NamespacedName, uid: str, error: UnreadableError) -> None:
        """Logs once that an object cannot be read, however often it is listed or changed."""
        if self._reported.get(name) == uid or len(self._reported) > MOST_REPORTED:
            return
        self._reported[name] = uid
        label, words = self.collection.label, printable(error.message)
        if len(self._reported) > MOST_REPORTED:
            logger.error(
                "%s: more than %d objects cannot be read; the rest is not logged", label, MOST_REPORTED
            )
            return
        logger.error("%s: the operator cannot read %s (%s). Correct or delete it.", label, name, words)

    def _report(self, error: ApiError) -> None:
        is_news = self._problem is None or self._problem.message != error.message
        began, self._problem = self._problem is None, error
        if began:
            self._failing()
        if not is_news:
            logger.debug("%s: %s", self.collection.label, error.message)
        elif error.status == GONE:
            logger.info("%s: too old to go on watching, listing again", self.collection.label)
        elif error.status == FORBIDDEN:
            logger.error("%s: %s; the operator's role lacks this right", self.collection.label, error.message)
        else:
            logger.warning("%s: %s; trying again", self.collection.label, error.message)

    async def _relist(self) -> None:
        self._version, self._relist_wanted = "", False
        listed: dict[NamespacedName, _Entry[T]] = {}
        seen, version = {_NAMELESS}, ""
        async for page in self._server.pages(self.collection.path, self.collection.query):
            # An item of a list lacks what the list says of all: kind and apiVersion.
            said = {"apiVersion": page["apiVersion"], "kind": str(page["kind"]).removesuffix("List")}
            for bare in page.get("items") or ():
                try:
                    item = _StoredObject.of({**said, **as_object(bare, "item")})
                except UnreadableError as error:
                    self._report_unreadable(_NAMELESS, "", error)
                    continue
                seen.add(item.name)
                value = self._read(item)
                if value is not None:
                    listed[item.name] = _Entry(item.uid, item.version, value)
            metadata = as_object(page["metadata"], "metadata")
            version = as_name(metadata.get("resourceVersion"), "resourceVersion")
        self._replace(listed, version_number(version))
        self._reported = {name: uid for name, uid in self._reported.items() if name in seen}
        self._version, self._broke_off = version, False
        self._note_answer()
        self.synced.set()

    def _replace(self, listed: dict[NamespacedName, _Entry[T]], version: int) -> None:
        """Makes the list all there is, but for what we wrote after it was taken."""
        now = time.monotonic()
        for name in sorted(self._entries.keys() - listed.keys()):
            entry = self._entries[name]
            since = entry.unconfirmed_since
            if since is None or entry.version <= version or now - since > UNCONFIRMED_S:
                self._drop(name)
        for name, entry in listed.items():
            kept = self._entries.get(name)
            ours = kept is not None and kept.unconfirmed_since is not None and kept.version > version
            if not ours:
                self._put(name, entry, always=True)

    async def _follow(self) -> None:
        query: dict[str, str | int] = {
            **self.collection.query,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": self.collection.watch_s + secrets.randbelow(self.collection.watch_s),
        }
        self._following_since = time.monotonic()
        try:
            async with asyncio.timeout(None) as self._following:
                async for event in self._server.watch(self.collection.path, query):
                    self._note_answer()
                    self._take(event["type"], event["object"])
                self._note_answer()  # the server itself ended the watch
        except TimeoutError:
            pass  # relist() ended it
        finally:
            self._following = None

    def _note_answer(self) -> None:
        self._last_answer_at, self._problem = time.monotonic(), None

    def _silent_s(self) -> float:
        return time.monotonic() - self._last_answer_at

    def _take(self, kind: object, body: object) -> None:
        """Takes in an event of the watch; raises UnreadableError for what is no event."""
        if kind == _BOOKMARK:
            metadata = as_object(as_object(body, "object").get("metadata"), "metadata")
            self._version = as_name(metadata.get("resourceVersion"), "resourceVersion")
            return
        if kind not in (_ADDED, _MODIFIED, _DELETED):
            raise UnreadableError(f"watch: got an event of type {str(kind)[:40]!r}, expected a change")
        stored = _StoredObject.of(body)
        kept = self._entries.get(stored.name)
        if kind == _DELETED:
            self._reported.pop(stored.name, None)
        if kept is None or not _is_newer(kept.version, stored.version):
            value = self._read(stored) if kind != _DELETED else None
            if value is None:
                self._drop(stored.name)
            else:
                self._put(stored.name, _Entry(stored.uid, stored.version, value))
        self._version = stored.body["metadata"]["resourceVersion"]

    def _put(self, name: NamespacedName, entry: _Entry[T], *, always: bool = False) -> None:
        kept = self._entries.get(name)
        if kept is not None and _is_newer(kept.version, entry.version) and not always:
            return
        same = kept is not None and kept.version == entry.version and kept.value == entry.value
        if kept is not None and same and not self._broke_off:
            self._entries[name] = replace(
                kept, unconfirmed_since=entry.unconfirmed_since and kept.unconfirmed_since
            )
            return
        self._entries[name] = entry
        before = kept.value if kept else None
        self._file(name, before, entry.value)
        # After a break nobody knows which changes were reported: all are, once more.
        if before != entry.value or self._broke_off:
            self._changed(before, entry.value)

    def _drop(self, name: NamespacedName) -> None:
        kept = self._entries.pop(name, None)
        if kept is not None:
            self._file(name, kept.value, None)
            self._changed(kept.value, None)

    def _file(self, name: NamespacedName, before: T | None, after: T | None) -> None:
        if self._index is None:
            return
        if before is not None:
            self._indexed[self._index(before)].pop(name, None)
            if not self._indexed[self._index(before)]:
                del self._indexed[self._index(before)]
        if after is not None:
            self._indexed[self._index(after)][name] = after
