"""`spec` of a HeteroInference: what the user asks for.

Attribute docstrings become the descriptions of the CRD. Pure.
"""

from enum import StrEnum
from typing import Annotated, ClassVar, Final

from pydantic import Field

from heteroinfer_contract import names
from heteroinfer_contract.plan import MAX_WORLD_SIZE, Mode
from heteroinfer_operator.api.base import (
    Duration,
    Model,
    Port,
    StatusModel,
    ValidationRule,
    When,
    duration_rule,
    map_list,
)
from heteroinfer_operator.api.engine import EngineSpec
from heteroinfer_operator.api.model_source import ModelSpec
from heteroinfer_operator.api.pod_fields import ClassNameOrNone, LabelKeyOrNone, OperatorClass, QueueName
from heteroinfer_operator.api.role import MAX_RANKS_PER_POD, RoleSpec

MAX_ROLES: Final = 16
MAX_GROUPS: Final = 64
MAX_RANKS: Final = 4096
"""Ranks of all groups: the status has an entry for each, and etcd takes 1.5 MiB of an object."""
MAX_RESTARTS: Final = 20


class StageOrder(StrEnum):
    """Which role's stages come first."""

    AUTO = "Auto"
    AS_LISTED = "AsListed"


class ParallelismSpec(Model):
    """How the ranks share the model; whatever is left out is planned."""

    mode: Mode = Mode.PIPELINE
    """Pipeline: each stage holds whole layers. Tensor: GPU and CPU ranks split each layer. FeedForward: the
    GPU keeps attention, and CPU ranks of its pod (roles[].feedForward) compute experts and MLPs."""
    tensor: Annotated[int, Field(ge=1, le=MAX_WORLD_SIZE)] | None = None
    """Ranks of a stage."""
    pipeline: Annotated[int, Field(ge=1, le=MAX_WORLD_SIZE)] | None = None
    """Stages."""
    stage_order: StageOrder = StageOrder.AUTO
    """Auto: CPU stages first and GPU stages last, so that the output head is on a GPU."""
    batches_in_flight: Annotated[int, Field(ge=1, le=8)] = 1
    """Decode batches in the pipeline at once; each reads all weights, so one is best where reading bounds."""


class ShortageAction(StrEnum):
    """What to do when GPUs are missing."""

    WAIT = "Wait"
    CPU_ONLY = "CPUOnly"


class ShortageSpec(Model):
    """What to do when there are fewer GPUs than the roles ask for."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (duration_rule("after", "after", least="0s", most="168h"),)

    action: ShortageAction = ShortageAction.WAIT
    """Wait for them, or run the GPU roles on CPUs."""
    after: Duration = "10m"
    """How long GPUs may be missing before CPUOnly is done; no wait where nodes can't come."""


class PlanningSpec(Model):
    """How the plan is made."""

    on_gpu_shortage: ShortageSpec = Field(default=ShortageSpec(), alias="onGPUShortage")
    """What to do when there are fewer GPUs than the roles ask for."""


class NetworkSpec(Model):
    """How the pods of a group reach each other."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        duration_rule("heartbeatTimeout", "heartbeat_timeout", least="1s", most="5m"),
    )

    interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$", min_length=1, max_length=15)] = "auto"
    """Network interface; auto takes the one that routes to the leader."""
    rendezvous_port: Port = names.DEFAULT_RENDEZVOUS_PORT
    """torch.distributed's store on the leader."""
    heartbeat_timeout: Duration | None = None
    """Silence of a pod's supervisor after which it is lost; 1.5 s if not given, and more by itself where
    machines are busy. Longer where networks pause: a lost pod is then noticed that much later."""


