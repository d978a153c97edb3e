"""Each value of the chart, rendered: what it makes is there with it, and not without it."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import processes, tools
from tests.cluster.errors import ClusterError
from tests.cluster.folders import LEAST_VALUES, REPOSITORY
from tests.integration.chart.value_cases import CASES, ValueCase, values_of

CHART = REPOSITORY / "charts" / "heteroinfer"
Objects = list[dict[str, Any]]


def render(folder: Path, values: dict[str, Any]) -> Objects:
    """Returns the objects of release `rel` in namespace `sys`, with these values and the least ones."""
    tools.ensure_built(tools.HELM)
    files = [LEAST_VALUES]
    for number, (path, value) in enumerate(values.items()):
        files.append(folder / f"{number}.yaml")
        files[-1].write_text(values_of(path, value))
    command = [str(tools.program(tools.HELM, "helm")), "template", "rel", str(CHART), "--namespace", "sys"]
    given = [option for file in files for option in ("-f", str(file))]
    home = {f"HELM_{name}_HOME": str(folder / "helm") for name in ("CACHE", "CONFIG", "DATA")}
    text = processes.run([*command, "--kube-version", "1.35.4", *given], timeout_s=60, environment=home)
    return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]


@functools.cache
def render_least() -> Objects:
    """Returns the objects without any value but the least."""
    with tempfile.TemporaryDirectory() as folder:
        return render(Path(folder), {})


def find(objects: Objects, case: ValueCase) -> Any:
    """Returns what is at a case's place, or None."""
    kind, _, name = case.of.partition(" ")
    found: Any = next(
        (o for o in objects if o["kind"] == kind and (not name or o["metadata"]["name"] == name)), None
    )
    at = case.at
    if at.startswith("alert ") and found is not None:
        alert, _, at = at.removeprefix("alert ").partition(".")
        rules = [rule for group in found["spec"]["groups"] for rule in group["rules"]]
        found = next(rule for rule in rules if rule.get("alert") == alert)
    at, _, inside = at.partition(" json ")
    return walk(json.loads(walk(found, at)), inside) if inside else walk(found, at)


def walk(found: Any, at: str) -> Any:
    """Returns what is at a place by keys, numbers and names of list entries, or None."""
    for part in at.split(".") if at else ():
        if isinstance(found, list) and part.isdigit():
            found = found[int(part)] if int(part) < len(found) else None
        elif isinstance(found, list):
            found = next((entry for entry in found if entry["name"] == part), None)
        elif found is not None:
            found = found.get(part)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.value)
def test_a_value_does_what_it_says(case: ValueCase, tmp_path: Path) -> None:
    before = find(render(tmp_path, case.beside) if case.beside else render_least(), case)
    then = find(render(tmp_path, {**case.beside, case.value: case.given}), case)
    assert then == case.is_then
    assert before != then


def test_without_an_image_the_message_names_the_value(tmp_path: Path) -> None:
    with pytest.raises(
        ClusterError, match=r"image\.repository: needed, since HeteroInfer publishes no images"
    ):
        render(tmp_path, {"image.repository": ""})


def test_worker_images_lie_beside_the_operators(tmp_path: Path) -> None:
    values = {"image.registry": "r.example.com", "image.repository": "ml/op", "image.tag": "7"}
    (deployment,) = (o for o in render(tmp_path, values) if o["kind"] == "Deployment")
    env = {each["name"]: each.get("value") for each in find_container(deployment)["env"]}
    assert env["HETEROINFER_WORKER_IMAGE_CPU"] == "r.example.com/ml/worker-cpu:7"
    assert env["HETEROINFER_WORKER_IMAGE_GPU"] == "r.example.com/ml/worker:7"


def find_container(deployment: dict[str, Any]) -> dict[str, Any]:
    return dict(deployment["spec"]["template"]["spec"]["containers"][0])


