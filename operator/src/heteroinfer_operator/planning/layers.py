"""Layers to stages. Pure."""

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
from heteroinfer_operator.planning.packing import WeightKernels
from heteroinfer_operator.planning.topology import Topology

_CPU_LAYER_COST = 2**40
"""Above any sum of squares of layers, so that no split with more CPU layers is better."""
_SHORTER: Final = ", or lower engine.maxModelLen"
"""Said where it can help: KV cache is what is too large, and not the weights."""
_PACKED: Final = "what a layer takes while it is packed"
"""Said where that is more than KV cache."""


def choose_layers(
    spec: HeteroInferenceSpec,
    topology: Topology,
    budgets: Sequence[StageBudget],
    sizes: Sizes,
    min_tokens: int,
) -> tuple[int, ...]:
    """Returns layers by stage: the user's, or as memory allows; raises PlanError if they do not fit."""
    layers = _explicit_layers(topology)
    if layers is None:
        return split_by_memory(budgets, sizes, min_tokens)
    _check_explicit(layers, budgets, sizes, min_tokens)
    return layers


def _explicit_layers(topology: Topology) -> tuple[int, ...] | None:
    """Returns the user's layers by stage, or None if the roles have none."""
    result: list[int] = []
    used: dict[str, int] = {}
    for stage in topology.stages:
        role = stage[0].placed.role
        if role.layers is None:
            return None
        index = used.get(role.name, 0)
        result.append(role.layers[index])
        used[role.name] = index + 1
    return tuple(result)


def _check_explicit(
    layers: Sequence[int], budgets: Sequence[StageBudget], sizes: Sizes, min_tokens: int
) -> None:
    """Checks that the user's layers add up and fit.

    Raises:
        PlanError: they don't; the message says by how much.
    """
    have, want = sum(layers), sizes.profile.num_layers
    least = sizes.profile.first_stage_layers
    if layers[0] < least:
        raise PlanError(
            f"roles: the first stage has {layers[0]} layers, expected at least {least}: the model adds to "
            "that many what its encoder sees; give the first stage more",
            reason=PlanReason.LAYERS_MISMATCH,
        )
    least = sizes.profile.last_stage_layers
    if len(layers) > 1 and layers[-1] < least:
        raise PlanError(
            f"roles: the last stage has {layers[-1]} layers, expected at least {least}: they share keys and "
            "values, which are on one rank; give the last stage more",
            reason=PlanReason.LAYERS_MISMATCH,
        )
    if have != want:
        change = f"add {want - have}" if have < want else f"remove {have - want}"
        raise PlanError(
            f"roles: layers sum to {have}, the model has {want}: {change}", reason=PlanReason.LAYERS_MISMATCH
        )
    ends = list(accumulate(layers))
    for index, (stage, count, end) in enumerate(zip(budgets, layers, ends, strict=True)):
        rank = stage.neediest(sizes, end - count, end)
        if not sizes.kv.block_bytes(end - count, end):
            # vllm/v1/core/kv_cache_utils.py::get_kv_cache_config_from_groups@v0.32.0 divides by a block.
            raise PlanError(
                f"stage {index} (role {rank.role}): none of its layers {end - count}..{end - 1} keeps keys, "
                "values or a state, and vLLM cannot give a stage no KV cache; change layers of the roles so "
                "that each stage has such a layer",
                reason=PlanReason.LAYERS_MISMATCH,
            )
        missing = rank.missing_bytes(sizes, end - count, end)
        if missing is not None and missing > 0:
            have, span = rank.budget or 0, (end - count, end, rank.kernels)
            packs = sizes.loads_to_more(*span)
            raise PlanError(
                f"stage {index} (role {rank.role}): {count} layers need {format_bytes(have + missing)} "
                f"with {_PACKED if packs else f'KV cache for {min_tokens} tokens'}, its ranks have "
                f"{format_bytes(have)}: {format_bytes(missing)} missing; move layers to another stage"
                f"{' or' if packs else ','} give the role more memory{'' if packs else _SHORTER}",
                reason=PlanReason.INSUFFICIENT_MEMORY,
            )


