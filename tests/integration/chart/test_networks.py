"""The Jobs that measure the network between two kinds of nodes, as the chart renders them."""

import functools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.manifests.worker_pods import NO_MESH_ANNOTATIONS, NO_MESH_LABELS
from tests.integration.chart.test_values import Objects, render
from tests.integration.chart.value_cases import TOLERATION

GPU_TOLERATION = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
"""Without a requested GPU, no admission plugin adds this toleration."""

KINDS = [
    {"name": "h200", "nodeSelector": {"type": "h200"}, "gpu": True, "tolerations": TOLERATION},
    {"name": "m7i", "nodeSelector": {"type": "m7i"}, "resources": {"limits": {"cpu": "8"}}},
]
VALUES: dict[str, Any] = {
    "calibration.nodeKinds": KINDS,
    "calibration.networks": [{"from": "h200", "to": "m7i"}, {"from": "m7i", "to": "m7i"}],
    "imagePullSecrets": [{"name": "pull"}],
}
JOB_NAME = "batch.kubernetes.io/job-name"


def render_with(**changed: Any) -> Objects:
    """Returns the objects of a release; `__` stands for a dot in the names of values."""
    values = {name.replace("__", "."): value for name, value in changed.items()}
    with tempfile.TemporaryDirectory() as folder:
        return render(Path(folder), {**VALUES, **values})


@functools.cache
def rendered() -> Objects:
    return render_with()


def network_objects(kind: str, objects: Objects | None = None) -> list[dict[str, Any]]:
    """Returns the objects of a kind for networks, by name: those of the clients first."""
    all_objects = rendered() if objects is None else objects
    found = [each for each in all_objects if each["kind"] == kind]
    ours = [
        each for each in found if any(f"-{end}-" in each["metadata"]["name"] for end in ("connect", "listen"))
    ]
    return sorted(ours, key=lambda each: str(each["metadata"]["name"]))


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    return dict(job["spec"]["template"]["spec"])


