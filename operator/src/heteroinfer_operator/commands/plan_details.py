"""Describes the details of a plan for `heteroinfer plan --explain`, such as bytes and rates. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device
from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.aligned_rows import align_rows
from heteroinfer_operator.commands.plan_figures import (
    Figures,
    describe_requests,
    longest_request,
    memory_limit,
    typical_context,
)
from heteroinfer_operator.commands.plan_pod_counts import describe_pod_counts
from heteroinfer_operator.commands.plan_words import INDENT, count, duration, spread
from heteroinfer_operator.planning.concurrency import num_kv_blocks
from heteroinfer_operator.planning.feed_forward import FeedForwardPart, peak_extra_bytes, rank_weight_bytes
from heteroinfer_operator.planning.first_token import build_feed_forward_wait
from heteroinfer_operator.planning.gpu_floor import BESIDE_ON_GPUS, BESIDE_WITHOUT_GRAPHS
from heteroinfer_operator.planning.memory import CPU_TABLE_COPIES
from heteroinfer_operator.planning.planner import Planned
from heteroinfer_operator.planning.predicted_plan import describe_networks
from heteroinfer_operator.planning.prediction import (
    StepLoad,
    forecast,
    forecast_first_token,
    overhead_s,
    predict,
)
from heteroinfer_operator.planning.ring_choice import describe_long_prompts
from heteroinfer_operator.vllm_support.engine_options import EngineOptions

_REQUESTS = (1, 8, 64)
"""Numbers of concurrent requests for which the table of predicted steps has a row."""
_LONG_CONTEXT = 16384
"""If engine.maxModelLen is larger, the table of predicted steps has a second row for requests of this many
tokens."""


def describe_details(planned: Planned, figures: Figures, not_measured: str) -> list[str]:
    """Returns the details of a plan as lines under headings.

    Args:
        not_measured: why the plan uses default rates, or "".
    """
    engine_args = planned.plan.engine.extra_args
    rates = [*_describe_rates(planned), *([f"not measured: {not_measured}"] if not_measured else [])]
    sections = {
        "MODEL": align_rows(describe_model(planned.request.profile, engine_args)),
        "MEMORY OF EACH RANK": describe_memory(planned),
        "KV CACHE": align_rows(describe_kv_cache(planned, figures)),
        "PREDICTED TIMES": align_rows(describe_times(planned)),
        "RATES": rates,
        "SETTINGS OF ALL RANKS": align_rows(_describe_settings(planned)),
    }
    return [line for heading, lines in sections.items() for line in section(heading, lines)]


def section(heading: str, lines: Iterable[str]) -> list[str]:
    """Returns lines under a heading, after an empty line."""
    return ["", heading, *(f"{INDENT}{line}" for line in lines)]


def describe_model(profile: ModelProfile, engine_args: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Returns the parts of a model with their sizes, as the group serves it with these arguments."""
    scheme = "" if profile.scheme.bits == 16 else f", {profile.scheme}"
    kinds = Counter(kind.attention.value.lower() for kind in profile.layers)
    attention = ", ".join(f"{number} {name}" for name, number in kinds.items())
    rows = [
        ("architecture", f"{profile.architecture}, {profile.dtype}{scheme}"),
        ("layers", f"{format_bytes(sum(profile.layer_bytes))}, by attention: {attention}"),
    ]
    if profile.experts:
        expert_bytes = sum(kind.routed_bytes for kind in profile.layers)
        num_read = max(kind.experts_per_token for kind in profile.layers)
        per_layer = f"{profile.experts} per layer; a token reads {num_read}"
        rows.append(("experts", f"{format_bytes(expert_bytes)} of the layers, {per_layer}"))
    rows.append(("embedding", format_bytes(profile.embedding_bytes)))
    rows.append(("head", "tied to the embedding" if profile.tied_head else format_bytes(profile.head_bytes)))
    if profile.encoder:
        ranks_with_encoder = "not loaded" if EngineOptions.of(engine_args).is_text_only else "on every rank"
        rows.append(
            ("encoder", f"{format_bytes(profile.encoder_bytes)} for {profile.encoder}, {ranks_with_encoder}")
        )
    if profile.layer_table_bytes:
        size = format_bytes(profile.layer_table_bytes)
        rows.append(("embeddings per layer", f"{size}, on every rank"))
    if profile.dropped_bytes:
        rows.append(("not loaded", f"{format_bytes(profile.dropped_bytes)} of the checkpoint"))
    return rows


