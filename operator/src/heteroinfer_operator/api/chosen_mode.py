"""A mode that the plan chooses for a spec without a mode, and the spec that results. Pure."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from pydantic import ValidationError

from heteroinfer_contract.plan import Device, Mode
from heteroinfer_operator.api.base import Model
from heteroinfer_operator.api.role import MAX_RANKS_PER_POD, FeedForwardSpec, RoleSpec
from heteroinfer_operator.api.spec import HeteroInferenceSpec
from heteroinfer_operator.quantity import format_quantity, parse_quantity


class ChosenMode(Model):
    """A mode with the roles that it uses. The record of a revision stores it as JSON."""

    mode: Mode
    gpu_only: bool = False
    """Whether CPU roles are left out."""
    feed_forward: FeedForwardSpec | None = None
    """Resources of CPU roles that the mode moves into the pod of the GPU; None if it moves none."""
    keeps_cpu_pods: bool = False
    """Whether CPU roles have feed-forward ranks in their own pods."""

    @property
    def title(self) -> str:
        """The mode in words, such as "GPU only"."""
        if self.keeps_cpu_pods:
            return f"{self.mode}, CPU pods"
        if not self.gpu_only:
            return self.mode.value
        return "GPU only" if self.mode is Mode.PIPELINE else f"GPU only, mode {self.mode}"

    def apply_to(self, spec: HeteroInferenceSpec) -> HeteroInferenceSpec:
        """Returns a spec with this mode and with only the roles that the mode uses."""
        return spec.changed(
            roles=tuple(self._roles(spec)), parallelism=spec.parallelism.changed(mode=self.mode)
        )

    def _roles(self, spec: HeteroInferenceSpec) -> Iterator[RoleSpec]:
        having = [role for role in spec.roles if role.feed_forward is not None]
        gpus = [role for role in spec.roles if role.device is Device.GPU]
        if self.keeps_cpu_pods:
            yield from spec.roles
            return
        if self.mode is Mode.FEED_FORWARD:
            for role in having or gpus:
                yield role.changed(feed_forward=self.feed_forward or role.feed_forward)
            return
        for role in gpus if self.gpu_only else spec.roles:
            yield role.changed(feed_forward=None)


def read_chosen_mode(raw: Any) -> ChosenMode | None:
    """Returns the mode in a stored record; None if it has none that this version can read."""
    try:
        return ChosenMode.model_validate(raw, strict=False)
    except ValidationError:
        return None


def candidate_modes(spec: HeteroInferenceSpec) -> tuple[tuple[ChosenMode, ...], str]:
    """Returns the modes that a spec without a mode may get, those with the fewest parts first.

    Returns:
        The modes, and why FeedForward is missing, or "".
    """
    gpus = [role for role in spec.roles if role.device is Device.GPU]
    cpus = [role for role in spec.roles if role.device is Device.CPU]
    has_feed_forward = any(role.feed_forward is not None for role in spec.roles)
    num_gpus = sum(role.num_ranks for role in gpus)
    found = []
    if gpus and (cpus or has_feed_forward):
        found.append(ChosenMode(mode=Mode.PIPELINE, gpu_only=True))
        if num_gpus > 1:
            found.append(ChosenMode(mode=Mode.TENSOR, gpu_only=True))
    moved, refused = None, ""
    if not has_feed_forward:
        moved, refused = _moved(num_gpus, cpus)
    if has_feed_forward or moved is not None:
        found.append(ChosenMode(mode=Mode.FEED_FORWARD, feed_forward=moved))
    asking = [role for role in spec.roles if role.device is Device.GPU or role.feed_forward is not None]
    if sum(role.num_ranks for role in asking) == 1 and len(asking) < len(spec.roles):
        found.append(ChosenMode(mode=Mode.FEED_FORWARD, keeps_cpu_pods=True))
    if cpus or not found:
        found.append(ChosenMode(mode=Mode.PIPELINE))
        if spec.world_size > 1:
            found.append(ChosenMode(mode=Mode.TENSOR))
    return tuple(found), refused


def _moved(num_gpus: int, cpus: Sequence[RoleSpec]) -> tuple[FeedForwardSpec | None, str]:
    """Returns the feed-forward ranks that CPU roles offer, or why there are none."""
    if num_gpus != 1:
        return None, f"needs one GPU rank (the roles have {num_gpus})"
    if not cpus:
        return None, "needs CPUs and memory in the GPU's pod (no role offers any)"
    ranks = sum(role.num_ranks for role in cpus)
    if ranks >= MAX_RANKS_PER_POD:
        return None, f"supports at most {MAX_RANKS_PER_POD - 1} CPU ranks in the GPU's pod (got {ranks})"
    total = {"cpu": Fraction(0), "memory": Fraction(0)}
    for role in cpus:
        for name in total:
            amount = _asked(role, name)
            if amount is None:
                return None, f"needs requests of {name} in role {role.name} (got none)"
            total[name] += role.pods * parse_quantity(amount)
    # Rounded down, so that the ranks never ask for more than the roles.
    millis = int(total["cpu"] * 1000 / ranks)
    mebi = int(total["memory"] / ranks) >> 20
    if millis < 1 or mebi < 1:
        return None, "needs CPUs and memory of CPU roles (got 0)"
    cpu = format_quantity(Fraction(millis, 1000))
    return FeedForwardSpec(ranks=ranks, cpu=cpu, memory=f"{mebi}Mi"), ""


def _asked(role: RoleSpec, name: str) -> str | None:
    resources = role.resources
    amounts = (resources.requests, resources.limits) if resources else ()
    return next((given[name] for given in amounts if given and name in given), None)


def infer_mode(spec: HeteroInferenceSpec, roles: Sequence[str], mode: Mode) -> ChosenMode | None:
    """Returns the candidate that fits a stored plan, or None.

    Args:
        roles: roles of the plan's ranks.
        mode: mode of the plan.
    """
    for each in candidate_modes(spec)[0]:
        if each.mode is mode and {role.name for role in each.apply_to(spec).roles} == set(roles):
            return each
    return None
