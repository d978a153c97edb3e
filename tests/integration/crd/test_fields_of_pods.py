"""Tests that the CRD and the spec classes refuse each field that the API server would refuse in a pod."""

import copy
from collections.abc import Callable
from typing import Any, Final

import pytest

from heteroinfer_operator.api import parse_resource
from heteroinfer_operator.errors import SpecError
from tests.integration.crd.resource_requests import Refused, Server
from tests.unit.api.test_template import DIGEST, PLATFORM
from tests.unit.api.test_template import REFUSED as REFUSED_TEMPLATES

SPEC: Final[dict[str, Any]] = {
    "model": {"uri": "pvc://models/tiny"},
    "roles": [{"name": "cpu", "device": "CPU"}],
}
KEY: Final = f"{'a' * 60}.{'b' * 60}.{'c' * 60}.{'d' * 60}.example/{'n' * 63}"
"""Longest allowed: a prefix of 252 characters, and a name of 63."""


def template(**fields: Any) -> dict[str, Any]:
    return {"roles": [{**SPEC["roles"][0], "template": fields}]}


def resources(**fields: Any) -> dict[str, Any]:
    return {"roles": [{**SPEC["roles"][0], "resources": fields}]}


def node(**requirement: Any) -> dict[str, Any]:
    return nodes("matchExpressions", requirement)


