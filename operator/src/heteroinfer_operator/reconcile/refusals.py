"""Tracks refused actions: the actions that they block, and the time of the next attempt. Pure.

A refused child blocks only the actions of its own scopes, such as one group. A resource is reconciled often,
but the operator repeats a refused request only after a delay.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from types import MappingProxyType
from typing import Final, TypeAlias

from heteroinfer_contract import names
from heteroinfer_operator.cluster import (
    ApplyObject,
    CreateObject,
    DeleteObject,
    PatchStatus,
    Refusal,
    RemoveFinalizer,
    TryObjects,
    Write,
)
from heteroinfer_operator.reconcile.budget import Spending, creates_pod

OBJECT_REFUSED: Final = "ObjectRefused"
STATUS: Final = f"{names.KIND}/status"
REVISION: Final = "Revision"
"""Kind of a refusal from the dry run of a revision's objects; none of these objects were created."""
NAME_TAKEN: Final = "NameTaken"
NAME_HELD: Final = "NameHeld"
"""An object that is being deleted, or that garbage collection will delete, still has the name."""
CHANGED_BY_OTHERS: Final = "ChangedByOthers"
"""A webhook or another controller changes an object during the write or after each write."""
DELETED_BY_OTHERS: Final = "DeletedByOthers"
"""Another controller deletes an object each time after the operator has created it."""
MADE_BY_OTHERS: Final = "MadeByOthers"
"""Another controller creates an unwanted object each time after the operator has deleted it."""
NOT_ANSWERED: Final = "NotAnswered"
"""The API server has not answered a write or a dry run yet, or cannot answer."""
TOO_MANY_PODS: Final = "TooManyNewPods"
"""The resource's budget of new pods is spent."""
WRITTEN_BY_OTHERS: Final = "StatusWrittenByOthers"
"""Another operator changes the status after each write."""

REASONS_OF_CHILDREN: Final = frozenset(
    {OBJECT_REFUSED, NAME_TAKEN, NAME_HELD, CHANGED_BY_OTHERS, DELETED_BY_OTHERS}
)
"""Reasons why a child is missing or differs from the wanted state."""
_NOT_CREATED: Final = frozenset({OBJECT_REFUSED, NAME_TAKEN, NAME_HELD})
"""Reasons that prove that an object was not created; a create without an answer may have succeeded."""

_FIRST_S: Final = 1.0
_MAX_S: Final = 30.0
_HELD_FIRST_S: Final = 0.2
_MAX_STATUS_RETRY_S: Final = 1.0
"""Longest wait before the next write of a status. Short, because clients and users act on the status."""
REPORTED_TRIES: Final = 5
_REPORTED_AT: Final = MappingProxyType({NAME_HELD: REPORTED_TRIES, NOT_ANSWERED: REPORTED_TRIES})
"""Attempts after which an event reports a refusal, by reason. Most of these refusals are over by then."""
_POD_FIRST_S: Final = 5.0
_MAX_POD_RETRY_S: Final = 300.0
"""Longest wait for a refused pod. Each attempt creates and deletes other pods of the group, so it is long."""
_FORGOTTEN_AFTER: Final = timedelta(seconds=10)
"""A refusal is forgotten this long after a due retry, because no decision wants the object any more."""
_POD_FORGOTTEN_AFTER: Final = timedelta(seconds=90)
"""The same for a pod. It is longer, because the group's other pods must be gone before the retry."""
_MAX_BUDGET_RETRY_S: Final = 60.0
"""Longest wait for the budget, and time for which the operator reports a second writer of the status."""

KindAndName: TypeAlias = tuple[str, str]
"""Kind and name of the object that an action writes."""
_EPOCH_IN_NAME: Final[Mapping[str, re.Pattern[str]]] = MappingProxyType(
    {
        "Pod": re.compile(r"-[0-9]+(?=-[0-9]+$)"),
        "PodGroup": re.compile(r"-[0-9]+$"),
        "Workload": re.compile(r"-[0-9]+$"),
    }
)
"""Position of the epoch in the names of an epoch's objects, by kind."""


