"""A user's file to a HeteroInference, as strictly as `kubectl apply` reads it."""

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
    """Returns the one HeteroInference of a file; raises SpecError as read_resource."""
    return read_resource(file)[1]


def read_resource(file: str, *, model_dir: Path | None = None) -> tuple[dict[str, Any], HeteroInference]:
    """Returns the one HeteroInference of a YAML or JSON file as JSON values, and as its models read it.

    Args:
        file: its path; `-` is stdin.
        model_dir: where the model is on this machine, instead of `spec.model.uri`.

    Raises:
        SpecError: as load_document, or the resource is not what its models say; each line
            begins with the file's name.
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


def load_document(file: str) -> dict[str, Any]:
    """Returns the one HeteroInference of a file as JSON values, not yet checked by the models.

    Documents of other kinds (a Secret, a claim) may stand beside it and are skipped.

    Raises:
        SpecError: the file is missing, isn't YAML, holds none or several, or has values that JSON has not.
    """
    documents = _documents(file)
    ours = [document for document in documents if document.get("kind") == names.KIND]
    if len(ours) != 1:
        kinds = ", ".join(str(document.get("kind", "no kind")) for document in documents) or "nothing"
        raise SpecError([f"{file}: got {kinds}, expected one document of kind {names.KIND}"])
    try:
        json.dumps(ours[0])
    except (TypeError, ValueError, RecursionError) as error:  # !!binary, !!set, an alias of itself
        raise SpecError([f"{file}: expected only what JSON has too ({error}); write it as text"]) from error
    return ours[0]


def _documents(file: str) -> list[dict[str, Any]]:
    try:
        text = sys.stdin.read() if file == STDIN else Path(file).read_text(encoding="utf-8")
        documents = [
            document for document in yaml.load_all(text, Loader=_StrictLoader) if document is not None
        ]
    except OSError as error:
        raise SpecError([f"{file}: {error.strerror}; give the path of a {names.KIND}"]) from error
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise SpecError([f"{file}: not YAML: {' '.join(str(error).split())}"]) from error
    wrong = next((document for document in documents if not isinstance(document, dict)), None)
    if wrong is not None:
        raise SpecError([f"{file}: got {type(wrong).__name__}, expected a document with apiVersion and kind"])
    return documents


class _StrictLoader(yaml.SafeLoader):
    """Refuses a key that occurs twice, and leaves timestamps as text, as Kubernetes does."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Returns the mapping of a node; raises ConstructorError for a key that occurs twice."""
        seen: set[Any] = set()
        for key, _ in node.value:
            name = self.construct_object(key, deep=True)
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {name!r} occurs twice; remove one", key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep=deep)


_StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
