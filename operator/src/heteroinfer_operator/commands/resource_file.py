"""Reads a HeteroInference from a user's file, as strictly as `kubectl apply` does."""

import json
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from heteroinfer_contract import names
from heteroinfer_operator.api import HeteroInference, parse_resource
from heteroinfer_operator.errors import SpecError

STDIN: Final = "-"


def load_resource(file: str) -> HeteroInference:
    """Returns the only HeteroInference in a file; raises SpecError as read_resource does."""
    return read_resource(file)[1]


def read_resource(file: str, *, model_dir: Path | None = None) -> tuple[dict[str, Any], HeteroInference]:
    """Reads the HeteroInference in a YAML or JSON file. Returns its JSON values and the parsed resource.

    Args:
        file: path, or `-` for stdin.
        model_dir: folder of the model on this machine; replaces `spec.model.uri`.

    Raises:
        SpecError: `load_document` raised it, or the resource is invalid. Each line of the message begins
            with the file's name.
    """
    document = load_document(file)
    if model_dir is not None:
        document = with_model_dir(document, model_dir.resolve())
    try:
        return document, parse_resource(document)
    except SpecError as error:
        raise SpecError(f"{file}: {problem}" for problem in error.problems) from None


def with_model_dir(document: dict[str, Any], model_dir: Path) -> dict[str, Any]:
    """Replaces the source of the model by `model_dir`, an absolute path. Keeps the served name."""
    spec = document.get("spec")
    if not isinstance(spec, dict):
        return document  # parse_resource reports the missing field
    model = spec.get("model")
    served_name = (
        {"servedName": model["servedName"]} if isinstance(model, dict) and "servedName" in model else {}
    )
    return {**document, "spec": {**spec, "model": {**served_name, "uri": f"file://{model_dir}"}}}


def load_document(file: str) -> dict[str, Any]:
    """Reads the HeteroInference in a file as JSON values, without validation.

    Skips documents of other kinds in the same file, such as a Secret or a claim.

    Raises:
        SpecError: the file is missing or not YAML, contains no HeteroInference or several, or has a value
            that JSON lacks.
    """
    documents = _read_documents(file)
    resources = [document for document in documents if document.get("kind") == names.KIND]
    if len(resources) != 1:
        kinds = ", ".join(str(document.get("kind", "no kind")) for document in documents) or "nothing"
        problem = f"{file}: must contain exactly one document of kind {names.KIND} (got {kinds})"
        raise SpecError([f"{problem}. Use one file for each resource"])
    try:
        json.dumps(resources[0])
    except (TypeError, ValueError, RecursionError) as error:  # !!binary, !!set, a list that contains itself
        raise SpecError(
            [f"{file}: a value has a type that JSON lacks ({error}). Write the value as text"]
        ) from error
    return resources[0]


def _read_documents(file: str) -> list[dict[str, Any]]:
    """Reads all documents of a YAML or JSON file as objects; raises SpecError."""
    try:
        text = sys.stdin.read() if file == STDIN else Path(file).read_text(encoding="utf-8")
        documents = [
            document for document in yaml.load_all(text, Loader=_StrictLoader) if document is not None
        ]
    except OSError as error:
        raise SpecError([f"{file}: {error.strerror}. Name a file with a {names.KIND}"]) from error
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        problem = " ".join(str(error).split())
        raise SpecError([f"{file}: must be YAML ({problem}). Correct the file at this place"]) from error
    wrong = next((document for document in documents if not isinstance(document, dict)), None)
    if wrong is not None:
        problem = f"each document must have apiVersion and kind (got a {type(wrong).__name__})"
        raise SpecError([f"{file}: {problem}. Remove or correct this document"])
    return documents


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that occurs twice, and keeps timestamps as text, as Kubernetes does."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Builds the mapping of a node; raises ConstructorError for a key that occurs twice."""
        seen: set[Any] = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {name!r} occurs twice. Remove one", key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
