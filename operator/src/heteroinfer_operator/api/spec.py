"""The `spec` of a HeteroInference: the user's settings.

Attribute docstrings become the descriptions in the CRD; `api/crd.py` adds the default. Pure.
"""

from collections.abc import Callable
from enum import StrEnum
from types import MappingProxyType
from typing import Annotated, ClassVar, Final

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from heteroinfer_contract import names
from heteroinfer_contract.plan import MAX_WORLD_SIZE, Device, Mode
from heteroinfer_operator.api.base import (
    Duration,
    Model,
    Port,
    RuleReason,
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
"""Maximum ranks of all groups together: the status lists each rank, and etcd stores at most 1.5 MiB for an
object."""
MAX_RESTARTS: Final = 20
MAX_TOKENS: Final = 16_777_216
"""Maximum number of tokens that a field about the length of sequences accepts."""


class StageOrder(StrEnum):
    """Order of the pipeline stages."""

    AUTO = "Auto"
    AS_LISTED = "AsListed"


AUTO_MODE: Final = "Auto"
"""Value of parallelism.mode that means the same as no value."""


def _auto_to_none(value: object) -> object:
    """Returns None for the value Auto; any other mode stays the same.

    Raises the error for an unknown mode itself, because pydantic's own error would not list Auto.
    """
    modes = [AUTO_MODE, *(mode.value for mode in Mode)]
    if isinstance(value, str) and value not in modes:
        quoted_modes = [repr(mode) for mode in modes]
        choices = f"{', '.join(quoted_modes[:-1])} or {quoted_modes[-1]}"
        raise PydanticCustomError("enum", "must be {modes}", {"modes": choices})
    return None if value == AUTO_MODE else value


class ParallelismSpec(Model):
    """How the ranks share the model."""

    # Up to version 0.1.0, the CRD had this default, and the API server wrote the default into each object.
    first_defaults = MappingProxyType({"mode": Mode.PIPELINE})

    mode: Annotated[
        Mode | None,
        BeforeValidator(_auto_to_none),
        WithJsonSchema({"type": "string", "enum": [AUTO_MODE, *(mode.value for mode in Mode)]}),
    ] = None
    """How the model is divided. Pipeline: each stage holds whole layers. Tensor: the ranks split each layer.
    FeedForward: the GPU computes attention, and CPU ranks compute experts and MLPs. These CPU ranks are in
    the pod of the GPU (roles[].feedForward) or in the pods of CPU roles. Auto: the plan chooses the fastest
    of these modes that fits, once for each revision of the spec. The chosen mode may leave CPU roles unused,
    or move their CPUs and memory into the pod of the GPU. Default: Auto."""
    tensor: Annotated[int, Field(ge=1, le=MAX_WORLD_SIZE)] | None = None
    """Number of ranks in each stage. Default: chosen by the plan."""
    pipeline: Annotated[int, Field(ge=1, le=MAX_WORLD_SIZE)] | None = None
    """Number of stages. Default: chosen by the plan."""
    stage_order: StageOrder = StageOrder.AUTO
    """Order of the stages. Auto: CPU stages first and GPU stages last, so that a GPU computes the output
    head. If the group serves an encoder, for example of images, a GPU stage is first, and the other stages
    keep this order. Each stage with GPUs and CPUs begins with a GPU. AsListed: in the order of roles."""
    batches_in_flight: Annotated[int, Field(ge=1, le=8)] = 1
    """Number of decode batches in the pipeline at the same time. Every batch reads all weights, so 1 is best
    if reading weights limits the speed."""


class ShortageAction(StrEnum):
    """Reaction to missing GPUs."""

    WAIT = "Wait"
    CPU_ONLY = "CPUOnly"


class ShortageSpec(Model):
    """Reaction to fewer GPUs than the roles need."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (duration_rule("after", "after", least="0s", most="168h"),)

    action: ShortageAction = ShortageAction.WAIT
    """Reaction to missing GPUs. Wait: the group waits until enough GPUs are free. CPUOnly: the ranks of GPU
    roles compute on CPUs."""
    after: Duration = "10m"
    """Time without enough GPUs before CPUOnly takes effect. With action Wait, this time has no effect. If no
    node can be added, CPUOnly takes effect immediately."""


class LoadSpec(Model):
    """A typical load, for which the plan compares the modes."""

    requests: Annotated[int, Field(ge=1, le=4096)] = 1
    """Number of requests that a group serves at the same time."""
    prompt_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 1024
    """Number of tokens in a prompt."""
    output_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] = 256
    """Number of tokens that a request generates."""


class PlanningSpec(Model):
    """How the operator plans a group."""

    load: LoadSpec | None = None
    """Typical load, for which the plan compares the modes if parallelism.mode is Auto. A change takes effect
    with the next revision, for example after `heteroinfer restart`. Default: one request with 1,024 prompt
    tokens and 256 output tokens."""
    on_gpu_shortage: ShortageSpec = Field(default=ShortageSpec(), alias="onGPUShortage")
    """Reaction to fewer GPUs than the roles need."""

    @property
    def chosen_load(self) -> LoadSpec:
        """The load for which the plan compares modes: `load`, or the default load."""
        return self.load or LoadSpec()


class NetworkSpec(Model):
    """How the pods of a group reach each other."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        duration_rule("heartbeatTimeout", "heartbeat_timeout", least="1s", most="5m"),
    )

    interface: Annotated[
        str,
        Field(pattern=r"^[A-Za-z0-9._-]+$", min_length=1, max_length=15),
        AfterValidator(lambda name: "auto" if name == "Auto" else name),
    ] = "auto"
    """Network interface of the pods. Auto or auto: the interface that routes to the leader."""
    rendezvous_port: Port = names.DEFAULT_RENDEZVOUS_PORT
    """TCP port of torch.distributed's store in the leader's pod."""
    heartbeat_timeout: Duration | None = None
    """Time without a heartbeat after which a pod counts as lost. On busy machines, the pods extend this time
    themselves. Raise the value if the network pauses for longer. With a higher value, a lost pod is detected
    later. Default: 1500ms."""


