"""A mode that the plan chooses for a spec without a mode, and the spec with this mode. Pure."""

from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

from pydantic import ValidationError

from heteroinfer_contract.plan import Device, Mode
from heteroinfer_operator.api.base import Model
from heteroinfer_operator.api.role import MAX_RANKS_PER_POD, FeedForwardSpec, Resources, RoleSpec
from heteroinfer_operator.api.spec import HeteroInferenceSpec
from heteroinfer_operator.quantity import format_quantity, parse_quantity


class ChosenMode(Model):
    """A mode, and the roles that the mode uses. The record of a revision stores this choice as JSON."""

    mode: Mode
    gpu_only: bool = False
    """Whether the group has no pods of the CPU roles."""
    feed_forward: FeedForwardSpec | None = None
    """Feed-forward ranks in the GPU's pod, with the CPUs and memory of the CPU roles, which then have no
    pods; None if the CPU roles keep their CPUs and memory."""
    keeps_cpu_pods: bool = False
    """Whether CPU roles have feed-forward ranks in their own pods."""

    @property
    def title(self) -> str:
        """Name of the mode for users, such as "GPU only"."""
        if self.keeps_cpu_pods:
            return f"{self.mode}, CPU pods"
        if not self.gpu_only:
            return self.mode.value
        return "GPU only" if self.mode is Mode.PIPELINE else f"GPU only, mode {self.mode}"

    def apply_to(self, spec: HeteroInferenceSpec) -> HeteroInferenceSpec:
        """Returns a spec with this mode and with only the roles that the mode uses."""
        return spec.changed(
            roles=tuple(self._used_roles(spec)), parallelism=spec.parallelism.changed(mode=self.mode)
        )

    def _used_roles(self, spec: HeteroInferenceSpec) -> Iterator[RoleSpec]:
        """Yields the roles that the mode uses.

        Mode FeedForward may add feed-forward ranks to the role of the GPU. Other modes remove the
        feed-forward ranks of every role.
        """
        feed_forward_roles = [role for role in spec.roles if role.feed_forward is not None]
        gpu_roles = [role for role in spec.roles if role.device is Device.GPU]
        if self.keeps_cpu_pods:
            yield from spec.roles
        elif self.mode is Mode.FEED_FORWARD:
            for role in feed_forward_roles or gpu_roles:
                yield role.changed(feed_forward=self.feed_forward or role.feed_forward)
        else:
            for role in gpu_roles if self.gpu_only else spec.roles:
                yield role.changed(feed_forward=None)


def read_chosen_mode(raw: Any) -> ChosenMode | None:
    """Returns the mode in a stored record, or None if this version cannot read the mode."""
    try:
        return ChosenMode.model_validate(raw, strict=False)
    except ValidationError:
        return None


def candidate_modes(spec: HeteroInferenceSpec) -> tuple[tuple[ChosenMode, ...], str]:
    """Returns the modes that the plan may choose for a spec without a mode, the simplest modes first.

    Returns:
        The modes, and the reason why FeedForward is not among them, or "".
    """
    gpu_roles = [role for role in spec.roles if role.device is Device.GPU]
    cpu_roles = [role for role in spec.roles if role.device is Device.CPU]
    has_feed_forward = any(role.feed_forward is not None for role in spec.roles)
    num_gpus = sum(role.num_ranks for role in gpu_roles)
    modes = []
    if gpu_roles and (cpu_roles or has_feed_forward):  # the GPUs alone may hold the model
        modes.append(ChosenMode(mode=Mode.PIPELINE, gpu_only=True))
        if num_gpus > 1:
            modes.append(ChosenMode(mode=Mode.TENSOR, gpu_only=True))
    feed_forward, why_no_feed_forward = None, ""
    if not has_feed_forward:
        feed_forward, why_no_feed_forward = _build_feed_forward(gpu_roles, cpu_roles)
    if has_feed_forward or feed_forward is not None:
        modes.append(ChosenMode(mode=Mode.FEED_FORWARD, feed_forward=feed_forward))
    # In mode FeedForward with CPU pods, these roles have the ranks with attention, and the pods of all other
    # roles compute experts and MLPs. Such pods can serve only one rank with attention.
    attention_roles = [
        role for role in spec.roles if role.device is Device.GPU or role.feed_forward is not None
    ]
    if sum(role.num_ranks for role in attention_roles) == 1 and len(attention_roles) < len(spec.roles):
        modes.append(ChosenMode(mode=Mode.FEED_FORWARD, keeps_cpu_pods=True))
    if cpu_roles or not modes:  # all roles hold layers
        modes.append(ChosenMode(mode=Mode.PIPELINE))
        if spec.world_size > 1:
            modes.append(ChosenMode(mode=Mode.TENSOR))
    return tuple(modes), why_no_feed_forward


def _build_feed_forward(
    gpu_roles: Sequence[RoleSpec], cpu_roles: Sequence[RoleSpec]
) -> tuple[FeedForwardSpec | None, str]:
    """Returns feed-forward ranks with the resources of the CPU roles, or None and the reason.

    There are at least as many ranks as the CPU roles have, and an equal number for each GPU.
    """
    pods = sum(role.pods for role in gpu_roles)
    if pods != 1:
        return None, f"needs all GPUs in one pod (the roles have {pods} GPU pods)"
    if not cpu_roles:
        return None, "needs CPUs and memory in the GPU's pod (no role offers any)"
    num_gpus = gpu_roles[0].ranks_per_pod
    ranks_per_gpu = -(-sum(role.num_ranks for role in cpu_roles) // num_gpus)  # rounded up
    ranks = ranks_per_gpu * num_gpus
    if num_gpus + ranks > MAX_RANKS_PER_POD:
        max_ranks = MAX_RANKS_PER_POD - num_gpus
        return None, f"supports at most {max_ranks} CPU ranks in the GPU's pod (got {ranks})"
    total = {"cpu": Fraction(0), "memory": Fraction(0)}
    for role in cpu_roles:
        for name in total:
            role_amount = _find_amount(role, name)
            if role_amount is None:
                return None, f"needs requests of {name} in role {role.name} (got none)"
            total[name] += role.pods * parse_quantity(role_amount)
    # Amounts are rounded down, so that the ranks never request more than the roles.
    cpu_millis = int(total["cpu"] * 1000 / ranks)
    memory_mebi = int(total["memory"] / ranks) // 2**20
    if cpu_millis < 1 or memory_mebi < 1:
        return (
            None,
            "needs at least 1m of cpu and 1Mi of memory for each CPU rank (the CPU roles request less)",
        )
    cpu = format_quantity(Fraction(cpu_millis, 1000))
    return FeedForwardSpec(ranks=ranks, cpu=cpu, memory=f"{memory_mebi}Mi"), ""


def _find_amount(role: RoleSpec, name: str) -> str | None:
    """Returns a role's request for a resource; without a request, the limit; without both, None."""
    resources = role.resources or Resources()
    requests, limits = resources.requests or {}, resources.limits or {}
    return requests.get(name, limits.get(name))


def infer_mode(spec: HeteroInferenceSpec, roles: Sequence[str], mode: Mode) -> ChosenMode | None:
    """Returns the candidate mode that a stored plan has, or None if no candidate matches.

    Args:
        roles: names of the roles of the plan's ranks.
        mode: mode of the plan.
    """
    candidates, _ = candidate_modes(spec)
    for candidate in candidates:
        used_roles = {role.name for role in candidate.apply_to(spec).roles}
        if candidate.mode is mode and used_roles == set(roles):
            return candidate
    return None
