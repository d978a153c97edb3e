"""Bounds what one resource causes: new pods and status writes, whatever a decision wants. Pure.

A defect, a webhook or another controller can undo each write, and each undone write wakes the next reconcile.
Back-offs slow the causes that are known; this budget bounds all others. Deletes are never held back, except
for those that must follow a status: these wait with the status, for a second at most.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.api import parse_life
from heteroinfer_operator.cluster import (
    Action,
    CreateObject,
    Manifest,
    PatchStatus,
    ResourceView,
)
from heteroinfer_operator.reconcile.scopes import group_scope

PODS_WITHIN: Final = timedelta(minutes=1)
STATUS_WRITES: Final = 2
STATUS_WRITES_WITHIN: Final = timedelta(seconds=1)
UNDONE_BY_OTHERS: Final = 5
"""Status writes in a row that somebody else changed, after which two writers are at odds."""
_SENT_KEPT: Final = 8
"""Statuses that were sent last: one of them is ours, whichever the API server stored."""
_IN_A_ROW: Final = timedelta(minutes=1)
"""Two status writes that are further apart are not in a row."""
_LONGEST_WAIT: Final = timedelta(seconds=30)
"""Between two writes of a status that says the same, while others change it each time."""
_POD: Final = "Pod"
_WORDS: Final = 400


def most_pods(wanted: int) -> int:
    """Returns how many pods may be created within a minute for so many wanted ones."""
    return 2 * wanted + 10


def wanted_pods(resource: ResourceView) -> int:
    """Returns how many worker pods a resource asks for; at least one."""
    roles = resource.spec.get("roles")
    each = [_count(role.get("pods"), 1) for role in roles or () if isinstance(role, Mapping)]
    groups = parse_life(resource.spec).replicas
    if groups is None:  # not readable: as many as there are
        kept = resource.status.get("groups")
        groups = len(kept) if isinstance(kept, list | tuple) else 1
    return max(groups, 1) * max(sum(each), 1)


def _count(value: Any, default: int) -> int:
    return value if isinstance(value, int) else default


@dataclass(slots=True)
class Window:
    """The moments of the last so many seconds at which something was done."""

    within: timedelta
    _moments: list[datetime] = field(default_factory=list)

    def wait(self, count: int, most: int, now: datetime) -> timedelta:
        """Returns how long `count` more must wait until there are at most `most` in the window.

        More than `most` at once wait until the window is empty: they would else wait for ever.
        """
        # A clock that was set back prolongs no wait.
        kept = [min(moment, now) for moment in self._moments if now - moment < self.within]
        self._moments = kept
        over = min(len(kept) + count - most, len(kept))
        return kept[over - 1] + self.within - now if over > 0 else timedelta()

    def add(self, now: datetime) -> None:
        """Notes that something is done now."""
        self._moments.append(now)

    def take_back(self) -> None:
        """Forgets the newest moment: nothing was done."""
        if self._moments:
            self._moments.pop()


@dataclass(slots=True)
class Budget:
    """What a resource caused of late; lives as long as the operator knows the resource.

    Attributes:
        undone: stored status writes in a row each of which somebody else then changed.
        report: called with each kind of action of which one had to wait.
    """

    pods: Window = field(default_factory=lambda: Window(PODS_WITHIN))
    status_writes: Window = field(default_factory=lambda: Window(STATUS_WRITES_WITHIN))
    undone: int = 0
    report: Callable[[str], None] = lambda kind: None
    _sent: list[tuple[datetime, bytes]] = field(default_factory=list)
    _is_stored: bool = False
    """Whether a status was stored since the last was sent, so that others can have undone it."""

    def note_status(self, found: Manifest, sent: Manifest, now: datetime) -> None:
        """Notes a status write that is sent; one without an answer may have been stored.

        `found` is the status that the decision was made on.
        """
        in_a_row = bool(self._sent) and abs(now - self._sent[-1][0]) < _IN_A_ROW
        is_ours = _digest(found) in {digest for _, digest in self._sent}
        if is_ours or not in_a_row:
            self.undone = 0
        elif self._is_stored:
            self.undone += 1
        self._is_stored = False
        self._sent = [*self._sent[1 - _SENT_KEPT :], (now, _digest(sent))]

    def note_stored(self) -> None:
        """Notes that the API server has stored a status that was sent."""
        self._is_stored = True

    def status_wait(self, status: Manifest, now: datetime) -> timedelta:
        """Returns how long a status write waits.

        While others undo each write, a status that only repeats the last one waits longer and longer.
        """
        wait = self.status_writes.wait(1, STATUS_WRITES, now)
        if self.undone < UNDONE_BY_OTHERS:
            return wait
        last, sent = self._sent[-1]
        if sent != _digest(status):
            return wait
        backoff = min(timedelta(seconds=2.0 ** min(self.undone - UNDONE_BY_OTHERS, 16)), _LONGEST_WAIT)
        return max(wait, min(last, now) + backoff - now)


@dataclass(slots=True)
class Spending:
    """The budget of one decision's actions.

    Args:
        actions: all of the decision: the pods of a group are made together or not at all.
    """

    budget: Budget
    resource: ResourceView
    actions: Sequence[Action]
    now: datetime
    _pods: Counter[frozenset[str]] = field(init=False)
    _granted: set[frozenset[str]] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        """Counts the pods that each group is to have."""
        pods = [action for action in self.actions if is_pod(action)]
        self._pods = Counter(action.scopes for action in pods if isinstance(action, CreateObject))

    def spend(self, action: Action) -> float:
        """Returns 0.0 if an action may run now, and counts it; else the seconds that it must wait."""
        budget, now = self.budget, self.now
        match action:
            case CreateObject() if is_pod(action):
                return self._count("pods", budget.pods, self._pods_wait(action.scopes))
            case PatchStatus(status=status):
                wait = budget.status_wait(status, now)
                if not wait:
                    budget.note_status(self.resource.status, status, now)
                return self._count("status writes", budget.status_writes, wait)
        return 0.0

    def _pods_wait(self, scopes: frozenset[str]) -> timedelta:
        """Returns how long the pods of a group wait; once one of them may be created, all may."""
        if scopes in self._granted:
            return timedelta()
        most = most_pods(wanted_pods(self.resource))
        wait = self.budget.pods.wait(max(self._pods[scopes], 1), most, self.now)
        if not wait:
            self._granted.add(scopes)
        return wait

    def _count(self, kind: str, window: Window, wait: timedelta) -> float:
        if wait:
            self.budget.report(kind)
        else:
            window.add(self.now)
        return wait.total_seconds()

    def give_back(self, action: Action) -> None:
        """Notes that a pod was not created: the API server refused it."""
        if is_pod(action):
            self.budget.pods.take_back()

    def end(self) -> None:
        """Lets go of what only `spend` reads: each resource keeps its last spending."""
        self.resource, self.actions = self.resource.without_fields(), ()

    def describe_pods(self, scopes: frozenset[str]) -> str:
        """Returns in words why the pods of a group wait, and the failure that led to it."""
        wanted = wanted_pods(self.resource)
        return (
            "the next pods wait: within one minute this resource may have at most "
            f"{most_pods(wanted)} new pods (2 x {wanted} wanted + 10){self._last_failure(scopes)}"
        )

    def _last_failure(self, scopes: frozenset[str]) -> str:
        groups = [group for group in self.resource.status.get("groups") or () if isinstance(group, Mapping)]
        ours = [group for group in groups if group_scope(group.get("index", -1)) in scopes]
        failures = [failure for group in ours for failure in group.get("failures") or ()]
        if not failures or not isinstance(failures[-1], Mapping):
            return ""
        last = failures[-1]
        words = f"{last.get('reason', '')}: {last.get('message', '')}"[:_WORDS]
        return f". Fix the cause of the last failure: {words}"

    def find_other_writer(self) -> str:
        """Returns in words that another operator writes the status, or ""."""
        if self.budget.undone < UNDONE_BY_OTHERS:
            return ""
        others = ", ".join(sorted(self.resource.status_managers - {names.MANAGER}))
        who = f"field manager {others}" if others else f"field manager {names.MANAGER}, as this one"
        return (
            f"another operator ({who}) writes the status of this resource. "
            "Uninstall one of the two or separate their namespaces"
        )


def is_pod(action: Action) -> bool:
    """Returns whether an action creates a pod."""
    return isinstance(action, CreateObject) and action.manifest["kind"] == _POD


def _digest(status: Manifest) -> bytes:
    """Returns the same for two statuses that say the same, whenever their conditions last changed."""
    conditions = status.get("conditions")
    if isinstance(conditions, list | tuple):
        found = [each for each in conditions if isinstance(each, Mapping)]
        kept = [{key: value for key, value in each.items() if key != "lastTransitionTime"} for each in found]
        status = {**status, "conditions": kept}
    return hashlib.sha256(json.dumps(_plain(status), sort_keys=True).encode()).digest()


def _plain(value: Any) -> Any:
    """Returns a value with whole numbers as integers: the API server stores 2.0 as 2."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
