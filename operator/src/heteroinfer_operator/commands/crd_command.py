"""`heteroinfer crd`: prints the CustomResourceDefinition, or writes its copies in the source tree."""

import argparse
import sys
from pathlib import Path
from typing import Final

from heteroinfer_operator.api.crd import render_crd
from heteroinfer_operator.api.reference_page import PAGE, render_page
from heteroinfer_operator.errors import HeteroInferError

COPIES: Final = ("crds/heteroinference.yaml", "charts/heteroinfer/files/heteroinference.yaml")
"""Copies of the generated text in the source tree. A template of the chart includes the second copy."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer crd`."""
    parser.add_argument(
        "--write",
        metavar="DIR",
        nargs="?",
        const=".",
        help=f"write {', '.join(COPIES)} and {PAGE} in the source tree DIR (default: the current folder)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints or writes the CRD; returns 0.

    Raises:
        HeteroInferError: the directory is not a source tree of HeteroInfer.
    """
    text = render_crd()
    if arguments.write is None:
        sys.stdout.write(text)
        return 0
    root = Path(arguments.write)
    if not (root / "operator" / "src" / "heteroinfer_operator").is_dir():
        raise HeteroInferError(
            f"--write: {root.resolve()} is not a source tree of HeteroInfer. Set --write to the root of a "
            "clone of its repository",
            reason="NoSourceTree",
        )
    for name, written in {**dict.fromkeys(COPIES, text), PAGE: render_page()}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(written, encoding="utf-8")
        sys.stderr.write(f"wrote {path}\n")
    return 0
