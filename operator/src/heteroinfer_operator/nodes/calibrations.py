"""What was measured of machines, which of it holds for which nodes, and how it is named. Pure."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from heteroinfer_contract.calibration import MAX_TEXT, Calibration
from heteroinfer_contract.errors import ContractError
from heteroinfer_operator.errors import HeteroInferError

SUFFIX: Final = ".json"
"""Of an entry's key in the ConfigMap, after the name of the kind of node."""
_KIND: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_MOST_KINDS: Final = 64
_GPU_PRODUCT: Final = "nvidia.com/gpu.product"
"""Label of GPU feature discovery: the GPU's name, and SHARED where several pods may have the same one."""


class CalibrationError(HeteroInferError):
    """There is no calibration to use, or none could be made; the message says why."""

    reason = "NoCalibration"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredKind:
    """Nodes of which one was measured.

    Attributes:
        name: of the kind, as the chart's values have it.
        selector: labels that these nodes have.
        calibration: of the node that was measured.
    """

    name: str
    selector: Mapping[str, str]
    calibration: Calibration

    def has(self, labels: Mapping[str, str]) -> bool:
        """Returns whether a node with these labels is of this kind, and has no GPU but the one measured."""
        if not all(labels.get(name) == value for name, value in self.selector.items()):
            return False
        measured, own = _words(self.calibration.hardware.gpu), _words(labels.get(_GPU_PRODUCT, ""))
        return not measured or not own or measured == own

    def to_entry(self) -> dict[str, str]:
        """Returns what a ConfigMap keeps of it."""
        value = {
            "nodeSelector": dict(self.selector),
            "calibration": json.loads(self.calibration.to_json()),
        }
        return {f"{self.name}{SUFFIX}": json.dumps(value, sort_keys=True)}

    @classmethod
    def from_entry(cls, key: str, text: str) -> "MeasuredKind":
        """Returns what an entry of the ConfigMap says.

        Raises:
            CalibrationError: it is none that a Job of the chart keeps.
        """
        try:
            value = json.loads(text)
            return cls(
                name=check_kind(key.removesuffix(SUFFIX)),
                selector=check_selector(value["nodeSelector"]),
                calibration=Calibration.from_json(json.dumps(value["calibration"])),
            )
        except (CalibrationError, ContractError) as error:  # before ValueError, which ContractError is one of
            raise CalibrationError(f"{key}: {error}") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise CalibrationError(f"{key}: expected nodeSelector and calibration: {error!r}") from error


def check_kind(name: str) -> str:
    """Returns the name of a kind of nodes if it can be one; raises CalibrationError."""
    if not _KIND.fullmatch(name):
        raise CalibrationError(
            f"got {name!r} as a kind of node, expected up to 40 of a-z, 0-9 and - as in m7i-16xlarge"
        )
    return name


def check_selector(value: Any) -> dict[str, str]:
    """Returns labels that nodes have; raises CalibrationError if they are none."""
    if not isinstance(value, dict) or not value or not all(isinstance(each, str) for each in value.values()):
        raise CalibrationError(
            f"got {value!r} as a nodeSelector, expected labels of the nodes, such as "
            '{"node.kubernetes.io/instance-type": "m7i.16xlarge"}'
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrations:
    """What was measured.

    Attributes:
        this_machine: of the only machine there is, or None; then kinds say nothing.
        missing: why there is none, for people; "" if nobody needs to know.
    """

    kinds: tuple[MeasuredKind, ...] = ()
    this_machine: Calibration | None = None
    missing: str = ""

    def of_nodes(self, labels: Iterable[Mapping[str, str]]) -> tuple[Calibration, ...]:
        """Returns what was measured of these nodes, each once; nothing unless all of them were measured.

        A node that is of several kinds has what was measured of each.
        """
        if self.this_machine is not None:
            return (self.this_machine,)
        found: dict[str, Calibration] = {}
        for each in labels:
            of_node = {kind.name: kind.calibration for kind in self.kinds if kind.has(each)}
            if not of_node:
                return ()
            found |= of_node
        return tuple(found.values())


def slowest(calibrations: Sequence[Calibration], *, by_gpu: bool) -> Calibration | None:
    """Returns the calibration of the slowest machine, which all ranks of a role wait for; None of none.

    Args:
        by_gpu: whether its ranks compute on GPUs. A machine whose GPU was not measured counts as the slowest,
            so that no other one's GPU is taken for it.
    """

    def rate(each: Calibration) -> float:
        if by_gpu:
            return 0.0 if each.gpu is None else each.gpu.bytes_per_s
        return each.reading(each.hardware.cores)

    return min(calibrations, key=rate, default=None)


def read_kept(data: Mapping[str, str], version: str) -> tuple[Calibrations, tuple[str, ...]]:
    """Returns what a ConfigMap keeps, and why some of it is not used.

    Args:
        version: of HeteroInfer: what another one measured says nothing of this one's kernels.
    """
    kinds: list[MeasuredKind] = []
    problems: list[str] = []
    for key, text in sorted(data.items()):
        measured = _version_of(text)
        if measured not in ("", version):
            problems.append(
                f"{key}: of HeteroInfer {measured}, this is {version}; defaults are taken until a worker "
                f"image of {version} measured such a node"
            )
            continue
        try:
            kind = MeasuredKind.from_entry(key, text)
        except CalibrationError as error:
            problems.append(f"{error.message}; defaults are taken; remove that entry")
            continue
        if len(kinds) == _MOST_KINDS:
            problems.append(f"{key}: got more than {_MOST_KINDS} kinds of nodes; defaults are taken")
        else:
            kinds.append(kind)
    return Calibrations(kinds=tuple(kinds)), tuple(problems)


def _version_of(text: str) -> str:
    """Returns which version measured, whatever else it wrote; "" where that cannot be read."""
    try:
        measured = json.loads(text)["calibration"]["versions"]["heteroinfer"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return measured[:MAX_TEXT] if isinstance(measured, str) else ""


def _words(name: str) -> list[str]:
    """Returns the words of a GPU's name, as a label or a driver writes it."""
    return [word for word in re.findall(r"[a-z0-9.]+", name.lower()) if word != "shared"]


def describe(calibration: Calibration) -> str:
    """Returns which calibration it is, in a few words."""
    hardware, versions = calibration.hardware, calibration.versions
    day = datetime.fromtimestamp(calibration.time, UTC)
    gpu = f", {hardware.gpu}" if hardware.gpu else ""
    return (
        f"calibration {calibration.hash} of {day:%Y-%m-%d} ({hardware.cpu}, {hardware.cores} cores{gpu}; "
        f"HeteroInfer {versions.heteroinfer}, vLLM {versions.vllm})"
    )
