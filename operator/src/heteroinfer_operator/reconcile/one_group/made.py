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
class EpochOrigin:
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
    def from_pods(cls, context: Context, status: GroupStatus, current: Sequence[PodView]) -> "EpochOrigin":
        """Reads revision and plan from the labels of the epoch's pods, otherwise from the status.

        The number of pods comes from the plan, otherwise from the revision, otherwise from the highest index
        of an existing pod.
        """
        revision_name = revision_of(context, status, current)
        plan_hash = _label_or_status(current, names.LABEL_PLAN, context.plans, status.plan_hash)
        plan = context.plans.get(plan_hash or "")
        revision = context.revisions.get(revision_name or "")
        if plan is not None:
            num_pods = len(plan.pods)
        elif revision is not None:
            spec = revision.spec_of_pods(context.options.pod_resources)
            num_pods = sum(role.pods for role in spec.roles)
        else:
            num_pods = max(index_of(pod) for pod in current) + 1 if current else 0
        return cls(
            revision_name=revision_name,
            revision=revision,
            plan_hash=plan_hash,
            plan=plan,
            pods=frozenset(range(num_pods)),
        )

    @property
    def knows_pod_count(self) -> bool:
        """Whether a stored plan or revision gives the number of pods."""
        return self.plan is not None or self.revision is not None

    def can_have_pod(self, index: int) -> bool:
        """Reports whether the epoch can have a pod with this index; True if its number of pods is unknown."""
        return index in self.pods or not self.knows_pod_count

    def missing_indices(self, current: Sequence[PodView]) -> set[int]:
        """Returns the indices of the epoch's pods that do not exist."""
        return set(self.pods - {index_of(pod) for pod in current})


@dataclass(frozen=True, slots=True, kw_only=True)
class BegunEpoch:
    """A group's epoch that has begun."""

    context: Context
    status: GroupStatus
    pods: Sequence[PodView]
    origin: EpochOrigin

    @property
    def missing(self) -> set[int]:
        """Indices of the pods that do not exist."""
        return self.origin.missing_indices(self.pods)

    @property
    def replace_after_s(self) -> float:
        """Seconds from the creation of a pod that its node rejects until a new pod may replace it."""
        return restarts.backoff_s(self.status.rejections, self.context.life.restart)

    @property
    def replaceable_pods(self) -> list[PodView]:
        """Pods that never ran and never will; new pods may take their names now."""
        return startup.find_replaceable(self.pods, self.context.now, replace_after_s=self.replace_after_s)


def names_of_run_pods(status: GroupStatus) -> list[str]:
    """Returns the names of the pods that had run when the status was last written."""
    return [entry.pod for entry in status.members if entry.started or entry.ready]


def revision_of(context: Context, status: GroupStatus, pods: Sequence[PodView]) -> str | None:
    """Returns the name of the revision from the labels of the pods, otherwise from the status.

    Returns None if neither has it.
    """
    return _label_or_status(pods, names.LABEL_REVISION, context.revisions, status.revision)


def _label_or_status(
    pods: Sequence[PodView], label: str, stored: Mapping[str, Any], status_value: str | None
) -> str | None:
    """Returns the name of a plan or revision from the pods' label or from the status.

    The first in this order counts: a label whose object is stored, a status value whose object is stored, any
    label, any status value. Returns None if there is no label and no status value.

    Args:
        stored: stored plans or revisions, by name.
    """
    labels = sorted({value for pod in pods if (value := pod.labels.get(label))})
    stored_labels = [value for value in labels if value in stored]
    if stored_labels:
        return stored_labels[0]
    if status_value in stored or not labels:
        return status_value
    return labels[0]