def nodes(field: str, requirement: dict[str, Any]) -> dict[str, Any]:
    terms = [{field: [requirement]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return template(affinity={"nodeAffinity": required})


def near(**term: Any) -> dict[str, Any]:
    terms = [{"topologyKey": "kubernetes.io/hostname", **term}]
    return template(affinity={"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}})


def source(kind: str, key: str) -> dict[str, Any]:
    return {"engine": {"env": [{"name": "HF_TOKEN", "valueFrom": {kind: {"name": "hub", "key": key}}}]}}


REFUSED: Final = {
    "a label with a blank": (template(labels={"team name": "a"}), "each key must be NAME or PREFIX/NAME"),
    "a label with two prefixes": (template(labels={"a/b/c": "a"}), "got a/b/c"),
    "a label with capitals in its prefix": (template(labels={"A.example/b": "a"}), "got A.example/b"),
    "a label without a name": (template(labels={"a.example/": "a"}), "got a.example/"),
    "a label with a long prefix": (
        template(labels={f"{'a' * 254}/b": "c"}),
        "each key must be NAME or PREFIX/NAME",
    ),
    "a label with a long name": (template(labels={"a" * 64: "c"}), "each key must be NAME or PREFIX/NAME"),
    "no label": (template(labels={"": "c"}), "each key must be NAME or PREFIX/NAME"),
    "a label of two lines": (template(labels={"a\n": "c"}), "each key must be NAME or PREFIX/NAME"),
    "a label's value with a blank": (template(labels={"team": "a b"}), "labels.team"),
    "a label's value with a dash": (template(labels={"team": "a-"}), "labels.team"),
    "an annotation with a blank": (
        template(annotations={"team name": "a"}),
        "each key must be NAME or PREFIX/NAME",
    ),
    "a node's label with a blank": (
        template(nodeSelector={"my zone": "a"}),
        "each key must be NAME or PREFIX/NAME",
    ),
    "a node's value with a blank": (template(nodeSelector={"zone": "a b"}), "nodeSelector.zone"),
    "a toleration of anything": (
        template(tolerations=[{"effect": "NoSchedule"}]),
        "must be set unless operator is Exists",
    ),
    "a toleration of any value": (
        template(tolerations=[{"key": "a", "operator": "Exists", "value": "b"}]),
        "must be unset for operator Exists",
    ),
    "a toleration for seconds": (
        template(tolerations=[{"key": "a", "operator": "Exists", "tolerationSeconds": 5}]),
        "must be unset unless effect is NoExecute",
    ),
    "a toleration with a blank": (template(tolerations=[{"key": "a b", "operator": "Exists"}]), "key"),
    "a node in nothing": (
        node(key="zone", operator="In"),
        "must have at least one entry for operator In or NotIn",
    ),
    "a node that exists so": (
        node(key="zone", operator="Exists", values=["a"]),
        "must be empty for operator",
    ),
    "a node above two": (
        node(key="gpus", operator="Gt", values=["1", "2"]),
        "must have exactly one entry for operator Gt",
    ),
    "a node by a key with a blank": (node(key="my zone", operator="Exists"), "key"),
    "a node by a value with a blank": (
        node(key="zone", operator="In", values=["a b"]),
        "values",
    ),
    "a node's field": (
        nodes("matchFields", {"key": "spec.x", "operator": "In", "values": ["a"]}),
        "each entry must have key metadata.name",
    ),
    "two nodes": (
        nodes("matchFields", {"key": "metadata.name", "operator": "In", "values": ["a", "b"]}),
        "each entry must have key metadata.name",
    ),
    "near to a label with a blank": (
        near(labelSelector={"matchLabels": {"team name": "a"}}),
        "each key must be NAME or PREFIX/NAME",
    ),
    "near to nothing": (
        near(labelSelector={"matchExpressions": [{"key": "team", "operator": "NotIn"}]}),
        "must have at least one entry for operator In or NotIn",
    ),
    "near to a namespace with a dot": (near(namespaces=["a.b"]), "namespaces[0]"),
    "near by a key with a blank": (near(topologyKey="my zone"), "topologyKey"),
    "a class of two dots": (template(runtimeClassName="a..b"), "runtimeClassName"),
    "a resource that is none": (resources(limits={"gpus": "1"}), "each key must be cpu, memory"),
    "a resource with a blank": (resources(limits={"a.example/my gpu": 1}), "each key must be cpu, memory"),
    "more memory than its limit": (
        resources(requests={"memory": "2Gi"}, limits={"memory": "2G"}),
        "must not exceed limits",
    ),
    "more cores than their limit": (
        resources(requests={"cpu": 2}, limits={"cpu": "1999m"}),
        "must not exceed limits",
    ),
    "more than a limit beyond the largest integer": (
        resources(requests={"cpu": "294590482P"}, limits={"cpu": "293590482P"}),
        "must not exceed limits",
    ),
    "a queue with a blank": (
        {"scheduling": {"queueName": "my queue"}},
        "queueName",
    ),
    "a long queue": ({"scheduling": {"queueName": "a" * 64}}, "queueName"),
    "a priority with a capital": ({"scheduling": {"priorityClassName": "High"}}, "priorityClassName"),
    "a topology with a blank": ({"scheduling": {"topologyKey": "my zone"}}, "topologyKey"),
    "an image with a blank": ({"engine": {"image": " worker:1"}}, "image"),
    "a key of a Secret with a slash": (source("secretKeyRef", "a/b"), "key"),
    "a key of a Secret of dots": (source("secretKeyRef", "..a"), "key"),
    "a file that is not there": (
        {
            "engine": {
                "files": [{"name": "a.jinja", "configMapKeyRef": {"name": "a", "key": "b"}}],
                "args": ["--max-log-len=1", "--chat-template=/etc/heteroinfer/files/b.jinja"],
            }
        },
        "must not name a file in /etc/heteroinfer/files that engine.files lacks",
    ),
    "authorities of nothing": (
        {"model": {"uri": "pvc://models/tiny", "caBundle": {}}},
        "must set exactly one of configMapKeyRef and secretKeyRef",
    ),
}
TAKEN: Final = {
    "labels": template(labels={KEY: "", "a": "A.b-c_d", "x.example/A_b": "1"}),
    "annotations": template(annotations={"A.example/b": "any words\n"}),
    "tolerations": template(
        tolerations=[
            {"operator": "Exists"},
            {"key": "a"},
            {"key": "a", "value": "", "operator": "Equal", "effect": "NoExecute", "tolerationSeconds": 0},
        ]
    ),
    "nodes": node(key="a.example/gpus", operator="Gt", values=["1"]),
    "a node": nodes("matchFields", {"key": "metadata.name", "operator": "NotIn", "values": ["a.b"]}),
    "near": near(namespaces=["a"], labelSelector={"matchLabels": {"a": ""}, "matchExpressions": []}),
    "resources": resources(
        requests={"cpu": "2000m", "memory": "0.5Gi", "hugepages-2Mi": "4Mi"},
        limits={
            "cpu": 2,
            "memory": "512Mi",
            "hugepages-2Mi": "4Mi",
            "a.example/gpu": 1,
            "ephemeral-storage": "1G",
        },
    ),
    "scheduling": {
        "scheduling": {
            "queueName": "a",
            "priorityClassName": "",
            "topologyKey": "topology.kubernetes.io/zone",
        }
    },
    "an image": {
        "engine": {
            "image": "[::1]:5000/A/b@sha256:0123456789012345678901234567890123456789012345678901234567890123"
        }
    },
    "a key of a Secret": source("secretKeyRef", ".a_B-c"),
    "what platforms need": template(**PLATFORM),
    "addresses": template(dnsConfig={"nameservers": ["10.0.0.1", "fd00::1"]}),
    "files and authorities": {
        "model": {
            "uri": f"oci://registry.test:5000/a/B_c:1@{DIGEST}#models/a b",
            "caBundle": {"secretKeyRef": {"name": "ca", "key": "ca.crt"}},
        },
        "engine": {
            "files": [{"name": "a.jinja", "configMapKeyRef": {"name": "a", "key": "b"}}],
            "args": ["--chat-template", "/etc/heteroinfer/files/a.jinja"],
        },
    },
}


def resource(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "heteroinfer.dev/v1alpha1",
        "kind": "HeteroInference",
        "metadata": {"name": "llama"},
        "spec": {**copy.deepcopy(SPEC), **fields},
    }


def said_by(accept: Callable[[dict[str, Any]], object], body: dict[str, Any]) -> str:
    try:
        accept(body)
    except (SpecError, Refused) as refusal:
        return refusal.message
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_pods_refuse_are_refused_at_apply(name: str, server: Server) -> None:
    fields, words = REFUSED[name]
    body = resource(fields)
    assert words in said_by(server.create, body)
    assert words in said_by(parse_resource, body)


@pytest.mark.parametrize(("fields", "words"), REFUSED_TEMPLATES)
def test_fields_that_give_pods_more_rights_are_refused_at_apply(
    fields: dict[str, Any], words: str, server: Server
) -> None:
    body = resource(template(**fields))
    assert words in said_by(server.create, body)
    assert words in said_by(parse_resource, body)


@pytest.mark.parametrize("name", TAKEN)
def test_fields_that_pods_accept_are_accepted(name: str, server: Server) -> None:
    body = resource(TAKEN[name])
    assert said_by(server.create, body) == said_by(parse_resource, body) == ""
