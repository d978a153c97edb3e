"""Tests each value of the chart: a field of a rendered object has the value only if it is set."""

import functools
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import processes, tools
from tests.cluster.errors import ClusterError
from tests.cluster.folders import LEAST_VALUES, REPOSITORY
from tests.integration.chart.value_cases import CASES, FREE, ONE_KIND, ValueCase, values_of

CHART = REPOSITORY / "charts" / "heteroinfer"
Objects = list[dict[str, Any]]


class UniqueKeys(yaml.CSafeLoader):
    """Reads YAML, and refuses a key that occurs twice in one object."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        assert len(keys) == len(set(keys)), f"keys occur twice: {sorted(keys)}"
        return super().construct_mapping(node, deep=deep)


def render(folder: Path, values: dict[str, Any], release: str = "rel", namespace: str = "sys") -> Objects:
    """Returns the objects of a release with these values and the values that the chart requires."""
    tools.ensure_built(tools.HELM)
    files = [LEAST_VALUES]
    for number, (path, value) in enumerate(values.items()):
        files.append(folder / f"{number}.yaml")
        files[-1].write_text(values_of(path, value))
    helm = str(tools.program(tools.HELM, "helm"))
    command = [helm, "template", release, str(CHART), "--namespace", namespace]
    given = [option for file in files for option in ("-f", str(file))]
    home = {f"HELM_{name}_HOME": str(folder / "helm") for name in ("CACHE", "CONFIG", "DATA")}
    text = processes.run([*command, "--kube-version", "1.35.4", *given], timeout_s=60, environment=home)
    return [document for document in yaml.load_all(text, Loader=UniqueKeys) if document]


@functools.cache
def render_least() -> Objects:
    """Returns the objects with only the values that the chart requires."""
    with tempfile.TemporaryDirectory() as folder:
        return render(Path(folder), {})


def find(objects: Objects, case: ValueCase) -> Any:
    """Returns the value at a case's place, or None."""
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
    """Returns the value at a place (a path of keys, indices and names of list entries), or None."""
    for part in at.split(".") if at else ():
        if isinstance(found, list) and part.isdigit():
            found = found[int(part)] if int(part) < len(found) else None
        elif isinstance(found, list):
            found = next((entry for entry in found if entry["name"] == part), None)
        elif found is not None:
            found = found.get(part)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.value)
def test_each_value_changes_its_field(case: ValueCase, tmp_path: Path) -> None:
    before = find(render(tmp_path, case.beside) if case.beside else render_least(), case)
    then = find(render(tmp_path, {**case.beside, case.value: case.given}), case)
    assert then == case.is_then
    assert before != then


def test_without_an_image_the_message_names_the_value(tmp_path: Path) -> None:
    with pytest.raises(
        ClusterError, match=r"image\.repository: must be set, because HeteroInfer publishes no images"
    ):
        render(tmp_path, {"image.repository": ""})


def test_worker_images_are_in_the_registry_folder_of_the_operators_image(tmp_path: Path) -> None:
    values = {"image.registry": "r.example.com", "image.repository": "ml/op", "image.tag": "7"}
    (deployment,) = (o for o in render(tmp_path, values) if o["kind"] == "Deployment")
    env = {each["name"]: each.get("value") for each in find_container(deployment)["env"]}
    assert env["HETEROINFER_WORKER_IMAGE_CPU"] == "r.example.com/ml/worker-cpu:7"
    assert env["HETEROINFER_WORKER_IMAGE_GPU"] == "r.example.com/ml/worker:7"


def find_container(deployment: dict[str, Any]) -> dict[str, Any]:
    return dict(deployment["spec"]["template"]["spec"]["containers"][0])


