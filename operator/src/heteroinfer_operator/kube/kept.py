"""What one decision on a resource leaves to the next: refusals, and requests that are under way."""

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
"""Creates and applies of one resource: the others wait, so that one slow webhook does not hold up all."""
STATUS_AGAIN_S: Final = 1.0
"""From one try to write a status to the next, while the API server has not answered the first."""
WITHIN: Final = timedelta(seconds=60)
"""Two writes of the same that are further apart are not in a row."""
MOST: Final = 5
"""Times in a row that the same is written at once; what people change by hand is mended without a word."""


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A request that the API server has not answered.

    Attributes:
        epoch: of the pod that is created, or "".
    """

    task: asyncio.Task[object]
    scopes: frozenset[str] = frozenset()
    epoch: str = ""


@dataclass(slots=True)
class WrittenAgain:
    """How often in a row the same was written of a child, or the child was deleted.

    A controller that wants a child otherwise answers each write of ours with one of its own: without a bound
    the two write 25 to 40 times a second.
    """

    _written: dict[tuple[str, str, bool], tuple[int, datetime, int]] = field(default_factory=dict)
    """Of each child, and of its deletions: a hash of what was last written, when, and how often in a row."""

    def note(self, kind: str, name: str, manifest: Manifest | None, now: datetime) -> bool:
        """Notes a write, or without a manifest a deletion; returns whether others undo it each time."""
        written = hash(json.dumps(manifest, sort_keys=True))
        self._written = {key: each for key, each in self._written.items() if abs(now - each[1]) < WITHIN}
        key = kind, name, manifest is None
        before, _, times = self._written.get(key, (None, now, 0))
        times = times + 1 if before == written else 1
        self._written[key] = written, now, times
        return times >= MOST


@dataclass(slots=True)
class StatusTries:
    """The tries to write a resource's status that are under way: the first one, and the newest one.

    Each is made on one version of the resource, so one of them at most is stored. The first one may be about
    to succeed at a slow API server; the newest one is answered at once by an API server that was away.
    """

    _tries: list[tuple[float, asyncio.Task[object]]] = field(default_factory=list)

    @property
    def are_under_way(self) -> bool:
        """Returns whether a try may still be stored."""
        return any(not task.done() for _, task in self._tries)

    def wait_s(self) -> float:
        """Returns the seconds until another try may begin."""
        self._tries = [each for each in self._tries if not each[1].done()]
        if not self._tries:
            return 0.0
        return max(0.0, self._tries[-1][0] + STATUS_AGAIN_S - asyncio.get_running_loop().time())

    def add(self, task: asyncio.Task[object]) -> None:
        """Takes a new try in, and gives up those between the first one and this one."""
        for _, between in self._tries[1:]:
            between.cancel()
        self._tries = [*self._tries[:1], (asyncio.get_running_loop().time(), task)]

    def cancel(self, *, but: asyncio.Task[object] | None = None) -> None:
        """Gives up all tries but one."""
        for _, task in self._tries:
            if task is not but:
                task.cancel()


@dataclass(slots=True)
class Kept:
    """What is kept of one resource, as long as it has this uid.

    Attributes:
        generation: of its spec when it was last decided on.
        unmade: pods that were to be made, and have never existed.
        under_way: requests that the API server has not answered, by object.
        slots: for creates and applies.
        promises: the capacity that is kept for the pods of the last decision.
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
        """Returns what is kept of a resource of which nothing is known."""
        acting = Acting(resource.key.name, (), datetime.now(UTC))
        return cls(resource.uid, resource.generation, acting, budget=Budget(report=held_back))

    def refusals(self, resource: ResourceView) -> tuple[Refusal, ...]:
        """Returns the refusals. After a change of the spec: those that still stand, due for a try at once."""
        known = tuple(self.acting.known.values())
        return known if resource.generation == self.generation else asked_anew(known, datetime.now(UTC))

    def begin(
        self, resource: ResourceView, refusals: tuple[Refusal, ...], actions: Sequence[Action]
    ) -> Acting:
        """Begins the actions of a decision; returns which of them may be done."""
        if resource.generation != self.generation:
            self.written = WrittenAgain()
        self.generation = resource.generation
        now = datetime.now(UTC)
        spending = Spending(self.budget, resource, actions, now)
        self.acting = Acting(resource.key.name, refusals, now, spending)
        return self.acting

    def cancel(self) -> None:
        """Gives up all requests that are under way: the resource is gone."""
        self.status_tries.cancel()
        self.promises.close()
        for each in self.under_way.values():
            each.task.cancel()
