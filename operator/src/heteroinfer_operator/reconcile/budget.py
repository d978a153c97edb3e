"""Limits the new pods and status writes of one resource, independent of the decisions. Pure.

A defect, a webhook or another controller can undo each write, and each undone write triggers the next
reconcile. Back-offs slow down the known causes; this budget limits all others. Deletes are not limited. But a
delete that must follow a status write waits for this write, at most a second.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.api import parse_lifecycle
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
"""Number of consecutive status writes that another writer changed, after which the operator reports it."""
_SENT_KEPT: Final = 8
"""Number of sent statuses to remember, so that the operator recognizes its own in the resource."""
_IN_A_ROW: Final = timedelta(minutes=1)
"""Status writes that are further apart do not count as consecutive."""
_LONGEST_WAIT: Final = timedelta(seconds=30)
"""Longest wait between two writes of the same status while another writer changes it each time."""
_POD: Final = "Pod"
_MAX_FAILURE_CHARACTERS: Final = 400


def max_pods_per_minute(wanted: int) -> int:
    """Returns how many pods the operator may create within a minute for `wanted` wanted pods."""
    return 2 * wanted + 10


def wanted_pods(resource: ResourceView) -> int:
    """Returns the number of worker pods that a resource asks for; at least 1.

    Reads the stored spec without validation, because the budget applies to an invalid spec, too.
    """
    roles = resource.spec.get("roles")
    pods_of_roles = [_integer_or(role.get("pods"), 1) for role in roles or () if isinstance(role, Mapping)]
    groups = parse_lifecycle(resource.spec).replicas
    if groups is None:  # the field is not readable: count the existing groups
        stored_groups = resource.status.get("groups")
        groups = len(stored_groups) if isinstance(stored_groups, list | tuple) else 1
    return max(groups, 1) * max(sum(pods_of_roles), 1)


def _integer_or(value: Any, default: int) -> int:
    """Returns the value if it is an integer, otherwise the default."""
    return value if isinstance(value, int) else default


@dataclass(slots=True)
class Window:
    """The times of an action's recent runs, within a sliding time window of length `within`."""

    within: timedelta
    _times: list[datetime] = field(default_factory=list)

    def time_until_space(self, count: int, limit: int, now: datetime) -> timedelta:
        """Returns how long `count` more actions must wait until the window has space for them.

        The window has space for `limit` actions. If `count` is larger than `limit`, the actions wait until
        the window is empty; otherwise they would never run.
        """
        # A clock that was set back must not prolong the wait.
        recent = [min(run_at, now) for run_at in self._times if now - run_at < self.within]
        self._times = recent
        num_to_leave = min(len(recent) + count - limit, len(recent))
        if num_to_leave <= 0:
            return timedelta()
        # The oldest `num_to_leave` actions must leave the window. The wait ends when the last of them leaves.
        return recent[num_to_leave - 1] + self.within - now

    def add(self, now: datetime) -> None:
        """Records that an action runs now."""
        self._times.append(now)

    def remove_newest(self) -> None:
        """Removes the newest action, because it did not run after all."""
        if self._times:
            self._times.pop()


@dataclass(slots=True)
class Budget:
    """Recent actions of a resource; the operator keeps the budget as long as it knows the resource.

    Attributes:
        undone: number of consecutive status writes that were stored and then changed by another writer.
        report: callback for each action that had to wait; the argument is its kind.
    """

    pods: Window = field(default_factory=lambda: Window(PODS_WITHIN))
    status_writes: Window = field(default_factory=lambda: Window(STATUS_WRITES_WITHIN))
    undone: int = 0
    report: Callable[[str], None] = lambda kind: None
    _sent: list[tuple[datetime, bytes]] = field(default_factory=list)
    _is_stored: bool = False
    """Whether the last sent status was stored, so that another writer can have changed it."""

    def record_sent_status(self, stored: Manifest, sent: Manifest, now: datetime) -> None:
        """Records a status that is sent now, and counts whether another writer undid the last sent status.

        No other writer changed the stored status if this operator has sent it. The API server may have stored
        a status even if its write got no answer.

        Args:
            stored: status of the resource that the decision has read.
            sent: status that is sent now.
        """
        is_consecutive = bool(self._sent) and abs(now - self._sent[-1][0]) < _IN_A_ROW
        was_sent_here = _digest(stored) in {digest for _, digest in self._sent}
        if was_sent_here or not is_consecutive:
            self.undone = 0
        elif self._is_stored:  # a write that was not stored cannot be undone
            self.undone += 1
        self._is_stored = False
        self._sent = [*self._sent, (now, _digest(sent))][-_SENT_KEPT:]

    def record_stored_status(self) -> None:
        """Records that the API server has stored a sent status."""
        self._is_stored = True

    def status_wait(self, status: Manifest, now: datetime) -> timedelta:
        """Returns how long the write of this status must wait.

        While another writer undoes each write, the wait before the same status doubles each time. A changed
        status does not wait longer, so that users see it soon.
        """
        wait = self.status_writes.time_until_space(1, STATUS_WRITES, now)
        if self.undone < UNDONE_BY_OTHERS:
            return wait
        last_sent_at, last_digest = self._sent[-1]
        if last_digest != _digest(status):
            return wait
        # The exponent is limited, because a large power would overflow.
        backoff = min(timedelta(seconds=2.0 ** min(self.undone - UNDONE_BY_OTHERS, 16)), _LONGEST_WAIT)
        # A clock that was set back must not prolong the wait.
        return max(wait, min(last_sent_at, now) + backoff - now)