def test_common_labels_and_annotations_are_on_every_object(tmp_path: Path) -> None:
    """The labels by which the chart selects pods do not change."""
    everything: dict[str, Any] = {
        "commonLabels": {
            "team": "ml",
            "app.kubernetes.io/name": "mine",
            "app.kubernetes.io/component": "mine",
            "batch.kubernetes.io/job-name": "mine",
        },
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
    names = {"Pod": "heteroinfer-check"}
    for each in objects:
        metadata, name = each["metadata"], (each["kind"], each["metadata"]["name"])
        assert metadata["annotations"]["cost"] == "7", name
        assert metadata["labels"]["team"] == "ml", name
        wanted = names.get(each["kind"], "heteroinfer-operator")
        assert metadata["labels"]["app.kubernetes.io/name"] == wanted, name
    (job,) = (each for each in objects if each["kind"] == "Job")
    (service,) = (each for each in objects if each["kind"] == "Service")
    components = [each["metadata"]["labels"]["app.kubernetes.io/component"] for each in (job, service)]
    assert components == ["calibration", "metrics"]
    measures = job["spec"]["template"]["metadata"]
    assert job["spec"]["selector"]["matchLabels"].items() <= measures["labels"].items()
    assert measures["labels"]["batch.kubernetes.io/job-name"] == job["metadata"]["name"]
    assert measures["labels"]["app.kubernetes.io/name"] == "heteroinfer-calibration"
    assert (measures["labels"]["team"], measures["annotations"]["cost"]) == ("ml", "7")
    (deployment,) = (each for each in objects if each["kind"] == "Deployment")
    template = deployment["spec"]["template"]["metadata"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= template["labels"].items()
    assert (template["labels"]["team"], template["annotations"]["cost"]) == ("ml", "7")


def test_labels_of_an_object_override_the_common_labels(tmp_path: Path) -> None:
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
        assert metadata["labels"]["app.kubernetes.io/instance"] == "rel", (
            "the labels of the chart's selectors"
        )
    assert pod["annotations"]["team"] == "own"
    assert objects["Deployment"]["metadata"]["annotations"]["team"] == "all"


def test_a_service_monitor_replaces_the_operators_pod_monitor(tmp_path: Path) -> None:
    objects = render(tmp_path, {"podMonitor.enabled": True, "serviceMonitor.enabled": True})
    monitors = [each["metadata"]["name"] for each in objects if each["kind"] == "PodMonitor"]
    assert monitors == ["rel-heteroinfer-ranks"]
    (monitor,) = (each for each in objects if each["kind"] == "ServiceMonitor")
    (service,) = (each for each in objects if each["kind"] == "Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"extraEnv": [{"name": "HETEROINFER_WORKERS", "value": "1"}]},
            "extraEnv: must not contain HETEROINFER_WORKERS",
        ),
        ({"strategy": {"type": "RollingUpdate"}, "leaderElection.enabled": False}, "strategy: must be empty"),
        ({"image.digest": "sha256:12"}, "/image/digest"),
        ({"image.repository": "a/b:1"}, "/image/repository"),
        ({"logFormat": "xml"}, "/logFormat"),
        ({"podDisruptionBudget.maxUnavailable": 0}, "/podDisruptionBudget/maxUnavailable"),
        ({"allowedHostPaths": ["models"]}, "/allowedHostPaths/0"),
        ({"fullnameOverride": "No"}, "/fullnameOverride"),
        ({"networkPolicy.apiServerPorts": []}, "/networkPolicy/apiServerPorts"),
        ({"volumeMounts": [{"name": "x"}]}, "/volumeMounts/0"),
        ({"rbac.aggregate": True}, "additional properties 'aggregate' not allowed"),
        ({"extraArgs": ["--log-level=debug"]}, "additional properties 'extraArgs' not allowed"),
        (
            {"commonLabels": {"rbac.authorization.k8s.io/aggregate-to-view": "1"}},
            "commonLabels: must not contain rbac.",
        ),
        ({"commonLabels": {"a b": "c"}}, "/commonLabels': additional properties 'a b'"),
        ({"podLabels": {"a": "b c"}}, "/podLabels/a"),
        ({"podAnnotations": {"a b": "c"}}, "/podAnnotations': additional properties 'a b'"),
        ({"resources.limits": {"gpu ": 1}}, "/resources/limits': additional properties 'gpu '"),
        ({"resources.limits.cpu": "8cores"}, "/resources/limits/cpu"),
        ({"podResources.worker.limits.memory": "4 GB"}, "/podResources/worker/limits/memory"),
        (
            {"resources.limits.memory": "190M"},
            "resources: the memory request must be at most the limit 190M (got 192Mi)",
        ),
        (
            {"resources.requests.memory": "1Gi"},
            "resources: the memory request must be at most the limit 512Mi (got 1Gi)",
        ),
        (
            {"resources.limits.cpu": 0.099},
            "resources: the cpu request must be at most the limit 0.099 (got 100m)",
        ),
        (
            {"podResources.inspect.limits.memory": "1e6"},
            "podResources.inspect: the memory request must be at most the limit",
        ),
        (
            {"calibration.nodeKinds": [{**ONE_KIND[0], "resources": {"limits": {"memory": "1Mi"}}}]},
            "calibration.measureResources, nodeKinds m7i: the memory request must be at most",
        ),
        ({"tolerations": [{"operator": "Exists", "value": "x"}]}, "/tolerations/0/value"),
        ({"tolerations": [{"value": "x"}]}, "/tolerations/0': missing property 'key'"),
        (
            {"tolerations": [{"key": "x", "tolerationSeconds": 5}]},
            "/tolerations/0': missing property 'effect'",
        ),
        (
            {"strategy": {"type": "Recreate", "rollingUpdate": {"maxSurge": 1}}},
            "strategy.rollingUpdate: must be null",
        ),
        (
            {"strategy.rollingUpdate": {"maxSurge": 0, "maxUnavailable": "0%"}},
            "strategy.rollingUpdate: maxSurge and",
        ),
        ({"strategy.rollingUpdate.maxSurge": "one"}, "/strategy/rollingUpdate/maxSurge"),
        ({"dnsPolicy": "None"}, "dnsConfig.nameservers: must not be empty"),
        (
            {"podMonitor.enabled": True, "podMonitor.interval": "10s", "podMonitor.scrapeTimeout": "1m"},
            "scrapeTimeout must be at most interval (got 1m and 10s)",
        ),
        (
            {"volumes": [{"name": "scratch", "emptyDir": {}}]},
            "the chart itself uses scratch (got scratch twice)",
        ),
        (
            {"volumeMounts": [{"name": "x", "mountPath": "/x"}]},
            "volumeMounts: each name must be the name of a volume in volumes (got x)",
        ),
        (
            {"volumes": [{"name": "x"}], "volumeMounts": [{"name": "x", "mountPath": "/tmp"}]},
            "the chart itself uses /tmp (got /tmp twice)",
        ),
        ({"extraEnv": [{"name": "A"}, {"name": "A"}]}, "extraEnv: each name must be unique (got A twice)"),
        ({"extraEnv": [{"name": "A", "value": "1", "valueFrom": {}}]}, "/extraEnv/0"),
        ({"serviceAccount.name": "Bad Name"}, "/serviceAccount/name"),
        ({"imagePullSecrets": [{"name": "A,b"}]}, "/imagePullSecrets/0/name"),
        ({"workerImages.cpu": "a b"}, "/workerImages/cpu"),
        ({"image.registry": "[registry]:5000"}, "/image/registry"),
        ({"image.repository": "fd00::1/x"}, "/image/repository"),
        ({"networkPolicy.metricsFrom": [{"namespaces": {}}]}, "/networkPolicy/metricsFrom/0"),
        ({"podDisruptionBudget.maxUnavailable": "0%"}, "/podDisruptionBudget/maxUnavailable"),
        ({"fetchEgress.cidrs": ["1:2:3/64"]}, "/fetchEgress/cidrs/0"),
        ({"fetchEgress.except": ["1::2::3/64"]}, "/fetchEgress/except/0"),
        (
            {"fullnameOverride": "1abc", "metricsService.enabled": True},
            "the name of a Service must begin with a letter (got 1abc-metrics)",
        ),
    ],
)
def test_nonsensical_values_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ClusterError) as refused:
        render(tmp_path, values)
    assert message in str(refused.value)


