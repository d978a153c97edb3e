"""What is to be done with one group. Pure.

An epoch lives as long as all its pods do, from their first run on: a pod that is seen to end before it
has run is replaced, and the others wait for it; with Kueue they go, too. One that is gone unseen may
have run, and may run still where nobody sees it: its name is not used again. Whatever ends an
epoch, the failure and the next one are written to the status first, then the old pods are
deleted, and the new ones are created once the old are gone.

A running epoch needs neither the spec nor its plan to live on: what it was made with is kept, and its
pods say the rest. While the spec is refused, the next epoch is of the revision that the last one had.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.group_report import GroupReport, RankPhase
from heteroinfer_contract.plan import Plan
from heteroinfer_operator.api import (
    FailureStatus,
    GroupPhase,
    GroupStatus,
    StartupPhase,
)
from heteroinfer_operator.api.base import MAX_TEXT
from heteroinfer_operator.api.status import MOST_COUNT, next_count, next_epoch
from heteroinfer_operator.cluster import (
    CreateObject,
    DeleteObject,
    Gang,
    Manifest,
    PodView,
    RecordEvent,
    Refusal,
)
from heteroinfer_operator.errors import HeteroInferError, PlanError, PlanReason, SpecError
from heteroinfer_operator.manifests.group_key_secret import KIND as SECRET
from heteroinfer_operator.manifests.identity import EpochRef
from heteroinfer_operator.quantity import parse_duration_s
from heteroinfer_operator.reconcile import restarts, startup
from heteroinfer_operator.reconcile.epoch_end import (
    POD_DELETED,
    POD_ENDED,
    EpochEnd,
    find_epoch_end,
    has_run,
)
from heteroinfer_operator.reconcile.epoch_pods import (
    decide_creates,
    decide_key,
    find_changed_images,
    find_lost_key,
    gang_object,
    name_epoch,
    start_events,
)
from heteroinfer_operator.reconcile.group_planner import WAITING_FOR_MODEL, EpochPlan, gang_of
from heteroinfer_operator.reconcile.reconcile_context import POD, Context
from heteroinfer_operator.reconcile.revisions import Revision

_ENDED_EPOCH_GRACE_S = 2
"""For the pods of an epoch that has ended: there is no request left that they could answer."""
PODS_NEVER_SEEN: Final = "PodsNeverSeen"
_NOT_ANSWERED: Final = "waiting for the API server to say whether it takes the new revision"
_CONSEQUENCES_OF_NODE_LOSS: Final = frozenset({FailureReason.POD_LOST.value, POD_DELETED, POD_ENDED})
_NOTHING_RUNS: Final[Mapping[str, Any]] = {
    "startup": None,
    "members": (),
    "measured_time": None,
    "kv": None,
    "after_failure": False,
    "served_time": None,
    "rejections": 0,
    "rejected_pods": (),
    "spare_pods": (),
    "stuck_pods": (),
}
"""What a status says of a group without an epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDecision:
    """What one group needs.

    Attributes:
        status: its next status.
        deletes: of its pods.
        keys: the Secret of its key, where a pod waits for it.
        creates: its pods, each group's first after the Secret of its key.
        events: for people.
        look_again_s: seconds until the next look, or None.
        runs: whether it has an epoch.
        plan: of its epoch, or None if it has none, or none that is kept.
        new_plan: the plan if it is to be kept from now on.
        notes: on a plan made now, for people; None for an older plan.
        refusal: why there is no plan, or None.
        unplaced: which pod has no node, and why, or "".
        gang_object: what tells a gang scheduler of the epoch, or None.
        lost_labels: which labels somebody took off a pod of the epoch, and what to do, or "".
        cut_off: whether, for that reason, clients do not reach it by their Service.
        silent: why nobody knows whether its Ready leader still serves, or "".
    """

    status: GroupStatus
    deletes: tuple[DeleteObject, ...] = ()
    keys: tuple[CreateObject, ...] = ()
    creates: tuple[CreateObject, ...] = ()
    events: tuple[RecordEvent, ...] = ()
    look_again_s: float | None = None
    runs: bool = False
    plan: Plan | None = None
    new_plan: Plan | None = None
    notes: tuple[str, ...] | None = None
    refusal: HeteroInferError | None = None
    unplaced: str = ""
    gang_object: Manifest | None = None
    lost_labels: str = ""
    cut_off: bool = False
    silent: str = ""


