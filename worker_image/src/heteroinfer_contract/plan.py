"""The plan of a group: its ranks with their pods, devices and layers, and the engine's settings.

Stdlib only; pure. The operator computes the plan before any pod exists and stores it in an immutable
ConfigMap. The supervisors compare its hash in their first handshake.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from itertools import groupby
from typing import Final

from heteroinfer_contract import codec, names
from heteroinfer_contract.errors import ContractError, not_set


class Device(StrEnum):
    """The device on which a rank computes."""

    CPU = "CPU"
    GPU = "GPU"


MAX_WORLD_SIZE = 256
"""Maximum number of ranks in a group."""
MAX_LANES = 24
"""Maximum number of lanes of an asking rank: feed-forward ranks in its pod, plus other such pods."""


class Mode(StrEnum):
    """How GPU and CPU ranks share the model."""

    PIPELINE = "Pipeline"
    """Each stage holds whole layers."""
    TENSOR = "Tensor"
    """GPU and CPU ranks split each layer."""
    FEED_FORWARD = "FeedForward"
    """GPU ranks keep attention; CPU ranks of their pods or of other pods compute experts and MLPs."""


_FIX: Final = (
    "The operator writes the plan: use the same version of operator and worker, or report this defect of "
    "HeteroInfer"
)
"""Fix in all errors about a plan, which users cannot correct."""
_SIZES = ("block_size", "max_model_len", "max_num_batched_tokens", "max_num_seqs", "batches_in_flight")
"""Engine settings that must be at least 1."""
BY_RATE: Final = 0
"""Value of a share that the ranks measure at their start, because the plan does not set it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardShare:
    """The part of a stage that a feed-forward rank computes.

    Attributes:
        layers: layers in which the rank computes a part of the experts or of the MLP, ascending; the same for
            every feed-forward rank of a stage.
        share: the rank's share of the intermediate columns, relative to the shares of the other feed-forward
            ranks of the same rank with attention. BY_RATE (then for all ranks of the stage): shares follow
            the rates at which the ranks read memory, measured at their start.
        by_experts: whether the rank computes whole experts instead of columns; the same for every
            feed-forward rank of a stage.
    """

    layers: tuple[int, ...]
    share: int = BY_RATE
    by_experts: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssignment:
    """One rank's assignment: its pod, device and share of the model.

    Attributes:
        rank: global rank, from 0. Ranks of stage 0 come first, then those of later stages, then all
            feed-forward ranks.
        pod: index of the rank's pod in the group, from 0; pod 0 is the leader.
        stage: pipeline stage, from 0; for a feed-forward rank, the stage that the rank serves.
        tensor_rank: rank within the stage's tensor-parallel group, from 0; for a feed-forward rank, the
            number among the feed-forward ranks of the stage. In this order, the feed-forward ranks are
            divided among the other ranks of the stage, equally many for each.
        end_layer: one past the last layer of which the rank holds a part.
        weight_bytes: predicted size of the rank's weights.
        predicted_step_s: predicted compute time of a decode step of one request; 0 if unknown.
        feed_forward: part that the rank computes if it is a feed-forward rank, else None. A feed-forward
            rank has no attention, KV cache or scheduler. It runs in the pod of the stage that it serves, or
            in a pod of only such ranks.
        ring_bytes: size of the ring: GPU memory into which the GPU copies experts of the feed-forward ranks
            in its pod, to compute them itself in long prompts; 0 without a ring.
    """

    rank: int
    local_rank: int
    pod: int
    role: str
    device: Device
    stage: int
    tensor_rank: int
    first_layer: int
    end_layer: int
    kv_cache_bytes: int
    weight_bytes: int = 0
    predicted_step_s: float = 0.0
    feed_forward: FeedForwardShare | None = None
    ring_bytes: int = 0

    @property
    def layers(self) -> Sequence[int]:
        """Transformer layers that the rank holds, completely or in part, ascending."""
        if self.feed_forward is not None:
            return self.feed_forward.layers
        return range(self.first_layer, self.end_layer)

    @property
    def num_layers(self) -> int:
        """Number of transformer layers that the rank holds, completely or in part."""
        return len(self.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The engine settings that must be equal on all ranks of a group.

    vLLM's defaults differ by device, and vLLM does not compare them between nodes. So the plan sets each
    value explicitly for every rank.

    Attributes:
        dtype: `float32`, `float16` or `bfloat16`; never `auto`.
        max_model_len: maximum length of prompt plus output, in tokens.
        block_size: tokens per KV block; a multiple of 32.
        eager_gpu: whether GPU ranks run without CUDA graphs and torch.compile.
        eager_cpu: whether CPU ranks run without torch.compile.
        batches_in_flight: decode batches that may be in the pipeline at the same time, >= 1.
        extra_args: the user's `engine.args` for vLLM, without options that the plan sets.
    """

    model: str
    served_name: str
    dtype: str
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int
    seed: int = 0
    eager_gpu: bool = False
    eager_cpu: bool = True
    batches_in_flight: int = 1
    extra_args: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PodAssignment:
    """One pod of a group: a view of the ranks that share it."""

    index: int
    role: str
    device: Device
    ranks: tuple[RankAssignment, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(codec.JsonValue):
    """The plan of a whole group.

    Attributes:
        tensor_parallel_size: ranks of one stage, without feed-forward ranks.
        ranks: ordered by rank (`ranks[i].rank == i`): vLLM's ranks first, then feed-forward ranks.
    """

    mode: Mode
    tensor_parallel_size: int
    pipeline_parallel_size: int
    ranks: tuple[RankAssignment, ...]
    engine: EngineSettings
    _cached_text_and_hash: list[str] = field(init=False, repr=False, compare=False, default_factory=list)
    """JSON text and hash after their first use; a plan never changes."""

    def __post_init__(self) -> None:
        """Checks the properties that every reader relies on.

        Raises:
            ContractError: ranks are not 0..world_size-1 in order, a pod's ranks are not adjacent, sizes are
                below 1 or their product is not the number of vLLM's ranks, a rank's stage does not match
                its number, the stages' layers leave a gap, or feed-forward ranks do not fit the mode or
                their stage.
        """
        try:
            self._check_structure()
        except ContractError as error:
            raise ContractError(f"{error}. {_FIX}") from error

    def _check_structure(self) -> None:
        """Checks the properties that `__post_init__` promises.

        Raises:
            ContractError: a property is missing. `__post_init__` adds the fix to its message.
        """
        ranks = [rank.rank for rank in self.ranks]
        if ranks != list(range(len(ranks))) or not ranks:
            raise ContractError(f"Plan.ranks: must be ranks 0..world_size-1 in order (got {ranks[:8]}, ...)")
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            codec.at_least(1, "Plan", **{name: getattr(self, name)})
        if self.tensor_parallel_size * self.pipeline_parallel_size != len(self.stage_ranks):
            raise ContractError(
                f"Plan.ranks: number of ranks in stages must be tensor_parallel_size "
                f"{self.tensor_parallel_size} x pipeline_parallel_size {self.pipeline_parallel_size} (got "
                f"{len(self.stage_ranks)})"
            )
        self._check_pods()
        for rank in self.stage_ranks:
            self._check_assignment(rank)
        self._check_feed_forward()

    def check(self) -> None:
        """Checks that all numbers are in range; raises ContractError that names the field."""
        for name in _SIZES:
            codec.at_least(1, "Plan.engine", **{name: getattr(self.engine, name)})
        for rank in self.ranks:
            for name in ("kv_cache_bytes", "weight_bytes", "predicted_step_s", "ring_bytes"):
                codec.at_least(0, f"Plan.ranks[{rank.rank}]", **{name: getattr(rank, name)})

    @property
    def world_size(self) -> int:
        """Number of ranks, including feed-forward ranks."""
        return len(self.ranks)

    @property
    def stage_ranks(self) -> tuple[RankAssignment, ...]:
        """The ranks of vLLM's world, by rank: all ranks that hold a stage."""
        return tuple(rank for rank in self.ranks if rank.feed_forward is None)

    def feed_forward_ranks(self, stage: int) -> tuple[RankAssignment, ...]:
        """Returns the feed-forward ranks that serve a stage, by their number in the stage."""
        return tuple(r for r in self.ranks if r.feed_forward is not None and r.stage == stage)

    def feed_forward_ranks_of(self, asking: RankAssignment) -> tuple[RankAssignment, ...]:
        """Returns the feed-forward ranks that serve a rank with attention, by their number in the stage."""
        ranks = self.feed_forward_ranks(asking.stage)
        count = len(ranks) // self.tensor_parallel_size
        return ranks[asking.tensor_rank * count : (asking.tensor_rank + 1) * count]

    def asking_rank(self, rank: RankAssignment) -> RankAssignment:
        """Returns the rank with attention that a feed-forward rank serves."""
        count = len(self.feed_forward_ranks(rank.stage)) // self.tensor_parallel_size
        return self.stage(rank.stage)[rank.tensor_rank // count]

    @property
    def pods(self) -> tuple[PodAssignment, ...]:
        """The pods of the group, by index; pod 0 is the leader."""
        ranks_by_pod: dict[int, list[RankAssignment]] = {}
        for rank in self.ranks:
            ranks_by_pod.setdefault(rank.pod, []).append(rank)
        return tuple(
            PodAssignment(index=index, role=ranks[0].role, device=ranks[0].device, ranks=tuple(ranks))
            for index, ranks in sorted(ranks_by_pod.items())
        )

    @property
    def schedules_ahead(self) -> bool:
        """Whether vLLM schedules the next step while a step runs; only if one GPU holds all layers."""
        return _schedules_ahead(self.mode, [rank.device for rank in self.stage_ranks])

    @property
    def batches_at_once(self) -> int:
        """Maximum number of batches that vLLM schedules at the same time.

        KV blocks that these batches will free are not available to the next batch yet.
        """
        return batches_at_once(
            self.mode, self.pipeline_parallel_size, self.ranks[0].device, tensor=self.tensor_parallel_size
        )

    @property
    def layers_by_stage(self) -> tuple[int, ...]:
        """Number of layers of each pipeline stage."""
        return tuple(r.num_layers for r in self.stage_ranks if r.tensor_rank == 0)

    def stage(self, index: int) -> tuple[RankAssignment, ...]:
        """Returns the ranks that split a stage's layers, by tensor rank, without feed-forward ranks."""
        first = index * self.tensor_parallel_size
        return self.ranks[first : first + self.tensor_parallel_size]

    def is_mixed(self, stage: int) -> bool:
        """Returns whether GPU and CPU ranks split the layers of a stage."""
        return len({rank.device for rank in self.stage(stage)}) > 1

    @property
    def hash(self) -> str:
        """16 hex digits that identify this plan."""
        _, plan_hash = self._text_and_hash()
        return plan_hash

    def to_json(self) -> str:
        """Returns the canonical JSON text; without feed-forward ranks, the same text as older versions."""
        text, _ = self._text_and_hash()
        return text

    def _text_and_hash(self) -> list[str]:
        """Returns the JSON text and its hash; computes them at the first call."""
        if not self._cached_text_and_hash:
            raw = codec.as_json_types(self)
            # Leaves out fields that version 0.1.0 lacks, if they have their default. So such a plan has
            # the same text and hash as in 0.1.0.
            for rank in raw["ranks"]:
                if rank["feed_forward"] is None:
                    del rank["feed_forward"]
                if not rank["ring_bytes"]:
                    del rank["ring_bytes"]
            text = codec.as_json_text(raw)
            self._cached_text_and_hash.extend((text, plan_text_hash(text)))
        return self._cached_text_and_hash

    def to_env(self) -> dict[str, str]:
        """Returns the plan as environment variables."""
        return {names.ENV_PLAN: self.to_json()}

    @classmethod
    def from_env(cls, env: Mapping[str, str]) -> "Plan":
        """Returns the plan in an environment; a process parses the plan only once.

        Raises:
            ContractError: the plan is missing, malformed (the message names the field), or not the plan for
                which the operator created the pod.
        """
        if names.ENV_PLAN not in env:
            raise not_set(names.ENV_PLAN)
        text, expected = env[names.ENV_PLAN], env.get(names.ENV_PLAN_HASH, "")
        if expected and plan_text_hash(text) != expected:
            raise ContractError(
                f"{names.ENV_PLAN}: the plan must have hash {expected} (got {plan_text_hash(text)}: a user "
                "or controller replaced the plan's ConfigMap after the operator created this pod). Restrict "
                "write access to ConfigMaps in this namespace; the operator writes the plan again for the "
                "next epoch"
            )
        return _parsed(text)

    def _check_pods(self) -> None:
        """Checks pod indices and local ranks; raises ContractError."""
        pods = self.pods
        are_numbered = [pod.index for pod in pods] == list(range(len(pods)))
        pods_in_rank_order = [pod for pod, _ in groupby(self.stage_ranks, key=lambda rank: rank.pod)]
        are_adjacent = pods_in_rank_order == sorted(set(pods_in_rank_order))
        if not are_numbered or not are_adjacent:
            raise ContractError(
                "Plan.ranks: must be in pods 0..n-1, and the ranks of a pod must be adjacent (got pods "
                f"{[rank.pod for rank in self.ranks[:32]]})"
            )
        for pod in pods:
            for local_rank, rank in enumerate(pod.ranks):
                if rank.local_rank != local_rank:
                    raise ContractError(
                        f"Plan.ranks[{rank.rank}].local_rank: must be {local_rank} (got {rank.local_rank})"
                    )

    def _check_assignment(self, rank: RankAssignment) -> None:
        """Checks the stage, tensor rank and layers of one of vLLM's ranks; raises ContractError."""
        stage, tensor_rank = divmod(rank.rank, self.tensor_parallel_size)
        where = f"Plan.ranks[{rank.rank}]"
        if (rank.stage, rank.tensor_rank) != (stage, tensor_rank):
            raise ContractError(
                f"{where}: stage and tensor_rank must be {stage} and {tensor_rank} "
                f"(got {rank.stage} and {rank.tensor_rank})"
            )
        # A stage begins where the previous stage ends. All its ranks end at the same layer.
        first_layer = self.ranks[(stage - 1) * self.tensor_parallel_size].end_layer if stage else 0
        end_layer = self.ranks[stage * self.tensor_parallel_size].end_layer
        if rank.first_layer != first_layer or rank.end_layer != end_layer:
            raise ContractError(
                f"{where}: first_layer and end_layer must be {first_layer} and {end_layer} on all ranks of "
                f"stage {stage} (got {rank.first_layer} and {rank.end_layer})"
            )
        if rank.end_layer <= rank.first_layer:
            raise ContractError(
                f"{where}: stage {stage} must have at least one layer (got first_layer {rank.first_layer} "
                f"and end_layer {rank.end_layer})"
            )

    def _check_feed_forward(self) -> None:
        """Checks which ranks are feed-forward ranks, and each of them; raises ContractError."""
        last_ranks = self.ranks[len(self.stage_ranks) :]
        if any(rank.feed_forward is None for rank in last_ranks):
            raise ContractError("Plan.ranks: feed-forward ranks must come after all other ranks")
        if bool(last_ranks) != (self.mode is Mode.FEED_FORWARD):
            raise ContractError(
                f"Plan.ranks: a plan must have feed-forward ranks in mode {Mode.FEED_FORWARD} and in no "
                f"other mode (got {len(last_ranks)} in mode {self.mode})"
            )
        for rank in last_ranks:
            self._check_share(rank)
        for rank in self.ranks:
            self._check_ring(rank)

    def _check_ring(self, rank: RankAssignment) -> None:
        """Checks that a rank with a ring can copy from its feed-forward ranks; raises ContractError."""
        if not rank.ring_bytes:
            return
        serving_ranks = self.feed_forward_ranks(rank.stage)
        is_asking_gpu = rank.device is Device.GPU and rank.feed_forward is None
        if not is_asking_gpu or not serving_ranks or any(each.pod != rank.pod for each in serving_ranks):
            raise ContractError(
                f"Plan.ranks[{rank.rank}].ring_bytes: must be 0 unless the rank has a GPU and all "
                f"feed-forward ranks of its stage are in its pod (got {rank.ring_bytes})"
            )

    def _check_share(self, rank: RankAssignment) -> None:
        """Checks the stage, pod, layers and share of a feed-forward rank; raises ContractError."""
        where = f"Plan.ranks[{rank.rank}]"
        if not 0 <= rank.stage < self.pipeline_parallel_size:
            raise ContractError(f"{where}.stage: must be one of the plan's stages (got {rank.stage})")
        peers = self.feed_forward_ranks(rank.stage)
        if len(peers) % self.tensor_parallel_size:
            raise ContractError(
                f"Plan.ranks: the number of feed-forward ranks of stage {rank.stage} must be a multiple of "
                f"{self.tensor_parallel_size}, the number of ranks with attention (got {len(peers)})"
            )
        self._check_place(rank, peers)
        self._check_layers(rank)
        self._check_common_settings(rank, peers[0])

    def _check_place(self, rank: RankAssignment, peers: Sequence[RankAssignment]) -> None:
        """Checks the device, pod and tensor rank of a feed-forward rank; raises ContractError.

        Args:
            peers: all feed-forward ranks of the same stage.
        """
        served = self.stage(rank.stage)[0]
        ranks_of_pod = [other for other in self.ranks if other.pod == rank.pod]
        has_allowed_pod = rank.pod == served.pod or all(
            other.feed_forward is not None and other.stage == rank.stage for other in ranks_of_pod
        )
        if rank.device is not Device.CPU or not has_allowed_pod or rank.tensor_rank != peers.index(rank):
            raise ContractError(
                f"Plan.ranks[{rank.rank}]: feed-forward rank {peers.index(rank)} of stage {rank.stage} must "
                f"be a CPU rank in pod {served.pod}, the stage's pod, or in a pod of only feed-forward ranks "
                f"of this stage, with tensor_rank {peers.index(rank)} (got {rank.device}, pod {rank.pod}, "
                f"tensor_rank {rank.tensor_rank})"
            )

    def _check_layers(self, rank: RankAssignment) -> None:
        """Checks that a feed-forward rank's layers are layers of its stage; raises ContractError."""
        where, served = f"Plan.ranks[{rank.rank}]", self.stage(rank.stage)[0]
        layers = rank.layers
        ordered = bool(layers) and list(layers) == sorted(set(layers))
        if not ordered or layers[0] < served.first_layer or layers[-1] >= served.end_layer:
            raise ContractError(
                f"{where}: layers must be from {served.first_layer} to {served.end_layer - 1}, ascending "
                f"(got {list(layers)})"
            )
        if (rank.first_layer, rank.end_layer) != (layers[0], layers[-1] + 1):
            raise ContractError(
                f"{where}: first_layer and end_layer must be {layers[0]} and {layers[-1] + 1} (got "
                f"{rank.first_layer} and {rank.end_layer})"
            )

    def _check_common_settings(self, rank: RankAssignment, first_rank: RankAssignment) -> None:
        """Checks that the feed-forward ranks of a stage divide the same layers in the same way.

        Args:
            first_rank: the first feed-forward rank of the same stage.

        Raises:
            ContractError: `rank` and `first_rank` differ.
        """
        where, share, first = f"Plan.ranks[{rank.rank}]", rank.feed_forward, first_rank.feed_forward
        assert share is not None
        assert first is not None
        both_or_none_by_rate = (share.share == BY_RATE) == (first.share == BY_RATE)
        if share.share < 0 or not both_or_none_by_rate:
            raise ContractError(
                f"{where}: share must be {BY_RATE} (by measured rate) on all feed-forward ranks of stage "
                f"{rank.stage}, or at least 1 on each (got {share.share}, and {first.share} on rank "
                f"{first_rank.rank})"
            )
        if (share.layers, share.by_experts) != (first.layers, first.by_experts):
            raise ContractError(
                f"{where}: layers and by_experts must be the same on all feed-forward ranks of stage "
                f"{rank.stage} (got {list(share.layers)} and {share.by_experts}, but "
                f"{list(first.layers)} and {first.by_experts} on rank {first_rank.rank})"
            )


def _schedules_ahead(mode: Mode, devices: Sequence[Device]) -> bool:
    """Returns `Plan.schedules_ahead` for the devices of vLLM's ranks."""
    return mode is Mode.FEED_FORWARD and list(devices) == [Device.GPU]


def batches_at_once(mode: Mode, stages: int, first_device: Device, *, tensor: int) -> int:
    """Returns `Plan.batches_at_once` before there is a plan.

    Source: vllm/config/vllm.py::max_concurrent_batches@v0.32.0.

    Args:
        first_device: device of rank 0.
        tensor: ranks of a stage.
    """
    return 2 if _schedules_ahead(mode, [first_device] * stages * tensor) else stages


def plan_text_hash(text: str) -> str:
    """Returns 16 hex digits that identify the text of a plan."""
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


@lru_cache(maxsize=1)
def _parsed(text: str) -> Plan:
    """Parses a plan; caches the last one."""
    return Plan.from_json(text)


def eager_reason(plan: Plan) -> str | None:
    """Returns the reason why GPU ranks cannot use CUDA graphs; None if they can."""
    mixed = [str(stage) for stage in range(plan.pipeline_parallel_size) if plan.is_mixed(stage)]
    if not mixed:
        return None
    return (
        f"GPU and CPU ranks split the layers of stage {', '.join(mixed)}: a captured CUDA graph would hold "
        "collectives that go through host memory, so GPU ranks run eagerly"
    )
