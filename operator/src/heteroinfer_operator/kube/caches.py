"""All that the operator keeps a copy of, in cluster scope or in a few namespaces."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
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
            return WatchCache(
                server, _ours(POD, scope), trim=trim.pod_record, changed=touch, index=lambda pod: pod.key
            )

        def build_children(kind: Kind, scope: str | None) -> WatchCache[ChildRecord]:
            return WatchCache(
                server,
                _ours(kind, scope),
                trim=trim.child_record,
                changed=touch,
                index=lambda child: child.key,
            )

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
                changed=self._requests_changed,
                index=lambda pod: pod.node,
            )
        # By node: what all its pods request, and whose they are; made anew when one of them has changed.
        self._requested: dict[str, tuple[Mapping[str, float], frozenset[ResourceKey | None]]] = {}

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
        return [pod for pod in cache.under(key) if pod.owner_uid == uid]

    def children(self, key: ResourceKey, uid: str) -> list[ChildRecord]:
        """Returns the other children of a resource, in order of kind and name."""
        found: list[ChildRecord] = []
        for kind in CHILDREN:
            cache: WatchCache[ChildRecord] = self.of(kind, key.namespace)
            found += [child for child in cache.under(key) if child.owner_uid == uid]
        return found

    def child(self, kind: Kind, name: ObjectName) -> ChildRecord | None:
        """Returns a child other than a pod, or None."""
        cache: WatchCache[ChildRecord] = self.of(kind, name.namespace)
        return cache.get(name)

    def nodes(self, key: ResourceKey) -> tuple[NodeView, ...] | None:
        """Returns nodes with what all but this resource request; None outside cluster scope."""
        if self._nodes is None or self._requests is None:
            return None
        return tuple(
            replace(node, requested=self._requested_of(node.name, except_of=key))
            for node in self._nodes.values()
        )

    def _requested_of(self, node: str, *, except_of: ResourceKey) -> Mapping[str, float]:
        """Returns what others than a resource request of a node; looks at its pods only where it must."""
        assert self._requests is not None
        known = self._requested.get(node)
        if known is None:
            pods = self._requests.under(node)
            keys = frozenset(pod.key for pod in pods)
            known = self._requested[node] = (trim.total_requests(pods, except_of=None), keys)
        total, keys = known
        if except_of in keys:
            return trim.total_requests(self._requests.under(node), except_of=except_of)
        return total

    def _requests_changed(self, before: PodRequests | None, after: PodRequests | None) -> None:
        for pod in (before, after):
            if pod is not None:
                self._requested.pop(pod.node, None)


def _ours(kind: Kind, scope: str | None) -> Collection:
    return Collection(
        label=f"{kind.plural} of {scope or 'all namespaces'}", path=kind.path(scope), query=OURS
    )
