"""The next cheaper, roomier and faster choice than a plan: each is planned, not guessed. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from heteroinfer_contract.plan import Device, Mode
from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.api import HeteroInferenceSpec, RoleSpec
from heteroinfer_operator.commands.account import sequences_at_once
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.planning.planner import Planned, make_plan
from heteroinfer_operator.planning.prediction import predict

_LEAST_MS: Final = 0.005
"""A layer that saves less shows as 0.00 ms."""
_FASTER: Final = 0.97
"""Of a step, at most, where another choice is called faster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """What another plan changes.

    Attributes:
        costs_nothing: whether a step takes no longer and no fewer sequences fit at once, as printed.
    """

    words: str
    costs_nothing: bool


def describe_choices(planned: Planned) -> tuple[str, ...]:
    """Returns the next cheaper, the next roomier and the next faster choice, a line each."""
    lines = []
    for words, other in _cheaper(planned):
        lines.append(f"cheaper: {words} {_compare(other, planned).words}")
    if (more := _roomier(planned)) is not None:
        lines.append(f"roomier: {more[0]} {_compare(more[1], planned).words}")
    if spare := _spare(planned):
        lines.append(f"cheaper: with one longest sequence at a time it needs {spare} less")
    for words, other in _faster(planned):
        lines.append(f"faster: {words} {_compare(other, planned).words}")
    plan = planned.plan
    on_cpus = [rank for rank in plan.ranks if rank.device is Device.CPU]
    if on_cpus and len(on_cpus) < len(plan.ranks):
        need = sum(rank.weight_bytes + rank.kv_cache_bytes for rank in on_cpus)
        layer_ms = on_cpus[0].predicted_step_s * 1e3 / max(on_cpus[0].num_layers, 1)
        if layer_ms >= _LEAST_MS:
            lines.append(
                f"faster: each layer that a GPU takes over from rank {on_cpus[0].rank} (CPU) saves "
                f"{layer_ms:.2f} ms a step; all layers on CPUs take {format_bytes(need)}"
            )
    return tuple(lines)


def describe_waste(planned: Planned) -> tuple[str, ...]:
    """Returns the pods and roles that give nothing, a line each, and how to see the other choices."""
    found = [(words, _compare(other, planned)) for words, other in _cheaper(planned)]
    lines = [f"cheaper: {words} {change.words}" for words, change in found if change.costs_nothing]
    return (*lines, "choices: --explain shows the next cheaper, roomier and faster plans")


def _compare(other: Planned, planned: Planned) -> _Difference:
    steps = [predict(each.plan, each.rates).step_s * 1e3 for each in (other, planned)]
    held = [sequences_at_once(each) for each in (other, planned)]
    length = planned.plan.engine.max_model_len
    step, step_now = (f"{step:.3g}" for step in steps)
    room, room_now = (f"{sequences:.1f}" for sequences in held)
    costs_nothing = float(step) <= float(step_now) and float(room) >= float(room_now)
    time = f"as long ({step} ms)" if step == step_now else f"{step} ms instead of {step_now}"
    as_many = room == room_now
    fits = f"as many sequences of {length} tokens fit at once ({room})"
    more = f"{room} sequences of {length} tokens fit at once instead of {room_now}"
    words = f"a step takes {time}, and {fits if as_many else more}"
    return _Difference(words=words, costs_nothing=costs_nothing)


def _cheaper(planned: Planned) -> Iterator[tuple[str, Planned]]:
    """Yields what does with a pod less, of each role."""
    spec = planned.request.spec
    for role in _free_roles(spec):
        if role.pods > 1:
            other = _again(planned, _with(spec, role, role.pods - 1))
            words = f"with a pod of role {role.name} less"
        elif len(spec.roles) > 1:
            other = _again(planned, _with(spec, role, 0))
            words = f"without role {role.name}"
        else:
            continue
        if other is not None:
            yield words, other


def _faster(planned: Planned) -> Iterator[tuple[str, Planned]]:
    """Yields what is faster with a pod more, of each role of GPUs."""
    spec = planned.request.spec
    step_s = predict(planned.plan, planned.rates).step_s
    for role in _free_roles(spec):
        if role.device is not Device.GPU:
            continue
        other = _again(planned, _with(spec, role, role.pods + 1))
        if other is not None and predict(other.plan, other.rates).step_s <= _FASTER * step_s:
            yield f"with a pod more of role {role.name}", other


def _free_roles(spec: HeteroInferenceSpec) -> Sequence[RoleSpec]:
    """Returns the roles whose pods may be more or fewer; in mode FeedForward a group has one pod."""
    return () if spec.parallelism.mode is Mode.FEED_FORWARD else spec.roles


def _with(spec: HeteroInferenceSpec, role: RoleSpec, pods: int) -> HeteroInferenceSpec:
    def changed(roles: Sequence[RoleSpec]) -> Iterator[RoleSpec]:
        for each in roles:
            if each.name != role.name:
                yield each
            elif pods:
                yield each.changed(pods=pods)

    return spec.changed(roles=tuple(changed(spec.roles)))


def _again(planned: Planned, spec: HeteroInferenceSpec) -> Planned | None:
    """Returns the plan of another spec, or None if there is none."""
    try:
        return make_plan(replace(planned.request, spec=spec), planned.inventory)
    except PlanError:
        return None


def _spare(planned: Planned) -> str:
    """Returns the memory beyond one longest sequence, by role, or ""."""
    kv = planned.sizes.kv
    spare: dict[str, int] = {}
    for rank in planned.plan.stage_ranks:
        least = kv.block_bytes(rank.first_layer, rank.end_layer) * kv.least_blocks
        left = rank.kv_cache_bytes - least
        spare[rank.role] = min(spare.get(rank.role, left), left)
    found = [f"{format_bytes(size)} a rank of role {role}" for role, size in spare.items() if size > 0]
    return ", ".join(found)


def _roomier(planned: Planned) -> tuple[str, Planned] | None:
    """Returns what holds more sequences with a layer less in the stage that bounds them, or None.

    Stages are filled for speed, so that a GPU may hold one longest sequence while CPUs have plenty.
    """
    plan, spec = planned.plan, planned.request.spec
    if planned.limiting_rank is None or spec.parallelism.mode is not Mode.PIPELINE:
        return None
    if sequences_at_once(planned) >= plan.engine.max_num_seqs:
        return None
    stages = [plan.stage(stage)[0] for stage in range(plan.pipeline_parallel_size)]
    free = [
        (budget.left_bytes(planned.sizes, rank.first_layer, rank.end_layer) or 0) - rank.kv_cache_bytes
        for budget, rank in zip(planned.budgets, stages, strict=True)
    ]
    tight, other = plan.ranks[planned.limiting_rank].stage, max(range(len(free)), key=free.__getitem__)
    if other == tight or stages[tight].num_layers == 1:
        return None
    layers = [rank.num_layers for rank in stages]
    layers[tight] -= 1
    layers[other] += 1
    found = _again(planned, _pinned(spec, layers, [rank.role for rank in stages]))
    if found is None or sequences_at_once(found) <= sequences_at_once(planned):
        return None
    return f"with a layer less in stage {tight} (role {stages[tight].role})", found


def _pinned(spec: HeteroInferenceSpec, layers: Sequence[int], roles: Sequence[str]) -> HeteroInferenceSpec:
    """Returns the spec with these layers by stage; each stage is of one role."""

    def own(name: str) -> tuple[int, ...]:
        return tuple(count for count, role in zip(layers, roles, strict=True) if role == name)

    pinned = tuple(role.changed(layers=own(role.name)) for role in spec.roles)
    return spec.changed(roles=pinned)
