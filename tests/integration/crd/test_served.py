"""Tests the CRD through kubectl, as users see it: refusals, columns, /scale, /status."""

import json
import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
import yaml

from heteroinfer_contract.plan import Mode
from heteroinfer_operator.api import (
    Condition,
    ConditionStatus,
    ConditionType,
    HeteroInferenceStatus,
    Summary,
)
from heteroinfer_operator.api.crd import build_crd
from heteroinfer_operator.quantity import DURATION_PATTERN
from tests.cluster.errors import ClusterError
from tests.cluster.folders import REPOSITORY
from tests.cluster.running_cluster import Cluster
from tests.integration.crd.resource_requests import Server


def resource(name: str = "llama", **fields: Any) -> dict[str, Any]:
    spec = {"model": {"uri": "hf://org/model"}, "roles": [{"name": "cpu", "device": "CPU"}], **fields}
    return {
        "apiVersion": "heteroinfer.dev/v1alpha1",
        "kind": "HeteroInference",
        "metadata": {"name": name},
        "spec": spec,
    }


def refusal(cluster: Cluster, body: dict[str, Any]) -> str:
    with pytest.raises(ClusterError) as caught:
        cluster.kubectl("apply", "-f", "-", stdin=json.dumps(body))
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"parallelism": {"tensor": 1, "pipeline": 3}},
            "over roles (got tensor 1 x pipeline 3 and roles with 1 ranks). Change the roles",
        ),
        (
            {"roles": [{"name": "cpu", "device": "CPU", "pods": 0}]},
            "spec.roles[0].pods in body should be greater than or equal to 1",
        ),
        ({"engine": {"maxModelLenght": 1}}, 'unknown field "spec.engine.maxModelLenght"'),
        (
            {"model": {"uri": "s3://b/m"}},
            "must be hf://ORG/MODEL, pvc://CLAIM/PATH, oci://REGISTRY/NAME@sha256:DIGEST#FOLDER or file:///ABSOLUTE/PATH",
        ),
        (
            {"engine": {"env": [{"name": "RANK", "value": "0"}]}},
            "must not be a variable that HeteroInfer reserves (got RANK)",
        ),
        (
            {"engine": {"env": [{"name": "VLLM_API_KEY", "value": "hunter2"}]}},
            "reader of the resource would see the value (got VLLM_API_KEY). Store the value in a Secret",
        ),
    ],
)
def test_kubectl_apply_reports_the_refusal(fields: dict[str, Any], message: str, cluster: Cluster) -> None:
    assert message in refusal(cluster, resource(**fields))


def test_a_name_too_long_for_host_names_is_refused_with_a_message(cluster: Cluster) -> None:
    message = refusal(cluster, resource("a" * 41))
    assert "name must have at most 40 characters" in message
    assert "(got 41 characters). Choose a shorter name" in message


def test_kubectl_columns_show_the_status(cluster: Cluster, server: Server) -> None:
    created = server.create(resource("columns"), dry_run=False)
    available, ready = (
        Condition(
            type=kind,
            status=ConditionStatus.TRUE,
            reason="AllGroupsReady",
            message="",
            last_transition_time=datetime.now(UTC),
        )
        for kind in (ConditionType.AVAILABLE, ConditionType.READY)
    )
    summary = Summary(
        groups="1/1",
        mode=Mode.FEED_FORWARD,
        gpu_ranks=1,
        cpu_ranks=2,
        step_ms="41.7",
        slowest_rank="0 (cpu)",
        restarts=3,
        plan="0a1b",
    )
    status = HeteroInferenceStatus(conditions=(available, ready), summary=summary)
    server.put_status("columns", {**created, "status": status.dump()}, dry_run=False)
    heads, row = cluster.kubectl("get", "hinf", "columns").splitlines()
    assert heads.split() == [
        "NAME",
        "AVAILABLE",
        "READY",
        "REASON",
        "GROUPS",
        "MODE",
        "GPU",
        "CPU",
        "STEPMS",
        "SLOWESTRANK",
        "AGE",
    ]
    assert row.split()[:11] == [
        "columns",
        "True",
        "True",
        "AllGroupsReady",
        "1/1",
        "FeedForward",
        "1",
        "2",
        "41.7",
        "0",
        "(cpu)",
    ]
    heads, row = cluster.kubectl("get", "hinf", "columns", "-o", "wide").splitlines()
    assert heads.split()[-3:] == ["MODEL", "RESTARTS", "PLAN"]
    assert row.split()[-3:] == ["hf://org/model", "3", "0a1b"]


def test_the_kind_is_in_its_own_category_and_not_in_all(cluster: Cluster, server: Server) -> None:
    """`kubectl delete all --all` must not delete models."""
    server.create(resource("listed"), dry_run=False)
    listed = "heteroinference.heteroinfer.dev/listed"
    assert listed in cluster.kubectl("get", "heteroinfer", "-o", "name").split()
    assert listed not in cluster.kubectl("get", "all", "-o", "name").split()


def test_field_selectors_select_resources(cluster: Cluster, server: Server) -> None:
    server.create(resource("stopped", suspend=True), dry_run=False)
    mode = {"mode": "Pipeline"}
    of_claim = resource("of-a-claim", model={"uri": "pvc://claim/a"}, parallelism=mode)
    server.create(of_claim, dry_run=False)

    def selected(field: str) -> list[str]:
        found = cluster.kubectl("get", "hinf", "--field-selector", field, "-o", "name").split()
        return [name.rpartition("/")[2] for name in found]

    assert selected("spec.suspend=true") == ["stopped"]
    assert "stopped" not in selected("spec.suspend=false")
    assert selected("spec.model.uri=pvc://claim/a") == ["of-a-claim"]
    with_mode = selected("spec.parallelism.mode=Pipeline")
    assert "of-a-claim" in with_mode
    assert "stopped" not in with_mode, "a resource without a mode is stored without a mode"


