"""What every part of one reconcile reads. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from heteroinfer_contract.plan import Plan
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.cluster import PodView
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.manifests.addressing import Addressing, ModelSource
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.manifests.worker_pods import WorkerImages
from heteroinfer_operator.node_assignment import NodeAssignment
from heteroinfer_operator.planning import Planned
from heteroinfer_operator.reconcile.node_loss import NodeLoss


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What an installation decides for all its resources.

    Attributes:
        addressing: how pods reach each other and their model.
        images: of workers whose spec names none.
        operator_key: of which groups' keys are made; None gives them none.
        nodes_may_come: whether waiting for missing GPUs is of use: not on one machine.
    """

    addressing: Addressing
    images: WorkerImages
    operator_key: bytes | None = field(default=None, repr=False)
    nodes_may_come: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One reconcile of one resource.

    Attributes:
        spec: what the user asks for.
        owner: the resource.
        revision: hash of the part of the spec whose change needs new pods.
        now: time of the reconcile, in UTC.
        options: of the installation.
        source: where the model is.
        plans: kept ones, by hash.
        make_plan: makes the plan of a new epoch; raises PlanError when there is none.
        node_assignment_again: where pods belong that are created for an epoch with others.
        refusal: why no new epoch could start however much were free, or None.
        node_loss: which pods are given up because of their node.
    """

    spec: HeteroInferenceSpec
    owner: Owner
    revision: str
    now: datetime
    options: Options
    source: ModelSource
    plans: Mapping[str, Plan]
    make_plan: Callable[[], Planned]
    node_assignment_again: Callable[[Plan, Sequence[PodView]], NodeAssignment]
    refusal: Callable[[], PlanError | None]
    node_loss: NodeLoss
