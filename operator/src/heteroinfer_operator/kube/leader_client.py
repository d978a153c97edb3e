"""What running leaders say of their groups, over HTTP."""

import asyncio
import errno
import logging
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import aiohttp

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
_CONNECT_SHARE: Final = 0.8
"""Of the time for an answer. The kernel accepts a connection however busy the leader itself is."""
MOST_BYTES: Final = 2**20
_NO_HEADERS: Final[Mapping[str, str]] = MappingProxyType({})
_OWN_FAULTS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors that this machine causes when it connects: they prove nothing about the leader."""
_NO_ANSWER: Final = (aiohttp.ClientError, TimeoutError, OSError, UnicodeDecodeError, ContractError)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a leader said, or that it let the time pass (`silent`), or took no connection (`unreached`).

    `ready`: whether its group was Ready when it was asked; once it is, an earlier answer does not count.
    """

    at_s: float
    status: GroupReport | None
    silent: bool
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
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Closes all connections."""
        if self._session is not None:
            await self._session.close()

    async def observe(self, pods: Iterable[PodRecord], *, anew: bool = False) -> dict[int, GroupReport]:
        """Returns by group index what each leader says of its group.

        The leader of a group that has lost a pod is not asked: it may not answer any more, and
        the decision about the group must not wait for that. One whose pods are not Ready is
        asked anew each time, and not for long: it may sleep, which only it can tell. One that
        let the time pass is not waited for again within KEEP_S: where pods cannot be reached at
        all, a reconcile must not wait for each of them.

        Args:
            pods: of a resource.
            anew: whether each leader is asked again after ASK_AGAIN_S, since nobody watches the pods.
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
        and nothing else shows it.

        Args:
            changed: called with the resource of a leader that can no longer be reached, or can be again.
        """
        while True:
            leaders = list(self._watched.values())
            for first in range(0, max(len(leaders), 1), MOST_TRIED):
                tried = leaders[first : first + MOST_TRIED]
                await asyncio.gather(asyncio.sleep(WATCH_S), *(self._try(pod, changed) for pod in tried))

    async def _try(self, pod: PodRecord, changed: Callable[[ResourceKey], None]) -> None:
        uid, tried_s = pod.view.uid, self._clock()
        for _ in range(SURE_TRIES):
            if await _is_reached(pod):
                if self._silences.pop(uid, None) is not None:
                    self._answers.pop(uid, None)
                    changed(pod.key)
                return
        before = self._silences.get(uid, _Silence(tried_s, 0))
        if uid in self._watched and before.tries < SURE_TRIES:
            self._silences[uid] = _Silence(before.since_s, SURE_TRIES)
            self._answers[uid] = _Answer(self._clock(), None, silent=False, unreached=True)
            changed(pod.key)

    def watch_only(self, key: ResourceKey, pods: Iterable[PodRecord]) -> None:
        """Watches only the leaders of the resource's Ready groups.

        Args:
            key: of the resource.
            pods: of the resource; none if it is gone.
        """
        known = {pod.view.uid: pod for pod in pods}
        unready = {_epoch(pod) for pod in known.values() if not pod.view.ready}
        self._answered = {uid: of for uid, of in self._answered.items() if of != key or uid in known}
        self._watched = {uid: pod for uid, pod in self._watched.items() if pod.key != key}
        for uid, pod in known.items():
            if uid in self._answered and _led_group(pod) is not None and _epoch(pod) not in unready:
                self._watched[uid] = pod

    def _note(self, pod: PodRecord, asked_s: float, answer: _Answer, *, ready: bool) -> None:
        uid = pod.view.uid
        if answer.status is not None:
            self._answered[uid] = pod.key
            if ready:
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
        answer = await self._fetch(pod, TIMEOUT_S if ready else UNREADY_TIMEOUT_S)
        self._note(pod, asked_s, answer, ready=ready)
        if ready or answer.silent:
            self._answers[pod.view.uid] = replace(answer, ready=ready)
        return answer.status

    async def observe_fetch(self, pods: Iterable[PodRecord]) -> FetchProgress | None:
        """Returns what the pod that fetches the model says now, or None while none does."""
        for pod in pods:
            fetches = pod.view.labels.get(names.LABEL_COMPONENT) == names.COMPONENT_FETCH
            if fetches and pod.view.started and not pod.view.ended and pod.ip and pod.health_port:
                try:
                    return FetchProgress.from_json((await self._get(pod, names.PATH_FETCH, TIMEOUT_S))[0])
                except _NO_ANSWER as error:
                    logger.debug("%s: pod %s gave no progress: %r", pod.key, pod.view.name, error)
        return None

    async def _fetch(self, pod: PodRecord, timeout_s: float) -> _Answer:
        try:
            async with asyncio.timeout(timeout_s):
                text = await self._get_report(pod, timeout_s)
            return _Answer(self._clock(), GroupReport.from_json(text), silent=False)
        except _NO_ANSWER as error:
            logger.debug("%s: pod %s gave no group status: %r", pod.key, pod.view.name, error)
            if isinstance(error, ContractError | UnicodeDecodeError):
                self._note_nonsense(pod, error)
            unreached = isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError)
            unreached = unreached and getattr(error, "errno", None) not in _OWN_FAULTS
            return _Answer(self._clock(), None, silent=isinstance(error, TimeoutError), unreached=unreached)

    async def _get_report(self, pod: PodRecord, timeout_s: float) -> str:
        """Returns what a leader says, whole if it takes its group's key; raises one of _NO_ANSWER."""
        _, reader = self._readers.get(pod.view.uid, (0.0, None))
        reader = reader or ReportReader(self._key_of(pod))
        self._readers[pod.view.uid] = (self._clock(), reader)
        text = ""
        for _ in range(2):
            text, headers = await self._get(pod, names.PATH_GROUP, timeout_s, reader.headers())
            whole = reader.read(headers, text)
            if whole is not None:
                return whole
        return text

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

    async def _get(
        self, pod: PodRecord, path: str, timeout_s: float, headers: Mapping[str, str] = _NO_HEADERS
    ) -> tuple[str, Mapping[str, str]]:
        """Returns what a pod's health port answers, and its headers; raises one of _NO_ANSWER."""
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        if self._session is None:
            # Pods are reached directly: no proxy of the environment, and no redirects below.
            # Each question has a connection of its own: a kept one would not tell that the node is gone.
            connector = aiohttp.TCPConnector(force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False)
        timeout = aiohttp.ClientTimeout(total=timeout_s, sock_connect=_CONNECT_SHARE * timeout_s)
        url = f"http://{host}:{pod.health_port}{path}"
        async with self._session.get(
            url, headers=headers, allow_redirects=False, timeout=timeout
        ) as response:
            response.raise_for_status()
            body = bytearray()
            async for piece in response.content.iter_any():  # read(n) gives what has arrived, not n bytes
                body += piece
                if len(body) > MOST_BYTES:
                    raise ContractError(f"got more than {MOST_BYTES} bytes, expected the report of a group")
            return body.decode(), response.headers


