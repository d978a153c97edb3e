"""Mode Auto: plans each mode that a spec could have, and chooses the fastest for its load. Pure."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Final, TypeAlias

from heteroinfer_contract.plan import Device, Mode
from heteroinfer_operator.api import ChosenMode, HeteroInferenceSpec, LoadSpec, RoleSpec, candidate_modes
from heteroinfer_operator.errors import PlanError, PlanReason, Shortage
from heteroinfer_operator.planning.alternatives import ALTERNATIVES
from heteroinfer_operator.planning.concurrency import concurrent_requests
from heteroinfer_operator.planning.first_token import build_feed_forward_wait
from heteroinfer_operator.planning.inventory import Inventory
from heteroinfer_operator.planning.mode_choice import LoadFigures, ModeChoice, ModeOption
from heteroinfer_operator.planning.planner import GroupRequest, Planned
from heteroinfer_operator.planning.prediction import StepLoad, forecast, forecast_first_token
from heteroinfer_operator.planning.step_limit import exceeding_s, plan_within_limit
from heteroinfer_operator.quantity import parse_bytes

PlanMode: TypeAlias = Callable[[GroupRequest], Planned]
"""Plans a spec that has a mode; raises PlanError."""
_GIB: Final = 2**30
_GPU_SIZES_GIB: Final = (16, 24, 32, 40, 48, 80, 96, 141, 180)
"""Memory sizes of GPUs on the market, in GiB."""
_MEMORY_FACTORS: Final = (1.25, 1.5, 2, 3, 4, 6, 8)
"""Sizes of a feed-forward rank's memory that are tried, relative to the user's size."""
_MIN_REPORTED_GAIN: Final = 0.03
"""Smallest part of the load's time that more memory must save, so that the plan reports it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _TriedMode:
    """A mode with its plan, or with the error that prevented a plan."""

    chosen: ChosenMode
    planned: Planned | None = None
    figures: LoadFigures | None = None
    error: PlanError | None = None

    @property
    def knows_all_memory(self) -> bool:
        """Whether the memory of every rank is known. Otherwise a plan does not prove that the mode fits."""
        if self.planned is None:
            return False
        memories = [rank.budget for stage in self.planned.budgets for rank in stage.ranks]
        if self.planned.remote is not None:
            memories += [rank_set.memory_bytes for rank_set in self.planned.remote.sets]
        return None not in memories


def make_plan(request: GroupRequest, inventory: Inventory) -> Planned:
    """Returns the plan of a group, and chooses the mode if the spec has none. Raises PlanError."""
    return plan_any_mode(request, lambda with_mode: plan_within_limit(with_mode, inventory))


def plan_any_mode(request: GroupRequest, plan: PlanMode) -> Planned:
    """Returns the plan of a spec with its mode, or with the fastest mode that fits.

    Raises:
        Shortage: no mode fits now.
        PlanError: no mode fits, even with more free capacity; the message has each mode's reason.
    """
    if request.spec.parallelism.mode is not None:
        return plan(request)
    load = request.spec.planning.chosen_load
    modes, why_no_feed_forward = candidate_modes(request.spec)
    tried_modes = [_try_mode(request, chosen, plan, load) for chosen in modes]
    fitting_modes = [tried for tried in tried_modes if tried.planned is not None]
    if not fitting_modes:
        raise _choose_error(tried_modes)
    best, is_certain = _choose_best(fitting_modes, request.spec)
    other_modes = [tried for tried in tried_modes if tried is not best]
    options = [_build_option(each) for each in (best, *other_modes)]
    if why_no_feed_forward:
        options.append(ModeOption(title=Mode.FEED_FORWARD.value, reason=why_no_feed_forward))
    if not is_certain:
        options[0] = replace(options[0], reason=_MEMORY_UNKNOWN)
    assert best.planned is not None
    gains = tuple(_memory_gains(request, best, tried_modes, load)) if is_certain else ()
    choice = ModeChoice(chosen=best.chosen, load=load, options=tuple(options), gains=gains)
    return replace(best.planned, choice=choice)


_MEMORY_UNKNOWN: Final = (
    "the memory of a rank is unknown, so the planner cannot compare the modes and uses all devices of the "
    "resource. Set deviceMemory and resources in each role"
)