def test_a_refusal_names_the_field(cluster: Cluster) -> None:
    too_long = refusal(cluster, resource(drainTimeout="25h"))
    assert "spec.drainTimeout: Invalid value: must be between 0s and 24h (got 25h)" in too_long
    role = {"name": "cpu", "device": "CPU", "deviceMemory": "8Gi"}
    wrong_device = refusal(cluster, resource(roles=[role]))
    assert "spec.roles[0].device: Forbidden: must be GPU if deviceResourceName" in wrong_device


def test_kubectl_scale_sets_the_number_of_groups(cluster: Cluster, server: Server) -> None:
    created = server.create(resource("scaled"), dry_run=False)
    status = HeteroInferenceStatus(replicas=1, selector="heteroinfer.dev/leader=true")
    server.put_status("scaled", {**created, "status": status.dump()}, dry_run=False)
    path = "/apis/heteroinfer.dev/v1alpha1/namespaces/default/heteroinferences/scaled/scale"
    scale = json.loads(cluster.kubectl("get", "--raw", path))
    assert scale["spec"] == {"replicas": 1}
    assert scale["status"] == {"replicas": 1, "selector": "heteroinfer.dev/leader=true"}
    cluster.kubectl("scale", "hinf/scaled", "--replicas=2")
    assert cluster.kubectl("get", "hinf", "scaled", "-o", "jsonpath={.spec.replicas}") == "2"


def test_a_status_cannot_be_written_with_the_spec(cluster: Cluster) -> None:
    body = {**resource("specs"), "status": {"replicas": 7}}
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(body))
    stored = cluster.kubectl(
        "get", "hinf", "specs", "-o", "jsonpath={.status.observedGeneration} {.status.replicas}"
    )
    assert stored == "-1 0", "the status in the request is ignored"


def test_kubectl_explain_describes_fields(cluster: Cluster) -> None:
    message = " ".join(cluster.kubectl("explain", "hinf.spec.roles.layers").split())
    assert "Number of layers of each stage of this role, in order" in message
    assert "Default: chosen by the plan." in message


def test_kubectl_explain_shows_defaults(cluster: Cluster) -> None:
    message = " ".join(cluster.kubectl("explain", "hinf.spec.drainTimeout").split())
    assert "Default: 60s." in message


def durations(schema: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the path of each duration in a schema. Does not enter lists."""
    if schema.get("pattern") == DURATION_PATTERN:
        yield path
    for name, field in schema.get("properties", {}).items():
        yield from durations(field, (*path, name))


SPEC_SCHEMA = build_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
DURATIONS = sorted(durations(SPEC_SCHEMA))


@pytest.mark.parametrize("path", DURATIONS, ids=".".join)
def test_invalid_durations_are_refused_with_the_same_message(path: tuple[str, ...], cluster: Cluster) -> None:
    for wrong in ("5d", "", "ms", "5", "-5m", "5m 3s", "one minute", "1h" * 9):
        value: Any = wrong
        for name in reversed(path):
            value = {name: value}
        message = refusal(cluster, resource(**value))
        assert f"spec.{'.'.join(path)}" in message, wrong
        assert re.search(r"should match|should be at least", message), (wrong, message)
        assert not re.search(r"conversion|evaluating rule|must be between", message), (wrong, message)


def test_the_test_finds_the_durations_of_the_schema() -> None:
    assert {("drainTimeout",), ("startup", "timeout"), ("planning", "onGPUShortage", "after")} <= {*DURATIONS}


def test_the_examples_are_applied_together(cluster: Cluster) -> None:
    """Earlier, two examples had the same name, and the second overwrote the first."""
    documents = [
        document
        for file in sorted((REPOSITORY / "examples").glob("*.yaml"))
        for document in yaml.safe_load_all(file.read_text())
        if document is not None
    ]
    cluster.kubectl("create", "namespace", "examples")
    output = cluster.kubectl("apply", "-n", "examples", "-f", str(REPOSITORY / "examples"))
    assert sorted(line.split()[-1] for line in output.splitlines()) == ["created"] * len(documents), output
    stored = cluster.kubectl("get", "hinf", "-n", "examples", "-o", "name").split()
    assert len(stored) == len(documents) > 1


def test_the_documented_command_keeps_existing_variables(cluster: Cluster) -> None:
    """A merge patch would replace the whole list."""
    page = (REPOSITORY / "docs" / "user" / "expose.md").read_text()
    ((options, manifest),) = re.findall(
        r"^kubectl (apply --server-side --field-manager=api-key -f -) <<'END'\n(.*?)^END$", page, re.M | re.S
    )
    place = ("-n", "variables")
    cluster.kubectl("create", "namespace", "variables")
    cluster.kubectl("apply", *place, "-f", str(REPOSITORY / "examples" / "cpu-pair.yaml"))
    env = {"spec": {"engine": {"env": [{"name": "HF_ENDPOINT", "value": "https://hub.example.com"}]}}}
    cluster.kubectl("patch", "hinf", "cpu-pair", *place, "--type", "merge", "-p", json.dumps(env))
    cluster.kubectl(*options.split(), *place, stdin=manifest)
    stored = json.loads(cluster.kubectl("get", "hinf", "cpu-pair", *place, "-o", "json"))
    names = {variable["name"] for variable in stored["spec"]["engine"]["env"]}
    assert names == {"HF_ENDPOINT", "VLLM_API_KEY"}
