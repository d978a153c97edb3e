"""The calibration of this machine: measured by the worker's Python, kept in the user's cache folder."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.calibration import Calibration, cpu_fields, cpu_name
from heteroinfer_contract.errors import ContractError
from heteroinfer_operator.local.process import WORKER_MODULE
from heteroinfer_operator.nodes.calibrations import CalibrationError
from heteroinfer_operator.version import own_version

FILE: Final = "calibration.json"
TIMEOUT_S: Final = 120.0
"""Twice what the worker's command takes at most; it ends by itself."""
MEASURING: Final = "measuring this machine, which takes under a minute\n"
HOW: Final = "run `heteroinfer calibrate`, which takes under a minute"
_CPUINFO: Final = Path("/proc/cpuinfo")


def cache_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder of what is kept between runs of the command line."""
    base = env.get(names.ENV_CACHE_HOME)
    return (Path(base) if base else Path.home() / ".cache") / "heteroinfer"


def measure(python: Path, env: Mapping[str, str] = os.environ) -> Calibration:
    """Returns what the worker's Python measures of this machine; takes under a minute.

    Raises:
        CalibrationError: it measured nothing; the message is its own.
    """
    # Without a message's path, which would be a pod's; the answer is on standard output.
    environment = {name: value for name, value in env.items() if name != names.ENV_TERMINATION_MESSAGE_PATH}
    command = [str(python), "-m", WORKER_MODULE, "calibrate"]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CalibrationError(f"calibrate: not done in {TIMEOUT_S:.0f} s; try again") from error
    if done.returncode != 0:
        words = done.stderr.strip().rpartition("calibrate: ")[2][-500:]
        raise CalibrationError(f"calibrate: {words or f'{python} ended with {done.returncode}'}")
    try:
        return Calibration.from_json(done.stdout)
    except ContractError as error:
        raise CalibrationError(f"calibrate: {python} gave no calibration: {error}") from error


def write(calibration: Calibration, file: Path) -> None:
    """Keeps a calibration; a reader sees the old one or the new one, whole.

    Raises:
        CalibrationError: the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}.new")
        new.write_text(calibration.to_json() + "\n")
        new.replace(file)
    except OSError as error:
        raise CalibrationError(f"calibrate: {file}: {error.strerror}") from error


def read(file: Path) -> Calibration:
    """Returns the calibration of a file that the user names.

    Raises:
        CalibrationError: it cannot be read, or holds none.
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
            f"--calibration: {file}: {error}; expected what `heteroinfer calibrate` writes: run it again"
        ) from error


def read_own(folder: Path, cpuinfo: Path = _CPUINFO) -> tuple[Calibration | None, str]:
    """Returns the calibration of this machine that is kept, or None and why there is none to use.

    One of another machine, as of a home folder that several mount, or of another version says nothing.
    """
    file = folder / FILE
    if not file.exists():
        return None, f"this machine was not measured; {HOW}"
    try:
        found = Calibration.from_json(file.read_text())
    except (OSError, UnicodeDecodeError, ContractError) as error:
        return None, f"{file} cannot be used: {error}; {HOW}"
    version = own_version()
    if found.versions.heteroinfer != version:
        measured = found.versions.heteroinfer
        return None, f"{file} is of HeteroInfer {measured}, this is {version}; {HOW}"
    if found.hardware.cpu != cpu_name(cpu_fields(cpuinfo.read_text())):
        return None, f"{file} is of a machine with {found.hardware.cpu}, which this is not; {HOW}"
    return found, ""
