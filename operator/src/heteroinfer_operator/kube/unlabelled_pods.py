"""Pods that run on without the label or owner by which they are watched: to a watch they are gone."""

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
"""No watch tells how such a pod fares."""
PATIENCE_S: Final = 0.25
"""How long a reconcile waits for the API server's answer: most come within it."""


Question: TypeAlias = asyncio.Task[PodRecord | None]


@dataclass(slots=True)
class _Known:
    """What is known of the pods of one resource.

    Attributes:
        uid: of the resource: another may come under its name.
        uids: by name: the uid of each pod as last shown, by which it is known without label and owner.
        there: names of pods that no watch shows.
        gone: names that the API server has said to be nobody's: it is not asked for them again.
        questions: under way, by name.
    """

    uid: str
    uids: dict[str, str] = field(default_factory=dict)
    there: frozenset[str] = frozenset()
    gone: frozenset[str] = frozenset()
    questions: dict[str, Question] = field(default_factory=dict)

    def forget_questions(self, *, but: Collection[str] = ()) -> None:
        """Gives up questions that nobody has any more: a later one may not get their old answers."""
        for name in self.questions.keys() - set(but):
            self.questions.pop(name).cancel()


class UnlabelledPods:
    """Pods of a resource that no watch shows any more, though they are there and its own.

    Use from one event loop.

    Args:
        wake: called with a resource once an answer comes that a reconcile did not wait for.
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
        """Returns such pods of a resource, beside those that the watches have `shown`.

        A pod of which the API server says nothing now is `unknown`. Asked for are those alone that the
        status has and the caches lack, once each, and those that were met or found before, until they are
        gone.
        """
        key, seen = resource.key, {pod.view.name for pod in shown}
        known = self._known.get(key)
        if known is None or known.uid != resource.uid:
            self.forget(key)
            known = self._known[key] = _Known(resource.uid)
        owner = Owner(key=key, uid=resource.uid)
        # Somebody may have written other texts: a path of the API server, say.
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
        await self._ask(resource, known, asked)
        answers = (_answer(resource, known, name, said.get(name)) for name in asked)
        pods = [found for found in answers if found is not None]
        known.there = frozenset(pod.view.name for pod in pods)
        known.gone = (gone | set(asked) - known.there) & said.keys()
        return pods

    async def _ask(self, resource: ResourceView, known: _Known, names: Sequence[str]) -> None:
        """Asks for pods, and waits a moment; an answer that comes later wakes the resource."""

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
        """Returns such a pod; None if there is none of ours; raises ApiError."""
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
        """Takes in that such a pod was come upon otherwise."""
        if (known := self._known.get(key)) is not None:
            known.there |= {name}

    def are_there(self, key: ResourceKey) -> bool:
        """Returns whether a resource has such pods, as last looked."""
        return key in self._known and bool(self._known[key].there)

    def forget(self, key: ResourceKey) -> None:
        """Takes in that a resource is gone."""
        if (known := self._known.pop(key, None)) is not None:
            known.forget_questions()


def _answer(resource: ResourceView, known: _Known, name: str, rank: RankEntry | None) -> PodRecord | None:
    question = known.questions[name]
    if not question.done():
        return _unknown(resource, name, rank, "the API server has not answered yet")
    del known.questions[name]
    if question.cancelled():
        return _unknown(resource, name, rank, "the question was given up")
    error = question.exception()
    return question.result() if error is None else _unknown(resource, name, rank, str(error)[:300])


def _is_orphan(stored: dict[str, object], key: ResourceKey) -> bool:
    """Returns whether a pod has our label and nobody controls it."""
    metadata = stored["metadata"]
    assert isinstance(metadata, dict)
    owners = metadata.get("ownerReferences") or ()
    return trim.label_key(stored) == key and not any(owner.get("controller") for owner in owners)


def _unknown(resource: ResourceView, name: str, rank: RankEntry | None, why: str) -> PodRecord:
    """Returns what is known of a pod that the API server says nothing of: its name."""
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
    if not isinstance(error, ApiError):  # `find` reads it
        logger.error("a question for a pod: a defect of the operator, please report it", exc_info=error)