def avoided(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the terms for pods that must not be on the same node."""
    affinity = pod_of(job)["affinity"]["podAntiAffinity"]
    return list(affinity["requiredDuringSchedulingIgnoredDuringExecution"])


def pairs(objects: Objects | None = None) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Returns the Job of the client and that of the listener of each pair."""
    jobs = {job["metadata"]["name"]: job for job in network_objects("Job", objects)}
    clients = [name for name in jobs if "-connect-" in name]
    return [(jobs[name], jobs[name.replace("-connect-", "-listen-")]) for name in clients]


def test_each_pair_has_a_client_and_a_listener_on_its_kinds_of_nodes() -> None:
    assert len(network_objects("Job")) == 4
    types = [tuple(pod_of(job)["nodeSelector"]["type"] for job in pair) for pair in pairs()]
    assert sorted(types) == [("h200", "m7i"), ("m7i", "m7i")]
    for pair in pairs():
        for job in pair:
            pod, selector = pod_of(job), pod_of(job)["nodeSelector"]
            assert (selector["kubernetes.io/os"], selector["kubernetes.io/arch"]) == ("linux", "amd64")
            measuring = (pod.get("initContainers") or pod["containers"])[0]
            is_gpu = selector["type"] == "h200"
            assert measuring["image"].rpartition("/")[2].startswith("worker:" if is_gpu else "worker-cpu:")
            assert pod.get("tolerations", []) == ([*TOLERATION, GPU_TOLERATION] if is_gpu else [])
            assert measuring["resources"]["requests"] == {"cpu": "100m", "memory": "1Gi"}
            assert measuring["resources"].get("limits", {}) == ({} if is_gpu else {"cpu": "8"}), "and no GPU"
            assert pod["imagePullSecrets"] == [{"name": "pull"}]
            assert pod["automountServiceAccountToken"] is False
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert measuring["securityContext"]["readOnlyRootFilesystem"] is True


def test_the_client_connects_to_the_name_of_its_listener() -> None:
    services = {each["metadata"]["name"]: each["spec"] for each in network_objects("Service")}
    for client, listener in pairs():
        arguments = pod_of(client)["initContainers"][0]["args"]
        name = listener["metadata"]["name"]
        assert arguments[:3] == ["network", "--connect", f"{name}.sys.svc"]
        assert services[name]["clusterIP"] == "None"
        labels = listener["spec"]["template"]["metadata"]["labels"]
        assert services[name]["selector"].items() <= labels.items()
        (port,) = pod_of(listener)["containers"][0]["ports"]
        assert port["containerPort"] == services[name]["ports"][0]["port"] == names.DEFAULT_NETWORK_PORT
        assert pod_of(listener)["containers"][0]["args"][:2] == ["network", "--listen"]


def test_the_result_is_stored_for_the_kinds_in_their_order() -> None:
    for client, listener in pairs():
        arguments = pod_of(client)["containers"][0]["args"]
        kinds = [job["spec"]["template"]["spec"]["nodeSelector"]["type"] for job in (client, listener)]
        given = [each.removeprefix("--node-kind=") for each in arguments if each.startswith("--node-kind=")]
        assert given == kinds
        selectors = [each for each in arguments if each.startswith("--node-selector=")]
        assert [f'"type":"{kind}"' in each for kind, each in zip(kinds, selectors, strict=True)] == [True] * 2


def test_two_pods_of_a_pair_are_never_on_one_node() -> None:
    for client, listener in pairs():
        terms = avoided(client)
        labels = [term["labelSelector"].get("matchLabels", {}) for term in terms]
        assert {JOB_NAME: listener["metadata"]["name"]} in labels
        assert {term["topologyKey"] for term in terms} == {"kubernetes.io/hostname"}


def test_no_pod_that_measures_a_node_disturbs_the_network() -> None:
    (other,) = (
        job for job in rendered() if job["kind"] == "Job" and job["metadata"]["name"].find("-m7i-") > 0
    )
    own = other["spec"]["template"]["metadata"]["labels"]
    for job in network_objects("Job"):
        terms = avoided(job)
        selector = terms[0]["labelSelector"]
        assert selector["matchLabels"].items() <= own.items()
        # A listener must not wait for clients, or two pairs could wait for each other.
        (expression,) = selector["matchExpressions"]
        assert expression == {
            "key": "app.kubernetes.io/component",
            "operator": "NotIn",
            "values": ["network-client"],
        }
        assert own.get("app.kubernetes.io/component") is None


@pytest.mark.parametrize("changed", [{}, {"networkPolicy__enabled": True, "podEgress": "Never"}])
def test_policies_let_exactly_the_two_pods_of_a_pair_talk(changed: dict[str, Any]) -> None:
    objects = render_with(**changed)
    policies = {each["metadata"]["name"]: each["spec"] for each in network_objects("NetworkPolicy", objects)}
    assert len(policies) == 4
    port = [{"port": names.DEFAULT_NETWORK_PORT, "protocol": "TCP"}]
    for client, listener in pairs(objects):
        selectors = [
            {"podSelector": {"matchLabels": {JOB_NAME: job["metadata"]["name"]}}}
            for job in (client, listener)
        ]
        assert policies[client["metadata"]["name"]] == {
            **selectors[0],
            "policyTypes": ["Ingress", "Egress"],
            "egress": [{"to": [selectors[1]], "ports": port}],
        }
        assert policies[listener["metadata"]["name"]] == {
            **selectors[1],
            "policyTypes": ["Ingress", "Egress"],
            "ingress": [{"from": [selectors[0]], "ports": port}],
        }
        # The release's policy for pods with this name lets the client reach the API server.
        client_name, listener_name = (
            job["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]
            for job in (client, listener)
        )
        assert client_name == "heteroinfer-calibration" != listener_name


def test_without_egress_policies_there_are_none() -> None:
    assert network_objects("NetworkPolicy", render_with(podEgress="Never")) == []


def test_no_sidecar_is_added() -> None:
    for job in network_objects("Job"):
        metadata = job["spec"]["template"]["metadata"]
        assert NO_MESH_LABELS.items() <= metadata["labels"].items()
        assert NO_MESH_ANNOTATIONS.items() <= metadata["annotations"].items()


@pytest.mark.parametrize(
    "changed",
    [
        {"workerImages__cpu": "w:1"},
        {"image__pullPolicy": "Always"},
        {"commonLabels": {"team": "ml"}},
        {"commonAnnotations": {"cost": "7"}},
        {"calibration__keepResources": {"limits": {"memory": "1Gi"}}},
        {"containerSecurityContext": {"privileged": False}},
    ],
)
def test_a_change_of_either_pod_gives_both_jobs_new_names(changed: dict[str, Any]) -> None:
    before, after = (
        {job["metadata"]["name"] for job in network_objects("Job", objects)}
        for objects in (rendered(), render_with(**changed))
    )
    assert len(after) == 4
    assert not before & after


def test_other_values_change_no_job() -> None:
    assert network_objects("Job", render_with(workers=2, allowRemoteCode=True)) == network_objects("Job")


def test_jobs_can_be_replaced_and_are_listed_as_calibrations() -> None:
    for job in network_objects("Job"):
        name = job["metadata"]["name"]
        assert len(name) <= 63
        assert job["metadata"]["labels"]["app.kubernetes.io/component"] == "calibration"
        assert job["spec"]["manualSelector"] is True
        assert job["spec"]["selector"]["matchLabels"] == {JOB_NAME: name}
        assert "ttlSecondsAfterFinished" not in job["spec"]


def test_long_names_stay_valid(tmp_path: Path) -> None:
    objects = render(tmp_path, VALUES, release="r" * 53)
    for kind in ("Job", "Service", "NetworkPolicy"):
        found = [each["metadata"]["name"] for each in network_objects(kind, objects)]
        assert len(set(found)) == len(found) > 0
        assert max(map(len, found)) <= 63
