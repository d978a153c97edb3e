"""`status` of a HeteroInference: what is, as the operator last saw it.

Built from pure code; `dump()` gives JSON values without nulls. Attribute docstrings
become the descriptions of the CRD. Lists are atomic, since one writer replaces the whole status: with keys,
managedFields would repeat every entry, and half of what etcd takes of an object would be theirs. Pure.
"""

from enum import StrEnum
from typing import Annotated, Final

from pydantic import AfterValidator, Field

from heteroinfer_contract.plan import MAX_WORLD_SIZE, Device
from heteroinfer_operator.api.base import ATOMIC, StatusModel, Text, Time, map_list
from heteroinfer_operator.api.condition import Condition, StoredReason
from heteroinfer_operator.api.spec import MAX_GROUPS, MAX_RESTARTS

MAX_FAILURES: Final = MAX_RESTARTS + 1
"""Failures that a group keeps, the newest: enough to count the most restarts that can be allowed."""
MAX_PLANS: Final = 16
MAX_PROFILE_LENGTH: Final = 16384
"""Characters; a layer takes about 11, and a pod's termination message holds 4,096."""

MOST_EXIT_CODE: Final = 256
"""In size; negative for a signal."""
MOST_COUNT: Final = 2**53
MAX_EPOCH: Final = 10**15 - 1
"""The largest epoch that a pod's name can hold: `manifests/identity.py` reads as many digits."""
Count = Annotated[int, Field(ge=0, le=MOST_COUNT)]
"""A number that is never negative; 2**53 keeps exact in every JSON reader."""


def _at_most(most: int) -> AfterValidator:
    """Refuses a number that the schema takes and the operator never writes."""

    def check(value: int) -> int:
        if value > most:
            raise ValueError(f"must be at most {most}")
        return value

    return AfterValidator(check)


Epoch = Annotated[Count, _at_most(MAX_EPOCH)]
"""An incarnation of a group."""
GroupIndex = Annotated[Count, _at_most(MAX_GROUPS - 1)]
"""Position of a group."""
GroupCount = Annotated[int, Field(ge=0, le=2**31 - 1)]
"""A number of groups; /scale reads it as an int32."""
Milliseconds = Annotated[float, Field(ge=0, le=1e12)]
Hash = Annotated[str, Field(max_length=64)]
RoleName = Annotated[str, Field(max_length=63)]


def next_epoch(epoch: int) -> int:
    """Returns the epoch after an epoch; 0, which is none, after the largest."""
    return epoch + 1 if epoch < MAX_EPOCH else 0


def next_count(count: int) -> int:
    """Returns the number after a count; the largest count stays as it is."""
    return min(count + 1, MOST_COUNT)


class ModelPhase(StrEnum):
    """How far the model is known and there."""

    PENDING = "Pending"
    INSPECTING = "Inspecting"
    DOWNLOADING = "Downloading"
    READY = "Ready"
    FAILED = "Failed"


class GroupPhase(StrEnum):
    """What a group is doing, as last written; pods decide whether it still holds."""

    PENDING = "Pending"
    STARTING = "Starting"
    READY = "Ready"
    SLEEPING = "Sleeping"
    """Put to sleep over its API; it serves again once it is woken."""
    STOPPING = "Stopping"
    WAITING = "Waiting"
    """For its back-off to pass."""
    FAILED = "Failed"


class StartupPhase(StrEnum):
    """What a group that starts waits for, in order."""

    MODEL = "Model"
    """The model's files and sizes."""
    SCHEDULING = "Scheduling"
    """A node for each pod; no limit of time, since only free capacity helps."""
    IMAGE = "Image"
    """Images and volumes on the nodes; no limit of time, since a new pod would begin again."""
    CONNECTING = "Connecting"
    """Every pod runs; its ranks meet."""
    LOADING = "Loading"
    """A rank reads weights."""
    WARMING_UP = "WarmingUp"
    """Weights are read; ranks measure memory, compile, and the API comes up."""


