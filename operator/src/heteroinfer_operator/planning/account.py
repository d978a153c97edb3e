"""A plan in words: where each byte is, what bounds requests and their length, how fast a load is. Pure."""

from collections import Counter
from typing import Final

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device
from heteroinfer_operator.planning.feed_forward import feed_forward_seconds
from heteroinfer_operator.planning.planner import Planned
from heteroinfer_operator.planning.prediction import Load, forecast, forecast_first_token
from heteroinfer_operator.quantity import format_bytes

REQUESTS: Final = (1, 8, 64)
CONTEXTS: Final = (1024, 16384)
"""Tokens that each request of a predicted step has already, where the longest sequence has so many."""


def describe_model(profile: ModelProfile) -> str:
    """Returns what a model is made of."""
    kinds = Counter(kind.attention.value for kind in profile.layers)
    attention = ", ".join(f"{count} {name}" for name, count in kinds.items())
    parts = [
        f"layers {format_bytes(sum(profile.layer_bytes))} ({attention})",
        f"embedding {format_bytes(profile.embedding_bytes)}",
        "head tied to it" if profile.tied_head else f"head {format_bytes(profile.head_bytes)}",
    ]
    if profile.experts:
        routed = sum(kind.routed_bytes for kind in profile.layers)
        token = max(kind.experts_per_token for kind in profile.layers)
        experts = f"{profile.experts} experts a layer, {token} of which a token reads"
        parts.append(f"{format_bytes(routed)} of them in {experts}")
    if profile.encoder:
        parts.append(f"encoder of {profile.encoder} {format_bytes(profile.encoder_bytes)}, on every rank")
    if profile.dropped_bytes:
        parts.append(f"{format_bytes(profile.dropped_bytes)} are stored and not loaded")
    scheme = "" if profile.scheme.bits == 16 else f", {profile.scheme}"
    return f"model: {profile.architecture}, {profile.dtype}{scheme}: {'; '.join(parts)}"


def describe_capacity(planned: Planned) -> str:
    """Returns how much the KV cache holds."""
    plan, kv = planned.plan, planned.sizes.kv
    ranks = plan.stage_ranks  # feed-forward ranks have no KV cache
    sizes = [kv.block_bytes(rank.first_layer, rank.end_layer) for rank in ranks]
    blocks = min(
        (rank.kv_cache_bytes // size for rank, size in zip(ranks, sizes, strict=True) if size),
        default=0,
    )
    longest = max(blocks - 1, 0) / max(kv.sequence_blocks, 1)
    one = sum(size * kv.sequence_blocks for size in sizes)
    held = f"{blocks} blocks of {kv.block_tokens} tokens on every rank, about {kv.tokens(blocks)} in all"
    return (
        f"KV cache: {held}; {longest:.1f} sequences of {kv.sequence_tokens} tokens at once, each "
        f"{format_bytes(one)} over all ranks; a step has {plan.engine.max_num_seqs} requests at most"
    )


def describe_speed(planned: Planned) -> tuple[str, ...]:
    """Returns predicted steps and first tokens by load, and what the rates were taken from."""
    plan, sizes, rates = planned.plan, planned.sizes, planned.rates
    contexts = [context for context in CONTEXTS if context < plan.engine.max_model_len]
    lines = []

    def elsewhere(load: Load) -> float:
        remote = planned.remote
        return 0.0 if remote is None else feed_forward_seconds(remote, plan.engine, rates[-1], load)

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


def describe_choices(planned: Planned) -> tuple[str, ...]:
    """Returns the next cheaper and the next faster choice, as far as the plan itself tells."""
    plan, kv = planned.plan, planned.sizes.kv
    lines = []
    spare: dict[str, int] = {}
    for rank in plan.stage_ranks:
        least = kv.block_bytes(rank.first_layer, rank.end_layer) * kv.least_blocks
        left = rank.kv_cache_bytes - least
        spare[rank.role] = min(spare.get(rank.role, left), left)
    if saved := {role: size for role, size in spare.items() if size > 0}:
        words = ", ".join(f"{format_bytes(size)} a rank of role {role}" for role, size in saved.items())
        lines.append(f"cheaper: with one longest sequence at a time it needs {words} less")
    on_cpus = [rank for rank in plan.ranks if rank.device is Device.CPU]
    if on_cpus and len(on_cpus) < len(plan.ranks):
        need = sum(rank.weight_bytes + rank.kv_cache_bytes for rank in on_cpus)
        layer_s = on_cpus[0].predicted_step_s / max(on_cpus[0].num_layers, 1)
        lines.append(
            f"faster: a layer that GPUs take over from role {on_cpus[0].role} saves {layer_s * 1e3:.2f} ms a "
            f"step; all that is on CPUs takes {format_bytes(need)}"
        )
    return tuple(lines)
