"""Tests that the chart renders with Helm, and that a real API server accepts and installs it."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract import names
from heteroinfer_operator.kube import rights
from heteroinfer_operator.kube.rights import AccessRule
from heteroinfer_operator.manifests.fetch_egress import FetchEgress
from heteroinfer_operator.manifests.pod_resources import PodResources
from heteroinfer_operator.manifests.worker_pods import NO_MESH_ANNOTATIONS, NO_MESH_LABELS
from heteroinfer_operator.settings import InstallationSettings
from tests.cluster.crds import is_established, wait_established
from tests.cluster.errors import ClusterError
from tests.cluster.folders import LEAST_VALUES, REPOSITORY
from tests.cluster.running_cluster import Cluster, start_control_plane_only

CHART = REPOSITORY / "charts" / "heteroinfer"
CRD = f"{names.PLURAL}.{names.API_GROUP}"
OURS = "registry.example.com/heteroinfer"
"""The folder of the images in LEAST_VALUES."""
VERSION = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]


@pytest.fixture(scope="module")
def plane() -> Iterator[Cluster]:
    """Yields a control plane of this module. The CRD on it belongs to the release."""
    with start_control_plane_only() as cluster:
        yield cluster


def render(cluster: Cluster, *values: str) -> list[dict[str, Any]]:
    """Returns the objects that the chart renders, as release `rel` in namespace `sys`."""
    text = cluster.helm("template", "rel", str(CHART), *options(values))
    return [document for document in yaml.safe_load_all(text) if document]


def options(values: tuple[str, ...]) -> list[str]:
    sets = [option for value in values for option in ("--set", value)]
    return ["--namespace", "sys", "--kube-version", "1.35.4", "-f", str(LEAST_VALUES), *sets]


def of_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [o for o in objects if o["kind"] == kind]


def of_operator(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the cluster roles of the operator, without the roles for users."""
    roles = of_kind(objects, "ClusterRole")
    return [role for role in roles if "aggregate" not in json.dumps(role["metadata"]["labels"])]


def rules_of(role: dict[str, Any]) -> set[tuple[str, str, str, str]]:
    """Returns the rules of a role as (group, resource, verb, name)."""
    return {
        (group, resource, verb, name)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for name in rule.get("resourceNames", [""])
    }


def wanted(*rules: AccessRule) -> set[tuple[str, str, str, str]]:
    return {(rule.group, rule.resource, verb, rule.name) for rule in rules for verb in rule.verbs}


KEY_RULES = rights.key_rules("rel-heteroinfer-operator-key", "rel-heteroinfer-key")


def test_the_cluster_role_grants_exactly_the_operators_rights(plane: Cluster) -> None:
    objects = render(plane)
    (cluster_role,) = of_operator(objects)
    assert rules_of(cluster_role) == wanted(*rights.SERVED, *rights.CLUSTER)
    roles = {role["metadata"]["name"]: role for role in of_kind(objects, "Role")}
    assert {name: rules_of(role) for name, role in roles.items()} == {
        "rel-heteroinfer-lease": wanted(*rights.lease_rules("rel-heteroinfer")),
        "rel-heteroinfer-key": wanted(*KEY_RULES),
    }
    assert {role["metadata"]["namespace"] for role in roles.values()} == {"sys"}
    assert of_kind(objects, "Secret") == [], "the operator makes its key"


def test_namespaced_scope_has_a_role_in_each_namespace_and_no_cluster_role(plane: Cluster) -> None:
    objects = render(plane, "scope=Namespaced", "watchNamespaces={a,b}", "leaderElection.enabled=false")
    assert of_operator(objects) == of_kind(objects, "ClusterRoleBinding") == []
    roles = {role["metadata"]["namespace"]: rules_of(role) for role in of_kind(objects, "Role")}
    assert roles == {
        "a": wanted(*rights.SERVED),
        "b": wanted(*rights.SERVED),
        "sys": wanted(*KEY_RULES),
    }
    for binding in of_kind(objects, "RoleBinding"):
        assert binding["subjects"][0]["namespace"] == "sys"
    own = render(plane, "scope=Namespaced", "leaderElection.enabled=false")
    assert [role["metadata"]["namespace"] for role in of_kind(own, "Role")] == ["sys", "sys"]