class StartupSpec(Model):
    """How long a group that starts may stand still."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        duration_rule("timeout", "timeout", least="10s", most="24h"),
    )

    timeout: Duration = "30m"
    """Longest time without progress once every pod runs; a load whose bytes move goes on.
    Waiting for a node, an image or the model has no limit."""


class RestartSpec(Model):
    """How often a group is started again."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        duration_rule("window", "window", least="1m", most="720h"),
        duration_rule("backoffMax", "backoff_max", least="10s", most="24h"),
        duration_rule("nodeLostAfter", "node_lost_after", least="1s", most="24h"),
    )

    max_restarts: Annotated[int, Field(ge=0, le=MAX_RESTARTS)] = 5
    """Restarts within the window after which the group is Failed."""
    window: Duration = "1h"
    """Older restarts don't count, unless the group has not served since."""
    backoff_max: Duration = "5m"
    """Longest wait between two restarts, after evictions and rejections too."""
    node_lost_after: Duration = "60s"
    """How long a node may be unreachable before its pods are given up, and deleted by force."""


class RolloutSpec(Model):
    """How groups are replaced."""

    max_unavailable: Annotated[int, Field(ge=1, le=MAX_GROUPS)] = 1
    """Groups that may be replaced at once."""


class SchedulingSpec(Model):
    """How the pods of a group get onto nodes."""

    gang: When = When.AUTO
    """All pods of a group at once or none. Auto: by the cluster's gang scheduler if it has one, else nothing
    of a group is created until all its pods fit. Always: by a gang scheduler only. Never: the
    pods are created at once, and placed one by one."""
    queue_name: QueueName = ""
    """Queue of Kueue or Volcano."""
    scheduler_name: Annotated[str, Field(max_length=253)] = ""
    """Scheduler of the pods; if not given, that of the gang scheduler, or else the cluster's default."""
    priority_class_name: ClassNameOrNone = ""
    """Priority class of the pods."""
    topology_key: LabelKeyOrNone = ""
    """Node label within one value of which a group stays."""


_WORLD_CEL: Final = "self.roles.map(r, r.pods * r.ranksPerPod).sum()"
RESERVED_PORTS: Final = (
    names.DEFAULT_HEALTH_PORT,
    names.DEFAULT_CONTROL_PORT,
    names.DEFAULT_EXECUTOR_PORT,
    *range(names.DEFAULT_METRICS_PORT, names.DEFAULT_METRICS_PORT + MAX_RANKS_PER_POD),
)
"""Ports that every worker pod uses already."""


def _stages_fit_pods(spec: "HeteroInferenceSpec") -> bool:
    tensor = spec.parallelism.tensor
    return (
        tensor is None
        or spec.parallelism.mode is Mode.TENSOR
        or all(r.ranks_per_pod % tensor == 0 for r in spec.roles)
    )


def _layers_match_stages(spec: "HeteroInferenceSpec") -> bool:
    tensor = spec.parallelism.tensor
    return tensor is None or all(
        r.layers is None or len(r.layers) * tensor == r.num_ranks for r in spec.roles
    )


def _is_one_rank(spec: "HeteroInferenceSpec") -> bool:
    sizes = spec.parallelism
    return sizes.mode is not Mode.FEED_FORWARD or (
        spec.world_size == 1
        and spec.roles[0].layers is None
        and (sizes.tensor or 1) == (sizes.pipeline or 1) == 1
    )


