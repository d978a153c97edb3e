"""The layers of each stage. Pure."""

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
"""Exceeds any sum of squares of layers, so that a split with more CPU layers is never better."""
_SHORTER: Final = ", or lower engine.maxModelLen"
"""Added to a message if KV cache is too large, and not the weights."""
_PACKED: Final = "the copy of a layer while it is packed"
"""Named in place of KV cache if it takes more memory."""


def choose_layers(
    spec: HeteroInferenceSpec,
    topology: Topology,
    budgets: Sequence[StageBudget],
    sizes: Sizes,
) -> tuple[int, ...]:
    """Returns the user's layers by stage, or layers that the memory allows; raises PlanError."""
    layers = _explicit_layers(topology)
    if layers is None:
        return split_by_memory(budgets, sizes)
    _check_explicit(layers, budgets, sizes)
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


def _check_explicit(layers: Sequence[int], budgets: Sequence[StageBudget], sizes: Sizes) -> None:
    """Checks that the user's layers add up and fit; raises PlanError with the missing number or bytes."""
    have, want = sum(layers), sizes.profile.num_layers
    least = sizes.profile.first_stage_layers
    if layers[0] < least:
        raise PlanError(
            f"roles: the first stage must have at least {least} layers, because the model adds the encoder's "
            f"output in each (got {layers[0]}). Give it more layers",
            reason=PlanReason.LAYERS_MISMATCH,
        )
    least = sizes.profile.last_stage_layers
    if len(layers) > 1 and layers[-1] < least:
        raise PlanError(
            f"roles: the last stage must have at least {least} layers, because they share keys and values, "
            f"which are on one rank (got {layers[-1]}). Give it more layers",
            reason=PlanReason.LAYERS_MISMATCH,
        )
    if have != want:
        change = f"Add {want - have}" if have < want else f"Remove {have - want}"
        raise PlanError(
            f"roles: layers must add up to the model's {want} (got {have}). {change}",
            reason=PlanReason.LAYERS_MISMATCH,
        )
    ends = list(accumulate(layers))
    for index, (stage, count, end) in enumerate(zip(budgets, layers, ends, strict=True)):
        rank = stage.neediest(sizes, end - count, end)
        if not sizes.kv.block_bytes(end - count, end):
            # vllm/v1/core/kv_cache_utils.py::get_kv_cache_config_from_groups@v0.32.0 divides by a block.
            raise PlanError(
                f"stage {index} (role {rank.role}): at least one layer must have a KV cache or a state, "
                f"because vLLM cannot run a stage without one (got layers {end - count} to {end - 1}). "
                "Change `layers` of the roles",
                reason=PlanReason.LAYERS_MISMATCH,
            )
        missing = rank.missing_bytes(sizes, end - count, end)
        if missing is not None and missing > 0:
            have, span = rank.budget or 0, (end - count, end, rank.device)
            packs = sizes.loads_to_more(*span)
            raise PlanError(
                f"stage {index} (role {rank.role}): {format_bytes(missing)} of memory is missing. "
                f"{_layers(count)} need {format_bytes(have + missing)} with "
                f"{_PACKED if packs else _cache(sizes)}, and a rank has {format_bytes(have)}. Move layers to "
                f"another stage{' or' if packs else ','} give the role more "
                f"memory{'' if packs else _SHORTER}",
                reason=PlanReason.INSUFFICIENT_MEMORY,
            )


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"


def _cache(sizes: Sizes) -> str:
    return f"KV cache for one request of {sizes.kv.sequence_tokens:,} tokens"


