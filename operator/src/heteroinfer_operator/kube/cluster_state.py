"""The operator's caches of the cluster, in cluster scope or for some namespaces."""

import asyncio
import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.cluster import CacheUser, CleanupPod, Manifest, ResourceKey
from heteroinfer_operator.kube import trim
from heteroinfer_operator.kube.gangs import GangSchedulers
from heteroinfer_operator.kube.isolating_policies import IsolatingPolicies
from heteroinfer_operator.kube.kept_calibrations import StoredCalibrations
from heteroinfer_operator.kube.never_placed import NeverPlaced
from heteroinfer_operator.kube.own_clock import AwakeClock, OwnClock
from heteroinfer_operator.kube.paths import (
    CHILDREN,
    CONFIG_MAP,
    NODE,
    POD,
    PRIORITY_CLASS,
    SERVICE,
    Kind,
    NamespacedName,
)
from heteroinfer_operator.kube.resource_cache import ResourceCache
from heteroinfer_operator.kube.server import ApiServer
from heteroinfer_operator.kube.trim import ChildRecord, PodRecord, PodRequests, PodReservation
from heteroinfer_operator.kube.watch_cache import Collection, WatchCache
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.nodes.calibrations import Calibrations
from heteroinfer_operator.nodes.demand import PodDemand, sum_requests
from heteroinfer_operator.nodes.node_assignment import Gang
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.priorities import PriorityClassView, preempting_priority

logger = logging.getLogger(__name__)

NEEDED_CHILDREN: Final = (CONFIG_MAP, SERVICE)
"""Kinds of children that every decision needs: ConfigMaps contain the plans, Services the client ports."""
OTHERS_LISTED_S: Final = 5.0
"""How long the first decisions wait for all other caches, which improve decisions but are not necessary."""
RESERVATION_S: Final = 600.0
"""How long capacity stays reserved for a pod without a node.

Twice the time after which kube-scheduler retries each unschedulable pod even without an event
(`pkg/scheduler/internal/queue`, 5 minutes).
"""
OURS: Final = {"labelSelector": names.LABEL_RESOURCE}
"""Query for the objects that the operator created for resources."""
NOT_OVER: Final = {"fieldSelector": "status.phase!=Succeeded,status.phase!=Failed"}
"""Query for the pods that have not ended."""


