"""State that one decision on a resource leaves to the next decision: refusals and unanswered requests."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from heteroinfer_operator.cluster import Action, Manifest, Refusal, ResourceView
from heteroinfer_operator.kube.paths import POD, NamespacedName
from heteroinfer_operator.kube.unmade_pods import NeverCreatedPods
from heteroinfer_operator.reconcile.budget import Budget, Spending
from heteroinfer_operator.reconcile.refusals import ActionPermits, KindAndName, retry_revisions_now

WRITES_AT_ONCE: Final = 16
"""At most this many creates and applies of one resource run at the same time, so that one slow webhook cannot
block others."""
STATUS_RETRY_S: Final = 1.0
"""Pause between two attempts to write a status while the API server has not answered the first attempt."""
CONSECUTIVE_WITHIN: Final = timedelta(seconds=60)
"""Two identical writes count as consecutive if they are less than this apart."""
MAX_RESTORATIONS: Final = 5
"""Consecutive identical writes until the operator reports a conflict with another writer.

Below this number, the operator repairs manual changes of users without a report.
"""


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request that the API server has not answered.

    Attributes:
        epoch: epoch of the pod in a create request, or "".
    """

    task: asyncio.Task[object]
    scopes: frozenset[str] = frozenset()
    epoch: str = ""


@dataclass(slots=True)
class RepeatedWrites:
    """Counts how often in a row each child was written with the same content, or deleted.

    If another controller wants other content, it follows each write of the operator with its own write.
    Without a bound, each of the two would write 25 to 40 times a second.
    """

    _last_writes: dict[tuple[str, str, bool], tuple[int, datetime, int]] = field(default_factory=dict)
    """Hash of the last write, its time and the count, by kind, name and whether the write is a deletion."""

    def count_write(self, kind: str, name: str, manifest: Manifest | None, now: datetime) -> bool:
        """Counts a write or a deletion. Returns whether at least MAX_RESTORATIONS equal writes came in a row.

        Equal writes in a row show a conflict: the operator writes an object only if the object differs from
        its manifest, so another client has undone each earlier write.

        Args:
            manifest: content of the object that is written; None for a deletion.
        """
        content_hash = hash(json.dumps(manifest, sort_keys=True))
        self._last_writes = {
            key: (last_hash, written_at, count)
            for key, (last_hash, written_at, count) in self._last_writes.items()
            if abs(now - written_at) < CONSECUTIVE_WITHIN  # `abs`: someone may have set the clock back
        }
        key = kind, name, manifest is None
        last_hash, _, count = self._last_writes.get(key, (None, now, 0))
        count = count + 1 if last_hash == content_hash else 1
        self._last_writes[key] = content_hash, now, count
        return count >= MAX_RESTORATIONS


@dataclass(slots=True)
class StatusAttempts:
    """The unanswered attempts to write a resource's status: the first and the newest.

    All attempts name the same version of the resource, so the API server stores at most one. Two attempts
    suffice: if the API server is slow, the first attempt succeeds soonest. After an outage, the newest
    attempt succeeds soonest.
    """

    _attempts: list[tuple[float, asyncio.Task[object]]] = field(default_factory=list)

    @property
    def has_pending(self) -> bool:
        """Whether the API server may still store an attempt."""
        return any(not task.done() for _, task in self._attempts)

    def wait_s(self) -> float:
        """Returns the seconds until the next attempt may start. Forgets attempts that have ended."""
        self._attempts = [(sent_s, task) for sent_s, task in self._attempts if not task.done()]
        if not self._attempts:
            return 0.0
        newest_sent_s, _ = self._attempts[-1]
        return max(0.0, newest_sent_s + STATUS_RETRY_S - asyncio.get_running_loop().time())

    def add(self, task: asyncio.Task[object]) -> None:
        """Adds a new attempt, and cancels all earlier attempts except the first."""
        for _, replaced_task in self._attempts[1:]:
            replaced_task.cancel()
        self._attempts = [*self._attempts[:1], (asyncio.get_running_loop().time(), task)]

    def cancel(self, *, kept_task: asyncio.Task[object] | None = None) -> None:
        """Cancels all attempts except `kept_task`."""
        for _, task in self._attempts:
            if task is not kept_task:
                task.cancel()


