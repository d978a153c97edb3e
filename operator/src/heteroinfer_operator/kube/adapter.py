"""`KubeCluster` implements the interface of cluster.py on the API server."""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.group_report import GroupReport
from heteroinfer_contract.model_fetch import FetchProgress
from heteroinfer_operator.api import HeteroInferenceStatus, parse_status
from heteroinfer_operator.cluster import (
    Action,
    CacheUser,
    Manifest,
    RecordEvent,
    ResourceKey,
    ResourceObservation,
    ResourceView,
)
from heteroinfer_operator.kube.action_run import PATIENCE_S, ActionContext, ActionRun, Callbacks
from heteroinfer_operator.kube.cluster_state import ClusterState
from heteroinfer_operator.kube.confirmed_cleanups import ConfirmedCleanups
from heteroinfer_operator.kube.dry_runs import DryRuns
from heteroinfer_operator.kube.events import EventRecorder
from heteroinfer_operator.kube.kept import ResourceMemory
from heteroinfer_operator.kube.leader_client import LeaderClient
from heteroinfer_operator.kube.object_writes import ObjectWrites
from heteroinfer_operator.kube.outliving_pods import LeftPods
from heteroinfer_operator.kube.paths import NamespacedName, writable_kind
from heteroinfer_operator.kube.pending_pods import PendingPods
from heteroinfer_operator.kube.server import ApiError, ApiServer
from heteroinfer_operator.kube.trim import PodRecord
from heteroinfer_operator.kube.unlabelled_pods import LOOK_AGAIN_S, UnlabelledPods
from heteroinfer_operator.kube.unmade_pods import NeverCreatedPods
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.reconcile.cache_use import claim_to_clean, claims_without_fetch, is_list_complete
from heteroinfer_operator.reconcile.reading import with_implied_labels
from heteroinfer_operator.stored_fields import UnreadableError

logger = logging.getLogger(__name__)

_READ_S: Final = 0.75
"""How long a reconcile waits for a resource whose cached copy is old."""
_LIST_S: Final = 1.0
"""How long a reconcile waits for the list of a namespace's resources, before it answers a fetch pod.

The wait delays the status, which must not be older than 2 s.
"""


