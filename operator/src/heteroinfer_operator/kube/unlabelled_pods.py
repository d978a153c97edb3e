"""Polls running pods that lost the label or the owner by which the operator watches them.

The watch reports such a pod as deleted, although it runs.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, TypeAlias

from heteroinfer_contract.background import start_task
from heteroinfer_operator.api import HeteroInferenceStatus, RankEntry
from heteroinfer_operator.cluster import PodView, ResourceKey, ResourceView
from heteroinfer_operator.kube import trim
from heteroinfer_operator.kube.paths import POD
from heteroinfer_operator.kube.server import NOT_FOUND, ApiError, ApiServer
from heteroinfer_operator.kube.trim import PodRecord
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.identity import Owner, parse_worker_name
from heteroinfer_operator.stored_fields import UnreadableError

logger = logging.getLogger(__name__)

LOOK_AGAIN_S: Final = 1.0
"""Interval of reconciles while a resource has unwatched pods, because no watch shows their changes."""
PATIENCE_S: Final = 0.25
"""How long a reconcile waits for the API server. Most answers arrive within this time."""


PodRequest: TypeAlias = asyncio.Task[PodRecord | None]


@dataclass(slots=True)
class _ResourcePods:
    """The operator's knowledge about the pods of one resource.

    Attributes:
        uid: uid of the resource, because a new resource may get the same name.
        uids: last seen uid of each pod, by name. It identifies a pod without label and owner.
        unwatched: names of pods that exist, or may exist, although no watch shows them.
        not_found: names of pods in the status that do not exist according to the API server. They are not
            requested again.
        requests: running requests, by pod name.
    """

    uid: str
    uids: dict[str, str] = field(default_factory=dict)
    unwatched: frozenset[str] = frozenset()
    not_found: frozenset[str] = frozenset()
    requests: dict[str, PodRequest] = field(default_factory=dict)

    def note_uids(self, watched_pods: Sequence[PodRecord], *, kept_names: AbstractSet[str]) -> None:
        """Notes the uids of watched pods, and forgets the uids of other pods except `kept_names`."""
        watched = {pod.view.name: pod.view.uid for pod in watched_pods}
        kept = {name: uid for name, uid in self.uids.items() if name in kept_names}
        self.uids = kept | watched

    def select_pods_to_read(self, in_status: AbstractSet[str], watched: AbstractSet[str]) -> list[str]:
        """Returns the names of the pods to read from the API server, and removes outdated names.

        The pods to read are those in `unwatched`, and the pods of the status that no watch shows, without the
        pods in `not_found`. A watched pod leaves `unwatched`. A pod leaves `not_found` if it is watched or
        unwatched, or if the status no longer lists it.

        Args:
            in_status: names of the pods in the status.
            watched: names of the pods that the watches show.
        """
        self.unwatched -= watched
        self.not_found = (self.not_found & in_status) - watched - self.unwatched
        unknown = in_status - watched - self.not_found
        return sorted(unknown | self.unwatched)

    def cancel_requests(self, *, kept_names: Collection[str] = ()) -> None:
        """Cancels the requests for all pods except `kept_names`, so that no late answer is used."""
        for name in self.requests.keys() - set(kept_names):
            self.requests.pop(name).cancel()


class UnlabelledPods:
    """Finds pods of a resource that exist although no watch shows them any more.

    Use from one event loop.

    Args:
        wake: called with a resource if a request is answered after its reconcile stopped waiting.
    """

    def __init__(
        self,
        server: ApiServer,
        *,
        wake: Callable[[ResourceKey], None] = lambda key: None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._server = server
        self._wake = wake
        self._patience_s = patience_s
        self._known: dict[ResourceKey, _ResourcePods] = {}

    async def find(
        self, resource: ResourceView, status: HeteroInferenceStatus, watched_pods: Sequence[PodRecord]
    ) -> list[PodRecord]:
        """Returns the pods of a resource that exist although no watch shows them.

        Reads each pod that the status lists and no watch shows. If the pod exists, every call reads it again.
        If it does not exist, later calls do not read it. While the API server does not answer, the result
        contains the pod as `unknown`.

        Args:
            watched_pods: pods that the watches show.
        """
        own_pods = self._pods_of(resource)
        ranks = _ranks_by_pod(Owner(key=resource.key, uid=resource.uid), status)
        watched = {pod.view.name for pod in watched_pods}
        names_to_read = own_pods.select_pods_to_read(ranks.keys(), watched)  # without `not_found`
        # By these uids, `_read_pod` recognizes pods that have lost their label and their owner.
        own_pods.note_uids(watched_pods, kept_names=ranks.keys() | own_pods.unwatched)
        own_pods.cancel_requests(kept_names=names_to_read)
        await self._request_pods(resource, own_pods, names_to_read)
        answers = (_take_answer(resource, own_pods, name, ranks.get(name)) for name in names_to_read)
        unwatched_pods = [answer for answer in answers if answer is not None]
        own_pods.unwatched = frozenset(pod.view.name for pod in unwatched_pods)
        # Remember the absent pods, so that the next call does not read them again.
        not_found_now = set(names_to_read) - own_pods.unwatched
        own_pods.not_found = (own_pods.not_found | not_found_now) & ranks.keys()
        return unwatched_pods

    def _pods_of(self, resource: ResourceView) -> _ResourcePods:
        """Returns the state of a resource's pods; a new state if a new resource has the name."""
        own_pods = self._known.get(resource.key)
        if own_pods is None or own_pods.uid != resource.uid:
            self.forget(resource.key)
            own_pods = self._known[resource.key] = _ResourcePods(resource.uid)
        return own_pods

    async def _request_pods(
        self, resource: ResourceView, own_pods: _ResourcePods, names: Sequence[str]
    ) -> None:
        """Requests pods that have no running request, and waits for `patience_s`.

        A later answer wakes the resource.
        """

        def wake_after_answer(request: PodRequest) -> None:
            """Wakes the resource after a late answer."""
            if not request.cancelled():
                self._wake(resource.key)

        new_requests = []
        for name in names:
            if name not in own_pods.requests:
                work = self._read_pod(resource, name, own_pods.uids.get(name))
                own_pods.requests[name] = start_task(work, name=f"pod {name}", failed=_report_error)
                new_requests.append(own_pods.requests[name])
        if not new_requests:
            return
        _, unanswered = await asyncio.wait(new_requests, timeout=self._patience_s)
        for request in unanswered:
            request.add_done_callback(wake_after_answer)

    async def _read_pod(self, resource: ResourceView, name: str, uid: str | None) -> PodRecord | None:
        """Returns one pod, or None if it does not exist or does not belong to the resource.

        Args:
            uid: uid that a watch showed for the pod, or None.

        Raises:
            ApiError: the API server refused or did not answer.
        """
        try:
            stored = await self._server.get_quickly(POD.path(resource.key.namespace, name))
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        owner_uid = trim.owner_uid(stored)
        if owner_uid == resource.uid:
            return trim.pod_record(stored, key=resource.key)
        # If a watch has shown a pod of the resource with this uid, the uid identifies the pod without label
        # and owner.
        is_same_pod = stored["metadata"]["uid"] == uid
        # Without a known uid, for example after a restart of the operator, the label must identify the pod.
        is_new_orphan = not uid and not owner_uid and _is_orphan(stored, resource.key)
        if not is_same_pod and not is_new_orphan:
            return None
        return trim.orphan_record(stored, key=resource.key, owner_uid=resource.uid)

    def add(self, key: ResourceKey, name: str) -> None:
        """Adds a pod that another component found without its label."""
        if (known := self._known.get(key)) is not None:
            known.unwatched |= {name}

    def has_pods(self, key: ResourceKey) -> bool:
        """Reports whether the last call of `find` returned pods, or `add` has added a pod since."""
        return key in self._known and bool(self._known[key].unwatched)

    def forget(self, key: ResourceKey) -> None:
        """Drops the state of a resource that is gone."""
        if (known := self._known.pop(key, None)) is not None:
            known.cancel_requests()


