"""Mode Auto: plans each mode that a spec could have, and chooses the fastest for its load. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from heteroinfer_contract.plan import Device, Mode
from heteroinfer_operator.api import ChosenMode, HeteroInferenceSpec, LoadSpec, RoleSpec, candidate_modes
from heteroinfer_operator.errors import PlanError, PlanReason, Shortage
from heteroinfer_operator.planning import planner
from heteroinfer_operator.planning.alternatives import THESE_RUN_IT
from heteroinfer_operator.planning.concurrency import requests_at_once
from heteroinfer_operator.planning.first_token import waits_elsewhere
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.mode_choice import LoadFigures, ModeChoice, ModeOption
from heteroinfer_operator.planning.planner import GroupRequest, Planned
from heteroinfer_operator.planning.prediction import Load, forecast, forecast_first_token
from heteroinfer_operator.quantity import parse_bytes

PlanMode: TypeAlias = Callable[[GroupRequest], Planned]
"""Plans a spec that has a mode; raises PlanError."""
_GIB: Final = 2**30
_GPU_SIZES_GIB: Final = (16, 24, 32, 40, 48, 80, 96, 141, 180)
"""Memory of GPUs on the market."""
_MORE_MEMORY: Final = (1.25, 1.5, 2, 3, 4, 6, 8)
_LEAST_GAIN: Final = 0.03
"""Share of the load's time that more memory must save to be reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TriedMode:
    """A mode with its plan, or with the reason why there is none."""

    chosen: ChosenMode
    planned: Planned | None = None
    figures: LoadFigures | None = None
    error: PlanError | None = None

    @property
    def is_known(self) -> bool:
        """Whether the memory of each rank is known, so that the plan knows that the mode fits."""
        budgets = () if self.planned is None else self.planned.budgets
        return bool(budgets) and all(rank.budget is not None for stage in budgets for rank in stage.ranks)


def make_plan(request: GroupRequest, inventory: Inventory) -> Planned:
    """Returns the plan of a group, and chooses the mode if the spec has none. Raises PlanError."""
    return plan_any_mode(request, lambda with_mode: planner.make_plan(with_mode, inventory))


def plan_any_mode(request: GroupRequest, plan: PlanMode) -> Planned:
    """Returns the plan of a spec with its mode, or with the fastest mode that fits.

    Raises:
        Shortage: no mode fits now.
        PlanError: no mode fits, even with more free capacity; the message has each mode's reason.
    """
    if request.spec.parallelism.mode is not None:
        return plan(request)
    load = load_of(request.spec)
    modes, no_feed_forward = candidate_modes(request.spec)
    tried = [_try(request, chosen, plan, load) for chosen in modes]
    found = [each for each in tried if each.planned is not None]
    if not found:
        raise _refusal(tried)
    best, compared = _best(found, request.spec)
    options = [_option(each) for each in (best, *(each for each in tried if each is not best))]
    if no_feed_forward:
        options.append(ModeOption(title=Mode.FEED_FORWARD.value, reason=no_feed_forward))
    if not compared:
        options[0] = replace(options[0], reason=_UNKNOWN)
    assert best.planned is not None
    gains = tuple(_gains(request, best, tried, load)) if compared else ()
    choice = ModeChoice(chosen=best.chosen, load=load, options=tuple(options), gains=gains)
    return replace(best.planned, choice=choice)


_UNKNOWN: Final = (
    "the memory of a rank is unknown, so the plan uses all that the resource lists. Set deviceMemory and "
    "resources to compare the modes"
)


def load_of(spec: HeteroInferenceSpec) -> LoadSpec:
    """Returns the load that modes are compared for."""
    return spec.planning.load or LoadSpec()


