"""A plan in words: where each byte is, what bounds requests and their length, how fast a load is. Pure."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device
from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.planning.feed_forward import beside_weights_bytes
from heteroinfer_operator.planning.first_token import waits_elsewhere
from heteroinfer_operator.planning.gpu_floor import BESIDE_ON_GPUS
from heteroinfer_operator.planning.kv_cache import build_kv_cache
from heteroinfer_operator.planning.memory import CPU_TABLE_COPIES
from heteroinfer_operator.planning.planner import Planned, block_capacities
from heteroinfer_operator.planning.prediction import Load, forecast, forecast_first_token
from heteroinfer_operator.vllm_support.engine_options import EngineOptions

REQUESTS: Final = (1, 8, 64)
CONTEXTS: Final = (1024, 16384)
"""Tokens that each request of a predicted step has already, where the longest sequence has so many."""
_SHORT: Final = 1024
"""Tokens of the shorter sequences that the number of requests is said for."""


def describe_model(profile: ModelProfile, engine_args: Sequence[str] = ()) -> str:
    """Returns what a model is made of, as it is served with these arguments."""
    kinds = Counter(kind.attention.value for kind in profile.layers)
    attention = ", ".join(f"{count} {name}" for name, count in kinds.items())
    layers = f"layers {format_bytes(sum(profile.layer_bytes))} ({attention})"
    if profile.experts:
        routed = sum(kind.routed_bytes for kind in profile.layers)
        token = max(kind.experts_per_token for kind in profile.layers)
        experts = f"{profile.experts} experts a layer, {token} of which a token reads"
        layers += f", of it {format_bytes(routed)} in {experts}"
    parts = [
        layers,
        f"embedding {format_bytes(profile.embedding_bytes)}",
        "head tied to it" if profile.tied_head else f"head {format_bytes(profile.head_bytes)}",
    ]
    if profile.encoder:
        where = "left out" if EngineOptions.of(engine_args).is_text_only else "on every rank"
        parts.append(f"encoder of {profile.encoder} {format_bytes(profile.encoder_bytes)}, {where}")
    if profile.layer_table_bytes:
        parts.append(f"embeddings of each layer {format_bytes(profile.layer_table_bytes)}, on every rank")
    if profile.dropped_bytes:
        parts.append(f"{format_bytes(profile.dropped_bytes)} are stored and not loaded")
    scheme = "" if profile.scheme.bits == 16 else f", {profile.scheme}"
    return f"model: {profile.architecture}, {profile.dtype}{scheme}: {'; '.join(parts)}"


def describe_memory(planned: Planned) -> tuple[str, ...]:
    """Returns where each byte of a rank is, a line for stages that are alike."""
    plan, sizes = planned.plan, planned.sizes
    alike: dict[str, list[int]] = {}
    for stage, of_stage in enumerate(planned.budgets):
        first, end = plan.stage(stage)[0].first_layer, plan.stage(stage)[0].end_layer
        budget = of_stage.tightest(sizes, first, end)
        rank = next(rank for rank in plan.stage(stage) if rank.role == budget.role)
        layers = sizes.layers(first, end, budget.kernels)
        tables = rank.weight_bytes - layers - sizes.encoder_bytes
        packed = f" packed for {budget.kernels}" if layers != sizes.layers(first, end) else ""
        parts = [f"{rank.num_layers} layer{'s' * (rank.num_layers > 1)} {format_bytes(layers)}{packed}"]
        if tables:
            names = " and ".join(sizes.table_names(stage, plan.pipeline_parallel_size))
            copies = f"{CPU_TABLE_COPIES} copies of " if rank.device is Device.CPU else ""
            parts.append(f"{copies}{names} {format_bytes(tables)}")
        if sizes.encoder_bytes:
            parts.append(f"encoder {format_bytes(sizes.encoder_bytes)}")
        parts.append(f"KV cache {format_bytes(rank.kv_cache_bytes)}")
        taken = rank.weight_bytes + rank.kv_cache_bytes
        of = (
            f"{format_bytes(taken)}, of a memory that is not known"
            if budget.budget is None
            else f"{format_bytes(taken)} of {format_bytes(budget.budget)}"
        )
        if budget.beside:
            of += f", beside {format_bytes(budget.beside)} for {BESIDE_ON_GPUS}"
        alike.setdefault(f"role {rank.role}: {' + '.join(parts)} = {of}", []).append(stage)
    lines = [f"memory of a rank of {_stages(stages)}, {words}" for words, stages in alike.items()]
    if planned.remote is not None:
        remote = sorted({(r.role, r.weight_bytes) for r in plan.ranks if r.feed_forward is not None})
        beside = format_bytes(beside_weights_bytes(planned.remote, plan.engine))
        whole = " in whole experts" if planned.remote.by_experts else ""
        lines += [
            f"memory of a feed-forward rank of role {role}: {format_bytes(size)} of weights{whole}, and up "
            f"to {beside} beside them: its process, and one layer while it is packed or the longest batch"
            for role, size in remote
        ]
    return tuple(lines)


def _stages(numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"stage {numbers[0]}"
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"stages {numbers[0]} to {numbers[-1]}"
    return f"stages {', '.join(map(str, numbers))}"


def kv_blocks(planned: Planned) -> int:
    """Returns the blocks of KV cache that every rank has."""
    kv = planned.sizes.kv
    found = [
        rank.kv_cache_bytes // size
        for rank in planned.plan.stage_ranks  # feed-forward ranks have no KV cache
        if (size := kv.block_bytes(rank.first_layer, rank.end_layer))
    ]
    return min(found, default=0)


def sequences_at_once(planned: Planned) -> float:
    """Returns how many sequences of the longest length the KV cache holds."""
    return max(kv_blocks(planned) - 1, 0) / max(planned.sizes.kv.sequence_blocks, 1)


def describe_capacity(planned: Planned) -> str:
    """Returns how much the KV cache holds."""
    plan, kv, blocks = planned.plan, planned.sizes.kv, kv_blocks(planned)
    one = sum(
        kv.block_bytes(rank.first_layer, rank.end_layer) * kv.sequence_blocks for rank in plan.stage_ranks
    )
    held = f"{blocks} blocks of {kv.block_tokens} tokens on every rank, about {kv.tokens(blocks)} in all"
    longest = f"{sequences_at_once(planned):.1f} sequences of {kv.sequence_tokens} tokens"
    return (
        f"KV cache: {held}; {longest} at once, "
        f"each {format_bytes(one)} over all ranks; a step has {plan.engine.max_num_seqs} requests at most"
    )


def describe_bounds(planned: Planned) -> tuple[str, ...]:
    """Returns what bounds the number of requests and their length."""
    plan, engine = planned.plan, planned.plan.engine
    if planned.limiting_rank is None:
        who = "a memory that is not known of all ranks"
    else:
        rank = plan.ranks[planned.limiting_rank]
        who = f"the memory of rank {rank.rank} (role {rank.role})"
    most, blocks = engine.max_num_seqs, kv_blocks(planned)
    full = int(sequences_at_once(planned))
    short = min(_SHORT, engine.max_model_len)
    shorter = max(blocks - 1, 0) // max(_sequence_blocks(planned, short), 1)
    if full >= most:
        requests = f"{most}, as many as a step has; {who} holds all of them at full length"
    elif shorter >= most:
        requests = f"{most}, as many as a step has; of full length {full}, by {who}"
    else:
        requests = f"{shorter} of {short} tokens, {full} of full length, by {who}; a step has {most}"
    asked = planned.request.spec.engine.max_model_len
    made_for = planned.sizes.profile.max_position_embeddings
    length = f"{engine.max_model_len} tokens, {'by default' if asked is None else 'as asked for'}"
    if made_for <= engine.max_model_len:
        return f"requests: {requests}", f"length: {length}, and the model was made for no more"
    held = _longest(planned)
    fits = "" if held is None else f"; {who} holds one of {held}"
    return f"requests: {requests}", f"length: {length}; the model was made for {made_for}{fits}"


def _sequence_blocks(planned: Planned, tokens: int) -> int:
    """Returns the blocks that one sequence of so many tokens takes."""
    plan, sizes = planned.plan, planned.sizes
    engine = replace(plan.engine, max_model_len=tokens)
    kv = build_kv_cache(sizes.profile, engine, tensor=sizes.tensor, batches=plan.batches_at_once)
    return kv.sequence_blocks


def _longest(planned: Planned) -> int | None:
    """Returns the tokens of the longest sequence that memory holds beside these layers; None if unknown."""
    stages = [planned.plan.stage(stage)[0] for stage in range(planned.plan.pipeline_parallel_size)]
    layers = [rank.num_layers for rank in stages]
    found = block_capacities(layers, planned.budgets, planned.sizes)
    capacities = [blocks for blocks in found if blocks is not None]
    if len(capacities) < len(stages):
        return None
    lengths = range(1, planned.sizes.profile.max_position_embeddings + 1)
    blocks = min(capacities) - 1  # vLLM keeps one for itself
    return bisect_right(lengths, blocks, key=lambda tokens: _sequence_blocks(planned, tokens))


def describe_speed(planned: Planned) -> tuple[str, ...]:
    """Returns predicted steps and first tokens by load, and what the rates were taken from."""
    plan, sizes, rates = planned.plan, planned.sizes, planned.rates
    contexts = [context for context in CONTEXTS if context < plan.engine.max_model_len]
    lines = []
    elsewhere = waits_elsewhere(plan, rates, planned.remote)
    for context in contexts or [max(plan.engine.max_model_len // 2, 1)]:
        steps = [
            f"{requests}: {forecast(plan, sizes, rates, Load(requests=requests, context=context), elsewhere)}"
            for requests in REQUESTS
            if requests <= plan.engine.max_num_seqs
        ]
        first = forecast_first_token(plan, sizes, rates, context, elsewhere)
        lines.append(
            f"predicted step by requests of {context} tokens: {', '.join(steps)}; first token: {first}"
        )
    found = sorted(
        {
            (rank.role, " (feed-forward)" if rank.feed_forward else "", rates[rank.rank].source)
            for rank in plan.ranks
        }
    )
    words = ", ".join(f"role {role}{kind}: {source}" for role, kind, source in found)
    return (*lines, f"rates: {words}")