@dataclass(slots=True)
class Spending:
    """Decides which actions of one decision the budget allows.

    The budget allows all new pods of a group together or none of them, because a group with only some of its
    pods cannot start.

    Args:
        actions: all actions of the decision.
    """

    budget: Budget
    resource: ResourceView
    actions: Sequence[Action]
    now: datetime
    _pods: Counter[frozenset[str]] = field(init=False)
    _granted: set[frozenset[str]] = field(init=False, default_factory=set)
    _reserved: int = field(init=False, default=0)
    """Number of granted pods that `spend` has not counted yet, because it gets pods one by one."""

    def __post_init__(self) -> None:
        """Counts the pods to create for each group."""
        pods = [action for action in self.actions if creates_pod(action)]
        self._pods = Counter(action.scopes for action in pods if isinstance(action, CreateObject))

    def spend(self, action: Action) -> float:
        """Counts an action if it may run now, and returns 0.0; otherwise returns the wait in seconds."""
        budget, now = self.budget, self.now
        match action:
            case CreateObject() if creates_pod(action):
                return self._count_or_report(
                    "pods", budget.pods, self._time_until_pods_allowed(action.scopes)
                )
            case PatchStatus(status=status):
                wait = budget.status_wait(status, now)
                if not wait:
                    budget.record_sent_status(self.resource.status, status, now)
                return self._count_or_report("status writes", budget.status_writes, wait)
        return 0.0

    def _time_until_pods_allowed(self, scopes: frozenset[str]) -> timedelta:
        """Returns how long the next pod of a group must wait.

        If the budget grants the first pod of a group, it also reserves the share of the group's other pods.

        Args:
            scopes: scopes of the pod. All pods of its group have the same scopes.
        """
        if scopes in self._granted:
            self._reserved = max(self._reserved - 1, 0)
            return timedelta()
        limit, num_pods = max_pods_per_minute(wanted_pods(self.resource)), max(self._pods[scopes], 1)
        wait = self.budget.pods.time_until_space(num_pods + self._reserved, limit, self.now)
        if not wait:
            self._granted.add(scopes)
            self._reserved += num_pods - 1
        return wait

    def _count_or_report(self, kind: str, window: Window, wait: timedelta) -> float:
        """Counts an action in its window, or reports that the action waits. Returns `wait` in seconds."""
        if wait:
            self.budget.report(kind)
        else:
            window.add(self.now)
        return wait.total_seconds()

    def uncount(self, action: Action) -> None:
        """Removes the creation of a pod from the count, because its request was not sent.

        Does nothing for other actions.
        """
        if creates_pod(action):
            self.budget.pods.remove_newest()

    def release_inputs(self) -> None:
        """Frees the objects that only `spend` reads, because this object stays in memory."""
        self.resource, self.actions = self.resource.without_fields(), ()

    def describe_waiting_pods(self, scopes: frozenset[str]) -> str:
        """Describes why the pods of a group wait, with the group's last failure.

        Args:
            scopes: scopes of the group's pods.
        """
        wanted = wanted_pods(self.resource)
        return (
            "the next pods wait: the operator creates at most "
            f"{max_pods_per_minute(wanted)} pods a minute for this resource (2 x {wanted} wanted pods + 10)"
            f"{self._describe_last_failure(scopes)}"
        )

    def _describe_last_failure(self, scopes: frozenset[str]) -> str:
        """Returns a sentence about the last failure of the groups with these scopes, or ""."""
        groups = [group for group in self.resource.status.get("groups") or () if isinstance(group, Mapping)]
        in_scope = [group for group in groups if group_scope(group.get("index", -1)) in scopes]
        failures = [failure for group in in_scope for failure in group.get("failures") or ()]
        readable = [failure for failure in failures if isinstance(failure, Mapping)]
        if not readable:
            return ""
        last = max(readable, key=lambda failure: str(failure.get("time", "")))
        failure = f"{last.get('reason', '')}: {last.get('message', '')}"[:_MAX_FAILURE_CHARACTERS]
        return f". Fix the cause of the last failure: {failure}"

    def describe_other_writer(self) -> str:
        """Describes another operator that undoes each status write; returns "" without such an operator."""
        if self.budget.undone < UNDONE_BY_OTHERS:
            return ""
        others = ", ".join(sorted(self.resource.status_managers - {names.MANAGER}))
        manager = (
            f"field manager {others}" if others else f"field manager {names.MANAGER}, like this operator"
        )
        return (
            f"another operator ({manager}) writes the status of this resource. "
            "Uninstall one of the two operators, or give each its own namespaces"
        )


def creates_pod(action: Action) -> bool:
    """Reports whether an action creates a pod."""
    return isinstance(action, CreateObject) and action.manifest["kind"] == _POD


def _digest(status: Manifest) -> bytes:
    """Returns a hash of a status that ignores the transition times of its conditions."""
    conditions = status.get("conditions")
    if isinstance(conditions, list | tuple):
        without_times = [
            {key: value for key, value in condition.items() if key != "lastTransitionTime"}
            for condition in conditions
            if isinstance(condition, Mapping)
        ]
        status = {**status, "conditions": without_times}
    return hashlib.sha256(
        json.dumps(_with_whole_floats_as_integers(status), sort_keys=True).encode()
    ).digest()


def _with_whole_floats_as_integers(value: Any) -> Any:
    """Returns a JSON value with integers in place of whole floats. The API server stores 2.0 as 2."""
    if isinstance(value, Mapping):
        return {key: _with_whole_floats_as_integers(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_whole_floats_as_integers(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