async def _is_reached(pod: PodRecord) -> bool:
    """Returns whether a pod's health port takes a connection, as the kernel does for a busy process too."""
    family = socket.AF_INET6 if ":" in pod.ip else socket.AF_INET
    try:
        connection = socket.socket(family, socket.SOCK_STREAM)
    except OSError:  # of this process: it says nothing of the leader
        return True
    with connection:
        connection.setblocking(False)
        try:
            async with asyncio.timeout(TRY_S):
                await asyncio.get_running_loop().sock_connect(connection, (pod.ip, pod.health_port))
        except TimeoutError:
            return _is_connected(connection)
        except (OSError, ValueError, OverflowError) as error:  # nobody listens, no address, no port
            return getattr(error, "errno", None) in _OWN_FAULTS
    return True


def _is_connected(connection: socket.socket) -> bool:
    """Returns whether a connection was made that this process, being busy, has not seen in time."""
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def _group(pod: PodRecord) -> str:
    return pod.view.labels.get(names.LABEL_GROUP, "")


def _epoch(pod: PodRecord) -> tuple[str, str]:
    return _group(pod), pod.view.labels.get(names.LABEL_EPOCH, "")


def _led_group(pod: PodRecord) -> int | None:
    leads = pod.view.labels.get(names.LABEL_LEADER) == "true"
    index = _group(pod)
    return int(index) if leads and pod.ip and pod.health_port and index.isdigit() else None
