"""Describes smaller, faster and more concurrent plans for `heteroinfer plan --choices`. Pure.

The figures of each choice come from a plan. A choice is shown only if it gains at least 3 %, except a plan
with fewer pods.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from heteroinfer_contract.plan import Device, Mode
from heteroinfer_contract.printable import format_bytes
from heteroinfer_operator.api import HeteroInferenceSpec, RoleSpec
from heteroinfer_operator.commands.plan_figures import full_length_requests
from heteroinfer_operator.commands.plan_words import count, duration
from heteroinfer_operator.errors import PlanError
from heteroinfer_operator.planning.planner import Planned, make_plan
from heteroinfer_operator.planning.prediction import predict

MIN_GAIN: Final = 0.03
"""Smallest relative gain of a choice, in time, memory or concurrency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Difference:
    """How another plan differs from this plan.

    Attributes:
        text: the changes of step and concurrency.
        costs_nothing: whether, by the printed figures, steps take no longer and no fewer requests run at the
            same time.
    """

    text: str
    costs_nothing: bool


def describe_choices(planned: Planned) -> tuple[str, ...]:
    """Describes the plans with fewer pods, less memory, more concurrency and more speed, a line each."""
    fewer = (
        f"fewer pods: {text}, {_compare(other, planned).text}"
        for text, other in _plans_with_fewer_pods(planned)
    )
    faster = (
        f"faster: {text}, {_compare(other, planned).text}"
        for text, other in _plans_with_more_gpu_pods(planned)
    )
    return (
        *fewer,
        *_describe_spare_memory(planned),
        *_describe_more_concurrency(planned),
        *faster,
        *_describe_moved_layers(planned),
    )


def describe_waste(planned: Planned) -> tuple[str, ...]:
    """Describes the plans with fewer pods that are as fast and serve as many requests, a line each."""
    differences = [(text, _compare(other, planned)) for text, other in _plans_with_fewer_pods(planned)]
    return tuple(
        f"fewer pods: {text}, {difference.text}"
        for text, difference in differences
        if difference.costs_nothing
    )


def _compare(other: Planned, planned: Planned) -> _Difference:
    """Compares another plan with this plan: time of a step, and number of concurrent full-length requests."""
    step_s, step_s_now = predict(other.plan, other.rates).step_s, predict(planned.plan, planned.rates).step_s
    step, step_now = duration(step_s), duration(step_s_now)
    at_once, at_once_now = full_length_requests(other), full_length_requests(planned)
    # Compares the printed texts, so that a difference that the user cannot see does not count.
    same_time = step == step_now
    same_concurrency = f"{at_once:,.1f}" == f"{at_once_now:,.1f}"
    requests = f"requests of {count(planned.plan.engine.max_model_len, 'token')}"
    time = f"as long as now ({step})" if same_time else f"{step} instead of {step_now}"
    if same_concurrency:
        concurrency = f"as many {requests} run at the same time as now ({at_once:,.1f})"
    else:
        concurrency = f"{at_once:,.1f} {requests} run at the same time instead of {at_once_now:,.1f}"
    is_slower = step_s > step_s_now and not same_time
    has_less_concurrency = at_once < at_once_now and not same_concurrency
    return _Difference(
        text=f"a step takes {time}, and {concurrency}",
        costs_nothing=not is_slower and not has_less_concurrency,
    )


def _plans_with_fewer_pods(planned: Planned) -> Iterator[tuple[str, Planned]]:
    """Yields, for each role, a description of the change and the plan with one pod fewer."""
    spec = planned.request.spec
    for role in _resizable_roles(spec):
        if role.pods > 1:
            other = plan_for(planned, with_pods(spec, role, role.pods - 1))
            change = f"with {count(role.pods - 1, 'pod')} of role {role.name} instead of {role.pods}"
        elif len(spec.roles) > 1:
            other = plan_for(planned, with_pods(spec, role, 0))
            change = f"without role {role.name}"
        else:
            continue
        if other is not None:
            yield change, other


def _plans_with_more_gpu_pods(planned: Planned) -> Iterator[tuple[str, Planned]]:
    """Yields, for each GPU role, a description and the plan with one more pod, if this plan is faster."""
    spec = planned.request.spec
    step_s = predict(planned.plan, planned.rates).step_s
    for role in _resizable_roles(spec):
        if role.device is not Device.GPU:
            continue
        other = plan_for(planned, with_pods(spec, role, role.pods + 1))
        if other is not None and predict(other.plan, other.rates).step_s <= (1 - MIN_GAIN) * step_s:
            yield f"with {role.pods + 1} pods of role {role.name} instead of {role.pods}", other


def _resizable_roles(spec: HeteroInferenceSpec) -> Sequence[RoleSpec]:
    """Returns the roles whose number of pods may change.

    None in mode FeedForward, for which `--choices` compares no numbers of pods.
    """
    return () if spec.parallelism.mode is Mode.FEED_FORWARD else spec.roles