def split_by_memory(budgets: Sequence[StageBudget], sizes: Sizes, min_tokens: int) -> tuple[int, ...]:
    """Returns layers by stage: as few as possible on CPUs, and apart from that as even as memory allows.

    GPU stages are filled first, since a CPU rank adds capacity and not speed. Where no
    stage's memory is known, all stages get the same number.

    Args:
        min_tokens: tokens whose KV cache each stage must hold beside its layers.

    Raises:
        PlanError: there are fewer layers than stages, or the model doesn't fit; the
            message says what is missing.
    """
    num_layers, least = sizes.profile.num_layers, _least_layers(sizes.profile, len(budgets))
    if num_layers < sum(least):
        needs = "a stage needs one" if max(least) == 1 else f"stages need {', '.join(map(str, least))}"
        raise PlanError(
            f"roles: got {len(budgets)} stages, the model has {num_layers} layers and {needs}; "
            "use fewer pods or ranksPerPod, or set parallelism.tensor",
            reason=PlanReason.TOO_MANY_STAGES,
        )
    keeping = [layer for layer in range(num_layers) if sizes.kv.block_bytes(layer, layer + 1)]
    if len(keeping) < len(budgets):
        raise PlanError(
            f"roles: got {len(budgets)} stages, the model has {len(keeping)} layers that keep keys, values "
            "or a state, and a stage needs one; use fewer pods or ranksPerPod, or set parallelism.tensor",
            reason=PlanReason.TOO_MANY_STAGES,
        )
    prefer_gpu = any(stage.is_known for stage in budgets)
    # best[n]: cost and layers of the cheapest split of the first n layers over the stages so far.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for index, stage in enumerate(budgets):
        dear = _CPU_LAYER_COST if prefer_gpu and stage.device is Device.CPU else 0
        following: dict[int, tuple[int, tuple[int, ...]]] = {}
        for first, (cost, split) in best.items():
            shortest = next((layer + 1 - first for layer in keeping if layer >= first), num_layers)
            for count in range(max(least[index], shortest), _capacity(stage, sizes, first) + 1):
                total, end = cost + dear * count + count * count, first + count
                known = following.get(end)
                # Among equal splits earlier stages get more: the last has the head.
                if known is None or total < known[0] or (total == known[0] and split > known[1]):
                    following[end] = (total, (*split, count))
        best = following
    if num_layers not in best:
        raise _too_large(budgets, sizes, min_tokens)
    return best[num_layers][1]


def _least_layers(profile: ModelProfile, num_stages: int) -> tuple[int, ...]:
    least = [1] * num_stages
    least[0] = profile.first_stage_layers
    if num_stages > 1:
        least[-1] = profile.last_stage_layers
    return tuple(least)


_Cost: TypeAlias = Callable[[Sizes, int, int, WeightKernels], int]
_MORE_MEMORY: Final = MappingProxyType(
    {
        Device.CPU: "raise the role's resources.limits.memory",
        Device.GPU: "raise the role's deviceMemory, or give it larger GPUs",
    }
)


_MEMORY_FIELD: Final = MappingProxyType({Device.CPU: "resources.limits.memory", Device.GPU: "deviceMemory"})


def _capacity(stage: StageBudget, sizes: Sizes, first: int, cost: _Cost = Sizes.needed) -> int:
    """Returns how many layers from `first` on the stage can hold."""
    return min(_rank_capacity(rank, sizes, first, cost) for rank in stage.ranks)


def _rank_capacity(rank: RankBudget, sizes: Sizes, first: int, cost: _Cost) -> int:
    most = sizes.profile.num_layers - first
    free_bytes = rank.free_bytes
    if free_bytes is None:
        return most
    # Costs grow with the count: as many counts are within the bytes as layers are.
    counts = range(1, most + 1)
    return bisect_right(counts, free_bytes, key=lambda count: cost(sizes, first, first + count, rank.kernels))


