"""`heteroinfer plan`: a resource's rank table, and whether its pods fit given nodes; no cluster is asked."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel, ConfigDict, JsonValue
from pydantic.alias_generators import to_camel

from heteroinfer_contract import names
from heteroinfer_contract.plan import Device, RankAssignment
from heteroinfer_contract.printable import format_bytes, printable
from heteroinfer_operator.api import HeteroInference
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.commands.account import (
    describe_bounds,
    describe_capacity,
    describe_memory,
    describe_model,
    describe_speed,
)
from heteroinfer_operator.commands.choices import describe_choices, describe_waste
from heteroinfer_operator.commands.model_to_plan import read_model
from heteroinfer_operator.commands.plan_nodes import HOW, GivenNodes, load_nodes
from heteroinfer_operator.commands.resource_file import load_resource
from heteroinfer_operator.errors import HeteroInferError, PlanError, PlanReason, Shortage
from heteroinfer_operator.local import calibration_file
from heteroinfer_operator.manifests.pod_resources import PodResources
from heteroinfer_operator.nodes.calibrations import Calibrations
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.placement import FreeNode
from heteroinfer_operator.nodes.priorities import preempting_priority
from heteroinfer_operator.planning import Capacity, GroupRequest, Planned, build_free_nodes, plan_group
from heteroinfer_operator.planning.prediction import overhead_s, predict
from heteroinfer_operator.quantity import parse_bytes
from heteroinfer_operator.reconcile import Allowed

_NO_CALIBRATION = "none"
_NODE_OF_OPTIONS = "(--gpus)"
"""The only node where --gpus says what there is."""
_NO_PRIORITIES: Final = (
    f"the file has no PriorityClasses, so that pods of lower priority count as obstacles. {HOW}"
)
_SHORT_OF: Final = frozenset(
    {PlanReason.INSUFFICIENT_CAPACITY, PlanReason.INSUFFICIENT_GPU, PlanReason.INSUFFICIENT_MEMORY}
)


class PlanExit(IntEnum):
    """Exit codes of `heteroinfer plan`, without 2, which argparse has for wrong options."""

    FITS = 0
    INVALID = 1
    """No plan takes the spec or the model, or a file cannot be read."""
    DOES_NOT_FIT = 3
    """Memory, GPUs or other capacity is missing."""
    REFUSED_BY_POLICY = 4
    """There is a plan, but the installation refuses an argument, annotation, image or path of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """What is found out about a file.

    Attributes:
        name: of the resource.
        planned: the plan, or None.
        calibrations: what was measured of the machines that are planned for.
        errors: why there is no plan.
        refused: each argument, annotation, image and path that every plan or the installation refuses.
    """

    name: str = ""
    planned: Planned | None = None
    calibrations: Calibrations = Calibrations()  # noqa: RUF009 - frozen
    errors: tuple[HeteroInferError, ...] = ()
    refused: tuple[HeteroInferError, ...] = ()

    @property
    def exit_code(self) -> PlanExit:
        """The first that holds: invalid, does not fit, refused, fits."""
        if self.errors:
            short = all(error.reason in _SHORT_OF for error in self.errors)
            return PlanExit.DOES_NOT_FIT if short else PlanExit.INVALID
        return PlanExit.REFUSED_BY_POLICY if self.refused else PlanExit.FITS


