"""Chooses the number of layers of each stage. Pure."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Final, TypeAlias

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device
from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.errors import PlanError, PlanReason
from heteroinfer_operator.planning.memory import RankBudget, Sizes, StageBudget
from heteroinfer_operator.planning.topology import Topology

_CPU_LAYER_COST = 2**40
"""Cost of a layer on a CPU. This cost exceeds any sum of squares of layers, so a split with more CPU layers
is never cheaper."""
_OR_SHORTER: Final = ", or lower engine.maxModelLen"
"""End of a message if the weights fit, but not together with the KV cache."""
_PACKED_COPY: Final = "the copy of a layer while it is packed"
"""Part of a message: the reason why a layer needs more memory while it loads than while it serves."""


def choose_layers(
    spec: HeteroInferenceSpec,
    topology: Topology,
    budgets: Sequence[StageBudget],
    sizes: Sizes,
) -> tuple[int, ...]:
    """Returns the number of layers of each stage: the user's numbers, or a split that fits the memory.

    Raises:
        PlanError: the layers do not fit.
    """
    layers = _user_layers(topology)
    if layers is None:
        return split_by_memory(budgets, sizes)
    _check_user_layers(layers, budgets, sizes)
    return layers


def _user_layers(topology: Topology) -> tuple[int, ...] | None:
    """Returns the user's number of layers for each stage, or None if the roles set none.

    `layers` of a role has one entry for each of its stages, in order of stages.
    """
    layers: list[int] = []
    stages_so_far: dict[str, int] = {}
    for stage in topology.stages:
        role = stage[0].placed.role
        if role.layers is None:
            return None
        index_in_role = stages_so_far.get(role.name, 0)
        layers.append(role.layers[index_in_role])
        stages_so_far[role.name] = index_in_role + 1
    return tuple(layers)


def _check_user_layers(layers: Sequence[int], budgets: Sequence[StageBudget], sizes: Sizes) -> None:
    """Raises PlanError if the user's layers do not add up, do not fit, or break a rule of vLLM."""
    listed_layers, num_layers = sum(layers), sizes.profile.num_layers
    least_in_first, least_in_last = sizes.profile.first_stage_layers, sizes.profile.last_stage_layers
    if layers[0] < least_in_first:
        raise PlanError(
            f"roles: the first stage must have at least {least_in_first} layers (got {layers[0]}), because "
            "the model adds the encoder's output in each of these layers. Give the first stage more layers",
            reason=PlanReason.LAYERS_MISMATCH,
        )
    if len(layers) > 1 and layers[-1] < least_in_last:
        raise PlanError(
            f"roles: the last stage must have at least {least_in_last} layers (got {layers[-1]}), because "
            f"the model's last {least_in_last} layers share keys and values, so one rank must hold all these "
            "layers. Give the last stage more layers",
            reason=PlanReason.LAYERS_MISMATCH,
        )
    if listed_layers != num_layers:
        change = (
            f"Add {_format_layers(num_layers - listed_layers)}"
            if listed_layers < num_layers
            else f"Remove {_format_layers(listed_layers - num_layers)}"
        )
        raise PlanError(
            f"roles: the entries of layers must add up to the model's {num_layers} layers (got "
            f"{listed_layers}). {change}",
            reason=PlanReason.LAYERS_MISMATCH,
        )
    stage_ends = accumulate(layers)
    for index, (stage, count, end) in enumerate(zip(budgets, layers, stage_ends, strict=True)):
        _check_user_stage(index, stage, (end - count, end), sizes)


def _check_user_stage(index: int, stage: StageBudget, layers: tuple[int, int], sizes: Sizes) -> None:
    """Raises PlanError if a stage has no layer with a KV cache, or if its layers do not fit.

    Args:
        index: index of the stage.
        layers: index of the first layer, and index after the last layer.
    """
    first, end = layers
    rank = stage.neediest(sizes, first, end)
    if not sizes.kv.block_bytes(first, end):
        # vLLM divides by the size of a block, which would be 0
        # (vllm/v1/core/kv_cache_utils.py::get_kv_cache_config_from_groups@v0.32.0).
        raise PlanError(
            f"stage {index} (role {rank.role}): at least one layer must have a KV cache or a state (got "
            f"layers {first} to {end - 1}), because vLLM can run no other stage. Change roles[].layers",
            reason=PlanReason.LAYERS_MISMATCH,
        )
    missing_bytes = rank.missing_bytes(sizes, first, end)
    if missing_bytes is None or missing_bytes <= 0:
        return
    rank_bytes = rank.budget or 0
    # A shorter maxModelLen needs less memory to serve, but not less to load.
    if sizes.loading_exceeds_serving(first, end, rank.device):
        besides_layers = _PACKED_COPY
        fix = "Move layers to another stage or give the role more memory"
    else:
        besides_layers = _describe_cache(sizes)
        fix = f"Move layers to another stage, give the role more memory{_OR_SHORTER}"
    raise PlanError(
        f"stage {index} (role {rank.role}): {format_bytes(missing_bytes)} of memory is missing. "
        f"{_format_layers(end - first)} need {format_bytes(rank_bytes + missing_bytes)} with "
        f"{besides_layers}, and a rank has {format_bytes(rank_bytes)}. {fix}",
        reason=PlanReason.INSUFFICIENT_MEMORY,
    )