def epoch_of(pod: PodView) -> int:
    """Returns the epoch in a pod's labels."""
    return int(pod.labels[names.LABEL_EPOCH])


def index_of(pod: PodView) -> int:
    """Returns the index of a pod in its group."""
    return int(pod.labels[names.LABEL_POD_INDEX])


def decide_group(
    context: Context,
    status: GroupStatus,
    pods: Sequence[PodView],
    *,
    may_replace: bool,
    report: GroupReport | None = None,
) -> GroupDecision:
    """Returns what a group needs.

    Args:
        context: of this reconcile.
        status: of the group as last written; `epoch` 0 before its first epoch.
        pods: all pods of the group, of every epoch.
        may_replace: whether the group may be replaced now, if its revision is an old one.
        report: what its leader says of it now, or None.
    """
    epoch = max([status.epoch, *(epoch_of(pod) for pod in pods)])
    is_forgotten = status.epoch < epoch
    current = [pod for pod in pods if epoch_of(pod) == epoch]
    status = status.model_copy(update={"epoch": epoch, **({"spare_pods": ()} if is_forgotten else {})})
    if context.life.suspend:
        return stop_group(context, status, pods, "suspended: set spec.suspend to false to start")
    made = Made.of(context, status, current)
    unmade = _find_unmade(context, status)
    # Without pods, a status whose members never ran has an epoch only if it is known which pods that has.
    has_members = _had_run(status) or (status.members and made.is_known)
    if not current and not has_members and not (unmade and _goes_on(context, status, made)):
        return _between_epochs(context, _not_begun(context, status), pods)
    if is_forgotten:
        update = {"revision": made.revision_name, "plan_hash": made.plan_hash}
        status = status.model_copy(update=update)
    if may_replace and current and made.revision_name != context.target.name:
        return _replace(context, status, pods)
    if report is not None and (report.epoch != epoch or (made.plan and not report.covers(made.plan))):
        report = None
    epoch_end = _find_epoch_end(context, status, current, made)
    if epoch_end is not None:
        return _end_epoch(context, status, pods, epoch_end)
    if lacking := sorted(made.missing(current) - set(status.spare_pods) - unmade):
        return _end_incomplete(context, status, pods, lacking[0])
    living = _without_older(context, _living(context, status, current, made, report), pods)
    overdue = _find_overdue(context, living, report)
    return living if overdue is None else _end_epoch(context, status, pods, overdue)


def _find_unmade(context: Context, status: GroupStatus) -> set[int]:
    """Returns the pods of a group's epoch that were to be made, and have never existed."""
    if status.epoch_start_time is None or not context.unmade:
        return set()
    prefix = EpochRef(owner=context.owner, index=status.index, epoch=status.epoch).pod_name(0)[:-1]
    return {int(name.removeprefix(prefix)) for name in context.unmade if name.startswith(prefix)}


def _not_begun(context: Context, status: GroupStatus) -> GroupStatus:
    """Returns the status of a group; its epoch has not begun if the first of its pods was never asked for.

    The others are asked for once the first one is made.
    """
    first = EpochRef(owner=context.owner, index=status.index, epoch=status.epoch).pod_name(0)
    return status.model_copy(update={"epoch_start_time": None}) if first in context.unasked else status


def _goes_on(context: Context, status: GroupStatus, made: "Made") -> bool:
    """Returns whether an epoch of which no pod has been made yet is still the one to make."""
    has_all = made.plan is not None and made.revision is not None and context.refusal_of(status.index) is None
    return has_all and made.revision_name == _next_revision(context, status)


def _end_incomplete(
    context: Context, status: GroupStatus, pods: Sequence[PodView], index: int
) -> GroupDecision:
    """Returns the end of an epoch that lacks a pod which was made, or may have been."""
    refusal = context.pod_refusal_of(status.index)
    if refusal is not None:
        current = [pod for pod in pods if epoch_of(pod) == status.epoch]
        return _give_back(context, status, current, refusal)
    name = EpochRef(owner=context.owner, index=status.index, epoch=status.epoch).pod_name(index)
    message = f"pod {name} is not there, and nobody saw it end before it ran: it may have met others"
    epoch_end = EpochEnd(reason=POD_DELETED, message=message, counted=False)
    return _end_epoch(context, status, pods, epoch_end)


