"""The `status` of a HeteroInference: the state that the operator observed last.

`dump()` gives JSON values without nulls. Attribute docstrings become the descriptions in the CRD. Lists are
atomic, because one writer replaces the whole status. Keyed lists would repeat every entry in managedFields,
which would then take half of the size that etcd allows for an object. Pure.
"""

from enum import StrEnum
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from heteroinfer_contract.plan import MAX_WORLD_SIZE, Device, Mode
from heteroinfer_operator.api.base import ATOMIC, StatusModel, Text, Time, map_list
from heteroinfer_operator.api.condition import MAX_CONDITIONS, Condition, StoredReason
from heteroinfer_operator.api.spec import MAX_GROUPS, MAX_RESTARTS, MAX_ROLES, MAX_TOKENS

MAX_FAILURES: Final = MAX_RESTARTS + 1
"""Number of a group's newest failures in the status: enough for the largest restart.maxRestarts."""
MAX_PLANS: Final = 16
MAX_PROFILE_LENGTH: Final = 16384
"""Longest profile, in characters. A layer needs about 11; a pod's termination message has at most 4,096."""

MAX_EXIT_CODE: Final = 256
"""Largest absolute value of an exit code, which is negative for a signal."""
MAX_COUNT: Final = 2**53
MAX_EPOCH: Final = 10**15 - 1
"""Largest epoch in a pod's name: `manifests/identity.py` reads this number of digits."""
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A number of at least 0 and at most 2**53, which every JSON reader keeps exact."""


def _at_most(most: int) -> AfterValidator:
    """Returns a validator that refuses a stored number above `most`, when the operator reads the status.

    Only another client can have written such a number. `Field(le=most)` would do the same, but would also
    lower the `maximum` in the CRD. The API server could then refuse updates of a status that already contains
    such a number.
    """

    def check(value: int) -> int:
        if value > most:
            raise ValueError(f"must be at most {most}")
        return value

    return AfterValidator(check)


Epoch = Annotated[Count, _at_most(MAX_EPOCH)]
"""Number of a group's start: each start of its pods is a new epoch."""
GroupIndex = Annotated[Count, _at_most(MAX_GROUPS - 1)]
"""Index of a group, from 0."""
GroupCount = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""Number of groups; /scale reads it as an int32."""
Milliseconds = Annotated[float, Field(ge=0, le=1e12)]
Microseconds = Annotated[int, Field(ge=0, le=10**15)]
Hash = Annotated[str, Field(max_length=64)]
RoleName = Annotated[str, Field(max_length=63)]


def next_epoch(epoch: int) -> int:
    """Returns the number of the next epoch. After MAX_EPOCH the number is 0, as before the first epoch."""
    return epoch + 1 if epoch < MAX_EPOCH else 0


def next_count(count: int) -> int:
    """Returns a count plus 1, but at most the largest count."""
    return min(count + 1, MAX_COUNT)


class ModelPhase(StrEnum):
    """Progress of reading or downloading the model; `ModelStatus.phase` explains the values."""

    PENDING = "Pending"
    INSPECTING = "Inspecting"
    DOWNLOADING = "Downloading"
    READY = "Ready"
    FAILED = "Failed"


class GroupPhase(StrEnum):
    """Phase of a group when the status was written; `GroupStatus.phase` explains the values.

    Each reconcile finds the phase again from the group's pods.
    """

    PENDING = "Pending"
    STARTING = "Starting"
    READY = "Ready"
    SLEEPING = "Sleeping"
    STOPPING = "Stopping"
    WAITING = "Waiting"
    FAILED = "Failed"


class StartupPhase(StrEnum):
    """Phases of a group's start, in order; `StartupStatus.phase` explains them."""

    MODEL = "Model"
    SCHEDULING = "Scheduling"
    """This phase has no time limit, because only free capacity ends the wait."""
    IMAGE = "Image"
    """This phase has no time limit, because a new pod would have to wait again."""
    CONNECTING = "Connecting"
    LOADING = "Loading"
    WARMING_UP = "WarmingUp"


