"""Mode FeedForward: chooses the layers whose experts or MLPs go to CPU ranks. Pure.

The rest of the planner handles the GPU's remaining model like any other model.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate
from math import ceil, sqrt
from statistics import NormalDist
from typing import Final

from heteroinfer_contract import load_formats
from heteroinfer_contract.column_shares import share_columns, share_experts
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model import LayerKind
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, EngineSettings, Mode, batches_at_once
from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.api import RoleSpec
from heteroinfer_operator.errors import PlanError, PlanReason
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.memory import RANK_OVERHEAD_BYTES, Sizes, stage_budgets
from heteroinfer_operator.planning.packing import packed_part
from heteroinfer_operator.planning.prediction import Load, count_reads
from heteroinfer_operator.planning.rates import EXCHANGE_BYTES_PER_S, Rates
from heteroinfer_operator.planning.remote_ranks import (
    NETWORK_BYTES_PER_S,
    NETWORK_S,
    RankSet,
    fit_shares,
    rank_sets,
)
from heteroinfer_operator.planning.topology import Topology
from heteroinfer_operator.vllm_support.architectures import NO_FEED_FORWARD
from heteroinfer_operator.vllm_support.cpu_ranks import check_remote_support
from heteroinfer_operator.vllm_support.engine_options import (
    ELEMENT_BYTES,
    LOAD_FORMAT,
    MODEL_IMPL,
    OFFLOADED_GIB,
    OFFLOADED_LAYERS,
    EngineOptions,
)
from heteroinfer_operator.vllm_support.every_reason import every_reason
from heteroinfer_operator.vllm_support.served_architectures import is_by_transformers

_SCRATCH_OF_HIDDEN, _SCRATCH_OF_COLUMN = 8, 12
"""Bytes of a kernel's inputs and sums per element of a row, and per intermediate column of a row."""

