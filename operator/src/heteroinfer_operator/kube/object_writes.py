"""Writes children of a resource, and checks that the API server stored them as sent.

*Children* are the objects that the operator creates for a resource.
"""

import asyncio
import logging
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.cluster import ConflictError, CreateObject, DeleteObject, Manifest, ResourceView
from heteroinfer_operator.kube import child_errors, trim
from heteroinfer_operator.kube.child_errors import ChildError
from heteroinfer_operator.kube.cluster_state import ClusterState
from heteroinfer_operator.kube.kept import ResourceMemory
from heteroinfer_operator.kube.paths import POD, SECRET, Kind, NamespacedName, writable_kind
from heteroinfer_operator.kube.pod_changes import find_changes
from heteroinfer_operator.kube.server import CONFLICT, NOT_FOUND, ApiError, ApiServer
from heteroinfer_operator.kube.unlabelled_pods import UnlabelledPods
from heteroinfer_operator.manifests.drift import find_drift

logger = logging.getLogger(__name__)

ALREADY_EXISTS: Final = "AlreadyExists"
_LABEL_DRIFT: Final[Manifest] = {"metadata": {"labels": None}}
"""Assumed drift of a child that no watch shows: the child has lost the operator's label.

*Drift* is a merge patch: the fields in which a stored object differs from its manifest.
"""
_CHANGED_POD_GRACE_S: Final = 2
"""Grace period for the deletion of a pod that a webhook changed."""
_DELETE_RETRY_PAUSES_S: Final = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0)
"""Pauses between attempts to delete a pod that a webhook changed."""