def kind_and_name(action: Write, resource: str) -> KindAndName:
    """Returns kind and name of the object that an action writes."""
    match action:
        case CreateObject() | ApplyObject():
            return action.manifest["kind"], action.manifest["metadata"]["name"]
        case TryObjects():
            return REVISION, action.revision
        case DeleteObject():
            return action.kind, action.name
        case PatchStatus():
            return STATUS, resource
        case RemoveFinalizer():
            return names.KIND, resource


def _delay_s(kind: str, reason: str, tries: int) -> float:
    """Returns the seconds until the next try.

    The delay doubles with each try. The first delay and the longest depend on the kind and the reason.

    Args:
        tries: number of refused tries, at least 1.
    """
    if reason in (TOO_MANY_PODS, WRITTEN_BY_OTHERS):  # the budget has its own, shorter waits
        return _MAX_BUDGET_RETRY_S
    if reason == NAME_HELD:  # soon passes, also for a pod
        first_s, max_s = _HELD_FIRST_S, _MAX_S
    elif kind in ("Pod", REVISION) and reason != NOT_ANSWERED:
        first_s, max_s = _POD_FIRST_S, _MAX_POD_RETRY_S
    else:
        first_s, max_s = _FIRST_S, _MAX_S
    if kind == STATUS:
        max_s = _MAX_STATUS_RETRY_S
    # The exponent is limited, because a large power would overflow.
    return float(min(first_s * 2.0 ** min(tries - 1, 16), max_s))


def _jitter(action: Write, reason: str, refusal_key: KindAndName, tries: int) -> float:
    """Returns the factor for the delay of a refused pod, from 0.5 to 1; 1 for other objects.

    The factor spreads the retries of resources and groups that a quota refused at the same time. If all tried
    again at the same time, each would get only some of its pods, and the operator would delete these pods.
    """
    if reason != OBJECT_REFUSED or not isinstance(action, CreateObject) or not creates_pod(action):
        return 1.0
    seed = repr((action.manifest["metadata"].get("ownerReferences"), refusal_key, tries))
    first_byte = hashlib.sha256(seed.encode()).digest()[0]  # 0 to 255, the same for the same attempt
    return 0.5 + first_byte / 510


def _time_of_expiry(refusal: Refusal) -> datetime:
    """Returns the time at which a refusal is forgotten unless its object is tried again."""
    return refusal.retry_at + (_POD_FORGOTTEN_AFTER if refusal.kind == "Pod" else _FORGOTTEN_AFTER)


def limit_retry_times(refusals: Iterable[Refusal], now: datetime) -> tuple[Refusal, ...]:
    """Moves each retry to at most one retry delay from now, in case the clock was set back."""

    def limited(refusal: Refusal) -> Refusal:
        """Returns the refusal with a limited time of its retry."""
        latest = now + timedelta(seconds=_delay_s(refusal.kind, refusal.reason, refusal.tries))
        return replace(refusal, retry_at=latest) if refusal.retry_at > latest else refusal

    return tuple(map(limited, refusals))


def retry_revisions_now(refusals: Iterable[Refusal], now: datetime) -> tuple[Refusal, ...]:
    """Keeps only the refusals of revisions after a change of the spec, with an immediate retry.

    All other refusals are cleared, because the change may have fixed their cause. A refused revision stays
    refused until the next dry run has an answer: a change of `replicas` alone does not change the revision,
    so it must not start the rollout of a refused revision.
    """
    kept = (refusal for refusal in refusals if refusal.kind == REVISION)
    return tuple(replace(refusal, retry_at=min(refusal.retry_at, now)) for refusal in kept)


