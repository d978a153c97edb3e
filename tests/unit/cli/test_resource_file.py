"""Files are read as strictly as `kubectl apply` reads them."""

import io
from pathlib import Path

import pytest

from heteroinfer_operator.commands.resource_file import load_document, load_resource
from heteroinfer_operator.errors import SpecError

GOOD = """\
apiVersion: heteroinfer.dev/v1alpha1
kind: HeteroInference
metadata: {name: llama}
spec:
  restartedAt: 2026-11-21T12:00:00Z
  model: {uri: hf://org/model}
  roles: [{name: cpu, device: CPU}]
"""


def refused(tmp_path: Path, text: str) -> str:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(SpecError) as caught:
        load_resource(str(file))
    return caught.value.message.removeprefix(f"{file}: ")


def test_a_timestamp_stays_text(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(GOOD)
    assert load_resource(str(file)).spec.restarted_at == "2026-11-21T12:00:00Z"


def test_a_file_may_have_documents_of_other_kinds(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(f"kind: Secret\n---\n{GOOD}---\n")
    assert load_document(str(file))["metadata"] == {"name": "llama"}


def test_reads_a_resource_from_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(GOOD))
    assert load_resource("-").metadata.name == "llama"


def test_reports_a_missing_file() -> None:
    with pytest.raises(SpecError, match=r"^/nowhere\.yaml: No such file or directory. Name a file"):
        load_resource("/nowhere.yaml")


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("", "nothing"),
        ("kind: Deployment", "Deployment"),
        (f"{GOOD}---\n{GOOD}", "HeteroInference, HeteroInference"),
    ],
)
def test_refuses_files_without_exactly_one_resource(text: str, got: str, tmp_path: Path) -> None:
    problem = f"must contain exactly one document of kind HeteroInference (got {got})"
    assert refused(tmp_path, text) == f"{problem}. Use one file for each resource"


def test_refuses_a_document_that_is_not_an_object(tmp_path: Path) -> None:
    assert refused(tmp_path, "- 1") == (
        "each document must have apiVersion and kind (got a list). Remove or correct this document"
    )


def test_refuses_files_that_are_not_yaml(tmp_path: Path) -> None:
    assert refused(tmp_path, "a: [").startswith("must be YAML (")


@pytest.mark.parametrize(
    "text",
    [
        "roles: &a [*a]",
        "name: !!binary aGk=",
        "name: !!set {a}",
        "restartedAt: !!timestamp 2020-01-01",
    ],
)
def test_values_that_json_lacks_are_refused(tmp_path: Path, text: str) -> None:
    assert "a value has a type that JSON lacks" in refused(tmp_path, f"{GOOD}  x:\n    {text}\n")


@pytest.mark.parametrize("text", ["[a]: b", "{}: b", "x: !!timestamp x", "x: !!int x", "x: " + "[" * 3000])
def test_yaml_that_cannot_be_built_is_refused(tmp_path: Path, text: str) -> None:
    assert "must be YAML (" in refused(tmp_path, f"{GOOD}{text}\n")


def test_a_key_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    message = refused(tmp_path, GOOD + "  model: {uri: hf://org/other}\n")
    assert message.startswith("must be YAML (key 'model' occurs twice. Remove one")
    assert "line 8" in message


def test_problems_name_file_and_field(tmp_path: Path) -> None:
    assert refused(tmp_path, GOOD.replace("device: CPU", "device: TPU")) == (
        "spec.roles[0].device: must be 'CPU' or 'GPU' (got 'TPU')"
    )
