"""The decision about one group. Pure."""

from dataclasses import dataclass

from heteroinfer_contract.plan import Plan
from heteroinfer_operator.api import GroupStatus
from heteroinfer_operator.cluster import CreateObject, DeleteObject, Manifest, RecordEvent
from heteroinfer_operator.errors import HeteroInferError


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDecision:
    """The changes that one group needs, and facts for the conditions.

    Attributes:
        key_creates: creation of the Secret with the group's key, if a pod waits for that Secret.
        creates: creation of the group's pods, after the Secret with its key.
        runs: whether the group has an active epoch, perhaps one that starts now.
        new_plan: plan that the operator must store from now on.
        notes: notes for users on a plan made in this reconcile; None for an older plan.
        placed: whether all pods of the running epoch exist and have nodes.
        unplaced: the pod that has no node, and the reason, or "".
        gang_object: object that describes the epoch to a gang scheduler, or None.
        lost_labels_message: the labels that a pod of the epoch has lost, and the fix, or "".
        is_cut_off: whether the lost labels remove the group from the Service of clients.
        silent_leader: message that the Ready leader does not answer the operator, or "".
        limit_range_defaults: resources that a LimitRange added to the group's pods, by role, or "".
    """

    status: GroupStatus
    deletes: tuple[DeleteObject, ...] = ()
    key_creates: tuple[CreateObject, ...] = ()
    creates: tuple[CreateObject, ...] = ()
    events: tuple[RecordEvent, ...] = ()
    look_again_s: float | None = None
    runs: bool = False
    plan: Plan | None = None
    new_plan: Plan | None = None
    notes: tuple[str, ...] | None = None
    refusal: HeteroInferError | None = None
    placed: bool = False
    unplaced: str = ""
    gang_object: Manifest | None = None
    lost_labels_message: str = ""
    is_cut_off: bool = False
    silent_leader: str = ""
    limit_range_defaults: str = ""
