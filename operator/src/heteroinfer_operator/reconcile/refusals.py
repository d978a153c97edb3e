"""Tracks refused actions: the actions that they block, and the time of the next attempt. Pure.

A refused child blocks only its own scopes, such as one group. The operator does not repeat a refused request
before its time, so that the frequent reconciles of a resource do not cause requests that will be refused.
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
"""The API server has not answered yet whether it accepts a revision or another write, or cannot answer."""
TOO_MANY_PODS: Final = "TooManyNewPods"
"""The resource's budget of new pods is spent."""
WRITTEN_BY_OTHERS: Final = "StatusWrittenByOthers"
"""Another operator changes the status after each write."""

OF_CHILDREN: Final = frozenset({OBJECT_REFUSED, NAME_TAKEN, NAME_HELD, CHANGED_BY_OTHERS, DELETED_BY_OTHERS})
"""Reasons why a child is missing or differs from the wanted state."""
_NOT_MADE: Final = frozenset({OBJECT_REFUSED, NAME_TAKEN, NAME_HELD})
"""Reasons that prove that an object was not created; a create without an answer may have succeeded."""

_FIRST_S: Final = 1.0
_MAX_S: Final = 30.0
_HELD_FIRST_S: Final = 0.2
_MAX_STATUS_RETRY_S: Final = 1.0
"""Short, because clients and users act on the status."""
REPORTED_TRIES: Final = 5
_REPORTED_AT: Final = MappingProxyType({NAME_HELD: REPORTED_TRIES, NOT_ANSWERED: REPORTED_TRIES})
"""Number of attempts after which an event reports the refusal: a passing refusal is over by then."""
_POD_FIRST_S: Final = 5.0
_MAX_POD_RETRY_S: Final = 300.0
"""Longest wait for a pod that a quota refuses: each attempt creates and deletes other pods of the group."""
_FORGOTTEN_AFTER: Final = timedelta(seconds=10)
"""Time after a due retry at which a refusal is forgotten if no decision wants the object any more."""
_POD_FORGOTTEN_AFTER: Final = timedelta(seconds=90)
"""The same for pods. It is longer than the deletion of the group's other pods, which precedes the retry."""
_MAX_BUDGET_RETRY_S: Final = 60.0
"""Longest wait for the budget, and time for which the operator reports a second writer of the status."""

Subject: TypeAlias = tuple[str, str]
"""Kind and name."""
_EPOCH: Final[Mapping[str, re.Pattern[str]]] = MappingProxyType(
    {
        "Pod": re.compile(r"-[0-9]+(?=-[0-9]+$)"),
        "PodGroup": re.compile(r"-[0-9]+$"),
        "Workload": re.compile(r"-[0-9]+$"),
    }
)
"""Position of the epoch in the names of an epoch's objects, by kind."""


def subject(action: Write, resource: str) -> Subject:
    """Kind and name of the object that an action writes."""
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
    """Returns the delay before the next try.

    The delay doubles with each try, up to a limit that depends on the kind and the reason.
    """
    first_s, max_s = (_POD_FIRST_S, _MAX_POD_RETRY_S) if kind in ("Pod", REVISION) else (_FIRST_S, _MAX_S)
    if reason == NOT_ANSWERED:
        first_s, max_s = _FIRST_S, _MAX_S
    if reason == NAME_HELD:
        first_s, max_s = _HELD_FIRST_S, _MAX_S
    if reason in (TOO_MANY_PODS, WRITTEN_BY_OTHERS):
        return _MAX_BUDGET_RETRY_S
    if kind == STATUS:
        max_s = _MAX_STATUS_RETRY_S
    return float(min(first_s * 2.0 ** min(tries - 1, 16), max_s))


