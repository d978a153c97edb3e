"""`heteroinfer new`: writes a commented resource for a model and the user's hardware."""

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_contract.plan import Mode
from heteroinfer_contract.printable import printable
from heteroinfer_operator.aligned_rows import align_rows
from heteroinfer_operator.api import MAX_NAME_LENGTH, HeteroInference, parse_resource
from heteroinfer_operator.commands.new_layouts import (
    FILE_SCHEME,
    Draft,
    FittingChange,
    GivenHardware,
    GroupLayout,
    choose_layout,
    find_fitting_changes,
)
from heteroinfer_operator.commands.new_text import render
from heteroinfer_operator.commands.plan_command import PlanExit
from heteroinfer_operator.commands.plan_model import read_model
from heteroinfer_operator.commands.plan_options import (
    add_calibration,
    add_model_dir,
    gpu_count,
    memory_size,
    read_calibrations,
)
from heteroinfer_operator.commands.plan_text import describe_summary
from heteroinfer_operator.commands.plan_words import INDENT, count
from heteroinfer_operator.errors import HeteroInferError, PlanError, PlanReason
from heteroinfer_operator.quantity import BYTES_PATTERN, parse_bytes

_OPTION_BY_FIELD: Final = MappingProxyType(
    {
        "resources.limits.memory of role cpu": "--cpu-memory",
        "deviceMemory of role gpu": "--gpu-memory",
        "feedForward.memory": "--cpu-memory",
        "engine.maxModelLen": "--max-model-len",
    }
)
"""The option of this command that sets each field, for errors of the planner, which name fields."""
_SHORTAGES: Final = frozenset({PlanReason.INSUFFICIENT_MEMORY, PlanReason.INSUFFICIENT_GPU})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer new`."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="folder with the model's files, or hf://ORG/MODEL, or pvc:// or oci:// with --model-dir",
    )
    parser.add_argument(
        "--gpus", type=gpu_count, metavar="N", help="number of GPUs; default: 1 with --gpu-memory"
    )
    parser.add_argument(
        "--gpu-memory", type=_memory_option, metavar="SIZE", help="memory of one GPU, such as 24Gi"
    )
    parser.add_argument("--cpus", type=_positive_number, metavar="N", help="cores of one node for CPU ranks")
    parser.add_argument(
        "--cpu-memory",
        type=_memory_option,
        metavar="SIZE",
        help="host memory for CPU ranks, such as 64Gi",
    )
    parser.add_argument(
        "--mode",
        choices=[mode.value for mode in Mode],
        help="parallelism.mode; default: Pipeline, but FeedForward for a mixture of experts that does not "
        "fit your single GPU, if you have at least 2 CPUs",
    )
    parser.add_argument(
        "--max-model-len",
        type=_positive_number,
        metavar="TOKENS",
        help="longest sequence, prompt and answer together; default: 8192, or the model's limit if that "
        "is lower",
    )
    parser.add_argument("--name", help="name of the resource; default: the model's name")
    parser.add_argument("--revision", help="branch, tag or commit of a model on a hub")
    add_model_dir(parser, "MODEL")
    add_calibration(parser, "the measurements of this machine, if there are any")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to create; default: stdout")


def run(arguments: argparse.Namespace) -> int:
    """Writes the resource, or reports how much memory is missing and which changes make the model fit.

    Returns:
        PlanExit.FITS, or PlanExit.DOES_NOT_FIT if memory or GPUs are missing.

    Raises:
        HeteroInferError: the options or the model are wrong, or the output exists.
    """
    output: Path | None = arguments.output
    if output is not None and output.exists():
        raise HeteroInferError(
            f"--output: {output} exists already. Remove the file or choose another one", reason="Usage"
        )
    hardware = _read_hardware(arguments)
    model = _model_spec(arguments)
    name = _default_name(arguments.model) if arguments.name is None else arguments.name
    parsed = _check_name_and_model(name, model)
    calibrations = read_calibrations(arguments.calibration)
    profile, notes = read_model(parsed.spec.model, (), arguments.model_dir)
    draft = Draft(
        name=name,
        model=model,
        profile=profile,
        calibrations=calibrations,
        max_model_len=arguments.max_model_len,
    )
    mode = None if arguments.mode is None else Mode(arguments.mode)
    try:
        layout, planned = choose_layout(draft, hardware, mode)
    except PlanError as error:
        changes = find_fitting_changes(draft, hardware, mode)
        if not changes and error.reason not in _SHORTAGES:
            raise
        _print_shortage(name, hardware, error, changes)
        return PlanExit.DOES_NOT_FIT
    planned = replace(planned, notes=(*planned.notes, *notes))
    summary = describe_summary(planned, name, not_measured=calibrations.missing)
    text = render(draft, layout, planned, hardware, summary)
    warnings = (*notes, *_describe_other_hardware(layout, hardware))
    sys.stderr.write("".join(f"warning: {printable(warning)}\n" for warning in warnings))
    if output is None:
        sys.stdout.write(text)
    else:
        _create_file(output, text)
        sys.stdout.write(f"{printable(summary[0])}\n{printable(str(output))} created\n")
    return PlanExit.FITS


def _create_file(path: Path, text: str) -> None:
    """Writes the text into a file; raises HeteroInferError if the file cannot be written."""
    try:
        path.write_text(text)
    except OSError as error:
        raise HeteroInferError(
            f"--output: cannot write {path} ({error.strerror}). Choose another file", reason="Usage"
        ) from error


def _describe_other_hardware(layout: GroupLayout, hardware: GivenHardware) -> Iterator[str]:
    """Yields how the file differs from the user's hardware: unused CPUs, or larger pods of GPUs."""
    if not hardware.cpus or not hardware.gpus:
        return
    if not layout.hardware.cpus:
        yield "--cpus: the CPUs are not used, because the GPUs hold the whole model"
    needs_more_memory = parse_bytes(layout.gpu_pod_memory) > parse_bytes(hardware.cpu_memory)
    if layout.gpu_pod_cpus > hardware.cpus or needs_more_memory:
        yield (
            f"role gpu: each pod requests {count(layout.gpu_pod_cpus, 'CPU')} and {layout.gpu_pod_memory} of "
            "host memory, more than --cpus or --cpu-memory. Adjust its resources in the file to your nodes"
        )


def _read_hardware(arguments: argparse.Namespace) -> GivenHardware:
    """Returns the user's hardware; raises HeteroInferError if options are missing."""
    gpu_memory, cpu_memory, cpus = arguments.gpu_memory or "", arguments.cpu_memory or "", arguments.cpus or 0
    default_gpus = 1 if gpu_memory else 0
    gpus = default_gpus if arguments.gpus is None else arguments.gpus
    if gpus and not gpu_memory:
        raise HeteroInferError(
            "--gpus: the memory of one GPU is missing. Add --gpu-memory SIZE", reason="Usage"
        )
    if bool(cpus) != bool(cpu_memory):
        missing = "--cpus N" if cpu_memory else "--cpu-memory SIZE"
        raise HeteroInferError(f"--cpus and --cpu-memory must be set together. Add {missing}", reason="Usage")
    if not gpus and not cpus:
        raise HeteroInferError(
            "the hardware is missing. Add --gpu-memory SIZE, or --cpus N and --cpu-memory SIZE, or both",
            reason="Usage",
        )
    gpu_memory = gpu_memory if gpus else ""  # --gpus 0 overrides --gpu-memory
    return GivenHardware(gpus=gpus, gpu_memory=gpu_memory, cpus=cpus, cpu_memory=cpu_memory)


def _model_spec(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns spec.model for the MODEL that the user named."""
    uri = arguments.model
    if "://" not in uri:
        folder = Path(uri)
        if not folder.is_dir():
            raise HeteroInferError(
                f"MODEL: {uri} is not a folder. Name a folder with the model's files, or hf://ORG/MODEL for "
                "a model of a hub",
                reason="Usage",
            )
        uri = f"{FILE_SCHEME}{folder.resolve()}"
    revision = {} if arguments.revision is None else {"revision": arguments.revision}
    return {"uri": uri, **revision}


def _default_name(model: str) -> str:
    """Returns a resource name for a model: the last part of its path, in the characters of a DNS label.

    A name must begin with a letter, so other names get the prefix "model-".
    """
    path = model if "://" in model else str(Path(model).resolve())
    last_part = path.rpartition("/")[2]
    words = re.sub("[^a-z0-9]+", "-", last_part.lower()).strip("-")
    name = words if words[:1].isalpha() else f"model-{words}"
    return name[:MAX_NAME_LENGTH].strip("-")


def _check_name_and_model(name: str, model: dict[str, Any]) -> HeteroInference:
    """Parses a resource with this name and model, to check both; raises SpecError."""
    # A resource must have a role. The layout is not chosen yet, so this uses any valid role.
    spec = {"model": model, "roles": [{"name": "cpu", "device": "CPU"}]}
    return parse_resource({"metadata": {"name": name}, "spec": spec})


def _print_shortage(
    name: str, hardware: GivenHardware, error: PlanError, changes: Sequence[FittingChange]
) -> None:
    """Prints how much memory is missing, and the changes that make the model fit.

    The error names fields of a file that does not exist yet, so this function replaces each field by its
    option. If there are changes, they also replace the fix "Raise FIELD".
    """
    problems = [line.partition(". Raise ")[0] if changes else line for line in error.message.splitlines()]
    problem = "\n".join(problems)
    for field, option in _OPTION_BY_FIELD.items():
        problem = problem.replace(field, option)
    lines = f"error: {name} does not fit {hardware}: {problem}".splitlines()
    if changes:
        lines.append("The model fits with any one of these changes:")
        lines += [
            f"{INDENT}{line}" for line in align_rows([(change.option, change.change) for change in changes])
        ]
    sys.stderr.write("".join(f"{printable(line)}\n" for line in lines))


def _memory_option(text: str) -> str:
    """Returns a size as the user wrote it; raises ArgumentTypeError."""
    if not memory_size(text) or not re.fullmatch(BYTES_PATTERN, text):
        raise argparse.ArgumentTypeError(f"must be a size above 0 such as 24Gi (got {text!r})")
    return text


def _positive_number(text: str) -> int:
    """Returns a number of 1 or more; raises ArgumentTypeError."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more (got {text!r})")
    return int(text)