class ModelStatus(StatusModel):
    """State of the model's files."""

    phase: ModelPhase = ModelPhase.PENDING
    """Progress of reading or downloading the model. Pending: no pod reads the model yet. Inspecting: a pod
    reads the sizes of a model in a volume, an image or a folder. Downloading: a pod downloads an hf:// model
    and reads its sizes. Ready: the sizes are known. Failed: the last attempt failed; the operator tries
    again."""
    key: Hash | None = None
    """Hash of the model's URI and revision to which profile belongs."""
    commit: Hash | None = None
    """Commit of an hf:// model that was downloaded. The commit stays the same until model.uri or
    model.revision changes."""
    bytes_done: Count | None = None
    """Bytes in the cache, in steps of a hundredth of bytesTotal during a download."""
    bytes_total: Count | None = None
    """Bytes to download."""
    failures: Count | None = None
    """Number of consecutive failed attempts. The wait for the next attempt grows with this number."""
    reason: StoredReason | None = None
    """Reason of the last failed attempt, in CamelCase. Absent once an attempt makes progress."""
    message: Text | None = None
    """Details of the last failed attempt."""
    damaged_pod: Annotated[str, Field(max_length=253)] | None = None
    """Name of the pod that reads the model, if the pod lost a label or its owner. An event reported this."""
    checked_time: Time | None = None
    """Time when the profile was read from the files."""
    profile: Annotated[str, Field(max_length=MAX_PROFILE_LENGTH)] | None = None
    """Sizes of the model's parts, as JSON text for the operator."""


class RankPlan(StatusModel):
    """Position and share of a rank in a plan."""

    rank: Count
    """Global rank in torch.distributed."""
    stage: Count
    """Index of the pipeline stage."""
    role: RoleName
    """Name of the rank's role in spec.roles."""
    device: Device
    """Device on which the rank computes: GPU or CPU. It is CPU in a GPU role if GPUs are missing and
    planning.onGPUShortage.action is CPUOnly."""
    layers: Count
    """Number of transformer layers that the rank holds."""
    memory: Annotated[str, Field(max_length=24)]
    """Memory for weights and KV cache, as a quantity."""
    predicted_step_ms: Milliseconds | None = None
    """Predicted compute time of a decode step for one request, in milliseconds."""


class PlanRole(StatusModel):
    """A GPU role in a plan."""

    name: RoleName
    """Name of the GPU role in spec.roles."""
    device_memory: Annotated[str, Field(max_length=24)] | None = None
    """Memory of one GPU: roles[].deviceMemory, or the minimum that node labels report
    for the group's nodes."""


class PlanStatus(StatusModel):
    """A plan in use."""

    hash: Hash
    """Hash that identifies the plan."""
    mode: Mode | None = None
    """How the plan divides the model: parallelism.mode, or the mode that the plan chose."""
    world_size: Count
    """Number of ranks in a group."""
    eager_reason: Text | None = None
    """Reason why GPU ranks run without CUDA graphs. Absent unless the plan forbids CUDA graphs."""
    max_model_len: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    """Maximum number of tokens of a request, prompt and output together."""
    images: Text | None = None
    """Worker images of the groups with this plan, separated by commas."""
    roles: Annotated[tuple[PlanRole, ...], Field(max_length=MAX_ROLES, json_schema_extra=ATOMIC)] = ()
    """GPU memory with which the plan was made, for each GPU role."""
    predicted_step_microseconds: Microseconds | None = None
    """Predicted decode step for one request, in microseconds."""
    predicted_step_ms: Milliseconds | None = None
    """Predicted decode step for one request, in milliseconds. Deprecated: use predictedStepMicroseconds."""
    calibration: Text | None = None
    """Rates behind the predictions, for each role: the calibration of its nodes, or default rates."""
    long_prompts: Text | None = None
    """In mode FeedForward, the part of the experts that the GPU computes in long prompts, by prediction.
    Absent if the plan gives the GPU no memory for such experts."""
    notes: Text | None = None
    """Advice and warnings about the plan."""
    ranks: Annotated[tuple[RankPlan, ...], Field(max_length=MAX_WORLD_SIZE, json_schema_extra=ATOMIC)] = ()
    """Ranks of the plan, with their layers and memory."""


class FailureStatus(StatusModel):
    """The end of an epoch of a group, and its reason."""

    epoch: Count
    """Number of the epoch that ended."""
    time: Time
    """Time when the operator detected the end."""
    reason: StoredReason
    """Reason why the epoch ended, in CamelCase."""
    message: Text
    """Cause of the end, such as the exit code of a rank, and the fix if the operator knows a fix."""
    rank: Annotated[int, Field(ge=0, le=MAX_WORLD_SIZE)] | None = None
    """Global rank that caused the end of the epoch. Absent if no rank caused the end."""
    exit_code: Annotated[int, Field(ge=-MAX_EXIT_CODE, le=MAX_EXIT_CODE)] | None = None
    """Exit code of the process that caused the end; negative for a signal."""
    counted: bool = True
    """Whether the failure counts towards restart.maxRestarts. Evictions, drains and preemptions do not."""
    served: bool = True
    """Whether the epoch served requests before it failed. If not, the failure counts towards
    restart.maxRestarts regardless of its age."""


