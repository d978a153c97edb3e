"""The calibration of this machine. The worker's Python measures it, and the user's cache folder keeps it."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.calibration import Calibration, cpu_fields, cpu_name
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.network_measurement import NetworkMeasurement
from heteroinfer_operator.local.process import MAX_ERROR_LENGTH, WORKER_MODULE
from heteroinfer_operator.nodes.calibrations import CalibrationError
from heteroinfer_operator.version import own_version

FILE_NAME: Final = "calibration.json"
TIMEOUT_S: Final = 120.0
"""Twice the longest time of the worker's command, which ends by itself."""
MEASURING: Final = "measuring this machine, which takes under a minute\n"
HOW_TO_MEASURE: Final = "Run `heteroinfer calibrate` (under a minute)"
_CPUINFO: Final = Path("/proc/cpuinfo")


def cache_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder for files that the command line reuses in later runs."""
    base = env.get(names.ENV_CACHE_HOME)
    return (Path(base) if base else Path.home() / ".cache") / "heteroinfer"


def measure(python: Path, env: Mapping[str, str] = os.environ) -> Calibration:
    """Measures this machine with the worker's Python, in under a minute.

    Raises:
        CalibrationError: the measurement failed; the message is the worker's own.
    """
    # In a pod, this variable names the file with the result, which the kubelet reads. Here is no kubelet, and
    # the result is on standard output. So leave out the variable.
    environment = {name: value for name, value in env.items() if name != names.ENV_TERMINATION_MESSAGE_PATH}
    command = [str(python), "-m", WORKER_MODULE, "calibrate"]
    try:
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CalibrationError(f"calibrate: not finished within {TIMEOUT_S:.0f} s. Try again") from error
    if result.returncode != 0:
        problem = result.stderr.strip().rpartition("calibrate: ")[2][-MAX_ERROR_LENGTH:]
        problem = problem or f"{python} ended with exit code {result.returncode}"
        raise CalibrationError(f"calibrate: {problem}")
    try:
        return Calibration.from_json(result.stdout)
    except ContractError as error:
        raise CalibrationError(f"calibrate: {python} did not print a calibration: {error}") from error


def write_calibration_file(calibration: Calibration, file: Path) -> None:
    """Replaces a calibration file. Another process reads the old or the new content, never a mixture.

    Raises:
        CalibrationError: the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary_file = file.with_suffix(f".{os.getpid()}.new")
        temporary_file.write_text(calibration.to_json() + "\n")
        temporary_file.replace(file)
    except OSError as error:
        raise CalibrationError(
            f"calibrate: cannot write {file} ({error.strerror}). Make the folder writable, or choose a file "
            "with `heteroinfer calibrate -o FILE`"
        ) from error


def read_calibration_file(file: Path) -> Calibration:
    """Returns the calibration in a file that the user names.

    Raises:
        CalibrationError: the file cannot be read, or does not contain a calibration.
    """
    try:
        return Calibration.from_json(file.read_text())
    except OSError as error:
        raise CalibrationError(
            f"--calibration: {file} cannot be read ({error.strerror}). Create it with "
            f"`heteroinfer calibrate -o {file}`, which takes under a minute"
        ) from error
    except UnicodeDecodeError as error:
        raise CalibrationError(
            f"--calibration: {file} is not text. Create it with `heteroinfer calibrate -o {file}`"
        ) from error
    except ContractError as error:
        raise CalibrationError(
            f"--calibration: {file}: {error}. Create it again with `heteroinfer calibrate -o {file}`"
        ) from error


def read_network_file(file: Path) -> NetworkMeasurement:
    """Returns the measurement of a network in a file that the user names.

    Raises:
        CalibrationError: the file cannot be read, or does not contain a measurement of a network.
    """
    fix = f"Create it with `heteroinfer-worker network --connect HOST -o {file}`"
    try:
        return NetworkMeasurement.from_json(file.read_text())
    except OSError as error:
        raise CalibrationError(f"{file}: cannot be read ({error.strerror}). {fix}") from error
    except UnicodeDecodeError as error:
        raise CalibrationError(f"{file}: must be text. {fix}") from error
    except ContractError as error:
        raise CalibrationError(f"{file}: {error}. {fix}") from error


def read_own_calibration(folder: Path, cpuinfo: Path = _CPUINFO) -> tuple[Calibration | None, str]:
    """Returns the stored calibration of this machine, or None with the reason why none is used.

    A calibration of another version, or of a machine with another CPU, is not used. Several machines can
    mount one home folder.
    """
    file = folder / FILE_NAME
    if not file.exists():
        return None, f"this machine was not measured. {HOW_TO_MEASURE}"
    try:
        calibration = Calibration.from_json(file.read_text())
    except (OSError, UnicodeDecodeError, ContractError) as error:
        return None, f"{file} cannot be used: {error}. {HOW_TO_MEASURE}"
    version = own_version()
    if calibration.versions.heteroinfer != version:
        measured = calibration.versions.heteroinfer
        return (
            None,
            f"ignoring {file}: made by HeteroInfer {measured}, but this is {version}. {HOW_TO_MEASURE}",
        )
    if calibration.hardware.cpu != cpu_name(cpu_fields(cpuinfo.read_text())):
        return (
            None,
            f"ignoring {file}: it was measured on another CPU ({calibration.hardware.cpu}). {HOW_TO_MEASURE}",
        )
    return calibration, ""