def figures_of(planned: Planned, load: LoadSpec) -> LoadFigures:
    """Predicts the times of a plan under a load.

    The prompts of all requests are computed one after the other. Their output then takes as many rounds as
    the KV cache and max_num_seqs require.
    """
    plan, sizes, rates = planned.plan, planned.sizes, planned.rates
    elsewhere = waits_elsewhere(plan, rates, planned.remote)
    longest = plan.engine.max_model_len
    prompt = min(load.prompt_tokens, max(longest - 1, 1))
    output = min(load.output_tokens, max(longest - prompt, 1))
    at_once = max(min(load.requests, requests_at_once(planned, prompt + output)), 1)
    decode = Load(requests=at_once, context=prompt + output // 2)
    step = forecast(plan, sizes, rates, decode, elsewhere)
    first = forecast_first_token(plan, sizes, rates, prompt, elsewhere)
    total_s = load.requests * (first.step_s + output * step.step_s / at_once)
    return LoadFigures(step=step, at_once=at_once, first_token=first, total_s=total_s)


def _try(request: GroupRequest, chosen: ChosenMode, plan: PlanMode, load: LoadSpec) -> _TriedMode:
    spec = chosen.apply_to(request.spec)
    try:
        _check_rules(spec)
        planned = plan(replace(request, spec=spec))
    except PlanError as error:
        return _TriedMode(chosen=chosen, error=error)
    return _TriedMode(chosen=chosen, planned=planned, figures=figures_of(planned, load))


def _check_rules(spec: HeteroInferenceSpec) -> None:
    """Raises PlanError if the API would refuse this spec if the user stated its mode."""
    problems = ((rule.field, rule.problem(spec)) for rule in HeteroInferenceSpec.rules)
    words = [f"{field}: {problem}" for field, problem in problems if problem is not None]
    if words:
        raise PlanError("\n".join(words), reason=PlanReason.UNSUPPORTED_PARALLELISM)


def _best(found: Sequence[_TriedMode], spec: HeteroInferenceSpec) -> tuple[_TriedMode, bool]:
    """Returns the mode to use, and whether the figures decided it."""
    known = [each for each in found if each.is_known]
    pool = known or found
    placed = [each for each in pool if each.planned and not each.planned.missing] or pool
    if known:
        return min(placed, key=lambda each: each.figures.total_s if each.figures else 0.0), True
    offered = any(role.feed_forward is not None for role in spec.roles)
    wanted = Mode.FEED_FORWARD if offered else Mode.PIPELINE
    as_listed = (each for each in placed if each.chosen.mode is wanted and not each.chosen.gpu_only)
    return next(as_listed, placed[0]), len(found) == 1


def _option(tried: _TriedMode) -> ModeOption:
    reason = "" if tried.error is None else "\n".join(_own_lines(tried.error))
    if tried.planned is not None and not tried.is_known:
        reason = "the memory of a rank is unknown"
    return ModeOption(title=tried.chosen.title, figures=tried.figures, reason=reason)


def _refusal(tried: Sequence[_TriedMode]) -> PlanError:
    """Returns the error of a spec without a plan: lines of all modes once, then each mode's own lines."""
    errors = [each.error for each in tried if each.error is not None]
    short = next((error for error in errors if isinstance(error, Shortage)), None)
    if short is not None or len(errors) == 1:
        return short or errors[0]
    by_mode = [(each.chosen.title, _own_lines(each.error)) for each in tried if each.error]
    common = [line for line in by_mode[0][1] if all(line in lines for _, lines in by_mode)]
    others = [
        line for error in errors for line in error.message.splitlines() if line not in _own_lines(error)
    ]
    own = [f"{title}: {line}" for title, lines in by_mode for line in lines if line not in common]
    reasons = [error.reason for error in errors]
    memory = PlanReason.INSUFFICIENT_MEMORY.value
    return PlanError(
        "\n".join([*common, *own, *others[:1]]), reason=memory if memory in reasons else reasons[0]
    )


def _own_lines(error: PlanError) -> list[str]:
    """Returns the lines of an error that are about its mode."""
    return [line for line in error.message.splitlines() if not line.startswith(THESE_RUN_IT)]


def _gains(
    request: GroupRequest, best: _TriedMode, tried: Sequence[_TriedMode], load: LoadSpec
) -> Iterator[str]:
    """Yields what memory that the user did not ask for would gain, one line each."""
    assert best.planned is not None and best.figures is not None  # noqa: PT018 - for mypy
    inventory, now_s = best.planned.inventory, best.figures.total_s
    lacking = [
        each.chosen
        for each in tried
        if each.error is not None and each.error.reason == PlanReason.INSUFFICIENT_MEMORY
        if each.chosen.mode is Mode.FEED_FORWARD
        or (each.chosen.gpu_only and each.chosen.mode is Mode.PIPELINE)
    ]
    for chosen in lacking:
        for words, spec in _with_more_memory(chosen.apply_to(request.spec), inventory):
            try:
                other = planner.make_plan(replace(request, spec=spec), inventory)
            except PlanError:
                continue
            total_s = figures_of(other, load).total_s
            if total_s <= (1 - _LEAST_GAIN) * now_s:
                yield f"with {words}, {chosen.title} would take {total_s:.3g} s instead of {now_s:.3g} s"
            break


def _with_more_memory(
    spec: HeteroInferenceSpec, inventory: Inventory
) -> Iterator[tuple[str, HeteroInferenceSpec]]:
    """Yields specs with larger and larger memory: of feed-forward ranks in their mode, otherwise of GPUs."""
    role = next((each for each in spec.roles if each.device is Device.GPU), spec.roles[0])
    own = role.feed_forward
    if own is not None:
        for factor in _MORE_MEMORY:
            size = f"{-(-int(parse_bytes(own.memory) * factor) // _GIB)}Gi"
            larger = role.changed(feed_forward=own.changed(memory=size))
            yield f"{size} of memory for each feed-forward rank", _replaced(spec, larger)
    elif role.device is Device.GPU:
        given = parse_bytes(role.device_memory) if role.device_memory else 0
        have = given or inventory.gpu_memory_bytes.get(role.name, 0)
        for gib in _GPU_SIZES_GIB:
            if gib * _GIB > have:
                yield f"GPUs of {gib}Gi", _replaced(spec, role.changed(device_memory=f"{gib}Gi"))


def _replaced(spec: HeteroInferenceSpec, role: RoleSpec) -> HeteroInferenceSpec:
    return spec.changed(roles=tuple(role if each.name == role.name else each for each in spec.roles))
