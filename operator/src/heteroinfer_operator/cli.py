"""Entry point of the `heteroinfer` command. Each sub-command is a module `commands.NAME_command`.

A sub-command has `add_arguments(parser)` and `run(arguments) -> exit code`. The module is imported only if
the user names the sub-command, so that `plan` does not wait for kopf's import. Installed as
`kubectl-heteroinfer`, the same program is a plugin: `kubectl heteroinfer top`.
"""

import argparse
import difflib
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Final, NoReturn

from heteroinfer_contract.names import exit_code_of_signal
from heteroinfer_contract.printable import printable
from heteroinfer_operator.errors import HeteroInferError

COMMANDS: Final = MappingProxyType(
    {
        "new": "write a HeteroInference for a model and your hardware",
        "up": "run a HeteroInference on this machine, without a cluster",
        "status": "show one resource at a glance: its problems, groups, ranks and the next step",
        "top": "show the groups and ranks of a cluster in a live table",
        "logs": "print the logs of a resource's pods, starting with the pod that ended the epoch",
        "plan": "print whether a HeteroInference fits, how fast it is, and its ranks, without a cluster",
        "report": "write a support bundle: manifests, plans, events, logs, versions, without secrets",
        "restart": "start all groups of resources again, as rollout.maxUnavailable allows",
        "suspend": "stop all groups of resources, but keep their number of replicas for `resume`",
        "resume": "start the groups of suspended resources",
        "wake": "wake the sleeping groups of a resource",
        "calibrate": "measure this machine, so that plan and up know how fast it is",
        "version": "print the versions of this client, of the operators and of the CRD in the cluster",
        "check": "check that a cluster has what HeteroInfer needs, for administrators",
        "crd": "print the CustomResourceDefinition",
        "completion": "print the script that completes commands, options and names in your shell",
        "operator": "run the operator (in a cluster)",
    }
)
"""Purpose of each sub-command, by name."""
EXAMPLES: Final = MappingProxyType(
    {
        "new": "{prog} new hf://Qwen/Qwen3-30B-A3B --gpu-memory 24Gi --cpus 16 --cpu-memory 64Gi",
        "up": "{prog} up -f examples/quickstart.yaml --model-dir ~/models/qwen",
        "status": "{prog} status llama -n models",
        "top": "{prog} top -n models",
        "logs": "{prog} logs llama --previous",
        "plan": "{prog} plan -f examples/gpu-and-cpu.yaml --model-dir ~/models/llama --choices",
        "report": "{prog} report llama -n models",
        "restart": "{prog} restart llama -n models",
        "suspend": "{prog} suspend -l team=search -n models",
        "resume": "{prog} resume llama -n models",
        "wake": "{prog} wake llama -n models",
        "calibrate": "{prog} calibrate -o m7i.json",
        "version": "{prog} version --context production",
        "check": "{prog} check --wait 2m",
        "crd": "{prog} crd | kubectl apply --server-side -f -",
        "completion": "{prog} completion fish > ~/.config/fish/completions/heteroinfer.fish",
        "operator": "{prog} operator --check",
    }
)
"""An example for the help of each sub-command."""

EXIT_REFUSED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = exit_code_of_signal(signal.SIGINT)
EXIT_OUTPUT_CLOSED: Final = exit_code_of_signal(signal.SIGPIPE)

_COMPLETES: Final = "_ARGCOMPLETE"
"""Variable that the script of `heteroinfer completion` sets while a shell completes a line."""
_PLUGIN: Final = "kubectl-"
"""Prefix by which kubectl finds its plugins on the PATH."""


class _CommandParser(argparse.ArgumentParser):
    """A parser that suggests the most similar sub-command for a misspelt sub-command."""

    words: Sequence[str] = ()
    """Arguments of the command line."""

    def error(self, message: str) -> NoReturn:
        """Prints the usage and the error, and exits with EXIT_USAGE.

        The first argument without a hyphen counts as the sub-command. If this argument is unknown but similar
        to a sub-command, the error names the similar sub-command.
        """
        command = next((word for word in self.words if not word.startswith("-")), "")
        similar = difflib.get_close_matches(command, COMMANDS, n=1) if command not in COMMANDS else []
        if similar:
            message = f"unknown command {command!r}. The most similar command is {similar[0]}"
        super().error(printable(message))


class _PrintVersion(argparse.Action):
    """Prints the version. Reads it only if the user asks for it, because package metadata is slow to read."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        version = importlib.import_module("heteroinfer_operator.version")
        sys.stdout.write(f"{parser.prog} {version.own_version()}\n")
        parser.exit()


def build_parser(
    arguments: Sequence[str], *, prog: str = "heteroinfer", all_commands: bool = False
) -> argparse.ArgumentParser:
    """Returns the parser with the options of the sub-command that `arguments` begins with.

    Args:
        all_commands: whether to add the options of all sub-commands, for the reference page and completion.
    """
    parser = _CommandParser(
        prog=prog,
        description="Serves one model on GPUs and CPUs together with vLLM.",
        epilog=f"`{prog} COMMAND --help` shows the options of a command, and an example.",
    )
    parser.words = arguments
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version of this client")
    subparsers = parser.add_subparsers(
        dest="command", metavar="COMMAND", parser_class=argparse.ArgumentParser
    )
    for name, purpose in COMMANDS.items():
        # capitalize() would turn HeteroInference into heteroinference.
        description = f"{purpose[0].upper()}{purpose[1:]}."
        command = subparsers.add_parser(
            name,
            help=purpose,
            description=description,
            epilog=f"example:\n  {EXAMPLES[name].format(prog=prog)}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if all_commands or arguments[:1] == [name]:
            module = importlib.import_module(f"heteroinfer_operator.commands.{name}_command")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a sub-command and returns its exit code. Prints a HeteroInferError as a message on stderr."""
    if _COMPLETES in os.environ:
        _load_completion().complete(build_parser)  # ends the process
    try:
        try:
            return _run(sys.argv[1:] if argv is None else list(argv))
        finally:
            sys.stdout.flush()  # also after --help, which ends by SystemExit
    except BrokenPipeError:
        # The reader of the output, such as `head`, has ended. When Python exits, it writes the rest of the
        # output. The rest goes to /dev/null, so that this write does not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_OUTPUT_CLOSED


def _run(arguments: Sequence[str]) -> int:
    """Runs a sub-command, or prints the help without one. Returns the exit code."""
    parser = build_parser(arguments, prog=_program())
    parsed = parser.parse_args(arguments)
    if parsed.command is None:
        parser.print_help()
        return 0
    try:
        return int(parsed.run(parsed))
    except HeteroInferError as error:
        for line in error.message.splitlines():
            sys.stderr.write(f"error: {printable(line)}\n")
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def complete_for_kubectl() -> None:
    """Prints completions of `kubectl heteroinfer`. `kubectl_complete-heteroinfer` calls this function."""
    _load_completion().complete_for_kubectl(build_parser, sys.argv[1:])


def _load_completion() -> ModuleType:
    return importlib.import_module("heteroinfer_operator.commands.shell_completion")


def _program() -> str:
    """Returns the program as the user typed it: `heteroinfer`, or `kubectl heteroinfer` for the plugin."""
    is_plugin = Path(sys.argv[0]).name.startswith(_PLUGIN)
    return "kubectl heteroinfer" if is_plugin else "heteroinfer"


if __name__ == "__main__":
    sys.exit(main())
