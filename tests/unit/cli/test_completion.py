"""Completion in real shells, and by kubectl's own protocol."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from heteroinfer_operator.cli import COMMANDS
from heteroinfer_operator.commands.shell_completion import SHELLS, render_script


def completions(line: str, folder: Path) -> list[str]:
    """Returns what the program answers to a shell that completes a line."""
    answer = folder / "answer"
    env = {
        **os.environ, "_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n",
        "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        "COMP_LINE": line, "COMP_POINT": str(len(line)), "KUBECONFIG": str(folder / "none"),
    }  # fmt: skip
    env.pop("KUBERNETES_SERVICE_HOST", None)
    subprocess.run([sys.executable, "-m", "heteroinfer_operator.cli"], env=env, check=True, timeout=60)
    return [word.strip() for word in answer.read_text().splitlines()]


def test_commands_and_options_are_completed(tmp_path: Path) -> None:
    assert set(completions("heteroinfer ", tmp_path)) >= set(COMMANDS)
    assert completions("heteroinfer sta", tmp_path) == ["status"]
    assert {"--context", "--namespace", "--once"} <= set(completions("heteroinfer top --", tmp_path))
    assert set(completions("heteroinfer top -o ", tmp_path)) == {"table", "json", "yaml"}


def test_without_a_cluster_a_name_completes_nothing(tmp_path: Path) -> None:
    assert not [word for word in completions("heteroinfer status lla", tmp_path) if word.startswith("lla")]


def test_kubectl_gets_one_completion_per_line_and_then_a_directive() -> None:
    call = "from heteroinfer_operator.cli import complete_for_kubectl; complete_for_kubectl()"
    done = subprocess.run(
        [sys.executable, "-c", call, "top", "--al"], capture_output=True, text=True, check=True, timeout=60
    )
    assert [word.strip() for word in done.stdout.splitlines()] == ["--all-namespaces", ":4"]


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_a_script_of_its_own(shell: str) -> None:
    script = render_script(shell)
    assert "heteroinfer" in script
    assert "_ARGCOMPLETE" in script


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    program = tmp_path / "heteroinfer"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m heteroinfer_operator.cli "$@"\n')
    program.chmod(0o700)
    script = (
        f"{render_script('bash')}\n"
        "COMP_LINE='heteroinfer sus'; COMP_POINT=15; COMP_TYPE=9\n"
        "COMP_WORDS=(heteroinfer sus); COMP_CWORD=1\n"
        "_python_argcomplete heteroinfer sus heteroinfer\n"
        'echo "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["suspend"], done.stderr