def _shared_too_large(budgets: Sequence[StageBudget], sizes: Sizes) -> PlanError | None:
    """Returns what is said where the last stage cannot hold what shares keys and values; None if it can."""
    least, number = sizes.profile.last_stage_layers, sizes.profile.num_layers
    if len(budgets) == 1 or least == 1:
        return None
    last = budgets[-1].neediest(sizes, number - least, number)
    missing = last.missing_bytes(sizes, number - least, number)
    if missing is None or missing <= 0:
        return None
    have = last.budget or 0
    return PlanError(
        f"stage {len(budgets) - 1} (role {last.role}): the last {least} layers share keys and values, which "
        f"are on one rank, and need {format_bytes(have + missing)}; its ranks have "
        f"{format_bytes(have)}: {format_bytes(missing)} missing; "
        f"{_MORE_MEMORY[last.device]}",
        reason=PlanReason.INSUFFICIENT_MEMORY,
    )


def _too_large(budgets: Sequence[StageBudget], sizes: Sizes, min_tokens: int) -> PlanError:
    if (shared := _shared_too_large(budgets, sizes)) is not None:
        return shared
    least, held, first = _least_layers(sizes.profile, len(budgets)), [0] * len(budgets), 0
    for index, stage in enumerate(budgets):
        # What this stage and those that follow need at least is left for them.
        layer = min(first, sizes.profile.num_layers - sum(least[index:]))
        held[index - 1] -= first - layer
        held[index] = _capacity(stage, sizes, layer)
        if held[index] < least[index]:
            return _least_too_large(stage, index, (layer, layer + least[index]), sizes, min_tokens)
        first = layer + held[index]
    words = [
        f"{count} in stage {index} (role {stage.neediest(sizes, 0, 1).role})"
        for index, (count, stage) in enumerate(zip(held, budgets, strict=True))
    ]
    missing = sizes.profile.num_layers - first
    size = sizes.tensor * max(
        sizes.needed(first, sizes.profile.num_layers, rank.kernels)
        for stage in budgets
        for rank in stage.ranks
    )
    memory = f"add pods for them, or memory ({_where_memory_is(budgets, sizes)})"
    shorter = _SHORTER if _fits_without_cache(budgets, sizes) else ""
    return PlanError(
        f"the model does not fit: it has {sizes.profile.num_layers} layers, and with KV cache for "
        f"{min_tokens} tokens {first} fit, {', '.join(words)}: {missing} layers ({format_bytes(size)}) "
        f"don't; {memory}{_fewer_bits(sizes)}{shorter}",
        reason=PlanReason.INSUFFICIENT_MEMORY,
    )


def _least_too_large(
    stage: StageBudget, index: int, layers: tuple[int, int], sizes: Sizes, min_tokens: int
) -> PlanError:
    """Returns what is said where a stage cannot hold the layers that it must at least: from, and to."""
    rank, count = stage.neediest(sizes, *layers), layers[1] - layers[0]
    have, span = rank.budget or 0, (*layers, rank.kernels)
    need = sizes.needed(*span) + rank.tables
    shorter = _SHORTER if sizes.loading(*span) + rank.tables <= have else ""
    packs = sizes.loads_to_more(*span)
    return PlanError(
        f"stage {index} (role {rank.role}): "
        f"{'one layer needs' if count == 1 else f'{count} layers, the fewest that it can have, need'} "
        f"{format_bytes(need)} with embedding or head and "
        f"{_PACKED if packs else f'KV cache for {min_tokens} tokens'}, its ranks have "
        f"{format_bytes(have)}: {format_bytes(need - have)} missing; "
        f"{_MORE_MEMORY[rank.device]}{shorter}",
        reason=PlanReason.INSUFFICIENT_MEMORY,
    )


def _where_memory_is(budgets: Sequence[StageBudget], sizes: Sizes) -> str:
    """Returns the fields that say how much memory ranks have, of the roles that are there."""
    neediest = [stage.neediest(sizes, 0, 1) for stage in budgets]
    fields = {f"{_MEMORY_FIELD[rank.device]} of role {rank.role}": None for rank in neediest}
    return ", ".join(fields)


def _fewer_bits(sizes: Sizes) -> str:
    return ", or take the model in fewer bits (FP8, AWQ)" if sizes.profile.scheme.bits == 16 else ""


def _fits_without_cache(budgets: Sequence[StageBudget], sizes: Sizes) -> bool:
    first = 0
    for stage in budgets:
        if first < sizes.profile.num_layers:
            first += _capacity(stage, sizes, first, Sizes.loading)
    return first >= sizes.profile.num_layers
