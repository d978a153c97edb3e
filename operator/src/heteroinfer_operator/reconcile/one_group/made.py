"""What the pods of an epoch were made with, and what is known of the epoch. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from heteroinfer_contract import names
from heteroinfer_contract.plan import Plan
from heteroinfer_operator.api import GroupStatus
from heteroinfer_operator.cluster import PodView
from heteroinfer_operator.reconcile import restarts, startup
from heteroinfer_operator.reconcile.reading import index_of
from heteroinfer_operator.reconcile.reconcile_context import Context
from heteroinfer_operator.reconcile.revisions import Revision


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What an epoch was made with.

    Attributes:
        revision: that pods can be made of, or None.
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
        plan_hash = _label_or_status(current, names.LABEL_PLAN, context.plans, status.plan_hash)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunEpoch:
    """An epoch of a group that has begun."""

    context: Context
    status: GroupStatus
    pods: Sequence[PodView]
    made: Made

    @property
    def missing(self) -> set[int]:
        """Returns the indices of the pods that are not there."""
        return self.made.missing(self.pods)

    @property
    def replace_after_s(self) -> float:
        """Returns how long after its creation a pod that its node rejected is replaced."""
        return restarts.backoff_s(self.status.rejections, self.context.life.restart)

    @property
    def spare(self) -> list[PodView]:
        """Returns the pods that never ran and never will, whose names others shall have now."""
        return startup.find_spare(self.pods, self.context.now, replace_after_s=self.replace_after_s)


def had_run(status: GroupStatus) -> list[str]:
    """Returns the names of a group's pods that had run, as last written."""
    return [entry.pod for entry in status.members if entry.started or entry.ready]


def revision_of(context: Context, status: GroupStatus, pods: Sequence[PodView]) -> str | None:
    """Returns the revision that pods were made with, or else that of the status; None if neither says it."""
    return _label_or_status(pods, names.LABEL_REVISION, context.revisions, status.revision)


def _label_or_status(
    pods: Sequence[PodView], label: str, known: Mapping[str, Any], kept: str | None
) -> str | None:
    """Returns the value of a label if it is known, else the status's if that is, else either."""
    values = sorted({value for pod in pods if (value := pod.labels.get(label))})
    known_values = [value for value in values if value in known]
    if known_values:
        return known_values[0]
    if kept in known or not values:
        return kept
    return values[0]