KINDS = (
    "calibration.nodeKinds[0].name=m7i",
    "calibration.nodeKinds[0].nodeSelector.type=m7i",
    "calibration.nodeKinds[0].resources.limits.cpu=8",
    "calibration.nodeKinds[0].tolerations[0].operator=Exists",
    "calibration.nodeKinds[1].name=h200",
    "calibration.nodeKinds[1].nodeSelector.type=h200",
    "calibration.nodeKinds[1].gpu=true",
)
NETWORKS = ("calibration.networks[0].from=h200", "calibration.networks[0].to=m7i")


def test_calibration_adds_rights_on_one_config_map(plane: Cluster) -> None:
    before, objects = render(plane), render(plane, *KINDS)
    name = "rel-heteroinfer-calibration"
    roles = {role["metadata"]["name"]: rules_of(role) for role in of_kind(objects, "Role")}
    measured = "rel-heteroinfer-measured"
    assert roles[name] == {("", "configmaps", verb, measured) for verb in ("create", "patch")}
    assert set(roles) == {name, "rel-heteroinfer-lease", "rel-heteroinfer-key"}
    assert of_kind(objects, "ClusterRole") == of_kind(before, "ClusterRole")
    assert of_kind(before, "Job") == []
    assert of_kind(objects, "ConfigMap") == [], "the Jobs create it, and a template would empty it"
    jobs = of_kind(objects, "Job")
    images = [job["spec"]["template"]["spec"]["initContainers"][0]["image"] for job in jobs]
    assert images == [f"{OURS}/worker-cpu:{VERSION}", f"{OURS}/worker:{VERSION}"]
    other = of_kind(render(plane, *KINDS, "workerImages.cpu=cpu:2"), "Job")
    changed = [a["metadata"]["name"] != b["metadata"]["name"] for a, b in zip(jobs, other, strict=True)]
    assert changed == [True, False]
    # The template of a Job cannot be changed. So while the Job's name is the same, its template must be, too.
    assert of_kind(render(plane, *KINDS, "workers=2", "allowRemoteCode=true"), "Job") == jobs
    others = (
        "image.pullPolicy=Always",
        "imagePullSecrets[0].name=pull",
        "image.repository=elsewhere/operator",
        "assignedUserIds=true",
        "containerSecurityContext.privileged=false",
        "calibration.keepResources.limits.memory=1Gi",
        "commonLabels.team=ml",
        "commonAnnotations.cost=seven",
    )
    for value in others:
        renamed = of_kind(render(plane, *KINDS, value), "Job")
        assert not {j["metadata"]["name"] for j in renamed} & {j["metadata"]["name"] for j in jobs}, value


def test_calibrations_use_only_the_given_accounts_and_rights(plane: Cluster) -> None:
    name = "rel-heteroinfer-calibration"
    without = render(plane, *KINDS, "rbac.create=false")
    assert of_kind(without, "Role") == of_kind(without, "RoleBinding") == []
    own = ("serviceAccount.create=false", "serviceAccount.name=mine")
    with pytest.raises(ClusterError, match=r"calibration\.serviceAccountName: must be set"):
        render(plane, *KINDS, *own)
    given = render(plane, *KINDS, *own, "calibration.serviceAccountName=theirs")
    assert of_kind(given, "ServiceAccount") == []
    (binding,) = (each for each in of_kind(given, "RoleBinding") if each["metadata"]["name"] == name)
    assert [subject["name"] for subject in binding["subjects"]] == ["theirs"]
    assert {job["spec"]["template"]["spec"]["serviceAccountName"] for job in of_kind(given, "Job")} == {
        "theirs"
    }


def test_pods_that_measure_take_no_sidecar_and_reach_the_api_server(plane: Cluster) -> None:
    objects = render(plane, *KINDS)
    (policy,) = of_kind(objects, "NetworkPolicy")
    assert policy["spec"]["egress"][0]["ports"][0] == {"protocol": "TCP"}
    for job in of_kind(objects, "Job"):
        metadata = job["spec"]["template"]["metadata"]
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= metadata["labels"].items()
        assert NO_MESH_LABELS.items() <= metadata["labels"].items()
        assert NO_MESH_ANNOTATIONS.items() <= metadata["annotations"].items()
    assert of_kind(render(plane, *KINDS, "podEgress=Never"), "NetworkPolicy") == []


LIMITS = {"cpu", "memory", "ephemeral-storage"}
LIMITED = tuple(
    f"calibration.{container}.limits.{resource}={amount}"
    for container in ("measureResources", "keepResources")
    for resource, amount in (("cpu", "2"), ("memory", "4Gi"), ("ephemeral-storage", "1Gi"))
)
"""A namespace with a ResourceQuota on limits requires these fields."""


