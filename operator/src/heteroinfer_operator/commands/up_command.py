"""`heteroinfer up`: serves one HeteroInference on this machine, until Ctrl-C."""

import argparse
import asyncio
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.logging import RichHandler

from heteroinfer_operator.commands.printable_logs import PrintableFormatter
from heteroinfer_operator.commands.resource_file import read_resource
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.local import calibration_file
from heteroinfer_operator.local.adapter import LocalOptions
from heteroinfer_operator.local.calibration_file import cache_folder
from heteroinfer_operator.local.this_node import check_platform, observe_gpus, observe_node
from heteroinfer_operator.local.worker_python import HELP as WORKER_PYTHON_HELP
from heteroinfer_operator.local.worker_python import find_worker_python
from heteroinfer_operator.nodes.calibrations import Calibrations
from heteroinfer_operator.up.console import Display
from heteroinfer_operator.up.session import Session

EXIT_OK: Final = 0
_LONGEST_TEMPORARY_FOLDER: Final = 40
"""In bytes. The path of a socket may have 107 bytes (unix(7)). The folder's path is followed by
`/heteroinfer-XXXXXXXX/p9999/tmp/` and a UUID."""
_WIDTH_OF_FILES: Final = 120
"""Columns if the output is not a terminal: room for a whole row of the table."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer up`."""
    parser.add_argument(
        "-f",
        "--filename",
        type=Path,
        required=True,
        metavar="FILE",
        help="file with a HeteroInference. References to Secrets in engine.env are refused: export these "
        "variables instead",
    )
    parser.add_argument(
        "--model-dir", type=Path, metavar="DIR", help="folder of the model; replaces the file's model.uri"
    )
    parser.add_argument(
        "--model-cache",
        type=Path,
        metavar="DIR",
        help="folder for models from a hub (hf://); default: heteroinfer/models in your cache folder",
    )
    parser.add_argument(
        "--port", type=_port, help="port of the OpenAI API on 127.0.0.1; replaces the file's engine.port"
    )
    parser.add_argument("--worker-python", type=Path, metavar="PYTHON", help=WORKER_PYTHON_HELP)
    parser.add_argument(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="folder for the output of each pod, POD.log; default: a temporary folder, kept after a failure",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this machine first, like `heteroinfer calibrate` (under a minute)",
    )
    parser.add_argument("--no-table", action="store_true", help="print lines instead of a live table")


def run(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C; returns the exit code.

    Raises:
        HeteroInferError: the file is invalid, or the resource failed or cannot run on this machine.
    """
    document, resource = read_resource(arguments.filename, model_dir=arguments.model_dir)
    node = observe_node()
    check_platform(resource.spec, node)
    worker_python = find_worker_python(arguments.worker_python)
    calibrations = _read_calibrations(worker_python, measure=arguments.calibrate)
    console = Console()
    if not console.is_terminal:
        console.width = _WIDTH_OF_FILES
    handler = RichHandler(console=console, show_path=False)
    handler.setFormatter(PrintableFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    with _pod_folders(arguments.log_dir) as (scratch, log_dir):
        local = LocalOptions(
            worker_python=worker_python,
            scratch=scratch,
            log_dir=log_dir,
            node=node,
            gpus=observe_gpus(),
            env=dict(os.environ),
            calibrations=calibrations,
        )
        with Display(console, live=console.is_terminal and not arguments.no_table) as display:
            display.print_line(f"output of each pod: {log_dir}/POD.log")
            session = Session(
                document,
                resource,
                api_port=arguments.port or resource.spec.engine.port,
                model_cache=(arguments.model_cache or cache_folder() / "models").resolve(),
                local=local,
                display=display,
            )
            try:
                asyncio.run(session.run())
            except HeteroInferError:
                if any(log_dir.iterdir()):
                    display.print_line(f"the output of each pod is in {log_dir}")
                raise
    return EXIT_OK


def _read_calibrations(worker_python: Path, *, measure: bool) -> Calibrations:
    """Reads the calibration of this machine.

    Args:
        measure: whether to measure the machine first.
    """
    folder = cache_folder()
    if measure:
        sys.stderr.write(calibration_file.MEASURING)
        calibration_file.write_calibration_file(
            calibration_file.measure(worker_python), folder / calibration_file.FILE_NAME
        )
    calibration, missing = calibration_file.read_own_calibration(folder)
    return Calibrations(this_machine=calibration, missing=missing)


@contextmanager
def _pod_folders(log_dir: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yields the pods' scratch folder and the folder of logs.

    Removes the scratch folder at the end. If the user named no folder of logs, the temporary folder of logs
    stays only after a failure, and only if it has files.
    """
    with tempfile.TemporaryDirectory(prefix="heteroinfer-", dir=_short_temporary_folder()) as scratch:
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
            yield Path(scratch), log_dir.resolve()
            return
        temporary = Path(tempfile.mkdtemp(prefix="heteroinfer-logs-"))
        try:
            yield Path(scratch), temporary
        except HeteroInferError:
            if not any(temporary.iterdir()):
                temporary.rmdir()
            raise
        shutil.rmtree(temporary)


def _short_temporary_folder() -> Path:
    """Returns a folder in which the paths of pods' sockets are short enough: the usual folder, or /tmp."""
    usual = Path(tempfile.gettempdir())
    return usual if len(os.fsencode(usual)) <= _LONGEST_TEMPORARY_FOLDER else Path("/tmp")  # noqa: S108 - made private below it


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"must be a port, 1 to 65535 (got {text!r})")
    return int(text)
