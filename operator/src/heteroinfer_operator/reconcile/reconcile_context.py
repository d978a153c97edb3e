"""What every part of one reconcile reads. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from heteroinfer_contract.plan import Plan
from heteroinfer_operator.api import GroupStatus, LifeSpec
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
    """What is known of whether the API server takes what the target's pods need.

    Attributes:
        asks: what to ask it, or None while nothing depends on it.
        problem: why it was refused when it was last asked, or None.
        unanswered: whether it was asked, and has not said anything yet.
    """

    asks: TryObjects | None = None
    problem: HeteroInferError | None = None
    unanswered: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """Whether no pod of several groups may be evicted, since a rollout takes down one of them.

    Attributes:
        wanted: whether the budget is to allow no eviction.
        done: whether it allows none, or need not.
    """

    wanted: bool = False
    done: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One reconcile of one resource.

    Attributes:
        life: what the spec says of the life of groups.
        replicas: groups that are wanted.
        target_failed: whether a group of the target's revision has used up its restarts.
        revisions: that pods can be made of, by name.
        recorded: names of the revisions that are kept.
        records_signed_by: fingerprint of the key that all of them are signed by, or None.
        forged: names of ConfigMaps with the names of such, which somebody else wrote or damaged.
        plans: kept ones, by hash.
        first_epoch: the lowest that a group may begin now.
        largest_epoch: that the operator can have written into the status.
        connecting_s: by group index and epoch: how long this process has seen its ranks connect, in seconds.
        unmade: names of pods that were to be made, and have never existed.
        unasked: those of them that the API server was not asked for.
        isolation: which pods of the namespace are kept in; None while that is not known.
        fetches: whether a pod fetches the model, or is about to.
    """

    life: LifeSpec
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
    closing: Closing = Closing()
    unmade: frozenset[str] = frozenset()
    unasked: frozenset[str] = frozenset()
    isolation: Isolation | None = None
    fetches: bool = False

    @property
    def problem(self) -> HeteroInferError | None:
        """Returns why no epoch of the target could start however much were free, or None if one could."""
        return self.target.refusal or self.planner.problem() or self.admission.problem

    @property
    def waits_for_admission(self) -> bool:
        """Returns whether no group is to get the target's revision yet: the API server is asked first."""
        asked = self.admission.asks is not None or self.admission.unanswered
        return asked and self.admission.problem is None

    def epoch_ref(self, status: GroupStatus) -> EpochRef:
        """Returns the epoch of a group."""
        return EpochRef(owner=self.owner, index=status.index, epoch=status.epoch)

    def refusal_of(self, group: int) -> Refusal | None:
        """Returns what of a group its pods wait for, since it was refused when it was last tried, or None."""
        found = [refusal for refusal in self._refusals_of(group) if refusal.kind != POD]
        return max(found, key=lambda refusal: refusal.retry_at, default=self.pod_refusal_of(group))

    def pod_refusal_of(self, group: int) -> Refusal | None:
        """Returns which refused pod of a group is the last to be tried again, or None.

        A create that the API server has not answered is no refusal: it is tried again, and no pod of the
        group is given back for it.
        """
        found = [refusal for refusal in self._refusals_of(group) if refusal.kind == POD]
        return max(found, key=lambda refusal: refusal.retry_at, default=None)

    @property
    def refused_worker(self) -> tuple[int, Refusal] | None:
        """Returns a pod of any group that the API server refused, with the index of its group, or None.

        While there is one, one group starts at a time: groups that start together could each get some of
        their pods, if a quota has room for one group only.
        """
        for index in range(self.replicas):
            found = self.pod_refusal_of(index)
            if found is not None and found.reason == OBJECT_REFUSED:
                return index, found
        return None

    @property
    def clients_refusal(self) -> Refusal | None:
        """Returns why what clients reach groups by could not be written, or None."""
        return next((each for each in self.refusals if CLIENTS_SCOPE in each.scopes), None)

    def _refusals_of(self, group: int) -> list[Refusal]:
        scope = group_scope(group)
        return [
            refusal
            for refusal in self.refusals
            if refusal.blocks and scope in refusal.scopes
            if (refusal.kind, refusal.reason) != (POD, NOT_ANSWERED)
        ]
