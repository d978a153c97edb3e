"""Options that `heteroinfer plan` and `heteroinfer new` share."""

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Final

from heteroinfer_operator.local import calibration_file
from heteroinfer_operator.nodes.calibrations import Calibrations
from heteroinfer_operator.quantity import parse_bytes

_NO_CALIBRATION: Final = "none"
_MIN_MEMORY_BYTES: Final = 2**20
"""Smallest memory that an option accepts. A smaller value probably lacks its unit."""


def add_model_dir(parser: argparse.ArgumentParser, instead_of: str) -> None:
    """Adds --model-dir."""
    parser.add_argument(
        "--model-dir",
        type=Path,
        metavar="DIR",
        help=f"folder with the model's files, instead of {instead_of}; required for pvc:// and oci://",
    )


def add_calibration(parser: argparse.ArgumentParser, default: str) -> None:
    """Adds --calibration."""
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="measurements by `heteroinfer calibrate -o FILE`, of any machine, or `none` for default rates; "
        f"default: {default}",
    )


def add_network(parser: argparse.ArgumentParser) -> None:
    """Adds --network."""
    parser.add_argument(
        "--network",
        type=Path,
        metavar="FILE",
        help="measurement by `heteroinfer-worker network --connect HOST -o FILE`, for feed-forward ranks in "
        "pods of their own; default: default rates of a network",
    )


def read_calibrations(
    given: str | None, *, other_machines: bool = False, network: Path | None = None
) -> Calibrations:
    """Returns the measurements of the machines that are planned for.

    Args:
        given: value of --calibration.
        other_machines: whether the plan is for other machines, to which this machine's measurements do not
            apply.
        network: value of --network.

    Raises:
        HeteroInferError: a file cannot be read.
    """
    calibrations = _read_machine(given, other_machines=other_machines)
    if network is None:
        return calibrations
    return replace(calibrations, this_network=calibration_file.read_network_file(network))


def _read_machine(given: str | None, *, other_machines: bool) -> Calibrations:
    """Returns the measurements of the machines; the arguments and errors are those of `read_calibrations`."""
    if given == _NO_CALIBRATION:
        return Calibrations(missing="--calibration none")
    if given is not None:
        return Calibrations(this_machine=calibration_file.read_calibration_file(Path(given)))
    if other_machines:
        return Calibrations(
            missing="the nodes were not measured. Run `heteroinfer calibrate -o FILE` on a node of the kind "
            "that the pods will use, and add --calibration FILE"
        )
    of_this_machine, missing = calibration_file.read_own_calibration(calibration_file.cache_folder())
    return Calibrations(this_machine=of_this_machine, missing=missing)


def gpu_count(text: str) -> int:
    """Returns a number of GPUs; raises ArgumentTypeError."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a number of GPUs, 0 or more (got {text!r})")
    return int(text)


def memory_size(text: str) -> int:
    """Returns the bytes of a size such as 80Gi; raises ArgumentTypeError, with a correction if possible."""
    try:
        size = parse_bytes(text)
    except ValueError as error:
        with_b = re.fullmatch("([0-9.]+) ?([kMGTP])i?[bB]", text)  # such as 80GB or 80 GiB
        if with_b is None:
            raise argparse.ArgumentTypeError(f"must be a size such as 80Gi (got {text!r})") from error
        fix = f"{with_b[1]}{with_b[2]}"
        raise argparse.ArgumentTypeError(
            f"must be a size without B (got {text!r}). Write {fix}i, or {fix} for powers of 1,000"
        ) from error
    if size < 0:
        raise argparse.ArgumentTypeError(f"must be a size of 0 or more (got {text!r})")
    if 0 < size < _MIN_MEMORY_BYTES:
        fix = f". Write {text}Gi" if text.isdecimal() else ""
        raise argparse.ArgumentTypeError(f"must be at least 1Mi (got {text!r}, which is {size} bytes){fix}")
    return size