class ObjectWrites:
    """Writes the children of resources.

    Raises:
        ConflictError: the object is in another state than the decision assumed (all methods).
        ChildError: the object cannot be stored as wanted (all methods).
        ApiError: the API server refused the write or did not answer (all methods).
    """

    def __init__(self, server: ApiServer, cluster_state: ClusterState, unlabelled: UnlabelledPods) -> None:
        self._server = server
        self._cluster_state = cluster_state
        self._unlabelled = unlabelled

    async def create(self, resource: ResourceView, memory: ResourceMemory, action: CreateObject) -> None:
        """Creates a child; does nothing if the child exists and the action permits that.

        Raises:
            ConflictError: the object exists and the action does not permit that, or another write conflicts.
            ChildError: the object exists and belongs to another owner, a webhook changed the pod so that it
                cannot serve, or others have deleted the object after each of the last writes.
        """
        kind, name = _read_kind_and_name(action.manifest)
        if kind is POD:
            await self._create_pod(resource, memory, action)
            return
        path = kind.path(name.namespace)
        try:
            stored = await self._server.create(path, action.manifest, {"fieldManager": names.MANAGER})
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            if error.api_reason == ALREADY_EXISTS:
                if action.may_exist:
                    return
                # Adds the object to the cache for the next decision, or raises ChildError.
                await self._read_uncached(resource, kind, name, action.manifest)
            raise ConflictError(error.message) from error
        if kind is SECRET:  # the operator may not list Secrets, so no cache has them
            return
        self._cluster_state.store_written(kind, stored)
        is_deleted_each_time = memory.repeated_writes.count_write(
            kind.name, name.name, action.manifest, memory.permits.now
        )
        if is_deleted_each_time:
            raise child_errors.deleted_each_time(f"{kind.name} {name}")

    async def _create_pod(self, resource: ResourceView, memory: ResourceMemory, action: CreateObject) -> None:
        """Creates a pod, and deletes it again if a webhook changed it so that it cannot serve.

        `never_created` has the pod until an answer shows that the pod exists or was refused. After a conflict
        or without an answer, the pod stays there, because it may still appear.
        """
        manifest = action.manifest
        name = NamespacedName.from_object(manifest)
        was_requested = memory.never_created.is_requested(name.name)
        memory.never_created.record_request(name.name)
        try:
            stored = await self._server.create(
                POD.path(name.namespace), manifest, {"fieldManager": names.MANAGER}
            )
        except ApiError as error:
            if error.status != CONFLICT:
                if error.is_refusal:
                    memory.never_created.forget(name.name)
                raise
            if error.api_reason == ALREADY_EXISTS:
                try:
                    existing_uid = await self._read_uncached(resource, POD, name, manifest)
                except ChildError:  # another owner has the name, so this request has created nothing
                    memory.never_created.forget(name.name)
                    raise
                # An earlier request of this process has created the pod, and the answer was lost.
                is_own_pod = bool(existing_uid) and was_requested
                if is_own_pod:
                    memory.never_created.forget(name.name)
                    return
            raise ConflictError(error.message) from error
        memory.never_created.forget(name.name)
        if changes := find_changes(manifest, stored):
            await self._delete_changed_pod(name, str(stored["metadata"]["uid"]))
            raise child_errors.changed_on_creation(f"Pod {name}", changes)
        self._cluster_state.store_written(POD, stored)

    async def _delete_changed_pod(self, name: NamespacedName, uid: str) -> None:
        """Deletes a pod that a webhook changed so that it cannot join its group.

        Tries again after each pause of _DELETE_RETRY_PAUSES_S, because nothing else may ever delete the pod:
        no watch shows a pod without the operator's label.
        """
        options = delete_options(uid, _CHANGED_POD_GRACE_S)
        for pause_s in (*_DELETE_RETRY_PAUSES_S, None):  # None: the last attempt
            try:
                await self._server.delete(POD.path(name.namespace, name.name), options)
            except ApiError as error:
                if error.status in (NOT_FOUND, CONFLICT):  # gone, or another pod has the name
                    return
                if pause_s is None:
                    logger.error(
                        "pod %s: a webhook changed this pod on creation, so the pod cannot join its group. "
                        "The operator cannot delete the pod: %s. Delete the pod yourself",
                        name,
                        error.message,
                    )
                    return
                await asyncio.sleep(pause_s)
            else:
                return

    async def apply(self, resource: ResourceView, memory: ResourceMemory, manifest: Manifest) -> None:
        """Makes a stored object match its manifest; creates the object if it does not exist.

        Raises:
            ChildError: another owner has the name, or others change or delete the object after each write.
        """
        kind, name = _read_kind_and_name(manifest)
        child = self._cluster_state.child(kind, name) if kind is not POD else None
        if child is None or child.owner_uid != resource.uid:
            uid = await self._read_uncached(resource, kind, name, manifest)
        else:
            uid = str(child.stored["metadata"]["uid"])
        drift_before = find_drift(child.stored, manifest) if child is not None else _LABEL_DRIFT
        stored = await self._apply_and_merge(kind, name, manifest, uid)
        self._cluster_state.store_written(kind, stored)
        if final_drift := find_drift(stored, manifest):
            raise child_errors.changed_by_others(f"{kind.name} {name}", final_drift)
        is_undone_each_time = memory.repeated_writes.count_write(
            kind.name, name.name, manifest, memory.permits.now
        )
        if not is_undone_each_time:
            return
        # Each write succeeded, and another client has undone each write before this one.
        did_exist = uid != ""
        if not did_exist:
            raise child_errors.deleted_each_time(f"{kind.name} {name}")
        raise child_errors.changed_by_others(f"{kind.name} {name}", drift_before)

    async def _apply_and_merge(
        self, kind: Kind, name: NamespacedName, manifest: Manifest, uid: str
    ) -> Manifest:
        """Applies a manifest by server-side apply, and removes the entries that others added.

        Server-side apply keeps such entries of lists and maps, so a merge patch removes them.

        Args:
            uid: uid of the stored object, or "" if it does not exist. With the uid, the API server refuses
                the write if another object has taken the name.

        Returns:
            The stored object.
        """
        body: dict[str, Any] = {**manifest}
        if uid:
            body["metadata"] = {**manifest["metadata"], "uid": uid}
        path = kind.path(name.namespace, name.name)
        try:
            stored = await self._server.apply(path, body, manager=names.MANAGER)
        except ApiError as error:
            if error.status != CONFLICT:
                raise
            raise ConflictError(error.message) from error
        if remaining_drift := find_drift(stored, manifest):
            stored = await self._server.merge(path, remaining_drift)
        return stored

    async def _read_uncached(
        self, resource: ResourceView, kind: Kind, name: NamespacedName, manifest: Manifest
    ) -> str:
        """Reads an object that the cache does not show, and adds it to the cache.

        If the object belongs to the resource and has lost the label by which the operator watches it, this
        method restores the label. The operator has no right to change a pod, so it polls a pod without the
        label from now on (`UnlabelledPods`).

        Returns:
            The object's uid, or "" if it does not exist.

        Raises:
            ChildError: NameHeld if the object will disappear (it is being deleted, or belongs to an earlier
                resource of this name); NameTaken if it belongs to another owner.
        """
        try:
            stored = await self._server.get_quickly(kind.path(name.namespace, name.name))
        except ApiError as error:
            if error.status != NOT_FOUND:
                raise
            return ""
        if trim.owner_uid(stored) != resource.uid:
            if "deletionTimestamp" in stored["metadata"] or _has_earlier_owner(stored, resource.key.name):
                raise child_errors.name_held(f"{kind.name} {name}", stored)
            raise child_errors.name_taken(f"{kind.name} {name}")
        has_lost_label = trim.label_key(stored) != resource.key
        if has_lost_label and kind is POD:
            self._unlabelled.add(resource.key, name.name)
            return str(stored["metadata"]["uid"])
        if has_lost_label:
            labels = {"metadata": {"labels": manifest["metadata"]["labels"]}}
            stored = await self._server.merge(kind.path(name.namespace, name.name), labels)
        self._cluster_state.store_written(kind, stored)
        return str(stored["metadata"]["uid"])

    async def delete(self, resource: ResourceView, memory: ResourceMemory, action: DeleteObject) -> None:
        """Deletes the object that has the uid of the action; does nothing without a uid.

        Raises:
            ChildError: the object is obsolete, and others have created it again after each of the last
                deletions.
        """
        if not action.uid:  # the API server has not answered a request for this pod, so its uid is unknown
            return
        kind = writable_kind(action.kind, action.api_version)
        name = NamespacedName(namespace=resource.key.namespace, name=action.name)
        try:
            stored = await self._server.delete(
                kind.path(name.namespace, action.name), delete_options(action.uid, action.grace_s)
            )
        except ApiError as error:
            if error.status not in (NOT_FOUND, CONFLICT):  # with CONFLICT, another object has the name
                raise
            self._cluster_state.remove_gone(kind, name, action.uid)
            return
        self._update_cache_after_delete(kind, name, action.uid, stored)
        if kind is POD:
            return
        is_created_each_time = memory.repeated_writes.count_write(
            kind.name, action.name, manifest=None, now=memory.permits.now
        )
        if is_created_each_time:
            raise child_errors.created_each_time(f"{kind.name} {action.name}")

    def _update_cache_after_delete(
        self, kind: Kind, name: NamespacedName, uid: str, stored: Manifest
    ) -> None:
        """Updates the caches after a delete: marks a pod as terminating, and removes any other object."""
        # If the kubelet deletes the pod at the same time, the answer has no resourceVersion: the pod is gone.
        is_terminating_pod = kind is POD and "resourceVersion" in stored["metadata"]
        if is_terminating_pod:
            # The answer may lack deletionTimestamp. An empty deletionTimestamp marks the pod as terminating.
            metadata = {"deletionTimestamp": "", **stored["metadata"]}
            self._cluster_state.store_written(kind, {**stored, "metadata": metadata})
        else:
            self._cluster_state.remove_gone(kind, name, uid)


def _read_kind_and_name(manifest: Manifest) -> tuple[Kind, NamespacedName]:
    """Returns kind, namespace and name of a manifest's object."""
    return writable_kind(manifest["kind"], manifest["apiVersion"]), NamespacedName.from_object(manifest)


def delete_options(uid: str, grace_s: int | None) -> dict[str, Any]:
    """Builds the options that delete the object with this uid.

    Args:
        grace_s: grace period in seconds; None for the pod's own grace period.
    """
    options: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "DeleteOptions",
        "propagationPolicy": "Background",
        "preconditions": {"uid": uid},
    }
    return options if grace_s is None else {**options, "gracePeriodSeconds": grace_s}


def _has_earlier_owner(stored: Manifest, resource: str) -> bool:
    """Reports whether the object belongs to an earlier resource of this name.

    Kubernetes' garbage collection will delete such an object. Call this function only for an object whose
    owner has another uid than the present resource.
    """
    owners = stored["metadata"].get("ownerReferences") or ()
    return any(
        owner.get("controller") and owner["kind"] == names.KIND and owner["name"] == resource
        for owner in owners
    )