def test_pods_that_measure_are_restricted_and_only_the_last_container_has_a_token(plane: Cluster) -> None:
    namespace = "restricted"
    plane.kubectl("create", "namespace", namespace)
    plane.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    plane.kubectl("create", "serviceaccount", "-n", namespace, "rel-heteroinfer-calibration")
    hard = ",".join(f"limits.{name}=64Gi" for name in sorted(LIMITS))
    plane.kubectl("create", "quota", "-n", namespace, "limits", f"--hard={hard}")
    for job in of_kind(render(plane, *KINDS, *NETWORKS, *LIMITED), "Job"):
        spec = job["spec"]["template"]["spec"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "measures"}, "spec": spec}
        answer = plane.kubectl(
            "create", "-n", namespace, "--dry-run=server", "-f", "-", "-o", "json", stdin=yaml.safe_dump(pod)
        )
        admitted = json.loads(answer)["spec"]
        containers = [*admitted.get("initContainers", ()), *admitted["containers"]]
        mounts = [{mount["mountPath"] for mount in container["volumeMounts"]} for container in containers]
        has_token = [any("serviceaccount" in path for path in paths) for paths in mounts]
        # Only the container that stores a result has a token; the pod that answers a measurement stores none.
        assert has_token == [container["name"] == "keep" for container in containers]
        resources = [each["resources"] for each in containers]
        assert all(set(each["limits"]) >= LIMITS for each in resources), resources
        del spec["containers"][0]["securityContext"]
        with pytest.raises(ClusterError, match="violates PodSecurity"):
            plane.kubectl("create", "-n", namespace, "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(pod))
    plane.kubectl("delete", "namespace", namespace, "--wait=false")


def test_a_measurement_has_its_limit_and_waits_for_a_node(plane: Cluster) -> None:
    for job in of_kind(render(plane, *KINDS, "calibration.limitSeconds=90"), "Job"):
        assert "activeDeadlineSeconds" not in job["spec"], (
            "the deadline would also count while there is no node"
        )
        spec = job["spec"]["template"]["spec"]
        assert spec["activeDeadlineSeconds"] > 90
        assert spec["initContainers"][0]["args"][:3] == ["calibrate", "--limit", "90"]
        containers = (*spec["initContainers"], *spec["containers"])
        assert {each["terminationMessagePolicy"] for each in containers} == {"FallbackToLogsOnError"}


POD_SECURITY = (
    '{"container":{"allowPrivilegeEscalation":false,"capabilities":{"drop":["ALL"]},'
    '"readOnlyRootFilesystem":true},"pod":{"fsGroup":65532,"fsGroupChangePolicy":"OnRootMismatch",'
    '"runAsGroup":65532,"runAsNonRoot":true,"runAsUser":65532,"seccompProfile":{"type":"RuntimeDefault"}}}'
)
"""The security contexts that the operator uses if no value of the chart is set."""


def contexts(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the security contexts of a release's pods, and of the pods that its operator creates."""
    templates = [
        each["spec"]["template"]["spec"] for each in objects if each["kind"] in ("Deployment", "Job")
    ]
    found = []
    for spec in (*templates, *(each["spec"] for each in of_kind(objects, "Pod"))):
        containers = [*spec.get("initContainers", ()), *spec["containers"]]
        found += [spec["securityContext"], *(each["securityContext"] for each in containers)]
        for variable in (v for each in containers for v in each.get("env", ())):
            if variable["name"] == "HETEROINFER_POD_SECURITY":
                found += json.loads(variable["value"]).values()
    return found


def test_security_contexts_follow_the_values_of_the_chart(plane: Cluster) -> None:
    ids = {"runAsUser", "runAsGroup", "fsGroup"}
    fixed = contexts(render(plane, *KINDS))
    assert len(fixed) == 14, "two Jobs of two containers, two pods of one, and what both operators make"
    assert sum("runAsUser" in each for each in fixed) == 6, "of all pods, of no container"
    for each in contexts(render(plane, *KINDS, "assignedUserIds=true")):
        assert not ids & each.keys()
    own = (
        "podSecurityContext.runAsUser=1000680000",
        "podSecurityContext.fsGroup=null",
        "workerPods.podSecurityContext.supplementalGroups[0]=7",
        "workerPods.containerSecurityContext.runAsUser=1000680001",
    )
    operators, checks, made = (contexts(render(plane, *own))[index] for index in (0, 4, 2))
    assert (
        operators
        == checks
        == {
            "runAsNonRoot": True,
            "runAsUser": 1000680000,
            "runAsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
    )
    assert made["runAsUser"] == 1000680001
    with pytest.raises(ClusterError, match="runAsUsr"):
        render(plane, "workerPods.podSecurityContext.runAsUsr=1")


def test_the_operator_reads_all_variables_of_its_environment(plane: Cluster) -> None:
    objects = render(
        plane,
        "scope=Namespaced",
        "watchNamespaces={b,a}",
        "operatorClass=beta",
        "allowHostPaths=true",
        "podEgress=Always",
        "allowRemoteCode=true",
        "allowedArguments={--runner,--api-key}",
        "allowedEnvironment={FI_*,NCCL_TOPO_DUMP_FILE}",
        "allowedAnnotations={example.com/}",
        "allowedServiceAccounts={models}",
        "workerImages.cpu=cpu:1",
        "leaderElection.leaseSeconds=30",
        "workers=2",
        "logLevel=DEBUG",
    )
    (deployment,) = of_kind(objects, "Deployment")
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    fields = {"metadata.namespace": "sys", "metadata.name": "pod-1"}
    env = {
        variable["name"]: variable.get("value", "") or fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
        for variable in container["env"]
    }
    assert InstallationSettings.from_env(env) == InstallationSettings(
        watch_namespaces=("a", "b"),
        operator_class="beta",
        worker_image_cpu="cpu:1",
        worker_image_gpu=f"{OURS}/worker:{VERSION}",
        allow_host_paths=True,
        pod_egress="Always",
        fetch_egress=env["HETEROINFER_FETCH_EGRESS"],
        allow_remote_code=True,
        allowed_arguments=("--api-key", "--runner"),
        allowed_environment=("FI_*", "NCCL_TOPO_DUMP_FILE"),
        allowed_annotations=("example.com/",),
        allowed_service_accounts=("models",),
        pod_resources=env["HETEROINFER_POD_RESOURCES"],
        workers=2,
        key_secret="rel-heteroinfer-operator-key",
        former_key_secret="rel-heteroinfer-key",
        leader_election=True,
        lease_name="rel-heteroinfer",
        lease_duration_s=30,
        pod_security=POD_SECURITY,
        namespace="sys",
        identity="pod-1",
        log_level="DEBUG",
    )
    assert PodResources.from_json(env["HETEROINFER_POD_RESOURCES"]) == PodResources(), "the same defaults"
    assert FetchEgress.from_json(env["HETEROINFER_FETCH_EGRESS"]) == FetchEgress(), "the same defaults"
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("alowHostPaths=true", "additional properties 'alowHostPaths' not allowed"),
        ("image.tagg=x", "additional properties 'tagg' not allowed"),
        ("leaderElection.on=true", "additional properties 'on' not allowed"),
        ("podMonitor.enable=true", "additional properties 'enable' not allowed"),
        ("prometheusRule.rules=x", "additional properties 'rules' not allowed"),
        ("prometheusRule.alerts.HeteroInferGroupsFailed.for=1m", "'HeteroInferGroupsFailed' not allowed"),
        ("prometheusRule.alerts.HeteroInferGroupFailed.for=soon", "/for"),
        ("dashboards.folder=x", "additional properties 'folder' not allowed"),
        ("workerImages.tpu=x", "additional properties 'tpu' not allowed"),
        ("crds.instal=true", "additional properties 'instal' not allowed"),
        ("serviceAccount.nam=x", "additional properties 'nam' not allowed"),
        ("resources.limit.cpu=1", "additional properties 'limit' not allowed"),
        ("podResources.workers.limits.cpu=1", "additional properties 'workers' not allowed"),
        ("podResources.fetch.limit.cpu=1", "additional properties 'limit' not allowed"),
        ("scope=cluster", "/scope"),
        ("workers=0", "/workers"),
        ("replicas=two", "/replicas"),
        ("watchNamespaces={Not_A_Name}", "/watchNamespaces/0"),
        ("operatorClass=Not_A_Name", "/operatorClass"),
        ("watchNamespaces={a}", "watchNamespaces: must be empty with scope Cluster"),
        (
            "replicas=2,leaderElection.enabled=false",
            "replicas: must be 1 without leaderElection.enabled",
        ),
        ("calibration.nodeKinds[0].name=m7i", "missing property 'nodeSelector'"),
        ("calibration.kinds={}", "additional properties 'kinds' not allowed"),
        ("calibration.limitSeconds=1", "/calibration/limitSeconds"),
        (
            ",".join((*KINDS, "calibration.nodeKinds[1].name=m7i")),
            "calibration.nodeKinds: each name must be unique (got m7i twice)",
        ),
        (
            "calibration.networks[0].from=m7i,calibration.networks[0].to=m7i",
            "calibration.networks: from must be the name of one of calibration.nodeKinds (got m7i)",
        ),
        (
            ",".join((*KINDS, "calibration.networks[0].from=m7i,calibration.networks[0].to=m8i")),
            "calibration.networks: to must be the name of one of calibration.nodeKinds (got m8i)",
        ),
        (
            ",".join((*KINDS, *NETWORKS, "calibration.networks[1].from=h200,calibration.networks[1].to=m7i")),
            "calibration.networks: each pair must be unique (got h200 to m7i twice)",
        ),
        ("calibration.networks[0].from=m7i", "missing property 'to'"),
        ("calibration.networks[0].from=M7", "/calibration/networks/0/from"),
        ("calibration.networks[0].port=1", "additional properties 'port' not allowed"),
        (
            ",".join((*KINDS, "scope=Namespaced")),
            "calibration.nodeKinds: must be empty with scope Namespaced",
        ),
        ("serviceAccount.create=false", "serviceAccount.name: must be set if serviceAccount.create is false"),
    ],
)
def test_nonsensical_values_are_refused(plane: Cluster, value: str, message: str) -> None:
    with pytest.raises(ClusterError) as refused:
        render(plane, value)
    assert message in str(refused.value)


def test_the_schema_has_exactly_the_values_of_the_chart() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert set(schema["properties"]) - {"global", "enabled"} == set(values)

    def closed(node: dict[str, Any], path: str) -> None:
        if node.get("type") == "object" and path not in OPEN:
            assert "additionalProperties" in node, path
        for name, child in node.get("properties", {}).items():
            closed(child, f"{path}.{name}")

    closed(schema, "")


OPEN = (
    ".global",
    *(f".affinity.{kind}" for kind in ("nodeAffinity", "podAffinity", "podAntiAffinity")),
)
"""Objects of Kubernetes or of a parent chart, which the chart passes on unchanged."""


def test_the_rendered_crd_equals_the_file_except_for_its_keep_annotation(plane: Cluster) -> None:
    file = yaml.safe_load((CHART / "files" / "heteroinference.yaml").read_text())
    (rendered,) = of_kind(render(plane), "CustomResourceDefinition")
    assert rendered["metadata"].pop("annotations") == {"helm.sh/resource-policy": "keep"}
    assert rendered["metadata"].pop("labels")["app.kubernetes.io/version"] == VERSION
    assert rendered == file
    assert of_kind(render(plane, "crds.install=false"), "CustomResourceDefinition") == []
    assert (CHART / "files" / "heteroinference.yaml").read_bytes() == (
        REPOSITORY / "crds" / "heteroinference.yaml"
    ).read_bytes()


ON_NODES = (
    "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution"
    ".nodeSelectorTerms[0].matchExpressions[0]"
)


@pytest.mark.parametrize(
    "values",
    [
        (),
        ("scope=Namespaced", "watchNamespaces={default,kube-system}"),
        KINDS,
        ("leaderElection.enabled=false", "crds.install=false", "priorityClassName=system-cluster-critical"),
        (
            "replicas=2",
            "networkPolicy.enabled=true",
            "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.name=monitoring",
            "metricsService.enabled=true",
            "commonLabels.team=ml",
            "commonAnnotations.cost=seven",
            "hostNetwork=true",
            "dnsConfig.nameservers={10.0.0.1}",
            "hostAliases[0].ip=10.0.0.1",
            "hostAliases[0].hostnames={api}",
            "strategy.type=RollingUpdate",
            "strategy.rollingUpdate.maxSurge=50%",
            "extraEnv[0].name=HTTPS_PROXY",
            "extraEnv[0].valueFrom.secretKeyRef.name=proxy",
            "extraEnv[0].valueFrom.secretKeyRef.key=url",
            "volumes[0].name=ca",
            "volumes[0].configMap.name=ca",
            "volumeMounts[0].name=ca",
            "volumeMounts[0].mountPath=/ca",
            "topologySpreadConstraints[0].maxSkew=1",
            "topologySpreadConstraints[0].topologyKey=zone",
            "topologySpreadConstraints[0].whenUnsatisfiable=DoNotSchedule",
            "crds.keep=false",
        ),
        (
            "imagePullSecrets[0].name=pull",
            "nodeSelector.disk=ssd",
            "tolerations[0].key=gpu",
            "tolerations[0].operator=Exists",
            "podLabels.team=ml",
            "podAnnotations.note=x",
            "serviceAccount.annotations.note=x",
            f"{ON_NODES}.key=zone",
            f"{ON_NODES}.operator=Exists",
        ),
    ],
)
def test_the_api_server_accepts_the_rendered_objects(plane: Cluster, values: tuple[str, ...]) -> None:
    """All objects except the test pod, because a dry run does not find its service account."""
    objects = [o for o in render(plane, *values) if o["kind"] != "Pod"]
    listed = yaml.safe_dump_all({**o, "metadata": at_home(o)} for o in objects)
    answer = plane.kubectl(
        "apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", stdin=listed
    )
    assert answer.count("serverside-applied (server dry run)") == len(objects)


def at_home(stored: dict[str, Any]) -> dict[str, Any]:
    metadata = dict(stored["metadata"])
    if metadata.get("namespace") == "sys":
        metadata["namespace"] = "default"
    return metadata


def check(cluster: Cluster, tmp_path: Path, release: str, **settings: str) -> tuple[int, str]:
    """Runs `heteroinfer operator --check` like the chart's test pod. Returns exit code and output."""
    token = cluster.kubectl("create", "token", "-n", release, f"{release}-heteroinfer").strip()
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": token}
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config))
    env = {"PATH": os.environ["PATH"], "KUBECONFIG": str(kubeconfig), "NO_PROXY": "*"}
    command = [sys.executable, "-m", "heteroinfer_operator.cli", "operator", "--check"]
    variables = {f"HETEROINFER_{name.upper()}": value for name, value in settings.items()}
    done = subprocess.run(
        command, env=env | variables, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_the_chart_can_be_installed_again_after_an_uninstall(plane: Cluster, tmp_path: Path) -> None:
    least = ("-f", str(LEAST_VALUES))
    plane.helm("install", "rel", str(CHART), "-n", "rel", "--create-namespace", *least)
    wait_established(plane, CRD)
    notes = plane.helm("get", "notes", "rel", "-n", "rel")
    assert "kubectl -n rel rollout status deployment/rel-heteroinfer" in notes
    assert "`helm uninstall` keeps the CustomResourceDefinition" in notes
    deployment = json.loads(plane.kubectl("get", "deployment", "rel-heteroinfer", "-n", "rel", "-o", "json"))
    assert deployment["spec"]["template"]["spec"]["containers"][0]["args"] == ["operator"]
    lease = {"leader_election": "true", "namespace": "rel", "identity": "x", "lease_name": "rel-heteroinfer"}
    assert check(plane, tmp_path, "rel", **lease) == (
        0,
        "ok: the API server serves HeteroInference and grants every right\n",
    )
    code, message = check(plane, tmp_path, "rel", **{**lease, "lease_name": "another"})
    assert code == 1
    assert "missing right: update leases.coordination.k8s.io in namespace rel" in message
    plane.helm("uninstall", "rel", "-n", "rel")
    assert is_established(plane, CRD), "the CRD and all resources stay"
    plane.helm("install", "rel", str(CHART), "-n", "rel", "--set", "scope=Namespaced", *least)
    code, message = check(plane, tmp_path, "rel")
    assert code == 1
    assert "missing right: list nodes in the cluster" in message
    assert check(plane, tmp_path, "rel", watch_namespaces="rel")[0] == 0
    plane.helm("upgrade", "rel", str(CHART), "-n", "rel", "--set", "crds.keep=false,replicas=0", *least)
    notes = plane.helm("get", "notes", "rel", "-n", "rel")
    assert "`helm uninstall` deletes the CustomResourceDefinition" in notes
    plane.helm("uninstall", "rel", "-n", "rel", "--wait")
    assert not plane.kubectl("get", "crd", CRD, "--ignore-not-found")


def test_a_kept_crd_is_adopted_by_a_release_of_another_name(plane: Cluster) -> None:
    """The steps are those of the docs. The resources of the first release still exist."""
    least = ("-f", str(LEAST_VALUES), "--set", "replicas=0")
    plane.helm("install", "rel", str(CHART), "-n", "rel", "--create-namespace", *least)
    wait_established(plane, CRD)
    example = (REPOSITORY / "examples" / "cpu-pair.yaml").read_text()
    plane.kubectl("apply", "-n", "rel", "-f", "-", stdin=example)
    plane.helm("uninstall", "rel", "-n", "rel")
    with pytest.raises(ClusterError, match="cannot be imported into the current release"):
        plane.helm("install", "other", str(CHART), "-n", "rel", *least)
    plane.helm("install", "other", str(CHART), "-n", "rel", "--take-ownership", *least)
    metadata = json.loads(plane.kubectl("get", "crd", CRD, "-o", "json"))["metadata"]
    assert metadata["annotations"]["meta.helm.sh/release-name"] == "other"
    assert metadata["labels"]["app.kubernetes.io/version"] == VERSION
    assert "cpu-pair" in plane.kubectl("get", "hinf", "-n", "rel")
    plane.kubectl("delete", "hinf", "-n", "rel", "--all")
    plane.helm("uninstall", "other", "-n", "rel")
    plane.kubectl("delete", "crd", CRD)


def test_a_team_installs_a_release_with_rights_in_its_namespace(plane: Cluster) -> None:
    """The steps are those of docs/user/install.md: a cluster administrator applies the CRD and the roles."""
    roles = REPOSITORY / "examples" / "team" / "cluster-roles.yaml"
    forced = ("apply", "--server-side", "--force-conflicts", "-f")
    plane.helm("install", "rel", str(CHART), "-n", "rel", "--create-namespace", "-f", str(LEAST_VALUES))
    plane.helm("uninstall", "rel", "-n", "rel")
    plane.kubectl(*forced, str(REPOSITORY / "crds" / "heteroinference.yaml"), "-f", str(roles))
    wait_established(plane, CRD)
    plane.kubectl("create", "namespace", "team")
    plane.kubectl("create", "rolebinding", "-n", "team", "admin", "--clusterrole=admin", "--group=team")
    install = ("install", "rel", str(CHART), "-n", "team", "-f", str(LEAST_VALUES))
    values = ("--set", "scope=Namespaced,crds.install=false,replicas=0")
    as_team = ("--kube-as-user", "jane", "--kube-as-group", "team")
    with pytest.raises(ClusterError, match="attempting to grant RBAC permissions not currently held"):
        plane.helm(*install, *values, *as_team)
    plane.helm("uninstall", "rel", "-n", "team", "--ignore-not-found")
    role = "heteroinfer-installer"
    plane.kubectl("create", "rolebinding", "-n", "team", role, f"--clusterrole={role}", "--group=team")
    plane.helm(*install, *values, *as_team)
    plane.helm("upgrade", *install[1:], *values, *as_team, "--set", "workers=2")
    plane.helm("uninstall", "rel", "-n", "team", *as_team)
    plane.kubectl("delete", "namespace", "team", "--wait=false")
    plane.kubectl("delete", "-f", str(roles))
    plane.kubectl("delete", "crd", CRD)


def test_the_roles_for_a_team_equal_the_charts_roles(plane: Cluster) -> None:
    objects = render(plane)
    text = (REPOSITORY / "examples" / "team" / "cluster-roles.yaml").read_text()
    installer, *people = yaml.safe_load_all(text)
    for role in people:
        kind = role["metadata"]["name"].removeprefix("heteroinfer-people-")
        (ours,) = (o for o in of_kind(objects, "ClusterRole") if o["metadata"]["name"].endswith(f"-{kind}"))
        assert rules_of(role) == rules_of(ours)
        assert role["metadata"]["labels"].items() <= ours["metadata"]["labels"].items()
    leases = {(*rule[:3], "") for rule in wanted(*rights.lease_rules("rel-heteroinfer"))}
    assert rules_of(installer) < wanted(*rights.SERVED) | leases
    assert "labels" not in installer["metadata"], "the verb is granted for one name only"


def test_every_tool_that_applies_the_chart_keeps_measured_rates(plane: Cluster) -> None:
    least = ("-f", str(LEAST_VALUES), "--set", "replicas=0,crds.install=false", "--set", ",".join(KINDS[:2]))
    plane.helm("install", "rel", str(CHART), "-n", "rel", "--create-namespace", *least)
    place = ("-n", "rel", "-o", "json")
    assert json.loads(plane.kubectl("get", "configmaps", *place))["items"][1:] == [], "except Kubernetes' own"
    measured = ("rel-heteroinfer-measured", "-n", "rel")
    plane.kubectl("create", "configmap", *measured, "--from-literal=m7i.json={}")

    def jobs() -> dict[str, str]:
        found = json.loads(plane.kubectl("get", "jobs", *place))["items"]
        return {job["metadata"]["name"]: job["metadata"]["uid"] for job in found}

    before = jobs()
    assert len(before) == 1
    plane.helm("upgrade", "rel", str(CHART), "-n", "rel", *least, "--force")
    plane.helm("upgrade", "rel", str(CHART), "-n", "rel", *least, "--set", "workers=2", "--force")
    text = plane.helm("template", "rel", str(CHART), "-n", "rel", *least, "--kube-version", "1.35.4")
    objects = [o for o in yaml.safe_load_all(text) if o and o["kind"] != "Pod"]
    plane.kubectl("replace", "-f", "-", stdin=yaml.safe_dump_all(objects))
    assert jobs() == before
    plane.helm("uninstall", "rel", "-n", "rel")
    kept = json.loads(plane.kubectl("get", "configmap", *measured, "-o", "json"))
    assert kept["data"] == {"m7i.json": "{}"}
    plane.kubectl("delete", "configmap", *measured)


def test_an_upgrade_keeps_the_name_of_the_operator(plane: Cluster) -> None:
    least = ("-f", str(LEAST_VALUES), "--set", "replicas=0,crds.install=false")
    release = ("rel", str(CHART), "-n", "rel")
    plane.helm("install", *release, "--create-namespace", *least)
    for value in ("nameOverride=hinf", "fullnameOverride=hinf"):
        with pytest.raises(ClusterError) as refused:
            plane.helm("upgrade", *release, *least, "--set", value)
        assert "must keep the name rel-heteroinfer of this release's operator (got " in str(refused.value)
    plane.helm("upgrade", *release, *least, "--set", "fullnameOverride=rel-heteroinfer")
    plane.helm("uninstall", "rel", "-n", "rel")
    plane.helm("install", *release, *least, "--set", "nameOverride=hinf")
    plane.helm("install", "another", *release[1:], *least)
    plane.helm("upgrade", "another", *release[1:], *least, "--set", "workers=2")
    plane.helm("uninstall", "another", "rel", "-n", "rel")


PEOPLE = {
    "view": {"get": True, "list": True, "watch": True, "create": False, "patch": False, "delete": False},
    "edit": {"get": True, "create": True, "update": True, "patch": True, "delete": True},
    "admin": {"get": True, "create": True, "update": True, "patch": True, "delete": True},
}


def test_users_with_the_standard_roles_of_kubernetes_may_use_the_resource(plane: Cluster) -> None:
    least = ("-f", str(LEAST_VALUES), "--set", "replicas=0")
    plane.helm("install", "rel", str(CHART), "-n", "rel", "--create-namespace", *least)
    wait_established(plane, CRD)
    for role in PEOPLE:
        plane.kubectl("create", "rolebinding", "-n", "rel", role, f"--clusterrole={role}", f"--user={role}")

    def may(role: str, verb: str, *resource: str) -> bool:
        asked = ("auth", "can-i", verb, *(resource or (CRD,)), "-n", "rel", f"--as={role}")
        try:
            return plane.kubectl(*asked).strip() == "yes"
        except ClusterError:  # kubectl answers "no" with this exit code
            return False

    deadline = time.monotonic() + 30
    while not (may("view", "get") and may("edit", "create") and may("admin", "create")):
        assert time.monotonic() < deadline, "the roles were not aggregated"
        time.sleep(0.2)
    assert {role: {verb: may(role, verb) for verb in verbs} for role, verbs in PEOPLE.items()} == PEOPLE
    assert may("edit", "patch", CRD, "--subresource=scale")
    assert not may("edit", "update", CRD, "--subresource=status")
    assert not may("stranger", "get")
    plane.kubectl("delete", "rolebinding", "-n", "rel", *PEOPLE)
    plane.helm("uninstall", "rel", "-n", "rel")
    plane.kubectl("delete", "crd", CRD)