_FITS: Final = 0.97
"""Part of a rank's free memory that planned shares use, because columns are shared in whole blocks."""
_OFFLOADS: Final = "its CPU ranks have the weights that vLLM would offload. Remove the option"
_ARGS: Final = (
    (OFFLOADED_GIB, ("0",), _OFFLOADS),
    (OFFLOADED_LAYERS, ("0",), _OFFLOADS),
    (LOAD_FORMAT, load_formats.FEED_FORWARD, load_formats.FEED_FORWARD_WHY),
    (MODEL_IMPL, ("auto", "vllm"), "its ranks take experts and MLPs from vLLM's own classes"),
)
"""Options of vLLM with the values that this mode accepts, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remote:
    """The part of a model that feed-forward ranks compute.

    Attributes:
        layers: layers whose experts or MLPs they compute, ascending.
        profile: a model of only these experts or MLPs, so that reads are counted as in any other model.
        kept: the model without them, which the role's own rank computes.
        sets: the feed-forward ranks by role, in rank order.
        by_experts: whether each rank has whole experts, because their columns cannot be shared.
        shares: share of each rank; empty if the ranks of one pod share by the rates that they measure.
    """

    sets: tuple[RankSet, ...]
    layers: tuple[int, ...]
    profile: ModelProfile
    kept: ModelProfile
    by_experts: bool = False
    shares: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        """Number of feed-forward ranks."""
        return sum(each.count for each in self.sets)

    @property
    def weights(self) -> tuple[int, ...]:
        """Planned share of each rank, relative to the others."""
        return self.shares or (1,) * self.ranks

    @property
    def numbered_sets(self) -> tuple[tuple[RankSet, range], ...]:
        """Each set with the numbers of its ranks among the feed-forward ranks."""
        ends = tuple(accumulate(each.count for each in self.sets))
        return tuple((each, range(end - each.count, end)) for each, end in zip(self.sets, ends, strict=True))


def choose_remote(
    roles: Sequence[RoleSpec],
    topology: Topology,
    profile: ModelProfile,
    engine: EngineSettings,
    inventory: Inventory,
) -> Remote:
    """Returns the part of the model that feed-forward ranks compute.

    It has the number of layers that the user set, otherwise the fewest that leave the asking rank enough
    memory for the KV cache of one full-length request. The cheapest layers come first: those that read the
    smallest part of their weights in a step.

    Args:
        roles: all roles of the group.

    Raises:
        PlanError: its layers do not fit.
    """
    role = topology.stages[0][0].placed.role
    sets = rank_sets(role, roles, inventory)
    set_by_user = None if role.feed_forward is None else role.feed_forward.layers
    order = _cheapest_first(profile)
    if set_by_user is not None and set_by_user > len(order):
        raise PlanError(
            f"role {role.name}: feedForward.layers must be at most {len(order)}, the number of layers with "
            f"experts or an MLP (got {set_by_user}). Lower it",
            reason=PlanReason.LAYERS_MISMATCH,
        )
    by_experts = _is_by_experts(sum(each.count for each in sets), profile, order)
    counts = range(1, len(order) + 1) if set_by_user is None else (set_by_user,)
    missing = 0
    for count in counts:
        remote = remote_of(sets, profile, order[:count], by_experts=by_experts)
        missing = missing_bytes(topology, remote.kept, engine, inventory)
        if missing <= 0:
            remote = replace(remote, shares=_planned_shares(remote, engine, inventory))
            _check_shares(role.name, remote)
            for each, numbers in remote.numbered_sets:
                _check_memory(each, numbers, remote, engine)
            return remote
    raise PlanError(
        f"role {role.name}: {format_bytes(missing)} of memory is missing on its rank, which holds the model "
        f"without experts or MLPs of {_layers(counts[-1])}, and KV cache for one request of "
        f"{engine.max_model_len:,} tokens. "
        f"{'Raise feedForward.layers, use' if counts[-1] < len(order) else 'Use'} a larger device, or lower "
        "engine.maxModelLen",
        reason=PlanReason.INSUFFICIENT_MEMORY,
    )


def _planned_shares(remote: Remote, engine: EngineSettings, inventory: Inventory) -> tuple[int, ...]:
    """Returns the share of each rank by predicted speed and memory, if ranks are in several pods.

    The ranks of one pod share by the rates that they measure, because they also share the pod's memory.
    """
    if not any(each.pods for each in remote.sets):
        return ()
    whole = Sizes.of(remote.profile, engine, 1, batches=1)
    reads = count_reads(whole, 0, remote.profile.num_layers, Load(), last=False, engine=engine)
    weights = _packed_bytes(remote, list(whole.layer_bytes))
    speeds, most = [], []
    for each, numbers in remote.numbered_sets:
        rates = each.rates(remote.profile, engine, inventory, by_rate=False)
        left = None
        if each.memory_bytes is not None:
            left = max(each.memory_bytes - beside_weights_bytes(remote, engine, numbers), 0)
        speeds += [1 / max(reads.seconds(rates), 1e-9)] * each.count
        most += [1.0 if left is None else _FITS * left / max(weights, 1)] * each.count
    return fit_shares(speeds, most)


def _layers(count: int) -> str:
    return f"{count} layer{'' if count == 1 else 's'}"


def _is_by_experts(ranks: int, profile: ModelProfile, layers: Sequence[int]) -> bool:
    """Returns whether ranks share whole experts, because the columns of a layer cannot be shared.

    Shared columns are better: all ranks then read equally much in each step, whichever experts a token uses.
    """
    kinds = [profile.layer(index) for index in layers]
    if ranks == 1 or not all(kind.experts for kind in kinds):
        return False
    if any(kind.gates_together for kind in kinds):
        return True
    try:
        for kind in kinds:
            _column_counts(kind, profile.column_unit, (1,) * ranks)
    except ContractError:
        return True
    return False


def check_feed_forward(role: str, profile: ModelProfile, engine: EngineSettings) -> tuple[str, ...]:
    """Checks that feed-forward ranks can compute a model. Returns warnings for the user, one line each.

    Args:
        role: role with these ranks.

    Raises:
        PlanError: they cannot, whatever the memory; the message has a line for each reason.
    """

    def refuse(why: str) -> None:
        raise PlanError(f"role {role}: feedForward {why}", reason=PlanReason.UNSUPPORTED_PARALLELISM)

    return every_reason(
        *(partial(refuse, why) for why in _refusals(profile, engine)),
        lambda: check_remote_support(whole_remote(profile).profile, engine),
    )


def whole_remote(profile: ModelProfile) -> Remote:
    """Returns the part of the model of one feed-forward rank that has all layers' experts or MLPs."""
    one = RankSet(role=RoleSpec(name="cpu", device=Device.CPU), pods=0, per_pod=1)
    return remote_of((one,), profile, _cheapest_first(profile))


