"""The resource that `heteroinfer up` runs: the user's file, with the model of this machine."""

from pathlib import Path
from typing import Any

from heteroinfer_operator.api import HeteroInference, parse_resource
from heteroinfer_operator.errors import SpecError
from heteroinfer_operator.resource_file import load_document


def read_resource(file: str, *, model_dir: Path | None = None) -> tuple[dict[str, Any], HeteroInference]:
    """Returns the resource of a file as JSON values, and as its models read it.

    Args:
        file: YAML or JSON; `-` is stdin.
        model_dir: where the model is on this machine, in place of `spec.model.uri`.

    Raises:
        SpecError: the file is no good, or a field is wrong; a line for each problem.
    """
    document = load_document(file)
    if model_dir is not None:
        document = with_model_dir(document, model_dir.resolve())
    try:
        return document, parse_resource(document)
    except SpecError as error:
        raise SpecError(f"{file}: {problem}" for problem in error.problems) from None


def with_model_dir(document: dict[str, Any], model_dir: Path) -> dict[str, Any]:
    """Returns the resource with its model at `model_dir`, an absolute path; its served name stays."""
    spec = document.get("spec")
    if not isinstance(spec, dict):
        return document  # left to the models, which say what is missing
    model = spec.get("model")
    kept = {"servedName": model["servedName"]} if isinstance(model, dict) and "servedName" in model else {}
    return {**document, "spec": {**spec, "model": {**kept, "uri": f"file://{model_dir}"}}}