def _epoch_name(pod: str) -> str:
    """Returns the part of a worker pod's name that all pods of its epoch share."""
    return pod.rpartition("-")[0]


@dataclass(slots=True)
class ResourceMemory:
    """The operator's notes about one resource between decisions, as long as the resource has this uid.

    Attributes:
        generation: generation of the spec at the last decision.
        never_created: pods that the operator decided to create and that no answer or watch has shown yet.
        pending_requests: unanswered requests, by object.
        slots: limits the creates and applies that run at the same time.
        reservations: capacity reserved for the pods of the last decision.
        reserved_pods: names of the pods of the last decision.
    """

    uid: str
    generation: int
    permits: ActionPermits
    repeated_writes: RepeatedWrites = field(default_factory=RepeatedWrites)
    budget: Budget = field(default_factory=Budget)
    never_created: NeverCreatedPods = field(default_factory=NeverCreatedPods)
    pending_requests: dict[KindAndName, PendingRequest] = field(default_factory=dict)
    status_attempts: StatusAttempts = field(default_factory=StatusAttempts)
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(WRITES_AT_ONCE))
    reservations: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    reserved_pods: frozenset[NamespacedName] = frozenset()

    @classmethod
    def for_new_resource(cls, resource: ResourceView, report_wait: Callable[[str], None]) -> "ResourceMemory":
        """Returns the memory of a resource that this process sees for the first time.

        Args:
            report_wait: called with the kind of each action that must wait for the budget.
        """
        permits = ActionPermits(resource.key.name, (), datetime.now(UTC))
        return cls(resource.uid, resource.generation, permits, budget=Budget(report=report_wait))

    def refusals(self, resource: ResourceView) -> tuple[Refusal, ...]:
        """Returns the refusals that the next decision must respect.

        After a change of the spec, only the refusals of revisions stay, and the next attempt is due now.
        """
        known = tuple(self.permits.known.values())
        is_spec_changed = resource.generation != self.generation
        return retry_revisions_now(known, datetime.now(UTC)) if is_spec_changed else known

    def unsent_pods(self, existing: Iterable[str]) -> frozenset[NamespacedName]:
        """Returns the pods of the last decision whose epochs have no pod yet, and no request for a pod.

        No pod is created before the status is written, and that write may have to wait, for example for its
        budget. The next decision plans nodes for such epochs again.

        Args:
            existing: names of the resource's pods.
        """
        requested = {name for kind, name in self.pending_requests if kind == POD.name}
        begun_epochs = {_epoch_name(pod) for pod in (*existing, *requested)}
        return frozenset(pod for pod in self.reserved_pods if _epoch_name(pod.name) not in begun_epochs)

    def begin_decision(
        self, resource: ResourceView, refusals: tuple[Refusal, ...], actions: Sequence[Action]
    ) -> ActionPermits:
        """Prepares the memory for the actions of a new decision.

        Returns:
            The permits, which decide for each action whether it may run now.
        """
        if resource.generation != self.generation:  # other content is wanted, so the counts begin again
            self.repeated_writes = RepeatedWrites()
        self.generation = resource.generation
        now = datetime.now(UTC)
        spending = Spending(self.budget, resource, actions, now)
        self.permits = ActionPermits(resource.key.name, refusals, now, spending)
        return self.permits

    def cancel(self) -> None:
        """Cancels unanswered requests and ends reservations, because the resource is gone."""
        self.status_attempts.cancel()
        self.reservations.close()
        for request in self.pending_requests.values():
            request.task.cancel()
