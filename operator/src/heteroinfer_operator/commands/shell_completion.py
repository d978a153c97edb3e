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
"""For the names of resources: a shell that completes must not seem to hang."""
_LINE: Final = "COMP_LINE"
"""Variable with the line that the shell completes; bash's own name."""
_NO_FILES: Final = 4
"""kubectl's word for "offer no files" (cobra's ShellCompDirectiveNoFileComp)."""

BuildParser = Callable[[Sequence[str]], argparse.ArgumentParser]


class _NoFiles(BaseCompleter):
    """Completes nothing, in place of the names of files."""

    def __call__(self, **_: Any) -> Sequence[str]:
        return ()


def render_script(shell: str) -> str:
    """Returns the script that a shell sources."""
    return shellcode([PROGRAM], shell=shell) + "\n"


def complete(build_parser: BuildParser) -> None:
    """Answers the shell, which describes the line in the environment, and ends the process."""
    line = os.environ.get(_LINE, "")
    parser = build_parser(line.split()[1:])
    _complete_names(parser)
    argcomplete.autocomplete(parser)


def complete_for_kubectl(build_parser: BuildParser, words: Sequence[str]) -> None:
    """Answers kubectl, which passes the words after `kubectl heteroinfer`; the last is incomplete.

    Source: kubectl calls `kubectl_complete-NAME` on the PATH and expects one completion per line,
    then a directive.
    """
    *done, last = words or ("",)
    parser = build_parser([*done, last])
    _complete_names(parser)
    line = f"{shlex.join([PROGRAM, *done])} {last}"
    answer = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", _LINE: line, "COMP_POINT": str(len(line))}
    os.environ.update(answer)
    argcomplete.autocomplete(
        parser, exit_method=lambda _: None, output_stream=sys.stdout, default_completer=_NoFiles()
    )
    sys.stdout.write(f"\n:{_NO_FILES}\n")


def _complete_names(parser: argparse.ArgumentParser) -> None:
    """Lets each argument NAME of the sub-commands complete the names of resources."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_names(command)
        elif action.dest in {"name", "names"}:
            setattr(action, "completer", _resource_names)  # noqa: B010 - argcomplete looks for it, mypy does not


def _resource_names(prefix: str, parsed_args: argparse.Namespace, **_: Any) -> list[str]:
    """Asks the cluster for names; a cluster that does not answer completes nothing."""
    try:
        found = asyncio.run(_read_names(parsed_args))
    except (HeteroInferError, TimeoutError):
        return []
    return [name for name in found if name.startswith(prefix)]


async def _read_names(arguments: argparse.Namespace) -> list[str]:
    async with asyncio.timeout(NAMES_TIMEOUT_S), open_cluster(arguments) as cluster:
        resources = await read_resources(cluster.server, cluster.namespace, None)
    return [resource.key.name for resource in resources]
