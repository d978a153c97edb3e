"""Predicts the time of a step: the bytes that the step reads, divided by the device's rate. Pure.

A decode step reads each weight once that its tokens use: all weights of a dense layer, the chosen experts of
a mixture, and the head. The step also reads the KV cache of each request, up to the size of the window. If a
step has many tokens, its operations take longer than reading.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, TypeAlias

from heteroinfer_contract.model import AttentionKind, LayerKind
from heteroinfer_contract.plan import Device, EngineSettings, Plan, RankAssignment
from heteroinfer_operator.planning.collectives import collectives_s, eager_launch_s
from heteroinfer_operator.planning.kv_cache import state_bytes, token_bytes
from heteroinfer_operator.planning.memory import Sizes, unquantized_layer_bytes
from heteroinfer_operator.planning.rates import (
    CPU_DEFAULTS_ERROR,
    GPU_ERROR,
    GPU_UNKNOWN_ERROR,
    ErrorRange,
    Rates,
)
from heteroinfer_operator.vllm_support.cuda_graphs import most_captured_rows
from heteroinfer_operator.vllm_support.engine_options import ELEMENT_BYTES

STEP_OVERHEAD_S: Final = 2.1e-3
"""Seconds between the answer of a step and the call of the next step, for scheduling, sampling and messages
(docs/user/benchmarks.md)."""
AHEAD_OVERHEAD_S: Final = 0.6e-3
"""Seconds between two steps if vLLM schedules a step while another step runs: 0.4 to 0.8 ms in mode
FeedForward (H200, 2026-11-22)."""
REQUEST_OVERHEAD_S: Final = 9e-3
"""Seconds from a request to its first step, plus those from that step's answer to the client: 7 and 9 ms with
a prompt of 1,024 tokens (two H200 hosts, 2026-11-24), up to 20 ms with several stages."""
MIXTURE_LAUNCH_S: Final = 1.5e-3
"""Minimum seconds of a layer with experts on a GPU, if a step has more tokens than the captured CUDA graphs
support: kernels are then launched one by one. 24 layers took 45 ms for 512 tokens and 39 ms for 2,048 (stock
vLLM, H200, 2026-11-22; docs/user/benchmarks.md). 16 layers, four without experts, took 24 ms for 1,024
tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted time of a step, or of a first token, with its range.

    Attributes:
        step_s: seconds through all stages and back to the first.
        least_s: lower end of the range, in seconds.
        most_s: upper end of the range, in seconds.
    """

    step_s: float
    least_s: float
    most_s: float

    def __str__(self) -> str:
        return f"{_format_ms(self.step_s)} ms ({_format_ms(self.least_s)} to {_format_ms(self.most_s)})"

    def __add__(self, other: "Prediction") -> "Prediction":
        return Prediction(
            step_s=self.step_s + other.step_s,
            least_s=self.least_s + other.least_s,
            most_s=self.most_s + other.most_s,
        )


_ZERO: Final = Prediction(step_s=0.0, least_s=0.0, most_s=0.0)


def _with_range(seconds: float, error: ErrorRange) -> Prediction:
    """Returns a time with its range, which follows from the error of the rates."""
    return Prediction(step_s=seconds, least_s=seconds * error.least, most_s=seconds * error.most)


def _slowest(all_predictions: Iterable[Prediction]) -> Prediction:
    """Returns the time of parts that run at the same time: the maximum of each value."""
    predictions = tuple(all_predictions)
    if not predictions:
        return _ZERO
    return Prediction(
        step_s=max(part.step_s for part in predictions),
        least_s=max(part.least_s for part in predictions),
        most_s=max(part.most_s for part in predictions),
    )


def _at_least(predicted: Prediction, seconds: float) -> Prediction:
    """Returns a prediction, or the time of kernel launches on the host (`seconds`) if this time is longer.

    A GPU computes while the host launches the next kernels, so the two times overlap.
    """
    return _slowest((predicted, _with_range(seconds, GPU_ERROR))) if seconds else predicted


def _format_ms(seconds: float) -> str:
    """Returns seconds as text in milliseconds."""
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def predict(plan: Plan, rates: Sequence[Rates] = ()) -> Prediction:
    """Returns the predicted time of a decode step of one request, which passes one stage after the other.

    Args:
        rates: rates by rank with which the plan was predicted; empty if they are unknown, which widens the
            range.
    """

    def predicted_time(rank: RankAssignment) -> Prediction:
        unknown = CPU_DEFAULTS_ERROR if rank.device is Device.CPU else GPU_UNKNOWN_ERROR
        return _with_range(rank.predicted_step_s, rates[rank.rank].error if rates else unknown)

    step = _predict_overhead(plan)
    for stage in range(plan.pipeline_parallel_size):
        # The rank with attention waits in each layer of feed-forward ranks, so their time is added.
        step += _at_least(_slowest(map(predicted_time, plan.stage(stage))), eager_launch_s(plan, stage))
        step += _slowest(map(predicted_time, plan.feed_forward_ranks(stage)))
        step += _with_range(collectives_s(plan, stage), GPU_ERROR)
    return step


def overhead_s(plan: Plan) -> float:
    """Returns the seconds between two steps in which no rank computes."""
    return AHEAD_OVERHEAD_S if plan.schedules_ahead else STEP_OVERHEAD_S


def _predict_overhead(plan: Plan) -> Prediction:
    """Returns the time between two steps with its range."""
    return _with_range(overhead_s(plan), GPU_ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoad:
    """The work of one step.

    Attributes:
        requests: requests in the step.
        context: earlier tokens of each request.
        tokens: new tokens of each request: 1 for decoding, a chunk of the prompt for prefill.
    """

    requests: int = 1
    context: int = 0
    tokens: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReads:
    """The reads of one class of weights on a rank in a step.

    Attributes:
        bytes: bytes that are read once.
        operations: multiplications and additions with these weights.
        row_bytes: sum of (bytes of a weight x rows that use the weight) over all weights. Divided by `bytes`,
            it is the mean number of rows of a weight.
    """

    bytes: float = 0.0
    operations: float = 0.0
    row_bytes: float = 0.0

    def __add__(self, other: "WeightReads") -> "WeightReads":
        return WeightReads(
            bytes=self.bytes + other.bytes,
            operations=self.operations + other.operations,
            row_bytes=self.row_bytes + other.row_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reads:
    """The reads and operations of one rank in a step.

    Attributes:
        plain: unquantized weights.
        head: unquantized weights that compute logits, with one row per request.
        quantized: quantized weights outside of routed experts.
        experts: routed experts, as many as the step's tokens use on average.
        cache: bytes of KV cache and states.
        attention: multiplications and additions of attention.
    """

    plain: WeightReads = WeightReads()
    head: WeightReads = WeightReads()
    quantized: WeightReads = WeightReads()
    experts: WeightReads = WeightReads()
    cache: float = 0.0
    attention: float = 0.0

    def seconds(self, rates: Rates) -> float:
        """Returns the seconds for reading, or for computing if that takes longer.

        A kernel with measured rates for several numbers of rows counts separately, because these rates
        already include the time for computing.
        """
        measured_s, reading_s = 0.0, self.cache / rates.cache
        operations = self.attention
        for part, rate, kernel in (
            (self.plain, rates.plain, rates.plain_kernel),
            (self.head, rates.plain, rates.plain_kernel),
            (self.quantized, rates.quantized, rates.quantized_kernel),
            (self.experts, rates.experts, rates.experts_kernel),
        ):
            if kernel is not None and kernel.more_rows and part.bytes:
                measured_s += part.bytes / kernel.rate(part.row_bytes / part.bytes)
            else:
                reading_s += part.bytes / rate
                operations += part.operations
        return measured_s + max(reading_s, operations / rates.operations)


def count_reads(
    sizes: Sizes, first: int, end: int, load: StepLoad, *, has_head: bool, engine: EngineSettings
) -> Reads:
    """Counts the weights and caches that one rank reads in a step, and its operations.

    Includes layers first..end-1, and the head if `has_head`.
    """
    plain, quantized, experts, head = WeightReads(), WeightReads(), WeightReads(), WeightReads()
    cache = attention = 0.0
    tokens = load.requests * load.tokens
    for index, plain_size in zip(
        range(first, end), unquantized_layer_bytes(sizes.profile)[first:end], strict=True
    ):
        kind = sizes.profile.layer(index)
        # The classes of weights have the same proportions on this rank as in the checkpoint.
        rank_share = sizes.layer_bytes[index] / max(sizes.profile.layer_bytes[index], 1)
        unquantized_experts = 0 if kind.experts_quantized else kind.routed_bytes
        bytes_without_experts = sizes.layer_bytes[index] - kind.routed_bytes * rank_share
        unquantized_without_experts = (plain_size - unquantized_experts) * rank_share
        operations_per_byte = 2 * tokens / _bytes_per_weight(sizes, kind)
        plain += _weight_reads(unquantized_without_experts, tokens, operations_per_byte)
        quantized += _weight_reads(
            bytes_without_experts - unquantized_without_experts, tokens, operations_per_byte
        )
        # A step reads each chosen expert once, but each token computes with its own experts.
        # operations_per_byte already counts all tokens, so the operations follow from the bytes of one
        # token's experts.
        chosen_bytes = kind.expected_experts(tokens) * kind.expert_bytes * rank_share
        row_bytes = tokens * kind.experts_per_token * kind.expert_bytes * rank_share
        experts += WeightReads(
            bytes=chosen_bytes, operations=row_bytes / tokens * operations_per_byte, row_bytes=row_bytes
        )
        cache += load.requests * _cached_bytes(kind, load.context, engine, sizes.tensor)
        attention += _attention_operations(sizes, kind, tokens, load.context)
    if has_head:
        # A weight of the head has 2 bytes, and needs 2 operations for each request.
        head = _weight_reads(sizes.head_bytes, load.requests, 2 * load.requests / 2)
    return Reads(
        plain=plain, head=head, quantized=quantized, experts=experts, cache=cache, attention=attention
    )


def _weight_reads(num_bytes: float, rows: float, operations_per_byte: float) -> WeightReads:
    """Returns the reads of weights if the same number of rows uses each weight."""
    return WeightReads(
        bytes=num_bytes, operations=num_bytes * operations_per_byte, row_bytes=num_bytes * rows
    )


def _bytes_per_weight(sizes: Sizes, kind: LayerKind) -> float:
    """Returns the bytes per weight of a layer's experts, or of a dense layer.

    An unquantized weight has 2 bytes, or more if the engine's type is wider than the checkpoint's type (scale
    above 1).
    """
    bits = sizes.profile.scheme.bits
    is_quantized = kind.experts_quantized or (kind.quantized_bytes and not kind.experts)
    return bits / 8 if is_quantized and bits else 2.0 * max(float(sizes.scale), 1.0)


def _attention_operations(sizes: Sizes, kind: LayerKind, tokens: int, context: int) -> float:
    """Returns the multiplications and additions of one rank for attention in a layer.

    Each element of a key needs a multiplication and an addition, and so does each element of a value.
    """
    return 4 * tokens * _num_attended_tokens(kind, context) * _key_elements(sizes, kind) / sizes.tensor


def _num_attended_tokens(kind: LayerKind, context: int) -> int:
    """Returns the number of earlier tokens to which a new token attends."""
    if kind.window:
        return min(context, kind.window)
    return context if kind.kv_heads else 0


def _key_elements(sizes: Sizes, kind: LayerKind) -> int:
    """Returns the elements of an earlier token's key that a layer multiplies with queries, over all heads.

    A latent is key and value at the same time. In all other layers, the key is half of `kv_width`.
    """
    # Latents have one KV head. So has multi-query attention, which caches a key and a value.
    may_have_latents = kind.attention in (AttentionKind.LATENT, AttentionKind.SPARSE)
    has_latents = may_have_latents and kind.kv_heads == 1
    return sizes.profile.num_attention_heads * (kind.kv_width if has_latents else kind.kv_width // 2)


def _cached_bytes(kind: LayerKind, context: int, engine: EngineSettings, tensor: int) -> float:
    """Returns the bytes of one request's cache that a step moves in a layer.

    A state counts twice, because a step reads and writes it.
    """
    tokens = min(context, kind.window) if kind.window else context
    by_token = (token_bytes(kind, engine, tensor) if kind.kv_heads else 0) + kind.index_bytes
    return tokens * by_token + 2 * state_bytes(kind, engine, tensor)


FeedForwardWait: TypeAlias = Callable[[StepLoad], float]
"""Function that returns the seconds of a step in which the stage waits for its feed-forward ranks (for plans
of one stage)."""


def _no_wait(_: StepLoad) -> float:
    """Returns 0.0, for plans without feed-forward ranks."""
    return 0.0


def forecast(
    plan: Plan,
    sizes: Sizes,
    rates: Sequence[Rates],
    load: StepLoad,
    feed_forward_wait: FeedForwardWait = _no_wait,
) -> Prediction:
    """Returns the predicted time of a decode step of a load.

    Args:
        sizes: sizes of one rank.
        rates: rates by rank.
        load: requests with one new token each.
        feed_forward_wait: predicts the wait for feed-forward ranks.
    """
    return sum(_predict_stages(plan, sizes, rates, load, feed_forward_wait), _predict_overhead(plan))


def forecast_first_token(
    plan: Plan,
    sizes: Sizes,
    rates: Sequence[Rates],
    prompt: int,
    feed_forward_wait: FeedForwardWait = _no_wait,
) -> Prediction:
    """Returns the time to the first token of a prompt.

    The prompt's chunks follow each other through the stages: only the first chunk takes the time of all
    stages, and each further chunk adds the time of the slowest stage. The total is at least the time of the
    longest chunk through all stages, which may be a later chunk.
    """
    chunk_tokens = plan.engine.max_num_batched_tokens
    total = longest = _ZERO
    for begin in range(0, prompt, chunk_tokens):
        tokens = min(chunk_tokens, prompt - begin)
        # On average, a token of the chunk attends to the earlier chunks and half of its own.
        load = StepLoad(context=begin + tokens // 2, tokens=tokens)
        stages = _predict_stages(plan, sizes, rates, load, feed_forward_wait)
        all_stages = sum(stages, _ZERO)
        total += all_stages if begin == 0 else _slowest(stages)
        longest = _slowest((longest, all_stages))
    overhead = _with_range(ceil(prompt / chunk_tokens) * overhead_s(plan) + REQUEST_OVERHEAD_S, GPU_ERROR)
    return _slowest((total, longest)) + overhead


def _feed_forward_error(plan: Plan, rates: Sequence[Rates]) -> ErrorRange:
    """Returns the widest range of the feed-forward ranks' times."""
    errors = [rates[rank.rank].error for rank in plan.ranks if rank.feed_forward is not None]
    errors = errors or [rates[-1].error]  # without such ranks, the time is 0, so any range is right
    return ErrorRange(least=min(error.least for error in errors), most=max(error.most for error in errors))