def test_ranges_of_ipv6_addresses_are_accepted(tmp_path: Path) -> None:
    ranges = ["::/0", "fd00::/8", "2001:db8:0:1:2:3:4:5/128", "1::8/64", "1:2:3:4:5:6:7::/112"]
    (deployment,) = (o for o in render(tmp_path, {"fetchEgress.cidrs": ranges}) if o["kind"] == "Deployment")
    env = {each["name"]: each.get("value") for each in find_container(deployment)["env"]}
    assert json.loads(env["HETEROINFER_FETCH_EGRESS"])["cidrs"] == ranges


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ({}, {"app.kubernetes.io/name": "heteroinfer-operator", "app.kubernetes.io/instance": "rel"}),
        (
            {"labelSelector": None},
            {"app.kubernetes.io/name": "heteroinfer-operator", "app.kubernetes.io/instance": "rel"},
        ),
        ({"labelSelector": {"matchLabels": {"team": "ml"}}}, {"team": "ml"}),
    ],
)
def test_a_constraint_without_a_selector_counts_the_operators_pods(
    given: dict[str, Any], used: dict[str, str], tmp_path: Path
) -> None:
    zones = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}
    values = {"topologySpreadConstraints": [zones | given, zones | given]}
    (deployment,) = (o for o in render(tmp_path, values) if o["kind"] == "Deployment")
    expected = zones | {"labelSelector": {"matchLabels": used}}
    assert deployment["spec"]["template"]["spec"]["topologySpreadConstraints"] == [expected, expected]