class StartupSpec(Model):
    """How long a starting group may make no progress."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        duration_rule("timeout", "timeout", least="10s", most="24h"),
    )

    timeout: Duration = "30m"
    """Maximum time without progress after all pods run; after this time, the group restarts. Loading counts
    as progress while bytes are read. Waiting for a node, an image or the model has no limit."""


class RestartSpec(Model):
    """How often and how fast a failed group restarts."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        duration_rule("window", "window", least="1m", most="720h"),
        duration_rule("backoffMax", "backoff_max", least="10s", most="24h"),
        duration_rule("nodeLostAfter", "node_lost_after", least="1s", most="24h"),
    )

    max_restarts: Annotated[int, Field(ge=0, le=MAX_RESTARTS)] = 5
    """Number of restarts within window that a group may have. The failure after the last of these restarts is
    final: the group stays stopped, with phase Failed."""
    window: Duration = "1h"
    """Period in which restarts count towards maxRestarts. Older restarts count only if the group has not
    served since."""
    backoff_max: Duration = "5m"
    """Maximum wait between two restarts, also after evictions and rejected pods."""
    node_lost_after: Duration = "60s"
    """Time for which a node must be unreachable before the operator force-deletes the group's pods on it."""


class RolloutSpec(Model):
    """How groups are replaced after a change of the spec."""

    max_unavailable: Annotated[int, Field(ge=1, le=MAX_GROUPS)] = 1
    """Number of groups that may be stopped at the same time, to be replaced."""


class SchedulingSpec(Model):
    """How the pods of a group are placed on nodes."""

    gang: When = When.AUTO
    """Places the pods of a group all together or not at all. Auto: the cluster's gang scheduler places the
    pods. Without a gang scheduler, the operator creates no pod until all pods of the group fit. Always: only
    a gang scheduler may place the pods. Never: the operator creates all pods at the same time, and the
    scheduler places each pod on its own."""
    queue_name: QueueName = ""
    """Name of the Kueue or Volcano queue. Default: none."""
    scheduler_name: Annotated[str, Field(max_length=253)] = ""
    """Name of the scheduler for the pods. Default: the gang scheduler's, or the cluster's default
    scheduler."""
    priority_class_name: ClassNameOrNone = ""
    """Name of the PriorityClass of the pods. Default: the cluster's default."""
    topology_key: LabelKeyOrNone = ""
    """Node label, such as topology.kubernetes.io/zone: all pods of a group run on nodes with the same value.
    Default: none, so that a group may use any nodes."""


