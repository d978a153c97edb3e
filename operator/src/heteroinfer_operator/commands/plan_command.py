"""`heteroinfer plan`: prints whether a resource fits, how fast it is, and its ranks, without a cluster."""

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final

import yaml

from heteroinfer_contract import names
from heteroinfer_contract.plan import Device
from heteroinfer_contract.printable import printable
from heteroinfer_operator.api import HeteroInference
from heteroinfer_operator.cluster import ResourceKey
from heteroinfer_operator.commands.plan_choices import describe_choices
from heteroinfer_operator.commands.plan_model import read_model
from heteroinfer_operator.commands.plan_nodes import HOW_TO_CREATE, GivenNodes, load_nodes
from heteroinfer_operator.commands.plan_options import (
    add_calibration,
    add_model_dir,
    add_network,
    gpu_count,
    memory_size,
    read_calibrations,
)
from heteroinfer_operator.commands.plan_policy import find_refused, read_chart_values
from heteroinfer_operator.commands.plan_text import ShownParts, describe_plan
from heteroinfer_operator.commands.resource_file import load_resource
from heteroinfer_operator.errors import HeteroInferError, PlanError, PlanReason, Shortage
from heteroinfer_operator.manifests.pod_resources import PodResources
from heteroinfer_operator.nodes.calibrations import Calibrations
from heteroinfer_operator.nodes.node_platform import IMAGE_PLATFORM
from heteroinfer_operator.nodes.node_view import NodeView
from heteroinfer_operator.nodes.placement import FreeNode
from heteroinfer_operator.nodes.priorities import preempting_priority
from heteroinfer_operator.planning import Capacity, GroupRequest, Planned, build_free_nodes, plan_group
from heteroinfer_operator.planning.mode_choice import ModeChoice, ModeOption
from heteroinfer_operator.planning.predicted_plan import describe_networks
from heteroinfer_operator.planning.prediction import Prediction, predict
from heteroinfer_operator.planning.step_limit import time_between_tokens

_NODE_OF_OPTIONS = "(--gpus)"
"""Name of the only node, if the options --gpus or --gpu-memory describe the node."""
_NO_PRIORITIES: Final = (
    "--nodes: the file has no PriorityClasses, so the plan assumes that the scheduler preempts no pod. "
    f"{HOW_TO_CREATE}"
)
_SHORTAGES: Final = frozenset(
    {PlanReason.INSUFFICIENT_CAPACITY, PlanReason.INSUFFICIENT_GPU, PlanReason.INSUFFICIENT_MEMORY}
)