@pytest.mark.parametrize(
    ("registry", "repository", "image", "beside"),
    [
        ("[fd00::1]:5000", "ml/op", "[fd00::1]:5000/ml/op:1", "[fd00::1]:5000/ml/worker:1"),
        ("", "[fd00::1]:5000/ml/op", "[fd00::1]:5000/ml/op:1", "[fd00::1]:5000/ml/worker:1"),
        ("", "[2001:db8::1]/op", "[2001:db8::1]/op:1", "[2001:db8::1]/worker:1"),
        ("", "localhost:5000/op", "localhost:5000/op:1", "localhost:5000/worker:1"),
    ],
)
def test_a_registry_with_a_port_is_a_part_of_the_image(
    registry: str, repository: str, image: str, beside: str, tmp_path: Path
) -> None:
    values = {"image.registry": registry, "image.repository": repository, "image.tag": "1"}
    (deployment,) = (o for o in render(tmp_path, values) if o["kind"] == "Deployment")
    env = {each["name"]: each.get("value") for each in find_container(deployment)["env"]}
    assert find_container(deployment)["image"] == image
    assert env["HETEROINFER_WORKER_IMAGE_GPU"] == beside


EVERYTHING: dict[str, Any] = {
    "replicas": 2,
    "calibration.nodeKinds": [{"name": "m7i", "nodeSelector": {"type": "m7i"}}],
    **{
        f"{name}.enabled": True
        for name in ("networkPolicy", "metricsService", "podMonitor", "prometheusRule", "dashboards")
    },
}


@functools.cache
def render_everything() -> Objects:
    with tempfile.TemporaryDirectory() as folder:
        return render(Path(folder), EVERYTHING)