def _predict_stages(
    plan: Plan, sizes: Sizes, rates: Sequence[Rates], load: StepLoad, feed_forward_wait: FeedForwardWait
) -> list[Prediction]:
    """Returns the time of each stage: its slowest rank, the wait for feed-forward ranks, and collectives.

    The wait is the same for each stage, because only plans of one stage have feed-forward ranks.
    """
    feed_forward_time = _with_range(feed_forward_wait(load), _feed_forward_error(plan, rates))

    def compute(rank: RankAssignment) -> Prediction:
        return _with_range(compute_s(plan, sizes, rates, rank, load), rates[rank.rank].error)

    rows = load.requests * load.tokens
    row_bytes = sizes.profile.hidden_size * ELEMENT_BYTES[plan.engine.dtype]

    def collectives(stage: int) -> Prediction:
        return _with_range(collectives_s(plan, stage, rows * row_bytes), GPU_ERROR)

    return [
        _at_least(_slowest(map(compute, plan.stage(stage))), eager_launch_s(plan, stage))
        + feed_forward_time
        + collectives(stage)
        for stage in range(plan.pipeline_parallel_size)
    ]


def slowest_rank(
    plan: Plan,
    sizes: Sizes,
    rates: Sequence[Rates],
    load: StepLoad,
    feed_forward_wait: FeedForwardWait = _no_wait,
) -> int:
    """Returns the rank that computes longest in a step of this load.

    Feed-forward ranks count with the time for which the stage waits for them. The first such rank stands for
    all.
    """
    feed_forward_ranks = [rank.rank for rank in plan.ranks if rank.feed_forward is not None]
    seconds = {rank.rank: compute_s(plan, sizes, rates, rank, load) for rank in plan.stage_ranks}
    if feed_forward_ranks:
        seconds |= dict.fromkeys(feed_forward_ranks, feed_forward_wait(load))
    return max(seconds, key=lambda rank: seconds[rank])