def describe_memory(planned: Planned) -> list[str]:
    """Returns a line about the memory of each stage, then lines about the feed-forward ranks.

    Stages with the same text share a line.
    """
    stages_by_text: dict[str, list[int]] = {}
    for stage in range(planned.plan.pipeline_parallel_size):
        stages_by_text.setdefault(_describe_stage_memory(planned, stage), []).append(stage)
    lines = [f"{_name_stages(stages)}, {text}" for text, stages in stages_by_text.items()]
    if planned.remote is not None:
        lines += _describe_feed_forward_memory(planned, planned.remote)
    return lines


def _describe_feed_forward_memory(planned: Planned, remote: FeedForwardPart) -> list[str]:
    """Describes for each role the memory of its largest feed-forward rank."""
    engine = planned.plan.engine
    by_experts = " (whole experts)" if remote.by_experts else ""
    lines = []
    for rank_set, rank_indices in remote.numbered_sets:
        weight_bytes = max(rank_weight_bytes(remote, engine, rank_index) for rank_index in rank_indices)
        extra_bytes = peak_extra_bytes(remote, engine, rank_indices)
        lines.append(
            f"feed-forward rank of role {rank_set.role.name}: {format_bytes(weight_bytes)} of weights"
            f"{by_experts}, and up to {format_bytes(extra_bytes)} more for the process and for the "
            "larger of two needs: packing a layer, or computing the largest batch"
        )
    return lines


def _describe_stage_memory(planned: Planned, stage: int) -> str:
    """Describes, as a sum, the memory of the stage's rank that has the least memory left.

    An example: `role gpu: 12 layers 6.1 GiB + KV cache 2.0 GiB = 8.1 GiB of 20.5 GiB`.
    """
    plan, sizes = planned.plan, planned.sizes
    ranks = plan.stage(stage)
    first, end = ranks[0].first_layer, ranks[0].end_layer
    budget = planned.budgets[stage].tightest(sizes, first, end)
    rank = next(rank for rank in ranks if rank.role == budget.role)
    layer_bytes = sizes.layer_weight_bytes(first, end, budget.device)
    stored_bytes = sizes.layer_weight_bytes(first, end)
    table_bytes = rank.weight_bytes - layer_bytes - sizes.encoder_bytes  # embedding, head and others
    packed = " packed" if layer_bytes != stored_bytes else ""  # CPU kernels store weights in another form
    parts = [f"{count(rank.num_layers, 'layer')} {format_bytes(layer_bytes)}{packed}"]
    if table_bytes:
        names = " and ".join(sizes.table_names(stage, plan.pipeline_parallel_size))
        copies = f"{CPU_TABLE_COPIES} copies of " if rank.device is Device.CPU else ""
        parts.append(f"{copies}{names} {format_bytes(table_bytes)}")
    if sizes.encoder_bytes:
        parts.append(f"encoder {format_bytes(sizes.encoder_bytes)}")
    parts.append(f"KV cache {format_bytes(rank.kv_cache_bytes)}")
    if budget.ring_bytes:
        parts.append(f"ring for experts {format_bytes(budget.ring_bytes)}")
    usable = "an unknown memory" if budget.budget is None else format_bytes(budget.budget)
    taken = format_bytes(rank.weight_bytes + rank.kv_cache_bytes + budget.ring_bytes)
    line = f"role {rank.role}: {' + '.join(parts)} = {taken} of {usable}"
    if budget.reserved_bytes:
        beside = BESIDE_ON_GPUS if sizes.gpu_floor.graphs else BESIDE_WITHOUT_GRAPHS
        line += f". Another {format_bytes(budget.reserved_bytes)} is for {beside}"
    return line


def _name_stages(numbers: Sequence[int]) -> str:
    """Names stages, such as "stages 0 to 3" or "stages 0, 2"."""
    if len(numbers) == 1:
        return f"stage {numbers[0]}"
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"stages {numbers[0]} to {numbers[-1]}"
    return f"stages {', '.join(map(str, numbers))}"


def describe_kv_cache(planned: Planned, figures: Figures) -> list[tuple[str, str]]:
    """Returns rows about the size of the KV cache, and about the number and length of requests."""
    plan, kv, blocks = planned.plan, planned.sizes.kv, num_kv_blocks(planned)
    request_bytes = sum(
        kv.block_bytes(rank.first_layer, rank.end_layer) * kv.sequence_blocks for rank in plan.stage_ranks
    )
    tokens = count(kv.sequence_tokens, "token")
    one_request = f"One request of {tokens} takes {format_bytes(request_bytes)} over all ranks"
    size = f"{count(blocks, 'block')} of {count(kv.block_tokens, 'token')} on every rank"
    return [
        ("size", f"{size}, about {count(kv.tokens(blocks), 'token')}"),
        ("requests", f"{describe_requests(planned, figures)}. {one_request}"),
        ("length", _describe_length(planned)),
    ]


