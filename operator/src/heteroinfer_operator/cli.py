"""`heteroinfer`: the shell of the command line. Each sub-command is a module of `commands`, NAME_command.

A sub-command has `add_arguments(parser)` and `run(arguments) -> exit code`, and is imported
only when it is the one that is asked for: `plan` must not wait for kopf's import.
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence
from types import MappingProxyType
from typing import Final

from heteroinfer_contract.names import exit_code_of
from heteroinfer_contract.printable import printable
from heteroinfer_operator.errors import HeteroInferError

COMMANDS: Final = MappingProxyType(
    {
        "up": "run a HeteroInference on this machine, without a cluster",
        "top": "show the groups and ranks of a cluster, kept up to date",
        "logs": "print the logs of a resource's ranks, the culprit's first",
        "plan": "print who would be which rank, with which layers, without a cluster",
        "calibrate": "measure this machine, so that plan and up know how fast it is",
        "crd": "print the CustomResourceDefinition",
        "operator": "run the operator (in a cluster)",
    }
)
"""Name of each sub-command, whose module is NAME_command, and what it does."""

EXIT_REFUSED: Final = 1
EXIT_INTERRUPTED: Final = exit_code_of(signal.SIGINT)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a sub-command; returns its exit code. An error of ours is one message on stderr."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    parser = argparse.ArgumentParser(
        prog="heteroinfer",
        description="One model on GPUs and CPU nodes, as one vLLM engine.",
    )
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, purpose in COMMANDS.items():
        # capitalize() would write the kinds of Kubernetes in lower case.
        description = f"{purpose[0].upper()}{purpose[1:]}."
        command = subparsers.add_parser(name, help=purpose, description=description)
        if arguments[:1] == [name]:
            module = importlib.import_module(f"heteroinfer_operator.commands.{name}_command")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except HeteroInferError as error:
        for line in error.message.splitlines():
            sys.stderr.write(f"error: {printable(line)}\n")
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