class HeteroInferenceSpec(Model):
    """What the user asks for."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="(self.parallelism.mode == 'FeedForward') == self.roles.exists(r, has(r.feedForward))",
            message="parallelism.mode FeedForward and roles[].feedForward go together; give both, or neither",
            holds=lambda spec: (
                (spec.parallelism.mode is Mode.FEED_FORWARD)
                == any(role.feed_forward is not None for role in spec.roles)
            ),
        ),
        ValidationRule(
            cel=f"self.parallelism.mode != 'FeedForward' || ({_WORLD_CEL} == 1 && !has(self.roles[0].layers) "
            "&& (!has(self.parallelism.tensor) || self.parallelism.tensor == 1) "
            "&& (!has(self.parallelism.pipeline) || self.parallelism.pipeline == 1))",
            message="parallelism.mode FeedForward: expected one role with pods 1, ranksPerPod 1 and no "
            "layers (set feedForward.layers), and tensor and pipeline 1 or left out; several GPUs are not "
            "supported yet: use mode Pipeline for them",
            holds=_is_one_rank,
        ),
        ValidationRule(
            cel=f"{_WORLD_CEL} <= {MAX_WORLD_SIZE}",
            message=f"roles: a group has at most {MAX_WORLD_SIZE} ranks; use fewer pods or ranksPerPod",
            holds=lambda spec: spec.world_size <= MAX_WORLD_SIZE,
            got="%d",
            got_cel=(_WORLD_CEL,),
            got_values=lambda spec: (spec.world_size,),
        ),
        ValidationRule(
            cel=f"self.replicas * {_WORLD_CEL} <= {MAX_RANKS}",
            message=f"replicas: all groups together have at most {MAX_RANKS} ranks, since the status lists "
            "each; use fewer groups, or several resources",
            holds=lambda spec: spec.replicas * spec.world_size <= MAX_RANKS,
            got="%d groups of %d ranks",
            got_cel=("self.replicas", _WORLD_CEL),
            got_values=lambda spec: (spec.replicas, spec.world_size),
        ),
        ValidationRule(
            cel="!has(self.parallelism.pipeline) || !has(self.parallelism.tensor) "
            f"|| self.parallelism.tensor * self.parallelism.pipeline == {_WORLD_CEL}",
            message="parallelism: expected tensor x pipeline to be the number of ranks, "
            "the sum of pods x ranksPerPod over roles; change roles, or leave tensor and pipeline out",
            holds=lambda spec: (
                None in (spec.parallelism.tensor, spec.parallelism.pipeline)
                or spec.parallelism.tensor * spec.parallelism.pipeline == spec.world_size
            ),
            got="tensor %d x pipeline %d and roles with %d ranks",
            got_cel=("self.parallelism.tensor", "self.parallelism.pipeline", _WORLD_CEL),
            got_values=lambda spec: (spec.parallelism.tensor, spec.parallelism.pipeline, spec.world_size),
        ),
        ValidationRule(
            cel="!has(self.parallelism.pipeline) || has(self.parallelism.tensor) "
            f"|| {_WORLD_CEL} % self.parallelism.pipeline == 0",
            message="parallelism: expected the number of ranks, the sum of pods x ranksPerPod over roles, "
            "to be a multiple of pipeline; change roles, or leave pipeline out",
            holds=lambda spec: (
                spec.parallelism.pipeline is None
                or spec.parallelism.tensor is not None
                or spec.world_size % spec.parallelism.pipeline == 0
            ),
            got="pipeline %d and roles with %d ranks",
            got_cel=("self.parallelism.pipeline", _WORLD_CEL),
            got_values=lambda spec: (spec.parallelism.pipeline, spec.world_size),
        ),
        ValidationRule(
            cel="!has(self.parallelism.tensor) || self.parallelism.mode == 'Tensor' "
            "|| self.roles.all(r, r.ranksPerPod % self.parallelism.tensor == 0)",
            message="parallelism.tensor: the ranks of a stage are in one pod; "
            "make each role's ranksPerPod a multiple of it",
            holds=_stages_fit_pods,
            got="%d",
            got_cel=("self.parallelism.tensor",),
            got_values=lambda spec: (spec.parallelism.tensor,),
        ),
        ValidationRule(
            cel="self.roles.all(r, has(r.layers)) || !self.roles.exists(r, has(r.layers))",
            message="roles: give layers for all roles, or for none",
            holds=lambda spec: len({role.layers is None for role in spec.roles}) == 1,
        ),
        ValidationRule(
            cel="!has(self.parallelism.tensor) || self.roles.all(r, !has(r.layers) "
            "|| r.layers.size() * self.parallelism.tensor == r.pods * r.ranksPerPod)",
            message="roles: layers has one entry for each stage of the role, pods x ranksPerPod / tensor; "
            "add or remove entries",
            holds=_layers_match_stages,
        ),
        ValidationRule(
            cel="has(self.operatorClass) == has(oldSelf.operatorClass) "
            "&& (!has(self.operatorClass) || self.operatorClass == oldSelf.operatorClass)",
            message="operatorClass: cannot be changed, since two operators would act on one resource; "
            "delete the resource, and create it with the other class",
            holds=lambda spec: True,  # a rule over two versions, which only the API server has
        ),
        duration_rule("drainTimeout", "drain_timeout", least="0s", most="24h"),
        duration_rule("stepTimeout", "step_timeout", least="10s", most="24h"),
        ValidationRule(
            cel=f"![{', '.join(map(str, RESERVED_PORTS))}]"
            ".exists(p, p == self.engine.port || p == self.network.rendezvousPort) "
            "&& self.engine.port != self.network.rendezvousPort",
            message="engine.port and network.rendezvousPort: expected two ports that workers don't use, "
            f"not {', '.join(map(str, RESERVED_PORTS[:3]))} or {RESERVED_PORTS[3]}-{RESERVED_PORTS[-1]}; "
            "choose others",
            holds=lambda spec: (
                not {spec.engine.port, spec.network.rendezvous_port} & {*RESERVED_PORTS}
                and spec.engine.port != spec.network.rendezvous_port
            ),
            got="%d and %d",
            got_cel=("self.engine.port", "self.network.rendezvousPort"),
            got_values=lambda spec: (spec.engine.port, spec.network.rendezvous_port),
        ),
    )

    replicas: Annotated[int, Field(ge=0, le=MAX_GROUPS)] = 1
    """Groups: copies of the model, each served by its own pods."""
    suspend: bool = False
    """true removes all pods and keeps the resource."""
    operator_class: OperatorClass | None = None
    """Which operator serves the resource: that whose chart has this `operatorClass`; left out: that which has
    none. It cannot be changed."""
    restarted_at: (
        Annotated[
            str,
            Field(
                max_length=40,
                pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}([.][0-9]{1,9})?(Z|[+-][0-9]{2}:[0-9]{2})$",
            ),
        ]
        | None
    ) = None
    """Any change starts every group afresh and clears Failed."""
    model: ModelSpec
    """Which model is served."""
    engine: EngineSpec = EngineSpec()
    """vLLM's settings that the plan doesn't own."""
    parallelism: ParallelismSpec = ParallelismSpec()
    """How the ranks share the model; whatever is left out is planned."""
    roles: Annotated[
        tuple[RoleSpec, ...], Field(min_length=1, max_length=MAX_ROLES, json_schema_extra=map_list("name"))
    ]
    """The pods of each group."""
    planning: PlanningSpec = PlanningSpec()
    """How the plan is made."""
    network: NetworkSpec = NetworkSpec()
    """How the pods of a group reach each other."""
    startup: StartupSpec = StartupSpec()
    """How long a group that starts may stand still."""
    restart: RestartSpec = RestartSpec()
    """How often a group is started again."""
    rollout: RolloutSpec = RolloutSpec()
    """How groups are replaced."""
    scheduling: SchedulingSpec = SchedulingSpec()
    """How the pods of a group get onto nodes."""
    drain_timeout: Duration = "60s"
    """How long running requests may take to end when a group is stopped; of pods made from then on."""
    step_timeout: Duration | None = None
    """Longest time that a rank may be busy with one step, or API server and engine may answer nothing while
    no rank is busy, before the group is ended; 5m if not given."""

    @property
    def world_size(self) -> int:
        """Returns the ranks of a group."""
        return sum(role.num_ranks for role in self.roles)


class LifeSpec(StatusModel):
    """What a spec says of how groups live, which holds though the rest of the spec is refused."""

    replicas: Annotated[int, Field(ge=0, le=MAX_GROUPS)] | None = None
    """Groups; None where the spec does not say it in a way that can be read."""
    suspend: bool = False
    """Whether no group shall run."""
    startup: StartupSpec = StartupSpec()
    """How long a group that starts may stand still."""
    restart: RestartSpec = RestartSpec()
    """How often a group is started again."""
    rollout: RolloutSpec = RolloutSpec()
    """How groups are replaced."""