def _format_layers(count: int) -> str:
    """Returns a number of layers as text, such as "1 layer"."""
    return f"{count} layer{'' if count == 1 else 's'}"


def _describe_cache(sizes: Sizes) -> str:
    """Describes the KV cache that each rank must hold."""
    return f"KV cache for one request of {sizes.kv.sequence_tokens:,} tokens"


def split_by_memory(budgets: Sequence[StageBudget], sizes: Sizes) -> tuple[int, ...]:
    """Returns the number of layers of each stage.

    CPU stages get as few layers as possible, because CPU ranks add capacity and not speed. Apart from that,
    the split is as even as possible. If the memory of all stages is unknown, the split is even over CPUs and
    GPUs. Each stage also holds the KV cache of one full-length request.

    Raises:
        PlanError: the model has fewer layers than stages, or does not fit.
    """
    num_layers, min_layers = sizes.profile.num_layers, _min_layers(sizes.profile, len(budgets))
    layers_with_cache = [layer for layer in range(num_layers) if sizes.kv.block_bytes(layer, layer + 1)]
    _check_enough_layers(num_layers, min_layers, len(layers_with_cache))
    prefer_gpu = any(stage.is_known for stage in budgets)
    cheapest: _CheapestSplits = {0: (0, ())}
    for index, stage in enumerate(budgets):
        layer_cost = _CPU_LAYER_COST if prefer_gpu and stage.device is Device.CPU else 0
        cheapest = _append_stage(cheapest, stage, sizes, layer_cost, min_layers[index], layers_with_cache)
    if num_layers not in cheapest:
        raise _build_too_large_error(budgets, sizes)
    _, split = cheapest[num_layers]
    return split


def _check_enough_layers(num_layers: int, min_layers: Sequence[int], num_with_cache: int) -> None:
    """Raises PlanError if the model has too few layers for its stages.

    Args:
        min_layers: fewest layers of each stage.
        num_with_cache: number of layers with a KV cache or a state.
    """
    num_stages, fix = len(min_layers), "Lower pods or ranksPerPod, or set parallelism.tensor"
    if num_layers < sum(min_layers):
        numbers = ", ".join(map(str, min_layers))
        reason = "each stage needs a layer" if max(min_layers) == 1 else f"the stages need {numbers} layers"
        raise PlanError(
            f"roles: {num_stages} stages are too many for the model's {_format_layers(num_layers)}: "
            f"{reason}. {fix}",
            reason=PlanReason.TOO_MANY_STAGES,
        )
    if num_with_cache < num_stages:
        raise PlanError(
            f"roles: {num_stages} stages are too many for the model's {_format_layers(num_with_cache)} with "
            f"a KV cache or a state: each stage needs such a layer. {fix}",
            reason=PlanReason.TOO_MANY_STAGES,
        )


_CheapestSplits: TypeAlias = dict[int, tuple[int, tuple[int, ...]]]
"""The cheapest split of the model's first n layers over some stages, by n: its cost, and each stage's number
of layers. The cost contains the squares of the numbers, so an even split is cheaper."""


def _append_stage(
    cheapest: _CheapestSplits,
    stage: StageBudget,
    sizes: Sizes,
    layer_cost: int,
    min_layers: int,
    layers_with_cache: Sequence[int],
) -> _CheapestSplits:
    """Returns the cheapest splits over one more stage, which has at least one layer with a cache.

    Args:
        cheapest: cheapest splits over the stages before this stage.
        layer_cost: cost of each layer of this stage, besides the square of their number.
        min_layers: fewest layers of this stage.
        layers_with_cache: indices of the layers with a KV cache or a state, ascending.
    """
    next_cheapest: _CheapestSplits = {}
    for first, (cost, split) in cheapest.items():
        first_with_cache = next((layer for layer in layers_with_cache if layer >= first), None)
        if first_with_cache is None:
            continue
        fewest = max(min_layers, first_with_cache + 1 - first)
        for count in range(fewest, _stage_capacity(stage, sizes, first) + 1):
            total_cost, end = cost + layer_cost * count + count * count, first + count
            known = next_cheapest.get(end)
            # Among splits of equal cost, earlier stages get more layers, because the last stage also has the
            # head.
            is_better = (
                known is None or total_cost < known[0] or (total_cost == known[0] and split > known[1])
            )
            if is_better:
                next_cheapest[end] = (total_cost, (*split, count))
    return next_cheapest


