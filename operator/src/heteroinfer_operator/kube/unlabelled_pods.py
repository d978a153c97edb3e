"""Pods that run on without the label or owner by which they are watched: to a watch they are gone."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from heteroinfer_contract.background import start_task
from heteroinfer_operator.api import RankEntry, parse_status
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


@dataclass(frozen=True, slots=True)
class _Question:
    since_s: float
    task: asyncio.Task[PodRecord | None]


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
        self._owners: dict[ResourceKey, str] = {}
        """Uids of the resources that all below is known of: another may come under the name of one."""
        self._there: dict[ResourceKey, frozenset[str]] = {}
        self._gone: dict[ResourceKey, frozenset[str]] = {}
        """Names that the API server has said to be nobody's: it is not asked for them again."""
        self._uids: dict[ResourceKey, dict[str, str]] = {}
        """By name: the uid of each pod as last shown, by which it is known without label and owner."""
        self._questions: dict[tuple[ResourceKey, str], _Question] = {}

    async def find(self, resource: ResourceView, known: Sequence[PodRecord]) -> list[PodRecord]:
        """Returns such pods of a resource; a pod of which the API server says nothing now is `unknown`.

        Asked for are those alone that the status has and the caches lack, once each, and those that were
        met or found before, until they are gone.
        """
        key, seen = resource.key, {pod.view.name for pod in known}
        if self._owners.get(key) != resource.uid:
            self.forget(key)
            self._owners[key] = resource.uid
        owner = Owner(key=key, uid=resource.uid)
        groups = parse_status(resource.status).groups
        # Somebody may have written other texts: a path of the API server, say.
        said = {
            rank.pod: rank
            for group in groups
            for rank in group.members
            if find_place(owner, rank.pod) is not None
        }
        uids = self._uids.setdefault(key, {})
        uids |= {pod.view.name: pod.view.uid for pod in known}
        there = self._there.get(key, frozenset()) - seen
        self._uids[key] = {name: uid for name, uid in uids.items() if name in said or name in seen | there}
        gone = (self._gone.get(key, frozenset()) & said.keys()) - seen - there
        asked = sorted((said.keys() - seen - gone) | there)
        self._forget_questions(key, but=asked)
        questions = {name: self._ask(resource, name) for name in asked}
        await self._wait(questions)
        pods: list[PodRecord] = []
        for name, question in questions.items():
            found = self._answer(resource, name, question, said.get(name))
            pods += [found] if found is not None else []
        gone |= set(asked) - {pod.view.name for pod in pods}
        self._keep(self._gone, key, gone & said.keys())
        self._keep(self._there, key, frozenset(pod.view.name for pod in pods))
        return pods

    async def _wait(self, questions: dict[str, _Question]) -> None:
        open_questions = [each for each in questions.values() if not each.task.done()]
        if open_questions:
            until_s = max(each.since_s for each in open_questions) + self._patience_s
            left_s = max(0.0, until_s - time.monotonic())
            await asyncio.wait([each.task for each in open_questions], timeout=left_s)

    def _ask(self, resource: ResourceView, name: str) -> _Question:
        at = resource.key, name
        if at not in self._questions:
            work = self._find_one(resource, name)
            task = start_task(work, name=f"pod {name}", failed=_report)
            self._questions[at] = question = _Question(time.monotonic(), task)
            task.add_done_callback(lambda _: self._answered(at, question))
        return self._questions[at]

    def _answered(self, at: tuple[ResourceKey, str], question: _Question) -> None:
        """Wakes the resource if no reconcile waited for the answer."""
        if time.monotonic() - question.since_s > self._patience_s and self._questions.get(at) is question:
            self._wake(at[0])

    def _answer(
        self, resource: ResourceView, name: str, question: _Question, rank: RankEntry | None
    ) -> PodRecord | None:
        if not question.task.done():
            return _unknown(resource, name, rank, "the API server has not answered yet")
        self._questions.pop((resource.key, name), None)
        if question.task.cancelled():
            return _unknown(resource, name, rank, "the question was given up")
        error = question.task.exception()
        if error is None:
            return question.task.result()
        return _unknown(resource, name, rank, str(error)[:300])

    async def _find_one(self, resource: ResourceView, name: str) -> PodRecord | None:
        """Returns such a pod; None if there is none of ours; raises ApiError."""
        try:
            stored = await self._server.ask(POD.path(resource.key.namespace, name))
        except ApiError as error:
            if error.status == NOT_FOUND:
                return None
            raise
        owner = trim.owner_uid(stored)
        uid = self._uids.get(resource.key, {}).get(name)
        if owner == resource.uid:
            return trim.pod_record(stored, key=resource.key)
        is_ours = stored["metadata"]["uid"] == uid if uid else _is_orphan(stored, resource.key)
        if not is_ours or (owner and not uid):
            return None
        return trim.orphan_record(stored, key=resource.key, owner_uid=resource.uid)

    def note_met(self, key: ResourceKey, name: str) -> None:
        """Takes in that such a pod was come upon otherwise."""
        self._keep(self._there, key, self._there.get(key, frozenset()) | {name})

    def are_there(self, key: ResourceKey) -> bool:
        """Returns whether a resource has such pods, as last looked."""
        return key in self._there

    def forget(self, key: ResourceKey) -> None:
        """Takes in that a resource is gone."""
        self._keep(self._there, key, frozenset())
        self._keep(self._gone, key, frozenset())
        self._uids.pop(key, None)
        self._owners.pop(key, None)
        self._forget_questions(key)

    def _forget_questions(self, key: ResourceKey, *, but: Sequence[str] = ()) -> None:
        """Gives up questions that nobody has any more: a later one may not get their old answers."""
        for at in [each for each in self._questions if each[0] == key and each[1] not in but]:
            self._questions.pop(at).task.cancel()

    @staticmethod
    def _keep(kept: dict[ResourceKey, frozenset[str]], key: ResourceKey, found: frozenset[str]) -> None:
        if found:
            kept[key] = found
        else:
            kept.pop(key, None)


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