def with_pods(spec: HeteroInferenceSpec, role: RoleSpec, pods: int) -> HeteroInferenceSpec:
    """Returns the spec with this number of pods of a role; with 0 the role is removed."""

    def changed_roles(roles: Sequence[RoleSpec]) -> Iterator[RoleSpec]:
        """Yields the roles with another number of pods of `role`; without `role` if the number is 0."""
        for each in roles:
            if each.name != role.name:
                yield each
            elif pods:
                yield each.changed(pods=pods)

    return spec.changed(roles=tuple(changed_roles(spec.roles)))


def plan_for(planned: Planned, spec: HeteroInferenceSpec) -> Planned | None:
    """Plans another spec for the same model and nodes. Returns None if the spec has no plan."""
    try:
        return make_plan(replace(planned.request, spec=spec), planned.inventory)
    except PlanError:
        return None


def _describe_spare_memory(planned: Planned) -> Iterator[str]:
    """Yields a line for each role whose ranks all have more memory than one full-length request needs.

    The rank of the role with the least spare memory decides. There is no line if its spare memory is less
    than MIN_GAIN of the memory that the rank uses.
    """
    kv = planned.sizes.kv
    spare_and_used: dict[str, tuple[int, int]] = {}
    for rank in planned.plan.stage_ranks:
        request_bytes = kv.block_bytes(rank.first_layer, rank.end_layer) * kv.min_blocks
        of_rank = (rank.kv_cache_bytes - request_bytes, rank.kv_cache_bytes + rank.weight_bytes)
        # `min` compares the spare bytes first.
        spare_and_used[rank.role] = min(spare_and_used.get(rank.role, of_rank), of_rank)
    for role, (spare_bytes, used_bytes) in spare_and_used.items():
        if spare_bytes >= MIN_GAIN * used_bytes:
            yield (
                "save memory: if you serve one full-length request at a time, each rank of role "
                f"{role} needs {format_bytes(spare_bytes)} less"
            )


def _describe_moved_layers(planned: Planned) -> Iterator[str]:
    """Yields a line with the time that each layer saves if the user moves it from a CPU role to a GPU.

    The line is about the role of the first CPU rank. There is no line if that rank takes less than MIN_GAIN
    of the step, or if all ranks have the same kind of device.
    """
    plan = planned.plan
    cpu_ranks = [rank for rank in plan.ranks if rank.device is Device.CPU]
    if not cpu_ranks or len(cpu_ranks) == len(plan.ranks):
        return
    step_s = predict(plan, planned.rates).step_s
    first_rank = cpu_ranks[0]
    layer_s = first_rank.predicted_step_s / max(first_rank.num_layers, 1)
    if first_rank.predicted_step_s >= MIN_GAIN * step_s:
        bytes_on_cpus = sum(rank.weight_bytes + rank.kv_cache_bytes for rank in cpu_ranks)
        yield (
            f"faster: each layer that you move from role {first_rank.role} to a GPU saves "
            f"{duration(layer_s)} per step. The weights and the KV cache of all CPU ranks take "
            f"{format_bytes(bytes_on_cpus)}"
        )


def _describe_more_concurrency(planned: Planned) -> Iterator[str]:
    """Yields a line for a plan in which the stage that limits concurrency gives one layer to another stage.

    The planner fills GPU stages with layers for speed. A GPU may then have memory for the KV cache of only
    one full-length request, while CPUs have more free memory.
    """
    plan, spec = planned.plan, planned.request.spec
    if planned.limiting_rank is None or spec.parallelism.mode is not Mode.PIPELINE:
        return
    if full_length_requests(planned) >= plan.engine.max_num_seqs:  # the scheduler is the limit, not memory
        return
    first_ranks = [plan.stage(stage)[0] for stage in range(plan.pipeline_parallel_size)]  # one per stage
    free_bytes = [
        (budget.left_bytes(planned.sizes, rank.first_layer, rank.end_layer) or 0) - rank.kv_cache_bytes
        for budget, rank in zip(planned.budgets, first_ranks, strict=True)
    ]
    giver = plan.ranks[planned.limiting_rank].stage  # gives one layer to the stage with the most free memory
    receiver = max(range(len(first_ranks)), key=lambda stage: free_bytes[stage])
    if receiver == giver or first_ranks[giver].num_layers == 1:
        return
    layers = [rank.num_layers for rank in first_ranks]
    layers[giver] -= 1
    layers[receiver] += 1
    roles = [rank.role for rank in first_ranks]
    other = plan_for(planned, _with_layers(spec, layers, roles))
    min_requests = (1 + MIN_GAIN) * full_length_requests(planned)
    if other is None or full_length_requests(other) < min_requests:
        return
    yield (
        f"more concurrency: with one layer moved from stage {giver} (role {roles[giver]}) to "
        f"stage {receiver} (role {roles[receiver]}), {_compare(other, planned).text}"
    )


def _with_layers(
    spec: HeteroInferenceSpec, layers: Sequence[int], roles: Sequence[str]
) -> HeteroInferenceSpec:
    """Returns the spec with fixed numbers of layers.

    Args:
        layers: number of layers of each stage.
        roles: name of the role of each stage.
    """

    def layers_of_role(name: str) -> tuple[int, ...]:
        return tuple(number for number, role in zip(layers, roles, strict=True) if role == name)

    pinned = tuple(role.changed(layers=layers_of_role(role.name)) for role in spec.roles)
    return spec.changed(roles=pinned)
