"""Lets a GPU compute a part of the experts of its feed-forward ranks in long prompts. Pure.

The GPU copies these experts into its ring, a part of its memory. This module chooses the size of the ring and
the tokens of a step, and predicts the wait for layers that GPU and CPUs share.
docs/decisions/2026-11-27-gpu-experts.md explains the rules and their figures.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final

from heteroinfer_contract.gpu_experts import ACTIVATIONS, LEAST_GAIN, LEAST_ROWS
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, EngineSettings, Plan
from heteroinfer_operator.api import LoadSpec
from heteroinfer_operator.planning.engine_settings import CPU_BATCH_TOKENS
from heteroinfer_operator.planning.expert_ring import ExpertRing
from heteroinfer_operator.planning.feed_forward import (
    FeedForwardPart,
    build_ring,
    exchange_seconds,
    feed_forward_rates,
    feed_forward_seconds,
    ranks_fit,
    stage_rank_left_bytes,
    stage_sizes,
    with_one_more_moved_layer,
)
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.memory import Sizes
from heteroinfer_operator.planning.prediction import StepLoad, captured_rows, compute_s, count_reads
from heteroinfer_operator.planning.rates import Rates, gpu_rates
from heteroinfer_operator.planning.topology import Topology
from heteroinfer_operator.vllm_support.cpu_kernels import name_activation

BATCH_TOKENS: Final = (16384, 8192, 4096, CPU_BATCH_TOKENS)
"""Tokens of a step that the plan tries."""
_LARGE_STEP_TOKENS: Final = 8192
"""A step gets more tokens than this only if the ring is full and a prompt can have more tokens."""
_SHOWN_TOKENS: Final = (2048,)
"""Tokens of a step for which users see the GPU's part, besides the fewest and the most."""
_SLOT_PART: Final = 0.2
"""Part of a layer's experts for which a slot of a full ring has room. With 28 of 128 experts in a slot,
larger slots would not make the GPU faster (docs/decisions/2026-11-27-gpu-experts.md)."""
_KEPT_PART: Final = 3 / 4
"""Part of the KV cache that the ring and larger steps leave, compared with the plan without them."""
_LARGE_PART, _SMALL_PART, _SMALL_RING_BYTES = 1 / 8, 1 / 2, 2**30
"""The ring takes at most 1/8 of the free memory, or 1 GiB if that is more, but never more than a half. The KV
cache of further requests takes the rest."""


