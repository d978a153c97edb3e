"""Writes the page of the command line from its parser: `python -m tests.cli_page`."""

import argparse
from collections.abc import Iterable

from heteroinfer_operator.cli import COMMANDS, EXAMPLES, build_parser
from tests.cluster.folders import REPOSITORY

PAGE = REPOSITORY / "docs" / "user" / "reference" / "cli.md"

_HEAD = """# Command line

This page is generated from the program's own help: `python -m tests.cli_page` writes it.

`heteroinfer COMMAND --help` prints the options of a command and an example. If `kubectl-heteroinfer`
is on your `PATH`, `kubectl heteroinfer COMMAND` runs the same program.

`--kubeconfig`, `--context` and `-n` mean the same as for kubectl. In a pod without them, the program uses
the pod's service account. Text output replaces control characters in names and messages,
so they cannot change your terminal.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | refused, or not found; `error: ...` on stderr has the reason. For `check`: a check failed |
| 2 | a command or an option is wrong |
| 130 | you pressed Ctrl-C |
| 141 | the program that read the output, such as `head`, ended first |

`plan` has [more codes](exit-codes.md#heteroinfer-plan), and so have [worker pods](exit-codes.md#worker-pods).

The commands use your own rights:

| command | rights |
|---|---|
| `status`, `top` | get and list `heteroinferences`; get `pods/proxy` for live values |
| `logs` | get `heteroinferences`, list `pods`, get `pods/log` |
| `restart`, `suspend`, `resume` | get and patch `heteroinferences`; list them for `-l` |
| `wake` | get `heteroinferences`, create `pods/proxy` |
| `report` | those of `status` and `logs`, and list of all objects of a resource, and of events |
| `version` | list `deployments` in all namespaces, get `customresourcedefinitions` |
| `check` | those of `version`, create `subjectaccessreviews`, list nodes, volumes, classes, DaemonSets |

`report` lists the parts that you may not read in `missing.txt`. `check` prints `unknown` for them.

To complete commands, options and the names of resources, source the script of your shell:

```
source <(heteroinfer completion bash)
source <(heteroinfer completion zsh)
heteroinfer completion fish | source
```
"""


def render() -> str:
    """Returns the page."""
    (commands,) = (
        action
        for action in build_parser([], all_commands=True)._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    table = [f"| [`{name}`](#heteroinfer-{name}) | {purpose} |" for name, purpose in COMMANDS.items()]
    parts = [_HEAD, "| command | |\n|---|---|\n" + "\n".join(table) + "\n"]
    parts += ["\n".join(_section(name, commands.choices[name])) + "\n" for name in COMMANDS]
    return "\n".join(parts)


def _section(name: str, parser: argparse.ArgumentParser) -> Iterable[str]:
    yield f"## heteroinfer {name}"
    yield f"{parser.description}"
    yield f"\n```\n{EXAMPLES[name].format(prog='heteroinfer')}\n```\n"
    actions = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
    rows = [_row(action) for action in actions if not isinstance(action, argparse._HelpAction)]
    if rows:
        yield "| argument | |"
        yield "|---|---|"
        yield from rows


def _row(action: argparse.Action) -> str:
    value = action.metavar or ("|".join(map(str, action.choices)) if action.choices else action.dest.upper())
    takes_value = action.nargs != 0
    if action.option_strings:
        written = ", ".join(action.option_strings) + (f" {value}" if takes_value else "")
        note = " (required)" if action.required else ""
    else:
        written = f"[{value}]" if action.nargs in {"?", "*"} else str(value)
        written += "..." if action.nargs in {"*", "+"} else ""
        note = ""
    return f"| `{_escaped(written)}`{note} | {_escaped(action.help or '')} |"


def _escaped(text: str) -> str:
    return text.replace("%%", "%").replace("|", r"\|")


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