def _min_layers(profile: ModelProfile, num_stages: int) -> tuple[int, ...]:
    """Returns the fewest layers that each stage may have.

    Some models need more than one layer in the first stage (if the model adds the output of an encoder in its
    first layers) or in the last stage (if its last layers share keys and values).
    """
    least = [1] * num_stages
    least[0] = profile.first_stage_layers
    if num_stages > 1:
        least[-1] = profile.last_stage_layers
    return tuple(least)


_CostFunction: TypeAlias = Callable[[Sizes, int, int, Device], int]
"""Returns the bytes that layers first..end-1 need on a rank with this device: a method of Sizes."""
_RAISE_MEMORY: Final = MappingProxyType(
    {
        Device.CPU: "Raise the role's resources.limits.memory",
        Device.GPU: "Raise the role's deviceMemory, or give the role larger GPUs",
    }
)


_MEMORY_FIELD: Final = MappingProxyType({Device.CPU: "resources.limits.memory", Device.GPU: "deviceMemory"})


def _stage_capacity(
    stage: StageBudget, sizes: Sizes, first: int, cost: _CostFunction = Sizes.needed_bytes
) -> int:
    """Returns the number of layers, from `first` on, that every rank of the stage can hold."""
    return min(_rank_capacity(rank, sizes, first, cost) for rank in stage.ranks)


def _rank_capacity(rank: RankBudget, sizes: Sizes, first: int, cost: _CostFunction) -> int:
    """Returns the number of layers, from `first` on, that a rank can hold; all if its memory is unknown."""
    max_layers = sizes.profile.num_layers - first
    free_bytes = rank.free_bytes
    if free_bytes is None:
        return max_layers
    # The bytes grow with the number of layers, so a binary search finds the largest number that fits.
    counts = range(1, max_layers + 1)
    return bisect_right(counts, free_bytes, key=lambda count: cost(sizes, first, first + count, rank.device))


def _build_shared_layers_error(budgets: Sequence[StageBudget], sizes: Sizes) -> PlanError | None:
    """Returns the error of a last stage that is too small for layers with shared keys and values, or None."""
    if len(budgets) == 1 or not sizes.profile.has_shared_keys:
        return None
    num_shared, num_layers = sizes.profile.last_stage_layers, sizes.profile.num_layers
    last_rank = budgets[-1].neediest(sizes, num_layers - num_shared, num_layers)
    missing_bytes = last_rank.missing_bytes(sizes, num_layers - num_shared, num_layers)
    if missing_bytes is None or missing_bytes <= 0:
        return None
    rank_bytes = last_rank.budget or 0
    return PlanError(
        f"stage {len(budgets) - 1} (role {last_rank.role}): {format_bytes(missing_bytes)} of memory is "
        f"missing. The last {num_shared} layers share keys and values, so one rank must hold these "
        f"layers. They need {format_bytes(rank_bytes + missing_bytes)}. A rank has "
        f"{format_bytes(rank_bytes)}. {_RAISE_MEMORY[last_rank.device]}",
        reason=PlanReason.INSUFFICIENT_MEMORY,
    )


def _build_too_large_error(budgets: Sequence[StageBudget], sizes: Sizes) -> PlanError:
    """Returns the error of a model that does not fit, with the number of layers that each stage holds.

    If a single stage cannot hold even its fewest layers, the error names only that stage.
    """
    shared_layers_error = _build_shared_layers_error(budgets, sizes)
    if shared_layers_error is not None:
        return shared_layers_error
    min_layers = _min_layers(sizes.profile, len(budgets))
    held_layers = [0] * len(budgets)  # number of layers that each stage can hold
    next_layer = 0
    for index, stage in enumerate(budgets):
        # The stages before this stage could hold all layers before `next_layer`. But they must leave the
        # fewest layers that this stage and the stages after it may have.
        first = min(next_layer, sizes.profile.num_layers - sum(min_layers[index:]))
        if index:
            held_layers[index - 1] -= next_layer - first
        held_layers[index] = _stage_capacity(stage, sizes, first)
        if held_layers[index] < min_layers[index]:
            return _build_stage_too_small_error(stage, index, (first, first + min_layers[index]), sizes)
        next_layer = first + held_layers[index]
    return _build_missing_layers_error(budgets, sizes, held_layers)