def _jitter(action: Write, reason: str, kept_as: Subject, tries: int) -> float:
    """Factor for the delay of a refused pod, 0.5 to 1; 1 for all other objects.

    Resources and groups that a quota refused at the same time must not retry at the same time: each would get
    only some of its pods, and would delete them again.
    """
    if reason != OBJECT_REFUSED or not isinstance(action, CreateObject) or not creates_pod(action):
        return 1.0
    seed = repr((action.manifest["metadata"].get("ownerReferences"), kept_as, tries))
    return 0.5 + hashlib.sha256(seed.encode()).digest()[0] / 510


def _forgotten_at(refusal: Refusal) -> datetime:
    return refusal.retry_at + (_POD_FORGOTTEN_AFTER if refusal.kind == "Pod" else _FORGOTTEN_AFTER)


def due_in_time(refusals: Iterable[Refusal], now: datetime) -> tuple[Refusal, ...]:
    """Limits the retry times of earlier refusals to those of new refusals, in case the clock was set back."""

    def in_time(refusal: Refusal) -> Refusal:
        latest = now + timedelta(seconds=_delay_s(refusal.kind, refusal.reason, refusal.tries))
        return replace(refusal, retry_at=latest) if refusal.retry_at > latest else refusal

    return tuple(map(in_time, refusals))


def asked_anew(refusals: Iterable[Refusal], now: datetime) -> tuple[Refusal, ...]:
    """Keeps the refusals of revisions after a change of the spec, with a retry at once; drops all others.

    A refused revision stays refused until the next dry run answers. A scale does not change the revision, so
    it must neither start the rollout of the revision nor clear its refusal.
    """
    kept = (refusal for refusal in refusals if refusal.kind == REVISION)
    return tuple(replace(refusal, retry_at=min(refusal.retry_at, now)) for refusal in kept)