class RankEntry(StatusModel):
    """Current state of a rank."""

    rank: Count
    """Global rank in torch.distributed."""
    role: RoleName
    """Name of the rank's role in spec.roles."""
    pod: Annotated[str, Field(max_length=253)]
    """Name of the rank's pod."""
    node: Annotated[str, Field(max_length=253)] | None = None
    """Name of the pod's node."""
    started: bool = False
    """Whether the pod runs or has run. Until then, another pod can replace this pod."""
    ready: bool = False
    """Whether the rank is alive and has loaded its weights."""
    step_ms: Milliseconds | None = None
    """Duration of a decode step, in milliseconds."""
    compute_ms: Milliseconds | None = None
    """Part of stepMs in which the rank computes, in milliseconds."""
    wait_ms: Milliseconds | None = None
    """Part of stepMs in which the rank waits for other ranks, in milliseconds."""
    locked_memory_bytes: Count | None = None
    """Memory that the rank has locked or pinned for a device, in bytes, measured when the rank became
    ready."""
    locked_memory_limit_bytes: Count | None = None
    """Maximum memory that the rank may lock (ulimit -l), in bytes. Absent without a limit."""
    transports: Annotated[tuple[Annotated[str, Field(max_length=64)], ...], Field(max_length=8)] | None = None
    """How tensors of the rank travel, as PEERS:PATH, such as ranks:nccl_p2p (between the ranks of a stage) or
    stages:gloo (between stages)."""


class KvLimit(StrEnum):
    """Reason why the KV cache is not larger."""

    PLAN = "Plan"
    """The memory of every rank holds the KV cache of the plan."""
    MEMORY = "Memory"
    """The memory of the limiting rank holds less than the plan's KV cache."""


class KvStatus(StatusModel):
    """Deprecated: fields of kvCache under their older names. Read kvCache instead."""

    blocks: Count
    """Deprecated copy of kvCache.blocks: the number of blocks on each rank."""
    block_tokens: Count | None = None
    """Deprecated copy of kvCache.blockTokens: the number of tokens in a block."""
    tokens: Count
    """Deprecated copy of kvCache.tokens: the number of tokens in all blocks."""
    limiting_rank: Annotated[int, Field(ge=0, le=MAX_WORLD_SIZE)]
    """Deprecated copy of kvCache.limitingRank: the rank whose memory holds the fewest blocks."""
    limiting_role: RoleName
    """Deprecated copy of kvCache.limitingRole: the role of that rank."""
    limited_by: KvLimit
    """Deprecated copy of kvCache.limitedBy: Plan, or Memory if the memory of the limiting rank holds
    less than the plan's KV cache."""
    room_blocks: Count
    """Deprecated copy of kvCache.limitingRankBlocks: the number of blocks that fit into the memory of the
    limiting rank."""


class KvCacheStatus(StatusModel):
    """KV cache of a group, with the same number of blocks on every rank."""

    blocks: Count
    """Number of blocks on each rank: the number in the plan, or fewer if the memory of the limiting rank
    holds fewer."""
    block_tokens: Count | None = None
    """Number of tokens whose keys and values fit into a block. Absent if no layer has such a cache, as in a
    model with only Mamba layers."""
    tokens: Count
    """Number of tokens that the cache holds if all requests have the maximum length."""
    limiting_rank: Annotated[int, Field(ge=0, le=MAX_WORLD_SIZE)]
    """Global rank whose memory holds the fewest blocks. Each rank measures its free memory after a run of the
    largest batch."""
    limiting_role: RoleName
    """Role of the limiting rank. Raise the memory of this role for a larger KV cache."""
    limited_by: KvLimit
    """Reason why the KV cache is not larger. Plan: the cache has the size in the plan, and every rank has
    memory for this size. Memory: the limiting rank has memory for less than the plan's size."""
    limiting_rank_blocks: Count
    """Number of blocks that fit into the memory of the limiting rank."""

    @classmethod
    def of(cls, kv: KvStatus) -> "KvCacheStatus":
        """Returns the same values under the names of this class."""
        return cls(
            blocks=kv.blocks,
            block_tokens=kv.block_tokens,
            tokens=kv.tokens,
            limiting_rank=kv.limiting_rank,
            limiting_role=kv.limiting_role,
            limited_by=kv.limited_by,
            limiting_rank_blocks=kv.room_blocks,
        )