def _can_gpu_take_experts(topology: Topology, remote: FeedForwardPart) -> bool:
    """Reports whether the GPU can compute experts of these feed-forward ranks with copied weights.

    The GPU copies only from memory of its own pod, so all feed-forward ranks must be in that pod. Each layer
    must have at least two experts, so that GPU and CPUs can share the layer. vLLM's GPU kernel supports only
    the activations in ACTIVATIONS, and does not clamp gates and ups (`limited_experts`).
    """
    kinds = [remote.profile.layer(index) for index in remote.layers]
    return (
        topology.stages[0][0].placed.device is Device.GPU
        and not any(each.pods for each in remote.sets)
        and all(kind.experts >= 2 and kind.experts_per_token for kind in kinds)
        and name_activation(remote.profile) in ACTIVATIONS
        and not remote.profile.limited_experts
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWait:
    """The predicted wait for the layers of feed-forward ranks in a step.

    Attributes:
        cpu_s: seconds if CPUs compute all experts.
        seconds: seconds with the GPU's part; `cpu_s` if it has none.
        gpu_part: part of the experts that the GPU computes, from 0 to 1.
    """

    cpu_s: float
    seconds: float
    gpu_part: float = 0.0


def predict_wait(
    remote: FeedForwardPart,
    engine: EngineSettings,
    gpu: Rates,
    rates: Sequence[Rates],
    load: StepLoad,
    gap_s: float,
) -> SharedWait:
    """Predicts the wait for feed-forward ranks in a step of this load.

    CPUs compute all experts if the GPU has no ring, if the step has too few rows for the ring, or if the GPU
    would not save enough time.

    Args:
        gpu: rates of the rank with attention.
        rates: rates of each feed-forward rank, in rank order.
        gap_s: seconds of the step in which the GPU does other work, while it can already copy experts.
    """
    cpu_s = max(feed_forward_seconds(remote, engine, rates, load))
    rows = load.requests * load.tokens
    if remote.ring is None or rows < least_rows(engine):
        return SharedWait(cpu_s=cpu_s, seconds=cpu_s)
    exchange_s = max(exchange_seconds(remote, engine, rates, rows))
    times = remote.ring.times(rows, gpu)
    part = times.part_that_ends_with_cpus(cpu_s, exchange_s, gap_s)
    seconds = times.seconds(part, gap_s)
    if seconds > LEAST_GAIN * cpu_s:
        return SharedWait(cpu_s=cpu_s, seconds=cpu_s)
    return SharedWait(cpu_s=cpu_s, seconds=seconds, gpu_part=part)


def predict_plan_wait(
    plan: Plan, sizes: Sizes, rates: Sequence[Rates], remote: FeedForwardPart, load: StepLoad
) -> SharedWait:
    """Predicts the wait for feed-forward ranks in a step of a plan.

    Args:
        sizes: sizes of the rank with attention.
        rates: rates by rank.
    """
    gap_s = compute_s(plan, sizes, rates, plan.ranks[0], load)
    return predict_wait(remote, plan.engine, rates[0], rates[-remote.ranks :], load, gap_s)


def describe_long_prompts(
    plan: Plan, sizes: Sizes, rates: Sequence[Rates], remote: FeedForwardPart | None
) -> str:
    """Describes which part of the experts the GPU computes in steps of different lengths, for users.

    Returns "" if the GPU has no ring.

    Args:
        sizes: sizes of the rank with attention.
        rates: rates by rank of the plan.
    """
    if remote is None or remote.ring is None:
        return ""

    def gpu_part(tokens: int) -> float:
        return predict_plan_wait(plan, sizes, rates, remote, StepLoad(tokens=tokens)).gpu_part

    engine = plan.engine
    most = engine.max_num_batched_tokens
    fewest = next((tokens for tokens in _step_sizes(least_rows(engine), most) if gpu_part(tokens)), None)
    if fewest is None:
        return "CPUs compute all experts, by the predicted rates"
    between = [tokens for tokens in _SHOWN_TOKENS if fewest < tokens < most]
    shown = dict.fromkeys((fewest, *between, most))  # once each, if `fewest` equals `most`
    parts = ", ".join(f"{gpu_part(tokens):.0%} with {tokens:,}" for tokens in shown)
    return (
        f"in steps of {fewest:,} tokens or more, the GPU computes a part of the experts and the CPUs the "
        f"rest ({parts}); in shorter steps, CPUs compute all experts"
    )


def least_rows(engine: EngineSettings) -> int:
    """Returns the fewest rows of a step in which the GPU may compute experts.

    The number is at least LEAST_ROWS, and larger than the rows of any CUDA graph: a graph always copies the
    same number of experts, but the GPU's part changes from step to step.
    """
    return max(captured_rows(engine) + 1, LEAST_ROWS)


def _step_sizes(first: int, most: int) -> Iterator[int]:
    """Yields numbers of tokens from `first` to `most`, each larger than the last by about an eighth."""
    tokens = first
    while tokens < most:
        yield tokens
        tokens += max(tokens // 8, 1)
    yield most


@dataclass(frozen=True, slots=True, kw_only=True)
class RingChooser:
    """Chooses a ring and the tokens of a step for a plan of mode FeedForward that fits without a ring.

    Attributes:
        profile: the whole model.
        engine: settings, with the tokens of a step if CPUs compute all experts.
        load: load for which the ring must save time.
        tokens: tokens of a step that the user set, or None.
    """

    topology: Topology
    profile: ModelProfile
    engine: EngineSettings
    inventory: Inventory
    load: LoadSpec
    tokens: int | None = None

    def choose(self, remote: FeedForwardPart) -> tuple[FeedForwardPart, EngineSettings]:
        """Returns the part of the model with a ring, and the settings; both unchanged if no ring saves time.

        The memory of a ring comes from the KV cache, or from one more layer that moves to the CPUs. The plan
        without a ring is the third option. Chooses the option with which the load takes the least time.
        """
        if not _can_gpu_take_experts(self.topology, remote):
            return remote, self.engine
        kept_bytes = self._kept_bytes(remote)
        options = [(remote, self.engine), self._best_choice(remote, kept_bytes)]
        with_more_layers = with_one_more_moved_layer(self.topology, self.profile, remote)
        if with_more_layers is not None:
            options.append(self._best_choice(with_more_layers, kept_bytes))
        return min((each for each in options if each is not None), key=lambda each: self._load_s(*each))

    def _kept_bytes(self, remote: FeedForwardPart) -> int:
        """Returns the bytes that a ring must leave for the KV cache, besides one full-length request.

        The whole KV cache is then at least _KEPT_PART as large as it would be without a ring.

        Args:
            remote: the part of the plan without a ring.
        """
        left_bytes = stage_rank_left_bytes(self.topology, remote, self.engine, self.inventory)
        left_bytes = left_bytes or 0  # None if the memory is unknown: then no ring fits anyway
        kv = stage_sizes(self.topology, remote, self.engine).kv
        one_request_bytes = kv.block_bytes(0, remote.remaining.num_layers) * kv.sequence_blocks
        whole_cache_bytes = one_request_bytes + left_bytes
        return max(ceil(_KEPT_PART * whole_cache_bytes) - one_request_bytes, 0)

    def _best_choice(
        self, remote: FeedForwardPart, kept_bytes: int
    ) -> tuple[FeedForwardPart, EngineSettings] | None:
        """Returns the ring and the settings with which long prompts are fastest, or None if no ring fits.

        Steps with more tokens copy each expert less often. But they leave less memory for the ring, and a
        small ring slows the GPU down.

        Returns:
            `remote` with the ring, and the settings with the tokens of a step.
        """

        def tokens_per_s(choice: tuple[FeedForwardPart, EngineSettings]) -> float:
            tokens = choice[1].max_num_batched_tokens
            return tokens / self._step_s(*choice, tokens)

        return max(self._choices(remote, kept_bytes), key=tokens_per_s, default=None)

    def _choices(
        self, remote: FeedForwardPart, kept_bytes: int
    ) -> Iterator[tuple[FeedForwardPart, EngineSettings]]:
        """Yields a choice for each allowed size of a step: `remote` with its largest ring, and the settings.

        Leaves out a size if no ring fits into the memory, or if the step would not be faster with the ring.
        """
        # Even with more tokens, a step must be faster than a step in which CPUs compute all experts. So
        # requests that decode beside a long prompt do not wait longer than without the ring.
        step_limit_s = LEAST_GAIN * self._step_s(remote, self.engine, self.tokens or CPU_BATCH_TOKENS)
        for tokens in BATCH_TOKENS if self.tokens is None else (self.tokens,):
            is_large = self.tokens is None and tokens > _LARGE_STEP_TOKENS
            if is_large and self.engine.max_model_len <= _LARGE_STEP_TOKENS:
                continue  # no prompt is long enough for such a step
            engine = replace(self.engine, max_num_batched_tokens=tokens)
            ring = self._largest_ring(remote, engine, kept_bytes, must_be_full=is_large)
            if ring is None:
                continue
            with_ring = replace(remote, ring=ring)
            if self._step_s(with_ring, engine, tokens) <= step_limit_s:
                yield with_ring, engine

    def _largest_ring(
        self, remote: FeedForwardPart, engine: EngineSettings, kept_bytes: int, *, must_be_full: bool
    ) -> ExpertRing | None:
        """Returns the largest ring for which the memory of GPU and pod suffices, or None if none fits.

        A ring is never larger than a *full* ring, whose slots have room for _SLOT_PART of a layer's experts.

        Args:
            kept_bytes: free memory that the ring leaves to the KV cache.
            must_be_full: whether to return None instead of a smaller ring.
        """
        # Even an empty ring needs memory of GPU and pod: page tables, and intermediate values of a step.
        empty_ring = build_ring(remote, engine, 0)
        with_empty_ring = replace(remote, ring=empty_ring)
        free_bytes = stage_rank_left_bytes(self.topology, with_empty_ring, engine, self.inventory)
        if free_bytes is None or free_bytes <= 0 or not ranks_fit(with_empty_ring, engine):
            return None
        most_bytes = min(
            max(int(free_bytes * _LARGE_PART), _SMALL_RING_BYTES),
            int(free_bytes * _SMALL_PART),
            free_bytes - kept_bytes,
        )
        full_slot = ceil(_SLOT_PART * max(each.experts for each in empty_ring.layers))
        experts_per_slot = min(empty_ring.fitting_experts(most_bytes), full_slot)
        if not experts_per_slot or (must_be_full and experts_per_slot < full_slot):
            return None
        return empty_ring.with_slots_for(experts_per_slot)

    @property
    def _gpu(self) -> Rates:
        """Rates of the rank with attention."""
        role = self.topology.stages[0][0].placed.role.name
        product, calibration = self.inventory.gpu_product.get(role, ""), self.inventory.calibration.get(role)
        return gpu_rates(product, calibration, self.profile.scheme.name)

    def _step_s(self, remote: FeedForwardPart, engine: EngineSettings, tokens: int) -> float:
        """Returns the predicted wait for feed-forward ranks in a step with a chunk of this length."""
        return self._predict_step(remote, engine, StepLoad(tokens=tokens))[0].seconds

    def _predict_step(
        self, remote: FeedForwardPart, engine: EngineSettings, load: StepLoad
    ) -> tuple[SharedWait, float]:
        """Predicts the wait for feed-forward ranks in a step, and the seconds of the GPU's other work."""
        sizes, layers = stage_sizes(self.topology, remote, engine), remote.remaining.num_layers
        gap_s = count_reads(sizes, 0, layers, load, has_head=True, engine=engine).seconds(self._gpu)
        rates = feed_forward_rates(remote, engine, self.inventory)
        return predict_wait(remote, engine, self._gpu, rates, load, gap_s), gap_s

    def _load_s(self, remote: FeedForwardPart, engine: EngineSettings) -> float:
        """Returns the predicted seconds of the load, to compare the options of `choose`.

        For prompts, only the wait for feed-forward ranks counts: the other work of the GPU is about the same
        with each option.
        """
        prompt = min(self.load.prompt_tokens, max(engine.max_model_len - 1, 1))
        output = min(self.load.output_tokens, max(engine.max_model_len - prompt, 1))
        full_chunks, last_chunk_tokens = divmod(prompt, engine.max_num_batched_tokens)
        prompt_s = full_chunks * self._step_s(remote, engine, engine.max_num_batched_tokens)
        if last_chunk_tokens:
            prompt_s += self._step_s(remote, engine, last_chunk_tokens)
        sizes = stage_sizes(self.topology, remote, engine)
        requests = min(self.load.requests, self._requests_at_once(remote, engine, sizes, prompt + output))
        # On average, a request has half of its output when a step computes its next token.
        load = StepLoad(requests=requests, context=prompt + output // 2)
        wait, gap_s = self._predict_step(remote, engine, load)
        return self.load.requests * (prompt_s + output * (wait.seconds + gap_s) / requests)

    def _requests_at_once(
        self, remote: FeedForwardPart, engine: EngineSettings, sizes: Sizes, tokens: int
    ) -> int:
        """Returns the number of requests of `tokens` tokens that fit into the KV cache at the same time.

        At least 1, at most max_num_seqs.

        Args:
            sizes: sizes of the rank with attention.
        """
        free_bytes = stage_rank_left_bytes(self.topology, remote, engine, self.inventory) or 0
        block_bytes = sizes.kv.block_bytes(0, remote.remaining.num_layers)
        if not block_bytes:  # a model without a KV cache
            return engine.max_num_seqs
        # The memory for one full-length request is not part of `free_bytes`.
        blocks = sizes.kv.sequence_blocks + free_bytes // block_bytes
        # The KV cache for a maximum length of `tokens` gives the blocks of one such request.
        request_sizes = stage_sizes(self.topology, remote, replace(engine, max_model_len=tokens))
        return max(min(blocks // max(request_sizes.kv.sequence_blocks, 1), engine.max_num_seqs), 1)
