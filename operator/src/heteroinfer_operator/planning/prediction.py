"""Predicts the time of a step: the bytes that it reads, divided by the device's rate. Pure.

A decode step reads each weight that its tokens use once: all weights of a dense layer, the chosen experts of
a mixture, the head, and the KV cache of each request, up to the window's width. If a step has many tokens,
operations take longer than reading.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, TypeAlias

from heteroinfer_contract.model import LayerKind
from heteroinfer_contract.plan import Device, EngineSettings, Plan, RankAssignment
from heteroinfer_operator.planning.collectives import collectives_s, eager_s
from heteroinfer_operator.planning.kv_cache import state_bytes, token_bytes
from heteroinfer_operator.planning.memory import Sizes, plain_bytes
from heteroinfer_operator.planning.rates import CPU_DEFAULTS_ERROR, GPU_ERROR, GPU_UNKNOWN_ERROR, Error, Rates
from heteroinfer_operator.vllm_support.engine_options import ELEMENT_BYTES

STEP_OVERHEAD_S: Final = 2.1e-3
"""Between a step's answer and the next call: scheduling, sampling, messages (docs/user/benchmarks.md)."""
AHEAD_OVERHEAD_S: Final = 0.6e-3
"""The same if a step is scheduled while another runs: 0.4 to 0.8 ms, mode FeedForward (H200, 2026-11-22)."""
REQUEST_OVERHEAD_S: Final = 9e-3
"""Time from a request to its first step plus from that step's answer to the client: 7 and 9 ms with a prompt
of 1,024 tokens (two H200 hosts, 2026-11-24), up to 20 ms if stages pass rows on."""
MIXTURE_LAUNCH_S: Final = 1.5e-3
"""A mixture's layer takes at least this time on a GPU in a step with more tokens than the captured CUDA
graphs, because kernels are then launched one by one. 24 layers took 45 ms for 512 tokens and 39 ms for 2,048
(stock vLLM, H200, 2026-11-22; docs/user/benchmarks.md). 16 layers, four without experts, took 24 ms for 1,024
tokens."""
_MAX_CAPTURED_REQUESTS: Final = 512
"""Tokens of the largest graph (vllm/config/compilation.py@v0.32.0: twice max_num_seqs, at most that)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The time of a step, or of a first token.

    Attributes:
        step_s: seconds through all stages and back to the first.
        least_s: lower end of the range.
        most_s: upper end of the range.
    """

    step_s: float
    least_s: float
    most_s: float

    def __str__(self) -> str:
        return f"{_ms(self.step_s)} ms ({_ms(self.least_s)} to {_ms(self.most_s)})"

    def __add__(self, other: "Prediction") -> "Prediction":
        return Prediction(
            step_s=self.step_s + other.step_s,
            least_s=self.least_s + other.least_s,
            most_s=self.most_s + other.most_s,
        )


_NOTHING: Final = Prediction(step_s=0.0, least_s=0.0, most_s=0.0)


def _within(seconds: float, error: Error) -> Prediction:
    return Prediction(step_s=seconds, least_s=seconds * error.least, most_s=seconds * error.most)


def _slowest(parts: Iterable[Prediction]) -> Prediction:
    """Returns the slowest part, with the largest of all lower and of all upper ends."""
    found = tuple(parts)
    if not found:
        return _NOTHING
    return Prediction(
        step_s=max(part.step_s for part in found),
        least_s=max(part.least_s for part in found),
        most_s=max(part.most_s for part in found),
    )


def _at_least(part: Prediction, seconds: float) -> Prediction:
    """Returns the part, or a longer time that something else takes meanwhile."""
    return _slowest((part, _within(seconds, GPU_ERROR))) if seconds else part


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}" if seconds < 1 else f"{seconds * 1e3:.0f}"


def predict(plan: Plan, rates: Sequence[Rates] = ()) -> Prediction:
    """Returns the decode step of one request. One batch is in flight, so stages wait for each other.

    Args:
        rates: rates by rank that the plan was predicted with; empty if they are no longer known.
    """

    def within(rank: RankAssignment) -> Prediction:
        unknown = CPU_DEFAULTS_ERROR if rank.device is Device.CPU else GPU_UNKNOWN_ERROR
        return _within(rank.predicted_step_s, rates[rank.rank].error if rates else unknown)

    step = _overhead(plan)
    for stage in range(plan.pipeline_parallel_size):
        # A stage waits for its feed-forward ranks in each of their layers.
        step += _at_least(_slowest(map(within, plan.stage(stage))), eager_s(plan, stage))
        step += _slowest(map(within, plan.feed_forward_ranks(stage)))
        step += _within(collectives_s(plan, stage), GPU_ERROR)
    return step


