"""What was measured of machines, and how it is named. Pure."""

from dataclasses import dataclass
from datetime import UTC, datetime

from heteroinfer_contract.calibration import Calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrations:
    """What was measured.

    Attributes:
        this_machine: of the only machine there is, or None.
        missing: why there is none, for people; "" if nobody needs to know.
    """

    this_machine: Calibration | None = None
    missing: str = ""


def describe(calibration: Calibration) -> str:
    """Returns which calibration it is, in a few words."""
    hardware, versions = calibration.hardware, calibration.versions
    day = datetime.fromtimestamp(calibration.time, UTC)
    gpu = f", {hardware.gpu}" if hardware.gpu else ""
    return (
        f"calibration {calibration.hash} of {day:%Y-%m-%d} ({hardware.cpu}, {hardware.cores} cores{gpu}; "
        f"HeteroInfer {versions.heteroinfer}, vLLM {versions.vllm})"
    )