@dataclass(slots=True)
class ActionPermits:
    """Decides which actions of one decision may still run, from the answers to the actions before.

    Args:
        refusals: refusals from earlier decisions.
        spending: budget of the resource; None for no limit.
    """

    resource: str
    refusals: Iterable[Refusal]
    now: datetime
    spending: Spending | None = None
    known: dict[KindAndName, Refusal] = field(init=False)
    new: list[Refusal] = field(init=False, default_factory=list)
    _blocked: set[str] = field(init=False, default_factory=set)
    _creates_blocked: bool = field(init=False, default=False)
    _status_write_failed: bool = field(init=False, default=False)
    _refusal_is_over: bool = field(init=False, default=False)
    _budget_waits_s: list[float] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        """Keeps the refusals that have not expired. A refusal expires if its object is not tried again."""
        before = limit_retry_times(self.refusals, self.now)
        unexpired = [refusal for refusal in before if _time_of_expiry(refusal) > self.now]
        self.known = {
            _refusal_key((refusal.kind, refusal.name), refusal.scopes): refusal for refusal in unexpired
        }
        # The status of this decision still contains the expired refusals. So another reconcile follows
        # immediately, and removes them from the status.
        self._refusal_is_over = len(unexpired) < len(before)

    def may_run(self, action: Write) -> bool:
        """Reports whether an action may run now; an action that may not run blocks its scopes."""
        if self._is_blocked(action):
            return False
        refusal = self.known.get(self._key(action))
        # WRITTEN_BY_OTHERS only reports a second writer of the status. The budget limits the writes.
        if refusal is None or refusal.retry_at <= self.now or refusal.reason == WRITTEN_BY_OTHERS:
            return self._fits_budget(action)
        if refusal.blocks:
            self._block(action)
        return False

    def _fits_budget(self, action: Write) -> bool:
        """Reports whether the budget allows an action, and counts it; if not, blocks its scopes."""
        if self.spending is None:
            return True
        wait_s = self.spending.spend(action)
        if wait_s == 0.0:
            return True
        self._budget_waits_s.append(wait_s)
        self._block(action)
        if creates_pod(action):
            why = self.spending.describe_waiting_pods(scopes_of(action))
            self._record_refusal(action, TOO_MANY_PODS, why, retry_at=self.now + timedelta(seconds=wait_s))
        return False

    def record_success(self, action: Write) -> None:
        """Records that an action succeeded, which ends its refusal.

        If another operator undoes each status write, the success of such a write is recorded as a refusal, so
        that the conditions report the other operator.
        """
        if self.spending is not None and isinstance(action, PatchStatus):
            self.spending.budget.record_stored_status()
        if self._record_other_writer(action):
            return
        if self.known.pop(self._key(action), None) is not None:
            self._refusal_is_over = True

    def record_refused(self, action: Write, reason: str, message: str) -> Refusal | None:
        """Records that an action was refused. Returns the refusal if an event must report it, or None."""
        if self.spending is not None and reason in _NOT_CREATED:
            self.spending.uncount(action)
        return self._record_refusal(action, reason, message)

    def _record_refusal(
        self, action: Write, reason: str, message: str, *, retry_at: datetime | None = None
    ) -> Refusal | None:
        """Records a refusal with its next retry, and blocks the action's scopes.

        Returns the refusal if an event must report it, otherwise None.
        """
        kind, name = kind_and_name(action, self.resource)
        key = self._key(action)
        earlier = self.known.get(key)
        tries = earlier.tries + 1 if earlier is not None else 1
        delay = timedelta(seconds=_delay_s(kind, reason, tries) * _jitter(action, reason, key, tries))
        # An object that another client changes exists, so no other object must wait. A changed pod is an
        # exception: the operator does not recognize it as its own pod, so the whole group cannot start.
        blocks = reason not in (CHANGED_BY_OTHERS, WRITTEN_BY_OTHERS) or creates_pod(action)
        refusal = Refusal(
            kind=kind,
            name=name,
            reason=reason,
            message=message,
            scopes=scopes_of(action),
            tries=tries,
            retry_at=retry_at or self.now + delay,
            blocks=blocks,
        )
        self.known[key] = refusal
        if refusal.blocks:
            self._block(action)
        is_new = earlier is None or _reason_and_message(earlier) != _reason_and_message(refusal)
        if is_new:
            self.new.append(refusal)
        if reason in _REPORTED_AT:  # report this refusal once, and only if it does not pass soon
            return refusal if tries == _REPORTED_AT[reason] else None
        return refusal if is_new else None

    def _record_other_writer(self, action: Write) -> bool:
        """Records a refusal if another operator undoes each status write. Returns True if so."""
        if self.spending is None or not isinstance(action, PatchStatus):
            return False
        other_writer = self.spending.describe_other_writer()
        if other_writer:
            self._record_refusal(action, WRITTEN_BY_OTHERS, other_writer)
        return bool(other_writer)

    def record_unsent(self, action: Write) -> None:
        """Records that an action was permitted but not sent."""
        if self.spending is not None:
            self.spending.uncount(action)

    def record_conflict(self, action: Write) -> None:
        """Records a conflict: the object has changed since the decision. Blocks the action's scopes."""
        self._block(action)

    def release_inputs(self) -> None:
        """Frees the decision's actions and spec, because no more actions begin.

        Answers to earlier actions may still arrive, so this object stays in memory.
        """
        if self.spending is not None:
            self.spending.release_inputs()

    def look_again_s(self) -> float | None:
        """Returns the seconds until a refused or delayed action may be tried again, or None.

        Returns 0.0 after a new refusal and after the end of a refusal, so that the status shows the change.
        If the retry of a refused action was due and the decision did not contain the action, the action is no
        longer wanted. Then the next check is at the time at which the refusal is forgotten.
        """
        if self.new or self._refusal_is_over:
            return 0.0
        check_times = [
            refusal.retry_at if refusal.retry_at > self.now else _time_of_expiry(refusal)
            for refusal in self.known.values()
        ]
        waits = [max((time - self.now).total_seconds(), 0.0) for time in check_times]
        return min([*waits, *self._budget_waits_s], default=None)

    def _key(self, action: Write) -> KindAndName:
        """Returns the key of the action's refusal: kind and name, without the number of the epoch."""
        return _refusal_key(kind_and_name(action, self.resource), scopes_of(action))

    def _is_blocked(self, action: Write) -> bool:
        """Reports whether an earlier refused or delayed action blocks this action."""
        match action:
            case CreateObject() | ApplyObject():
                # If several groups need the object, the action may run as long as one of them is not blocked.
                all_users_are_blocked = bool(action.scopes) and action.scopes <= self._blocked
                return self._creates_blocked or all_users_are_blocked
            case DeleteObject():
                return self._status_write_failed and action.after_status
        return False

    def _block(self, action: Write) -> None:
        """Blocks the later actions that depend on an action that failed.

        A failed create or update blocks its scopes. A failed status write blocks all creates, and the deletes
        that must follow the status.
        """
        match action:
            case CreateObject() | ApplyObject():
                self._blocked |= action.scopes
            case PatchStatus():
                # If pods were created without the status of their epoch, the epoch would begin a second time.
                self._creates_blocked = True
                self._status_write_failed = True


def scopes_of(action: Write) -> frozenset[str]:
    """Returns the scopes of an action; no scopes for deletes and status writes."""
    return action.scopes if isinstance(action, CreateObject | ApplyObject) else frozenset()


def _refusal_key(kind_name: KindAndName, scopes: frozenset[str]) -> KindAndName:
    """Returns the key of a refusal: kind and name, without the number of the epoch.

    So a refusal counts for the same object of the next epoch, too. Actions without scopes (deletes, status
    writes) keep the number.
    """
    kind, name = kind_name
    if kind not in _EPOCH_IN_NAME or not scopes:
        return kind_name
    return kind, _EPOCH_IN_NAME[kind].sub("-*", name)


def _reason_and_message(refusal: Refusal) -> tuple[str, str]:
    """Returns reason and message of a refusal, without the name of its object."""
    return refusal.reason, refusal.message.replace(refusal.name, "")