@dataclass(slots=True)
class Acting:
    """Decides, while the actions of one decision run, which further actions may run.

    Args:
        refusals: refusals from earlier decisions.
        spending: budget of the resource; None for no limit.
    """

    resource: str
    refusals: Iterable[Refusal]
    now: datetime
    spending: Spending | None = None
    known: dict[Subject, Refusal] = field(init=False)
    new: list[Refusal] = field(init=False, default_factory=list)
    _blocked: set[str] = field(init=False, default_factory=set)
    _makes_nothing: bool = field(init=False, default=False)
    _keeps_status: bool = field(init=False, default=False)
    _lifted: bool = field(init=False, default=False)
    _held_s: list[float] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        """Forgets old refusals that were not tried again."""
        before = due_in_time(self.refusals, self.now)
        kept = [refusal for refusal in before if _forgotten_at(refusal) > self.now]
        self.known = {_kept_as((refusal.kind, refusal.name), refusal.scopes): refusal for refusal in kept}
        # This decision still used the forgotten refusals; the next one must report that they are over.
        self._lifted = len(kept) < len(before)

    def may(self, action: Write) -> bool:
        """Checks whether an action may run now; an action that may not run blocks its scopes."""
        if self._is_blocked(action):
            return False
        kept = self.known.get(self._key(action))
        if kept is None or kept.retry_at <= self.now or kept.reason == WRITTEN_BY_OTHERS:
            return self._is_within_budget(action)
        if kept.blocks:
            self._block(action)
        return False

    def _is_within_budget(self, action: Write) -> bool:
        """Counts an action against the budget; an action that must wait blocks its scopes."""
        if self.spending is None or not (wait_s := self.spending.spend(action)):
            return True
        self._held_s.append(wait_s)
        self._block(action)
        if creates_pod(action):
            words = self.spending.describe_pods(scopes_of(action))
            self._note(action, TOO_MANY_PODS, words, retry_at=self.now + timedelta(seconds=wait_s))
        return False

    def done(self, action: Write) -> None:
        """Records that an action succeeded."""
        if self.spending is not None and isinstance(action, PatchStatus):
            self.spending.budget.note_stored()
        if self._is_of_two_writers(action):
            return
        if self.known.pop(self._key(action), None) is not None:
            self._lifted = True

    def refused(self, action: Write, reason: str, message: str) -> Refusal | None:
        """Records that an action was refused; returns the refusal if an event must report it."""
        if self.spending is not None and reason in _NOT_MADE:
            self.spending.give_back(action)
        return self._note(action, reason, message)

    def _note(
        self, action: Write, reason: str, message: str, *, retry_at: datetime | None = None
    ) -> Refusal | None:
        found, key = subject(action, self.resource), self._key(action)
        before = self.known.get(key)
        tries = before.tries + 1 if before is not None else 1
        delay = timedelta(seconds=_delay_s(found[0], reason, tries) * _jitter(action, reason, key, tries))
        # The operator does not recognize a changed pod as its own, so the whole group cannot start.
        blocks = reason not in (CHANGED_BY_OTHERS, WRITTEN_BY_OTHERS) or creates_pod(action)
        refusal = Refusal(
            kind=found[0],
            name=found[1],
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
        is_news = before is None or _content(before) != _content(refusal)
        self.new += [refusal] if is_news else []
        is_reported = tries == _REPORTED_AT[reason] if reason in _REPORTED_AT else is_news
        return refusal if is_reported else None

    def _is_of_two_writers(self, action: Write) -> bool:
        """Checks for, and records, a status write while another operator undoes each write."""
        if self.spending is None or not isinstance(action, PatchStatus):
            return False
        words = self.spending.find_other_writer()
        if words:
            self._note(action, WRITTEN_BY_OTHERS, words)
        return bool(words)

    def unsent(self, action: Write) -> None:
        """Records that an allowed action was not sent."""
        if self.spending is not None:
            self.spending.give_back(action)

    def conflicted(self, action: Write) -> None:
        """Records a conflict: the object has changed since the decision."""
        self._block(action)

    def end(self) -> None:
        """Records that no more actions begin; answers to earlier actions may still arrive."""
        if self.spending is not None:
            self.spending.end()

    def look_again_s(self) -> float | None:
        """Seconds until a refused action may be tried again; 0.0 after a new or a lifted refusal.

        If a refused action was due and the decision did not contain it, no decision wants it now. The next
        check is then at the time at which the refusal is forgotten.
        """
        if self.new or self._lifted:
            return 0.0
        known = self.known.values()
        due = [each.retry_at if each.retry_at > self.now else _forgotten_at(each) for each in known]
        waits = [max((moment - self.now).total_seconds(), 0.0) for moment in due]
        return min([*waits, *self._held_s], default=None)

    def _key(self, action: Write) -> Subject:
        return _kept_as(subject(action, self.resource), scopes_of(action))

    def _is_blocked(self, action: Write) -> bool:
        match action:
            case CreateObject() | ApplyObject():
                # If several groups need an object, one unblocked group is enough.
                nobody_needs_it = bool(action.scopes) and action.scopes <= self._blocked
                return self._makes_nothing or nobody_needs_it
            case DeleteObject():
                return self._keeps_status and action.after_status
        return False

    def _block(self, action: Write) -> None:
        match action:
            case CreateObject() | ApplyObject():
                self._blocked |= action.scopes
            case PatchStatus():
                # If pods of an epoch existed without the status, the epoch would begin a second time.
                self._makes_nothing = True
                self._keeps_status = True


def scopes_of(action: Write) -> frozenset[str]:
    """Scopes of an action."""
    return action.scopes if isinstance(action, CreateObject | ApplyObject) else frozenset()


def _kept_as(found: Subject, scopes: frozenset[str]) -> Subject:
    """Key of a refusal: kind and name, without the number of the epoch."""
    kind, name = found
    return (kind, _EPOCH[kind].sub("-*", name)) if kind in _EPOCH and scopes else found


def _content(refusal: Refusal) -> tuple[str, str]:
    return refusal.reason, refusal.message.replace(refusal.name, "")