def _without_older(context: Context, living: GroupDecision, pods: Sequence[PodView]) -> GroupDecision:
    """Returns the decision with the deletion of pods of older epochs, seen only after their end."""
    older = [pod for pod in pods if epoch_of(pod) < living.status.epoch]
    deletes = context.node_loss.deletes(older, grace_s=_ENDED_EPOCH_GRACE_S)
    return replace(living, deletes=(*living.deletes, *deletes))


def _find_overdue(context: Context, living: GroupDecision, report: GroupReport | None) -> EpochEnd | None:
    if living.status.startup is None:
        return None
    timeout_s = parse_duration_s(context.life.startup.timeout)
    connecting_s = context.connecting_s.get((living.status.index, living.status.epoch), 0.0)
    return startup.find_overdue(living.status.startup, report, timeout_s=timeout_s, connecting_s=connecting_s)


def revision_of(context: Context, status: GroupStatus, pods: Sequence[PodView]) -> str | None:
    """Returns the revision that pods were made with, or else that of the status; None if neither says it."""
    return _said(pods, names.LABEL_REVISION, context.revisions, status.revision)


def _said(pods: Sequence[PodView], label: str, known: Mapping[str, Any], kept: str | None) -> str | None:
    """Returns what pods say by a label; the status goes before a value of which nothing is kept."""
    said = sorted({value for pod in pods if (value := pod.labels.get(label))})
    order = [*(value for value in said if value in known), *([kept] if kept in known else []), *said, kept]
    return order[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What an epoch was made with.

    Attributes:
        revision_name: hash.
        revision: that pods can be made of, or None.
        plan_hash: by which its plan is kept.
        plan: or None if it is not kept any more.
        pods: that it has when it is whole.
    """

    revision_name: str | None
    revision: Revision | None
    plan_hash: str | None
    plan: Plan | None
    pods: frozenset[int]

    @classmethod
    def of(cls, context: Context, status: GroupStatus, current: Sequence[PodView]) -> "Made":
        """Returns what the pods' labels say, or else the status."""
        revision_name = revision_of(context, status, current)
        plan_hash = _said(current, names.LABEL_PLAN, context.plans, status.plan_hash)
        plan = context.plans.get(plan_hash or "")
        revision = context.revisions.get(revision_name or "")
        if plan is not None:
            count = len(plan.pods)
        elif revision is not None:
            count = sum(role.pods for role in revision.spec.roles)
        else:
            count = max(index_of(pod) for pod in current) + 1 if current else 0
        return cls(
            revision_name=revision_name,
            revision=revision,
            plan_hash=plan_hash,
            plan=plan,
            pods=frozenset(range(count)),
        )

    @property
    def is_known(self) -> bool:
        """Returns whether something that is kept says how many pods it has."""
        return self.plan is not None or self.revision is not None

    def has(self, index: int) -> bool:
        """Returns whether it can have a pod of this index."""
        return index in self.pods or not self.is_known

    def missing(self, current: Sequence[PodView]) -> set[int]:
        """Returns the pods that are not there."""
        return set(self.pods - {index_of(pod) for pod in current})


def _find_epoch_end(
    context: Context, status: GroupStatus, current: Sequence[PodView], made: Made
) -> EpochEnd | None:
    epoch_end = (
        find_epoch_end(current)
        or context.node_loss.find_epoch_end([pod for pod in current if not startup.is_rejected(pod)])
        or _find_end_in_kueue(context, status, current)
    )
    if epoch_end is not None:
        return epoch_end
    present = {pod.name for pod in current}
    gone = [pod for pod in _had_run(status) if pod not in present]
    if gone:
        return EpochEnd(reason=POD_DELETED, message=f"pod {gone[0]} is gone")
    lacks_pods = bool(current and made.missing(current))
    return (
        _find_lost_plan(status, current, made)
        or find_lost_key(context, status, current, lacks_pods=lacks_pods)
        or _find_changed_images(context, status, current, made)
    )


def _find_changed_images(
    context: Context, status: GroupStatus, current: Sequence[PodView], made: Made
) -> EpochEnd | None:
    if made.plan is None or made.revision is None or not made.missing(current) & set(status.spare_pods):
        return None
    return find_changed_images(context, made.revision, made.plan, current)


def _find_lost_plan(status: GroupStatus, current: Sequence[PodView], made: Made) -> EpochEnd | None:
    """Returns the end of an epoch of which a pod or its container is to be made, and nobody knows how."""
    to_be_made = made.missing(current) and (made.plan is None or made.revision is None)
    waiting = next((pod.name for pod in current if not has_run(pod)), "") if made.plan is None else ""
    if not to_be_made and not waiting:
        return None
    what = f"the container of pod {waiting}" if waiting else f"a pod of epoch {status.epoch}"
    return EpochEnd(
        reason=PlanReason.PLAN_LOST.value,
        message=f"{what} is to be made, and what it is made with is not kept any more; a new epoch gets a "
        "new plan",
    )


def _find_end_in_kueue(context: Context, status: GroupStatus, current: Sequence[PodView]) -> EpochEnd | None:
    """Returns the end of an epoch of Kueue's of which a pod never ran and never will, or None.

    Kueue holds a pod that has ended, and so its name, until another one is there or all have ended.
    """
    if gang_of(current) is not Gang.KUEUE:
        return None
    spare = _find_spare(context, status, current)
    if not spare:
        return None
    message = f"{startup.describe_end(spare[0])}; Kueue lets the pods of a group go together only"
    deleted = spare[0].deleting
    lost = context.node_loss.find_epoch_end(spare)
    return lost or EpochEnd(
        reason=POD_DELETED if deleted else POD_ENDED, message=message, counted=not deleted
    )


def _had_run(status: GroupStatus) -> list[str]:
    """Returns the pods of an epoch that had run, as last written."""
    return [entry.pod for entry in status.members if entry.started or entry.ready]


def _is_asleep(status: GroupStatus, report: GroupReport | None) -> bool:
    if report is None:
        # A leader that does not answer in time once: what was last said holds as long as no pod ends.
        return status.phase is GroupPhase.SLEEPING
    return any(rank.phase is RankPhase.SLEEPING for rank in report.ranks)


def stop_group(context: Context, status: GroupStatus, pods: Sequence[PodView], message: str) -> GroupDecision:
    """Returns how a group that shall not run ends; its running requests may end first."""
    update: dict[str, Any] = {
        **_NOTHING_RUNS,
        "phase": GroupPhase.STOPPING if pods else GroupPhase.PENDING,
        "message": context.node_loss.find_held(pods) or message,
    }
    if status.epoch_start_time is not None or any(epoch_of(pod) == status.epoch for pod in pods):
        # From its first pod on: all of them may have run, and be gone, before anybody looks again.
        update |= {"epoch": next_epoch(status.epoch), "epoch_start_time": None}
    return GroupDecision(
        status=status.model_copy(update=update),
        deletes=context.node_loss.deletes(pods, grace_s=None),
        look_again_s=context.node_loss.look_again_s(pods),
    )


def _replace(context: Context, status: GroupStatus, pods: Sequence[PodView]) -> GroupDecision:
    update = {
        **_NOTHING_RUNS,
        "epoch": next_epoch(status.epoch),
        "revision": context.target.name,
        **_stopping(context, pods, "replaced by the new revision"),
        "epoch_start_time": None,
        "next_epoch_time": None,
        "restarts": 0,
        "failures": (),
    }
    return GroupDecision(
        status=status.model_copy(update=update),
        deletes=context.node_loss.deletes(pods, grace_s=None, after_status=True),
        look_again_s=context.node_loss.look_again_s(pods),
    )


def _end_epoch(
    context: Context, status: GroupStatus, pods: Sequence[PodView], epoch_end: EpochEnd
) -> GroupDecision:
    failure = FailureStatus(
        epoch=status.epoch,
        time=context.now,
        reason=epoch_end.reason,
        message=epoch_end.message[:MAX_TEXT],
        rank=epoch_end.rank,
        exit_code=epoch_end.exit_code,
        counted=epoch_end.counted,
        served=status.served_time is not None,
    )
    failures = restarts.remember(status.failures, failure)
    failed = restarts.used_up(failures, context.life.restart)
    update = {
        **_NOTHING_RUNS,
        "epoch": next_epoch(status.epoch),
        **(_failed(failures) if failed else _stopping(context, pods, _culprit(failures[-1]))),
        "epoch_start_time": None,
        "next_epoch_time": restarts.next_epoch_time(failures, context.life.restart),
        "restarts": next_count(status.restarts) if epoch_end.counted and not failed else status.restarts,
        "failures": failures,
        "after_failure": True,
    }
    who = "" if epoch_end.rank is None else f"rank {epoch_end.rank}: "
    event = RecordEvent(
        reason=epoch_end.reason,
        message=f"{name_epoch(status)} ended: {who}{epoch_end.message}"[:1000],
        warning=True,
    )
    ending = [pod for pod in pods if not (failed and _has_logs(pod))]
    return GroupDecision(
        status=status.model_copy(update=update),
        deletes=context.node_loss.deletes(
            ending, grace_s=None if epoch_end.orderly else _ENDED_EPOCH_GRACE_S, after_status=True
        ),
        events=(event,),
        look_again_s=context.node_loss.look_again_s(ending),
    )


def _stopping(context: Context, pods: Sequence[PodView], message: str | None) -> dict[str, Any]:
    """Returns what a status says of a group whose pods go: first of what holds them."""
    return {"phase": GroupPhase.STOPPING, "message": context.node_loss.message(pods) or message}


def _failed(failures: Sequence[FailureStatus]) -> dict[str, Any]:
    return {"phase": GroupPhase.FAILED, "message": _culprit(failures[-1])}


def _has_logs(pod: PodView) -> bool:
    return pod.termination is not None and not pod.deleting


def _culprit(failure: FailureStatus) -> str:
    who = "" if failure.rank is None else f"rank {failure.rank}: "
    return f"{failure.reason}: {who}{failure.message}"[:MAX_TEXT]


def _between_epochs(context: Context, status: GroupStatus, pods: Sequence[PodView]) -> GroupDecision:
    revision_name = _next_revision(context, status)
    waits = _waits_for_admission(context, status, revision_name)
    # What is not known to be taken forgives no failure: it may be refused, and the group be what it was.
    if revision_name is not None and status.revision != revision_name and not waits:
        update: dict[str, Any] = {"failures": (), "restarts": 0, "next_epoch_time": None}
        status = status.model_copy(update=update)
    status, events = _put_down_to_node(context, status, pods)
    failed = restarts.used_up(status.failures, context.life.restart)
    if failed:
        update = _failed(status.failures)
        pods = [pod for pod in pods if not _has_logs(pod)]
    elif pods:
        update = _stopping(context, pods, status.message)
    if failed or pods:
        return GroupDecision(
            status=status.model_copy(update=update),
            deletes=context.node_loss.deletes(pods, grace_s=_ENDED_EPOCH_GRACE_S, after_status=True),
            events=events,
            look_again_s=context.node_loss.look_again_s(pods),
        )
    if status.epoch_start_time is not None and context.refusal_of(status.index) is None:
        return _end_epoch(context, status, pods, _never_seen(status))
    if status.next_epoch_time is not None and status.next_epoch_time > context.now:
        # A clock that was set back, or a shorter backoffMax, prolongs no wait.
        longest = timedelta(seconds=parse_duration_s(context.life.restart.backoff_max))
        next_epoch_time = min(status.next_epoch_time, context.now + longest)
        wait_s = (next_epoch_time - context.now).total_seconds()
        update = {"phase": GroupPhase.WAITING, "next_epoch_time": next_epoch_time}
        return GroupDecision(status=status.model_copy(update=update), look_again_s=wait_s)
    refusal = context.pod_refusal_of(status.index)
    if refusal is not None and refusal.retry_at > context.now:
        update = _refused(context, status, refusal)
        if status.epoch_start_time is not None:  # it has begun in the status, and its pods were refused
            update |= {"epoch": status.epoch + 1, "epoch_start_time": None}
        return GroupDecision(
            status=status.model_copy(update=update),
            look_again_s=(refusal.retry_at - context.now).total_seconds(),
        )
    if waits:
        update = {"phase": GroupPhase.PENDING}
        update |= {"message": _NOT_ANSWERED} if context.admission.unanswered else {}
        return GroupDecision(status=status.model_copy(update=update))
    return _start(context, status)


def _never_seen(status: GroupStatus) -> EpochEnd:
    """Returns the end of an epoch of which no pod was ever seen: the next one waits longer each time."""
    message = (
        f"no pod of epoch {status.epoch} was ever seen: the pods were not created, or somebody changed "
        "or deleted them at once. Look for a mutating webhook or a controller that changes labels or owners "
        "of pods"
    )
    return EpochEnd(reason=PODS_NEVER_SEEN, message=message, counted=False)


def _waits_for_admission(context: Context, status: GroupStatus, revision: str | None) -> bool:
    """Returns whether a group's next epoch waits for what the API server says of the target.

    An answer is waited for a moment; a group that has another one to start by does not wait longer.
    """
    if not context.waits_for_admission:
        return False
    return not context.admission.unanswered or status.revision != revision


def _refused(context: Context, status: GroupStatus, refusal: Refusal) -> dict[str, Any]:
    return {
        **_NOTHING_RUNS,
        "after_failure": status.after_failure,
        "phase": GroupPhase.PENDING,
        "message": refusal.message[:MAX_TEXT],
        "startup": startup.begin(StartupPhase.SCHEDULING, status.startup, context.now),
    }


def _give_back(
    context: Context, status: GroupStatus, current: Sequence[PodView], refusal: Refusal
) -> GroupDecision:
    """Returns how a group of which a pod is refused gives back what its other pods hold, and tries again."""
    if any(pod.started for pod in current):
        message = f"not all of its pods can be made: {refusal.message}"
        end = EpochEnd(reason="PodRefused", message=message, counted=False)
        return _end_epoch(context, status, current, end)
    update = {"epoch": next_epoch(status.epoch), "epoch_start_time": None}
    return GroupDecision(
        status=status.model_copy(update=_refused(context, status, refusal) | update),
        deletes=context.node_loss.deletes(current, grace_s=_ENDED_EPOCH_GRACE_S, after_status=True),
        look_again_s=max((refusal.retry_at - context.now).total_seconds(), 0.0),
    )


def _put_down_to_node(
    context: Context, status: GroupStatus, pods: Sequence[PodView]
) -> tuple[GroupStatus, tuple[RecordEvent, ...]]:
    """Returns the status with a counted loss of a pod put down to its node, where that is lost too."""
    last = status.failures[-1] if status.failures else None
    if last is None or not last.counted or last.reason not in _CONSEQUENCES_OF_NODE_LOSS:
        return status, ()
    lost = context.node_loss.find_epoch_end([pod for pod in pods if epoch_of(pod) == last.epoch])
    if lost is None:
        return status, ()
    failures = restarts.excuse(status.failures, lost.message)
    update = {
        "failures": failures,
        "restarts": max(0, status.restarts - 1),
        "next_epoch_time": restarts.next_epoch_time(failures, context.life.restart),
        "message": _culprit(failures[-1]),
    }
    message = f"group {status.index} epoch {last.epoch}: {lost.message}"
    event = RecordEvent(reason=lost.reason, message=message[:1000], warning=True)
    return status.model_copy(update=update), (event,)


def _next_revision(context: Context, status: GroupStatus) -> str | None:
    """Returns the revision of a group's next epoch, or None while there is none that could start."""
    own = _own(context, status)
    if own is None or not _keeps_own(context, status):
        return context.target.name if context.problem is None else None
    return own[0].name


def _keeps_own(context: Context, status: GroupStatus) -> bool:
    """Returns whether a group stays with what it had: the target could not start, or has failed already.

    A model that is looked at again is waited for: the group may have ended because of it.
    """
    problem, same = context.problem, status.revision == context.target.name
    if problem is None:
        return (context.target_failed or context.admission.unanswered) and not same
    return not (same and problem.reason == WAITING_FOR_MODEL)


def _own(context: Context, status: GroupStatus) -> tuple[Revision, Plan] | None:
    """Returns what a group was last made with, as far as it is kept."""
    revision = context.revisions.get(status.revision or "")
    plan = context.plans.get(status.plan_hash or "")
    return (revision, plan) if revision is not None and plan is not None else None


def _plan_epoch(context: Context, status: GroupStatus) -> tuple[Revision, EpochPlan, str]:
    """Returns what the next epoch is made with: what the spec asks for, or else what the group had.

    Returns:
        The revision, the plan, and the hash by which the plan is kept.

    Raises:
        HeteroInferError: there is neither now.
    """
    own = _own(context, status)
    if own is None or not _keeps_own(context, status):
        if context.problem is not None:
            raise context.problem
        planned = context.planner.make()
        assert context.target.name is not None  # a spec that cannot be read is a problem
        return context.revisions[context.target.name], planned, planned.plan.hash
    revision, plan = own
    return revision, context.planner.make_again(revision.spec, plan), status.plan_hash or plan.hash


def _start(context: Context, status: GroupStatus) -> GroupDecision:
    try:
        revision, planned, plan_hash = _plan_epoch(context, status)
    except (PlanError, SpecError) as problem:
        phase = StartupPhase.MODEL if problem.reason == WAITING_FOR_MODEL else StartupPhase.SCHEDULING
        update: dict[str, Any] = {
            "phase": GroupPhase.PENDING,
            "message": problem.message[:MAX_TEXT],
            "startup": startup.begin(phase, status.startup, context.now),
        }
        return GroupDecision(status=status.model_copy(update=update), refusal=problem)
    plan, refusal = planned.plan, context.refusal_of(status.index)
    # Until all that pods need is there, no pod is asked for, and so no epoch has begun.
    waits = refusal is not None and (refusal.kind != POD or refusal.retry_at > context.now)
    # Pods that nobody has seen may have been made, and have run.
    follows = status.epoch if status.epoch_start_time is None else next_epoch(status.epoch)
    # What pods need carries the number too: it is kept until the first pod is asked for.
    first = EpochRef(owner=context.owner, index=status.index, epoch=follows).pod_name(0)
    stays = follows > 0 and (waits or first in context.unasked)
    update = {
        "epoch": follows if stays else max(follows, context.first_epoch),
        "revision": revision.name,
        "plan_hash": plan_hash,
        "phase": GroupPhase.STARTING if refusal is None else GroupPhase.PENDING,
        "message": f"creating {len(plan.pods)} pods" if refusal is None else refusal.message[:MAX_TEXT],
        "epoch_start_time": None if waits else context.now,
        "next_epoch_time": None,
        **_NOTHING_RUNS,
        "after_failure": status.after_failure,
        "rejections": status.rejections,
        "startup": startup.begin(StartupPhase.SCHEDULING, status.startup, context.now),
    }
    status = status.model_copy(update=update)
    indices = set() if waits else {pod.index for pod in plan.pods}
    return GroupDecision(
        status=status,
        keys=decide_key(context, status) if waits and refusal and refusal.kind == SECRET else (),
        creates=decide_creates(context, revision, status, plan, indices, planned.node_assignment),
        events=start_events(status, planned) if refusal is None else (),
        runs=True,
        plan=plan,
        new_plan=plan if plan_hash == plan.hash else None,
        notes=planned.notes,
        unplaced=planned.missing,
        gang_object=gang_object(context, revision, status, plan, planned.node_assignment.gang),
    )


def _living(
    context: Context,
    status: GroupStatus,
    current: Sequence[PodView],
    made: Made,
    report: GroupReport | None,
) -> GroupDecision:
    missing = made.missing(current)
    ready = not missing and all(pod.ready and not pod.ended for pod in current)
    asleep = not ready and not missing and _is_asleep(status, report)
    start = None
    if not ready and not asleep:
        start = startup.observe_startup(status.startup, current, report, whole=not missing, now=context.now)
    phase = GroupPhase.READY if ready else GroupPhase.SLEEPING if asleep else GroupPhase.STARTING
    silent = context.node_loss.message(current)
    message = silent or (_how_to_wake(current) if asleep else None)
    if start is not None:
        message = _unplaced(current) or silent or startup.describe(start, current, report, len(made.pods))
    spare = _find_spare(context, status, current)
    over = {index_of(pod) for pod in current if startup.is_over_unrun(pod)}
    # Who has the name next is made only after it was seen to be free.
    counted = over & set(status.rejected_pods)
    rejected = {index_of(pod) for pod in spare if startup.is_rejected(pod)} - counted
    stuck = startup.find_stuck(current, status.stuck_pods)
    newly_stuck = [pod for index, pod in stuck.items() if index not in status.stuck_pods]
    update = {
        "phase": phase,
        "message": message[:MAX_TEXT] if message else None,
        "plan_hash": made.plan_hash,
        "revision": made.revision_name,
        "epoch_start_time": status.epoch_start_time or (None if missing else context.now),
        "startup": start,
        "after_failure": status.after_failure and not ready,
        "served_time": status.served_time or (context.now if ready else None),
        # A pod that was never made is known as such by this process alone: the next one may be wrong.
        "spare_pods": tuple(sorted(over | (missing & set(status.spare_pods)))),
        "rejections": 0 if ready else min(status.rejections + len(rejected), MOST_COUNT),
        "rejected_pods": tuple(sorted(counted | rejected)),
        "stuck_pods": tuple(stuck),
    }
    before, status = status, status.model_copy(update=update)
    creates: tuple[CreateObject, ...] = ()
    gang = None
    if made.plan is not None and made.revision is not None:
        gang = gang_object(context, made.revision, status, made.plan, gang_of(current))
        if missing:
            assigned = context.planner.node_assignment_again(made.revision.spec, made.plan, current)
            creates = decide_creates(context, made.revision, status, made.plan, missing, assigned)
    after_s = _replace_after_s(context, before)
    waits = [
        context.node_loss.look_again_s(current),
        startup.look_again_s(start, current, context.now, replace_after_s=after_s),
    ]
    return GroupDecision(
        status=status,
        deletes=context.node_loss.deletes(spare, grace_s=0, after_status=True),
        keys=decide_key(context, status) if any(map(startup.lacks_configuration, current)) else (),
        creates=creates,
        events=_events(before, status, newly_stuck, spare),
        runs=True,
        plan=made.plan,
        unplaced=_unplaced(current),
        gang_object=gang,
        look_again_s=min((wait for wait in waits if wait is not None), default=None),
    )


def _find_spare(context: Context, status: GroupStatus, current: Sequence[PodView]) -> list[PodView]:
    after_s = _replace_after_s(context, status)
    return startup.find_spare(current, context.now, replace_after_s=after_s)


def _replace_after_s(context: Context, status: GroupStatus) -> float:
    return restarts.backoff_s(status.rejections, context.life.restart)


def _events(
    before: GroupStatus, after: GroupStatus, stuck: Sequence[PodView], spare: Sequence[PodView]
) -> tuple[RecordEvent, ...]:
    who = name_epoch(after)
    if after.phase is GroupPhase.READY and before.phase is not GroupPhase.READY:
        return (RecordEvent(reason="GroupReady", message=f"{who} serves"),)
    reported = [
        RecordEvent(
            reason="PodReplaced",
            message=f"{who}: {startup.describe_end(pod)}; it is replaced"[:1000],
            warning=True,
        )
        for pod in spare
        if not pod.deleting
    ]
    if stuck:
        trouble = "; ".join(map(startup.describe_wait, stuck))
        reported.append(RecordEvent(reason="PodWaits", message=f"{who}: {trouble}"[:1000], warning=True))
    return tuple(reported)


def _how_to_wake(pods: Sequence[PodView]) -> str:
    leader = min(pods, key=index_of)
    return f"asleep; POST /wake_up to the API of pod {leader.name} wakes it (kubectl port-forward reaches it)"


def _unplaced(pods: Sequence[PodView]) -> str:
    return next(
        (
            f"pod {pod.name} is not placed: {pod.unschedulable}"[:MAX_TEXT]
            for pod in pods
            if pod.unschedulable
        ),
        "",
    )