class StartupStatus(StatusModel):
    """Progress of a group's start."""

    phase: StartupPhase
    """Phase of the start. Model: waits for the model's files and sizes. Scheduling: waits for a node for each
    pod. Image: waits for images and volumes on the nodes. Connecting: all pods run, and their ranks connect.
    Loading: at least one rank reads weights. WarmingUp: all weights are read; ranks measure memory and
    compile, and vLLM's API server starts."""
    since: Time
    """Time when this phase began."""
    bytes_done: Count | None = None
    """Bytes of weights that all ranks have read, updated at most once a minute."""
    bytes_total: Count | None = None
    """Bytes of weights to read."""
    measured_time: Time | None = None
    """Time when bytesDone last changed."""


class GroupStatus(StatusModel):
    """State of a group."""

    index: GroupIndex
    """Index of the group, from 0."""
    revision: Hash | None = None
    """Revision of the spec with which the group runs."""
    plan_hash: Hash | None = None
    """Hash of the group's plan."""
    epoch: Epoch = 0
    """Number of the current epoch. It grows with each start, by 1 or more; 0 before the first start."""
    phase: GroupPhase = GroupPhase.PENDING
    """Phase of the group. Pending: cannot start yet, for example without a plan, a model or nodes. Starting:
    the pods of an epoch are created and load the model. Ready: serves requests. Sleeping: sleeps at a
    client's request, and serves again when a client wakes it. Stopping: its pods finish running requests and
    are deleted. Waiting: waits before the next restart (restart.backoffMax). Failed: has used up
    restart.maxRestarts, and stays stopped."""
    message: Text | None = None
    """Reason why the group waits or has failed."""
    epoch_start_time: Time | None = None
    """Time at which the operator began to create the pods of this epoch."""
    startup: StartupStatus | None = None
    """Progress of the start, while the group starts."""
    next_epoch_time: Time | None = None
    """Earliest time of the next start, while the group waits to start."""
    restarts: Count = 0
    """Number of restarts after failures that count towards restart.maxRestarts."""
    after_failure: bool = False
    """Whether the previous epoch failed. The condition Ready shows the reason until the group serves
    again."""
    served_time: Time | None = None
    """Time when this epoch began to serve."""
    spare_pods: Annotated[tuple[Count, ...], Field(max_length=MAX_WORLD_SIZE, json_schema_extra=ATOMIC)] = ()
    """Indexes of pods of this epoch that ended before they ran. The operator may create a new pod with the
    same name."""
    rejections: Count = 0
    """Number of pods of this epoch that nodes rejected before they ran. The wait before the next pod grows
    with this number."""
    rejected_pods: Annotated[
        tuple[Count, ...], Field(max_length=MAX_WORLD_SIZE, json_schema_extra=ATOMIC)
    ] = ()
    """Indexes of the pods in sparePods that still exist and are counted in rejections."""
    stuck_pods: Annotated[tuple[Count, ...], Field(max_length=MAX_WORLD_SIZE, json_schema_extra=ATOMIC)] = ()
    """Indexes of pods of this epoch whose containers could not be created. An event reported each pod, with
    the reason."""
    damaged_pod: Annotated[str, Field(max_length=253)] | None = None
    """Name of a pod that lost a label or its owner. An event reported this."""
    failures: Annotated[
        tuple[FailureStatus, ...], Field(max_length=MAX_FAILURES, json_schema_extra=ATOMIC)
    ] = ()
    """Last failures of the group, the newest last."""
    measured_time: Time | None = None
    """Time when the times in members were measured. The operator updates them at most once a minute."""
    kv_cache: KvCacheStatus | None = None
    """KV cache of the group."""
    kv: KvStatus | None = None
    """Deprecated: use kvCache."""
    long_prompts: Text | None = None
    """In mode FeedForward, the part of the experts that the GPU computes in long prompts, measured in this
    epoch. Absent before the measurement, or if the GPU has no memory for experts."""
    members: Annotated[tuple[RankEntry, ...], Field(max_length=MAX_WORLD_SIZE, json_schema_extra=ATOMIC)] = ()
    """Ranks of the group, with their pods and times."""


