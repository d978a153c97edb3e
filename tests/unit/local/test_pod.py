"""Pods as processes: what is run, what is met, and what is refused by its path."""

from typing import Any

import pytest

from heteroinfer_operator.local.pod_process import UnsupportedPodFieldError, parse_pod
from tests.unit.local.pods import pod, with_spec

CONFIG_MAPS = {"plan": {"kind": "ConfigMap", "data": {"plan.json": "{}"}}}


def test_smallest_pod_runs_with_kubernetes_defaults() -> None:
    process = parse_pod(pod(), {})
    assert (process.name, process.arguments, process.grace_s) == ("p-0-1-0", ("run",), 30)
    assert (process.env, process.num_gpus, process.health_port) == ({}, 0, None)


def test_environment_comes_from_literals_and_config_maps() -> None:
    reference = {"configMapKeyRef": {"name": "plan", "key": "plan.json"}}
    env = [{"name": "A", "value": "1"}, {"name": "B"}, {"name": "PLAN", "valueFrom": reference}]
    assert parse_pod(pod(env=env), CONFIG_MAPS).env == {"A": "1", "B": "", "PLAN": "{}"}


def test_readiness_port_is_looked_up_by_name() -> None:
    probe = {"httpGet": {"path": "/readyz", "port": "health"}, "periodSeconds": 1}
    ports = [{"name": "api", "containerPort": 8000}, {"name": "health", "containerPort": 8081}]
    process = parse_pod(pod(readinessProbe=probe, ports=ports), {})
    assert (process.health_port, process.readiness_path) == (8081, "/readyz")


def test_gpus_are_counted_and_cpu_and_memory_are_accepted() -> None:
    limits = {"cpu": "2", "memory": "1Gi", "nvidia.com/gpu": "2"}
    assert parse_pod(pod(resources={"limits": limits, "requests": limits}), {}).num_gpus == 2


def test_volumes_that_the_machine_has_are_accepted() -> None:
    volumes = [{"name": "tmp", "emptyDir": {}}, {"name": "model", "hostPath": {"path": "/m"}}]
    mounts = [{"name": "tmp", "mountPath": "/tmp"}, {"name": "model", "mountPath": "/m"}]
    manifest = pod(volumeMounts=mounts)
    manifest["spec"]["volumes"] = volumes
    assert parse_pod(manifest, {}).arguments == ("run",)


def test_a_node_selector_with_the_machines_labels_is_accepted() -> None:
    asked = with_spec(nodeSelector={"kubernetes.io/os": "linux", "kubernetes.io/arch": "arm64"})
    arm = {"kubernetes.io/os": "linux", "kubernetes.io/arch": "arm64"}
    assert parse_pod(asked, {}, node_labels=arm).arguments == ("run",)
    with pytest.raises(UnsupportedPodFieldError, match=r"spec\.nodeSelector"):
        parse_pod(asked, {})


MOUNTED_ELSEWHERE = pod(volumeMounts=[{"name": "model", "mountPath": "/model"}])
MOUNTED_ELSEWHERE["spec"]["volumes"] = [{"name": "model", "hostPath": {"path": "/m"}}]
SECRET = {"name": "T", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
NO_MAP = {"name": "T", "valueFrom": {"configMapKeyRef": {"name": "none", "key": "k"}}}

REFUSED: list[tuple[dict[str, Any], str, str]] = [
    (with_spec(nodeSelector={"a": "b"}), "spec.nodeSelector", "Remove it from the role's template"),
    (with_spec(nodeSelector={"disk": "ssd"}), "spec.nodeSelector", "use a cluster"),
    (with_spec(hostNetwork=True), "spec.hostNetwork", "Remove it"),
    (with_spec(restartPolicy="Always"), "spec.restartPolicy", "must be Never (got 'Always'). Report"),
    (with_spec(containers=[{}, {}]), "spec.containers", "must have one container (got 2). Remove the others"),
    (with_spec(initContainers=[{}]), "spec.initContainers", "Remove it"),
    (
        with_spec(volumes=[{"name": "m", "persistentVolumeClaim": {"claimName": "c"}}]),
        "spec.volumes[0].persistentVolumeClaim",
        "--model-dir",
    ),
    (MOUNTED_ELSEWHERE, "spec.volumes[0].hostPath", "cannot mount /m at /model"),
    (
        pod(command=["sh", "-c"]),
        "spec.containers[0]",
        "must be container worker with a command of one word (got 'worker' with ['sh', '-c'])",
    ),
    (pod(lifecycle={}), "spec.containers[0].lifecycle", "Remove it"),
    (pod(env=[SECRET]), "spec.containers[0].env[0].valueFrom", "export the variable"),
    (pod(env=[NO_MAP]), "spec.containers[0].env[0].valueFrom", "has no ConfigMap none with key k"),
    (
        pod(env=[{"name": "A", "value": "$(B)"}]),
        "spec.containers[0].env[0].value",
        "does not expand $(...). In engine.env, write the value of A without $(...)",
    ),
    (
        pod(resources={"limits": {"amd.com/gpu": "1"}}),
        "spec.containers[0].resources.limits[amd.com/gpu]",
        "Remove amd.com/gpu",
    ),
    (pod(readinessProbe={"exec": {}}), "spec.containers[0].readinessProbe", "must be httpGet"),
]


@pytest.mark.parametrize(("manifest", "field", "remedy"), REFUSED, ids=[field for _, field, _ in REFUSED])
def test_unsupported_fields_are_refused_with_a_remedy(
    manifest: dict[str, Any], field: str, remedy: str
) -> None:
    with pytest.raises(UnsupportedPodFieldError) as refused:
        parse_pod(manifest, CONFIG_MAPS)
    assert refused.value.field == field
    assert remedy in refused.value.message
    assert refused.value.message.startswith("pod p-0-1-0: ")
