"""State that one decision on a resource leaves to the next: refusals and unanswered requests."""

import asyncio
import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from heteroinfer_operator.cluster import Action, Manifest, Refusal, ResourceView
from heteroinfer_operator.kube.unmade_pods import UnmadePods
from heteroinfer_operator.reconcile.budget import Budget, Spending
from heteroinfer_operator.reconcile.refusals import Acting, Subject, asked_anew

WRITES_AT_ONCE: Final = 16
"""At most this many creates and applies of one resource run at the same time, so that one slow webhook cannot
block others."""
STATUS_AGAIN_S: Final = 1.0
"""Pause between two attempts to write a status while the API server has not answered the first."""
WITHIN: Final = timedelta(seconds=60)
"""Two identical writes count as consecutive if they are less than this apart."""
MAX_RESTORATIONS: Final = 5
"""Consecutive identical writes until the operator reports a conflict with another writer.

Below this number it repairs manual changes of users without a report.
"""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A request that the API server has not answered.

    Attributes:
        epoch: epoch of the pod in a create request, or "".
    """

    task: asyncio.Task[object]
    scopes: frozenset[str] = frozenset()
    epoch: str = ""


@dataclass(slots=True)
class WrittenAgain:
    """Counts consecutive identical writes, or deletions, of each child.

    If another controller wants other content, it answers each of our writes with its own. Without a bound the
    two write 25 to 40 times a second.
    """

    _written: dict[tuple[str, str, bool], tuple[int, datetime, int]] = field(default_factory=dict)
    """By kind, name and whether it is a deletion: hash of the last write, its time, and the count."""

    def note(self, kind: str, name: str, manifest: Manifest | None, now: datetime) -> bool:
        """Counts a write; returns whether others undo it each time.

        Args:
            manifest: None for a deletion.
        """
        written = hash(json.dumps(manifest, sort_keys=True))
        self._written = {key: each for key, each in self._written.items() if abs(now - each[1]) < WITHIN}
        key = kind, name, manifest is None
        before, _, times = self._written.get(key, (None, now, 0))
        times = times + 1 if before == written else 1
        self._written[key] = written, now, times
        return times >= MAX_RESTORATIONS


@dataclass(slots=True)
class StatusTries:
    """The unanswered attempts to write a resource's status: the first and the newest.

    All attempts name the same version of the resource, so the API server stores at most one. The first
    attempt may be about to succeed at a slow API server. An API server that was away answers the newest at
    once.
    """

    _tries: list[tuple[float, asyncio.Task[object]]] = field(default_factory=list)

    @property
    def are_under_way(self) -> bool:
        """Whether the API server may still store an attempt."""
        return any(not task.done() for _, task in self._tries)

    def wait_s(self) -> float:
        """Returns the seconds until the next attempt may start."""
        self._tries = [each for each in self._tries if not each[1].done()]
        if not self._tries:
            return 0.0
        return max(0.0, self._tries[-1][0] + STATUS_AGAIN_S - asyncio.get_running_loop().time())

    def add(self, task: asyncio.Task[object]) -> None:
        """Adds a new attempt and cancels those between the first and this."""
        for _, between in self._tries[1:]:
            between.cancel()
        self._tries = [*self._tries[:1], (asyncio.get_running_loop().time(), task)]

    def cancel(self, *, but: asyncio.Task[object] | None = None) -> None:
        """Cancels all attempts except `but`."""
        for _, task in self._tries:
            if task is not but:
                task.cancel()


@dataclass(slots=True)
class Kept:
    """State of one resource between decisions, as long as it has this uid.

    Attributes:
        generation: generation of the spec at the last decision.
        unmade: pods that the operator decided to create and that never existed.
        under_way: unanswered requests, by object.
        slots: limits concurrent creates and applies.
        promises: capacity reserved for the pods of the last decision.
    """

    uid: str
    generation: int
    acting: Acting
    written: WrittenAgain = field(default_factory=WrittenAgain)
    budget: Budget = field(default_factory=Budget)
    unmade: UnmadePods = field(default_factory=UnmadePods)
    under_way: dict[Subject, UnderWay] = field(default_factory=dict)
    status_tries: StatusTries = field(default_factory=StatusTries)
    slots: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(WRITES_AT_ONCE))
    promises: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @classmethod
    def of(cls, resource: ResourceView, held_back: Callable[[str], None]) -> "Kept":
        """Builds the state of a resource that this process sees for the first time."""
        acting = Acting(resource.key.name, (), datetime.now(UTC))
        return cls(resource.uid, resource.generation, acting, budget=Budget(report=held_back))

    def refusals(self, resource: ResourceView) -> tuple[Refusal, ...]:
        """Returns the known refusals.

        After a change of the spec, returns those that still apply, due for another attempt at once.
        """
        known = tuple(self.acting.known.values())
        return known if resource.generation == self.generation else asked_anew(known, datetime.now(UTC))

    def begin(
        self, resource: ResourceView, refusals: tuple[Refusal, ...], actions: Sequence[Action]
    ) -> Acting:
        """Starts a decision; returns the object that decides which actions may run now."""
        if resource.generation != self.generation:
            self.written = WrittenAgain()
        self.generation = resource.generation
        now = datetime.now(UTC)
        spending = Spending(self.budget, resource, actions, now)
        self.acting = Acting(resource.key.name, refusals, now, spending)
        return self.acting

    def cancel(self) -> None:
        """Cancels all unanswered requests, because the resource is gone."""
        self.status_tries.cancel()
        self.promises.close()
        for each in self.under_way.values():
            each.task.cancel()