def _build_missing_layers_error(
    budgets: Sequence[StageBudget], sizes: Sizes, held_layers: Sequence[int]
) -> PlanError:
    """Returns the error of a model with more layers than all stages together can hold.

    Args:
        held_layers: number of layers that each stage can hold.
    """
    by_stage = [
        f"{count} in stage {index} (role {stage.neediest(sizes, 0, 1).role})"
        for index, (count, stage) in enumerate(zip(held_layers, budgets, strict=True))
    ]
    num_held = sum(held_layers)
    num_missing = sizes.profile.num_layers - num_held
    if num_missing <= 0:  # enough memory in all, but each stage also needs a layer with a KV cache or a state
        return PlanError(
            f"roles: no split of the model's {_format_layers(sizes.profile.num_layers)} over "
            f"{len(budgets)} stages fits: each stage needs a layer with a KV cache or a state. The stages "
            f"hold at most {', '.join(by_stage)}. Lower pods or ranksPerPod, or raise "
            f"{_memory_fields(budgets, sizes)}",
            reason=PlanReason.INSUFFICIENT_MEMORY,
        )
    # The bytes of all ranks of a stage, on the kind of device on which they need the most.
    missing_bytes = sizes.tensor * max(
        sizes.needed_bytes(num_held, sizes.profile.num_layers, rank.device)
        for stage in budgets
        for rank in stage.ranks
    )
    remedies = f"Add pods, raise {_memory_fields(budgets, sizes)}{_quantize_advice(sizes)}"
    shorter = _OR_SHORTER if _fits_without_cache(budgets, sizes) else ""
    return PlanError(
        f"roles: memory for {num_missing} of the model's {sizes.profile.num_layers} layers is missing "
        f"({format_bytes(missing_bytes)}). With {_describe_cache(sizes)}, {num_held} layers fit: "
        f"{', '.join(by_stage)}. {remedies}{shorter}",
        reason=PlanReason.INSUFFICIENT_MEMORY,
    )


def _build_stage_too_small_error(
    stage: StageBudget, index: int, layers: tuple[int, int], sizes: Sizes
) -> PlanError:
    """Returns the error of a stage that cannot hold its minimum number of layers.

    Args:
        index: index of the stage.
        layers: index of the first layer, and index after the last layer.
    """
    rank, count = stage.neediest(sizes, *layers), layers[1] - layers[0]
    rank_bytes, span = rank.budget or 0, (*layers, rank.device)  # `span`: arguments of methods of Sizes
    needed_bytes = sizes.needed_bytes(*span) + rank.table_bytes
    # A shorter maxModelLen needs less memory to serve, but not less to load.
    fits_while_loading = sizes.loading_bytes(*span) + rank.table_bytes <= rank_bytes
    or_shorter = _OR_SHORTER if fits_while_loading else ""
    besides_layers = _PACKED_COPY if sizes.loading_exceeds_serving(*span) else _describe_cache(sizes)
    needs = "one layer, which needs" if count == 1 else f"{count} layers, which need"
    return PlanError(
        f"stage {index} (role {rank.role}): {format_bytes(needed_bytes - rank_bytes)} of memory is missing. "
        f"The stage must have at least {needs} {format_bytes(needed_bytes)}, including {besides_layers} "
        f"and the embedding or head. A rank has {format_bytes(rank_bytes)}. "
        f"{_RAISE_MEMORY[rank.device]}{or_shorter}",
        reason=PlanReason.INSUFFICIENT_MEMORY,
    )


def _memory_fields(budgets: Sequence[StageBudget], sizes: Sizes) -> str:
    """Returns the fields by which the user can raise the memory of the roles."""
    neediest = [stage.neediest(sizes, 0, 1) for stage in budgets]
    fields = {f"{_MEMORY_FIELD[rank.device]} of role {rank.role}": None for rank in neediest}
    return " or ".join(fields)


def _quantize_advice(sizes: Sizes) -> str:
    """Returns the advice to use fewer bits, as the end of a sentence; "" for a quantized model."""
    return ", or use the model in fewer bits (FP8, AWQ)" if sizes.profile.scheme.bits == 16 else ""


def _fits_without_cache(budgets: Sequence[StageBudget], sizes: Sizes) -> bool:
    """Reports whether all layers would fit if the stages held no KV cache, but only loaded their layers."""
    next_layer = 0
    for stage in budgets:
        if next_layer < sizes.profile.num_layers:
            next_layer += _stage_capacity(stage, sizes, next_layer, Sizes.loading_bytes)
    return next_layer >= sizes.profile.num_layers
