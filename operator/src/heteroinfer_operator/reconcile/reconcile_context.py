"""The shared input of all parts of one reconcile. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from heteroinfer_contract.plan import Plan
from heteroinfer_operator.api import GroupStatus, LifecycleSpec
from heteroinfer_operator.cluster import Refusal, TryObjects
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.manifests.egress_policy import Isolation
from heteroinfer_operator.manifests.identity import EpochRef, Owner
from heteroinfer_operator.manifests.signer import Signer
from heteroinfer_operator.reconcile.group_planner import GroupPlanner
from heteroinfer_operator.reconcile.node_loss import NodeLoss
from heteroinfer_operator.reconcile.options import Options
from heteroinfer_operator.reconcile.refusals import NOT_ANSWERED, OBJECT_REFUSED
from heteroinfer_operator.reconcile.revisions import Revision, Target
from heteroinfer_operator.reconcile.scopes import CLIENTS_SCOPE, group_scope

POD: Final = "Pod"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """State of the dry run in which the API server validates the objects of the target revision.

    Attributes:
        dry_run: the dry run to start, or None while no decision depends on it.
        problem: why the API server refused the objects in the last dry run, or None.
        is_unanswered: whether a dry run has started but has no answer yet.
    """

    dry_run: TryObjects | None = None
    problem: HeteroInferError | None = None
    is_unanswered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionBlock:
    """Whether the disruption budget blocks all evictions, because a rollout stops a group.

    Attributes:
        wanted: whether the disruption budget must block all evictions.
        done: whether the budget already blocks all evictions, or no block is needed.
    """

    wanted: bool = False
    done: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One reconcile of one resource.

    Attributes:
        life: the fields of the spec that control start, restart and rollout of groups.
        replicas: number of wanted groups.
        target_failed: whether a group with the target revision has used up its restarts.
        revisions: revisions from which pods can be created, by name.
        recorded: names of the stored revisions.
        records_signed_by: fingerprint of the key that signed all stored revisions, or None.
        forged: names of revision and plan ConfigMaps that another user wrote or damaged.
        plans: stored plans, by hash.
        first_epoch: lowest number for an epoch that begins now.
        largest_epoch: largest epoch that the operator can have written to the status.
        connecting_s: seconds for which this process has seen ranks connect, by group index and epoch.
        never_created: names of pods that the operator decided to create but that never existed.
        never_requested: the subset of `never_created` that the operator never requested from the API server.
        never_placed: names of pods that were deleted before they had a node, so they never ran.
        isolation: pods of the namespace whose egress is restricted; None while that is unknown.
        fetches: whether a pod fetches the model, or is about to.
    """

    life: LifecycleSpec
    replicas: int
    owner: Owner
    now: datetime
    options: Options
    target: Target
    target_failed: bool
    revisions: Mapping[str, Revision]
    recorded: frozenset[str]
    records_signed_by: str | None
    signer: Signer
    forged: tuple[str, ...]
    plans: Mapping[str, Plan]
    planner: GroupPlanner
    node_loss: NodeLoss
    first_epoch: int
    largest_epoch: int
    connecting_s: Mapping[tuple[int, int], float]
    refusals: Sequence[Refusal] = ()
    admission: Admission = Admission()
    eviction_block: EvictionBlock = EvictionBlock()
    never_created: frozenset[str] = frozenset()
    never_requested: frozenset[str] = frozenset()
    never_placed: frozenset[str] = frozenset()
    isolation: Isolation | None = None
    fetches: bool = False

    @property
    def problem(self) -> HeteroInferError | None:
        """Why the target cannot start even with unlimited capacity, or None if it can start."""
        return self.target.refusal or self.planner.problem() or self.admission.problem

    @property
    def waits_for_admission(self) -> bool:
        """Whether groups must wait because the API server has not validated the target revision yet."""
        is_due_or_running = self.admission.dry_run is not None or self.admission.is_unanswered
        return is_due_or_running and self.admission.problem is None

    def with_chosen_mode(self) -> "Context":
        """Adds the mode that the planner chose in this reconcile to the revision of the current spec."""
        name = self.target.name
        if self.planner.chosen is None or name is None:
            return self
        with_mode = self.revisions[name].with_mode(self.planner.chosen)
        return replace(self, revisions={**self.revisions, name: with_mode})

    def epoch_ref(self, status: GroupStatus) -> EpochRef:
        """Reference to the current epoch of a group."""
        return EpochRef(owner=self.owner, index=status.index, epoch=status.epoch)

    def refusal_of(self, group: int) -> Refusal | None:
        """Returns the refusal that delays the pods of this group, or None.

        The refusal of another object takes precedence over the refusal of a pod, because pods need the
        object. Of several refusals, the result is the refusal with the latest retry.
        """
        of_other_objects = [refusal for refusal in self._refusals_of(group) if refusal.kind != POD]
        return max(of_other_objects, key=lambda refusal: refusal.retry_at, default=self.pod_refusal_of(group))

    def pod_refusal_of(self, group: int) -> Refusal | None:
        """Returns the refusal of a pod of this group, or None; of several, the refusal with the latest retry.

        A create without an answer from the API server is not a refusal: the operator tries again and does not
        delete other pods of the group.
        """
        refusals = [refusal for refusal in self._refusals_of(group) if refusal.kind == POD]
        return max(refusals, key=lambda refusal: refusal.retry_at, default=None)

    @property
    def refused_worker(self) -> tuple[int, Refusal] | None:
        """The index of a group with a refused pod, and the refusal; None if no group has a refused pod.

        Only refusals by the API server (ObjectRefused) count, because only these may come from a quota. While
        such a refusal exists, groups start one at a time. Otherwise groups that share a quota for one group
        could each get only some of their pods.
        """
        for index in range(self.replicas):
            refusal = self.pod_refusal_of(index)
            if refusal is not None and refusal.reason == OBJECT_REFUSED:
                return index, refusal
        return None

    @property
    def clients_refusal(self) -> Refusal | None:
        """Refusal of an object through which clients reach the groups, or None."""
        return next((refusal for refusal in self.refusals if CLIENTS_SCOPE in refusal.scopes), None)

    def _refusals_of(self, group: int) -> list[Refusal]:
        """Returns the refusals that block objects of this group.

        A create of a pod that the API server did not answer is not a refusal.
        """
        scope = group_scope(group)
        return [
            refusal
            for refusal in self.refusals
            if refusal.blocks
            and scope in refusal.scopes
            and (refusal.kind, refusal.reason) != (POD, NOT_ANSWERED)
        ]
