"""Completion of the command line in shells, by argcomplete.

Imported only while a shell completes, or for `heteroinfer completion`.
"""

import argparse
import asyncio
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import argcomplete
from argcomplete.completers import BaseCompleter
from argcomplete.shell_integration import shellcode

from heteroinfer_operator.commands.cluster_access import open_cluster
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.fleet.fleet_reader import read_resources

PROGRAM: Final = "heteroinfer"
SHELLS: Final = ("bash", "zsh", "fish")
NAMES_TIMEOUT_S: Final = 2.0
"""Time limit for reading the names of resources, so that the shell does not seem to hang."""
_LINE_VARIABLE: Final = "COMP_LINE"
"""Environment variable with the line that the shell completes. argcomplete uses Bash's name for all
shells."""
_NO_FILES: Final = 4
"""Directive after which kubectl does not offer names of files (ShellCompDirectiveNoFileComp of cobra)."""

BuildParser = Callable[[Sequence[str]], argparse.ArgumentParser]


class _NoFiles(BaseCompleter):
    """Completes nothing. Without a completer, argcomplete would complete names of files."""

    def __call__(self, **_: Any) -> Sequence[str]:
        return ()


def render_script(shell: str) -> str:
    """Returns the script that a shell sources."""
    return shellcode([PROGRAM], shell=shell) + "\n"


def complete(build_parser: BuildParser) -> None:
    """Prints completions for the line in the environment, and ends the process."""
    line = os.environ.get(_LINE_VARIABLE, "")
    parser = build_parser(line.split()[1:])
    _complete_names(parser)
    argcomplete.autocomplete(parser)


def complete_for_kubectl(build_parser: BuildParser, words: Sequence[str]) -> None:
    """Prints completions for kubectl, one a line, then a directive.

    To complete `kubectl heteroinfer`, kubectl runs the program `kubectl_complete-heteroinfer`, which calls
    this function. The function sets the variables that a shell would set for argcomplete.

    Args:
        words: words after `kubectl heteroinfer`. The last word is incomplete.
    """
    *complete_words, last_word = words or ("",)
    parser = build_parser([*complete_words, last_word])
    _complete_names(parser)
    line = f"{shlex.join([PROGRAM, *complete_words])} {last_word}"
    variables = {
        "_ARGCOMPLETE": "1",
        "_ARGCOMPLETE_IFS": "\n",
        _LINE_VARIABLE: line,
        "COMP_POINT": str(len(line)),
    }
    os.environ.update(variables)
    argcomplete.autocomplete(
        parser, exit_method=lambda _: None, output_stream=sys.stdout, default_completer=_NoFiles()
    )
    sys.stdout.write(f"\n:{_NO_FILES}\n")


def _complete_names(parser: argparse.ArgumentParser) -> None:
    """Sets the completer of resource names for each argument NAME of the sub-commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_names(command)
        elif action.dest in {"name", "names"}:
            setattr(action, "completer", _resource_names)  # noqa: B010 - argcomplete looks for it, mypy does not


def _resource_names(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Returns the names of resources in the cluster; none if the cluster does not answer."""
    try:
        names_in_namespace = asyncio.run(_read_names(parsed_args))
    except (HeteroInferError, TimeoutError):
        return []
    return [name for name in names_in_namespace if name.startswith(prefix)]


async def _read_names(arguments: argparse.Namespace) -> list[str]:
    """Returns the names of the resources in the namespace that the options name."""
    async with asyncio.timeout(NAMES_TIMEOUT_S), open_cluster(arguments) as cluster:
        resources = await read_resources(cluster.server, cluster.namespace, None)
    return [resource.key.name for resource in resources]
