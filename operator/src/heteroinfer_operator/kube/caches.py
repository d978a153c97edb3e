"""All that the operator keeps a copy of, in cluster scope or in a few namespaces."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.cluster import NodeView, ResourceKey
from heteroinfer_operator.kube import trim
from heteroinfer_operator.kube.cache import Collection, WatchCache
from heteroinfer_operator.kube.paths import CHILDREN, NODE, POD, Kind, ObjectName
from heteroinfer_operator.kube.server import ApiServer
from heteroinfer_operator.kube.trim import ChildRecord, PodRecord, PodRequests

OURS: Final = {"labelSelector": names.LABEL_RESOURCE}
PLACED: Final = {"fieldSelector": "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"}


class Caches:
    """Pods and other children of resources; nodes and what is requested of them in cluster scope.

    Args:
        server: where to read.
        namespaces: to keep; empty for all, which also brings the nodes.
        touched: called with each resource of which a child changed.
        nodes_changed: called when a node came, went, or changed in what a plan reads.
    """

    def __init__(
        self,
        server: ApiServer,
        *,
        namespaces: Sequence[str],
        touched: Callable[[ResourceKey], None],
        nodes_changed: Callable[[], None],
    ) -> None:
        self.cluster_scope = not namespaces
        scopes: list[str | None] = [*namespaces] or [None]

        def touch(before: PodRecord | ChildRecord | None, after: PodRecord | ChildRecord | None) -> None:
            for record in (before, after):
                if record is not None:
                    touched(record.key)

        def build_pods(scope: str | None) -> WatchCache[PodRecord]:
            return WatchCache(server, _ours(POD, scope), trim=trim.pod_record, changed=touch)

        def build_children(kind: Kind, scope: str | None) -> WatchCache[ChildRecord]:
            return WatchCache(server, _ours(kind, scope), trim=trim.child_record, changed=touch)

        self._pods = {scope: build_pods(scope) for scope in scopes}
        self._children = {
            (kind.name, scope): build_children(kind, scope) for kind in CHILDREN for scope in scopes
        }
        self._nodes: WatchCache[NodeView] | None = None
        self._requests: WatchCache[PodRequests] | None = None
        if self.cluster_scope:
            self._nodes = WatchCache(
                server,
                Collection(label="nodes", path=NODE.path()),
                trim=trim.node_view,
                changed=lambda before, after: nodes_changed(),
            )
            self._requests = WatchCache(
                server,
                Collection(label="requests of all pods", path=POD.path(), query=PLACED),
                trim=trim.pod_requests,
                changed=lambda before, after: None,
            )

    def all(self) -> list[WatchCache[Any]]:
        """Returns every cache."""
        capacity = [cache for cache in (self._nodes, self._requests) if cache is not None]
        return [*self._pods.values(), *self._children.values(), *capacity]

    def of(self, kind: Kind, namespace: str) -> WatchCache[Any]:
        """Returns the cache that holds the children of a kind in a namespace.

        Raises:
            KeyError: the namespace is not served.
        """
        scope = None if self.cluster_scope else namespace
        return self._pods[scope] if kind is POD else self._children[kind.name, scope]

    def unsynced(self) -> list[str]:
        """Returns the labels of the caches that have not been listed once."""
        return [cache.collection.label for cache in self.all() if not cache.synced.is_set()]

    async def wait_synced(self) -> None:
        """Returns once everything has been listed; the caller sets the deadline."""
        for cache in self.all():
            await cache.synced.wait()

    async def run(self) -> None:
        """Keeps all caches until cancelled."""
        async with asyncio.TaskGroup() as group:
            for cache in self.all():
                group.create_task(cache.run(), name=cache.collection.label)

    def pods(self, key: ResourceKey, uid: str) -> list[PodRecord]:
        """Returns the pods of a resource, in order of their names."""
        cache: WatchCache[PodRecord] = self.of(POD, key.namespace)
        return [pod for pod in cache.values() if pod.key == key and pod.owner_uid == uid]

    def children(self, key: ResourceKey, uid: str) -> list[ChildRecord]:
        """Returns the other children of a resource, in order of kind and name."""
        found: list[ChildRecord] = []
        for kind in CHILDREN:
            cache: WatchCache[ChildRecord] = self.of(kind, key.namespace)
            found += [child for child in cache.values() if child.key == key and child.owner_uid == uid]
        return found

    def child(self, kind: Kind, name: ObjectName) -> ChildRecord | None:
        """Returns a child other than a pod, or None."""
        cache: WatchCache[ChildRecord] = self.of(kind, name.namespace)
        return cache.get(name)

    def nodes(self, key: ResourceKey) -> tuple[NodeView, ...] | None:
        """Returns nodes with what all but this resource request; None outside cluster scope."""
        if self._nodes is None or self._requests is None:
            return None
        requested = trim.requested_by_node(self._requests.values(), except_of=key)
        return tuple(
            NodeView(
                name=node.name,
                allocatable=node.allocatable,
                requested=requested.get(node.name, {}),
                schedulable=node.schedulable,
            )
            for node in self._nodes.values()
        )


def _ours(kind: Kind, scope: str | None) -> Collection:
    return Collection(
        label=f"{kind.plural} of {scope or 'all namespaces'}", path=kind.path(scope), query=OURS
    )
