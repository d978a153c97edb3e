"""The revision and plan that the pods of an epoch were created with. Pure."""

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
    """The revision and plan that an epoch was created with.

    Attributes:
        revision: stored revision for new pods of this epoch, or None.
        plan: stored plan, or None if its ConfigMap is gone.
        pods: indices of the pods of the complete epoch.
    """

    revision_name: str | None
    revision: Revision | None
    plan_hash: str | None
    plan: Plan | None
    pods: frozenset[int]

    @classmethod
    def of(cls, context: Context, status: GroupStatus, current: Sequence[PodView]) -> "Made":
        """Reads revision and plan from the labels of the pods, otherwise from the status."""
        revision_name = revision_of(context, status, current)
        plan_hash = _label_or_status(current, names.LABEL_PLAN, context.plans, status.plan_hash)
        plan = context.plans.get(plan_hash or "")
        revision = context.revisions.get(revision_name or "")
        if plan is not None:
            count = len(plan.pods)
        elif revision is not None:
            spec = revision.spec_of_pods(context.options.pod_resources)
            count = sum(role.pods for role in spec.roles)
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
        """Whether a stored plan or revision gives the number of pods."""
        return self.plan is not None or self.revision is not None

    def has(self, index: int) -> bool:
        """Checks whether the epoch can contain a pod of this index."""
        return index in self.pods or not self.is_known

    def missing(self, current: Sequence[PodView]) -> set[int]:
        """Indices of the pods that do not exist."""
        return set(self.pods - {index_of(pod) for pod in current})


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunEpoch:
    """A group's epoch that has begun."""

    context: Context
    status: GroupStatus
    pods: Sequence[PodView]
    made: Made

    @property
    def missing(self) -> set[int]:
        """Indices of the pods that do not exist."""
        return self.made.missing(self.pods)

    @property
    def replace_after_s(self) -> float:
        """Seconds from the creation of a pod that its node rejected to its replacement."""
        return restarts.backoff_s(self.status.rejections, self.context.life.restart)

    @property
    def spare(self) -> list[PodView]:
        """Pods that never ran and never will, and that the operator may replace now."""
        return startup.find_spare(self.pods, self.context.now, replace_after_s=self.replace_after_s)


def had_run(status: GroupStatus) -> list[str]:
    """Names of the pods that had run when the status was last written."""
    return [entry.pod for entry in status.members if entry.started or entry.ready]


def revision_of(context: Context, status: GroupStatus, pods: Sequence[PodView]) -> str | None:
    """Revision from the labels of the pods, otherwise from the status; None if neither has it."""
    return _label_or_status(pods, names.LABEL_REVISION, context.revisions, status.revision)


def _label_or_status(
    pods: Sequence[PodView], label: str, known: Mapping[str, Any], kept: str | None
) -> str | None:
    """Chooses the label's value if it is known, otherwise the status's if known, otherwise either."""
    values = sorted({value for pod in pods if (value := pod.labels.get(label))})
    known_values = [value for value in values if value in known]
    if known_values:
        return known_values[0]
    if kept in known or not values:
        return kept
    return values[0]
