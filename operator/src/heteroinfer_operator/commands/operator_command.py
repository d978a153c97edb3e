"""`heteroinfer operator`: runs the operator in the cluster."""

import argparse
import asyncio
import functools
import json
import logging
import os
import sys
from pathlib import Path
from typing import Final

from heteroinfer_contract.own_account import ensure_own_account
from heteroinfer_contract.printable import printable
from heteroinfer_operator.commands.calibrate_command import describe_measurements
from heteroinfer_operator.commands.printable_logs import JsonFormatter, PrintableFormatter
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.kube.installation import find_missing_parts
from heteroinfer_operator.kube.kept_calibrations import write_calibration
from heteroinfer_operator.kube.lease import LeaseLostError
from heteroinfer_operator.kube.paths import NamespacedName
from heteroinfer_operator.kube.server import ApiServer, load_configuration
from heteroinfer_operator.local import calibration_file
from heteroinfer_operator.manifests import egress_policy
from heteroinfer_operator.manifests.addressing import ClusterAddressing
from heteroinfer_operator.manifests.fetch_egress import FetchEgress
from heteroinfer_operator.manifests.image_pulls import ImagePulls
from heteroinfer_operator.manifests.pod_resources import PodResources
from heteroinfer_operator.manifests.pod_security import PodSecurity
from heteroinfer_operator.manifests.worker_pods import WorkerImages
from heteroinfer_operator.nodes.calibrations import (
    CalibrationError,
    MeasuredKind,
    MeasuredNetwork,
    check_kind,
    check_selector,
    describe_network,
)
from heteroinfer_operator.operator_process import Operator
from heteroinfer_operator.reconcile import Allowed, Options, reconcile
from heteroinfer_operator.settings import InstallationSettings
from heteroinfer_operator.version import own_version
from heteroinfer_operator.workqueue import Decide

logger = logging.getLogger(__name__)

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1

LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer operator`. All settings come from the environment."""
    parser.add_argument(
        "--check",
        action="store_true",
        help="check that the API server answers, serves HeteroInference and grants every right, then exit; "
        "changes nothing",
    )
    parser.add_argument(
        "--keep-calibration",
        type=Path,
        metavar="FILE",
        help="store the calibration in FILE (from `heteroinfer-worker calibrate -o FILE`) in the ConfigMap "
        "HETEROINFER_CALIBRATION_CONFIG_MAP, then exit; the chart's calibration Job uses it",
    )
    parser.add_argument(
        "--keep-network",
        type=Path,
        metavar="FILE",
        help="store the measurement in FILE (from `heteroinfer-worker network -o FILE`) in that ConfigMap, "
        "then exit; the chart's Job that measures a network uses it",
    )
    parser.add_argument(
        "--node-kind",
        default=[],
        action="append",
        metavar="NAME",
        help="with --keep-calibration: name of the kind of node on which FILE was measured. With "
        "--keep-network: the kind of the client's node, then again the kind of the listener's node",
    )
    parser.add_argument(
        "--node-selector",
        default=[],
        action="append",
        metavar="JSON",
        help="labels of the nodes of this kind, for each --node-kind",
    )


def build_options(settings: InstallationSettings, operator_key: bytes | None = None) -> Options:
    """Builds the options that hold for all resources of an installation."""
    return Options(
        addressing=ClusterAddressing(allow_host_paths=settings.allow_host_paths),
        images=WorkerImages(
            cpu=settings.worker_image_cpu,
            gpu=settings.worker_image_gpu,
            pulls=ImagePulls(policy=settings.worker_pull_policy, secrets=settings.worker_pull_secrets),
        ),
        operator_key=operator_key,
        egress=egress_policy.Egress(settings.pod_egress),
        fetch_egress=FetchEgress.from_json(settings.fetch_egress),
        allowed=Allowed(
            remote_code=settings.allow_remote_code,
            arguments=settings.allowed_arguments,
            environment=settings.allowed_environment,
            annotations=settings.allowed_annotations,
            service_accounts=settings.allowed_service_accounts,
            images=settings.allowed_worker_images,
            host_paths=settings.allowed_host_paths,
        ),
        pod_resources=PodResources.from_json(settings.pod_resources),
        pod_security=PodSecurity.from_json(settings.pod_security),
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the operator until SIGTERM; returns the exit code.

    Raises:
        HeteroInferError: the settings are wrong, or the API server cannot be reached at all.
    """
    ensure_own_account()
    settings = InstallationSettings.from_env(os.environ)
    handler = logging.StreamHandler(sys.stderr)
    is_json = settings.log_format == "json"
    handler.setFormatter(JsonFormatter() if is_json else PrintableFormatter(LOG_FORMAT))
    logging.basicConfig(level=settings.log_level, handlers=[handler])
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
    # This logger only warns that kopf handles no signals in a thread, which is intended.
    logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
    build_options(settings)  # raises for a wrong setting, before the operator starts
    if arguments.check:
        return _check_installation(settings)
    if arguments.keep_calibration is not None:
        asyncio.run(_store_measured(settings, _read_measured_kind(arguments)))
        return EXIT_OK
    if arguments.keep_network is not None:
        asyncio.run(_store_measured(settings, _read_measured_network(arguments)))
        return EXIT_OK

    def build_decide(operator_key: bytes | None) -> Decide:
        """Returns the function that decides each reconcile, with the key that the operator has read."""
        return functools.partial(reconcile, options=build_options(settings, operator_key))

    operator = Operator(settings, build_decide)
    try:  # Python permits no `return` in `except*`
        asyncio.run(operator.run())
    except* LeaseLostError as lost:
        logger.error("%s", lost.exceptions[0])
        exit_code = EXIT_FAILED
    except* HeteroInferError as failed:
        for error in failed.exceptions:
            logger.error("%s", error)
        exit_code = EXIT_FAILED
    else:
        exit_code = EXIT_OK
    return exit_code


def _check_installation(settings: InstallationSettings) -> int:
    """Prints what the operator lacks, such as a right. Returns the exit code."""
    problems = asyncio.run(find_missing_parts(settings))
    for problem in problems:
        sys.stdout.write(f"{printable(problem)}\n")
    sys.stdout.write(
        "not ready\n" if problems else "ok: the API server serves HeteroInference and grants every right\n"
    )
    return EXIT_FAILED if problems else EXIT_OK


async def _store_measured(settings: InstallationSettings, measured: MeasuredKind | MeasuredNetwork) -> None:
    """Stores measured rates in the ConfigMap of the settings, and prints them."""
    if not settings.calibration_config_map:
        raise CalibrationError(
            "HETEROINFER_CALIBRATION_CONFIG_MAP: must be the name of a ConfigMap (got an empty name). Set "
            "this variable"
        )
    name = NamespacedName(namespace=settings.namespace, name=settings.calibration_config_map)
    server = ApiServer(await load_configuration())
    try:
        await write_calibration(server, name, measured)
    finally:
        await server.close()
    if isinstance(measured, MeasuredKind):
        described = describe_measurements(measured.calibration)
    else:
        described = [f"network: {describe_network(measured.network)}"]
    for line in (*described, f"stored in ConfigMap {name}: {measured.full_name}"):
        sys.stdout.write(f"{printable(line)}\n")


def _read_measured_kind(arguments: argparse.Namespace) -> MeasuredKind:
    """Returns the kind of nodes that the arguments describe; raises CalibrationError."""
    ((name, selector),) = _read_kinds(arguments, 1)
    calibration = calibration_file.read_calibration_file(arguments.keep_calibration)
    _check_version(calibration.versions.heteroinfer, "calibration")
    return MeasuredKind(name=name, selector=selector, calibration=calibration)


def _read_measured_network(arguments: argparse.Namespace) -> MeasuredNetwork:
    """Returns the network that the arguments describe; raises CalibrationError."""
    (one, one_selector), (other, other_selector) = _read_kinds(arguments, 2)
    network = calibration_file.read_network_file(arguments.keep_network)
    _check_version(network.version, "network")
    return MeasuredNetwork(kinds=(one, other), selectors=(one_selector, other_selector), network=network)


def _read_kinds(arguments: argparse.Namespace, num_kinds: int) -> list[tuple[str, dict[str, str]]]:
    """Returns the names and the labels of the kinds of nodes in the arguments; raises CalibrationError."""
    texts = arguments.node_selector
    if len(arguments.node_kind) != num_kinds or len(texts) != num_kinds:
        raise CalibrationError(
            f"--node-kind, --node-selector: the command must have each option {num_kinds} times (got "
            f"{len(arguments.node_kind)} and {len(texts)}). Correct the arguments of the Job"
        )
    return [
        (check_kind(name), check_selector(_read_json(text)))
        for name, text in zip(arguments.node_kind, texts, strict=True)
    ]


def _read_json(text: str) -> object:
    """Returns the value of a JSON text; the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _check_version(measured: str, what: str) -> None:
    """Raises CalibrationError if another version than this one measured.

    Args:
        what: name of the measurement, for the message.
    """
    own = own_version()
    if measured != own:
        raise CalibrationError(
            f"HeteroInfer {measured} measured this {what}, but an operator of version {own} uses only "
            f"{what}s of its own version. Set the chart's workerImages to images of version {own}"
        )