class ModelStatus(StatusModel):
    """The model."""

    phase: ModelPhase = ModelPhase.PENDING
    """How far it is known and there."""
    key: Hash | None = None
    """Hash of the URI and revision that the profile is of."""
    commit: Hash | None = None
    """What the revision of a hub's model meant when it was fetched; it stays until revision is changed."""
    bytes_done: Count | None = None
    """In the cache so far, in hundredths of bytesTotal while it is fetched."""
    bytes_total: Count | None = None
    """To fetch."""
    failures: Count | None = None
    """Attempts in a row that failed; each waits longer for the next."""
    reason: StoredReason | None = None
    """Why the last attempt failed, CamelCase; none once an attempt gets on."""
    message: Text | None = None
    """The same for people."""
    damaged_pod: Annotated[str, Field(max_length=253)] | None = None
    """The pod that reads it, if somebody took a label or its owner off; an event reported it."""
    checked_time: Time | None = None
    """When the profile was read from the files."""
    profile: Annotated[str, Field(max_length=MAX_PROFILE_LENGTH)] | None = None
    """Sizes of the model, as the JSON text of a ModelProfile."""


class RankPlan(StatusModel):
    """A rank's position and share."""

    rank: Count
    """Global rank."""
    stage: Count
    """Pipeline stage."""
    role: RoleName
    """Its role."""
    device: Device
    """What it computes on; CPU in a GPU role if planning.onGPUShortage said so."""
    layers: Count
    """Transformer layers it holds."""
    memory: Annotated[str, Field(max_length=24)]
    """Weights and KV cache, as a quantity."""
    predicted_step_ms: Milliseconds | None = None
    """Predicted compute time of a decode step of one request, in milliseconds."""


class PlanStatus(StatusModel):
    """A plan in use."""

    hash: Hash
    """Tells it from any other plan."""
    world_size: Count
    """Ranks of a group."""
    eager_reason: Text | None = None
    """Why GPU ranks run without CUDA graphs, where the plan's layout forbids them."""
    predicted_step_ms: Milliseconds | None = None
    """Predicted decode step of one request, in milliseconds: to be compared with stepMs of ranks."""
    calibration: Text | None = None
    """What the predictions were made of, by role: which calibration of its nodes, or defaults."""
    notes: Text | None = None
    """What people should know of it."""
    ranks: Annotated[tuple[RankPlan, ...], Field(max_length=MAX_WORLD_SIZE, json_schema_extra=ATOMIC)] = ()
    """Rank table."""


class FailureStatus(StatusModel):
    """Why an epoch of a group ended."""

    epoch: Count
    """Which incarnation."""
    time: Time
    """When it was seen."""
    reason: StoredReason
    """CamelCase."""
    message: Text
    """For people."""
    rank: Annotated[int, Field(ge=0, le=MAX_WORLD_SIZE)] | None = None
    """The culprit, if it is a rank."""
    exit_code: Annotated[int, Field(ge=-MOST_EXIT_CODE, le=MOST_EXIT_CODE)] | None = None
    """Of the culprit; negative for a signal."""
    counted: bool = True
    """Whether it counts towards restart.maxRestarts; evictions, drains and preemptions don't."""
    served: bool = True
    """Whether the epoch had served; failures of starts count however old they are."""


class RankEntry(StatusModel):
    """A rank of a group now."""

    rank: Count
    """Global rank."""
    role: RoleName
    """Its role."""
    pod: Annotated[str, Field(max_length=253)]
    """Its pod."""
    node: Annotated[str, Field(max_length=253)] | None = None
    """Its pod's node."""
    started: bool = False
    """Whether its pod runs or ran; before, another pod can replace it."""
    ready: bool = False
    """Whether it is alive and loaded."""
    step_ms: Milliseconds | None = None
    """A decode step, in milliseconds."""
    compute_ms: Milliseconds | None = None
    """Of which its own compute."""
    wait_ms: Milliseconds | None = None
    """Of which waiting for peers."""