class KubeCluster:
    """Observes resources and runs the actions of reconciles.

    Args:
        cluster_state: caches that run and have their first lists.
        groups: client that requests the reports of leaders.
        patience_s: how long `run` waits for the status write, and then again for all other requests.
    """

    def __init__(
        self,
        server: ApiServer,
        cluster_state: ClusterState,
        *,
        recorder: EventRecorder,
        groups: LeaderClient,
        callbacks: Callbacks | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._server = server
        self._cluster_state = cluster_state
        self._groups = groups
        self._callbacks = callbacks or Callbacks()
        self._memories: dict[ResourceKey, ResourceMemory] = {}
        self._dry_runs = DryRuns(self._send_dry_run)
        self._unlabelled = UnlabelledPods(server, wake=self._callbacks.wake)
        self._left_pods = LeftPods(server, cluster_state, wake=self._callbacks.wake)
        self._pending = PendingPods(server, wake=self._callbacks.wake)
        self._confirmed = ConfirmedCleanups()
        self._context = ActionContext(
            server=server,
            cluster_state=cluster_state,
            objects=ObjectWrites(server, cluster_state, self._unlabelled),
            dry_runs=self._dry_runs,
            recorder=recorder,
            callbacks=self._callbacks,
            patience_s=patience_s,
        )

    async def observe(self, key: ResourceKey) -> ResourceObservation | None:
        """Observes a resource from the caches. Returns None if the resource is gone.

        Also deletes pods that an earlier resource of the same name left on lost nodes, forgets a resource
        that is gone, and reports the status to the callbacks.

        Raises:
            ApiError: the cached copy is known to be old, and the API server refused or did not answer.
        """
        resource = await self._read_resource(key)
        self._left_pods.delete_lost_pods(key, self._cluster_state.resources.uid(key))
        if resource is None:
            self._callbacks.observed(key, None)
            self._forget_resource(key)
            return None
        status = parse_status(resource.status)
        self._callbacks.observed(key, status)
        pods_unwatched = self._cluster_state.is_pod_watch_failing(key)
        observed = await self._observe_pods(resource, status, pods_unwatched=pods_unwatched)
        # From here on, nothing awaits, so that all values are from one moment.
        pods = observed.pods
        never_created = self._update_never_created(resource, status, (pod.view.name for pod in pods))
        return ResourceObservation(
            resource=resource,
            pods=self._pending.explain(resource, pods),
            objects=tuple(child.stored for child in self._cluster_state.children(key, resource.uid)),
            nodes=self._cluster_state.nodes(),
            reserved=self._cluster_state.reserved_demands(
                self._memory_of(resource).unsent_pods(pod.view.name for pod in pods)
            ),
            priority_classes=self._cluster_state.priority_classes(),
            gangs=self._cluster_state.gangs,
            unknown_gangs=self._cluster_state.unknown_gangs,
            groups=observed.reports,
            silences=self._groups.silences(observed.labelled_pods),
            pods_unwatched=pods_unwatched,
            calibrations=self._cluster_state.calibrations,
            fetch=observed.fetch,
            refusals=self._memory_of(resource).refusals(resource),
            admitted=self._dry_runs.admitted_revisions(resource),
            never_created=never_created.names(),
            never_requested=never_created.never_requested(),
            never_placed=self._update_never_placed(resource, status, (pod.view.name for pod in pods)),
            restricted_selectors=self._cluster_state.restricted_selectors(key.namespace),
            other_cache_users=self._find_other_cache_users(resource, pods),
            cleanup_pods=self._confirmed.among(
                self._cluster_state.cleanup_pods(key.namespace, claims_without_fetch(resource.spec))
            ),
        )

    async def _observe_pods(
        self, resource: ResourceView, status: HeteroInferenceStatus, *, pods_unwatched: bool
    ) -> "_ObservedPods":
        """Returns the pods of a resource, with the reports of its leaders and the progress of its download.

        A pod may lose its label while this method waits for leaders. Then this method looks for unlabelled
        pods again, at most twice, because another client could change labels without end.
        """
        key = resource.key
        for may_look_again in (True, True, False):
            known_pods = self._cluster_state.pods(key, resource.uid)
            unlabelled_pods = await self._unlabelled.find(resource, status, known_pods)
            known_pods += unlabelled_pods
            labelled_pods = _with_implied_labels(known_pods)
            self._groups.limit_tests_to(key, labelled_pods)
            reports, fetch = await asyncio.gather(
                self._groups.observe(labelled_pods, pods_unwatched=pods_unwatched),
                self._groups.observe_fetch(labelled_pods, partial(self._confirm_cleanup, key)),
            )
            for text in self._groups.take_invalid_reports(key):
                event = RecordEvent(reason="ReportIgnored", message=text[:1000], warning=True)
                self._context.recorder.record(resource, event)
            # From here on, nothing awaits. The caches may have changed while this method waited.
            pods = self._cluster_state.pods(key, resource.uid)
            watched_names = {pod.view.name for pod in pods}
            pods += [pod for pod in unlabelled_pods if pod.view.name not in watched_names]
            if not (may_look_again and _has_vanished_pod(known_pods, pods)):
                break
        return _ObservedPods(pods=pods, labelled_pods=labelled_pods, reports=reports, fetch=fetch)

    def _find_other_cache_users(
        self, resource: ResourceView, pods: Sequence[PodRecord]
    ) -> tuple[CacheUser, ...] | None:
        """Returns the other resources that use the claim of the model cache.

        Returns None if the operator may not know all of these resources, or if the decision does not need
        them: only the decision about a new fetch pod needs them, because that pod may remove old commits of
        the model from the cache.
        """
        has_fetch_pod = any(
            pod.view.labels.get(names.LABEL_COMPONENT) == names.COMPONENT_FETCH for pod in pods
        )
        claim = "" if has_fetch_pod else claim_to_clean(resource)
        return self._cluster_state.other_cache_users(resource.key, claim) if claim else None

    async def _confirm_cleanup(self, key: ResourceKey, pod: PodRecord) -> bool:
        """Lets a fetch pod remove old commits from the model cache, if its list of used commits is complete.

        The pod removes each old commit that its list lacks, so a gap in the list would break a resource. A
        broken watch may stay unnoticed for more than a minute. So this method first lists the namespace's
        resources from the API server. It sends no request if the operator's cache already shows a gap.

        Returns:
            Whether the pod may remove commits.
        """
        if not self._is_list_complete(key, pod):
            return False
        try:
            async with asyncio.timeout(_LIST_S):
                await self._cluster_state.resources.list_namespace(key.namespace)
        except (ApiError, UnreadableError, TimeoutError) as error:
            logger.warning(
                "%s: pod %s may not remove old commits now, because the operator cannot list the resources "
                "of the namespace: %r. Trying again",
                key,
                pod.view.name,
                error,
            )
            return False
        # Nothing awaits between this check and the confirmation, so no new resource can appear between them.
        # A resource that the watch reports later waits until the pod has removed commits.
        is_complete = self._is_list_complete(key, pod)
        if is_complete:
            self._confirmed.add(pod.view.uid)
        return is_complete

    def _is_list_complete(self, key: ResourceKey, pod: PodRecord) -> bool:
        """Reports whether a fetch pod's list has all commits that the cached resources use."""
        resource = self._cluster_state.resources.cached(key)
        if resource is None or resource.uid != pod.owner_uid:
            return False
        claim = claim_to_clean(resource)
        if claim not in pod.claims:
            return False
        children = self._cluster_state.children(key, resource.uid)
        observation = ResourceObservation(
            resource=resource,
            objects=tuple(child.stored for child in children),
            other_cache_users=self._cluster_state.other_cache_users(key, claim),
        )
        return is_list_complete(observation, pod.view)

    async def _read_resource(self, key: ResourceKey) -> ResourceView | None:
        """Returns the resource, or None if it does not exist or another operator serves it.

        Raises:
            ApiError: the cached copy is known to be old, and the API server refused, or did not answer within
                _READ_S.
        """
        try:
            async with asyncio.timeout(_READ_S):
                return await self._cluster_state.resources.read(key)
        except TimeoutError as error:
            raise ApiError(
                f"{key}: the API server did not return the resource within {_READ_S:g} s"
            ) from error

    def _memory_of(self, resource: ResourceView) -> ResourceMemory:
        """Returns the operator's notes about a resource; new notes if the resource is new."""
        memory = self._memories.get(resource.key)
        if memory is None or memory.uid != resource.uid:
            self._cancel_requests(resource.key)
            memory = self._memories[resource.key] = ResourceMemory.for_new_resource(
                resource, self._callbacks.held_back
            )
        return memory

    def _forget_resource(self, key: ResourceKey) -> None:
        """Drops all state about a deleted resource, and cancels its requests."""
        self._cancel_requests(key)
        self._dry_runs.forget(key)
        self._unlabelled.forget(key)
        self._cluster_state.never_placed.forget(key)
        self._pending.forget(key)
        self._groups.limit_tests_to(key, ())

    def _cancel_requests(self, key: ResourceKey) -> None:
        """Cancels the API requests for a deleted resource, and drops the operator's notes about it."""
        if (memory := self._memories.pop(key, None)) is not None:
            memory.cancel()

    def _update_never_created(
        self, resource: ResourceView, status: HeteroInferenceStatus, existing_names: Iterable[str]
    ) -> NeverCreatedPods:
        """Returns the pods that the operator decided to create and that have not existed yet.

        First removes the pods that exist now (`existing_names`), and the pods of epochs that are over.
        """
        never_created = self._memory_of(resource).never_created
        for name in existing_names:
            never_created.forget(name)
        never_created.forget_earlier_epochs({group.index: group.epoch for group in status.groups})
        return never_created

    def _update_never_placed(
        self, resource: ResourceView, status: HeteroInferenceStatus, existing_names: Iterable[str]
    ) -> frozenset[str]:
        """Returns the names of pods that were deleted before they had a node, so they never ran.

        First removes the pods that exist now (`existing_names`), and the pods of epochs that are over.
        """
        never_placed = self._cluster_state.never_placed
        for name in existing_names:  # also a pod that only lost its label, which a watch reports as deleted
            never_placed.forget_existing(resource.key, name)
        owner = Owner(key=resource.key, uid=resource.uid)
        return never_placed.names(owner, {group.index: group.epoch for group in status.groups})

    async def _send_dry_run(self, manifest: Manifest) -> None:
        """Sends the dry run of one object; raises ApiError if the API server would refuse the object."""
        kind = writable_kind(manifest["kind"], manifest["apiVersion"])
        path = kind.path(NamespacedName.from_object(manifest).namespace)
        await self._server.dry_run_create(path, manifest, {"fieldManager": names.MANAGER})

    async def run(self, observation: ResourceObservation, actions: Sequence[Action]) -> float | None:
        """Runs actions: the status first, then all others in order.

        A request that is not answered within `patience_s` continues after this method returns, and its answer
        calls `wake`. When this method returns, the caches have the answers of all answered writes. The next
        observation has the refused writes. A refused object blocks only the objects that depend on it.

        Returns:
            Seconds until the next attempt of a write or the next check of state that no watch shows, or None.

        Raises:
            ConflictError: an object is in another state than the decision assumed.
        """
        key = observation.resource.key
        memory = self._memory_of(observation.resource)
        memory.begin_decision(observation.resource, observation.refusals, actions)
        retry_s = await ActionRun(self._context, observation, memory).run_all(actions)
        unlabelled_s = LOOK_AGAIN_S if self._unlabelled.has_pods(key) else None
        waits_s = (retry_s, unlabelled_s, self._pending.next_check_s(key))
        return min((wait_s for wait_s in waits_s if wait_s is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ObservedPods:
    """The pods of one resource, and the answers of its leaders and its fetch pod.

    Attributes:
        labelled_pods: the pods that this process knew before it sent requests to them, with the labels that
            follow from their names.
        reports: report of each group's leader, by group index.
        fetch: progress of the pod that downloads the model, or None.
    """

    pods: list[PodRecord]
    labelled_pods: list[PodRecord]
    reports: dict[int, GroupReport]
    fetch: FetchProgress | None


def _with_implied_labels(pods: Sequence[PodRecord]) -> list[PodRecord]:
    """Returns the pods with the labels that follow from their names. Leaves out pods with foreign names."""
    views = [(pod, with_implied_labels(pod.view, Owner(key=pod.key, uid=pod.owner_uid))) for pod in pods]
    return [replace(pod, view=view) for pod, view in views if view is not None]


def _has_vanished_pod(before: Sequence[PodRecord], after: Sequence[PodRecord]) -> bool:
    """Reports whether a pod disappeared without a deletion. Such a pod may have lost only its label."""
    names_after = {pod.view.name for pod in after}
    return any(pod.view.gone_by is None and pod.view.name not in names_after for pod in before)