def compute_s(
    plan: Plan, sizes: Sizes, rates: Sequence[Rates], rank: RankAssignment, load: StepLoad
) -> float:
    """Returns the seconds in which a rank of a stage computes in a step of this load.

    A GPU that launches kernels for longer than it computes takes the time of the launches.
    """
    is_last = rank.stage == plan.pipeline_parallel_size - 1
    reads = count_reads(sizes, rank.first_layer, rank.end_layer, load, has_head=is_last, engine=plan.engine)
    return max(reads.seconds(rates[rank.rank]), _launch_s(plan, sizes, rank, load))


def captured_rows(engine: EngineSettings) -> int:
    """Returns the maximum number of rows of a GPU's step that a CUDA graph holds; 0 without CUDA graphs."""
    return 0 if engine.eager_gpu else _captured_rows_of_graphs(engine)


def _captured_rows_of_graphs(engine: EngineSettings) -> int:
    """Returns the maximum number of rows of a CUDA graph, if the engine captures graphs."""
    return most_captured_rows(engine.extra_args, engine.max_num_seqs, engine.max_num_batched_tokens)


def _launch_s(plan: Plan, sizes: Sizes, rank: RankAssignment, load: StepLoad) -> float:
    """Returns the seconds in which a GPU launches the kernels of a mixture of experts one by one.

    Returns 0 if the step is short enough for a CUDA graph. If the engine uses no CUDA graphs,
    `eager_launch_s` gives the time of short steps.
    """
    if rank.device is not Device.GPU or load.requests * load.tokens <= _captured_rows_of_graphs(plan.engine):
        return 0.0
    # If feed-forward ranks have the experts of a layer, the GPU still launches that layer's other kernels.
    is_mixture = rank.ring_bytes > 0 or any(kind.experts for kind in sizes.profile.layers)
    return rank.num_layers * MIXTURE_LAUNCH_S if is_mixture else 0.0