_MODE_CEL: Final = f"(has(self.parallelism.mode) ? self.parallelism.mode : '{AUTO_MODE}')"
_WORLD_CEL: Final = "self.roles.map(r, r.pods * r.ranksPerPod).sum()"
_HAS_ATTENTION_CEL: Final = "r.device == 'GPU' || has(r.feedForward)"
"""CEL expression: whether the ranks of a role compute attention in mode FeedForward. These are the ranks that
send asks to feed-forward ranks."""
_ATTENTION_ROLES_CEL: Final = f"self.roles.filter(r, {_HAS_ATTENTION_CEL})"
RESERVED_PORTS: Final = (
    names.DEFAULT_HEALTH_PORT,
    names.DEFAULT_CONTROL_PORT,
    names.DEFAULT_EXECUTOR_PORT,
    *range(names.DEFAULT_METRICS_PORT, names.DEFAULT_METRICS_PORT + MAX_RANKS_PER_POD),
)
"""Ports that every worker pod uses itself."""
_PORT_LIST: Final = f"{', '.join(map(str, RESERVED_PORTS[:3]))} or {RESERVED_PORTS[3]}-{RESERVED_PORTS[-1]}"


def _tensor_divides_ranks_per_pod(spec: "HeteroInferenceSpec") -> bool:
    """Reports whether each pod has all ranks of its stages. True for modes Tensor and Auto.

    In mode Tensor, which Auto may choose, a stage may have ranks in several pods.
    """
    tensor = spec.parallelism.tensor
    return (
        tensor is None
        or spec.parallelism.mode in (Mode.TENSOR, None)  # None is Auto
        or all(role.ranks_per_pod % tensor == 0 for role in spec.roles)
    )


def _layers_have_entry_per_stage(spec: "HeteroInferenceSpec") -> bool:
    """Reports whether each role's layers have one entry for each of its stages."""
    tensor = spec.parallelism.tensor
    return tensor is None or all(
        role.layers is None or len(role.layers) * tensor == role.num_ranks for role in spec.roles
    )


def _has_one_attention_pod(spec: "HeteroInferenceSpec") -> bool:
    """Reports whether a spec with mode FeedForward has one pod with attention. True for other modes."""
    if spec.parallelism.mode is not Mode.FEED_FORWARD:
        return True
    return len(spec.stage_roles) == 1 and spec.stage_roles[0].pods == 1


def _tensor_fits_attention_pod(spec: "HeteroInferenceSpec") -> bool:
    """Reports whether parallelism.tensor is unset or the number of all ranks with attention.

    In mode FeedForward, these ranks are one stage, in one pod. True for other modes.
    """
    tensor = spec.parallelism.tensor
    if spec.parallelism.mode is not Mode.FEED_FORWARD or tensor is None:
        return True
    return all(tensor == role.ranks_per_pod for role in spec.stage_roles)


def _attention_ranks_have_equal_feed_forward(spec: "HeteroInferenceSpec") -> bool:
    """Reports whether several ranks with attention have equal numbers of feed-forward ranks, all in one pod.

    True for one rank with attention, and for modes other than FeedForward.
    """
    if spec.parallelism.mode is not Mode.FEED_FORWARD:
        return True

    def is_equal(role: RoleSpec) -> bool:
        """Reports whether the feed-forward ranks of a role can be divided equally among its ranks."""
        return role.feed_forward is not None and role.feed_forward.ranks % role.ranks_per_pod == 0

    is_only_role = len(spec.roles) == 1
    return all(role.ranks_per_pod == 1 or (is_only_role and is_equal(role)) for role in spec.stage_roles)


def _mode_permits_feed_forward(spec: "HeteroInferenceSpec") -> bool:
    """Reports whether the mode is FeedForward or Auto, or no role sets feedForward."""
    is_permitted = spec.parallelism.mode in (None, Mode.FEED_FORWARD)
    return is_permitted or all(role.feed_forward is None for role in spec.roles)


def _has_feed_forward_ranks(spec: "HeteroInferenceSpec") -> bool:
    """Reports whether a resource in mode FeedForward has feed-forward ranks.

    A role that sets feedForward has such ranks, and so have the CPU roles beside the GPU role.
    """
    return (
        spec.parallelism.mode is not Mode.FEED_FORWARD
        or any(role.feed_forward is not None for role in spec.roles)
        or len(spec.stage_roles) < len(spec.roles)
    )


