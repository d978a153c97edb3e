"""What a refused action keeps from being done, and when it is tried again. Pure.

A refused child blocks its own scope, such as one group; all else of the resource lives on. What was
refused is not asked for again before its time, so that a look at the resource, which pods need within
seconds, costs no request that will be refused.
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
from heteroinfer_operator.reconcile.budget import Spending, is_pod

OBJECT_REFUSED: Final = "ObjectRefused"
STATUS: Final = f"{names.KIND}/status"
REVISION: Final = "Revision"
"""Kind of a refusal of what a revision would need, of which nothing was made."""
NAME_TAKEN: Final = "NameTaken"
NAME_HELD: Final = "NameHeld"
"""An object that shall go, or will go with its owner, has the name still."""
CHANGED_BY_OTHERS: Final = "ChangedByOthers"
"""An object is another one than what was written, as soon as it is, or each time."""
DELETED_BY_OTHERS: Final = "DeletedByOthers"
"""An object is made again and again, and deleted each time."""
MADE_BY_OTHERS: Final = "MadeByOthers"
"""An object that is not wanted is deleted again and again, and made each time."""
NOT_ANSWERED: Final = "NotAnswered"
"""The API server has not said yet whether it takes a revision or another write, or could not."""
TOO_MANY_PODS: Final = "TooManyNewPods"
"""The resource's budget of new pods is spent."""
WRITTEN_BY_OTHERS: Final = "StatusWrittenByOthers"
"""Another operator changes the status after each write."""

OF_CHILDREN: Final = frozenset({OBJECT_REFUSED, NAME_TAKEN, NAME_HELD, CHANGED_BY_OTHERS, DELETED_BY_OTHERS})
"""Reasons why a child is not as it should be."""
_NOT_MADE: Final = frozenset({OBJECT_REFUSED, NAME_TAKEN, NAME_HELD})
"""Reasons that say that an object was not created; one without an answer may have been."""

_FIRST_S: Final = 1.0
_MOST_S: Final = 30.0
_HELD_FIRST_S: Final = 0.2
_STATUS_MOST_S: Final = 1.0
"""Clients and people act on the status."""
REPORTED_TRIES: Final = 5
_REPORTED_AT: Final = MappingProxyType({NAME_HELD: REPORTED_TRIES, NOT_ANSWERED: REPORTED_TRIES})
"""Tries after which an event tells of it: what goes by itself is gone before."""
_POD_FIRST_S: Final = 5.0
_POD_MOST_S: Final = 300.0
"""A pod refused by a quota: the pods that were made before it are given back each time."""
_FORGOTTEN_AFTER: Final = timedelta(seconds=10)
"""What nobody wants any more is not refused any more; this long after its time it is forgotten."""
_POD_FORGOTTEN_AFTER: Final = timedelta(seconds=90)
"""Longer than the pods that are given back take to go: before, the refused one is not tried again."""
_BUDGET_MOST_S: Final = 60.0
"""Longest wait for the budget, and time for which two writers of a status are reported."""

Subject: TypeAlias = tuple[str, str]
"""Kind and name."""
_EPOCH: Final[Mapping[str, re.Pattern[str]]] = MappingProxyType(
    {
        "Pod": re.compile(r"-[0-9]+(?=-[0-9]+$)"),
        "PodGroup": re.compile(r"-[0-9]+$"),
        "Workload": re.compile(r"-[0-9]+$"),
    }
)
"""By kind: where the name of an object of an epoch has the epoch."""


def subject(action: Write, resource: str) -> Subject:
    """Returns which object an action writes."""
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
    first_s, most_s = (_POD_FIRST_S, _POD_MOST_S) if kind in ("Pod", REVISION) else (_FIRST_S, _MOST_S)
    if reason == NOT_ANSWERED:
        first_s, most_s = _FIRST_S, _MOST_S
    if reason == NAME_HELD:
        first_s, most_s = _HELD_FIRST_S, _MOST_S
    if reason in (TOO_MANY_PODS, WRITTEN_BY_OTHERS):
        return _BUDGET_MOST_S
    if kind == STATUS:
        most_s = _STATUS_MOST_S
    return float(min(first_s * 2.0 ** min(tries - 1, 16), most_s))


def _jitter(action: Write, reason: str, kept_as: Subject, tries: int) -> float:
    """Returns the part of its delay, 0.5 to 1, after which a refused pod is tried again; 1 for all else.

    Resources and groups that a quota refused at one moment must not all come back at another one: each would
    get some of its pods, and give them back for want of the others.
    """
    if reason != OBJECT_REFUSED or not isinstance(action, CreateObject) or not is_pod(action):
        return 1.0
    seed = repr((action.manifest["metadata"].get("ownerReferences"), kept_as, tries))
    return 0.5 + hashlib.sha256(seed.encode()).digest()[0] / 510


def _forgotten_at(refusal: Refusal) -> datetime:
    return refusal.retry_at + (_POD_FORGOTTEN_AFTER if refusal.kind == "Pod" else _FORGOTTEN_AFTER)


