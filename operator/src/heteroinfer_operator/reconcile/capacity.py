"""What there is to plan with, counted once a pass and used up by the groups it starts. Pure."""

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, Plan
from heteroinfer_operator.api import (
    ConditionStatus,
    ConditionType,
    HeteroInferenceSpec,
    HeteroInferenceStatus,
)
from heteroinfer_operator.cluster import Observation
from heteroinfer_operator.errors import PlanError, Shortage
from heteroinfer_operator.planning import Inventory, Planned, make_plan

WAITING_FOR_MODEL = "WaitingForModel"


@dataclass(slots=True, kw_only=True)
class GroupPlanner:
    """Makes the plans of the groups that start in one pass.

    Attributes:
        spec: what the user asks for.
        profile: of the model, or None while it is not known.
        waits_for: what is said while it is not.
        served_name: name in the OpenAI API.
        model_path: where the ranks find the model.
        free_gpus: by resource name, not yet promised to a group; None where unknown.
        shortage_age_s: how long GPUs have been missing; None where waiting is of no use.
    """

    spec: HeteroInferenceSpec
    profile: ModelProfile | None
    waits_for: str
    served_name: str
    model_path: str
    free_gpus: Counter[str] | None
    shortage_age_s: float | None
    _roles: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        """Looks up the GPU resource of each role once."""
        self._roles = {role.name: role.gpu_resource for role in self.spec.roles}

    def make(self) -> Planned:
        """Returns the plan of one more group; its GPUs are not given to the next.

        Raises:
            Shortage: GPUs are missing now.
            PlanError: there is no plan, or the model is not known yet.
        """
        planned = self._plan(Inventory(gpus=self.free_gpus, shortage_age_s=self.shortage_age_s))
        if self.free_gpus is not None:
            self.free_gpus.subtract(self._gpus(planned.plan))
        return planned

    def refusal(self) -> PlanError | None:
        """Returns why there would be no plan however much were free, or None if there is one."""
        try:
            self._plan(Inventory())
        except PlanError as refusal:
            return refusal
        return None

    def _plan(self, inventory: Inventory) -> Planned:
        if self.profile is None:
            raise PlanError(f"waiting for the model: {self.waits_for}", reason=WAITING_FOR_MODEL)
        return make_plan(
            self.spec, self.profile, inventory, served_name=self.served_name, model_path=self.model_path
        )

    def _gpus(self, plan: Plan) -> Counter[str]:
        return Counter(self._roles[rank.role] for rank in plan.ranks if rank.device is Device.GPU)


def free_gpus(spec: HeteroInferenceSpec, observation: Observation) -> Counter[str] | None:
    """Returns the GPUs that a new group may take, by resource name; None if nodes are not known.

    Allocatable on schedulable nodes, less what pods request, less what is promised to pods that
    have no node yet.
    """
    if observation.nodes is None:
        return None
    free: Counter[str] = Counter()
    resources = {role.gpu_resource for role in spec.roles}
    for node in observation.nodes:
        if node.schedulable:
            for resource in resources:
                count = node.allocatable.get(resource, 0) - node.requested.get(resource, 0)
                free[resource] += max(int(count), 0)
    for demand in observation.promised:
        for resource in resources:
            free[resource] -= int(demand.requests.get(resource, 0))
    return free


def shortage_age_s(status: HeteroInferenceStatus, now: datetime) -> float:
    """Returns how long GPUs have been missing, in seconds; 0 if they were not, as last written."""
    capacity = status.condition(ConditionType.CAPACITY_AVAILABLE.value)
    short = (
        capacity is not None
        and capacity.status is ConditionStatus.FALSE
        and capacity.reason == Shortage.reason
    )
    return (now - capacity.last_transition_time).total_seconds() if capacity and short else 0.0