def test_common_labels_and_annotations_are_on_every_object(tmp_path: Path) -> None:
    """Labels by which the chart selects stay as they are."""
    everything: dict[str, Any] = {
        "commonLabels": {"team": "ml", "app.kubernetes.io/name": "mine"},
        "commonAnnotations": {"cost": "7"},
        "replicas": 2,
        "calibration.nodeKinds": [{"name": "m7i", "nodeSelector": {"type": "m7i"}}],
        **{
            f"{name}.enabled": True
            for name in ("networkPolicy", "serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
        },
    }
    objects = render(tmp_path, everything)
    assert len({each["kind"] for each in objects}) == 16, {each["kind"] for each in objects}
    for each in objects:
        metadata, name = each["metadata"], (each["kind"], each["metadata"]["name"])
        assert metadata["annotations"]["cost"] == "7", name
        if each["kind"] != "Pod":  # that of `helm test` is no part of what is selected
            assert metadata["labels"]["team"] == "ml", name
            assert metadata["labels"]["app.kubernetes.io/name"] == "heteroinfer-operator", name
    (deployment,) = (each for each in objects if each["kind"] == "Deployment")
    template = deployment["spec"]["template"]["metadata"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= template["labels"].items()
    assert (template["labels"]["team"], template["annotations"]["cost"]) == ("ml", "7")


def test_an_objects_own_labels_and_annotations_win_over_common_ones(tmp_path: Path) -> None:
    given = {"team": "own", "app.kubernetes.io/instance": "own"}
    values: dict[str, Any] = {
        "commonLabels": {"team": "all"},
        "commonAnnotations": {"team": "all"},
        "podLabels": given,
        "podAnnotations": given,
        "prometheusRule.enabled": True,
        "prometheusRule.labels": given,
    }
    objects = {each["kind"]: each for each in render(tmp_path, values)}
    pod = objects["Deployment"]["spec"]["template"]["metadata"]
    for metadata in (pod, objects["PrometheusRule"]["metadata"]):
        assert metadata["labels"]["team"] == "own"
        assert metadata["labels"]["app.kubernetes.io/instance"] == "rel", "what the chart selects by"
    assert pod["annotations"]["team"] == "own"
    assert objects["Deployment"]["metadata"]["annotations"]["team"] == "all"


def test_a_service_monitor_takes_the_place_of_the_operators_pod_monitor(tmp_path: Path) -> None:
    objects = render(tmp_path, {"podMonitor.enabled": True, "serviceMonitor.enabled": True})
    monitors = [each["metadata"]["name"] for each in objects if each["kind"] == "PodMonitor"]
    assert monitors == ["rel-heteroinfer-ranks"]
    (monitor,) = (each for each in objects if each["kind"] == "ServiceMonitor")
    (service,) = (each for each in objects if each["kind"] == "Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"extraEnv": [{"name": "HETEROINFER_WORKERS", "value": "1"}]}, "extraEnv: got HETEROINFER_WORKERS"),
        ({"strategy": {"type": "RollingUpdate"}, "leaderElection.enabled": False}, "strategy: without"),
        ({"image.digest": "sha256:12"}, "/image/digest"),
        ({"image.repository": "a/b:1"}, "/image/repository"),
        ({"logFormat": "xml"}, "/logFormat"),
        ({"podDisruptionBudget.maxUnavailable": 0}, "/podDisruptionBudget/maxUnavailable"),
        ({"allowedHostPaths": ["models"]}, "/allowedHostPaths/0"),
        ({"fullnameOverride": "No"}, "/fullnameOverride"),
        ({"networkPolicy.apiServerPorts": []}, "/networkPolicy/apiServerPorts"),
        ({"volumeMounts": [{"name": "x"}]}, "/volumeMounts/0"),
        ({"rbac.aggregate": True}, "additional properties 'aggregate' not allowed"),
    ],
)
def test_values_that_cannot_be_meant_are_refused(values: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as refused:
        render(tmp_path, values)
    assert said in str(refused.value)


def test_the_environment_that_the_chart_has_no_values_for_is_extra(tmp_path: Path) -> None:
    given = [{"name": "HETEROINFER_RESYNC_SECONDS", "value": "60"}]
    objects = render(tmp_path, {"extraEnv": given})
    for each in objects:
        if each["kind"] == "Deployment":
            assert given[0] in find_container(each)["env"]
        if each["kind"] == "Pod":
            assert given[0] in each["spec"]["containers"][0]["env"]


def test_people_of_an_installation_with_rights_in_namespaces_only_have_no_cluster_roles(
    tmp_path: Path,
) -> None:
    objects = render(tmp_path, {"scope": "Namespaced", "crds.install": False})
    assert not [each for each in objects if each["kind"].startswith("Cluster")]