class PlanExit(IntEnum):
    """Exit codes of `heteroinfer plan`; argparse exits with 2 on wrong options."""

    FITS = 0
    INVALID = 1
    """The spec or the model cannot be planned, or a file cannot be read."""
    DOES_NOT_FIT = 3
    """Memory, GPUs or other capacity is missing."""
    REFUSED_BY_POLICY = 4
    """There is a plan, but the installation refuses an argument, annotation, image or host path."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """The result of planning a file.

    Attributes:
        name: name of the resource, "" until the file is read.
        planned: the plan, or None.
        calibrations: measurements of the machines that are planned for.
        errors: errors that prevent a plan.
        refused: settings that every plan or the installation refuses, such as arguments and images.
    """

    name: str = ""
    planned: Planned | None = None
    calibrations: Calibrations = Calibrations()  # noqa: RUF009 - frozen
    errors: tuple[HeteroInferError, ...] = ()
    refused: tuple[HeteroInferError, ...] = ()

    @property
    def exit_code(self) -> PlanExit:
        """The first exit code that applies, in the order invalid, does not fit, refused, fits."""
        if self.errors:
            only_shortages = all(error.reason in _SHORTAGES for error in self.errors)
            return PlanExit.DOES_NOT_FIT if only_shortages else PlanExit.INVALID
        return PlanExit.REFUSED_BY_POLICY if self.refused else PlanExit.FITS

    @property
    def refused_by_policy(self) -> tuple[HeteroInferError, ...]:
        """The settings that the installation refuses although they do not prevent a plan."""
        return tuple(error for error in self.refused if error not in self.errors)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer plan`."""
    parser.add_argument(
        "-f", "--filename", required=True, metavar="FILE", help="file with a HeteroInference; - reads stdin"
    )
    add_model_dir(parser, "the file's model.uri")
    add_calibration(parser, "the measurements of this machine, if there are any and --nodes is not given")
    add_network(parser)
    parser.add_argument(
        "-o", "--output", choices=("table", "json", "yaml"), default="table", help="format; default: table"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="also show bytes, KV cache, predicted times, rates and settings",
    )
    parser.add_argument(
        "--choices",
        action="store_true",
        help="also show plans with fewer pods, and changes that save memory, save time or serve more "
        "requests (each by at least 3 %%)",
    )
    parser.add_argument(
        "--nodes",
        metavar="FILE",
        help="output of `kubectl get nodes,pods,priorityclasses -A -o json`; - reads stdin. "
        "The pods of one more group must fit these nodes",
    )
    parser.add_argument(
        "--gpus",
        type=gpu_count,
        metavar="N",
        help="check the plan against one node with N GPUs; default with --gpu-memory: as many GPUs as the "
        "group has ranks",
    )
    parser.add_argument(
        "--gpu-memory",
        type=memory_size,
        metavar="SIZE",
        help="memory of one GPU, such as 80Gi, for roles without deviceMemory",
    )
    parser.add_argument(
        "--chart-values",
        metavar="FILE",
        help="output of `helm get values RELEASE --all -o yaml`, for the installation's policy and the "
        "default resources of roles; default: the chart's own values",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan, or the errors that prevent it, and every refused setting. Returns the exit code."""
    answer = _plan_file(arguments)
    sys.stdout.write(_render(answer, arguments))
    file = arguments.chart_values
    policy = "the chart's default values" if file is None else f"the values of {file}"
    does_not_fit = answer.exit_code is PlanExit.DOES_NOT_FIT and answer.name
    _print_errors(f"error: {answer.name} does not fit" if does_not_fit else "error", answer.errors)
    _print_errors(f"refused by an operator with {policy}", answer.refused_by_policy)
    return answer.exit_code


def _print_errors(prefix: str, errors: Iterable[HeteroInferError]) -> None:
    """Prints each line of the errors to stderr, after the prefix."""
    for error in errors:
        for line in error.message.splitlines():
            sys.stderr.write(f"{printable(f'{prefix}: {line}')}\n")


def _plan_file(arguments: argparse.Namespace) -> PlanAnswer:
    """Reads the file and plans the resource. Errors are a part of the answer.

    After an error, the answer has `name` and `refused` as far as they are known by then.
    """
    refused: tuple[PlanError, ...] = ()
    name = ""
    try:
        resource = load_resource(arguments.filename)
        name = resource.metadata.name
        values = read_chart_values(arguments.chart_values)
        refused = tuple(find_refused(values, resource.spec))
        pod_resources = PodResources.from_json(json.dumps(values.pod_resources))
        resource = resource.changed(spec=pod_resources.complete_roles(resource.spec))
        # No plan may have these arguments. All other refused settings depend on the installation.
        always_refused = tuple(error for error in refused if error.reason == PlanReason.REFUSED_ARGUMENT)
        if always_refused:
            return PlanAnswer(name=name, errors=always_refused, refused=refused)
        calibrations = read_calibrations(
            arguments.calibration,
            other_machines=arguments.nodes is not None,
            network=arguments.network,
        )
        planned = _plan(resource, calibrations, arguments)
        return PlanAnswer(name=name, planned=planned, calibrations=calibrations, refused=refused)
    except HeteroInferError as error:
        return PlanAnswer(name=name, errors=(error,), refused=refused)


def _plan(resource: HeteroInference, calibrations: Calibrations, arguments: argparse.Namespace) -> Planned:
    """Plans the resource for the nodes that the options describe; raises HeteroInferError.

    If the file of nodes has no PriorityClasses, the message of a Shortage adds this fact: with
    PriorityClasses, the pods might preempt other pods, and fit.
    """
    spec = resource.spec
    profile, notes = read_model(spec.model, spec.engine.args, arguments.model_dir)
    request = GroupRequest(
        spec=resource.spec,
        profile=profile,
        served_name=resource.served_name,
        model_path=names.MODEL_MOUNT,
    )
    given_nodes = _given_nodes(arguments)
    priority_classes = None if given_nodes is None else given_nodes.priority_classes
    capacity = Capacity(
        free_nodes=_node_of_options(resource, arguments) if given_nodes is None else given_nodes.free_nodes,
        calibrations=calibrations,
        resource=ResourceKey(namespace=resource.metadata.namespace, name=resource.metadata.name),
        priority=preempting_priority(resource.spec.scheduling.priority_class_name, priority_classes),
    )
    try:
        planned = plan_group(request, capacity)
    except Shortage as shortage:
        lacks_priority_classes = given_nodes is not None and priority_classes is None
        if not lacks_priority_classes:
            raise
        raise Shortage(f"{shortage.message}; {_NO_PRIORITIES}", reason=shortage.reason) from None
    missing = (planned.missing,) if planned.missing else ()
    return replace(planned, notes=(*planned.notes, *missing, *notes))


def _given_nodes(arguments: argparse.Namespace) -> GivenNodes | None:
    """Returns the nodes of --nodes, or None without that option."""
    if arguments.nodes is None:
        return None
    if arguments.gpus is not None or arguments.gpu_memory is not None:
        raise HeteroInferError(
            "--nodes cannot be combined with --gpus or --gpu-memory. Remove --nodes, or the other two",
            reason="Usage",
        )
    return load_nodes(arguments.nodes)


def _node_of_options(resource: HeteroInference, arguments: argparse.Namespace) -> list[FreeNode] | None:
    """Returns the node that --gpus and --gpu-memory describe, or None without these options."""
    gpus, memory_bytes = arguments.gpus, arguments.gpu_memory
    if gpus is None and memory_bytes is None:
        return None
    gpu_resources = {role.gpu_resource for role in resource.spec.roles if role.device is Device.GPU}
    # Without --gpus, the number of GPUs must not limit the plan: the node has a GPU for each rank.
    num_gpus = sum(role.num_ranks for role in resource.spec.roles) if gpus is None else gpus
    memory_labels = (
        {}
        if memory_bytes is None
        else {f"{name}.memory": str(memory_bytes // 2**20) for name in gpu_resources}
    )
    node = NodeView(
        name=_NODE_OF_OPTIONS,
        allocatable=dict.fromkeys(gpu_resources, float(num_gpus)),
        labels={**IMAGE_PLATFORM, **memory_labels},
    )
    return build_free_nodes([node])


def _render(answer: PlanAnswer, arguments: argparse.Namespace) -> str:
    """Returns the answer as a table, JSON or YAML.

    A table has no errors, because `run` prints them to stderr.
    """
    planned, output = answer.planned, arguments.output
    if output == "table":
        if planned is None:
            return ""
        has_nodes = arguments.nodes is not None
        return describe_plan(
            planned,
            answer.name,
            ShownParts(explain=arguments.explain, choices=arguments.choices, nodes=has_nodes),
            not_measured=answer.calibrations.missing,
            refusals=len(answer.refused_by_policy),
        )
    with_choices = arguments.choices or arguments.explain
    value = {
        "exitCode": int(answer.exit_code),
        "outcome": answer.exit_code.name.lower().replace("_", " "),
        "errors": _dump_errors(answer.errors),
        "refused": _dump_errors(answer.refused),
        **({} if planned is None else _dump_plan(planned)),
        **({"choices": list(describe_choices(planned))} if with_choices and planned is not None else {}),
    }
    if output == "json":
        return json.dumps(value, indent=2) + "\n"
    return yaml.safe_dump(value, sort_keys=False)


def _dump_errors(errors: Iterable[HeteroInferError]) -> list[dict[str, str]]:
    return [{"reason": error.reason, "message": error.message} for error in errors]


def _dump_plan(planned: Planned) -> dict[str, Any]:
    """Returns a plan with its predictions and notes as JSON values."""
    has_limit = planned.request.spec.engine.max_time_between_tokens is not None
    networks = describe_networks(planned.plan, planned.rates)
    return {
        "hash": planned.plan.hash,
        "plan": json.loads(planned.plan.to_json()),
        "notes": list(planned.notes),
        "limitingRank": planned.limiting_rank,
        "nodes": {str(pod): node for pod, node in planned.node_assignment.nodes.items()},
        "predictedStepMs": _dump_prediction(predict(planned.plan, planned.rates)),
        **({"timeBetweenTokensMs": _dump_prediction(time_between_tokens(planned))} if has_limit else {}),
        **({} if planned.choice is None else {"modeChoice": _dump_mode_choice(planned.choice)}),
        "rates": {rank.role: planned.rates[rank.rank].source for rank in planned.plan.ranks},
        **({"networks": networks} if networks else {}),
    }


def _dump_mode_choice(choice: ModeChoice) -> dict[str, Any]:
    """Returns the compared modes and their figures as JSON values."""

    def fields(option: ModeOption) -> dict[str, Any]:
        """Returns an option as JSON: its times, or why it does not fit."""
        figures = option.figures
        if figures is None:
            return {"mode": option.title, "reason": option.reason}
        return {
            "mode": option.title,
            "loadSeconds": round(figures.total_s, 3),
            "requestsAtOnce": figures.num_concurrent,
            "stepMs": round(figures.step.step_s * 1e3, 2),
            "firstTokenMs": round(figures.first_token.step_s * 1e3, 1),
            **({"reason": option.reason} if option.reason else {}),
        }

    return {
        "load": choice.load.dump(),
        "chosen": choice.chosen.dump(),
        "options": [fields(option) for option in choice.options],
        "gains": list(choice.gains),
    }


def _dump_prediction(prediction: Prediction) -> dict[str, float]:
    """Returns a predicted time and its range, in milliseconds."""
    values = {"predicted": prediction.step_s, "least": prediction.least_s, "most": prediction.most_s}
    return {name: round(seconds * 1e3, 2) for name, seconds in values.items()}
