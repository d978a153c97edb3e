"""Feed-forward ranks of a group by role: their pods, memory, rates and shares of each layer. Pure.

The *asking* rank or role is the one with attention, for which feed-forward ranks compute.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import Final

from heteroinfer_contract.calibration import HopPath
from heteroinfer_contract.column_shares import shares_by_rate
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_contract.plan import Device, EngineSettings
from heteroinfer_operator.api import Resources, RoleSpec
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.memory import pod_memory
from heteroinfer_operator.planning.rates import NetworkRates, Rates, cpu_rates
from heteroinfer_operator.quantity import parse_bytes

_PART_STEPS: Final = 1000
"""Share of the rank with the largest part, if the units of a layer are unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSet:
    """The feed-forward ranks of one role, which have equal resources.

    Attributes:
        role: role whose CPUs these ranks use.
        pods: number of pods with only such ranks; 0 if the ranks are in the pod of the rank with attention.
        per_pod: ranks in each pod.
        memory_bytes: memory of each rank; None if it is unknown.
        memory_field: field of the role that sets the memory, for messages.
    """

    role: RoleSpec
    pods: int
    per_pod: int
    memory_bytes: int | None = None
    memory_field: str = ""

    @property
    def count(self) -> int:
        """Number of ranks in all pods."""
        return max(self.pods, 1) * self.per_pod

    def rates(
        self, profile: ModelProfile, engine: EngineSettings, inventory: Inventory, *, by_rate: bool
    ) -> Rates:
        """Returns the speed of a rank of this set while all ranks compute.

        Args:
            profile: the feed-forward ranks' part of the model.
            by_rate: whether the ranks share each layer by their measured rates.
        """
        rank_rates = cpu_rates(
            self.role,
            profile,
            engine,
            inventory,
            has_leader=False,
            sharing_ranks=self.per_pod,
            share_by_rate=by_rate,
        )
        calibration = inventory.calibration.get(self.role.name)
        measured_s = None if calibration is None else calibration.hop_s(HopPath.EXCHANGE)
        if measured_s is not None:
            rank_rates = replace(rank_rates, exchange_s=measured_s)
        if not self.pods:  # the ranks are in the pod of the rank with attention
            return rank_rates
        return replace(rank_rates, network=NetworkRates.of(inventory.network.get(self.role.name)))


def rank_sets(asking: RoleSpec, roles: Sequence[RoleSpec], inventory: Inventory) -> tuple[RankSet, ...]:
    """Returns the feed-forward ranks of a group, by role.

    Args:
        asking: role of the rank with attention. The ranks in its pod come first.
        roles: all roles of the group. The ranks of the other roles are feed-forward ranks in their own pods.
    """
    sets = []
    setting = asking.feed_forward
    if setting is not None:
        # Describes the part of the pod's CPUs that these ranks get, for `cpu_rates`.
        cpu_role = RoleSpec(
            name=asking.name, device=Device.CPU, resources=Resources(requests={"cpu": setting.cpu})
        )
        memory, memory_field = parse_bytes(setting.memory), "feedForward.memory"
        sets.append(
            RankSet(
                role=cpu_role, pods=0, per_pod=setting.ranks, memory_bytes=memory, memory_field=memory_field
            )
        )
    for role in roles:
        if role.name != asking.name:
            memory_bytes, memory_field = _rank_memory(role, inventory)
            sets.append(
                RankSet(
                    role=role,
                    pods=role.pods,
                    per_pod=role.ranks_per_pod,
                    memory_bytes=memory_bytes,
                    memory_field=memory_field,
                )
            )
    return tuple(sets)


def _rank_memory(role: RoleSpec, inventory: Inventory) -> tuple[int | None, str]:
    """Returns the memory of each rank of a role, None if it is unknown, and the field that sets it.

    If the role sets no memory, the field is the one that a message may ask the user to set.
    """
    pod_bytes = pod_memory(role, inventory)
    limits = role.resources.limits if role.resources else None
    field = "limits" if limits and "memory" in limits else "requests"
    return None if pod_bytes is None else pod_bytes // role.ranks_per_pod, f"resources.{field}.memory"


def fit_shares(speeds: Sequence[float], max_parts: Sequence[float], units: int = 0) -> tuple[int, ...]:
    """Returns the shares of ranks by speed, limited by the memory of each rank.

    A rank whose part by speed does not fit gets the largest part that fits. The other ranks compute the rest.

    Args:
        speeds: speed of each rank. Speeds that differ little count as equal.
        max_parts: largest part of a layer that fits the memory of each rank, from 0 to 1.
        units: number of equal units of a layer that ranks divide among themselves; 0 if unknown.

    Returns:
        The shares, relative to each other: numbers of units, or 1 for each rank if all are equal. If the
        memory of all ranks together is too small, parts exceed `max_parts`.
    """
    parts = _limited_parts(shares_by_rate(speeds), max_parts)
    whole_units = _whole_units(parts, max_parts, units)
    if whole_units is not None:
        all_equal = len(set(whole_units)) == 1
        return (1,) * len(whole_units) if all_equal else whole_units
    largest_part = max(parts)
    return tuple(max(round(_PART_STEPS * part / largest_part), 1) for part in parts)


def _limited_parts(speeds: Sequence[float], max_parts: Sequence[float]) -> list[float]:
    """Divides 1.0 among ranks by speed. Each part is at most the rank's value in `max_parts`.

    A rank whose part by speed exceeds its limit gets its limit, and the other ranks divide the rest again. If
    all limits together are too small, ranks may exceed them.
    """
    parts = [0.0] * len(speeds)
    free_ranks = set(range(len(speeds)))
    left_part = 1.0
    while free_ranks:
        total = sum(speeds[rank] for rank in free_ranks)
        full_ranks = {rank for rank in free_ranks if left_part * speeds[rank] / total > max_parts[rank]}
        limits_too_small = full_ranks == free_ranks
        if not full_ranks or limits_too_small:
            for rank in free_ranks:
                parts[rank] = left_part * speeds[rank] / total
            break
        for rank in full_ranks:
            parts[rank] = max_parts[rank]
        left_part -= sum(max_parts[rank] for rank in full_ranks)
        free_ranks -= full_ranks
    return parts


def _whole_units(parts: Sequence[float], max_parts: Sequence[float], units: int) -> tuple[int, ...] | None:
    """Rounds the parts to whole units with the sum `units`.

    Each rank gets at least 1 unit and at most its limit (at least 1). Returns None if that is impossible.
    """
    limits = [floor(most * units) for most in max_parts]
    counts = [max(min(floor(part * units), limit), 1) for part, limit in zip(parts, limits, strict=True)]
    while sum(counts) != units:
        step = 1 if sum(counts) < units else -1
        changeable_ranks = [
            rank
            for rank, count in enumerate(counts)
            if (step > 0 and count < limits[rank]) or (step < 0 and count > 1)
        ]
        if not changeable_ranks:
            return None
        # Adds a unit to the rank that is furthest below its part, or takes one from the rank furthest above.
        rank = max(changeable_ranks, key=lambda rank: step * (parts[rank] * units - counts[rank]))
        counts[rank] += step
    return tuple(counts)
