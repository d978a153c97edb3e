"""Reads the reports of running leaders over HTTP."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.group_key import CleanupKey, EpochKey
from heteroinfer_contract.group_report import GroupReport
from heteroinfer_contract.model_fetch import FetchProgress
from heteroinfer_contract.report_access import CHALLENGE_LIFE_S, ReportReader
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.kube.trim import PodRecord
from heteroinfer_operator.manifests.group_key_secret import derive_group_key, group_key_secret_name
from heteroinfer_operator.manifests.identity import GroupRef, Owner
from heteroinfer_operator.reconcile.cache_use import find_token
from heteroinfer_operator.report_client import NO_ANSWER, ReportClient, is_reached, is_unreached

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 0.5
"""Timeout for the leader of a Ready group, and for the pod that downloads the model."""
UNREADY_TIMEOUT_S: Final = 0.2
"""Timeout for the leader of a group that is not Ready. A failing leader must not delay the decision."""
REPORT_VALID_S: Final = 10.0
"""How long a leader's report is used again. After that, the leader gets another request."""
INVALID_REPORT_PAUSE_S: Final = 600.0
"""Pause between two events about invalid reports of the same leader."""
FREQUENT_INTERVAL_S: Final = 1.0
"""Interval of requests to a leader that answered before and cannot be reached now, for FREQUENT_FOR_S."""
FREQUENT_FOR_S: Final = 5.0
"""After this time without a connection, a leader again gets only one request in each REPORT_VALID_S."""
TRIES_UNTIL_SILENT: Final = 3
"""Consecutive failed connections until a leader counts as silent. One lost packet proves nothing."""
TEST_EVERY_S: Final = 1.0
"""Interval of test connections to a leader that answered before. They send no request."""
MAX_TESTED_AT_ONCE: Final = 200
"""At most this many leaders get a test connection within TEST_EVERY_S. More leaders take turns."""
TRY_S: Final = 0.3
"""Timeout of a test connection. All tries of one test and TEST_EVERY_S together take less than 2 s."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """A leader's answer to a request, or the lack of an answer.

    Attributes:
        at_s: time of the answer or of the failure.
        status: the leader's report, or None.
        silent: whether the request timed out.
        unreached: whether the connection failed. A leader that accepts connections may still be silent.
        ready: whether all pods of the group were Ready at the time of the request. When this changes, an
            earlier answer is no longer valid.
    """

    at_s: float
    status: GroupReport | None
    silent: bool = False
    unreached: bool = False
    ready: bool = True


@dataclass(frozen=True, slots=True)
class _Silence:
    """Time of the first failed connection to a leader, and the number of failed connections since."""

    since_s: float
    tries: int

    @property
    def is_certain(self) -> bool:
        """Whether enough connections failed. One lost packet proves nothing."""
        return self.tries >= TRIES_UNTIL_SILENT


class LeaderClient:
    """Requests reports from the leaders of groups, at most once per REPORT_VALID_S each.

    A report adds only progress and step times. The pods show whether a group is Ready, so a missing report is
    harmless.

    Args:
        operator_key: key from which the groups' keys are derived. Without this key, leaders leave their
            identity out of reports.
        clock: monotonic clock, in seconds.
    """

    def __init__(
        self, operator_key: bytes | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._operator_key = operator_key
        self._clock = clock
        self._readers: dict[str, tuple[float, ReportReader]] = {}
        self._answers: dict[str, _Answer] = {}
        self._answered_before: dict[str, ResourceKey] = {}
        self._watched: dict[str, PodRecord] = {}
        """Leaders that get test connections, by the pod's uid."""
        self._silences: dict[str, _Silence] = {}
        self._reported_invalid: dict[str, float] = {}
        self._invalid_reports: list[tuple[ResourceKey, str]] = []
        self._client = ReportClient()

    async def close(self) -> None:
        await self._client.close()

    async def observe(
        self, pods: Iterable[PodRecord], *, pods_unwatched: bool = False
    ) -> dict[int, GroupReport]:
        """Returns the reports of the groups' leaders, by group index.

        - If a pod of a group has ended, the leader gets no request. It may no longer answer, and the decision
          about the group must not wait.
        - If a pod of a group is not Ready, the leader gets a request in each call, with a short timeout. The
          group may sleep, and only the leader reports that.
        - After a request that timed out, the leader gets no other request within REPORT_VALID_S. Otherwise,
          in a cluster in which the operator cannot reach pods, each reconcile would wait for all leaders.

        Args:
            pods_unwatched: whether the watch of the pods fails. Then a report is used again for only
                FREQUENT_INTERVAL_S instead of REPORT_VALID_S.
        """
        known = tuple(pods)
        ended_groups = {_group_label(pod) for pod in known if pod.view.ended}
        unready_groups = {_group_label(pod) for pod in known if not pod.view.ready}
        leaders = {
            index: pod
            for pod in known
            if (index := _led_group(pod)) is not None and _group_label(pod) not in ended_groups
        }
        self._forget_old()
        reports = await asyncio.gather(
            *(
                self._get_report(
                    pod, ready=_group_label(pod) not in unready_groups, pods_unwatched=pods_unwatched
                )
                for pod in leaders.values()
            )
        )
        return {index: report for index, report in zip(leaders, reports, strict=True) if report is not None}

    def silences(self, pods: Iterable[PodRecord]) -> dict[tuple[int, int], float]:
        """Returns the seconds without a successful connection to a leader, by group index and epoch.

        The value is 0 until TRIES_UNTIL_SILENT connections have failed. A busy leader is not silent, because
        it still accepts connections. The result contains only leaders that answered this operator before,
        because in some clusters the operator cannot reach any pod.
        """
        silences: dict[tuple[int, int], float] = {}
        for pod in pods:
            index, silence = _led_group(pod), self._silences.get(pod.view.uid)
            epoch = pod.view.labels.get(names.LABEL_EPOCH, "")
            if index is not None and silence is not None and epoch.isdigit():
                silences[index, int(epoch)] = self._clock() - silence.since_s if silence.is_certain else 0.0
        return silences

    async def test_connections(self, changed: Callable[[ResourceKey], None]) -> None:
        """Opens test connections to the leaders of Ready groups that answered before, until cancelled.

        Without these tests, only Kubernetes would report that the only node of an idle group has lost power,
        and only up to 50 s later.

        Args:
            changed: called with the resource of a leader that becomes unreachable, or reachable again.
        """
        while True:
            leaders = list(self._watched.values())
            # `max`, so that the loop also sleeps if there is no leader.
            for first in range(0, max(len(leaders), 1), MAX_TESTED_AT_ONCE):
                batch = leaders[first : first + MAX_TESTED_AT_ONCE]
                await asyncio.gather(
                    asyncio.sleep(TEST_EVERY_S), *(self._test_connection(pod, changed) for pod in batch)
                )

    async def _test_connection(self, pod: PodRecord, changed: Callable[[ResourceKey], None]) -> None:
        """Tests whether a leader accepts connections. Calls `changed` if its reachability changes.

        Tries up to TRIES_UNTIL_SILENT connections, each for TRY_S. A try takes TRY_S even if the connection
        is refused immediately. Otherwise all tries could fail within milliseconds, which is shorter than the
        shortest silence that the operator reports (`silent_leaders.MIN_SILENT_S`).
        """
        uid, started_s, loop = pod.view.uid, self._clock(), asyncio.get_running_loop()
        for _ in range(TRIES_UNTIL_SILENT):
            ends_s = loop.time() + TRY_S
            if await is_reached(pod.ip, pod.health_port, timeout_s=TRY_S):
                was_silent = self._silences.pop(uid, None) is not None
                if was_silent:
                    self._answers.pop(uid, None)  # so that the next reconcile requests a report
                    changed(pod.key)
                return
            await asyncio.sleep(ends_s - loop.time())
        # All tries failed. Report the silence once. A request may have failed earlier: then the silence began
        # with that request.
        silence = self._silences.get(uid, _Silence(started_s, 0))
        is_reported = silence.is_certain
        if uid in self._watched and not is_reported:
            self._silences[uid] = _Silence(silence.since_s, TRIES_UNTIL_SILENT)
            self._answers[uid] = _Answer(self._clock(), None, unreached=True)
            changed(pod.key)

    def limit_tests_to(self, key: ResourceKey, pods: Iterable[PodRecord]) -> None:
        """Limits the test connections for a resource to the leaders of its Ready groups that answered before.

        Args:
            pods: pods of the resource; empty if the resource is gone.
        """
        by_uid = {pod.view.uid: pod for pod in pods}
        unready_epochs = {_group_and_epoch(pod) for pod in by_uid.values() if not pod.view.ready}
        self._answered_before = {
            uid: owner for uid, owner in self._answered_before.items() if owner != key or uid in by_uid
        }
        self._watched = {uid: pod for uid, pod in self._watched.items() if pod.key != key}
        for uid, pod in by_uid.items():
            is_leader = _led_group(pod) is not None
            is_group_ready = _group_and_epoch(pod) not in unready_epochs
            if uid in self._answered_before and is_leader and is_group_ready:
                self._watched[uid] = pod

    def _record_answer(self, pod: PodRecord, requested_s: float, answer: _Answer) -> None:
        """Records whether a leader answered, and since when the leader cannot be reached.

        Args:
            requested_s: time of the request.
        """
        uid = pod.view.uid
        if answer.status is not None:
            self._answered_before[uid] = pod.key
            if answer.ready:
                self._watched[uid] = pod
        if not answer.unreached:
            self._silences.pop(uid, None)
        elif uid in self._answered_before:
            silence = self._silences.get(uid, _Silence(requested_s, 0))
            self._silences[uid] = _Silence(silence.since_s, silence.tries + 1)

    def _is_request_due(self, uid: str, cached: _Answer) -> bool:
        """Reports whether an unreachable leader gets a request now, although REPORT_VALID_S is not over."""
        silence, now = self._silences.get(uid), self._clock()
        if silence is None or now - silence.since_s > FREQUENT_FOR_S:
            return False
        return now - cached.at_s >= FREQUENT_INTERVAL_S

    def _forget_old(self) -> None:
        """Removes old answers, readers and notes about invalid reports, and silences of removed leaders."""
        now_s = self._clock()
        self._answers = {
            uid: answer for uid, answer in self._answers.items() if answer.at_s > now_s - REPORT_VALID_S
        }
        self._readers = {
            uid: (at_s, reader)
            for uid, (at_s, reader) in self._readers.items()
            if at_s > now_s - CHALLENGE_LIFE_S
        }
        self._silences = {uid: each for uid, each in self._silences.items() if uid in self._answered_before}
        self._reported_invalid = {
            uid: at_s for uid, at_s in self._reported_invalid.items() if at_s > now_s - INVALID_REPORT_PAUSE_S
        }

    async def _get_report(self, pod: PodRecord, *, ready: bool, pods_unwatched: bool) -> GroupReport | None:
        """Returns a leader's report: the cached report while it is valid, otherwise a new report.

        Returns None if the leader sent no valid report. Of a group that is not Ready, only a timeout is
        cached, because the state of such a group may change at any time.

        Args:
            ready: whether all pods of the group are Ready.
            pods_unwatched: whether the watch of the pods fails.
        """
        cached = self._answers.get(pod.view.uid)
        if cached is not None:
            # An answer is valid only while the group stays Ready, or stays unready after a timeout.
            is_valid = cached.ready is ready and (ready or cached.silent)
            is_outdated = pods_unwatched and self._clock() - cached.at_s >= FREQUENT_INTERVAL_S
            if is_valid and not is_outdated and not self._is_request_due(pod.view.uid, cached):
                return cached.status
        requested_s = self._clock()
        answer = await self._request_report(pod, ready=ready)
        self._record_answer(pod, requested_s, answer)
        if ready or answer.silent:
            self._answers[pod.view.uid] = answer
        return answer.status

    async def observe_fetch(
        self, pods: Iterable[PodRecord], may_confirm: Callable[[PodRecord], Awaitable[bool]]
    ) -> FetchProgress | None:
        """Returns the progress of the pod that fetches the model; None if no such pod runs or answers.

        The pod may ask whether it may remove old commits of the model from its cache. This method sends the
        confirmation if `may_confirm` returns True.

        Args:
            may_confirm: reports whether a pod's list of commits in use is complete now.
        """
        for pod in pods:
            is_fetch_pod = pod.view.labels.get(names.LABEL_COMPONENT) == names.COMPONENT_FETCH
            is_running = pod.view.started and not pod.view.ended
            if is_fetch_pod and is_running and pod.ip and pod.health_port:
                try:
                    progress, question = await self._client.read_fetch(
                        pod.ip, pod.health_port, timeout_s=TIMEOUT_S
                    )
                    token = self._find_token(pod, question)
                    if token is not None and await may_confirm(pod):
                        await self._client.allow_removal(pod.ip, pod.health_port, token, timeout_s=TIMEOUT_S)
                    return progress
                except NO_ANSWER as error:
                    logger.debug("%s: pod %s sent no valid progress: %r", pod.key, pod.view.name, error)
        return None

    def _find_token(self, pod: PodRecord, question: int | None) -> str | None:
        """Returns the token that confirms a fetch pod's question whether it may remove old commits.

        Returns None without a question, without the operator's key, and if the pod does not know the token.

        Args:
            question: number of the question.
        """
        if question is None or self._operator_key is None:
            return None
        return find_token(CleanupKey.of_operator(self._operator_key), pod.owner_uid, pod.view, question)

    async def _request_report(self, pod: PodRecord, *, ready: bool) -> _Answer:
        """Requests a report from a leader, and records an invalid report.

        Keeps the leader's `ReportReader`, which has the leader's challenge for the next request.
        """
        _, reader = self._readers.get(pod.view.uid, (0.0, None))
        reader = reader or ReportReader(self._epoch_key_of(pod))
        self._readers[pod.view.uid] = (self._clock(), reader)
        try:
            limit_s = TIMEOUT_S if ready else UNREADY_TIMEOUT_S
            status = await self._client.read_group(pod.ip, pod.health_port, reader, timeout_s=limit_s)
            return _Answer(self._clock(), status, ready=ready)
        except NO_ANSWER as error:
            logger.debug("%s: pod %s sent no valid report: %r", pod.key, pod.view.name, error)
            if isinstance(error, ContractError | UnicodeDecodeError):
                self._record_invalid_report(pod, error)
            silent, unreached = isinstance(error, TimeoutError), is_unreached(error)
            return _Answer(self._clock(), None, silent=silent, unreached=unreached, ready=ready)

    def _epoch_key_of(self, pod: PodRecord) -> EpochKey | None:
        """Returns the key that signs the reports of a pod's epoch, or None."""
        index, epoch = _group_label(pod), pod.view.labels.get(names.LABEL_EPOCH, "")
        if not pod.view.key_secret or not index.isdigit() or not epoch.isdigit():
            return None
        group = GroupRef(owner=Owner(key=pod.key, uid=pod.owner_uid), index=int(index))
        key = derive_group_key(self._operator_key, group)
        # If the operator's key was replaced, this pod still uses the Secret with the old key. Without a valid
        # key, the leader leaves its identity out of its reports until the group's next epoch.
        is_pods_key = key is not None and group_key_secret_name(group, key) == pod.view.key_secret
        return key.of_epoch(int(epoch)) if key and is_pods_key else None

    def _record_invalid_report(self, pod: PodRecord, error: Exception) -> None:
        """Stores a message about an invalid report, at most once per leader in INVALID_REPORT_PAUSE_S."""
        if pod.view.uid not in self._reported_invalid:
            self._reported_invalid[pod.view.uid] = self._clock()
            text = f"pod {pod.view.name}: the operator ignores this pod's report, which is invalid: {error}"
            self._invalid_reports.append((pod.key, text))

    def take_invalid_reports(self, key: ResourceKey) -> list[str]:
        """Returns and removes the messages about invalid reports of a resource's pods."""
        texts = [text for owner, text in self._invalid_reports if owner == key]
        self._invalid_reports = [(owner, text) for owner, text in self._invalid_reports if owner != key]
        return texts


def _group_label(pod: PodRecord) -> str:
    """Returns the group in a pod's labels, or ""."""
    return pod.view.labels.get(names.LABEL_GROUP, "")


def _group_and_epoch(pod: PodRecord) -> tuple[str, str]:
    """Returns the group and the epoch in a pod's labels; "" for a missing label."""
    return _group_label(pod), pod.view.labels.get(names.LABEL_EPOCH, "")


def _led_group(pod: PodRecord) -> int | None:
    """Returns the group index of a leader's pod; None for other pods and for pods without an address."""
    is_leader = pod.view.labels.get(names.LABEL_LEADER) == "true"
    index = _group_label(pod)
    return int(index) if is_leader and pod.ip and pod.health_port and index.isdigit() else None