def predict_load(planned: Planned, load: LoadSpec) -> LoadFigures:
    """Predicts the times of a plan under a load.

    The prompts of all requests are computed one after the other. Then the requests generate their output in
    rounds: each round has as many requests as the KV cache and max_num_seqs allow.
    """
    plan, sizes, rates = planned.plan, planned.sizes, planned.rates
    feed_forward_wait = build_feed_forward_wait(plan, sizes, rates, planned.remote)
    longest = plan.engine.max_model_len
    prompt = min(load.prompt_tokens, max(longest - 1, 1))  # leaves at least one token for the output
    output = min(load.output_tokens, max(longest - prompt, 1))
    num_concurrent = concurrent_requests(planned, load)
    # On average, a request has half of its output when a step computes its next token.
    decode = StepLoad(requests=num_concurrent, context=prompt + output // 2)
    step = forecast(plan, sizes, rates, decode, feed_forward_wait)
    first = forecast_first_token(plan, sizes, rates, prompt, feed_forward_wait)
    total_s = load.requests * (first.step_s + output * step.step_s / num_concurrent)
    return LoadFigures(step=step, num_concurrent=num_concurrent, first_token=first, total_s=total_s)


def _try_mode(request: GroupRequest, chosen: ChosenMode, plan: PlanMode, load: LoadSpec) -> _TriedMode:
    """Plans a spec with this mode. Returns the plan with predicted times, or the error."""
    spec = chosen.apply_to(request.spec)
    try:
        _check_rules(spec)
        planned = plan(replace(request, spec=spec))
    except PlanError as error:
        return _TriedMode(chosen=chosen, error=error)
    return _TriedMode(chosen=chosen, planned=planned, figures=predict_load(planned, load))


def _check_rules(spec: HeteroInferenceSpec) -> None:
    """Raises PlanError if the API would refuse the spec with its mode.

    The API has checked the spec only without a mode: the planner has added the mode.
    """
    problems = ((rule.field, rule.problem(spec)) for rule in HeteroInferenceSpec.rules)
    lines = [f"{field}: {problem}" for field, problem in problems if problem is not None]
    if lines:
        raise PlanError("\n".join(lines), reason=PlanReason.UNSUPPORTED_PARALLELISM)


def _choose_best(fitting_modes: Sequence[_TriedMode], spec: HeteroInferenceSpec) -> tuple[_TriedMode, bool]:
    """Returns the mode to use, and whether the choice is certain.

    Modes with known memory come first, then modes whose pods have free capacity now. Among modes with known
    memory, this function chooses the fastest mode that keeps `engine.maxTimeBetweenTokens`, or, if no mode
    keeps this limit, the mode with the least time between tokens. If no mode's memory is known, the choice
    follows from the roles. In that case the choice is certain only if a single mode fits.
    """
    with_known_memory = [fitting for fitting in fitting_modes if fitting.knows_all_memory]
    candidates = with_known_memory or fitting_modes
    with_capacity = [each for each in candidates if each.planned and not each.planned.missing] or candidates
    if with_known_memory:
        return min(with_capacity, key=_excess_and_time), True
    has_feed_forward_role = any(role.feed_forward is not None for role in spec.roles)
    preferred_mode = Mode.FEED_FORWARD if has_feed_forward_role else Mode.PIPELINE
    preferred = [
        each for each in with_capacity if each.chosen.mode is preferred_mode and not each.chosen.gpu_only
    ]
    return (preferred or with_capacity)[0], len(fitting_modes) == 1


def _excess_and_time(tried: _TriedMode) -> tuple[float, float]:
    """Returns the sort key of a mode; the mode with the smallest key is chosen.

    The key is the time between tokens if this time exceeds its limit (otherwise 0), then the time of the
    load.
    """
    assert tried.planned is not None and tried.figures is not None  # noqa: PT018 - for mypy
    return exceeding_s(tried.planned), tried.figures.total_s


def _build_option(tried: _TriedMode) -> ModeOption:
    """Returns a tried mode as an entry of the choice that users see."""
    reason = "" if tried.error is None else "\n".join(_lines_of_mode(tried.error))
    if tried.planned is not None and not tried.knows_all_memory:
        reason = (
            "the memory of a rank is unknown, so the times are not compared. Set deviceMemory (GPU) or "
            "resources.limits.memory (CPU) in each role"
        )
    return ModeOption(title=tried.chosen.title, figures=tried.figures, reason=reason)


def _choose_error(tried: Sequence[_TriedMode]) -> PlanError:
    """Returns the error of a spec for which no mode has a plan.

    A Shortage is returned first, because that mode will fit when capacity becomes free. A single error is
    returned unchanged. Otherwise the message has the lines that all modes share, then the other lines of each
    mode, then the line with alternatives.
    """
    errors = [each.error for each in tried if each.error is not None]
    shortage = next((error for error in errors if isinstance(error, Shortage)), None)
    if shortage is not None or len(errors) == 1:
        return shortage or errors[0]
    by_mode = [(each.chosen.title, _lines_of_mode(each.error)) for each in tried if each.error]
    common_lines = [line for line in by_mode[0][1] if all(line in lines for _, lines in by_mode)]
    alternative_lines = [
        line for error in errors for line in error.message.splitlines() if line not in _lines_of_mode(error)
    ]
    mode_lines = [
        f"{title}: {line}" for title, lines in by_mode for line in lines if line not in common_lines
    ]
    reasons = [error.reason for error in errors]
    memory = PlanReason.INSUFFICIENT_MEMORY.value  # comes first, because users can add memory
    return PlanError(
        "\n".join([*common_lines, *mode_lines, *alternative_lines[:1]]),
        reason=memory if memory in reasons else reasons[0],
    )


def _lines_of_mode(error: PlanError) -> list[str]:
    """Returns the lines of an error without the line of alternatives, which does not depend on the mode."""
    return [line for line in error.message.splitlines() if not line.startswith(ALTERNATIVES)]


def _memory_gains(
    request: GroupRequest, best: _TriedMode, tried: Sequence[_TriedMode], load: LoadSpec
) -> Iterator[str]:
    """Yields a line for each mode that would fit with more memory and be faster than the chosen mode.

    Considers only FeedForward, and Pipeline with the GPUs only, if they failed for lack of memory. The line
    has the smallest memory size with which the mode fits.
    """
    assert best.planned is not None and best.figures is not None  # noqa: PT018 - for mypy
    inventory, chosen_s = best.planned.inventory, best.figures.total_s
    modes_that_lack_memory = [
        each.chosen
        for each in tried
        if each.error is not None and each.error.reason == PlanReason.INSUFFICIENT_MEMORY
        if each.chosen.mode is Mode.FEED_FORWARD
        or (each.chosen.gpu_only and each.chosen.mode is Mode.PIPELINE)
    ]
    for chosen in modes_that_lack_memory:
        for memory, spec in _with_more_memory(chosen.apply_to(request.spec), inventory):
            try:
                planned = plan_within_limit(replace(request, spec=spec), inventory)
            except PlanError:
                continue
            total_s = predict_load(planned, load).total_s
            if total_s <= (1 - _MIN_REPORTED_GAIN) * chosen_s and not exceeding_s(planned):
                yield f"with {memory}, {chosen.title} would take {total_s:.3g} s instead of {chosen_s:.3g} s"
            break  # only the smallest memory that fits is reported


def _with_more_memory(
    spec: HeteroInferenceSpec, inventory: Inventory
) -> Iterator[tuple[str, HeteroInferenceSpec]]:
    """Yields descriptions and specs with larger and larger memory of the first GPU role.

    In mode FeedForward the memory of the role's feed-forward ranks grows, in other modes the memory of its
    GPUs.
    """
    role = next((each for each in spec.roles if each.device is Device.GPU), spec.roles[0])
    feed_forward = role.feed_forward
    if feed_forward is not None:
        for factor in _MEMORY_FACTORS:
            size = f"{ceil(int(parse_bytes(feed_forward.memory) * factor) / _GIB)}Gi"
            larger = role.changed(feed_forward=feed_forward.changed(memory=size))
            yield f"{size} of memory for each feed-forward rank", _with_role(spec, larger)
    elif role.device is Device.GPU:
        set_bytes = parse_bytes(role.device_memory) if role.device_memory else 0
        current_bytes = set_bytes or inventory.gpu_memory_bytes.get(role.name, 0)
        for gib in _GPU_SIZES_GIB:
            if gib * _GIB > current_bytes:
                yield f"GPUs of {gib}Gi", _with_role(spec, role.changed(device_memory=f"{gib}Gi"))


def _with_role(spec: HeteroInferenceSpec, role: RoleSpec) -> HeteroInferenceSpec:
    """Returns the spec with this role in place of the role of the same name."""
    return spec.changed(roles=tuple(role if each.name == role.name else each for each in spec.roles))