def _refusals(profile: ModelProfile, engine: EngineSettings) -> Iterator[str]:
    """Yields the reasons why feed-forward ranks cannot compute this model with these arguments."""
    name, remedy = profile.architecture, "Use mode Pipeline for this model"
    if is_by_transformers(name):
        words = "whose experts and MLPs feed-forward ranks cannot take"
        yield f"does not support {name}: vLLM serves it through transformers' class, {words}. {remedy}"
    if name in NO_FEED_FORWARD:
        yield f"does not support {name}: {NO_FEED_FORWARD[name]}. {remedy}"
    for option, allowed, why in _ARGS:
        value = EngineOptions.of(engine.extra_args).given(option)
        if value is not None and value not in allowed:
            yield f"needs engine.args {option} to be {' or '.join(allowed)} (got {value}): {why}"
    if not any(kind.feed_forward_bytes for kind in profile.layers):
        yield f"does not support {name}: its layers have no known experts or MLPs. {remedy}"


def _cheapest_first(profile: ModelProfile) -> list[int]:
    """Returns the layers with experts or an MLP, ordered by the part that one token reads.

    A mixture contributes only its layers with experts, because feed-forward ranks refuse its dense MLPs
    (vllm_heteroinfer/feed_forward/held.py).
    """

    def cost(index: int) -> tuple[float, int]:
        kind = profile.layer(index)
        active = kind.expected_experts(1) * kind.expert_bytes if kind.experts else kind.mlp_bytes
        # Of equal layers, the later one comes first.
        return active / kind.feed_forward_bytes, -index

    having = [index for index, kind in enumerate(profile.layers) if kind.feed_forward_bytes]
    mixed = [index for index in having if profile.layer(index).experts]
    return sorted(mixed or having, key=cost)


def remote_of(
    sets: tuple[RankSet, ...],
    profile: ModelProfile,
    chosen: Sequence[int],
    *,
    by_experts: bool = False,
    shares: tuple[int, ...] = (),
) -> Remote:
    """Returns the part of the model with the experts or MLPs of the given layers."""
    layers = tuple(sorted(chosen))
    kinds = profile.layers
    moved = set(layers)
    # Ranks with experts have nothing in the format of the other layers.
    scheme = profile.scheme_of_experts if any(kinds[index].experts for index in layers) else profile.scheme
    kept = [_without(kind) if index in moved else kind for index, kind in enumerate(kinds)]
    gone = [kind.feed_forward_bytes if index in moved else 0 for index, kind in enumerate(kinds)]
    only = [_only(kind) if index in moved else LayerKind() for index, kind in enumerate(kinds)]
    return Remote(
        sets=sets,
        layers=layers,
        by_experts=by_experts,
        shares=shares,
        profile=replace(
            _with_kinds(profile, only),
            scheme=scheme,
            expert_scheme=None,
            layer_bytes=tuple(gone),
            embedding_bytes=0,
            head_bytes=0,
            other_bytes=0,
            encoder_bytes=0,
        ),
        kept=replace(
            _with_kinds(profile, kept),
            layer_bytes=tuple(size - away for size, away in zip(profile.layer_bytes, gone, strict=True)),
        ),
    )


def _without(kind: LayerKind) -> LayerKind:
    mlp = kind.mlp_bytes if _mlp_is_quantized(kind) else 0
    return replace(
        kind,
        experts=0,
        experts_per_token=0,
        expert_bytes=0,
        experts_quantized=False,
        mlp_bytes=0,
        columns=0,
        quantized_bytes=max(kind.quantized_bytes - mlp, 0),
    )


def _mlp_is_quantized(kind: LayerKind) -> bool:
    """Returns whether a dense layer's MLP is quantized: all its linear layers are, or none."""
    return not kind.experts and kind.quantized_bytes >= kind.mlp_bytes > 0


def _only(kind: LayerKind) -> LayerKind:
    return LayerKind(
        experts=kind.experts,
        experts_per_token=kind.experts_per_token,
        expert_bytes=kind.expert_bytes,
        experts_quantized=kind.experts_quantized,
        mlp_bytes=kind.mlp_bytes,
        quantized_bytes=kind.mlp_bytes if _mlp_is_quantized(kind) else 0,
        columns=kind.columns,
    )


def _with_kinds(profile: ModelProfile, kinds: Sequence[LayerKind]) -> ModelProfile:
    known = tuple(dict.fromkeys(kinds))
    return replace(profile, kinds=known, kind_of_layer=tuple(known.index(kind) for kind in kinds))


