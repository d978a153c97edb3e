"""Polls running pods that lost the label or owner by which the operator watches them.

To a watch such pods are gone.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
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
from heteroinfer_operator.manifests.identity import Owner, find_place

logger = logging.getLogger(__name__)

LOOK_AGAIN_S: Final = 1.0
"""Interval of reconciles while a resource has such pods, because no watch shows their changes."""
PATIENCE_S: Final = 0.25
"""How long a reconcile waits for the API server. Most answers arrive within this time."""


Question: TypeAlias = asyncio.Task[PodRecord | None]


@dataclass(slots=True)
class _Known:
    """Knowledge about the pods of one resource.

    Attributes:
        uid: uid of the resource, since a new resource may get the same name.
        uids: last seen uid of each pod, by name. It identifies a pod without label and owner.
        there: names of existing pods that no watch shows.
        gone: names of pods that do not exist according to the API server. They are not requested again.
        questions: running requests, by pod name.
    """

    uid: str
    uids: dict[str, str] = field(default_factory=dict)
    there: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    questions: dict[str, Question] = field(default_factory=dict)

    def forget_questions(self, *, but: Collection[str] = ()) -> None:
        """Cancels requests whose answers are no longer needed. Their old answers must not be used later."""
        for name in self.questions.keys() - set(but):
            self.questions.pop(name).cancel()


class UnlabelledPods:
    """Finds pods of a resource that exist although no watch shows them any more.

    Use from one event loop.

    Args:
        wake: called with a resource once a request is answered after the reconcile stopped waiting.
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
        self._known: dict[ResourceKey, _Known] = {}

    async def find(
        self, resource: ResourceView, status: HeteroInferenceStatus, shown: Sequence[PodRecord]
    ) -> list[PodRecord]:
        """Returns the pods of a resource that no watch shows.

        Requests each pod that the status lists and the caches lack, once. Requests a pod that was found
        before each time, until it is gone. A pod is `unknown` while the API server does not answer.

        Args:
            shown: pods that the watches show.
        """
        key, seen = resource.key, {pod.view.name for pod in shown}
        known = self._known.get(key)
        if known is None or known.uid != resource.uid:
            self.forget(key)
            known = self._known[key] = _Known(resource.uid)
        owner = Owner(key=key, uid=resource.uid)
        # Others may have written any text into the status, for example a path of the API server.
        said = {
            rank.pod: rank
            for group in status.groups
            for rank in group.members
            if find_place(owner, rank.pod) is not None
        }
        there = known.there - seen
        known.uids |= {pod.view.name: pod.view.uid for pod in shown}
        known.uids = {name: uid for name, uid in known.uids.items() if name in said or name in seen | there}
        gone = (known.gone & said.keys()) - seen - there
        asked = sorted((said.keys() - seen - gone) | there)
        known.forget_questions(but=asked)
        await self._request_pods(resource, known, asked)
        answers = (_pod_from_answer(resource, known, name, said.get(name)) for name in asked)
        pods = [found for found in answers if found is not None]
        known.there = frozenset(pod.view.name for pod in pods)
        known.gone = (gone | set(asked) - known.there) & said.keys()
        return pods

    async def _request_pods(self, resource: ResourceView, known: _Known, names: Sequence[str]) -> None:
        """Requests pods and waits for patience_s. A later answer wakes the resource."""

        def answered(question: Question) -> None:
            if not question.cancelled():
                self._wake(resource.key)

        asked = []
        for name in names:
            if name not in known.questions:
                work = self._find_one(resource, name, known.uids.get(name))
                known.questions[name] = start_task(work, name=f"pod {name}", failed=_report)
                asked.append(known.questions[name])
        _, late = await asyncio.wait(asked, timeout=self._patience_s) if asked else ((), ())
        for question in late:
            question.add_done_callback(answered)

    async def _find_one(self, resource: ResourceView, name: str, uid: str | None) -> PodRecord | None:
        """Reads one pod; returns None if it does not exist or is not ours.

        Raises:
            ApiError: the API server refused or did not answer.
        """
        try:
            stored = await self._server.ask(POD.path(resource.key.namespace, name))
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        owner = trim.owner_uid(stored)
        if owner == resource.uid:
            return trim.pod_record(stored, key=resource.key)
        is_ours = stored["metadata"]["uid"] == uid if uid else _is_orphan(stored, resource.key)
        if not is_ours or (owner and not uid):
            return None
        return trim.orphan_record(stored, key=resource.key, owner_uid=resource.uid)

    def note_met(self, key: ResourceKey, name: str) -> None:
        """Notes a pod that another component found without its label."""
        if (known := self._known.get(key)) is not None:
            known.there |= {name}

    def are_there(self, key: ResourceKey) -> bool:
        """Returns whether the last call of `find` returned pods, or `note_met` noted one since."""
        return key in self._known and bool(self._known[key].there)

    def forget(self, key: ResourceKey) -> None:
        """Drops the state of a resource that is gone."""
        if (known := self._known.pop(key, None)) is not None:
            known.forget_questions()


def _pod_from_answer(
    resource: ResourceView, known: _Known, name: str, rank: RankEntry | None
) -> PodRecord | None:
    question = known.questions[name]
    if not question.done():
        return _record_from_status(resource, name, rank, "the API server has not answered yet")
    del known.questions[name]
    if question.cancelled():
        return _record_from_status(resource, name, rank, "the operator cancelled its request")
    error = question.exception()
    return question.result() if error is None else _record_from_status(resource, name, rank, str(error)[:300])


def _is_orphan(stored: dict[str, object], key: ResourceKey) -> bool:
    """Returns whether a pod has our label and no controlling owner."""
    metadata = stored["metadata"]
    assert isinstance(metadata, dict)
    owners = metadata.get("ownerReferences") or ()
    return trim.label_key(stored) == key and not any(owner.get("controller") for owner in owners)


def _record_from_status(resource: ResourceView, name: str, rank: RankEntry | None, why: str) -> PodRecord:
    """Builds the record of a pod from its name and its status entry alone.

    Args:
        why: why the API server's answer is missing.
    """
    owner = Owner(key=resource.key, uid=resource.uid)
    labels = identity.named_labels(owner, name) or {}
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


def _report(error: BaseException) -> None:
    if not isinstance(error, ApiError):  # `find` handles ApiError
        logger.error("cannot read a pod: a defect of the operator. Report it", exc_info=error)