def split_by_memory(budgets: Sequence[StageBudget], sizes: Sizes) -> tuple[int, ...]:
    """Returns layers by stage: as few as possible on CPUs, otherwise as even as memory allows.

    GPU stages are filled first, because a CPU rank adds capacity and not speed. If the memory of all stages
    is unknown, all get the same number. Each stage also holds the KV cache of one full-length request.

    Raises:
        PlanError: the model has fewer layers than stages, or does not fit.
    """
    num_layers, least = sizes.profile.num_layers, _least_layers(sizes.profile, len(budgets))
    if num_layers < sum(least):
        needs = "each needs one" if max(least) == 1 else f"they need {', '.join(map(str, least))}"
        raise PlanError(
            f"roles: {len(budgets)} stages are too many for the model's {_layers(num_layers)}: {needs}. "
            "Use fewer pods or ranksPerPod, or set parallelism.tensor",
            reason=PlanReason.TOO_MANY_STAGES,
        )
    keeping = [layer for layer in range(num_layers) if sizes.kv.block_bytes(layer, layer + 1)]
    if len(keeping) < len(budgets):
        raise PlanError(
            f"roles: {len(budgets)} stages are too many for the model's {_layers(len(keeping))} with a KV "
            "cache or a state: each stage needs one. Use fewer pods or ranksPerPod, or set "
            "parallelism.tensor",
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
        raise _too_large(budgets, sizes)
    return best[num_layers][1]


def _least_layers(profile: ModelProfile, num_stages: int) -> tuple[int, ...]:
    least = [1] * num_stages
    least[0] = profile.first_stage_layers
    if num_stages > 1:
        least[-1] = profile.last_stage_layers
    return tuple(least)


_Cost: TypeAlias = Callable[[Sizes, int, int, Device], int]
_MORE_MEMORY: Final = MappingProxyType(
    {
        Device.CPU: "Raise the role's resources.limits.memory",
        Device.GPU: "Raise the role's deviceMemory, or give it larger GPUs",
    }
)


_MEMORY_FIELD: Final = MappingProxyType({Device.CPU: "resources.limits.memory", Device.GPU: "deviceMemory"})


def _capacity(stage: StageBudget, sizes: Sizes, first: int, cost: _Cost = Sizes.needed) -> int:
    """Returns how many layers the stage can hold, from `first` on."""
    return min(_rank_capacity(rank, sizes, first, cost) for rank in stage.ranks)


def _rank_capacity(rank: RankBudget, sizes: Sizes, first: int, cost: _Cost) -> int:
    most = sizes.profile.num_layers - first
    free_bytes = rank.free_bytes
    if free_bytes is None:
        return most
    # Costs grow with the count, so the number of counts within the bytes is the number of layers.
    counts = range(1, most + 1)
    return bisect_right(counts, free_bytes, key=lambda count: cost(sizes, first, first + count, rank.device))


def _shared_too_large(budgets: Sequence[StageBudget], sizes: Sizes) -> PlanError | None:
    """Returns the error of a last stage that cannot hold the layers that share keys and values, or None."""
    least, number = sizes.profile.last_stage_layers, sizes.profile.num_layers
    if len(budgets) == 1 or least == 1:
        return None
    last = budgets[-1].neediest(sizes, number - least, number)
    missing = last.missing_bytes(sizes, number - least, number)
    if missing is None or missing <= 0:
        return None
    have = last.budget or 0
    return PlanError(
        f"stage {len(budgets) - 1} (role {last.role}): {format_bytes(missing)} of memory is missing. The "
        f"last {least} layers share keys and values, which are on one rank, and need "
        f"{format_bytes(have + missing)}. A rank has {format_bytes(have)}. {_MORE_MEMORY[last.device]}",
        reason=PlanReason.INSUFFICIENT_MEMORY,
    )


def _too_large(budgets: Sequence[StageBudget], sizes: Sizes) -> PlanError:
    """Returns the error of a model that does not fit, with the layers that each stage holds."""
    if (shared := _shared_too_large(budgets, sizes)) is not None:
        return shared
    least, held, first = _least_layers(sizes.profile, len(budgets)), [0] * len(budgets), 0
    for index, stage in enumerate(budgets):
        # Leaves the fewest layers that this stage and those after it can have.
        layer = min(first, sizes.profile.num_layers - sum(least[index:]))
        held[index - 1] -= first - layer
        held[index] = _capacity(stage, sizes, layer)
        if held[index] < least[index]:
            return _least_too_large(stage, index, (layer, layer + least[index]), sizes)
        first = layer + held[index]
    words = [
        f"{count} in stage {index} (role {stage.neediest(sizes, 0, 1).role})"
        for index, (count, stage) in enumerate(zip(held, budgets, strict=True))
    ]
    missing = sizes.profile.num_layers - first
    size = sizes.tensor * max(
        sizes.needed(first, sizes.profile.num_layers, rank.device)
        for stage in budgets
        for rank in stage.ranks
    )
    remedies = f"Add pods, raise {_memory_fields(budgets, sizes)}{_fewer_bits(sizes)}"
    shorter = _SHORTER if _fits_without_cache(budgets, sizes) else ""
    return PlanError(
        f"memory for {missing} of the model's {sizes.profile.num_layers} layers is missing "
        f"({format_bytes(size)}). With {_cache(sizes)}, {first} fit: {', '.join(words)}. {remedies}{shorter}",
        reason=PlanReason.INSUFFICIENT_MEMORY,
    )


def _least_too_large(stage: StageBudget, index: int, layers: tuple[int, int], sizes: Sizes) -> PlanError:
    """Returns the error of a stage that cannot hold `layers`, the fewest that it may have (first, end)."""
    rank, count = stage.neediest(sizes, *layers), layers[1] - layers[0]
    have, span = rank.budget or 0, (*layers, rank.device)
    need = sizes.needed(*span) + rank.tables
    shorter = _SHORTER if sizes.loading(*span) + rank.tables <= have else ""
    packs = sizes.loads_to_more(*span)
    subject = "One layer needs" if count == 1 else f"{count} layers, the fewest that it can have, need"
    return PlanError(
        f"stage {index} (role {rank.role}): {format_bytes(need - have)} of memory is missing. {subject} "
        f"{format_bytes(need)} with embedding or head and {_PACKED if packs else _cache(sizes)}. "
        f"A rank has {format_bytes(have)}. {_MORE_MEMORY[rank.device]}{shorter}",
        reason=PlanReason.INSUFFICIENT_MEMORY,
    )


def _memory_fields(budgets: Sequence[StageBudget], sizes: Sizes) -> str:
    """Returns the fields that set the memory of the roles' ranks."""
    neediest = [stage.neediest(sizes, 0, 1) for stage in budgets]
    fields = {f"{_MEMORY_FIELD[rank.device]} of role {rank.role}": None for rank in neediest}
    return " or ".join(fields)


def _fewer_bits(sizes: Sizes) -> str:
    return ", or use the model in fewer bits (FP8, AWQ)" if sizes.profile.scheme.bits == 16 else ""


def _fits_without_cache(budgets: Sequence[StageBudget], sizes: Sizes) -> bool:
    first = 0
    for stage in budgets:
        if first < sizes.profile.num_layers:
            first += _capacity(stage, sizes, first, Sizes.loading)
    return first >= sizes.profile.num_layers