def _take_answer(
    resource: ResourceView, own_pods: _ResourcePods, name: str, rank: RankEntry | None
) -> PodRecord | None:
    """Returns the pod of an answered request, and removes the request.

    If there is no answer, returns a pod whose field `unknown` has the reason. Returns None if the pod does
    not exist.

    Args:
        rank: the last rank of the pod in the status, or None.
    """
    request = own_pods.requests[name]
    if not request.done():
        return _build_unknown_pod(resource, name, rank, "the API server has not answered yet")
    del own_pods.requests[name]
    if request.cancelled():
        return _build_unknown_pod(resource, name, rank, "the operator cancelled the request for this pod")
    error = request.exception()
    return request.result() if error is None else _build_unknown_pod(resource, name, rank, str(error)[:300])


def _ranks_by_pod(owner: Owner, status: HeteroInferenceStatus) -> dict[str, RankEntry]:
    """Returns the last rank in the status of each pod of a resource, by the pod's name."""
    # Other clients may have written any text into the status, for example a path of the API server. So only
    # names of worker pods of this resource count.
    return {
        rank.pod: rank
        for group in status.groups
        for rank in group.members
        if parse_worker_name(owner, rank.pod) is not None
    }


def _is_orphan(stored: dict[str, object], key: ResourceKey) -> bool:
    """Reports whether a pod has the label of a resource and no controlling owner."""
    metadata = stored["metadata"]
    assert isinstance(metadata, dict)
    owners = metadata.get("ownerReferences") or ()
    return trim.label_key(stored) == key and not any(owner.get("controller") for owner in owners)


def _build_unknown_pod(resource: ResourceView, name: str, rank: RankEntry | None, why: str) -> PodRecord:
    """Builds the record of a pod that was not read, from its name and its status entry.

    Args:
        why: why the API server's answer is missing.
    """
    owner = Owner(key=resource.key, uid=resource.uid)
    labels = identity.labels_of_name(owner, name) or {}
    view = PodView(
        name=name,
        uid="",
        labels={label: value for label, value in labels.items() if value is not None},
        created=datetime.now(UTC),
        started=rank is not None and (rank.started or rank.ready),
        phase="Unknown",
        node=(rank.node or "") if rank is not None else "",
        unknown=why,
    )
    return PodRecord(view=view, key=resource.key, owner_uid=resource.uid, ip="", health_port=0)


def _report_error(error: BaseException) -> None:
    """Logs an error of a request. `find` handles errors of the API server."""
    if isinstance(error, UnreadableError):
        logger.warning("the operator ignores a pod that it cannot read: %s. Correct the pod", error)
    elif not isinstance(error, ApiError):
        logger.error(
            "cannot read a pod, because of a defect of the operator. Report it, with this log", exc_info=error
        )