def due_in_time(refusals: Iterable[Refusal], now: datetime) -> tuple[Refusal, ...]:
    """Returns refusals of before, none due later than it would be if it came now: a clock was set back."""

    def in_time(refusal: Refusal) -> Refusal:
        latest = now + timedelta(seconds=_delay_s(refusal.kind, refusal.reason, refusal.tries))
        return replace(refusal, retry_at=latest) if refusal.retry_at > latest else refusal

    return tuple(map(in_time, refusals))


def asked_anew(refusals: Iterable[Refusal], now: datetime) -> tuple[Refusal, ...]:
    """Returns what still stands of the refusals of a spec that was changed; all else is as if never tried.

    A revision that was refused is so while it is asked about anew, at once: a scale is no other revision, and
    must neither be said to roll it out nor to have taken back its refusal.
    """
    kept = (refusal for refusal in refusals if refusal.kind == REVISION)
    return tuple(replace(refusal, retry_at=min(refusal.retry_at, now)) for refusal in kept)


@dataclass(slots=True)
class Acting:
    """The actions of one decision on their way: which may still be done.

    Args:
        refusals: of before.
        spending: what the resource may cause now; None for no bound.
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
        """Forgets what was refused long ago and not tried again."""
        before = due_in_time(self.refusals, self.now)
        kept = [refusal for refusal in before if _forgotten_at(refusal) > self.now]
        self.known = {_kept_as((refusal.kind, refusal.name), refusal.scopes): refusal for refusal in kept}
        # The decision knew of it still: the next one says that it is over.
        self._lifted = len(kept) < len(before)

    def may(self, action: Write) -> bool:
        """Returns whether an action can be done now; one that cannot blocks its scopes."""
        if self._is_blocked(action):
            return False
        kept = self.known.get(self._key(action))
        if kept is None or kept.retry_at <= self.now or kept.reason == WRITTEN_BY_OTHERS:
            return self._is_within_budget(action)
        if kept.blocks:
            self._block(action)
        return False

    def _is_within_budget(self, action: Write) -> bool:
        """Counts an action against the budget; one that must wait holds back what depends on it."""
        if self.spending is None or not (wait_s := self.spending.spend(action)):
            return True
        self._held_s.append(wait_s)
        self._block(action)
        if is_pod(action):
            words = self.spending.describe_pods(scopes_of(action))
            self._note(action, TOO_MANY_PODS, words, retry_at=self.now + timedelta(seconds=wait_s))
        return False

    def done(self, action: Write) -> None:
        """Notes that an action was done."""
        if self.spending is not None and isinstance(action, PatchStatus):
            self.spending.budget.note_stored()
        if self._is_of_two_writers(action):
            return
        if self.known.pop(self._key(action), None) is not None:
            self._lifted = True

    def refused(self, action: Write, reason: str, message: str) -> Refusal | None:
        """Notes that an action was refused; returns the refusal if an event should tell it, else None."""
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
        # A pod that was changed is not known as ours: no pod of its group is of use.
        blocks = reason not in (CHANGED_BY_OTHERS, WRITTEN_BY_OTHERS) or is_pod(action)
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
        is_news = before is None or _said(before) != _said(refusal)
        self.new += [refusal] if is_news else []
        is_reported = tries == _REPORTED_AT[reason] if reason in _REPORTED_AT else is_news
        return refusal if is_reported else None

    def _is_of_two_writers(self, action: Write) -> bool:
        """Returns whether an action is a status write of those that another operator undoes; notes it."""
        if self.spending is None or not isinstance(action, PatchStatus):
            return False
        words = self.spending.find_other_writer()
        if words:
            self._note(action, WRITTEN_BY_OTHERS, words)
        return bool(words)

    def unsent(self, action: Write) -> None:
        """Notes that an action that may run was not sent."""
        if self.spending is not None:
            self.spending.give_back(action)

    def conflicted(self, action: Write) -> None:
        """Notes that an action met another state than it was decided on."""
        self._block(action)

    def end(self) -> None:
        """Notes that no more actions begin; answers to those that have may still come."""
        if self.spending is not None:
            self.spending.end()

    def look_again_s(self) -> float | None:
        """Returns when something that was refused may be tried again, in seconds; at once for news.

        What could have been tried and was not is wanted by nobody now: it is looked at once it is forgotten.
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
                # If several groups need an object, one group that is not blocked is enough.
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
                # An epoch that the status does not have would be begun a second time.
                self._makes_nothing = True
                self._keeps_status = True


def scopes_of(action: Write) -> frozenset[str]:
    """Returns what an action is part of."""
    return action.scopes if isinstance(action, CreateObject | ApplyObject) else frozenset()


def _kept_as(found: Subject, scopes: frozenset[str]) -> Subject:
    """Returns by what a refusal is kept: what is made for an epoch has another name in each."""
    kind, name = found
    return (kind, _EPOCH[kind].sub("-*", name)) if kind in _EPOCH and scopes else found


def _said(refusal: Refusal) -> tuple[str, str]:
    return refusal.reason, refusal.message.replace(refusal.name, "")