class KvLimit(StrEnum):
    """What bounds a KV cache."""

    PLAN = "Plan"
    """Every rank's memory holds what the plan gives it."""
    MEMORY = "Memory"
    """The limiting rank has less than the plan gives it."""


class KvStatus(StatusModel):
    """The KV cache of a group; equal on every rank, in blocks."""

    blocks: Count
    """Blocks that each rank has: as many as the rank with the least headroom."""
    block_tokens: Count | None = None
    """Tokens of a block, in layers that keep tokens."""
    tokens: Count
    """Tokens that these hold, in sequences of the longest length."""
    limiting_rank: Annotated[int, Field(ge=0, le=MAX_WORLD_SIZE)]
    """The rank whose memory holds the fewest blocks, as it measured after its largest batch."""
    limiting_role: RoleName
    """Its role: whose memory to raise."""
    limited_by: KvLimit
    """Plan, or Memory."""
    room_blocks: Count
    """Blocks that the limiting rank's memory holds."""


class StartupStatus(StatusModel):
    """How far a group that starts has come."""

    phase: StartupPhase
    """What it waits for."""
    since: Time
    """When this phase began."""
    bytes_done: Count | None = None
    """Weights read by all ranks; written at most once a minute."""
    bytes_total: Count | None = None
    """Weights to read."""
    measured_time: Time | None = None
    """When the bytes last moved, as far as it was written."""


class GroupStatus(StatusModel):
    """One copy of the model."""

    index: GroupIndex
    """From 0."""
    revision: Hash | None = None
    """Of what the user asked for."""
    plan_hash: Hash | None = None
    """Its plan."""
    epoch: Epoch = 0
    """Its incarnation: grows with each start; 0 before the first."""
    phase: GroupPhase = GroupPhase.PENDING
    """What it is doing."""
    message: Text | None = None
    """What it waits for."""
    epoch_start_time: Time | None = None
    """When its pods were made, or were to be made first: they may have run since, whether seen or not."""
    startup: StartupStatus | None = None
    """How far it has come, while it starts."""
    next_epoch_time: Time | None = None
    """When it will be started again."""
    restarts: Count = 0
    """How often it was started again because of a failure that counts."""
    after_failure: bool = False
    """Whether the epoch before failed: its reason is that of Ready until the group serves again."""
    served_time: Time | None = None
    """When its epoch began to serve."""
    spare_pods: Annotated[tuple[Count, ...], Field(max_length=MAX_WORLD_SIZE, json_schema_extra=ATOMIC)] = ()
    """Pods of this epoch, by index, that were seen to end before they ran: others may have their names."""
    rejections: Count = 0
    """Pods of this epoch that their nodes rejected before they ran; each next one waits longer."""
    rejected_pods: Annotated[
        tuple[Count, ...], Field(max_length=MAX_WORLD_SIZE, json_schema_extra=ATOMIC)
    ] = ()
    """Of the spare pods those, by index, that are counted already and still there."""
    stuck_pods: Annotated[tuple[Count, ...], Field(max_length=MAX_WORLD_SIZE, json_schema_extra=ATOMIC)] = ()
    """Pods of this epoch, by index, whose containers could not be made; an event reported each of them."""
    damaged_pod: Annotated[str, Field(max_length=253)] | None = None
    """A pod that somebody took a label or its owner off; an event reported it."""
    failures: Annotated[
        tuple[FailureStatus, ...], Field(max_length=MAX_FAILURES, json_schema_extra=ATOMIC)
    ] = ()
    """Its last failures, the newest last."""
    measured_time: Time | None = None
    """When the ranks' times were measured; they are written at most once a minute."""
    kv: KvStatus | None = None
    """Its KV cache."""
    members: Annotated[tuple[RankEntry, ...], Field(max_length=MAX_WORLD_SIZE, json_schema_extra=ATOMIC)] = ()
    """Its ranks."""


