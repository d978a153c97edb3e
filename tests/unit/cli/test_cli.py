"""The shell of the command line, and `heteroinfer crd`."""

from pathlib import Path

import pytest
from kubernetes.aio.config import kube_config

from heteroinfer_operator.api.crd import render_crd
from heteroinfer_operator.cli import COMMANDS, main
from heteroinfer_operator.commands.crd_command import COPIES


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


@pytest.mark.parametrize("arguments", [[], ["unknown"]])
def test_no_command_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: heteroinfer" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["top"], ["logs", "tiny"]])
def test_without_a_kubeconfig_one_message_names_it(
    command: list[str],
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """The client had warned twice before it."""
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", f"{tmp_path}/none")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    assert main(command) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert f"no kubeconfig ({tmp_path}/none does not exist)" in err
    assert caplog.records == []


def test_crd_prints_the_generated_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crd"]) == 0
    assert capsys.readouterr().out == render_crd()


def test_crd_writes_every_copy(tmp_path: Path) -> None:
    (tmp_path / "operator" / "src" / "heteroinfer_operator").mkdir(parents=True)
    assert main(["crd", "--write", str(tmp_path)]) == 0
    assert {(tmp_path / copy).read_text() for copy in COPIES} == {render_crd()}


def test_crd_writes_into_a_source_tree_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["crd", "--write", str(tmp_path)]) == 1
    assert "is not the source tree of HeteroInfer" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
