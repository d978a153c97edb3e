"""All that the operator keeps a copy of, in cluster scope or in a few namespaces."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.cluster import Manifest, NodeView, ResourceKey
from heteroinfer_operator.demand import PodDemand, total
from heteroinfer_operator.kube import trim
from heteroinfer_operator.kube.cache import Collection, WatchCache
from heteroinfer_operator.kube.paths import CHILDREN, NODE, POD, Kind, ObjectName
from heteroinfer_operator.kube.server import ApiServer
from heteroinfer_operator.kube.trim import ChildRecord, PodRecord, PodRequests

OURS: Final = {"labelSelector": names.LABEL_RESOURCE}
NOT_OVER: Final = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}


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
                changed=self._node_changed,
            )
            self._requests = WatchCache(
                server,
                Collection(label="requests of all pods", path=POD.path(), query=NOT_OVER),
                trim=trim.pod_requests,
                changed=self._requests_changed,
                index=lambda pod: pod.node,
            )
        self._nodes_changed = nodes_changed
        # By node: what all its pods request; made anew when one of them has changed.
        self._requested: dict[str, Mapping[str, float]] = {}
        self._views: tuple[NodeView, ...] | None = None
        self._promises: dict[ObjectName, PodDemand] = {}

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

    def note_written(self, kind: Kind, stored: Manifest) -> None:
        """Takes in the API server's answer to a write."""
        self.of(kind, stored["metadata"]["namespace"]).note_written(stored)
        if kind is POD and self._requests is not None:
            self._requests.note_written(stored)

    def note_gone(self, kind: Kind, name: ObjectName, uid: str) -> None:
        """Takes in that the API server says that an object is gone; one of another uid stays."""
        self.of(kind, name.namespace).note_gone(name, uid)
        if kind is POD and self._requests is not None:
            self._requests.note_gone(name, uid)

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

    def nodes(self) -> tuple[NodeView, ...] | None:
        """Returns nodes with what their pods request; None outside cluster scope."""
        if self._nodes is None:
            return None
        if self._views is None:
            nodes = self._nodes.values()
            self._views = tuple(replace(node, requested=self._requested_of(node.name)) for node in nodes)
        return self._views

    def promised(self) -> tuple[PodDemand, ...]:
        """Returns what pods of ours without a node ask for, created or about to be."""
        waiting = self._requests.under("") if self._requests is not None else []
        known = {pod.promised.name: pod.promised for pod in waiting if pod.promised is not None}
        return tuple({**{demand.name: demand for demand in self._promises.values()}, **known}.values())

    @contextlib.contextmanager
    def promising(self, pods: Sequence[Manifest]) -> Iterator[None]:
        """Has `promised` count these pods from now on, before the API server has any of them.

        Two resources that are decided one after the other would else be given the same room.
        """
        promises = {ObjectName.of(pod): trim.promise(pod) for pod in pods}
        self._promises |= promises
        try:
            yield
        finally:
            for name in promises:
                self._promises.pop(name, None)

    def _requested_of(self, node: str) -> Mapping[str, float]:
        assert self._requests is not None
        known = self._requested.get(node)
        if known is None:
            known = total(pod.requests for pod in self._requests.under(node))
            self._requested[node] = known
        return known

    def _requests_changed(self, before: PodRequests | None, after: PodRequests | None) -> None:
        self._views = None
        for pod in (before, after):
            if pod is not None:
                self._requested.pop(pod.node, None)

    def _node_changed(self, before: NodeView | None, after: NodeView | None) -> None:
        self._views = None
        self._nodes_changed()


def _ours(kind: Kind, scope: str | None) -> Collection:
    return Collection(
        label=f"{kind.plural} of {scope or 'all namespaces'}", path=kind.path(scope), query=OURS
    )
