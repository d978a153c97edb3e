"""Caches one collection of the API server by list and watch.

kopf's index is unsuitable: after status 410 (version too old) it lists again, but keeps objects that are gone
(`kopf/_cogs/clients/watching.py@1.45.2`, lines 205-211). In this cache, a new list replaces everything.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar

from heteroinfer_contract.printable import printable
from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.kube.paths import NamespacedName
from heteroinfer_operator.kube.server import FORBIDDEN, GONE, NOT_FOUND, ApiError, ApiServer
from heteroinfer_operator.stored_fields import UnreadableError, as_name, as_object, as_text, version_number

T = TypeVar("T")

logger = logging.getLogger(__name__)

WATCH_S: Final = 290
"""The server ends a watch after this time or up to twice as long. The next watch continues after it."""
STALE_SILENCES: Final = 3
"""A cache is stale after this many watch silences without an answer. By then lists have failed, too."""
BACKOFF_FIRST_S: Final = 0.2
MAX_BACKOFF_S: Final = 5.0
UNCONFIRMED_S: Final = 60.0
"""How long an object that this process wrote stays in the cache although new lists do not show it."""
MAX_REPORTED_NAMES: Final = 1000
"""At most this many unreadable objects of one collection are remembered, to log each only once."""
_NAMELESS: Final = NamespacedName(namespace="", name="an object without a name, uid or resourceVersion")
_ADDED: Final = "ADDED"
_MODIFIED: Final = "MODIFIED"
_DELETED: Final = "DELETED"
_BOOKMARK: Final = "BOOKMARK"


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    """A cached object: its value, uid and resourceVersion.

    Attributes:
        unconfirmed_since: time at which this process wrote the object, until a list or watch shows it.
    """

    uid: str
    version: int
    value: T
    unconfirmed_since: float | None = None


@dataclass(frozen=True, slots=True)
class _StoredObject:
    """The metadata that a cache reads from any object.

    Attributes:
        version: resourceVersion as a number, or 0 if it is not a number.
    """

    name: NamespacedName
    uid: str
    version: int
    body: Manifest

    @classmethod
    def from_body(cls, body: object) -> "_StoredObject":
        """Returns the metadata of an object.

        Raises:
            UnreadableError: a field is missing or has the wrong type.
        """
        whole = as_object(body, "object")
        metadata = as_object(whole.get("metadata"), "metadata")
        name = NamespacedName(
            namespace=as_text(metadata.get("namespace"), "namespace"),
            name=as_name(metadata.get("name"), "name"),
        )
        version = as_name(metadata.get("resourceVersion"), "resourceVersion")
        return cls(name, as_name(metadata.get("uid"), "uid"), version_number(version), whole)


def _is_newer(version: int, other: int) -> bool:
    """Reports whether a version is certainly later than another version. Version 0 means unknown."""
    return version > other > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Collection:
    """The collection that a cache copies.

    Attributes:
        label: name of the collection in messages.
        namespace: None for all namespaces and for cluster-scoped kinds.
        watch_s: the cache asks the server to end a watch after this time or up to twice as long. The time is
            random, so that watches do not all end together.
    """

    label: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict)
    namespace: str | None = None
    watch_s: int = WATCH_S


class WatchCache(Generic[T]):
    """Caches the objects of one collection, each trimmed to a value on arrival.

    The cache keeps the state of an object with the higher resourceVersion. These are ordered numbers
    (KEP-5504). So a watch that lags behind cannot undo `store_written`.

    If `trim` cannot read an object, the cache logs that once, and leaves the object out or keeps the value of
    `trim_metadata_only`. No answer of an API server ends a cache: after any error it lists or watches again.

    Attributes:
        synced: set after the first full list.

    Args:
        trim: converts an object to its value; returns None for an object that does not belong in this cache.
        changed: called with the value before and after each change of a value.
        index: key by which `values_under` finds values; None without an index.
        trim_metadata_only: converts an object for which `trim` raised UnreadableError; returns None to leave
            the object out.
        failing: called when a list or watch fails after a success.
        deleted: called with the last value of an object that the watch reports as deleted. The watch also
            reports an object as deleted that lost the label of the collection.
    """

    def __init__(  # noqa: PLR0913 - callbacks
        self,
        server: ApiServer,
        collection: Collection,
        *,
        trim: Callable[[Manifest], T | None],
        changed: Callable[[T | None, T | None], None],
        index: Callable[[T], Hashable] | None = None,
        trim_metadata_only: Callable[[Manifest], T | None] = lambda stored: None,
        failing: Callable[[], None] = lambda: None,
        deleted: Callable[[T], None] = lambda value: None,
    ) -> None:
        self.collection = collection
        self.synced = asyncio.Event()
        self._server = server
        self._trim = trim
        self._changed = changed
        self._index = index
        self._trim_metadata_only = trim_metadata_only
        self._failing = failing
        self._deleted = deleted
        self._reported: dict[NamespacedName, str] = {}
        """The uid of each unreadable object that was logged, by name."""
        self._had_defect = False
        """True from an unexpected exception in this cache until its next full list."""
        self._entries: dict[NamespacedName, _Entry[T]] = {}
        self._indexed: defaultdict[Hashable, dict[NamespacedName, T]] = defaultdict(dict)
        self._version = ""
        """The resourceVersion from which the next watch continues; "" to list first."""
        self._must_relist = False
        self._watch_timeout: asyncio.Timeout | None = None
        """Set while a watch is running; `relist` ends the watch by it."""
        self._problem: ApiError | None = None
        """Error of the last list or watch; None after an answer."""
        self._watching_since = 0.0
        self._last_answer_at = time.monotonic()

    @property
    def is_failing(self) -> bool:
        """Whether the last list or watch failed, and none has succeeded since."""
        if self._problem is None:
            return False
        if self._watch_timeout is None:  # no watch is running
            return True
        # A working watch may send nothing for up to a minute, so a watch that lasts counts as success.
        return time.monotonic() - self._watching_since < 2 * MAX_BACKOFF_S

    @property
    def refusal(self) -> str:
        """The API server's error if it does not let the operator read this collection, or ""."""
        problem = self._problem if self.is_failing else None
        return problem.message if problem is not None and problem.status in (FORBIDDEN, NOT_FOUND) else ""

    @property
    def version(self) -> int:
        """The resourceVersion up to which this cache is complete; 0 before the first list."""
        return version_number(self._version)

    @property
    def is_stale(self) -> bool:
        """Whether the cache may be outdated, because no watch or list was answered for a long time."""
        return self._seconds_without_answer() > STALE_SILENCES * self._server.watch_silence_s

    def get(self, name: NamespacedName) -> T | None:
        """Returns the value of an object, or None if it is not cached."""
        entry = self._entries.get(name)
        return entry.value if entry else None

    def version_of(self, name: NamespacedName) -> int:
        """Returns the cached resourceVersion of an object, or 0 if it is not cached."""
        entry = self._entries.get(name)
        return entry.version if entry else 0

    def has_seen(self, name: NamespacedName, version: int) -> bool:
        """Reports whether the cache includes all changes of an object, and its deletion, up to a version."""
        return max(version_number(self._version), self.version_of(name)) >= version

    def uid_of(self, name: NamespacedName) -> str:
        """Returns the uid of a cached object, or ""."""
        entry = self._entries.get(name)
        return entry.uid if entry else ""

    def values(self) -> list[T]:
        """Returns all values, sorted by object name."""
        return [self._entries[name].value for name in sorted(self._entries)]

    def values_under(self, indexed: Hashable) -> list[T]:
        """Returns the values with this index key, sorted by object name, without a search."""
        entries = self._indexed.get(indexed, {})
        return [entries[name] for name in sorted(entries)]

    def store_written(self, stored: Manifest) -> None:
        """Stores the API server's answer to a write, unless the watch has already passed that version.

        Raises:
            UnreadableError: the answer has no metadata.
        """
        written = _StoredObject.from_body(stored)
        value = self._read_value(written)
        if value is not None and written.version > version_number(self._version):
            entry = _Entry(written.uid, written.version, value, time.monotonic())
            self._store(written.name, entry)

    def remove_gone(self, name: NamespacedName, uid: str) -> None:
        """Removes an object that is gone according to the API server, unless it has another uid."""
        cached = self._entries.get(name)
        if cached is not None and cached.uid == uid:
            self._remove(name)

    async def run(self) -> None:
        """Lists and watches until cancelled; logs errors and tries again."""
        backoff_s = BACKOFF_FIRST_S
        while True:
            started = time.monotonic()
            try:
                # The last attempt failed, perhaps because etcd was restored from a backup. This cache's
                # version may be newer than the backup. Then a watch from this version would send nothing.
                if self._problem is not None and self._version:
                    await self._relist_if_restored()
                # `request_relist()` clears the version, but an event or a list that was being processed at
                # that time may have set it again. So `_must_relist` counts, too.
                while self._must_relist or not self._version:
                    await self._relist()
                await self._watch()
            except ApiError as error:
                # After a silent watch, a new watch from the same version could be silent, too. So list again.
                was_silent = self._seconds_without_answer() > self._server.watch_silence_s / 2
                if error.status == GONE or was_silent:
                    self._version = ""  # so that the next loop lists again
                self._report_error(error)
            except UnreadableError as error:
                self._version = ""
                logger.warning("%s: %s. Listing again", self.collection.label, printable(error.message))
            except Exception:  # a defect must not end the cache, because the end of a cache ends the process
                self._version, self._had_defect = "", True
                logger.exception(
                    "%s: cannot update this cache, because of a defect of the operator. Report it, with this "
                    "log. Listing again",
                    self.collection.label,
                )
            if time.monotonic() - started > MAX_BACKOFF_S:  # the watch worked for a while
                backoff_s = BACKOFF_FIRST_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(backoff_s * 2, MAX_BACKOFF_S)

    def request_relist(self) -> None:
        """Ends the watch and lists again, because etcd may have been restored from a backup."""
        self._version, self._must_relist = "", True
        # The restored store may lack this process's writes. So the new list must replace them.
        for name, entry in self._entries.items():
            self._entries[name] = replace(entry, unconfirmed_since=None)
        if self._watch_timeout is not None:
            self._watch_timeout.reschedule(asyncio.get_running_loop().time())

    async def _relist_if_restored(self) -> None:
        """Lists again if the API server's store is older than this cache, because etcd was restored.

        A watch from the cache's later version would send nothing until the store reaches that version.
        """
        listed = await self._server.get(self.collection.path, {**self.collection.query, "limit": 1})
        metadata = as_object(listed["metadata"], "metadata")
        stored_version = version_number(as_name(metadata.get("resourceVersion"), "resourceVersion"))
        if 0 < stored_version < self.version:
            logger.warning(
                "%s: the API server returned an older state than before, for example after a restore of "
                "etcd. Listing again",
                self.collection.label,
            )
            self.request_relist()

    def _read_value(self, stored: _StoredObject) -> T | None:
        """Returns the value of an object; None if the object does not belong in this cache or is unreadable.

        Logs an unreadable object.
        """
        try:
            return self._trim(stored.body)
        except UnreadableError as error:
            self._report_unreadable(stored.name, stored.uid, error)
            return self._read_metadata(stored)

    def _read_metadata(self, stored: _StoredObject) -> T | None:
        """Returns the value of an object from its metadata; None if the metadata is unreadable, too."""
        try:
            return self._trim_metadata_only(stored.body)
        except UnreadableError:  # `_read_value` has logged the object already
            return None

    def _report_unreadable(self, name: NamespacedName, uid: str, error: UnreadableError) -> None:
        """Logs an unreadable object once. After MAX_REPORTED_NAMES objects, logs no others."""
        if self._reported.get(name) == uid or len(self._reported) > MAX_REPORTED_NAMES:
            return
        self._reported[name] = uid
        label, reason = self.collection.label, printable(error.message)
        is_first_over_limit = len(self._reported) > MAX_REPORTED_NAMES
        if is_first_over_limit:
            logger.error(
                "%s: more than %d objects are unreadable. The operator does not log the others. Correct or "
                "delete the logged objects",
                label,
                MAX_REPORTED_NAMES,
            )
            return
        logger.error(
            "%s: the operator cannot read %s (%s). Correct or delete this object", label, name, reason
        )

    def _report_error(self, error: ApiError) -> None:
        """Logs a new error of a list or watch. Calls `failing` for the first error after a success."""
        is_first = self._problem is None
        is_new = self._problem is None or self._problem.message != error.message
        self._problem = error
        if is_first:
            self._failing()
        if not is_new:
            logger.debug("%s: %s", self.collection.label, error.message)
        elif error.status == GONE:
            logger.info(
                "%s: the API server no longer has the changes since the cached version. Listing again",
                self.collection.label,
            )
        elif error.status == FORBIDDEN:
            logger.error(
                "%s: %s. Grant the operator the right to list and watch these objects",
                self.collection.label,
                error.message,
            )
        else:
            logger.warning("%s: %s. Trying again", self.collection.label, error.message)

    async def _relist(self) -> None:
        """Lists the collection and replaces the cached objects."""
        self._version, self._must_relist = "", False
        listed: dict[NamespacedName, _Entry[T]] = {}
        # `_reported` keeps only the names of listed objects, so that it does not grow without end.
        listed_names, version = {_NAMELESS}, ""
        async for page in self._server.list_pages(self.collection.path, self.collection.query):
            for item in self._read_items(page):
                listed_names.add(item.name)
                value = self._read_value(item)
                if value is not None:
                    listed[item.name] = _Entry(item.uid, item.version, value)
            metadata = as_object(page["metadata"], "metadata")
            version = as_name(metadata.get("resourceVersion"), "resourceVersion")
        self._replace(listed, version_number(version))
        self._reported = {name: uid for name, uid in self._reported.items() if name in listed_names}
        self._version, self._had_defect = version, False
        self._record_answer()
        self.synced.set()

    def _read_items(self, page: Mapping[str, Any]) -> Iterator[_StoredObject]:
        """Yields the objects of a page of a list. Logs and leaves out an object without readable metadata."""
        # The items of a list lack kind and apiVersion. Only the list has these fields.
        list_fields = {"apiVersion": page["apiVersion"], "kind": str(page["kind"]).removesuffix("List")}
        for raw_item in page.get("items") or ():
            try:
                item = _StoredObject.from_body({**list_fields, **as_object(raw_item, "item")})
            except UnreadableError as error:
                self._report_unreadable(_NAMELESS, "", error)
            else:
                yield item

    def _replace(self, listed: dict[NamespacedName, _Entry[T]], version: int) -> None:
        """Replaces all entries by a list, except objects that this process wrote after the list.

        Args:
            listed: entries of the list.
            version: resourceVersion of the list.
        """

        def is_later_write(entry: _Entry[T]) -> bool:
            """Reports whether this process wrote the entry, and the list is older than the write."""
            return entry.unconfirmed_since is not None and entry.version > version

        now = time.monotonic()
        for name in sorted(self._entries.keys() - listed.keys()):
            entry = self._entries[name]
            # After UNCONFIRMED_S, a write that no list or watch has shown is no longer believed.
            is_recent = entry.unconfirmed_since is not None and now - entry.unconfirmed_since <= UNCONFIRMED_S
            if not (is_later_write(entry) and is_recent):
                self._remove(name)
        for name, entry in listed.items():
            cached = self._entries.get(name)
            if cached is None or not is_later_write(cached):
                self._store(name, entry, even_if_older=True)

    async def _watch(self) -> None:
        """Watches the collection from the cached version, until the server or `relist` ends the watch."""
        query: dict[str, str | int] = {
            **self.collection.query,
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": self.collection.watch_s + secrets.randbelow(self.collection.watch_s),
        }
        self._watching_since = time.monotonic()
        try:
            async with asyncio.timeout(None) as self._watch_timeout:
                async for event in self._server.watch(self.collection.path, query):
                    self._record_answer()
                    self._apply_event(event["type"], event["object"])
                self._record_answer()  # the server itself ended the watch
        except TimeoutError:
            pass  # relist() ended the watch
        finally:
            self._watch_timeout = None

    def _record_answer(self) -> None:
        """Records that a list or watch was answered now."""
        self._last_answer_at, self._problem = time.monotonic(), None

    def _seconds_without_answer(self) -> float:
        """Returns the seconds since the last answer to a list or watch."""
        return time.monotonic() - self._last_answer_at

    def _apply_event(self, kind: object, body: object) -> None:
        """Applies an event of the watch.

        Raises:
            UnreadableError: the event has an unknown type or cannot be read.
        """
        if kind == _BOOKMARK:
            metadata = as_object(as_object(body, "object").get("metadata"), "metadata")
            self._version = as_name(metadata.get("resourceVersion"), "resourceVersion")
            return
        if kind not in (_ADDED, _MODIFIED, _DELETED):
            raise UnreadableError(
                f"watch: event type must be {_ADDED}, {_MODIFIED} or {_DELETED} (got {str(kind)[:40]!r})"
            )
        stored = _StoredObject.from_body(body)
        cached = self._entries.get(stored.name)
        if kind == _DELETED:
            self._reported.pop(stored.name, None)
        # Ignore an event that is older than the cached object: the answer to a write may have arrived first.
        is_outdated = cached is not None and _is_newer(cached.version, stored.version)
        if not is_outdated:
            value = self._read_value(stored) if kind != _DELETED else None
            if value is None:
                self._remove(stored.name)
            else:
                self._store(stored.name, _Entry(stored.uid, stored.version, value))
            if kind == _DELETED:
                self._report_deleted(stored)
        self._version = stored.body["metadata"]["resourceVersion"]

    def _report_deleted(self, last: _StoredObject) -> None:
        """Calls `deleted` with the last value of an object; does nothing if the object is unreadable."""
        with contextlib.suppress(UnreadableError):
            value = self._trim(last.body)
            if value is not None:
                self._deleted(value)

    def _store(self, name: NamespacedName, entry: _Entry[T], *, even_if_older: bool = False) -> None:
        """Stores an entry, and reports the change of its value.

        Drops an entry that is older than the cached entry, unless `even_if_older`: after a restore of etcd,
        the objects of a list are older than the cached objects.
        """
        cached = self._entries.get(name)
        if cached is not None and _is_newer(cached.version, entry.version) and not even_if_older:
            return
        is_unchanged = cached is not None and cached.version == entry.version and cached.value == entry.value
        if cached is not None and is_unchanged and not self._had_defect:
            # `unconfirmed_since` is None in an entry that a list or a watch has shown. If this holds for one
            # of the two entries, this version is confirmed. The version stays confirmed if the API server's
            # answer to the write arrives after the watch has shown the version.
            is_confirmed = None in (entry.unconfirmed_since, cached.unconfirmed_since)
            if is_confirmed:
                self._entries[name] = replace(cached, unconfirmed_since=None)
            return
        self._entries[name] = entry
        old_value = cached.value if cached else None
        self._update_index(name, old_value, entry.value)
        # After a defect it is unknown which changes were reported. So report all values again.
        if old_value != entry.value or self._had_defect:
            self._changed(old_value, entry.value)

    def _remove(self, name: NamespacedName) -> None:
        """Removes an entry and reports the change."""
        cached = self._entries.pop(name, None)
        if cached is not None:
            self._update_index(name, cached.value, None)
            self._changed(cached.value, None)

    def _update_index(self, name: NamespacedName, before: T | None, after: T | None) -> None:
        """Moves a value from its old index key to its new index key.

        Args:
            before: old value; None for a new object.
            after: new value; None for a removed object.
        """
        if self._index is None:
            return
        if before is not None:
            self._indexed[self._index(before)].pop(name, None)
            if not self._indexed[self._index(before)]:
                del self._indexed[self._index(before)]
        if after is not None:
            self._indexed[self._index(after)][name] = after
