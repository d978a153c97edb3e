"""Renders the text of `heteroinfer plan`: verdict, table of ranks, details and choices. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from heteroinfer_contract.plan import Device, Plan, RankAssignment
from heteroinfer_contract.printable import format_bytes, format_layers, printable
from heteroinfer_operator.aligned_rows import align_rows
from heteroinfer_operator.api import RoleSpec
from heteroinfer_operator.commands.plan_choices import describe_choices, describe_waste
from heteroinfer_operator.commands.plan_details import describe_details, section
from heteroinfer_operator.commands.plan_figures import (
    Figures,
    describe_requests,
    name_rank,
    name_roles,
    roles_of_unknown_memory,
)
from heteroinfer_operator.commands.plan_words import INDENT, count, duration, spread, three_digits
from heteroinfer_operator.planning.mode_choice import ModeChoice, describe_load
from heteroinfer_operator.planning.planner import Planned
from heteroinfer_operator.planning.step_limit import time_between_tokens

_HEADINGS: Final = ("RANK", "ROLE", "DEVICE", "LAYERS", "MEMORY", "STEP")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownParts:
    """The optional parts of the text.

    Attributes:
        explain: whether details are shown.
        choices: whether other plans are shown.
        nodes: whether the table shows the node of each rank.
    """

    explain: bool = False
    choices: bool = False
    nodes: bool = False


def describe_plan(
    planned: Planned, name: str, shown_parts: ShownParts, *, not_measured: str = "", refusals: int = 0
) -> str:
    """Returns a plan as text: verdict and figures first, then a line for each rank.

    Args:
        not_measured: why the plan uses default rates, or "".
        refusals: number of settings that the installation refuses.
    """
    lines = describe_summary(planned, name, shown_parts, not_measured=not_measured, refusals=refusals)
    if shown_parts.explain:
        lines += describe_details(planned, Figures.of(planned), not_measured)
    if shown_parts.choices:
        lines += section("CHOICES", describe_choices(planned) or ("none of the choices gains 3 % or more",))
    options = {
        "--explain (bytes, rates, KV cache)": shown_parts.explain,
        "--choices (fewer pods, less memory, faster, more concurrency)": shown_parts.choices,
    }
    if hidden := [option for option, given in options.items() if not given]:
        lines += ["", f"More: {', '.join(hidden)}, -o yaml"]
    return "".join(f"{printable(line)}\n" for line in lines)


def describe_summary(
    planned: Planned,
    name: str,
    shown_parts: ShownParts = ShownParts(),
    *,
    not_measured: str = "",
    refusals: int = 0,
) -> list[str]:
    """Returns the verdict, the figures, the table of ranks and the notes of a plan as lines."""
    figures = describe_figures(planned, Figures.of(planned), not_measured)
    return [
        describe_verdict(planned, name, refusals),
        *(f"{INDENT}{line}" for line in align_rows(figures)),
        "",
        *_rank_table(planned, with_nodes=shown_parts.nodes),
        *describe_modes(planned.choice),
        *_notes(planned, shown_parts),
    ]


def describe_verdict(planned: Planned, name: str, refusals: int = 0) -> str:
    """Returns whether the group fits, and the pods that it needs."""
    unknown = roles_of_unknown_memory(planned)
    fits = f"{name} has a plan" if unknown else f"{name} fits"
    if refusals:
        fits += f", but the installation refuses {count(refusals, 'setting')} (see below)"
    verdict = f"{fits}: {describe_pods(planned.plan)}"
    if planned.choice is not None:
        verdict += ", chosen by the plan"
    if unknown:
        verdict += (
            f". Whether it fits is unknown: set {_memory_fields(planned, unknown)} of {name_roles(unknown)}"
        )
    return verdict


def _memory_fields(planned: Planned, roles: Sequence[str]) -> str:
    """Returns the fields by which the user sets the memory of roles, joined by "and"."""
    devices = {rank.device for stage in planned.budgets for rank in stage.ranks if rank.role in roles}
    fields = {Device.GPU: "deviceMemory", Device.CPU: "resources.limits.memory"}
    return " and ".join(field for device, field in fields.items() if device in devices)


def describe_pods(plan: Plan) -> str:
    """Returns the pods of a plan by device: "2 pods (1 CPU, 1 GPU), mode Pipeline"."""
    pods = plan.pods
    devices = Counter(pod.device.value for pod in pods)
    kinds = [", ".join(f"{number:,} {device}" for device, number in devices.items())]
    if len(plan.ranks) != len(pods):
        kinds.append(count(len(plan.ranks), "rank"))
    return f"{count(len(pods), 'pod')} ({', '.join(kinds)}), mode {plan.mode}"


def describe_modes(choice: ModeChoice | None) -> list[str]:
    """Returns a table of the modes that the plan compared, the chosen mode first; [] if the mode was given.

    The column TOTAL has the time in which a mode serves the whole load.
    """
    if choice is None:
        return []
    rows: list[tuple[str, ...]] = [("MODE", "TOTAL", "STEP", "FIRST TOKEN", "")]
    for number, option in enumerate(choice.options):
        figures, chosen = option.figures, "<- chosen" if number == 0 else ""
        cells: tuple[str, ...] = ("-",) * 3
        if figures is not None:
            times = (figures.total_s, figures.step.step_s, figures.first_token.step_s)
            cells = tuple(map(duration, times))
        rows.append((option.title, *cells, chosen))
    reasons = [f"{option.title}: {option.reason}" for option in choice.options if option.reason]
    lines = [line for reason in reasons for line in reason.splitlines()]
    heading = f"Modes, for {describe_load(choice.load)}:"
    return ["", heading, *align_rows(rows), *lines, *(f"gain: {text}" for text in choice.gains)]


def describe_figures(planned: Planned, figures: Figures, not_measured: str) -> list[tuple[str, str]]:
    """Returns the figures that a user compares, each with its limit."""
    step, slowest = figures.step, planned.plan.ranks[figures.slowest]
    share = f"{duration(slowest.predicted_step_s)} of it"
    speed = f"{spread(step)} per token, {three_digits(1 / step.step_s)} tokens/s for one request"
    rows = [("speed", f"{speed}. Limit: {name_rank(planned, figures.slowest)}, {share}")]
    if figures.short_requests > 1:
        load = f"{figures.short_requests:,} requests of {count(figures.short, 'token')}"
        rows.append(("", f"{three_digits(figures.tokens_per_s)} tokens/s for {load} at the same time"))
    limit = name_rank(planned, figures.slowest_for_prompt)
    first = f"{spread(figures.first_token)} after a prompt of {count(figures.prompt, 'token')}"
    rows += [
        ("first token", f"{first}. Limit: {limit}"),
        *_describe_time_between_tokens(planned),
        ("requests", describe_requests(planned, figures)),
    ]
    if not_measured:
        rows.append(("rates", f"defaults: {not_measured}"))
    domain = planned.node_assignment.domain
    if domain is not None:
        rows.append(("nodes", f"all with {domain[0]}={domain[1]}"))
    return rows


def _describe_time_between_tokens(planned: Planned) -> list[tuple[str, str]]:
    """Returns the time between tokens beside prompts, if engine.maxTimeBetweenTokens limits this time."""
    limit = planned.request.spec.engine.max_time_between_tokens
    if limit is None:
        return []
    steps = f"in steps of {count(planned.plan.engine.max_num_batched_tokens, 'token')}"
    return [
        (
            "between tokens",
            f"at most {spread(time_between_tokens(planned))} beside prompts, {steps}. Limit: {limit}",
        )
    ]


def _rank_table(planned: Planned, *, with_nodes: bool) -> list[str]:
    """Returns the table of ranks as lines, with a mark at the slowest ranks.

    If all ranks take equally long, no rank has the mark.
    """
    plan = planned.plan
    roles = {role.name: role for role in planned.request.spec.roles}
    nodes = planned.node_assignment.nodes if with_nodes else {}
    slowest = max(rank.predicted_step_s for rank in plan.ranks)
    all_equal = all(rank.predicted_step_s == slowest for rank in plan.ranks)
    rows = [(*_HEADINGS, *(["NODE"] if nodes else []), "")]
    for rank in plan.ranks:
        is_slowest = rank.predicted_step_s == slowest and not all_equal
        rows.append(
            (
                str(rank.rank),
                f"{rank.role} (feed-forward)" if rank.feed_forward is not None else rank.role,
                rank.device.value,
                f"{rank.num_layers} ({format_layers(rank.layers)})",
                _describe_memory(planned, rank, roles),
                duration(rank.predicted_step_s),
                *([nodes[rank.pod]] if nodes else []),
                "<- slowest" if is_slowest else "",
            )
        )
    return align_rows(rows)


def _describe_memory(planned: Planned, rank: RankAssignment, roles: Mapping[str, RoleSpec]) -> str:
    """Describes the bytes that a rank uses, the bytes that it may use, and the memory that the user set."""
    taken = rank.weight_bytes + rank.kv_cache_bytes + rank.ring_bytes
    role = roles[rank.role]
    if rank.feed_forward is not None:
        # feedForward.memory sets the memory of feed-forward ranks in the GPU's pod. For feed-forward ranks in
        # other pods, the resources of their CPU role set the memory.
        is_in_gpu_pod = rank.pod == planned.plan.ranks[0].pod
        written = _quote_memory(role, rank.device)
        if role.feed_forward is not None and is_in_gpu_pod:
            written = f" ({role.feed_forward.memory})"
        return f"{format_bytes(taken)}{written}"
    budget = next(each for each in planned.budgets[rank.stage].ranks if each.role == rank.role)
    if budget.budget is None:
        return format_bytes(taken)
    written = _quote_memory(role, rank.device)
    usable, used = format_bytes(budget.budget), format_bytes(taken)
    if usable.endswith(" GiB") and used.endswith(" GiB"):
        used = used.removesuffix(" GiB")  # both numbers share one unit
    return f"{used} of {usable}{written}"


def _quote_memory(role: RoleSpec, device: Device) -> str:
    """Returns the memory of a role as the user wrote it, in parentheses, or "".

    For CPUs, this is the memory limit, otherwise the memory request.
    """
    if device is Device.GPU:
        return f" ({role.device_memory})" if role.device_memory else ""
    for amounts in (role.resources.limits, role.resources.requests) if role.resources else ():
        if amounts and "memory" in amounts:
            return f" ({amounts['memory']}{' per pod' if role.ranks_per_pod > 1 else ''})"
    return ""


def _notes(planned: Planned, shown: ShownParts) -> list[str]:
    """Returns the notes of the plan as lines, and advice about pods that gain nothing."""
    notes = [f"note: {note}" for note in planned.notes]
    if not shown.choices:
        notes += [f"advice: {text}" for text in describe_waste(planned)]
    return ["", *notes] if notes else []
