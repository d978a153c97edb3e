"""The shell of the command line, and `heteroinfer crd`."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from kubernetes.aio.config import kube_config

from heteroinfer_operator.api.crd import render_crd
from heteroinfer_operator.cli import COMMANDS, EXAMPLES, EXIT_OUTPUT_CLOSED, build_parser, main
from heteroinfer_operator.commands.crd_command import COPIES
from heteroinfer_operator.version import own_version


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_own_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: heteroinfer {name} ")
    purpose = " ".join(COMMANDS[name].split())
    assert f"{purpose[0].upper()}{purpose[1:]}." in " ".join(out.split()), "kinds keep their capitals"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_an_example_that_it_accepts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    example = EXAMPLES[name].format(prog="heteroinfer")
    assert capsys.readouterr().out.endswith(f"example:\n  {example}\n")
    words = shlex.split(example.split("|")[0].split(" >")[0])[1:]
    assert words[0] == name
    assert build_parser(words).parse_args(words).command == name


def test_without_a_command_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("usage: heteroinfer")
    assert captured.err == ""


def test_prints_the_version_of_the_client(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"heteroinfer {own_version()}\n"


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("pln", "unknown command 'pln'. The most similar command is plan"),
        ("log", "unknown command 'log'. The most similar command is logs"),
        ("xyzzy", "invalid choice: 'xyzzy'"),
        ("\x1b[2Jxyzzy", "invalid choice: '\\x1b[2Jxyzzy'"),
    ],
)
def test_an_unknown_command_is_a_usage_error(
    word: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([word])
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert "usage: heteroinfer" in shown
    assert error in shown


def test_as_a_plugin_the_help_has_the_name_that_the_user_typed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/local/bin/kubectl-heteroinfer", "top", "--help"])
    with pytest.raises(SystemExit):
        main()
    out = capsys.readouterr().out
    assert out.startswith("usage: kubectl heteroinfer top ")
    assert "example:\n  kubectl heteroinfer top" in out


KUBECONFIG = """
apiVersion: v1
kind: Config
current-context: here
clusters: [{name: c, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: u, user: {}}]
contexts:
- {name: here, context: {cluster: c, user: u}}
- {name: there, context: {cluster: c, user: u, namespace: models}}
"""


def test_reports_a_context_that_the_kubeconfig_lacks(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "config"
    file.touch(mode=0o600)
    file.write_text(KUBECONFIG)
    assert main(["top", "--kubeconfig", str(file), "--context", "nowhere"]) == 1
    assert capsys.readouterr().err == (
        "error: --context: the kubeconfig has no context nowhere. Choose one of its contexts: here, there\n"
    )
    assert main(["top", "--once", "--kubeconfig", str(file), "--context", "there"]) == 1
    assert "/namespaces/models/heteroinferences: no answer" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["-A", "-lteam=search"])
def test_a_name_and_an_option_for_several_resources_exclude_each_other(
    option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["top", "llama", option]) == 1
    assert "cannot be combined" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["top"], ["logs", "tiny"]])
def test_a_missing_kubeconfig_is_reported_in_one_message(
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Earlier, the Kubernetes client logged two warnings before this message."""
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", f"{tmp_path}/none")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(command) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"no usable kubeconfig ({tmp_path}/none does not exist)" in err
    assert caplog.records == []


def test_crd_prints_the_generated_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crd"]) == 0
    assert capsys.readouterr().out == render_crd()


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_nobody_reads_ends_the_command_without_a_traceback(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "heteroinfer_operator.cli", "version", "--client"],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (EXIT_OUTPUT_CLOSED, "")


def test_crd_writes_every_copy(tmp_path: Path) -> None:
    (tmp_path / "operator" / "src" / "heteroinfer_operator").mkdir(parents=True)
    assert main(["crd", "--write", str(tmp_path)]) == 0
    assert {(tmp_path / copy).read_text() for copy in COPIES} == {render_crd()}


def test_crd_writes_into_a_source_tree_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crd", "--write", str(tmp_path)]) == 1
    assert "is not a source tree of HeteroInfer" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
