"""The CustomResourceDefinition, from the models of the resource.

Pure: no file is read or written here (commands/crd_command.py writes). Imports no Kubernetes client.
"""

import functools
from collections.abc import Mapping
from typing import Any, Final

import yaml

from heteroinfer_contract import names
from heteroinfer_operator.api.resource import HeteroInference

HEADER: Final = (
    "# Generated from heteroinfer_operator/api by `heteroinfer crd --write`; don't edit by hand.\n"
)

_DROPPED: Final = frozenset({"$defs", "title", "additionalProperties", "propertyNames", "default", "const"})
"""Keywords that are handled apart, or that a structural schema doesn't have."""


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
                "categories": ["all"],
            },
            "versions": [
                {
                    "name": names.API_VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": build_schema()},
                    "additionalPrinterColumns": _columns(),
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


@functools.cache
def render_crd() -> str:
    """Returns the CRD as the YAML text that is kept in crds/ and in the chart."""
    return HEADER + yaml.dump(
        build_crd(), Dumper=_PlainDumper, sort_keys=False, width=100, allow_unicode=True
    )


class _PlainDumper(yaml.SafeDumper):
    """Writes a value that occurs twice twice, instead of an anchor and an alias."""

    def ignore_aliases(self, data: object) -> bool:
        """Returns that no value is written as an alias."""
        return True


def build_schema() -> dict[str, Any]:
    """Returns the structural schema of the resource."""
    raw = HeteroInference.model_json_schema(by_alias=True)
    schema = _structural(raw, raw["$defs"])
    schema["properties"].update(
        apiVersion={"type": "string"}, kind={"type": "string"}, metadata={"type": "object"}
    )
    schema["required"] = ["spec"]
    # With it comes observedGeneration -1: kstatus takes a resource without a status for one that is done.
    schema["properties"]["status"]["default"] = {}
    return schema


def _structural(raw: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a schema without references, nulls and titles.

    Keywords beside a reference (a field's own description and default) win over those
    of what it points to.
    """
    node = _resolve(raw, definitions)
    result: dict[str, Any] = {}
    for key, value in node.items():
        if key == "properties":
            result[key] = {name: _structural(field, definitions) for name, field in value.items()}
        elif key == "items":
            result[key] = _structural(value, definitions)
        elif key not in _DROPPED:
            result[key] = value
    if isinstance(node.get("additionalProperties"), Mapping):
        result["additionalProperties"] = _structural(node["additionalProperties"], definitions)
    default = node.get("default")
    if "properties" in node and "default" in node and default is not None:
        result["default"] = {}  # the fields' own defaults fill it
    elif default not in (None, [], ""):
        result["default"] = default
    if node.get("x-kubernetes-int-or-string"):
        del result["type"]
        result |= {"minimum": 0, "maximum": 10**15 - 1}  # as many digits as the pattern has
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return result


def _resolve(raw: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    node = dict(raw)
    while True:
        if "$ref" in node:
            target = definitions[node.pop("$ref").rsplit("/", 1)[1]]
        elif "anyOf" in node:
            (target,) = (option for option in node.pop("anyOf") if option != {"type": "null"})
        else:
            return node
        node = {**target, **node}


def _columns() -> list[dict[str, Any]]:
    def column(name: str, path: str, kind: str = "string", *, wide: bool = False) -> dict[str, Any]:
        return {"name": name, "type": kind, "jsonPath": path} | ({"priority": 1} if wide else {})

    return [
        column("Available", '.status.conditions[?(@.type=="Available")].status'),
        column("Ready", '.status.conditions[?(@.type=="Ready")].status'),
        column("Reason", '.status.conditions[?(@.type=="Ready")].reason'),
        column("Groups", ".status.summary.groups"),
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