def _describe_length(planned: Planned) -> str:
    """Describes the longest request, and the limits of the model and of the memory."""
    engine, model_limit = planned.plan.engine, planned.sizes.profile.max_position_embeddings
    requested = planned.request.spec.engine.max_model_len
    field = "the default of engine.maxModelLen" if requested is None else "engine.maxModelLen"
    length = f"{count(engine.max_model_len, 'token')} ({field})"
    if model_limit <= engine.max_model_len:
        return f"{length}, the most that the model supports"
    longest = longest_request(planned)
    memory_allows = "" if longest is None else f"; {memory_limit(planned)} allows {longest:,}"
    return f"{length}. The model supports {model_limit:,}{memory_allows}"


def describe_times(planned: Planned) -> list[tuple[str, str]]:
    """Returns rows with predicted times of steps and first tokens, for several loads.

    A load is a number of concurrent requests and their length. Loads that the plan does not allow are left
    out.
    """
    plan, sizes, rates = planned.plan, planned.sizes, planned.rates
    overhead = duration(overhead_s(plan))
    rows = [("step", f"{spread(predict(plan, rates))} for one request, including {overhead} of scheduling")]
    feed_forward_wait = build_feed_forward_wait(plan, sizes, rates, planned.remote)
    contexts = [typical_context(plan.engine.max_model_len)]
    if plan.engine.max_model_len > _LONG_CONTEXT:
        contexts.append(_LONG_CONTEXT)
    allowed_requests = [requests for requests in _REQUESTS if requests <= plan.engine.max_num_seqs]
    for context in contexts:
        for requests in allowed_requests:
            load = StepLoad(requests=requests, context=context)
            step = forecast(plan, sizes, rates, load, feed_forward_wait)
            rows.append(("", f"{spread(step)} for {count(requests, 'request')} of {context:,} tokens"))
    for context in contexts:
        first = forecast_first_token(plan, sizes, rates, context, feed_forward_wait)
        label = "first token" if context == contexts[0] else ""
        rows.append((label, f"{spread(first)} after a prompt of {count(context, 'token')}"))
    if long_prompts := describe_long_prompts(plan, sizes, rates, planned.remote):
        rows.append(("long prompts", long_prompts))
    return [*rows, *(("CPU nodes", text) for text in describe_pod_counts(planned))]


def _describe_rates(planned: Planned) -> list[str]:
    """Returns the source of the rates of each role and each network, a line each."""
    rate_lines = sorted(
        {
            (rank.role, ", feed-forward" if rank.feed_forward else "", planned.rates[rank.rank].source)
            for rank in planned.plan.ranks
        }
    )
    networks = describe_networks(planned.plan, planned.rates)
    return [
        *(f"role {role}{kind}: {source}" for role, kind, source in rate_lines),
        *(f"network to role {role}: {source}" for role, source in sorted(networks.items())),
    ]


def _describe_settings(planned: Planned) -> list[tuple[str, str]]:
    """Returns rows with the settings of all ranks.

    Leaves out the settings of GPU ranks in a plan without GPUs, and of CPU ranks in a plan without CPUs.
    """
    plan, engine = planned.plan, planned.plan.engine
    per_stage = "" if plan.tensor_parallel_size == 1 else f" of {count(plan.tensor_parallel_size, 'rank')}"
    stages = f"{count(plan.pipeline_parallel_size, 'stage')}{per_stage}"
    tokens = count(engine.max_num_batched_tokens, "token")
    rows = [
        ("plan", f"{plan.hash}, mode {plan.mode}, {stages}"),
        ("model", f"{engine.served_name}, {engine.dtype}, up to {count(engine.max_model_len, 'token')}"),
        (
            "step",
            f"at most {count(engine.max_num_seqs, 'request')} and {tokens}",
        ),
        ("blocks", count(engine.block_size, "token")),
        ("GPU ranks", "eager, without CUDA graphs" if engine.eager_gpu else "compiled, with CUDA graphs"),
        ("CPU ranks", "eager" if engine.eager_cpu else "compiled"),
        ("batches in flight", str(engine.batches_in_flight)),
        ("seed", str(engine.seed)),
    ]
    devices = {rank.device for rank in plan.ranks}
    hidden_rows = {f"{device} ranks" for device in Device if device not in devices}
    if engine.extra_args:
        rows.append(("arguments", " ".join(engine.extra_args)))
    return [row for row in rows if row[0] not in hidden_rows]