class RetiredGroup(StatusModel):
    """History of a group that was scaled down, for a later scale-up."""

    index: GroupIndex
    """Index that the group had."""
    epoch: Epoch = 0
    """Number of the group's next epoch."""
    revision: Hash | None = None
    """Revision of the spec with which the group last ran."""
    restarts: Count = 0
    """Number of restarts after failures that count towards restart.maxRestarts."""
    next_epoch_time: Time | None = None
    """Earliest time of the next start."""
    failures: Annotated[
        tuple[FailureStatus, ...], Field(max_length=MAX_FAILURES, json_schema_extra=ATOMIC)
    ] = ()
    """Last failures of the group, the newest last. Only the newest has its message."""


class Summary(StatusModel):
    """Values for the columns of `kubectl get`."""

    groups: Annotated[str, Field(max_length=16)] | None = None
    """Number of ready groups and of all groups, such as 1/2."""
    mode: Mode | None = None
    """Mode of the groups."""
    gpu_ranks: Count | None = None
    """Number of ranks in a group that compute on a GPU."""
    cpu_ranks: Count | None = None
    """Number of ranks in a group that compute on a CPU."""
    step_microseconds: Microseconds | None = None
    """Duration of a decode step in the slowest group, in microseconds."""
    predicted_step_microseconds: Microseconds | None = None
    """Predicted duration of a decode step for one request, in microseconds."""
    step_ms: Annotated[str, Field(max_length=16)] | None = None
    """Duration of a decode step in the slowest group, in milliseconds with one decimal."""
    predicted_step_ms: Annotated[str, Field(max_length=16)] | None = None
    """Predicted duration of a decode step for one request, in milliseconds with one decimal."""
    slowest_rank: Annotated[str, Field(max_length=64)] | None = None
    """Rank with the longest compute time, and its role, such as 1 (cpu)."""
    restarts: Count | None = None
    """Number of restarts of all groups."""
    plan: Hash | None = None
    """Hash of the plan for new groups."""


class HeteroInferenceStatus(StatusModel):
    """State that the operator observed last."""

    observed_generation: Annotated[int, Field(ge=-1, le=2**53)] = -1
    """Generation of the spec to which this status belongs; -1 until the operator handles the resource."""
    replicas: GroupCount = 0
    """Number of groups that exist."""
    ready_replicas: GroupCount = 0
    """Number of groups that serve."""
    updated_replicas: GroupCount = 0
    """Number of groups that run with updateRevision."""
    selector: Annotated[str, Field(max_length=512)] | None = None
    """Label selector of the groups' leader pods, for the scale subresource."""
    endpoint: Annotated[str, Field(max_length=512)] | None = None
    """URL of the OpenAI API inside the cluster."""
    current_revision: Hash | None = None
    """Revision of all groups at the end of the last rollout."""
    update_revision: Hash | None = None
    """Revision of the current spec."""
    records_signed_by: Hash | None = None
    """Fingerprint of the operator's key with which all stored revisions are signed. If set, the operator
    ignores stored revisions without such a signature."""
    summary: Summary | None = None
    """Values for the columns of `kubectl get`."""
    conditions: Annotated[
        tuple[Condition, ...], Field(max_length=MAX_CONDITIONS, json_schema_extra=map_list("type"))
    ] = ()
    """Conditions of the resource. The operator keeps conditions of other controllers, and writes Available,
    Ready, Stalled, Progressing, Planned, ModelReady, CapacityAvailable, Degraded and Failed. Alert on
    Stalled: nothing changes without a person."""
    gpus_missing_since: Time | None = None
    """Time at which the operator first missed GPUs; planning.onGPUShortage.after counts from this time.
    Absent if no GPUs are missing."""
    model: ModelStatus | None = None
    """State of the model's files."""
    plans: Annotated[tuple[PlanStatus, ...], Field(max_length=MAX_PLANS, json_schema_extra=ATOMIC)] = ()
    """Plans in use."""
    groups: Annotated[tuple[GroupStatus, ...], Field(max_length=MAX_GROUPS, json_schema_extra=ATOMIC)] = ()
    """State of each group, by index."""
    retired_groups: Annotated[
        tuple[RetiredGroup, ...], Field(max_length=MAX_GROUPS, json_schema_extra=ATOMIC)
    ] = ()
    """History of groups that were scaled down, while their failures still count towards
    restart.maxRestarts."""

    def condition(self, kind: str) -> Condition | None:
        """Returns the condition of this type, or None."""
        return next((condition for condition in self.conditions if condition.type == kind), None)