class ClusterState:
    """Caches resources, their pods and other children. In cluster scope also nodes and all pods' requests.

    A *child* is an object that the operator created for a resource. A *scope* is a namespace, or None for all
    namespaces.

    Attributes:
        cluster_scope: whether all namespaces are cached.
        never_placed: pods that were deleted before they had a node.

    Args:
        namespaces: namespaces to cache. Empty: all namespaces and the nodes.
        touched: called with each resource that changed or whose child changed. *Wakes* the resource, which
            means that the resource is reconciled soon.
        nodes_changed: called when a node is added, removed or changed in a field that plans read.
        capacity_freed: called when a pod releases its node's resources.
        stored_calibrations: the measured rates of nodes, or None.
        operator_class: see ResourceCache.
        clock: monotonic clock, in seconds.
    """

    def __init__(  # noqa: PLR0913 - scope and callbacks
        self,
        server: ApiServer,
        *,
        namespaces: Sequence[str],
        touched: Callable[[ResourceKey], None],
        nodes_changed: Callable[[], None],
        capacity_freed: Callable[[], None] = lambda: None,
        stored_calibrations: StoredCalibrations | None = None,
        operator_class: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cluster_scope = not namespaces
        self._touched, self._nodes_changed, self._capacity_freed = touched, nodes_changed, capacity_freed
        self._stored_calibrations = stored_calibrations
        self._clock = clock
        self._ready_scopes: set[str | None] = set()
        """Scopes whose caches have their first lists."""
        self._some_ready = asyncio.Event()
        self._awake = AwakeClock(clock)
        self._unreachable_nodes = OwnClock(monotonic_s=self._awake.awake_s)
        """Since when each node has been unreachable, by this process's clock."""
        self._pod_deletions = OwnClock(monotonic_s=self._awake.awake_s)
        """When each deleted pod is gone at the latest, by this process's clock."""
        self._pod_creations = OwnClock(monotonic_s=self._awake.awake_s)
        """When each pod was created, by this process's clock."""
        self.never_placed = NeverPlaced()
        self._totals: dict[str, Mapping[str, float]] = {}
        """Total requests of the pods on each node. A change of a pod removes the total of its node."""
        self._complete_views: dict[str, NodeView] = {}
        """Each node with the requests of its pods. A change of the node or of a pod removes the view."""
        self._reserved_pods: dict[NamespacedName, PodDemand] = {}
        """The demands of pods that the API server has not stored yet."""
        self._reserved_since: dict[str, float] = {}
        """Time at which the reservation of a stored pod began, by the pod's uid."""
        scopes: list[str | None] = [*namespaces] or [None]

        self.resources = ResourceCache(server, scopes, touched, operator_class=operator_class)

        def build_pod_cache(scope: str | None) -> WatchCache[PodRecord]:
            """Builds the cache of the operator's pods in a scope."""
            return WatchCache(
                server,
                _collection_of_ours(POD, scope),
                trim=trim.pod_record,
                changed=self._record_pod_change,
                index=lambda pod: pod.key,
                trim_metadata_only=trim.unreadable_pod_record,
                failing=functools.partial(self._wake_resources_of_pods, scope),
                deleted=self.never_placed.record_deleted,
            )

        def build_child_caches(kind: Kind) -> dict[str | None, WatchCache[ChildRecord]]:
            """Builds the caches of children of one kind, by scope."""
            return {
                scope: WatchCache(
                    server,
                    _collection_of_ours(kind, scope),
                    trim=trim.child_record,
                    changed=self._wake_owners,
                    index=lambda child: child.key,
                )
                for scope in scopes
            }

        self._pods = {scope: build_pod_cache(scope) for scope in scopes}
        self._children = {kind: build_child_caches(kind) for kind in CHILDREN}
        self._isolating = IsolatingPolicies(server, scopes, self._wake_namespace)
        self._gangs = GangSchedulers(server, build_child_caches, changed=self._wake_all)
        self._nodes: WatchCache[NodeView] | None = None
        self._pod_requests: WatchCache[PodRequests] | None = None
        self._classes: WatchCache[PriorityClassView] | None = None
        if self.cluster_scope:
            self._build_node_caches(server)

    def _build_node_caches(self, server: ApiServer) -> None:
        """Builds the caches of nodes, of all pods' requests and of priority classes.

        The cache of priority classes is not in `awaited_caches`, because the operator also works without the
        right to read priority classes.
        """
        self._nodes = WatchCache(
            server,
            Collection(label="nodes", path=NODE.path()),
            trim=trim.node_view,
            changed=self._update_node,
        )
        self._pod_requests = WatchCache(
            server,
            Collection(label="requests of all pods", path=POD.path(), query=NOT_OVER),
            trim=trim.pod_requests,
            changed=self._update_requests,
            index=lambda pod: pod.node,
        )
        self._classes = WatchCache(
            server,
            Collection(label="priority classes", path=PRIORITY_CLASS.path()),
            trim=PriorityClassView.of,
            changed=lambda before, after: self._nodes_changed(),
        )

    def _wake_owners(
        self, before: PodRecord | ChildRecord | None, after: PodRecord | ChildRecord | None
    ) -> None:
        """Wakes the resources that a changed object belonged to and belongs to."""
        for record in (before, after):
            if record is not None:
                self._touched(record.key)

    def _record_pod_change(self, before: PodRecord | None, after: PodRecord | None) -> None:
        """Notes when a new pod was created and when a deleted pod will be gone. Wakes the pod's resource.

        Uses this process's clock, because waits must not depend on the API server's clock. Forgets the times
        of a pod that is gone, or that was replaced under the same name.
        """
        is_old_pod_gone = before is not None and (after is None or after.view.uid != before.view.uid)
        if before is not None and is_old_pod_gone:
            self._pod_deletions.forget(before.view.uid)
            self._pod_creations.forget(before.view.uid)
        if after is not None:
            self.never_placed.forget_existing(after.key, after.view.name)
            self._pod_creations.record(after.view.uid, after.view.created)
            # The pod is gone at the latest when its grace period ends.
            self._pod_deletions.record(after.view.uid, after.view.gone_by, later_s=after.grace_s)
        self._wake_owners(before, after)

    def awaited_caches(self) -> list[WatchCache[Any]]:
        """Returns the caches that `wait_synced` waits for."""
        capacity = [cache for cache in (self._nodes, self._pod_requests) if cache is not None]
        children = [cache for kind in self._child_caches.values() for cache in kind.values()]
        calibrations = [self._stored_calibrations.cache] if self._stored_calibrations is not None else []
        pods, isolating = self._pods.values(), self._isolating.caches
        return [*self.resources.caches, *pods, *isolating, *children, *capacity, *calibrations]

    def restricted_selectors(self, namespace: str) -> tuple[Manifest, ...] | None:
        """Returns the podSelectors of other owners' NetworkPolicies that restrict egress.

        Returns None if these policies are unknown.
        """
        return self._isolating.selectors(namespace)

    @property
    def calibrations(self) -> Calibrations:
        """Measured rates of nodes; empty until the ConfigMap is read."""
        return Calibrations() if self._stored_calibrations is None else self._stored_calibrations.calibrations

    @property
    def gangs(self) -> frozenset[Gang]:
        """Gang schedulers that the cluster served at the last check."""
        return self._gangs.found

    @property
    def unknown_gangs(self) -> tuple[str, ...]:
        """API versions of gang schedulers that the cluster serves but this operator does not support."""
        return self._gangs.unknown

    @property
    def _child_caches(self) -> dict[Kind, dict[str | None, WatchCache[ChildRecord]]]:
        """Caches of children other than pods, by kind and scope."""
        return {**self._children, **self._gangs.kinds}

    def cache_of(self, kind: Kind, namespace: str) -> WatchCache[Any] | None:
        """Returns the cache of the children of a kind in a namespace.

        Returns None if the operator does not serve the namespace, or if the kind has no cache: the cluster
        does not serve the kind, or the operator may not list it (Secrets).
        """
        scope = None if self.cluster_scope else namespace
        return self._pods.get(scope) if kind is POD else self._child_caches.get(kind, {}).get(scope)

    def store_written(self, kind: Kind, stored: Manifest) -> None:
        """Updates the caches from the API server's answer to a write."""
        cache = self.cache_of(kind, stored["metadata"]["namespace"])
        if cache is not None:
            cache.store_written(stored)
        if kind is POD and self._pod_requests is not None:
            # The reservation from before the write ends, because `_update_requests` reserves capacity
            # for the stored pod.
            self._reserved_pods.pop(NamespacedName.from_object(stored), None)
            self._pod_requests.store_written(stored)

    def remove_gone(self, kind: Kind, name: NamespacedName, uid: str) -> None:
        """Removes an object that is gone according to the API server, unless it has another uid."""
        cache = self.cache_of(kind, name.namespace)
        if cache is not None:
            cache.remove_gone(name, uid)
        if kind is POD and self._pod_requests is not None:
            self._pod_requests.remove_gone(name, uid)

    def unsynced(self) -> list[str]:
        """Returns the names of the caches that have no first complete list yet."""
        return [cache.collection.label for cache in self.awaited_caches() if not cache.synced.is_set()]

    async def wait_synced(self) -> None:
        """Waits until all caches have their first lists. The caller sets the deadline."""
        await self._gangs.known.wait()
        for cache in self.awaited_caches():
            await cache.synced.wait()

    async def wait_ready(self) -> None:
        """Waits until at least one namespace is ready (`is_ready`). The caller sets the deadline."""
        await self._some_ready.wait()

    def is_ready(self, namespace: str) -> bool:
        """Reports whether the caches of a namespace suffice for decisions about its resources.

        A namespace is ready once its resources, pods, ConfigMaps and Services are listed; in cluster scope,
        the nodes and the requests of all pods must be listed, too. Then `touched` is called for the
        resources of the namespace.
        """
        scope = None if self.cluster_scope else namespace
        return scope in self._ready_scopes

    def errors_by_namespace(self) -> dict[str, str]:
        """Returns the API server's error for each namespace that the operator may not read."""
        errors: dict[str, str] = {}
        for namespace in self._pods:
            refusals = [cache.refusal for cache in self._needed_caches(namespace) if cache.refusal]
            if namespace is not None and refusals:  # None: the operator serves all namespaces
                errors[namespace] = refusals[0]
        return errors

    def stale_cache_names(self) -> list[str]:
        """Returns the names of caches that may be outdated, such as "pods of all namespaces".

        Leaves out namespaces that the operator may not read, because `errors_by_namespace` reports these. If
        the operator may read no namespace, the result contains all stale caches.
        """
        errors = self.errors_by_namespace()
        may_read_some = len(errors) < len(self._pods)
        skipped = set(errors) if may_read_some else set()
        return [
            cache.collection.label
            for cache in self.awaited_caches()
            if cache.is_stale and cache.collection.namespace not in skipped
        ]

    def relist(self, namespace: str | None = None) -> None:
        """Makes the caches of a namespace, or all caches, list again, because they may be wrong."""
        for cache in self.awaited_caches():
            if namespace in (None, cache.collection.namespace):
                cache.request_relist()

    async def run(self) -> None:
        """Runs all caches until cancelled."""
        async with asyncio.TaskGroup() as group:
            for cache in self.awaited_caches():
                group.create_task(cache.run(), name=cache.collection.label)
            if self._classes is not None:
                group.create_task(self._classes.run(), name=self._classes.collection.label)
            group.create_task(self._gangs.run(), name="gang schedulers")
            group.create_task(self._awake.run(), name="clock")
            for scope in self._pods:
                group.create_task(
                    self._wait_and_make_ready(scope), name=f"first lists of {scope or 'all namespaces'}"
                )

    async def _wait_and_make_ready(self, scope: str | None) -> None:
        """Waits for the first lists of a scope, then makes the scope ready and wakes its resources.

        Waits without a time limit for the caches that decisions need, and then at most OTHERS_LISTED_S for
        all other caches.
        """
        for cache in self._needed_caches(scope):
            await cache.synced.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OTHERS_LISTED_S):
                await self._gangs.known.wait()
                for cache in self.awaited_caches():
                    if cache.collection.namespace in (scope, None):
                        await cache.synced.wait()
        self._ready_scopes.add(scope)
        self._some_ready.set()
        self._wake_namespace(scope)

    def _needed_caches(self, scope: str | None) -> list[WatchCache[Any]]:
        """Returns the caches that decisions in a scope need."""
        children = [self._children[kind][scope] for kind in NEEDED_CHILDREN]
        capacity = [cache for cache in (self._nodes, self._pod_requests) if cache is not None]
        return [self.resources.cache_of_scope(scope), self._pods[scope], *children, *capacity]

    def _wake_all(self) -> None:
        """Wakes all resources."""
        self._wake_namespace(None)

    def _wake_namespace(self, namespace: str | None) -> None:
        """Wakes the resources of a namespace; with None, all resources."""
        for key in sorted(self.resources.keys()):
            if namespace in (None, key.namespace):
                self._touched(key)

    def pods(self, key: ResourceKey, uid: str) -> list[PodRecord]:
        """Returns the pods of the resource with this uid, sorted by name."""
        cache: WatchCache[PodRecord] | None = self.cache_of(POD, key.namespace)
        records = cache.values_under(key) if cache is not None else []
        return [self._with_own_times(pod) for pod in records if pod.owner_uid == uid]

    def pods_of_earlier_resources(self, key: ResourceKey, uid: str) -> list[PodRecord]:
        """Returns the pods of earlier, deleted resources of this name.

        Args:
            uid: uid of the resource that has the name now; "" if no resource has the name.
        """
        cache: WatchCache[PodRecord] | None = self.cache_of(POD, key.namespace)
        records = cache.values_under(key) if cache is not None else []
        return [self._with_own_times(pod) for pod in records if pod.owner_uid != uid]

    def _with_own_times(self, pod: PodRecord) -> PodRecord:
        """Replaces the times of a pod that is ending or has ended by times of this process's clock.

        Decisions compare these times with this machine's clock, which may differ from the API server's clock.
        """
        view = pod.view
        if not view.ended:  # `ended` includes pods that are being deleted
            return pod
        own_gone_by = None if view.gone_by is None else self._pod_deletions.time_of(view.uid)
        created = self._pod_creations.time_of(view.uid) or view.created
        return replace(pod, view=replace(view, gone_by=own_gone_by, created=created))

    def _wake_resources_of_pods(self, scope: str | None) -> None:
        """Wakes all resources with pods in this scope, because the watch of these pods fails.

        The reconciles then request the state of the groups from their leaders.
        """
        for key in sorted({pod.key for pod in self._pods[scope].values()}):
            self._touched(key)

    def is_pod_watch_failing(self, key: ResourceKey) -> bool:
        """Reports whether the cache of a resource's pods is failing."""
        cache = self.cache_of(POD, key.namespace)
        return cache is not None and cache.is_failing

    def children(self, key: ResourceKey, uid: str) -> list[ChildRecord]:
        """Returns the children of the resource with this uid, except pods, sorted by kind and name."""
        records: list[ChildRecord] = []
        for kind in self._child_caches:
            cache: WatchCache[ChildRecord] | None = self.cache_of(kind, key.namespace)
            cached = cache.values_under(key) if cache is not None else []
            records += [child for child in cached if child.owner_uid == uid]
        return records

    def other_cache_users(self, key: ResourceKey, claim: str) -> tuple[CacheUser, ...] | None:
        """Returns the other resources of a namespace that use a claim, with their ConfigMaps.

        A resource uses the claim if its spec, status, plan or revision names the claim, or if its pods mount
        the claim.

        Args:
            key: the resource that the result leaves out.
            claim: name of the PersistentVolumeClaim of a model cache.

        Returns:
            None if some users may be unknown: another operator serves a resource of the namespace, or pods
            of a deleted resource still mount the claim.
        """
        cache: WatchCache[PodRecord] | None = self.cache_of(POD, key.namespace)
        pods = cache.values() if cache is not None else []
        owners_of_mounts = {
            pod.owner_uid for pod in pods if pod.key.namespace == key.namespace and claim in pod.claims
        }
        records = self.resources.in_namespace(key.namespace)
        if not all(record.is_ours for record in records):
            return None
        existing_uids = {self.resources.uid(key), *(self.resources.uid(record.key) for record in records)}
        is_mounted_by_deleted_resource = not owners_of_mounts <= existing_uids
        if is_mounted_by_deleted_resource:
            return None
        others = (record for record in records if record.key != key)
        users = (self._cache_user_of(record, claim, owners_of_mounts) for record in others)
        return tuple(user for user in users if user is not None)

    def _cache_user_of(
        self, record: trim.ResourceRecord, claim: str, owners_of_mounts: AbstractSet[str]
    ) -> CacheUser | None:
        """Returns a resource with its ConfigMaps if it uses a claim, otherwise None.

        Args:
            owners_of_mounts: uids of the resources whose pods mount the claim.
        """
        uid = self.resources.uid(record.key)
        child_texts = [child.text for child in self.children(record.key, uid)]
        # The name of the claim may be anywhere in the text. A false match only keeps old commits for longer.
        is_named = any(claim in text for text in (record.text, *child_texts))
        is_user = uid in owners_of_mounts or is_named or identity.is_model_claim_of(record.key, claim)
        if not is_user:
            return None
        objects = map(json.loads, child_texts)
        config_maps = tuple(stored for stored in objects if stored["kind"] == CONFIG_MAP.name)
        return CacheUser(resource=record.view, objects=config_maps)

    def cleanup_pods(self, namespace: str, claims: AbstractSet[str]) -> tuple[CleanupPod, ...]:
        """Returns the running pods that may remove commits from these claims once the operator confirms.

        Args:
            claims: names of the PersistentVolumeClaims of model caches.
        """
        cache: WatchCache[PodRecord] | None = self.cache_of(POD, namespace)
        if not claims or cache is None:
            return ()
        return tuple(
            CleanupPod(pod=pod.view, claims=pod.claims)
            for pod in cache.values()
            if pod.view.cleanup is not None
            and pod.view.termination is None
            and pod.key.namespace == namespace
            and not claims.isdisjoint(pod.claims)
        )

    def child(self, kind: Kind, name: NamespacedName) -> ChildRecord | None:
        """Returns a cached child other than a pod, or None."""
        cache: WatchCache[ChildRecord] | None = self.cache_of(kind, name.namespace)
        return cache.get(name) if cache is not None else None

    def nodes(self) -> tuple[NodeView, ...] | None:
        """Returns all nodes with the requests of their pods.

        Returns None if the operator serves only some namespaces.
        """
        if self._nodes is None:
            return None
        return tuple(self._complete_node(node) for node in self._nodes.values())

    def priority_classes(self) -> tuple[PriorityClassView, ...] | None:
        """Returns the priority classes.

        Returns None before the first list, and if the operator serves only some namespaces.
        """
        if self._classes is None or not self._classes.synced.is_set():
            return None
        return tuple(self._classes.values())

    def _complete_node(self, node: NodeView) -> NodeView:
        """Returns a node with the requests of its pods, and the time since which its kubelet is silent."""
        view = self._complete_views.get(node.name)
        if view is None:
            view = self._complete_views[node.name] = replace(
                node,
                requested=self._requested_on(node.name),
                by_priority=self._requested_by_priority(node.name),
                unreachable_since=self._unreachable_nodes.time_of(node.name),
            )
        return view

    def reserved_demands(self, unsent: Container[NamespacedName] = ()) -> tuple[PodDemand, ...]:
        """Returns the demands of the operator's pods that have no node yet.

        A stored pod counts only while its resource exists, and for at most RESERVATION_S. Otherwise a pod
        that the scheduler never places would block capacity forever.

        Args:
            unsent: pods to leave out: pods of the deciding resource whose create requests were not sent. If
                they counted, the decision would find the capacity for these pods taken.
        """
        without_node = self._pod_requests.values_under("") if self._pod_requests is not None else []
        reservations = [pod.reservation for pod in without_node if pod.reservation is not None]
        demands_of_stored = {
            reservation.demand.name: reservation.demand
            for reservation in reservations
            if self._is_reserved(reservation)
        }
        demands_of_unstored = {
            demand.name: demand for name, demand in self._reserved_pods.items() if name not in unsent
        }
        # By name, because the cache may show a pod as stored before the answer to its create request arrives.
        return tuple({**demands_of_unstored, **demands_of_stored}.values())

    def _is_reserved(self, reservation: PodReservation) -> bool:
        """Reports whether a stored pod's reservation is recent, and the pod's resource still exists."""
        reserved_at = self._reserved_since.get(reservation.uid)
        is_recent = reserved_at is not None and self._clock() - reserved_at < RESERVATION_S
        return is_recent and self.resources.uid(reservation.owner.key) == reservation.owner.uid

    @contextlib.contextmanager
    def reserving(self, pods: Sequence[Manifest]) -> Iterator[None]:
        """Reserves capacity for these pods before the API server has stored them.

        Otherwise the next decision, for another resource, could plan the same capacity.
        """
        reservations = {NamespacedName.from_object(pod): self._demand_of_new_pod(pod) for pod in pods}
        del pods  # frees the manifests (13 KB each) early: a reservation lasts until the next decision
        self._reserved_pods |= reservations
        try:
            yield
        finally:
            for name in reservations:
                self._reserved_pods.pop(name, None)

    def _demand_of_new_pod(self, pod: Manifest) -> PodDemand:
        """Returns the demand of a new pod, with its priority if the scheduler may preempt pods for it."""
        class_name = pod["spec"].get("priorityClassName", "")
        return replace(
            trim.build_demand(pod), priority=preempting_priority(class_name, self.priority_classes())
        )

    def _forget_totals(self, node: str) -> None:
        """Forgets the computed totals of a node, because one of its pods has changed."""
        self._totals.pop(node, None)
        self._complete_views.pop(node, None)

    def _requested_on(self, node: str) -> Mapping[str, float]:
        """Returns the total requests of a node's pods. Computes the total only after a change of a pod."""
        assert self._pod_requests is not None
        totals = self._totals.get(node)
        if totals is None:
            totals = sum_requests(pod.requests for pod in self._pod_requests.values_under(node))
            self._totals[node] = totals
        return totals

    def _requested_by_priority(self, node: str) -> Mapping[int, Mapping[str, float]]:
        """Returns the total requests of a node's pods for each priority."""
        assert self._pod_requests is not None
        requests_by_priority: dict[int, list[Mapping[str, float]]] = {}
        for pod in self._pod_requests.values_under(node):
            requests_by_priority.setdefault(pod.priority, []).append(pod.requests)
        return {priority: sum_requests(requests) for priority, requests in requests_by_priority.items()}

    def _update_requests(self, before: PodRequests | None, after: PodRequests | None) -> None:
        """Forgets the totals of a changed pod's nodes, and begins or ends the pod's reservation.

        Calls `capacity_freed` if the pod has ended or is gone.

        Args:
            before: None for a new pod.
            after: None for a pod that has ended or is gone.
        """
        for pod in (before, after):
            if pod is not None:
                self._forget_totals(pod.node)
        reserved_before = before.reservation if before is not None else None
        reserved_now = after.reservation if after is not None else None
        uid_now = reserved_now.uid if reserved_now is not None else None
        if reserved_before is not None and reserved_before.uid != uid_now:
            self._reserved_since.pop(reserved_before.uid, None)
        if reserved_now is not None:
            self._reserved_since.setdefault(reserved_now.uid, self._clock())
        if after is None:
            self._capacity_freed()

    def _update_node(self, before: NodeView | None, after: NodeView | None) -> None:
        """Forgets the view of a changed node, and records the time since which its kubelet is silent."""
        for node in (before, after):
            if node is not None:
                self._complete_views.pop(node.name, None)
                self._unreachable_nodes.record(
                    node.name, after.unreachable_since if after is not None else None
                )
        self._nodes_changed()


def _collection_of_ours(kind: Kind, scope: str | None) -> Collection:
    """Returns the collection of objects of a kind that have the label of a resource."""
    return Collection(
        label=f"{kind.plural} of {scope or 'all namespaces'}",
        path=kind.path(scope),
        query=OURS,
        namespace=scope,
    )
