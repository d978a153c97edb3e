"""`heteroinfer calibrate`: measures the speed of this machine, which `plan` and `up` use."""

import argparse
import sys
from pathlib import Path

from heteroinfer_contract.calibration import ALL_NODES, Calibration
from heteroinfer_contract.printable import printable
from heteroinfer_operator.local import calibration_file, worker_python
from heteroinfer_operator.nodes.calibrations import describe_calibration
from heteroinfer_operator.quantity import gigabytes_per_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer calibrate`."""
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write; default: heteroinfer/calibration.json in your cache folder, which `heteroinfer "
        "plan` and `heteroinfer up` read",
    )
    parser.add_argument("--worker-python", type=Path, metavar="PYTHON", help=worker_python.HELP)


def run(arguments: argparse.Namespace) -> int:
    """Measures this machine, writes the calibration and prints it; returns 0.

    Raises:
        HeteroInferError: there is no Python with vLLM, the measurement failed, or the file cannot be written.
    """
    python = worker_python.find_worker_python(arguments.worker_python)
    sys.stderr.write(calibration_file.MEASURING)
    calibration = calibration_file.measure(python)
    file = arguments.output or calibration_file.cache_folder() / calibration_file.FILE_NAME
    calibration_file.write_calibration_file(calibration, file)
    for line in (*describe_measurements(calibration), f"wrote {file}"):
        sys.stdout.write(f"{printable(line)}\n")
    return 0


def describe_measurements(calibration: Calibration) -> list[str]:
    """Returns a description of the calibration, then a line for each measurement."""
    lines = [describe_calibration(calibration)]
    for reading in calibration.readings:
        numa_node = "" if reading.node == ALL_NODES else f" of NUMA node {reading.node}"
        lines.append(
            f"  memory read by {reading.threads} threads{numa_node}: "
            f"{gigabytes_per_s(reading.bytes_per_s, 1)}"
        )
    for kernel in calibration.kernels:
        name = kernel.dtype if kernel.scheme == "None" else kernel.scheme
        lines.append(f"  {kernel.part} in {name} ({kernel.kernel}): {gigabytes_per_s(kernel.bytes_per_s, 1)}")
    if calibration.operations_per_s:
        lines.append(f"  operations in bf16: {calibration.operations_per_s / 1e12:.2f} T operations/s")
    lines += [
        f"  {hop.path}, {hop.message_bytes} bytes: {hop.seconds * 1e6:.0f} us" for hop in calibration.hops
    ]
    for transfer in calibration.transfers:
        contended = ", contended" if transfer.contended else ""
        lines.append(f"  PCIe {transfer.direction}{contended}: {gigabytes_per_s(transfer.bytes_per_s, 1)}")
    if calibration.gpu is not None:
        gpu = calibration.gpu
        rates = f"{gigabytes_per_s(gpu.bytes_per_s)}, {gpu.operations_per_s / 1e12:.0f} T operations/s"
        lines.append(f"  {calibration.hardware.gpu}: {rates}")
    lines += [f"  not measured: {each.what}: {each.why}" for each in calibration.skipped]
    return lines
