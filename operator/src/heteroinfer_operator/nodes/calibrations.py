"""Measured rates of machines, the nodes that they apply to, and their description. Pure."""

import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from heteroinfer_contract.calibration import MAX_TEXT, Calibration
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.network_measurement import NetworkMeasurement
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.quantity import gigabytes_per_s

T = TypeVar("T")
SUFFIX: Final = ".json"
"""Suffix of an entry's key in the ConfigMap, after the name of the kind of nodes."""
_KIND_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")
_MAX_KINDS: Final = 64
"""Maximum number of kinds of nodes, and of networks between them."""
_OF_NETWORKS: Final = ".network"
"""End of the name of a network's entry. Before it are the names of two kinds, which contain no dot."""
_BETWEEN_KINDS: Final = "."
_ROW_BYTES: Final = 2 * 8192
"""Bytes of a row and its answer, by which networks are compared: hidden size 4096 in bf16."""
_GPU_PRODUCT: Final = "nvidia.com/gpu.product"
"""Label of GPU feature discovery: the GPU's name, with SHARED if several pods may share a GPU."""


class CalibrationError(HeteroInferError):
    """A calibration is missing, invalid or cannot be created."""

    reason = "NoCalibration"


def _read_entry(key: str, requirement: str, read: Callable[[], T]) -> T:
    """Returns the value that `read` reads from an entry of the ConfigMap.

    Args:
        requirement: message about the parts of such an entry, for errors without a useful message.

    Raises:
        CalibrationError: `read` failed. The message names the entry.
    """
    try:
        return read()
    # These errors have useful messages. They come first, because ContractError is also a ValueError.
    except (CalibrationError, ContractError) as error:
        raise CalibrationError(f"{key}: {error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CalibrationError(f"{key}: {requirement}: {error!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredKind:
    """A kind of nodes with the calibration of one node.

    Attributes:
        name: name of the kind in the chart's values.
        selector: labels by which nodes belong to this kind.
        calibration: calibration of the measured node.
    """

    name: str
    selector: Mapping[str, str]
    calibration: Calibration

    def includes_node(self, labels: Mapping[str, str]) -> bool:
        """Reports whether a node with these labels belongs to this kind.

        A node with another GPU than the measured node does not belong to this kind.
        """
        if not all(labels.get(name) == value for name, value in self.selector.items()):
            return False
        measured_gpu = _words_of_gpu(self.calibration.hardware.gpu)
        labelled_gpu = _words_of_gpu(labels.get(_GPU_PRODUCT, ""))
        is_gpu_unknown = not measured_gpu or not labelled_gpu
        return is_gpu_unknown or measured_gpu == labelled_gpu

    @property
    def full_name(self) -> str:
        """Name of the entry in the ConfigMap, without its suffix."""
        return self.name

    def to_entry(self) -> dict[str, str]:
        """Builds the entry of the ConfigMap."""
        value = {
            "nodeSelector": dict(self.selector),
            "calibration": json.loads(self.calibration.to_json()),
        }
        return {f"{self.full_name}{SUFFIX}": json.dumps(value, sort_keys=True)}

    @classmethod
    def from_entry(cls, key: str, text: str) -> "MeasuredKind":
        """Reads an entry of the ConfigMap.

        Raises:
            CalibrationError: the entry is not in the format that the chart's Jobs write.
        """

        def read() -> MeasuredKind:
            value = json.loads(text)
            return cls(
                name=check_kind(key.removesuffix(SUFFIX)),
                selector=check_selector(value["nodeSelector"]),
                calibration=Calibration.from_json(json.dumps(value["calibration"])),
            )

        return _read_entry(key, "must contain nodeSelector and calibration", read)


def check_kind(name: str) -> str:
    """Returns the name of a kind of nodes if it is valid; otherwise raises CalibrationError."""
    if not _KIND_NAME.fullmatch(name):
        raise CalibrationError(
            "kind of node must have 1 to 40 characters of a-z, 0-9 and -, such as m7i-16xlarge (got "
            f"{name!r})"
        )
    return name


def check_selector(value: Any) -> dict[str, str]:
    """Returns node labels if they are valid; otherwise raises CalibrationError."""
    if not isinstance(value, dict) or not value or not all(isinstance(each, str) for each in value.values()):
        raise CalibrationError(
            'nodeSelector must be labels of the nodes, such as {"node.kubernetes.io/instance-type": '
            f'"m7i.16xlarge"}} (got {value!r})'
        )
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredNetwork:
    """The network between a node of one kind and a node of another, or of the same kind.

    Attributes:
        kinds: names of the two kinds in the chart's values: first that of the node that asked.
        selectors: labels by which nodes belong to the first and to the second kind.
    """

    kinds: tuple[str, str]
    selectors: tuple[Mapping[str, str], Mapping[str, str]]
    network: NetworkMeasurement

    @property
    def full_name(self) -> str:
        """Name of the entry in the ConfigMap, without its suffix."""
        return f"{_BETWEEN_KINDS.join(self.kinds)}{_OF_NETWORKS}"

    def joins(self, one: Mapping[str, str], other: Mapping[str, str]) -> bool:
        """Reports whether this is the network between nodes with these labels, in either direction."""
        first, second = self.selectors
        return (_has_labels(one, first) and _has_labels(other, second)) or (
            _has_labels(other, first) and _has_labels(one, second)
        )

    def to_entry(self) -> dict[str, str]:
        """Builds the entry of the ConfigMap."""
        value = {
            "nodeSelectors": [dict(selector) for selector in self.selectors],
            "network": json.loads(self.network.to_json()),
        }
        return {f"{self.full_name}{SUFFIX}": json.dumps(value, sort_keys=True)}

    @classmethod
    def from_entry(cls, key: str, text: str) -> "MeasuredNetwork":
        """Reads an entry of the ConfigMap.

        Raises:
            CalibrationError: the entry is not in the format that the chart's Jobs write.
        """

        def read() -> MeasuredNetwork:
            value = json.loads(text)
            kinds = key.removesuffix(SUFFIX).removesuffix(_OF_NETWORKS).split(_BETWEEN_KINDS)
            first, second = map(check_kind, kinds)
            one, other = map(check_selector, value["nodeSelectors"])
            network = NetworkMeasurement.from_json(json.dumps(value["network"]))
            return cls(kinds=(first, second), selectors=(one, other), network=network)

        return _read_entry(key, "must have a key of two kinds, two nodeSelectors and network", read)


def _has_labels(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Reports whether a node with these labels matches a selector."""
    return all(labels.get(name) == value for name, value in selector.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrations:
    """All known calibrations.

    Attributes:
        networks: measured networks between kinds of nodes.
        this_machine: calibration of the only machine (`heteroinfer up`), or None. With it, `kinds` is unused.
        this_network: network between all machines, or None. With it, `networks` is unused.
        missing: message about why calibrations are missing; "" if users do not need that message.
    """

    kinds: tuple[MeasuredKind, ...] = ()
    networks: tuple[MeasuredNetwork, ...] = ()
    this_machine: Calibration | None = None
    this_network: NetworkMeasurement | None = None
    missing: str = ""

    def of_nodes(self, labels: Iterable[Mapping[str, str]]) -> tuple[Calibration, ...]:
        """Returns the calibrations of these nodes without duplicates; empty if a node has no calibration.

        A node of several kinds has the calibrations of all these kinds.

        Args:
            labels: labels of each node.
        """
        if self.this_machine is not None:
            return (self.this_machine,)
        by_kind: dict[str, Calibration] = {}
        for node_labels in labels:
            of_node = {kind.name: kind.calibration for kind in self.kinds if kind.includes_node(node_labels)}
            if not of_node:
                return ()
            by_kind |= of_node
        return tuple(by_kind.values())

    def network_between(
        self, asking: Mapping[str, Mapping[str, str]], answering: Mapping[str, Mapping[str, str]]
    ) -> NetworkMeasurement | None:
        """Returns the slowest measured network between two groups of nodes.

        A step waits for its slowest exchange. Two pods on one node need no network, so this pair is left out.

        Args:
            asking: labels of each node on which a rank with attention may run, by the node's name.
            answering: labels of each node on which the feed-forward ranks may run, by the node's name.

        Returns:
            None if a pair of nodes has no measured network, or if there is no pair.
        """
        if self.this_network is not None:
            return self.this_network
        if not self.networks:
            return None
        slowest_network: NetworkMeasurement | None = None
        some, others = self._group_by_selectors(asking), self._group_by_selectors(answering)
        for (one, names), (other, other_names) in itertools.product(some, others):
            if names == other_names and len(names) == 1:  # both pods are on the same node
                continue
            known = [each.network for each in self.networks if each.joins(one, other)]
            if not known:
                return None
            if slowest_network is not None:
                known.append(slowest_network)
            slowest_network = max(known, key=lambda network: network.exchange_s(_ROW_BYTES))
        return slowest_network

    def _group_by_selectors(
        self, nodes: Mapping[str, Mapping[str, str]]
    ) -> list[tuple[Mapping[str, str], set[str]]]:
        """Returns groups of nodes that match the same selectors of networks.

        Clusters have many nodes, but few kinds of nodes.

        Returns:
            For each group, the labels of one node and the names of all nodes.
        """
        selectors = [selector for each in self.networks for selector in each.selectors]
        grouped: dict[tuple[bool, ...], tuple[Mapping[str, str], set[str]]] = {}
        for node, labels in nodes.items():
            matches = tuple(_has_labels(labels, selector) for selector in selectors)
            grouped.setdefault(matches, (labels, set()))[1].add(node)
        return list(grouped.values())


def slowest(calibrations: Sequence[Calibration], *, by_gpu: bool) -> Calibration | None:
    """Returns the calibration of the slowest machine, because all ranks of a role wait for this machine.

    Args:
        by_gpu: whether to compare GPUs instead of CPUs. A machine without a measured GPU counts as the
            slowest, so that no rate of another GPU is used for it.

    Returns:
        None without calibrations.
    """

    def rate(calibration: Calibration) -> float:
        if by_gpu:
            return 0.0 if calibration.gpu is None else calibration.gpu.bytes_per_s
        return calibration.read_rate(calibration.hardware.cores)

    return min(calibrations, key=rate, default=None)


def read_stored_calibrations(data: Mapping[str, str], version: str) -> tuple[Calibrations, tuple[str, ...]]:
    """Returns the calibrations in the ConfigMap, and a message for each ignored entry.

    Args:
        version: version of the operator. Other versions measured other kernels, so their calibrations are
            ignored.
    """
    kinds: list[MeasuredKind] = []
    networks: list[MeasuredNetwork] = []
    problems: list[str] = []
    for key, text in sorted(data.items()):
        is_network = key.removesuffix(SUFFIX).endswith(_OF_NETWORKS)
        subject = "this network" if is_network else "these nodes"
        writer = _read_version(text, is_network=is_network)
        if writer not in ("", version):
            problems.append(
                f"{key}: ignored, because HeteroInfer {writer} measured these rates and the operator has "
                f"version {version}. Plans use default rates until the calibration Job of version {version} "
                f"has measured {subject} again. If this Job does not exist, upgrade the Helm release to "
                f"chart {version}. If the Job failed, read its log"
            )
            continue
        entry: MeasuredKind | MeasuredNetwork
        try:
            entry = (MeasuredNetwork if is_network else MeasuredKind).from_entry(key, text)
        except CalibrationError as error:
            problems.append(
                f"{error.message}. Plans use default rates for {subject}. Remove this entry from the "
                "ConfigMap, and measure again"
            )
            continue
        if len(networks if is_network else kinds) == _MAX_KINDS:
            problems.append(
                f"{key}: ignored, because the ConfigMap has more than {_MAX_KINDS} "
                f"{'networks' if is_network else 'kinds of nodes'}. Plans use default rates for {subject}. "
                "Remove the entries of kinds that the cluster no longer has"
            )
        elif isinstance(entry, MeasuredNetwork):
            networks.append(entry)
        else:
            kinds.append(entry)
    return Calibrations(kinds=tuple(kinds), networks=tuple(networks)), tuple(problems)


def _read_version(text: str, *, is_network: bool) -> str:
    """Returns the version of HeteroInfer that wrote an entry, in any format; "" if it cannot be read."""
    try:
        entry = json.loads(text)
        version = (
            entry["network"]["version"] if is_network else entry["calibration"]["versions"]["heteroinfer"]
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return version[:MAX_TEXT] if isinstance(version, str) else ""


def _words_of_gpu(name: str) -> list[str]:
    """Returns the words of a GPU's name. The label and the driver write the same words in other forms."""
    return [word for word in re.findall(r"[a-z0-9.]+", name.lower()) if word != "shared"]


def describe_calibration(calibration: Calibration) -> str:
    """Describes a calibration for logs and messages."""
    hardware, versions = calibration.hardware, calibration.versions
    day = datetime.fromtimestamp(calibration.time, UTC)
    gpu = f", {hardware.gpu}" if hardware.gpu else ""
    return (
        f"calibration {calibration.hash} of {day:%Y-%m-%d} ({hardware.cpu}, {hardware.cores} cores{gpu}; "
        f"HeteroInfer {versions.heteroinfer}, vLLM {versions.vllm})"
    )


def describe_network(network: NetworkMeasurement) -> str:
    """Describes the measurement of a network for logs and messages."""
    day = datetime.fromtimestamp(network.time, UTC)
    return (
        f"measurement {network.hash} of {day:%Y-%m-%d} (round trip {network.round_trip_s * 1e6:,.0f} us, "
        f"{gigabytes_per_s(network.bytes_per_s, 3)}; HeteroInfer {network.version})"
    )