def missing_bytes(
    topology: Topology, kept: ModelProfile, engine: EngineSettings, inventory: Inventory
) -> int:
    """Returns the bytes that the role's own rank lacks for one full-length request; <= 0 if it fits."""
    device = topology.stages[0][0].placed.device
    sizes = Sizes.of(kept, engine, 1, batches=batches_at_once(Mode.FEED_FORWARD, 1, device))
    stage = stage_budgets(topology.stages, sizes, inventory)[0]
    return stage.missing_bytes(sizes, 0, kept.num_layers) or 0


def _check_shares(role: str, remote: Remote) -> None:
    """Raises PlanError if the ranks can share a layer neither by columns nor by experts."""
    for index in remote.layers:
        try:
            _units(remote, index)
        except ContractError as error:
            raise PlanError(
                f"role {role}, layer {index}: {error}", reason=PlanReason.UNSUPPORTED_PARALLELISM.value
            ) from error


def _units(remote: Remote, index: int) -> list[int]:
    """Returns each rank's intermediate columns of a layer, or its experts, in order of ranks.

    Without planned shares, the plan assumes ranks that read equally fast. When such ranks start, they share
    by their measured rates (vllm_heteroinfer/feed_forward/read_rate.py), which moves memory between the ranks
    of a pod.

    Returns:
        [] if the columns are unknown.

    Raises:
        ContractError: the ranks cannot share the layer.
    """
    kind = remote.profile.layer(index)
    if remote.by_experts:
        return [own.count for own in share_experts(kind.experts, remote.weights)]
    return _column_counts(kind, remote.profile.column_unit, remote.weights)


def _column_counts(kind: LayerKind, unit: int, shares: Sequence[int]) -> list[int]:
    """Returns each rank's intermediate columns, [] if they are unknown; raises ContractError."""
    if not kind.columns or not unit:
        return []
    return [own.count for own in share_columns(kind.columns, shares, unit)]


def _parts(remote: Remote, index: int) -> list[Fraction]:
    """Returns each rank's part of a layer, in order of ranks.

    Parts follow the shares if columns are unknown, or if an earlier version planned a layer that cannot be
    shared.
    """
    try:
        units = _units(remote, index)
    except ContractError:
        units = []
    units = units or list(remote.weights)
    return [Fraction(each, sum(units)) for each in units]


def _sizes(remote: Remote, engine: EngineSettings, ranks: Sequence[int]) -> Sizes:
    """Returns the sizes of a feed-forward rank's part of the model: the largest part among these ranks."""
    whole = Sizes.of(remote.profile, engine, 1, batches=1)
    sizes = list(whole.layer_bytes)
    for index in remote.layers:
        parts = _parts(remote, index)
        sizes[index] = ceil(sizes[index] * max(parts[rank] for rank in ranks))
    return replace(whole, layer_bytes=tuple(sizes))


def rank_weight_bytes(remote: Remote, engine: EngineSettings, rank: int) -> int:
    """Returns the bytes of a feed-forward rank's weights, in its kernels' form."""
    return _packed_bytes(remote, _sizes(remote, engine, (rank,)).layer_bytes)


def _packed_bytes(remote: Remote, layer_bytes: Sequence[int]) -> int:
    """Returns the bytes of layers in the form of kernels, from their stored bytes."""
    packed = packed_part(remote.profile.scheme)
    kinds = ((index, remote.profile.layer(index)) for index in remote.layers)
    parts = {index: packed if kind.experts_quantized or kind.quantized_bytes else 1 for index, kind in kinds}
    return ceil(sum(layer_bytes[index] * part for index, part in parts.items()))


def beside_weights_bytes(remote: Remote, engine: EngineSettings, ranks: Sequence[int]) -> int:
    """Returns the largest memory that a rank of this set needs in addition to its packed weights, in bytes.

    While an MLP is packed, the rank has two copies of its layer; experts are read and packed one by one.
    After that the kernels keep inputs and sums of the longest batch's rows, once for each expert of a row
    (kernels/source/experts.cpp).
    """
    sizes = _sizes(remote, engine, ranks).layer_bytes
    hidden, packing, scratch = remote.profile.hidden_size, 0, 0
    for index in remote.layers:
        kind = remote.profile.layer(index)
        packing = max(packing, 0 if kind.experts else sizes[index])
        rows = engine.max_num_batched_tokens * kind.experts_per_token
        bits = remote.profile.scheme.bits if kind.experts_quantized else 0
        total = kind.columns or kind.expert_bytes * 8 // (3 * hidden * (bits or 16))
        parts = _parts(remote, index)
        columns = total if remote.by_experts else ceil(total * max(parts[rank] for rank in ranks))
        scratch = max(scratch, rows * (_SCRATCH_OF_HIDDEN * hidden + _SCRATCH_OF_COLUMN * columns))
    return RANK_OVERHEAD_BYTES + max(packing, scratch)