def overhead_s(plan: Plan) -> float:
    """Returns the seconds between two steps in which no rank computes."""
    return AHEAD_OVERHEAD_S if plan.schedules_ahead else STEP_OVERHEAD_S


def _overhead(plan: Plan) -> Prediction:
    return _within(overhead_s(plan), GPU_ERROR)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The work of a step.

    Attributes:
        requests: requests in the step.
        context: earlier tokens of each request.
        tokens: new tokens of each request: 1 when decoding, a chunk of the prompt in prefill.
    """

    requests: int = 1
    context: int = 0
    tokens: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReads:
    """The reads of one class of weights on a rank in a step.

    Attributes:
        operations: multiplications and additions with these weights.
        row_bytes: bytes times rows; a sum, so that parts with other numbers of rows can be added.
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
        experts: the average routed experts that the step's tokens use.
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

        The rate of a kernel that was measured for many rows covers both.
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
    sizes: Sizes, first: int, end: int, load: Load, *, last: bool, engine: EngineSettings
) -> Reads:
    """Returns the reads of one rank in a step, in layers first..end-1 and, if `last`, in the head."""
    plain, quantized, experts, head = WeightReads(), WeightReads(), WeightReads(), WeightReads()
    cache = attention = 0.0
    tokens = load.requests * load.tokens
    for index, bare in zip(range(first, end), plain_bytes(sizes.profile)[first:end], strict=True):
        kind = sizes.profile.layer(index)
        part = sizes.layer_bytes[index] / max(sizes.profile.layer_bytes[index], 1)
        routed_plain = 0 if kind.experts_quantized else kind.routed_bytes
        # Splits this layer's bytes on this rank into classes, in proportion to the checkpoint.
        dense = sizes.layer_bytes[index] - kind.routed_bytes * part
        share_plain = (bare - routed_plain) * part
        operations = 2 * tokens / _bytes_per_weight(sizes, kind)
        plain += _part(share_plain, tokens, operations)
        quantized += _part(dense - share_plain, tokens, operations)
        chosen = kind.expected_experts(tokens) * kind.expert_bytes * part
        routed = tokens * kind.experts_per_token * kind.expert_bytes * part
        experts += WeightReads(bytes=chosen, operations=routed / tokens * operations, row_bytes=routed)
        cache += load.requests * _cached_bytes(kind, load.context, engine, sizes.tensor)
        attention += 4 * tokens * _seen(kind, load.context) * _width(sizes, kind) / sizes.tensor
    if last:
        head = _part(sizes.head_bytes, load.requests, 2 * load.requests / 2)
    return Reads(
        plain=plain, head=head, quantized=quantized, experts=experts, cache=cache, attention=attention
    )


def _part(num_bytes: float, rows: float, operations_per_byte: float) -> WeightReads:
    return WeightReads(
        bytes=num_bytes, operations=num_bytes * operations_per_byte, row_bytes=num_bytes * rows
    )


def _bytes_per_weight(sizes: Sizes, kind: LayerKind) -> float:
    bits = sizes.profile.scheme.bits
    is_quantized = kind.experts_quantized or (kind.quantized_bytes and not kind.experts)
    return bits / 8 if is_quantized and bits else 2.0 * max(float(sizes.scale), 1.0)


def _seen(kind: LayerKind, context: int) -> int:
    """Returns the number of earlier tokens that a new token attends to."""
    return min(context, kind.window) if kind.window else context if kind.kv_heads else 0


