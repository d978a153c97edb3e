"""What is decided about one group. Pure."""

from dataclasses import dataclass

from heteroinfer_contract.plan import Plan
from heteroinfer_operator.api import GroupStatus
from heteroinfer_operator.cluster import CreateObject, DeleteObject, Manifest, RecordEvent
from heteroinfer_operator.errors import HeteroInferError


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDecision:
    """What one group needs.

    Attributes:
        keys: the Secret of its key, where a pod waits for it.
        creates: its pods, each group's first after the Secret of its key.
        runs: whether it has an epoch.
        new_plan: the plan if it is to be kept from now on.
        notes: on a plan made now, for people; None for an older plan.
        unplaced: which pod has no node, and why, or "".
        gang_object: what tells a gang scheduler of the epoch, or None.
        lost_labels: which labels somebody took off a pod of the epoch, and what to do, or "".
        cut_off: whether, for that reason, clients do not reach it by their Service.
        silent: why nobody knows whether its Ready leader still serves, or "".
        defaulted: resources that a LimitRange gave its pods, by role, or "".
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
    defaulted: str = ""