def _tensor_rule(
    *, cel: str, message: str, fix: str, holds: Callable[["HeteroInferenceSpec"], bool]
) -> ValidationRule:
    """Returns a rule for parallelism.tensor whose message contains the value."""
    return ValidationRule(
        field="parallelism.tensor",
        cel=cel,
        message=message,
        fix=fix,
        holds=holds,
        got="%d",
        got_cel=("self.parallelism.tensor",),
        got_values=lambda spec: (spec.parallelism.tensor,),
    )


class HeteroInferenceSpec(Model):
    """Desired state: the model, the pods that serve it, and how they run."""

    first_defaults = MappingProxyType({"parallelism": ParallelismSpec(mode=Mode.PIPELINE)})
    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            field="parallelism.mode",
            cel=f"{_MODE_CEL} in ['{AUTO_MODE}', 'FeedForward'] || !self.roles.exists(r, has(r.feedForward))",
            message="must be FeedForward or Auto, because a role sets feedForward",
            fix="Set mode FeedForward or Auto, or remove feedForward from the roles",
            holds=_mode_permits_feed_forward,
        ),
        ValidationRule(
            field="parallelism.mode",
            cel=f"{_MODE_CEL} != 'FeedForward' || self.roles.exists(r, has(r.feedForward)) "
            f"|| !self.roles.all(r, {_HAS_ATTENTION_CEL})",
            message="must not be FeedForward without feed-forward ranks: the GPU role must set feedForward, "
            "or the resource must have a CPU role",
            fix="Set feedForward in the GPU role, add a CPU role, or use another mode",
            holds=_has_feed_forward_ranks,
        ),
        ValidationRule(
            field="parallelism.mode",
            cel=f"{_MODE_CEL} != 'FeedForward' || ({_ATTENTION_ROLES_CEL}.size() == 1 "
            f"&& {_ATTENTION_ROLES_CEL}.all(r, r.pods == 1))",
            message="mode FeedForward must have all GPUs in one pod: exactly one role must have device GPU "
            "or feedForward, with pods: 1",
            fix="Use one such role with pods: 1, or mode Pipeline for GPUs in several pods",
            holds=_has_one_attention_pod,
        ),
        ValidationRule(
            field="roles",
            cel=f"{_MODE_CEL} != 'FeedForward' || !self.roles.exists(r, has(r.layers))",
            message="must not set layers in mode FeedForward",
            fix="Remove layers. Set feedForward.layers instead, the number of layers whose experts or MLPs "
            "CPU ranks compute",
            holds=lambda spec: (
                spec.parallelism.mode is not Mode.FEED_FORWARD
                or all(role.layers is None for role in spec.roles)
            ),
        ),
        _tensor_rule(
            cel=f"{_MODE_CEL} != 'FeedForward' || !has(self.parallelism.tensor) "
            f"|| {_ATTENTION_ROLES_CEL}.all(r, self.parallelism.tensor == r.ranksPerPod)",
            message="in mode FeedForward, must be unset or equal to ranksPerPod of the role with the GPUs",
            fix="Remove parallelism.tensor",
            holds=_tensor_fits_attention_pod,
        ),
        ValidationRule(
            field="parallelism.pipeline",
            cel=f"{_MODE_CEL} != 'FeedForward' || !has(self.parallelism.pipeline) "
            "|| self.parallelism.pipeline == 1",
            message="must be 1 or unset in mode FeedForward, because the GPUs are one stage",
            fix="Remove parallelism.pipeline",
            holds=lambda spec: (
                spec.parallelism.mode is not Mode.FEED_FORWARD or spec.parallelism.pipeline in (None, 1)
            ),
            got="%d",
            got_cel=("self.parallelism.pipeline",),
            got_values=lambda spec: (spec.parallelism.pipeline,),
        ),
        ValidationRule(
            field="parallelism.mode",
            cel=f"{_MODE_CEL} != 'FeedForward' || {_ATTENTION_ROLES_CEL}.all(r, r.ranksPerPod == 1 "
            "|| (self.roles.size() == 1 && has(r.feedForward) "
            "&& r.feedForward.ranks % r.ranksPerPod == 0))",
            message="in mode FeedForward with several GPUs, the GPU role must be the only role, and its "
            "feedForward.ranks must be a multiple of ranksPerPod",
            fix="Set feedForward.ranks to a multiple of ranksPerPod, and move the resources of CPU roles "
            "into feedForward",
            holds=_attention_ranks_have_equal_feed_forward,
        ),
        ValidationRule(
            field="roles",
            cel=f"{_WORLD_CEL} <= {MAX_WORLD_SIZE}",
            message=f"must have at most {MAX_WORLD_SIZE} ranks, the sum of pods x ranksPerPod",
            fix="Use fewer pods, or fewer ranksPerPod",
            holds=lambda spec: spec.world_size <= MAX_WORLD_SIZE,
            got="%d",
            got_cel=(_WORLD_CEL,),
            got_values=lambda spec: (spec.world_size,),
        ),
        ValidationRule(
            field="replicas",
            cel=f"self.replicas * {_WORLD_CEL} <= {MAX_RANKS}",
            message=f"must lead to at most {MAX_RANKS} ranks in all groups, because the status lists each "
            "rank",
            fix="Use fewer replicas, or several resources",
            holds=lambda spec: spec.replicas * spec.world_size <= MAX_RANKS,
            got="%d groups of %d ranks",
            got_cel=("self.replicas", _WORLD_CEL),
            got_values=lambda spec: (spec.replicas, spec.world_size),
        ),
        ValidationRule(
            field="parallelism",
            cel=f"{_MODE_CEL} == 'FeedForward' "
            "|| !has(self.parallelism.pipeline) || !has(self.parallelism.tensor) "
            f"|| self.parallelism.tensor * self.parallelism.pipeline == {_WORLD_CEL}",
            message="tensor x pipeline must be the number of ranks, the sum of pods x ranksPerPod over roles",
            fix="Change the roles, or remove tensor and pipeline",
            holds=lambda spec: (
                spec.parallelism.mode is Mode.FEED_FORWARD
                or None in (spec.parallelism.tensor, spec.parallelism.pipeline)
                or spec.parallelism.tensor * spec.parallelism.pipeline == spec.world_size
            ),
            got="tensor %d x pipeline %d and roles with %d ranks",
            got_cel=("self.parallelism.tensor", "self.parallelism.pipeline", _WORLD_CEL),
            got_values=lambda spec: (spec.parallelism.tensor, spec.parallelism.pipeline, spec.world_size),
        ),
        ValidationRule(
            field="parallelism.pipeline",
            cel="!has(self.parallelism.pipeline) || has(self.parallelism.tensor) "
            f"|| {_WORLD_CEL} % self.parallelism.pipeline == 0",
            message="must divide the number of ranks, the sum of pods x ranksPerPod over roles",
            fix="Change the roles, or remove pipeline",
            holds=lambda spec: (
                spec.parallelism.pipeline is None
                or spec.parallelism.tensor is not None
                or spec.world_size % spec.parallelism.pipeline == 0
            ),
            got="pipeline %d and roles with %d ranks",
            got_cel=("self.parallelism.pipeline", _WORLD_CEL),
            got_values=lambda spec: (spec.parallelism.pipeline, spec.world_size),
        ),
        _tensor_rule(
            cel=f"!has(self.parallelism.tensor) || {_MODE_CEL} in ['Tensor', '{AUTO_MODE}'] "
            "|| self.roles.all(r, r.ranksPerPod % self.parallelism.tensor == 0)",
            message="must divide ranksPerPod of each role, because the ranks of a stage share one pod",
            fix="Make each ranksPerPod a multiple of tensor",
            holds=_tensor_divides_ranks_per_pod,
        ),
        ValidationRule(
            field="roles",
            cel="self.roles.all(r, has(r.layers)) || !self.roles.exists(r, has(r.layers))",
            message="must set layers either in all roles or in no role",
            fix="Add layers to the other roles, or remove all layers",
            holds=lambda spec: len({role.layers is None for role in spec.roles}) == 1,
        ),
        ValidationRule(
            field="roles",
            cel="!has(self.parallelism.tensor) || self.roles.all(r, !has(r.layers) "
            "|| r.layers.size() * self.parallelism.tensor == r.pods * r.ranksPerPod)",
            message="layers must have one entry for each stage of the role, that is "
            "pods x ranksPerPod / tensor entries",
            fix="Add or remove entries, or change pods, ranksPerPod or parallelism.tensor",
            holds=_layers_have_entry_per_stage,
        ),
        ValidationRule(
            field="operatorClass",
            reason=RuleReason.FORBIDDEN,
            cel="has(self.operatorClass) == has(oldSelf.operatorClass) "
            "&& (!has(self.operatorClass) || self.operatorClass == oldSelf.operatorClass)",
            message="must not change, because two operators would then act on one resource",
            fix="Delete the resource and create it with the other class",
            holds=lambda spec: True,  # compares two versions of the resource, which only the API server has
        ),
        duration_rule("drainTimeout", "drain_timeout", least="0s", most="24h"),
        duration_rule("stepTimeout", "step_timeout", least="10s", most="24h"),
        ValidationRule(
            field="engine.port",
            cel=f"!(self.engine.port in [{', '.join(map(str, RESERVED_PORTS))}]) "
            "&& self.engine.port != self.network.rendezvousPort",
            message=f"must not be network.rendezvousPort or a port that workers use: {_PORT_LIST}",
            fix="Choose another port",
            holds=lambda spec: spec.engine.port not in (*RESERVED_PORTS, spec.network.rendezvous_port),
            got="%d",
            got_cel=("self.engine.port",),
            got_values=lambda spec: (spec.engine.port,),
        ),
        ValidationRule(
            field="network.rendezvousPort",
            cel=f"!(self.network.rendezvousPort in [{', '.join(map(str, RESERVED_PORTS))}])",
            message=f"must not be a port that workers use: {_PORT_LIST}",
            fix="Choose another port",
            holds=lambda spec: spec.network.rendezvous_port not in RESERVED_PORTS,
            got="%d",
            got_cel=("self.network.rendezvousPort",),
            got_values=lambda spec: (spec.network.rendezvous_port,),
        ),
    )

    replicas: Annotated[int, Field(ge=0, le=MAX_GROUPS)] = 1
    """Number of groups. Each group is a copy of the model with its own pods. With 0, the operator removes all
    pods, but still downloads and checks the model. To stop the download, too, set suspend."""
    suspend: bool = False
    """Stops the resource: the operator removes all pods and downloads nothing. The resource, its model cache
    and the value of replicas stay. false starts the resource again."""
    operator_class: OperatorClass | None = None
    """Operator that serves the resource: the release with this `operatorClass` in its chart values. Cannot be
    changed. Default: the release without an operatorClass."""
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
    """Time of the last requested restart, in RFC 3339. Each change restarts all groups, and starts failed
    groups again. Default: none."""
    model: ModelSpec
    """The model to serve."""
    engine: EngineSpec = EngineSpec()
    """Settings of vLLM that the plan does not choose."""
    parallelism: ParallelismSpec = ParallelismSpec()
    """How the ranks share the model."""
    roles: Annotated[
        tuple[RoleSpec, ...], Field(min_length=1, max_length=MAX_ROLES, json_schema_extra=map_list("name"))
    ]
    """Kinds of pods of each group, such as one role of GPU pods and one role of CPU pods."""
    planning: PlanningSpec = PlanningSpec()
    """How the operator plans a group."""
    network: NetworkSpec = NetworkSpec()
    """How the pods of a group reach each other."""
    startup: StartupSpec = StartupSpec()
    """How long a starting group may make no progress."""
    restart: RestartSpec = RestartSpec()
    """How often and how fast a failed group restarts."""
    rollout: RolloutSpec = RolloutSpec()
    """How groups are replaced after a change of the spec."""
    scheduling: SchedulingSpec = SchedulingSpec()
    """How the pods of a group are placed on nodes."""
    drain_timeout: Duration = "60s"
    """Time that running requests get to finish when a group stops. A change applies to pods created later."""
    step_timeout: Duration | None = None
    """Maximum time for one step of a rank, and for an answer of vLLM's API server or engine while no rank
    computes. After this time, the group restarts. Default: 5m."""

    @property
    def world_size(self) -> int:
        """Number of ranks in a group."""
        return sum(role.num_ranks for role in self.roles)

    @property
    def stage_roles(self) -> tuple[RoleSpec, ...]:
        """Roles whose ranks compute attention: all roles, except other CPU roles in mode FeedForward."""
        if self.parallelism.mode is not Mode.FEED_FORWARD:
            return self.roles
        return tuple(
            role for role in self.roles if role.device is Device.GPU or role.feed_forward is not None
        )


class LifecycleSpec(StatusModel):
    """The fields of a spec that start, stop and replace groups, even if other fields are invalid."""

    replicas: Annotated[int, Field(ge=0, le=MAX_GROUPS)] | None = None
    """Number of groups; None if the spec's value cannot be read."""
    suspend: bool = False
    startup: StartupSpec = StartupSpec()
    restart: RestartSpec = RestartSpec()
    rollout: RolloutSpec = RolloutSpec()