def _width(sizes: Sizes, kind: LayerKind) -> int:
    """Returns the elements that all query heads compare per earlier token."""
    heads = sizes.profile.num_attention_heads
    return heads * (kind.kv_width if kind.kv_heads == 1 else kind.kv_width // 2)


def _cached_bytes(kind: LayerKind, context: int, engine: EngineSettings, tensor: int) -> float:
    """Returns the bytes of one request's cache that a step reads in a layer; states are also written."""
    tokens = min(context, kind.window) if kind.window else context
    by_token = (token_bytes(kind, engine, tensor) if kind.kv_heads else 0) + kind.index_bytes
    return tokens * by_token + 2 * state_bytes(kind, engine, tensor)


Elsewhere: TypeAlias = Callable[[Load], float]
"""Returns the seconds of a step that a stage waits for its feed-forward ranks (plans of one stage only)."""


def _nowhere(_: Load) -> float:
    return 0.0


def forecast(
    plan: Plan, sizes: Sizes, rates: Sequence[Rates], load: Load, elsewhere: Elsewhere = _nowhere
) -> Prediction:
    """Returns the predicted decode step of a load.

    Args:
        sizes: sizes of one rank.
        rates: rates by rank.
        load: requests with one new token each.
        elsewhere: predicts the wait for feed-forward ranks.
    """
    return sum(_stages(plan, sizes, rates, load, elsewhere), _overhead(plan))


def forecast_first_token(
    plan: Plan, sizes: Sizes, rates: Sequence[Rates], prompt: int, elsewhere: Elsewhere = _nowhere
) -> Prediction:
    """Returns the time to the first token of a prompt, whose chunks go through the stages in a pipeline."""
    chunk = plan.engine.max_num_batched_tokens
    total = longest = _NOTHING
    for begin in range(0, prompt, chunk):
        load = Load(context=begin + min(chunk, prompt - begin) // 2, tokens=min(chunk, prompt - begin))
        stages = _stages(plan, sizes, rates, load, elsewhere)
        whole = sum(stages, _NOTHING)
        total += whole if begin == 0 else _slowest(stages)
        longest = _slowest((longest, whole))
    between = _within(ceil(prompt / chunk) * overhead_s(plan) + REQUEST_OVERHEAD_S, GPU_ERROR)
    return _slowest((total, longest)) + between


def _stages(
    plan: Plan, sizes: Sizes, rates: Sequence[Rates], load: Load, elsewhere: Elsewhere
) -> list[Prediction]:
    """Returns the time of each stage: that of its slowest rank, and the wait for its feed-forward ranks."""
    # Feed-forward ranks have the highest numbers.
    remote = _within(elsewhere(load), rates[-1].error)

    def compute(rank: RankAssignment) -> Prediction:
        return _within(_compute_s(plan, sizes, rates, rank, load), rates[rank.rank].error)

    rows = load.requests * load.tokens
    row_bytes = sizes.profile.hidden_size * ELEMENT_BYTES[plan.engine.dtype]

    def collectives(stage: int) -> Prediction:
        return _within(collectives_s(plan, stage, rows * row_bytes), GPU_ERROR)

    return [
        _at_least(_slowest(map(compute, plan.stage(stage))), eager_s(plan, stage))
        + remote
        + collectives(stage)
        for stage in range(plan.pipeline_parallel_size)
    ]


def slowest_rank(
    plan: Plan, sizes: Sizes, rates: Sequence[Rates], load: Load, elsewhere: Elsewhere = _nowhere
) -> int:
    """Returns the rank that computes longest in a step of this load."""
    beside = [rank.rank for rank in plan.ranks if rank.feed_forward is not None]
    seconds = {
        rank.rank: _compute_s(plan, sizes, rates, rank, load) for rank in plan.stage_ranks
    } | dict.fromkeys(beside, elsewhere(load) if beside else 0.0)
    return max(seconds, key=seconds.__getitem__)


def _compute_s(plan: Plan, sizes: Sizes, rates: Sequence[Rates], rank: RankAssignment, load: Load) -> float:
    last = rank.stage == plan.pipeline_parallel_size - 1
    read = count_reads(sizes, rank.first_layer, rank.end_layer, load, last=last, engine=plan.engine)
    return max(read.seconds(rates[rank.rank]), _launch_s(plan, sizes, rank, load))


def _launch_s(plan: Plan, sizes: Sizes, rank: RankAssignment, load: Load) -> float:
    """Returns the seconds in which a GPU launches a mixture's kernels without a CUDA graph."""
    captured = min(2 * plan.engine.max_num_seqs, _MAX_CAPTURED_REQUESTS)
    if rank.device is not Device.GPU or load.requests * load.tokens <= captured:
        return 0.0
    # If feed-forward ranks have the experts of a layer, the GPU still launches that layer's other kernels.
    is_mixture = any(kind.experts for kind in sizes.profile.layers)
    return rank.num_layers * MIXTURE_LAUNCH_S if is_mixture else 0.0
