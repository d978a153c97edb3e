"""A YAML file as the one HeteroInference that it must hold."""

from pathlib import Path
from typing import Any

import yaml

from heteroinfer_contract import names
from heteroinfer_operator.api import parse_resource
from heteroinfer_operator.errors import SpecError


def read_resource(path: Path, *, model_dir: Path | None = None) -> dict[str, Any]:
    """Returns the resource as JSON values, valid by its models.

    Args:
        path: of a YAML file.
        model_dir: where the model is on this machine, in place of `spec.model.uri`.

    Raises:
        SpecError: the file cannot be read, is not YAML, holds something else, or a field
            is wrong; a line for each problem.
    """
    try:
        documents = [item for item in yaml.safe_load_all(path.read_text()) if item is not None]
    except OSError as error:
        raise SpecError([f"{path}: cannot be read: {error.strerror}; name a YAML file with -f"]) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError([f"{path}: not YAML: {error}"]) from error
    resource = _only_resource(path, documents)
    if model_dir is not None:
        resource = with_model_dir(resource, model_dir.resolve())
    try:
        parse_resource(resource)
    except SpecError as error:
        raise SpecError(f"{path}: {problem}" for problem in error.problems) from error
    return resource


def with_model_dir(resource: dict[str, Any], model_dir: Path) -> dict[str, Any]:
    """Returns the resource with its model at `model_dir`, an absolute path; its served name stays."""
    spec = resource.get("spec")
    if not isinstance(spec, dict):
        return resource  # left to the models, which say what is missing
    model = spec.get("model")
    kept = {"servedName": model["servedName"]} if isinstance(model, dict) and "servedName" in model else {}
    return {**resource, "spec": {**spec, "model": {**kept, "uri": f"file://{model_dir}"}}}


def _only_resource(path: Path, documents: list[Any]) -> dict[str, Any]:
    kinds = [item.get("kind", "?") if isinstance(item, dict) else "?" for item in documents]
    if kinds != [names.KIND]:
        found = ", ".join(map(str, kinds)) or "nothing"
        raise SpecError(
            [
                f"{path}: got {found}, expected one {names.KIND} "
                f"(apiVersion: {names.API_GROUP}/{names.API_VERSION}); put each into a file of its own"
            ]
        )
    resource: dict[str, Any] = documents[0]
    return resource
