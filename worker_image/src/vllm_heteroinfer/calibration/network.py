"""The process that `heteroinfer-worker network` becomes: `python -m vllm_heteroinfer.calibration.network`.

One machine listens, and the other machine connects and measures. Imports no torch.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import Failure, FailureReason
from heteroinfer_contract.network_measurement import NetworkMeasurement
from heteroinfer_contract.pod_launch import MAX_PORT
from heteroinfer_contract.printable import format_bytes
from vllm_heteroinfer.calibration.network_probe import answer_clients, connect, measure
from vllm_heteroinfer.calibration.sigterm import exit_at_sigterm
from vllm_heteroinfer.group.deadline import Deadline
from vllm_heteroinfer.pod import addresses, termination_message

WAIT_S: Final = 600.0
"""Time in which the two machines must find each other."""
LIMIT_S: Final = 120.0
"""Time for the measurement itself. A fast network takes a few seconds."""
_MOST_S: Final = 86400.0
_COMMAND: Final = "heteroinfer-worker network"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures the network, or lets the other machine measure it. Returns the exit code."""
    arguments = _build_parser().parse_args(argv)
    exit_at_sigterm()
    try:
        text, code = _listen(arguments) if arguments.listen else _measure(arguments), names.EXIT_OK
    except (ContractError, OSError) as error:
        message = str(error)
        sys.stderr.write(f"{_COMMAND}: {message}\n")
        failure = Failure(
            reason=FailureReason.BAD_SETTINGS,
            message=message,
            exit_code=names.EXIT_USAGE,
            time=time.time(),
        )
        text, code = failure.to_json(), names.EXIT_USAGE
    if text and arguments.termination_message_path is not None:
        termination_message.write(arguments.termination_message_path, text)
    return code


def _build_parser() -> argparse.ArgumentParser:
    """Returns the parser of this command's options."""
    parser = argparse.ArgumentParser(
        prog=_COMMAND,
        description="Measures the network between two machines. One machine runs --listen, the other "
        "--connect, which prints the measurement.",
    )
    ends = parser.add_mutually_exclusive_group(required=True)
    ends.add_argument("--listen", action="store_true", help="answer the other machine, at all addresses")
    ends.add_argument("--connect", metavar="HOST", help="name or address of the machine that listens")
    parser.add_argument(
        "--port",
        type=_parse_port,
        default=names.DEFAULT_NETWORK_PORT,
        help=f"TCP port of the machine that listens; default: {names.DEFAULT_NETWORK_PORT}",
    )
    parser.add_argument(
        "--wait",
        type=_parse_positive_seconds,
        default=WAIT_S,
        metavar="SECONDS",
        help=f"time for the other machine to begin; default: {WAIT_S:g}",
    )
    parser.add_argument(
        "--limit",
        type=_parse_positive_seconds,
        default=LIMIT_S,
        metavar="SECONDS",
        help=f"time for the measurement; default: {LIMIT_S:g}",
    )
    parser.add_argument(
        "--linger",
        type=_parse_seconds,
        default=0.0,
        metavar="SECONDS",
        help="with --listen: time after a measurement in which it may be repeated; default: 0",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="with --connect: file to write instead of stdout"
    )
    parser.add_argument(
        "--termination-message-path",
        type=Path,
        help="file for the measurement or the failure, in addition to --output",
    )
    return parser


def _listen(arguments: argparse.Namespace) -> str:
    """Answers a machine that measures; returns "".

    Raises:
        ContractError: the port is in use, or no machine has measured.
    """
    port = arguments.port
    try:
        listener = addresses.open_listener("", port)
    except OSError as error:
        raise ContractError(
            f"port {port}: cannot be opened ({error.strerror}). End the program that uses it, or choose "
            "another --port on both machines"
        ) from error
    with listener:
        listener.listen(1)
        _report(f"listening at port {port}")
        answer_clients(
            listener,
            _own_version(),
            wait_s=arguments.wait,
            limit_s=arguments.limit,
            linger_s=arguments.linger,
            report=_report,
        )
    return ""


def _measure(arguments: argparse.Namespace) -> str:
    """Measures the network to the machine that listens, and returns the measurement.

    Raises:
        ContractError: the machine cannot be reached, the measurement failed, or the file cannot be written.
    """
    host, port, version = arguments.connect, arguments.port, _own_version()
    with connect(host, port, version, Deadline.after(arguments.wait)) as connected:
        try:
            measured = measure(connected, version, Deadline.after(arguments.limit))
        except OSError as error:
            raise ContractError(
                f"{host} port {port}: the measurement failed ({error}). Check the network between the two "
                f"machines, or raise --limit of both (got {arguments.limit:g} s)"
            ) from error
    text = measured.to_json()
    if arguments.output is None:
        sys.stdout.write(text + "\n")
        return text
    try:
        arguments.output.write_text(text + "\n")
    except OSError as error:
        raise ContractError(
            f"{arguments.output}: cannot be written ({error.strerror}). Make the folder writable, or choose "
            "another file with --output"
        ) from error
    _report(describe(measured))
    return text


def describe(measured: NetworkMeasurement) -> str:
    """Describes a measurement for the log."""
    return (
        f"round trip {measured.round_trip_s * 1e6:.0f} us, "
        f"{format_bytes(int(measured.to_listener_bytes_per_s))} per second to the listener, "
        f"{format_bytes(int(measured.to_client_bytes_per_s))} per second back"
    )


def _report(line: str) -> None:
    """Writes a line of the log."""
    sys.stderr.write(f"{_COMMAND}: {line}\n")
    sys.stderr.flush()


def _own_version() -> str:
    """Returns the version of HeteroInfer; "none" if it is not installed."""
    try:
        return metadata.version("heteroinfer")
    except metadata.PackageNotFoundError:
        return "none"


def _parse_port(text: str) -> int:
    """Parses a port; raises ArgumentTypeError."""
    if not text.isdecimal() or not 0 < int(text) <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"must be a port from 1 to {MAX_PORT} (got {text!r})")
    return int(text)


def _parse_positive_seconds(text: str) -> float:
    """Parses a number of seconds above 0; raises ArgumentTypeError."""
    seconds = _parse_seconds(text)
    if not seconds:
        raise argparse.ArgumentTypeError(f"must be more than 0 seconds (got {text!r})")
    return seconds


def _parse_seconds(text: str) -> float:
    """Parses a number of seconds; raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0  # refused below
    if not 0 <= seconds <= _MOST_S:
        raise argparse.ArgumentTypeError(f"must be 0 to {_MOST_S:g} seconds (got {text!r})")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
