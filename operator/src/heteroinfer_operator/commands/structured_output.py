"""Values as JSON or YAML, for `-o json` and `-o yaml`."""

import argparse
import json
import sys
from typing import Any

import yaml


def add_output_option(parser: argparse._ActionsContainer, default: str, *, note: str = "") -> None:
    """Adds `-o` with the choices `default`, json and yaml."""
    parser.add_argument(
        "-o",
        "--output",
        choices=(default, "json", "yaml"),
        default=default,
        help=f"format of the output; default: {default}{note and f'. {note}'}",
    )


def write_value(value: Any, output: str) -> None:
    """Prints a JSON value. Both forms escape control characters, so names cannot reach the terminal."""
    sys.stdout.write(render_value(value, output))


def render_value(value: Any, output: str) -> str:
    """Returns a JSON value as JSON or YAML text, with a line break at its end."""
    if output == "json":
        return json.dumps(value, indent=2) + "\n"
    return yaml.safe_dump(value, sort_keys=False)
