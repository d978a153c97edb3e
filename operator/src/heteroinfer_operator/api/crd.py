"""Builds the CustomResourceDefinition from the models of the resource.

Pure: commands/crd_command.py writes the files. Imports no Kubernetes client.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any, Final

import yaml

from heteroinfer_contract import names
from heteroinfer_operator.api.resource import HeteroInference

HEADER: Final = (
    "# Generated from heteroinfer_operator/api by `heteroinfer crd --write`; don't edit by hand.\n"
)

_DROPPED_KEYWORDS: Final = frozenset(
    {"$defs", "title", "additionalProperties", "propertyNames", "default", "const"}
)
"""JSON schema keywords that a structural schema lacks, or that this module converts."""
CATEGORY: Final = "heteroinfer"
"""Category of the resource in kubectl. With category `all`, `kubectl delete all --all` would delete every
model."""
_INT32_MAX: Final = 2**31 - 1


def build_crd() -> dict[str, Any]:
    """Returns the CustomResourceDefinition of HeteroInference as JSON values."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{names.PLURAL}.{names.API_GROUP}"},
        "spec": {
            "group": names.API_GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.SINGULAR,
                "shortNames": [names.SHORT_NAME],
                "categories": [CATEGORY],
            },
            "versions": [
                {
                    "name": names.API_VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": build_schema()},
                    "additionalPrinterColumns": _build_columns(),
                    "selectableFields": [{"jsonPath": path} for path in SELECTABLE],
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                }
            ],
        },
    }


SELECTABLE: Final = (".spec.model.uri", ".spec.parallelism.mode", ".spec.suspend")
"""Fields for `kubectl get --field-selector`, on Kubernetes 1.31 or later."""


@functools.cache
def render_crd() -> str:
    """Returns the CRD as YAML, the text of the files in crds/ and in the chart."""
    return HEADER + yaml.dump(
        build_crd(), Dumper=_PlainDumper, sort_keys=False, width=100, allow_unicode=True
    )


class _PlainDumper(yaml.SafeDumper):
    """Writes YAML without anchors and aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def build_schema() -> dict[str, Any]:
    """Returns the structural schema of the resource. Descriptions contain the defaults."""
    raw = HeteroInference.model_json_schema(by_alias=True)
    schema = _structural(raw, raw["$defs"])
    schema["properties"].update(
        apiVersion={"type": "string"}, kind={"type": "string"}, metadata={"type": "object"}
    )
    schema["required"] = ["spec"]
    # A new resource gets a status with observedGeneration -1: tools that use kstatus, such as Flux,
    # would regard a resource without a status as finished.
    schema["properties"]["status"]["default"] = {}
    return schema


def _structural(raw: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a part of the schema without references, nulls and titles.

    A field's own keywords, such as its description and default, override those of the referenced model.
    """
    resolved = _resolve_reference(raw, definitions)
    result: dict[str, Any] = {}
    for key, value in resolved.items():
        if key == "properties":
            result[key] = {name: _structural(field, definitions) for name, field in value.items()}
        elif key == "items":
            result[key] = _structural(value, definitions)
        elif key not in _DROPPED_KEYWORDS:
            result[key] = value
    if isinstance(resolved.get("additionalProperties"), Mapping):
        result["additionalProperties"] = _structural(resolved["additionalProperties"], definitions)
    default = resolved.get("default")
    is_object = "properties" in resolved
    if is_object and default is not None:
        result["default"] = {}  # the API server adds the defaults of the fields to this object
    elif default not in (None, [], ""):
        result["default"] = default
    _add_derived_keywords(result)
    if resolved.get("x-kubernetes-int-or-string"):  # a quantity, which may be a number or a text
        del result["type"]
        result |= {"minimum": 0, "maximum": 10**15 - 1}  # as many digits as the pattern allows
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return result


def _add_derived_keywords(schema: dict[str, Any]) -> None:
    """Adds the keywords that follow from others: the format of a number, and how a list is merged.

    Also adds the default to the description.
    """
    if "description" in schema:
        schema["description"] = _describe_with_default(schema)
    match schema.get("type"):
        case "integer":
            schema["format"] = "int32" if schema["maximum"] <= _INT32_MAX else "int64"
        case "number":
            schema["format"] = "double"
        case "array":
            schema.setdefault("x-kubernetes-list-type", "atomic")


def _describe_with_default(schema: Mapping[str, Any]) -> str:
    """Returns the description on one line, with the default, which `kubectl explain` does not show itself."""
    text = " ".join(schema["description"].split())
    default = schema.get("default")
    if default is None or isinstance(default, dict) or "Default: " in text:
        return text
    return f"{text} Default: {default if isinstance(default, str) else json.dumps(default)}."


def _resolve_reference(raw: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema with definitions in place of references to them, and without the option null."""
    node = dict(raw)
    while True:  # a definition may be a reference, too
        if "$ref" in node:
            target = definitions[node.pop("$ref").rsplit("/", 1)[1]]
        elif "anyOf" in node:
            (target,) = (option for option in node.pop("anyOf") if option != {"type": "null"})
        else:
            return node
        node = {**target, **node}  # the field's own keywords override those of the definition


def _build_columns() -> list[dict[str, Any]]:
    """Returns the columns of `kubectl get`."""

    def column(name: str, path: str, kind: str = "string", *, wide: bool = False) -> dict[str, Any]:
        return {"name": name, "type": kind, "jsonPath": path} | ({"priority": 1} if wide else {})

    return [
        column("Available", '.status.conditions[?(@.type=="Available")].status'),
        column("Ready", '.status.conditions[?(@.type=="Ready")].status'),
        column("Reason", '.status.conditions[?(@.type=="Ready")].reason'),
        column("Groups", ".status.summary.groups"),
        column("Mode", ".status.summary.mode"),
        column("GPU", ".status.summary.gpuRanks", "integer"),
        column("CPU", ".status.summary.cpuRanks", "integer"),
        column("StepMs", ".status.summary.stepMs"),
        column("PredictedMs", ".status.summary.predictedStepMs", wide=True),
        column("SlowestRank", ".status.summary.slowestRank"),
        column("Age", ".metadata.creationTimestamp", "date"),
        column("Model", ".spec.model.uri", wide=True),
        column("Restarts", ".status.summary.restarts", "integer", wide=True),
        column("Plan", ".status.summary.plan", wide=True),
    ]