class ChartValues(BaseModel):
    """What an installation allows and gives, as the values of its chart have it."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel)

    allow_remote_code: bool = False
    allowed_arguments: tuple[str, ...] = ()
    allowed_annotations: tuple[str, ...] = ()
    pod_resources: dict[str, JsonValue] = {}
    allowed_worker_images: tuple[str, ...] = ()
    allowed_host_paths: tuple[str, ...] = ()
    allowed_service_accounts: tuple[str, ...] = ()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer plan`."""
    parser.add_argument(
        "-f", "--filename", required=True, metavar="FILE", help="a HeteroInference; - for stdin"
    )
    parser.add_argument(
        "--model-dir",
        type=Path,
        metavar="DIR",
        help="the model's folder, instead of the file's model.uri; needed where that is pvc://",
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="what `heteroinfer calibrate -o FILE` measured, of any machine; none: take defaults. "
        "Without it: this machine's own, if it was measured and no --nodes are given",
    )
    parser.add_argument("-o", "--output", choices=("table", "json", "yaml"), default="table")
    parser.add_argument(
        "--explain",
        action="store_true",
        help="also show the next cheaper, roomier and faster plans: with a pod less or more, or a layer less "
        "where memory is short",
    )
    parser.add_argument(
        "--nodes",
        metavar="FILE",
        help="nodes, pods and priority classes as `kubectl get nodes,pods,priorityclasses -A -o json` prints "
        "them; - for stdin: "
        "the pods of one more group must fit them",
    )
    parser.add_argument(
        "--gpus", type=_count, help="GPUs of the only node; as many as the roles ask for if not given"
    )
    parser.add_argument(
        "--gpu-memory", type=_size, help="memory of one GPU, such as 80Gi, for roles without deviceMemory"
    )
    parser.add_argument(
        "--chart-values",
        metavar="FILE",
        help="values of the chart as `helm get values RELEASE --all -o yaml` prints them, for what the "
        "installation allows, and the resources that it gives roles; default: the chart's own",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan, or why there is none, and all that is refused. Returns the exit code."""
    answer = _answer(arguments)
    sys.stdout.write(_render(answer, arguments.output, explain=arguments.explain))
    file = arguments.chart_values
    policy = "the chart's default values" if file is None else f"the values of {file}"
    by_policy = [error for error in answer.refused if error not in answer.errors]
    for what, errors in (("error", answer.errors), (f"refused by an operator with {policy}", by_policy)):
        for line in (line for error in errors for line in error.message.splitlines()):
            sys.stderr.write(f"{what}: {printable(line)}\n")
    return answer.exit_code


def _answer(arguments: argparse.Namespace) -> PlanAnswer:
    refused: tuple[PlanError, ...] = ()
    try:
        resource = load_resource(arguments.filename)
        values = _chart_values(arguments.chart_values)
        refused = tuple(_allowed(values).find_all_forbidden(resource.spec))
        given = PodResources.from_json(json.dumps(values.pod_resources))
        resource = resource.changed(spec=given.complete_roles(resource.spec))
        impossible = tuple(error for error in refused if error.reason == PlanReason.REFUSED_ARGUMENT)
        if impossible:
            return PlanAnswer(errors=impossible, refused=refused)
        calibrations = _calibrations(arguments)
        return PlanAnswer(
            name=resource.metadata.name,
            planned=_plan(resource, calibrations, arguments),
            calibrations=calibrations,
            refused=refused,
        )
    except HeteroInferError as error:
        return PlanAnswer(errors=(error,), refused=refused)


def _plan(resource: HeteroInference, calibrations: Calibrations, arguments: argparse.Namespace) -> Planned:
    profile, notes = read_model(resource, arguments.model_dir)
    request = GroupRequest(
        spec=resource.spec,
        profile=profile,
        served_name=resource.served_name,
        model_path=names.MODEL_MOUNT,
    )
    given = _given_nodes(arguments)
    classes = None if given is None else given.priority_classes
    capacity = Capacity(
        free_nodes=_node_of_options(resource, arguments) if given is None else given.free_nodes,
        calibrations=calibrations,
        resource=ResourceKey(namespace=resource.metadata.namespace, name=resource.metadata.name),
        priority=preempting_priority(resource.spec.scheduling.priority_class_name, classes),
    )
    try:
        planned = plan_group(request, capacity)
    except Shortage as shortage:
        if given is None or classes is not None:
            raise
        raise Shortage(f"{shortage.message}; {_NO_PRIORITIES}", reason=shortage.reason) from None
    missing = (planned.missing,) if planned.missing else ()
    return replace(planned, notes=(*planned.notes, *missing, *notes))


def _chart_values(file: str | None) -> ChartValues:
    """Returns the values of an installation's chart, or the chart's defaults."""
    try:
        stored = yaml.safe_load(Path(file).read_text()) if file is not None else None
        return ChartValues.model_validate({} if stored is None else stored)
    except OSError as error:
        raise HeteroInferError(f"--chart-values: {file}: {error.strerror}", reason="Usage") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise HeteroInferError(
            f"--chart-values: {file} holds no values of the chart ({' '.join(str(error).split())}). "
            "Create the file with `helm get values RELEASE --all -o yaml`",
            reason="Usage",
        ) from error


def _allowed(values: ChartValues) -> Allowed:
    return Allowed(
        remote_code=values.allow_remote_code,
        arguments=values.allowed_arguments,
        annotations=values.allowed_annotations,
        images=values.allowed_worker_images,
        host_paths=values.allowed_host_paths,
        service_accounts=values.allowed_service_accounts,
    )


def _calibrations(arguments: argparse.Namespace) -> Calibrations:
    """Returns what was measured of the machines that are planned for."""
    if arguments.calibration == _NO_CALIBRATION:
        return Calibrations(missing="--calibration none")
    if arguments.calibration is not None:
        return Calibrations(this_machine=calibration_file.read(Path(arguments.calibration)))
    if arguments.nodes is not None:
        return Calibrations(missing="give what was measured of such a node with --calibration FILE")
    own, missing = calibration_file.read_own(calibration_file.cache_folder())
    return Calibrations(this_machine=own, missing=missing)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a number of GPUs, 0 or more")
    return int(text)


def _size(text: str) -> int:
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size < 0:
        raise argparse.ArgumentTypeError(f"got {text}, expected a size of 0 or more")
    return size


def _given_nodes(arguments: argparse.Namespace) -> GivenNodes | None:
    """Returns the nodes of --nodes, or None without that option."""
    if arguments.nodes is None:
        return None
    if arguments.gpus is not None or arguments.gpu_memory is not None:
        raise HeteroInferError(
            "--nodes: got --gpus or --gpu-memory too, which say the same; leave them out", reason="Usage"
        )
    return load_nodes(arguments.nodes)


def _node_of_options(resource: HeteroInference, arguments: argparse.Namespace) -> list[FreeNode] | None:
    """Returns the node of --gpus and --gpu-memory, or None if no pods are placed."""
    gpus, memory_bytes = arguments.gpus, arguments.gpu_memory
    if gpus is None and memory_bytes is None:
        return None
    resources = {role.gpu_resource for role in resource.spec.roles if role.device is Device.GPU}
    count = sum(role.num_ranks for role in resource.spec.roles) if gpus is None else gpus
    size = (
        {} if memory_bytes is None else {f"{name}.memory": str(memory_bytes // 2**20) for name in resources}
    )
    labels = {**IMAGE_PLATFORM, **size}
    node = NodeView(name=_NODE_OF_OPTIONS, allocatable=dict.fromkeys(resources, float(count)), labels=labels)
    return build_free_nodes([node])


def _render(answer: PlanAnswer, output: str, *, explain: bool) -> str:
    planned = answer.planned
    if output == "table":
        if planned is None:
            return ""
        return describe_plan(planned, answer.calibrations, answer.name, explain=explain)
    value = {
        "exitCode": int(answer.exit_code),
        "outcome": answer.exit_code.name.lower().replace("_", " "),
        "errors": _problems(answer.errors),
        "refused": _problems(answer.refused),
        **({} if planned is None else _plan_fields(planned)),
        **({"choices": list(describe_choices(planned))} if explain and planned is not None else {}),
    }
    if output == "json":
        return json.dumps(value, indent=2) + "\n"
    return yaml.safe_dump(value, sort_keys=False)


def _problems(errors: Iterable[HeteroInferError]) -> list[dict[str, str]]:
    return [{"reason": error.reason, "message": error.message} for error in errors]


def _plan_fields(planned: Planned) -> dict[str, Any]:
    return {
        "hash": planned.plan.hash,
        "plan": json.loads(planned.plan.to_json()),
        "notes": list(planned.notes),
        "limitingRank": planned.limiting_rank,
        "nodes": {str(pod): node for pod, node in planned.node_assignment.nodes.items()},
        "predictedStepMs": _step_ms(planned),
        "rates": {rank.role: planned.rates[rank.rank].source for rank in planned.plan.ranks},
    }


_HEADINGS = ("RANK", "POD", "ROLE", "DEVICE", "STAGE", "LAYERS", "WEIGHTS", "KV CACHE", "STEP")


def describe_plan(planned: Planned, calibrations: Calibrations, name: str, *, explain: bool) -> str:
    """Returns a plan in words: who has what, where each byte is, how fast it is, and what else there is.

    Args:
        explain: whether other plans are shown that cost more than nothing.
    """
    plan, engine = planned.plan, planned.plan.engine
    rows = [_HEADINGS, *map(_row, plan.ranks)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    settings = {
        field.name: value
        for field in dataclasses.fields(engine)
        if (value := getattr(engine, field.name)) != () and field.name != "model"
    }
    head = (
        f"{name}: mode {plan.mode}, {plan.pipeline_parallel_size} stages of "
        f"{plan.tensor_parallel_size} ranks, {len(plan.pods)} pods, plan {plan.hash}"
    )
    step = (
        f"predicted decode step of one request: {predict(plan, planned.rates)}, of it "
        f"{overhead_s(plan) * 1e3:.1f} ms between steps; the range is that of the rates below"
    )
    every = "every rank: " + ", ".join(f"{key} {value}" for key, value in settings.items())
    all_lines = [
        head,
        *lines,
        *_placed(planned),
        describe_model(planned.request.profile, engine.extra_args),
        *describe_memory(planned),
        step,
        *describe_speed(planned),
        *([f"not measured: {calibrations.missing}"] if calibrations.missing else []),
        describe_capacity(planned),
        *describe_bounds(planned),
        *(describe_choices if explain else describe_waste)(planned),
        every,
        *(f"note: {note}" for note in planned.notes),
    ]
    return "".join(f"{printable(line)}\n" for line in all_lines)


def _row(rank: RankAssignment) -> tuple[str, ...]:
    return (
        str(rank.rank),
        str(rank.pod),
        rank.role,
        rank.device.value,
        str(rank.stage),
        f"{rank.num_layers} ({rank.first_layer}-{rank.end_layer - 1})",
        format_bytes(rank.weight_bytes),
        format_bytes(rank.kv_cache_bytes),
        f"{rank.predicted_step_s * 1e3:.2f} ms",
    )


def _step_ms(planned: Planned) -> dict[str, float]:
    step = predict(planned.plan, planned.rates)
    values = {"predicted": step.step_s, "least": step.least_s, "most": step.most_s}
    return {name: round(seconds * 1e3, 2) for name, seconds in values.items()}


def _placed(planned: Planned) -> list[str]:
    node_assignment = planned.node_assignment
    if set(node_assignment.nodes.values()) <= {_NODE_OF_OPTIONS}:
        return []
    within = (
        ""
        if node_assignment.domain is None
        else f", all with {node_assignment.domain[0]}={node_assignment.domain[1]}"
    )
    pods = ", ".join(f"pod {pod} on {node}" for pod, node in node_assignment.nodes.items())
    return [f"fits: {pods}{within}"]