class RetiredGroup(StatusModel):
    """What is remembered of a group that is not wanted any more, for when it is wanted again."""

    index: GroupIndex
    """As it had."""
    epoch: Epoch = 0
    """Its next incarnation."""
    revision: Hash | None = None
    """Of what it was last made with."""
    restarts: Count = 0
    """How often it was started again because of a failure that counts."""
    next_epoch_time: Time | None = None
    """Before this it is not started again."""
    failures: Annotated[
        tuple[FailureStatus, ...], Field(max_length=MAX_FAILURES, json_schema_extra=ATOMIC)
    ] = ()
    """Its last failures, the newest last and alone with its words."""


class Summary(StatusModel):
    """Small values that `kubectl get` prints."""

    groups: Annotated[str, Field(max_length=16)] | None = None
    """Ready groups of all, as 1/2."""
    gpu_ranks: Count | None = None
    """Ranks of a group that compute on a GPU."""
    cpu_ranks: Count | None = None
    """Ranks of a group that compute on a CPU."""
    step_ms: Annotated[str, Field(max_length=16)] | None = None
    """A decode step of the slowest group, in milliseconds with one decimal."""
    predicted_step_ms: Annotated[str, Field(max_length=16)] | None = None
    """The same of one request as predicted."""
    slowest_rank: Annotated[str, Field(max_length=64)] | None = None
    """Rank with the longest compute time and its role, as 1 (cpu)."""
    restarts: Count | None = None
    """Of all groups."""
    plan: Hash | None = None
    """Hash of the plan that new groups get."""


class HeteroInferenceStatus(StatusModel):
    """What is, as the operator last saw it."""

    observed_generation: Annotated[int, Field(ge=-1, le=2**53)] = -1
    """Generation of the spec that this status is about; -1 before the operator has seen the resource."""
    replicas: GroupCount = 0
    """Groups that exist."""
    ready_replicas: GroupCount = 0
    """Groups that serve."""
    updated_replicas: GroupCount = 0
    """Groups of the update revision."""
    selector: Annotated[str, Field(max_length=512)] | None = None
    """Label selector of the groups' leaders, for /scale."""
    endpoint: Annotated[str, Field(max_length=512)] | None = None
    """URL of the OpenAI API inside the cluster."""
    current_revision: Hash | None = None
    """Revision that all groups had when the last roll-out ended."""
    update_revision: Hash | None = None
    """Revision of the spec."""
    records_signed_by: Hash | None = None
    """Fingerprint of the operator's key by which all records of revisions are signed; others are ignored."""
    summary: Summary | None = None
    """Small values that `kubectl get` prints."""
    conditions: Annotated[
        tuple[Condition, ...], Field(max_length=16, json_schema_extra=map_list("type"))
    ] = ()
    """Available, Ready, Stalled, Progressing, Planned, ModelReady, CapacityAvailable, Degraded, Failed."""
    gpus_missing_since: Time | None = None
    """Since when GPUs have been missing; planning.onGPUShortage.after counts from here."""
    model: ModelStatus | None = None
    """The model."""
    plans: Annotated[tuple[PlanStatus, ...], Field(max_length=MAX_PLANS, json_schema_extra=ATOMIC)] = ()
    """Plans in use."""
    groups: Annotated[tuple[GroupStatus, ...], Field(max_length=MAX_GROUPS, json_schema_extra=ATOMIC)] = ()
    """By index."""
    retired_groups: Annotated[
        tuple[RetiredGroup, ...], Field(max_length=MAX_GROUPS, json_schema_extra=ATOMIC)
    ] = ()
    """Groups that were scaled away, as long as failures of theirs count: scaling forgives none."""

    def condition(self, kind: str) -> Condition | None:
        """Returns the condition of this type, or None."""
        return next((condition for condition in self.conditions if condition.type == kind), None)
