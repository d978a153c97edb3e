"""`heteroinfer completion`: prints the script with which a shell completes commands, options and names."""

import argparse
import sys

from heteroinfer_operator.commands.shell_completion import SHELLS, render_script


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `heteroinfer completion`."""
    parser.add_argument("shell", choices=SHELLS, help="your shell")


def run(arguments: argparse.Namespace) -> int:
    """Prints the script; returns 0."""
    sys.stdout.write(render_script(arguments.shell))
    return 0