def _check_memory(own: RankSet, numbers: range, remote: Remote, engine: EngineSettings) -> None:
    """Checks that the part of each rank of a set fits its memory; raises PlanError."""
    if own.memory_bytes is None:
        return
    weights = max(rank_weight_bytes(remote, engine, number) for number in numbers)
    need = weights + beside_weights_bytes(remote, engine, numbers)
    if need > own.memory_bytes:
        more = "feedForward.ranks" if not own.pods else "pods"
        raise PlanError(
            f"role {own.role.name}: {format_bytes(need - own.memory_bytes)} of memory is missing on each "
            f"feed-forward rank. It needs {format_bytes(need)} for its part of "
            f"{_layers(len(remote.layers))}, and has {format_bytes(own.memory_bytes)} by {own.memory_field}. "
            f"Raise {own.memory_field} or {more}",
            reason=PlanReason.INSUFFICIENT_MEMORY,
        )


def feed_forward_rates(remote: Remote, engine: EngineSettings, inventory: Inventory) -> tuple[Rates, ...]:
    """Returns the speed of each feed-forward rank while all ranks compute, in rank order."""
    by_rate = not remote.shares
    sets = ((each, each.rates(remote.profile, engine, inventory, by_rate=by_rate)) for each in remote.sets)
    return tuple(rates for each, rates in sets for _ in range(each.count))


def feed_forward_seconds(
    remote: Remote, engine: EngineSettings, rates: Sequence[Rates], load: Load
) -> tuple[float, ...]:
    """Returns the seconds that each feed-forward rank takes in a step of this load, including exchanges.

    Args:
        rates: speed of each feed-forward rank, in rank order.
    """
    rows = load.requests * load.tokens
    there_and_back = 2 * rows * remote.profile.hidden_size * ELEMENT_BYTES[engine.dtype]
    found: list[float] = []
    for each, numbers in remote.numbered_sets:
        own = rates[numbers[0]]
        reads = count_reads(
            _sizes(remote, engine, numbers), 0, remote.profile.num_layers, load, last=False, engine=engine
        )
        exchange_s = own.exchange_s + there_and_back / EXCHANGE_BYTES_PER_S
        if each.pods:
            exchange_s += NETWORK_S + there_and_back / NETWORK_BYTES_PER_S
        computing_s = reads.seconds(own) * _unevenness(remote, numbers, rows)
        found += [computing_s + len(remote.layers) * exchange_s] * each.count
    return tuple(found)


def _unevenness(remote: Remote, numbers: range, rows: int) -> float:
    """Returns the load of the busiest rank of a set, relative to its part in `_sizes`.

    It is 1 if ranks share columns. If ranks have whole experts, the rows' experts are treated as drawn
    without replacement: mean and spread are those of the hypergeometric distribution, and the maximum over
    ranks is Blom's approximation. The counts of the ranks depend on each other, so the maximum is that of
    independent ranks with a variance ranks / (ranks - 1) times as large. The busiest rank has at least one
    expert, and at most those that it holds. Compared with drawn experts the result is 13 % too low to 9 %
    too high (8 to 256 experts over 2 to 8 ranks, topk 1 to 8, 1 to 512 rows).
    """
    ranks = remote.ranks
    if not remote.by_experts:
        return 1.0
    parts = _parts(remote, remote.layers[0])
    kind, part = remote.profile.layer(remote.layers[0]), max(parts[number] for number in numbers)
    chosen = kind.expected_experts(rows)
    spread = sqrt(chosen / ranks * (1 - chosen / kind.experts))
    above = NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25)) * spread
    mean = chosen * float(part)  # for the rank that holds the most experts
    even = mean if remote.shares else chosen / ranks
    most = min(max(even + above, mean, 1.0), chosen, float(kind.experts * part))
    return most / mean