@functools.cache
def sections_and_values() -> dict[str, Any]:
    """Returns each value and each section of values.yaml by its path."""

    def walked(values: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for name, value in values.items():
            yield f"{path}{name}", value
            if isinstance(value, dict) and f"{path}{name}" not in FREE:
                yield from walked(value, f"{path}{name}.")

    return dict(walked(yaml.safe_load((CHART / "values.yaml").read_text()), ""))


@pytest.mark.parametrize("path", sorted({*sections_and_values()} - {*EVERYTHING, "image.repository"}))
def test_null_means_not_set_or_is_refused_with_its_path(path: str, tmp_path: Path) -> None:
    """Helm removes a null value from the defaults.

    If a template needs the value, the error names its path.
    """
    default = sections_and_values()[path]
    values = {name: value for name, value in EVERYTHING.items() if not name.startswith(f"{path}.")}
    section, _, name = path.rpartition(".")
    message = f"at '{'/' * bool(section)}{section.replace('.', '/')}': missing property '{name}'"
    if path == "dashboards.labels" or (default not in ("", [], {}) and path not in FREE):
        with pytest.raises(ClusterError, match=re.escape(message)):
            render(tmp_path, {**values, path: None})
    else:
        objects = render(tmp_path, {**values, path: None})
        assert path in (*FREE, "podResources.worker") or objects == render_everything()


@pytest.mark.parametrize(
    ("asked", "limit"),
    [("50m", "50m"), ("50m", 0.05), ("1Ki", "1024"), (1, "1000m"), ("1Gi", "1.1G"), ("1k", "1e3")],
)
def test_a_request_up_to_its_limit_is_accepted(asked: Any, limit: Any, tmp_path: Path) -> None:
    values = {"resources.requests.memory": asked, "resources.limits.memory": limit}
    (deployment,) = (o for o in render(tmp_path, values) if o["kind"] == "Deployment")
    assert find_container(deployment)["resources"]["requests"]["memory"] == asked


def test_probes_allow_a_slow_start_and_detect_a_hang(tmp_path: Path) -> None:
    """With 50m of CPU a start took 40 s until the port answered."""
    (deployment,) = (o for o in render(tmp_path, {}) if o["kind"] == "Deployment")
    container = find_container(deployment)

    def patience_s(probe: str) -> int:
        return int(container[probe]["periodSeconds"] * container[probe]["failureThreshold"])

    assert patience_s("startupProbe") == 300
    assert patience_s("livenessProbe") == 60
    assert container["livenessProbe"]["timeoutSeconds"] <= container["livenessProbe"]["periodSeconds"]
    assert container["resources"]["requests"]["cpu"] == "100m"


def test_a_rollout_with_host_network_does_not_need_the_port_twice(tmp_path: Path) -> None:
    def strategy(values: dict[str, Any]) -> Any:
        (found,) = (o for o in render(tmp_path, values) if o["kind"] == "Deployment")
        return found["spec"].get("strategy")

    one_by_one = {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    assert strategy({"hostNetwork": True}) == one_by_one
    assert strategy({"hostNetwork": True, "strategy": {"type": "Recreate"}}) == {"type": "Recreate"}
    assert strategy({"hostNetwork": True, "leaderElection.enabled": False}) == {"type": "Recreate"}
    assert strategy({}) is None


def test_the_charts_policy_opens_the_same_dns_ports_as_the_policies_of_the_operator(
    tmp_path: Path,
) -> None:
    policies = [o for o in render(tmp_path, {"networkPolicy.enabled": True}) if o["kind"] == "NetworkPolicy"]
    assert len(policies) == 2
    for policy in policies:
        found = {(port["port"], port["protocol"]) for port in policy["spec"]["egress"][0]["ports"]}
        assert found == {(port, protocol) for port in (53, 5353) for protocol in ("TCP", "UDP")}


def test_extra_env_sets_variables_of_the_operator_and_helm_test(tmp_path: Path) -> None:
    given = [{"name": "HETEROINFER_RESYNC_SECONDS", "value": "60"}]
    objects = render(tmp_path, {"extraEnv": given})
    for each in objects:
        if each["kind"] == "Deployment":
            assert given[0] in find_container(each)["env"]
        if each["kind"] == "Pod":
            assert given[0] in each["spec"]["containers"][0]["env"]


def test_a_namespaced_installation_creates_no_cluster_roles_for_users(
    tmp_path: Path,
) -> None:
    objects = render(tmp_path, {"scope": "Namespaced", "crds.install": False})
    assert not [each for each in objects if each["kind"].startswith("Cluster")]


@pytest.mark.parametrize("scope", [{}, {"scope": "Namespaced", "watchNamespaces": ["2026", "no"]}])
def test_names_that_yaml_reads_as_numbers_or_booleans_stay_texts(
    tmp_path: Path, scope: dict[str, Any]
) -> None:
    """Namespaces such as `2024` or `no` are valid in Kubernetes."""
    values = {
        **scope,
        "priorityClassName": "123",
        "runtimeClassName": "12",
        "dashboards.enabled": True,
        "dashboards.namespace": "2023",
        "podDisruptionBudget.enabled": True,
        "networkPolicy.enabled": True,
    }
    objects = render(tmp_path, values, release="2025", namespace="2024")
    names = [
        (path, value)
        for each in objects
        for path, value in leaves(each)
        if path[-1] in {"name", "namespace", "priorityClassName", "runtimeClassName", "serviceAccountName"}
        or path[-1].startswith("app.kubernetes.io/")
    ]
    assert [(path, value) for path, value in names if not isinstance(value, str)] == []
    assert {"2024", "2023", "123"} <= {value for _, value in names}


def leaves(value: Any, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Any]]:
    """Returns the path and the value of everything that is no object and no list."""
    if isinstance(value, dict):
        return [leaf for key, child in value.items() for leaf in leaves(child, (*path, str(key)))]
    if isinstance(value, list):
        return [leaf for child in value for leaf in leaves(child, path)]
    return [(path, value)]


def test_a_parent_chart_may_switch_the_chart_off_by_a_condition(tmp_path: Path) -> None:
    """Helm passes the value of the condition to the chart, too."""
    assert render(tmp_path, {"enabled": True}) == render_least()
