"""KubeCluster: the port of cluster.py on the API server."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.budget import Budgets
from heteroinfer_operator.cluster import (
    Action,
    ApplyObject,
    ConflictError,
    CreateObject,
    DeleteObject,
    Manifest,
    PatchStatus,
    RecordEvent,
    Refusal,
    ResourceKey,
    ResourceObservation,
    ResourceView,
    SetFinalizer,
    TryObjects,
)
from heteroinfer_operator.kube import trim
from heteroinfer_operator.kube.child_errors import (
    ChangedByOthersError,
    ChildError,
    DeletedByOthersError,
    MadeByOthersError,
    NameHeldError,
    NameTakenError,
    refused_words,
)
from heteroinfer_operator.kube.cluster_state import ClusterState
from heteroinfer_operator.kube.dry_runs import DryRuns
from heteroinfer_operator.kube.events import EventRecorder
from heteroinfer_operator.kube.leader_client import LeaderClient
from heteroinfer_operator.kube.paths import HETERO_INFERENCE, POD, SECRET, Kind, NamespacedName, writable_kind
from heteroinfer_operator.kube.server import CONFLICT, NOT_FOUND, ApiError, ApiServer
from heteroinfer_operator.kube.trim import PodRecord
from heteroinfer_operator.kube.unlabelled_pods import LOOK_AGAIN_S, UnlabelledPods
from heteroinfer_operator.manifests.drift import find_drift
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.reconcile.reading import read_labels
from heteroinfer_operator.refusals import OBJECT_REFUSED, Acting, asked_anew
from heteroinfer_operator.written_again import WrittenAgain

ALREADY_EXISTS: Final = "AlreadyExists"
_LOST_LABELS: Final[Manifest] = {"metadata": {"labels": None}}
"""What of a child is not as it was made that no watch shows any more."""
OnObserved = Callable[[ResourceKey, Manifest | None], None]


class KubeCluster:
    """What a reconcile needs of Kubernetes.

    Args:
        server: the API server.
        cluster_state: running and synced.
        recorder: of events.
        groups: asks leaders.
        on_observed: called with the stored status of each resource observed; None once it is gone.
        on_held_back: called with each kind of action of which one had to wait for the resource's budget.
    """

    def __init__(
        self,
        server: ApiServer,
        cluster_state: ClusterState,
        *,
        recorder: EventRecorder,
        groups: LeaderClient,
        on_observed: OnObserved = lambda key, status: None,
        on_held_back: Callable[[str], None] = lambda kind: None,
    ) -> None:
        self._server = server
        self._cluster_state = cluster_state
        self._recorder = recorder
        self._groups = groups
        self._on_observed = on_observed
        self._refusals: dict[ResourceKey, tuple[str, int, tuple[Refusal, ...]]] = {}
        """What was refused, of which uid and generation: a spec that was changed is tried anew, at once."""
        self._written: dict[ResourceKey, tuple[str, int, WrittenAgain]] = {}
        """What of a uid's generation was written of late."""
        self._budgets = Budgets(on_held_back)
        self._dry_runs = DryRuns(self._try_create)
        self._unlabelled = UnlabelledPods(server)

    async def observe(self, key: ResourceKey) -> ResourceObservation | None:
        """Returns the resource and its children as last seen, or None if it is gone.

        Raises:
            ApiError: what was last seen is known to be old, and the API server did not answer, or refused.
        """
        resource = await self._cluster_state.resources.read(key)
        if resource is None:
            self._on_observed(key, None)
            self._refusals.pop(key, None)
            self._dry_runs.forget(key)
            self._written.pop(key, None)
            self._unlabelled.forget(key)
            return None
        self._on_observed(key, resource.status)
        for may_look_again in (True, True, False):
            known = self._cluster_state.pods(key, resource.uid)
            unlabelled = await self._unlabelled.find(resource, known)
            known += unlabelled
            ours = _with_complete_labels(known)
            groups, fetch = await asyncio.gather(self._groups.observe(ours), self._groups.observe_fetch(ours))
            for text in self._groups.take_nonsense(key):
                event = RecordEvent(reason="ReportIgnored", message=text[:1000], warning=True)
                await self._recorder.record(resource, event)
            # Taken after the last await, as all below: of one moment.
            pods = self._cluster_state.pods(key, resource.uid)
            shown = {pod.view.name for pod in pods}
            pods += [pod for pod in unlabelled if pod.view.name not in shown]
            if not (may_look_again and _vanished(known, pods)):
                break
        return ResourceObservation(
            resource=resource,
            pods=tuple(pod.view for pod in pods),
            objects=tuple(child.stored for child in self._cluster_state.children(key, resource.uid)),
            nodes=self._cluster_state.nodes(),
            promised=self._cluster_state.promised(),
            gangs=self._cluster_state.gangs,
            groups=groups,
            calibrations=self._cluster_state.calibrations,
            fetch=fetch,
            refusals=self._refusals_of(resource),
            admitted=self._dry_runs.admitted(resource),
        )

    def _refusals_of(self, resource: ResourceView) -> tuple[Refusal, ...]:
        uid, generation, refusals = self._refusals.get(resource.key, (resource.uid, resource.generation, ()))
        if uid != resource.uid:
            return ()
        return refusals if generation == resource.generation else asked_anew(refusals, datetime.now(UTC))

    def _written_of(self, resource: ResourceView) -> WrittenAgain:
        uid, generation, written = self._written.get(resource.key, ("", -1, WrittenAgain()))
        if (uid, generation) != (resource.uid, resource.generation):
            written = WrittenAgain()
            self._written[resource.key] = resource.uid, resource.generation, written
        return written

    async def _try_create(self, manifest: Manifest) -> None:
        kind, name = _address(manifest)
        await self._server.try_create(kind.path(name.namespace), manifest, {"fieldManager": names.MANAGER})

    async def run(self, observation: ResourceObservation, actions: Sequence[Action]) -> float | None:
        """Runs actions in order; what they changed is in the caches when this returns.

        What is refused is in the next observation, and keeps nothing from being done but what needs it.

        Returns:
            Seconds until something that was refused may be tried again, or that no watch shows is looked
            at again, or None.

        Raises:
            ConflictError: an action met another state than the decision was made on.
            ApiError: the API server did not answer.
        """
        key = observation.resource.key
        now = datetime.now(UTC)
        spending = self._budgets.spending(observation.resource, actions, now)
        acting = Acting(key.name, observation.refusals, now, spending)
        run_of_actions = _ActionRun(
            self._server,
            self._cluster_state,
            self._recorder,
            observation.resource,
            acting,
            _Kept(
                unlabelled=self._unlabelled,
                written=self._written_of(observation.resource),
                dry_runs=self._dry_runs,
            ),
        )
        pods = [
            action.manifest
            for action in actions
            if isinstance(action, CreateObject) and action.manifest["kind"] == POD.name
        ]
        with self._cluster_state.promising(pods):
            try:
                conflict = await run_of_actions.run_all(actions)
            finally:
                resource = observation.resource
                self._refusals[key] = resource.uid, resource.generation, tuple(acting.known.values())
        if conflict is not None:
            raise conflict
        waits = [acting.look_again_s(), LOOK_AGAIN_S if self._unlabelled.are_there(key) else None]
        return min((wait for wait in waits if wait is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kept:
    """What one decision's actions leave to those of the next.

    Attributes:
        unlabelled: pods without their label.
        written: what of the resource was written of late.
        dry_runs: what was tried.
    """

    unlabelled: UnlabelledPods
    written: WrittenAgain
    dry_runs: DryRuns


class _ActionRun:
    """The actions of one decision; follows the resourceVersion through its own writes."""

    def __init__(
        self,
        server: ApiServer,
        cluster_state: ClusterState,
        recorder: EventRecorder,
        resource: ResourceView,
        acting: Acting,
        kept: _Kept,
    ) -> None:
        self._acting = acting
        self._dry_runs = kept.dry_runs
        self._written = kept.written
        self._unlabelled = kept.unlabelled
        self._server = server
        self._cluster_state = cluster_state
        self._recorder = recorder
        self._resource = resource
        self._version = resource.resource_version
        self._finalizers = resource.finalizers

    async def run_all(self, actions: Sequence[Action]) -> ConflictError | None:
        """Runs what can be run; returns the first conflict, or None; raises ApiError without an answer."""
        conflict: ConflictError | None = None
        for action in actions:
            if not self._acting.may(action):
                continue
            try:
                await self._run(action)
            except ConflictError as error:
                self._acting.conflicted(action)
                conflict = conflict or error
            except ChildError as error:
                await self._refused(action, error.reason, error.message)
            except ApiError as error:
                if not error.is_refusal:
                    raise
                await self._refused(action, OBJECT_REFUSED, refused_words(action, error.said))
            else:
                self._acting.done(action)
        return conflict

    async def _refused(self, action: Action, reason: str, message: str) -> None:
        news = self._acting.refused(action, reason, message)
        if news is not None:
            event = RecordEvent(reason=reason, message=message[:1000], warning=True)
            await self._recorder.record(self._resource, event)

    async def _run(self, action: Action) -> None:
        match action:
            case CreateObject():
                await self._create(action)
            case TryObjects():
                await self._dry_runs.find(self._resource, action)
            case ApplyObject():
                await self._apply(action.manifest)
            case DeleteObject():
                await self._delete(action)
            case PatchStatus():
                await self._patch_status(action)
            case SetFinalizer():
                await self._set_finalizer(present=action.present)
            case RecordEvent():
                await self._recorder.record(self._resource, action)

    async def _create(self, action: CreateObject) -> None:
        manifest = action.manifest
        kind, name = _address(manifest)
        try:
            stored = await self._server.create(
                kind.path(name.namespace), manifest, {"fieldManager": names.MANAGER}
            )
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            if error.api_reason == ALREADY_EXISTS and action.may_exist:
                return
            if error.api_reason == ALREADY_EXISTS:
                await self._meet(kind, name, manifest)
            raise ConflictError(error.message) from error
        if kind is SECRET:  # nobody may list them, so no cache keeps them
            return
        self._cluster_state.note_written(kind, stored)
        if kind is not POD and self._written.note(manifest, self._acting.now):
            raise DeletedByOthersError.of(f"{kind.name} {name}")

    async def _apply(self, manifest: Manifest) -> None:
        kind, name = _address(manifest)
        kept = self._cluster_state.child(kind, name) if kind is not POD else None
        if kept is None or kept.owner_uid != self._resource.uid:
            kept_uid = await self._meet(kind, name, manifest)
        else:
            kept_uid = str(kept.stored["metadata"]["uid"])
        drift = find_drift(kept.stored, manifest) if kept is not None else _LOST_LABELS
        body: dict[str, Any] = {**manifest}
        if kept_uid:  # never onto another object that took the name meanwhile
            body["metadata"] = {**manifest["metadata"], "uid": kept_uid}
        try:
            stored = await self._server.apply(
                kind.path(name.namespace, name.name), body, manager=names.MANAGER
            )
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            raise ConflictError(error.message) from error
        # What others added to a list or a map stays there until it is taken out by name.
        if left := find_drift(stored, manifest):
            stored = await self._server.merge(kind.path(name.namespace, name.name), left)
        self._cluster_state.note_written(kind, stored)
        if changed := find_drift(stored, manifest):
            raise ChangedByOthersError.of(f"{kind.name} {name}", changed)
        if not self._written.note(manifest, self._acting.now):
            return
        if not kept_uid:
            raise DeletedByOthersError.of(f"{kind.name} {name}")
        raise ChangedByOthersError.each_time(f"{kind.name} {name}", drift)

    async def _meet(self, kind: Kind, name: NamespacedName, manifest: Manifest) -> str:
        """Takes an object that the cache does not know into it; returns its uid, "" if there is none.

        One of ours that is not seen, since it has lost the label that it is watched by, gets it back, but
        for a pod, which may not be changed: it is looked at from now on.

        Raises:
            NameHeldError: it will go: it is being deleted, or belongs to an earlier resource of this name.
            NameTakenError: it belongs to somebody else.
        """
        try:
            stored = await self._server.get(kind.path(name.namespace, name.name))
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return ""
        if trim.owner_uid(stored) == self._resource.uid:
            if trim.label_key(stored) != self._resource.key:
                if kind is POD:
                    self._unlabelled.note_met(self._resource.key, name.name)
                    return str(stored["metadata"]["uid"])
                labels = {"metadata": {"labels": manifest["metadata"]["labels"]}}
                stored = await self._server.merge(kind.path(name.namespace, name.name), labels)
            self._cluster_state.note_written(kind, stored)
            return str(stored["metadata"]["uid"])
        if "deletionTimestamp" in stored["metadata"] or _is_of_earlier(stored, self._resource.key):
            raise NameHeldError.of(f"{kind.name} {name}", stored)
        raise NameTakenError.of(f"{kind.name} {name}")

    async def _delete(self, action: DeleteObject) -> None:
        kind = writable_kind(action.kind, action.api_version)
        name = NamespacedName(namespace=self._resource.key.namespace, name=action.name)
        options: dict[str, Any] = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": action.uid},
        }
        if action.grace_s is not None:
            options["gracePeriodSeconds"] = action.grace_s
        try:
            stored = await self._server.delete(kind.path(name.namespace, action.name), options)
        except ApiError as error:
            if error.status not in (NOT_FOUND, CONFLICT):  # conflict: the name has another uid now
                raise
            self._cluster_state.note_gone(kind, name, action.uid)
            return
        self._note_deleted(kind, name, action.uid, stored)
        if kind is not POD and self._written.note_deleted(kind.name, action.name, self._acting.now):
            raise MadeByOthersError.of(f"{kind.name} {action.name}")

    def _note_deleted(self, kind: Kind, name: NamespacedName, uid: str, stored: Manifest) -> None:
        # Where the kubelet deletes at the same time, the answer is an object without a resourceVersion: gone.
        if kind is POD and "resourceVersion" in stored["metadata"]:
            metadata = {"deletionTimestamp": "", **stored["metadata"]}
            self._cluster_state.note_written(kind, {**stored, "metadata": metadata})
        else:
            self._cluster_state.note_gone(kind, name, uid)

    async def _patch_status(self, action: PatchStatus) -> None:
        observed = action.resource_version == self._resource.resource_version
        body = {"status": action.status}
        await self._write_resource("status", body, self._version if observed else action.resource_version)

    async def _set_finalizer(self, *, present: bool) -> None:
        others = tuple(f for f in self._finalizers if f != names.FINALIZER)
        wanted = (*others, names.FINALIZER) if present else others
        if wanted != self._finalizers:
            await self._write_resource("", {"metadata": {"finalizers": list(wanted)}}, self._version)
            self._finalizers = wanted

    async def _write_resource(self, subresource: str, body: Manifest, version: str) -> None:
        """Writes to the resource if it still has this version; its own writes count as unchanged."""
        key = self._resource.key
        path = HETERO_INFERENCE.path(key.namespace, key.name, subresource)
        metadata = {
            **body.get("metadata", {}),
            "name": key.name,
            "namespace": key.namespace,
            "uid": self._resource.uid,
            "resourceVersion": version,
        }
        whole = {
            "apiVersion": HETERO_INFERENCE.api_version,
            "kind": HETERO_INFERENCE.name,
            **body,
            "metadata": metadata,
        }
        write = self._server.update if subresource else self._server.merge
        try:
            stored = await write(path, whole)
        except ApiError as error:
            if error.status not in (CONFLICT, NOT_FOUND):
                raise
            self._cluster_state.resources.doubt(key)
            raise ConflictError(error.message) from error
        self._version = stored["metadata"]["resourceVersion"]
        self._cluster_state.resources.note_written(stored)


def _address(manifest: Manifest) -> tuple[Kind, NamespacedName]:
    return writable_kind(manifest["kind"], manifest["apiVersion"]), NamespacedName.of(manifest)


def _with_complete_labels(pods: Sequence[PodRecord]) -> list[PodRecord]:
    """Returns the pods that are ours by their names, with the labels that these say."""
    views = [(pod, read_labels(pod.view, Owner(key=pod.key, uid=pod.owner_uid))) for pod in pods]
    return [replace(pod, view=view) for pod, view in views if view is not None]


def _vanished(before: Sequence[PodRecord], after: Sequence[PodRecord]) -> bool:
    """Returns whether a pod that nobody had deleted is shown no more: it may have lost its label only."""
    names_after = {pod.view.name for pod in after}
    return any(pod.view.gone_by is None and pod.view.name not in names_after for pod in before)


def _is_of_earlier(stored: Manifest, key: ResourceKey) -> bool:
    """Returns whether an object belongs to a resource that had this name before, and so will go."""
    owners = stored["metadata"].get("ownerReferences") or ()
    return any(o.get("controller") and o["kind"] == names.KIND and o["name"] == key.name for o in owners)
