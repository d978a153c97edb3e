"""Caches HeteroInferences. Reads a resource again if its cached copy is known to be old.

A reconcile uses the cached copy, so a reconcile without work sends no request. Three rules keep a reconcile
from acting on an old copy:
- If kopf's watch or the resync's list announces a newer version, the next reconcile reads the resource.
- If a write meets another version than the decision used, the next reconcile reads the resource.
- A status is written only onto the version that the decision used, before any object that depends on it.
"""

import functools
from collections.abc import Callable, Sequence

from heteroinfer_operator.cluster import Manifest, ResourceKey, ResourceView
from heteroinfer_operator.kube import trim
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, NamespacedName
from heteroinfer_operator.kube.server import NOT_FOUND, ApiError, ApiServer
from heteroinfer_operator.kube.trim import ResourceRecord
from heteroinfer_operator.kube.watch_cache import Collection, WatchCache
from heteroinfer_operator.stored_fields import as_object


class ResourceCache:
    """Caches the HeteroInferences of all served namespaces.

    Args:
        scopes: namespaces; None for all.
        touched: called with each resource that was added, changed or deleted.
        operator_class: value of spec.operatorClass that this operator serves; "" for resources without a
            class. The records of all other resources show only that these resources exist.
    """

    def __init__(
        self,
        server: ApiServer,
        scopes: Sequence[str | None],
        touched: Callable[[ResourceKey], None],
        *,
        operator_class: str = "",
    ) -> None:
        def wake_resource(before: ResourceRecord | None, after: ResourceRecord | None) -> None:
            """Wakes the resource that was added, changed or deleted."""
            keys = {record.key for record in (before, after) if record is not None}
            for key in keys:  # one key, because both records are of one object
                touched(key)

        self._server = server
        self._by_scope = {
            scope: WatchCache(
                server,
                Collection(
                    label=f"{HETERO_INFERENCE.plural} of {scope or 'all namespaces'}",
                    path=HETERO_INFERENCE.path(scope),
                    namespace=scope,
                ),
                trim=functools.partial(trim.resource_record, operator_class=operator_class),
                changed=wake_resource,
                index=lambda record: record.key.namespace,
            )
            for scope in scopes
        }
        self._announced: dict[ResourceKey, int] = {}
        """Newest version of each resource that kopf or the resync announced, until `read` has it."""
        self._outdated: dict[ResourceKey, int] = {}
        """Cached version of each resource that a write found outdated, until `read` has a newer version."""

    @property
    def caches(self) -> list[WatchCache[ResourceRecord]]:
        """Caches of all scopes."""
        return list(self._by_scope.values())

    def cache_of_scope(self, scope: str | None) -> WatchCache[ResourceRecord]:
        """Returns the cache of a namespace, or with None the cache of all namespaces."""
        return self._by_scope[scope]

    def versions(self) -> dict[str | None, int]:
        """Returns, by scope, the newest resourceVersion up to which the cache has all changes."""
        return {scope: cache.version for scope, cache in self._by_scope.items()}

    def keys(self) -> set[ResourceKey]:
        """Returns the cached resources that this operator serves."""
        return {record.key for cache in self.caches for record in cache.values() if record.is_ours}

    def in_namespace(self, namespace: str) -> list[ResourceRecord]:
        """Returns the cached resources of a namespace, including those of other operators."""
        cache = self._by_scope.get(None) or self._by_scope.get(namespace)
        return cache.values_under(namespace) if cache is not None else []

    def uid(self, key: ResourceKey) -> str:
        """Returns the uid of a cached resource of any operator, or "" if it is not cached."""
        cache = self._find_cache(key)
        return cache.uid_of(_namespaced_name(key)) if cache is not None else ""

    def record_if_missing(self, key: ResourceKey, version: int) -> bool:
        """Records that a version of a resource exists, so that the next `read` asks the API server.

        Returns False and records nothing if the cache has seen this version.
        """
        cache = self._find_cache(key)
        if cache is None or cache.has_seen(_namespaced_name(key), version):
            return False
        self._announced[key] = max(version, self._announced.get(key, 0))
        return True

    def mark_outdated(self, key: ResourceKey) -> None:
        """Records that the cached version of a resource is outdated, so that `read` asks the API server."""
        cache = self._find_cache(key)
        if cache is not None and (version := cache.version_of(_namespaced_name(key))):
            self._outdated[key] = version

    async def read(self, key: ResourceKey) -> ResourceView | None:
        """Returns a resource, or None if it does not exist or another operator serves it.

        Reads the resource from the API server if the cached copy is known to be old.

        Raises:
            ApiError: the cached copy is old, and the API server did not answer.
        """
        cache, name = self._find_cache(key), _namespaced_name(key)
        if cache is None:
            return None
        announced_version, outdated_version = self._announced.get(key, 0), self._outdated.get(key, 0)
        is_outdated = 0 < cache.version_of(name) <= outdated_version
        if is_outdated or not cache.has_seen(name, announced_version):
            await self._read_anew(cache, key)
        # Keep a version that was recorded during the read: the read may have returned an older version.
        if self._announced.get(key, 0) == announced_version:
            self._announced.pop(key, None)
        if self._outdated.get(key, 0) == outdated_version:
            self._outdated.pop(key, None)
        return self.cached(key)

    def cached(self, key: ResourceKey) -> ResourceView | None:
        """Returns a resource from the cache; None if it is not cached or another operator serves it."""
        cache = self._find_cache(key)
        record = cache.get(_namespaced_name(key)) if cache is not None else None
        return record.view if record is not None and record.is_ours else None

    async def list_namespace(self, namespace: str) -> None:
        """Reads all resources of a namespace from the API server into the cache.

        Afterwards the cache has all earlier writes, even if its watch is silent: the request names no
        resourceVersion, so the API server answers with the newest state. Deleted resources stay in the cache
        until the watch reports the deletion.

        Raises:
            ApiError: the API server refused or did not answer.
            UnreadableError: a resource has no metadata.
        """
        cache = self._by_scope.get(None) or self._by_scope.get(namespace)
        if cache is None:
            return
        async for page in self._server.list_pages(HETERO_INFERENCE.path(namespace), {}):
            for item in page.get("items") or ():
                cache.store_written(as_object(item, "item"))

    def store_written(self, stored: Manifest) -> None:
        """Updates the cache from the API server's answer to a write."""
        name = NamespacedName.from_object(stored)
        cache = self._find_cache(ResourceKey(namespace=name.namespace, name=name.name))
        if cache is not None:
            cache.store_written(stored)

    async def _read_anew(self, cache: WatchCache[ResourceRecord], key: ResourceKey) -> None:
        """Reads a resource from the API server into the cache."""
        name, uid = _namespaced_name(key), cache.uid_of(_namespaced_name(key))
        try:
            stored = await self._server.get(HETERO_INFERENCE.path(key.namespace, key.name))
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            cache.remove_gone(name, uid)
        else:
            cache.store_written(stored)

    def _find_cache(self, key: ResourceKey) -> WatchCache[ResourceRecord] | None:
        """Returns the cache for a resource, or None if its namespace is not served."""
        return self._by_scope.get(None) or self._by_scope.get(key.namespace)


def _namespaced_name(key: ResourceKey) -> NamespacedName:
    return NamespacedName(namespace=key.namespace, name=key.name)
