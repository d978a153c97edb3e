"""What running leaders say of their groups, over HTTP."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.group_key import EpochKey
from heteroinfer_contract.group_report import GroupReport
from heteroinfer_contract.model_fetch import FetchProgress
from heteroinfer_contract.report_access import CHALLENGE_LIFE_S, ReportReader
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.kube.trim import PodRecord
from heteroinfer_operator.manifests.group_key_secret import group_key_secret, key_of
from heteroinfer_operator.manifests.identity import GroupRef, Owner
from heteroinfer_operator.report_client import NO_ANSWER, ReportClient, is_reached, is_unreached

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 0.5
UNREADY_TIMEOUT_S: Final = 0.2
"""For the leader of a group that is not Ready, which may be failing: the decision must not wait for it."""
KEEP_S: Final = 10.0
SAY_AGAIN_S: Final = 600.0
"""A leader that makes no sense is reported of so often."""
ASK_AGAIN_S: Final = 1.0
"""A leader that answered before and cannot be reached is asked so often, at first."""
SURE_AFTER_S: Final = 5.0
"""After so long without a connection, a leader is asked once in KEEP_S again."""
SURE_TRIES: Final = 3
"""Connections in a row that fail before a leader counts as silent: one lost packet says nothing."""
WATCH_S: Final = 1.0
"""Interval of the connections by which a leader that answered before is tried, without a question."""
MOST_TRIED: Final = 200
"""Most leaders that are tried within one WATCH_S; if there are more, they take turns."""
TRY_S: Final = 0.3
"""Time for one such connection: SURE_TRIES of them and WATCH_S are less than 2 s."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a leader said, or that it let the time pass (`silent`), or took no connection (`unreached`).

    `ready`: whether its group was Ready when it was asked; once it is, an earlier answer does not count.
    """

    at_s: float
    status: GroupReport | None
    silent: bool = False
    unreached: bool = False
    ready: bool = True


@dataclass(frozen=True, slots=True)
class _Silence:
    """Since when no connection to a leader has succeeded, and how many have failed."""

    since_s: float
    tries: int


class LeaderClient:
    """Asks the leaders of groups, each at most once in KEEP_S.

    A leader that does not answer gives nothing: readiness is judged by pods, this only adds
    progress and step times.

    Args:
        operator_key: of which groups' keys are made; without it leaders do not say whose they are.
        clock: seconds that never go back.
    """

    def __init__(
        self, operator_key: bytes | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._operator_key = operator_key
        self._clock = clock
        self._readers: dict[str, tuple[float, ReportReader]] = {}
        self._answers: dict[str, _Answer] = {}
        self._answered: dict[str, ResourceKey] = {}
        self._watched: dict[str, PodRecord] = {}
        self._silences: dict[str, _Silence] = {}
        self._ignored: dict[str, float] = {}
        self._nonsense: list[tuple[ResourceKey, str]] = []
        self._client = ReportClient()

    async def close(self) -> None:
        """Closes all connections."""
        await self._client.close()

    async def observe(self, pods: Iterable[PodRecord], *, anew: bool = False) -> dict[int, GroupReport]:
        """Returns by group index what each leader says of its group.

        The leader of a group that has lost a pod is not asked: it may not answer any more, and
        the decision about the group must not wait for that. One whose pods are not Ready is
        asked anew each time, and not for long: it may sleep, which only it can tell. One that
        let the time pass is not waited for again within KEEP_S: where pods cannot be reached at
        all, a reconcile must not wait for each of them. With `anew` each leader is asked again after
        ASK_AGAIN_S, since nobody watches the pods.
        """
        known = tuple(pods)
        ended = {_group(pod) for pod in known if pod.view.ended}
        unready = {_group(pod) for pod in known if not pod.view.ready}
        leaders = {
            index: pod for pod in known if (index := _led_group(pod)) is not None and _group(pod) not in ended
        }
        self._forget_old()
        answers = await asyncio.gather(
            *(self._ask(pod, ready=_group(pod) not in unready, anew=anew) for pod in leaders.values())
        )
        return {index: status for index, status in zip(leaders, answers, strict=True) if status is not None}

    def silences(self, pods: Iterable[PodRecord]) -> dict[tuple[int, int], float]:
        """Returns by group index and epoch for how many seconds no connection to its leader has succeeded.

        Names only leaders that answered this operator before: where pods cannot be reached at all, that says
        nothing of them. 0 until SURE_TRIES connections have failed; a busy leader still accepts connections.
        """
        found: dict[tuple[int, int], float] = {}
        for pod in pods:
            index, silence = _led_group(pod), self._silences.get(pod.view.uid)
            epoch = pod.view.labels.get(names.LABEL_EPOCH, "")
            if index is not None and silence is not None and epoch.isdigit():
                sure = silence.tries >= SURE_TRIES
                found[index, int(epoch)] = self._clock() - silence.since_s if sure else 0.0
        return found

    async def watch(self, changed: Callable[[ResourceKey], None]) -> None:
        """Connects to the leaders of Ready groups that answered before, again and again, until cancelled.

        An idle group sends nothing. If its only node loses power, Kubernetes reports that up to 50 s later,
        and nothing else shows it. `changed` gets the resource of a leader that can no longer be reached, or
        can be again.
        """
        while True:
            leaders = list(self._watched.values())
            for first in range(0, max(len(leaders), 1), MOST_TRIED):
                tried = leaders[first : first + MOST_TRIED]
                await asyncio.gather(asyncio.sleep(WATCH_S), *(self._try(pod, changed) for pod in tried))

    async def _try(self, pod: PodRecord, changed: Callable[[ResourceKey], None]) -> None:
        uid, tried_s = pod.view.uid, self._clock()
        for _ in range(SURE_TRIES):
            if await is_reached(pod.ip, pod.health_port, timeout_s=TRY_S):
                if self._silences.pop(uid, None) is not None:
                    self._answers.pop(uid, None)
                    changed(pod.key)
                return
        before = self._silences.get(uid, _Silence(tried_s, 0))
        if uid in self._watched and before.tries < SURE_TRIES:
            self._silences[uid] = _Silence(before.since_s, SURE_TRIES)
            self._answers[uid] = _Answer(self._clock(), None, unreached=True)
            changed(pod.key)

    def watch_only(self, key: ResourceKey, pods: Iterable[PodRecord]) -> None:
        """Watches only the leaders of the resource's Ready groups; `pods` is empty if it is gone."""
        known = {pod.view.uid: pod for pod in pods}
        unready = {_epoch(pod) for pod in known.values() if not pod.view.ready}
        self._answered = {uid: of for uid, of in self._answered.items() if of != key or uid in known}
        self._watched = {uid: pod for uid, pod in self._watched.items() if pod.key != key}
        for uid, pod in known.items():
            if uid in self._answered and _led_group(pod) is not None and _epoch(pod) not in unready:
                self._watched[uid] = pod

    def _note(self, pod: PodRecord, asked_s: float, answer: _Answer) -> None:
        uid = pod.view.uid
        if answer.status is not None:
            self._answered[uid] = pod.key
            if answer.ready:
                self._watched[uid] = pod
        if not answer.unreached:
            self._silences.pop(uid, None)
        elif uid in self._answered:
            before = self._silences.get(uid, _Silence(asked_s, 0))
            self._silences[uid] = _Silence(before.since_s, before.tries + 1)

    def _is_due(self, uid: str, kept: _Answer) -> bool:
        """Returns whether a leader that cannot be reached is asked again before its answer is KEEP_S old."""
        silence, now = self._silences.get(uid), self._clock()
        if silence is None or now - silence.since_s > SURE_AFTER_S:
            return False
        return now - kept.at_s >= ASK_AGAIN_S

    def _forget_old(self) -> None:
        oldest = self._clock() - KEEP_S
        self._answers = {uid: answer for uid, answer in self._answers.items() if answer.at_s > oldest}
        self._readers = {
            uid: (at_s, reader)
            for uid, (at_s, reader) in self._readers.items()
            if at_s > self._clock() - CHALLENGE_LIFE_S
        }
        recent = self._clock() - SAY_AGAIN_S
        self._silences = {uid: each for uid, each in self._silences.items() if uid in self._answered}
        self._ignored = {uid: at_s for uid, at_s in self._ignored.items() if at_s > recent}

    async def _ask(self, pod: PodRecord, *, ready: bool, anew: bool) -> GroupReport | None:
        kept = self._answers.get(pod.view.uid)
        if kept is not None and kept.ready is ready and (ready or kept.silent):
            old = anew and self._clock() - kept.at_s >= ASK_AGAIN_S
            if not old and not self._is_due(pod.view.uid, kept):
                return kept.status
        asked_s = self._clock()
        answer = await self._fetch(pod, ready=ready)
        self._note(pod, asked_s, answer)
        if ready or answer.silent:
            self._answers[pod.view.uid] = answer
        return answer.status

    async def observe_fetch(self, pods: Iterable[PodRecord]) -> FetchProgress | None:
        """Returns what the pod that fetches the model says now, or None while none does."""
        for pod in pods:
            fetches = pod.view.labels.get(names.LABEL_COMPONENT) == names.COMPONENT_FETCH
            if fetches and pod.view.started and not pod.view.ended and pod.ip and pod.health_port:
                try:
                    return await self._client.read_fetch(pod.ip, pod.health_port, timeout_s=TIMEOUT_S)
                except NO_ANSWER as error:
                    logger.debug("%s: pod %s gave no progress: %r", pod.key, pod.view.name, error)
        return None

    async def _fetch(self, pod: PodRecord, *, ready: bool) -> _Answer:
        _, reader = self._readers.get(pod.view.uid, (0.0, None))
        reader = reader or ReportReader(self._key_of(pod))
        self._readers[pod.view.uid] = (self._clock(), reader)
        try:
            limit_s = TIMEOUT_S if ready else UNREADY_TIMEOUT_S
            status = await self._client.read_group(pod.ip, pod.health_port, reader, timeout_s=limit_s)
            return _Answer(self._clock(), status, ready=ready)
        except NO_ANSWER as error:
            logger.debug("%s: pod %s gave no group status: %r", pod.key, pod.view.name, error)
            if isinstance(error, ContractError | UnicodeDecodeError):
                self._note_nonsense(pod, error)
            silent, unreached = isinstance(error, TimeoutError), is_unreached(error)
            return _Answer(self._clock(), None, silent=silent, unreached=unreached, ready=ready)

    def _key_of(self, pod: PodRecord) -> EpochKey | None:
        index, epoch = _group(pod), pod.view.labels.get(names.LABEL_EPOCH, "")
        if not pod.view.key_secret or not index.isdigit() or not epoch.isdigit():
            return None
        group = GroupRef(owner=Owner(key=pod.key, uid=pod.owner_uid), index=int(index))
        key = key_of(self._operator_key, group)
        # Another operator's, if this one's own was made anew: that group says less until its next epoch.
        return (
            key.of_epoch(int(epoch)) if key and group_key_secret(group, key) == pod.view.key_secret else None
        )

    def _note_nonsense(self, pod: PodRecord, error: Exception) -> None:
        if pod.view.uid not in self._ignored:
            self._ignored[pod.view.uid] = self._clock()
            text = f"pod {pod.view.name}: what it says of its group is ignored: {error}"
            self._nonsense.append((pod.key, text))

    def take_nonsense(self, key: ResourceKey) -> list[str]:
        """Returns in words which leaders of a resource said what is no report; each once in a while."""
        found = [text for of, text in self._nonsense if of == key]
        self._nonsense = [(of, text) for of, text in self._nonsense if of != key]
        return found


def _group(pod: PodRecord) -> str:
    return pod.view.labels.get(names.LABEL_GROUP, "")


def _epoch(pod: PodRecord) -> tuple[str, str]:
    return _group(pod), pod.view.labels.get(names.LABEL_EPOCH, "")


def _led_group(pod: PodRecord) -> int | None:
    leads = pod.view.labels.get(names.LABEL_LEADER) == "true"
    index = _group(pod)
    return int(index) if leads and pod.ip and pod.health_port and index.isdigit() else None
