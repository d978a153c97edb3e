"""Defines a test case for each value of the chart: what the value changes in the rendered objects."""

from dataclasses import dataclass
from typing import Any

import yaml

OPERATOR = "Deployment rel-heteroinfer"
POD = "spec.template.spec"
CONTAINER = f"{POD}.containers.operator"
IMAGE = "registry.example.com/heteroinfer"
DIGEST = f"sha256:{'0a' * 32}"
BOTH = {"podMonitor.enabled": True, "serviceMonitor.enabled": True}
KIND = "calibration.nodeKinds"
ONE_KIND = [{"name": "m7i", "nodeSelector": {"type": "m7i"}}]
TOLERATION = [{"key": "gpu", "operator": "Exists"}]
VOLUME = [{"name": "ca", "configMap": {"name": "ca"}}]
SPREAD = [
    {
        "maxSkew": 2,
        "topologyKey": "zone",
        "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"a": "b"}},
    }
]
RELABELING = [{"targetLabel": "cluster", "replacement": "a"}]
PROXY = [{"ports": [{"port": 3128, "protocol": "TCP"}]}]
FROM = [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueCase:
    """One value and its effect on the rendered objects.

    Attributes:
        value: path of the value in values.yaml.
        given: content that the test sets.
        of: kind and name of the object that shows the effect.
        at: place in this object: a path of keys, indices and names of list entries. "" is the whole
            object.
        is_then: content of the place with the value set, and not before. None: the object is not
            rendered.
        beside: other values that this value needs.
    """

    value: str
    given: Any
    of: str
    at: str
    is_then: Any
    beside: dict[str, Any]


def case(value: str, given: Any, of: str, at: str, is_then: Any, **beside: Any) -> ValueCase:
    """Builds a case. In the names of other values, `__` stands for a dot."""
    others = {name.replace("__", "."): other for name, other in beside.items()}
    return ValueCase(value=value, given=given, of=of, at=at, is_then=is_then, beside=others)


def pod_field(value: str, given: Any, field: str = "", is_then: Any = "", **beside: Any) -> ValueCase:
    """Builds the case of a value that sets a field of the operator's pod."""
    at = f"{POD}.{field or value}"
    return case(value, given, OPERATOR, at, given if is_then == "" else is_then, **beside)


def variable(value: str, given: Any, name: str, text: str, **beside: Any) -> ValueCase:
    """Builds the case of a value that sets an environment variable of the operator."""
    return case(value, given, OPERATOR, f"{CONTAINER}.env.HETEROINFER_{name}.value", text, **beside)


def of_release(kind: str, suffix: str = "") -> str:
    return f"{kind} rel-heteroinfer{suffix}"


RULE = of_release("PrometheusRule")
RANKS = of_release("PodMonitor", "-ranks")
BOARD = of_release("ConfigMap", "-dashboard-fleet")
ALERTS = {"HeteroInferGroupNotReady": {"for": "40m"}}
CHECK = "spec.groups.heteroinfer.rules"

CASES = (
    case("scope", "Namespaced", of_release("Role"), "metadata.namespace", "sys"),
    variable("watchNamespaces", ["a", "b"], "WATCH_NAMESPACES", "a,b", scope="Namespaced"),
    variable("operatorClass", "blue", "OPERATOR_CLASS", "blue"),
    case("replicas", 2, OPERATOR, "spec.replicas", 2),
    variable("leaderElection.enabled", False, "LEADER_ELECTION", "false"),
    variable("leaderElection.leaseSeconds", 30, "LEASE_SECONDS", "30"),
    case("nameOverride", "hinf", "Deployment rel-hinf", "metadata.name", "rel-hinf"),
    case("fullnameOverride", "models", "Deployment models", "metadata.name", "models"),
    case("commonLabels", {"team": "ml"}, of_release("ClusterRole"), "metadata.labels.team", "ml"),
    case("commonAnnotations", {"cost": "7"}, of_release("ServiceAccount"), "metadata.annotations.cost", "7"),
    pod_field(
        "image.registry", "r.example.com:5000", "containers.operator.image",
        "r.example.com:5000/ours/operator:0.2.0", image__repository="ours/operator",
    ),
    pod_field("image.repository", "r.io/x", "containers.operator.image", "r.io/x:0.2.0"),
    pod_field("image.tag", "9", "containers.operator.image", f"{IMAGE}/operator:9"),
    pod_field("image.digest", DIGEST, "containers.operator.image", f"{IMAGE}/operator@{DIGEST}"),
    pod_field("image.pullPolicy", "Always", "containers.operator.imagePullPolicy"),
    pod_field("imagePullSecrets", [{"name": "pull"}]),
    variable("workerImages.cpu", "w:1", "WORKER_IMAGE_CPU", "w:1"),
    variable("workerImages.gpu", "w:2", "WORKER_IMAGE_GPU", "w:2"),
    variable("workerImages.pullPolicy", "Never", "WORKER_PULL_POLICY", "Never"),
    variable("workerImages.pullSecrets", [{"name": "a"}, {"name": "b"}], "WORKER_PULL_SECRETS", "a,b"),
    variable("allowedWorkerImages", ["a/", "b:1"], "ALLOWED_WORKER_IMAGES", "a/,b:1"),
    variable("allowHostPaths", True, "ALLOW_HOST_PATHS", "true"),
    variable("allowedHostPaths", ["/a", "/b"], "ALLOWED_HOST_PATHS", "/a,/b"),
    variable("allowRemoteCode", True, "ALLOW_REMOTE_CODE", "true"),
    variable("allowedArguments", ["--runner"], "ALLOWED_ARGUMENTS", "--runner"),
    variable("allowedEnvironment", ["FI_*", "A"], "ALLOWED_ENVIRONMENT", "FI_*,A"),
    variable("allowedAnnotations", ["a.io/"], "ALLOWED_ANNOTATIONS", "a.io/"),
    case("crds.install", False, "CustomResourceDefinition heteroinferences.heteroinfer.dev", "", None),
    case(
        "crds.keep", False, "CustomResourceDefinition heteroinferences.heteroinfer.dev",
        "metadata.annotations", None,
    ),
    case("rbac.create", False, of_release("ClusterRoleBinding"), "", None),
    case("rbac.aggregateClusterRoles", False, of_release("ClusterRole", "-edit"), "", None),
    case(
        "calibration.limitSeconds", 90, "Job", f"{POD}.initContainers.measure.args.2", "90",
        calibration__nodeKinds=ONE_KIND,
    ),
    case(
        "calibration.serviceAccountName", "mine", "Job", f"{POD}.serviceAccountName", "mine",
        calibration__nodeKinds=ONE_KIND,
    ),
    case("calibration.nodeKinds", ONE_KIND, "Job", f"{POD}.nodeSelector.type", "m7i"),
    case(
        "calibration.networks", [{"from": "m7i", "to": "m7i"}], "Service", "spec.ports.network.port", 29502,
        calibration__nodeKinds=ONE_KIND,
    ),
    case("serviceAccount.create", False, "ServiceAccount mine", "", None, serviceAccount__name="mine"),
    pod_field("serviceAccount.name", "mine", "serviceAccountName"),
    case(
        "serviceAccount.annotations", {"iam": "x"}, of_release("ServiceAccount"),
        "metadata.annotations.iam", "x",
    ),
    variable("allowedServiceAccounts", ["a", "b"], "ALLOWED_SERVICE_ACCOUNTS", "a,b"),
    pod_field("assignedUserIds", True, "securityContext.runAsUser", None),
    pod_field("podSecurityContext", {"runAsUser": 7}, "securityContext.runAsUser", 7),
    pod_field(
        "containerSecurityContext", {"privileged": False}, "containers.operator.securityContext.privileged",
        False,
    ),
    case(
        "workerPods.podSecurityContext", {"runAsUser": 7}, OPERATOR,
        f"{CONTAINER}.env.HETEROINFER_POD_SECURITY.value json pod.runAsUser", 7,
    ),
    case(
        "workerPods.containerSecurityContext", {"privileged": False}, OPERATOR,
        f"{CONTAINER}.env.HETEROINFER_POD_SECURITY.value json container.privileged", False,
    ),
    *(
        case(
            f"podResources.{pod}", {"limits": {"cpu": "9"}}, OPERATOR,
            f"{CONTAINER}.env.HETEROINFER_POD_RESOURCES.value json {pod}.limits.cpu", "9",
        )
        for pod in ("fetch", "inspect", "worker")
    ),
    case(
        "calibration.measureResources", {"limits": {"cpu": "9"}}, "Job",
        f"{POD}.initContainers.measure.resources.limits.cpu", "9", calibration__nodeKinds=ONE_KIND,
    ),
    case(
        "calibration.keepResources", {"limits": {"cpu": "9"}}, "Job",
        f"{POD}.containers.keep.resources.limits.cpu", "9", calibration__nodeKinds=ONE_KIND,
    ),
    variable("podEgress", "Always", "POD_EGRESS", "Always"),
    *(
        case(
            f"fetchEgress.{name}", value, OPERATOR,
            f"{CONTAINER}.env.HETEROINFER_FETCH_EGRESS.value json {name}", value,
        )
        for name, value in (("ports", [3128]), ("cidrs", ["10.0.0.0/8"]), ("except", ["10.1.0.0/16"]))
    ),
    variable("logLevel", "DEBUG", "LOG_LEVEL", "DEBUG"),
    variable("logFormat", "json", "LOG_FORMAT", "json"),
    variable("httpPort", 9090, "HTTP_PORT", "9090"),
    variable("workers", 2, "WORKERS", "2"),
    pod_field("resources", {"limits": {"cpu": "1"}}, "containers.operator.resources.limits.cpu", "1"),
    pod_field(
        "extraEnv", [{"name": "HTTPS_PROXY", "value": "http://p:3128"}],
        "containers.operator.env.HTTPS_PROXY.value", "http://p:3128",
    ),
    pod_field("volumes", VOLUME, "volumes.ca", VOLUME[0]),
    pod_field(
        "volumeMounts", [{"name": "ca", "mountPath": "/ca"}], "containers.operator.volumeMounts.ca.mountPath",
        "/ca", volumes=VOLUME,
    ),
    case("podLabels", {"a": "b"}, OPERATOR, "spec.template.metadata.labels.a", "b"),
    case("podAnnotations", {"a": "b"}, OPERATOR, "spec.template.metadata.annotations.a", "b"),
    case("strategy", {"type": "Recreate"}, OPERATOR, "spec.strategy", {"type": "Recreate"}),
    pod_field("topologySpreadConstraints", SPREAD),
    pod_field("hostNetwork", True),
    pod_field("dnsPolicy", "Default"),
    pod_field("dnsConfig", {"nameservers": ["10.0.0.1"]}),
    pod_field("hostAliases", [{"ip": "10.0.0.1", "hostnames": ["api"]}]),
    pod_field("runtimeClassName", "kata"),
    pod_field("nodeSelector", {"disk": "ssd"}, "nodeSelector.disk", "ssd"),
    pod_field("tolerations", TOLERATION),
    pod_field("affinity", {"nodeAffinity": {"x": 1}}),
    pod_field("priorityClassName", "high"),
    case("podDisruptionBudget.enabled", False, of_release("PodDisruptionBudget"), "", None, replicas=2),
    case(
        "podDisruptionBudget.maxUnavailable", "50%", of_release("PodDisruptionBudget"),
        "spec.maxUnavailable", "50%", replicas=2,
    ),
    case("networkPolicy.enabled", True, of_release("NetworkPolicy"), "spec.policyTypes.1", "Egress"),
    case(
        "networkPolicy.metricsFrom", FROM, of_release("NetworkPolicy"), "spec.ingress.0.from", FROM,
        networkPolicy__enabled=True,
    ),
    case(
        "networkPolicy.apiServerPorts", [8443], of_release("NetworkPolicy"), "spec.egress.1.ports.0.port",
        8443, networkPolicy__enabled=True,
    ),
    case(
        "networkPolicy.extraEgress", PROXY, of_release("NetworkPolicy"), "spec.egress.3", PROXY[0],
        networkPolicy__enabled=True,
    ),
    case("metricsService.enabled", True, of_release("Service", "-metrics"), "spec.ports.0.port", 8080),
    case(
        "metricsService.annotations", {"a": "b"}, of_release("Service", "-metrics"),
        "metadata.annotations.a", "b", metricsService__enabled=True,
    ),
    case("serviceMonitor.enabled", True, of_release("ServiceMonitor"), "spec.endpoints.0.port", "http"),
    *(
        case(
            f"{monitor}.{name}", given, f"{kind} rel-heteroinfer", f"spec.{endpoints}.0.{name}", given,
            **{f"{monitor}__enabled": True},
        )
        for monitor, kind, endpoints in (
            ("serviceMonitor", "ServiceMonitor", "endpoints"),
            ("podMonitor", "PodMonitor", "podMetricsEndpoints"),
        )
        for name, given in (
            ("interval", "7s"),
            ("scrapeTimeout", "3s"),
            ("relabelings", RELABELING),
            ("metricRelabelings", RELABELING),
        )
    ),
    case(
        "serviceMonitor.labels", {"release": "prom"}, of_release("ServiceMonitor"),
        "metadata.labels.release", "prom", serviceMonitor__enabled=True,
    ),
    case("podMonitor.enabled", True, RANKS, "metadata.namespace", "sys"),
    case(
        "podMonitor.labels", {"release": "prom"}, RANKS, "metadata.labels.release", "prom",
        podMonitor__enabled=True,
    ),
    case(
        "podMonitor.ranksPerPod", 1, RANKS, "spec.podMetricsEndpoints.1.port", "api",
        podMonitor__enabled=True,
    ),
    case("prometheusRule.enabled", True, RULE, "metadata.namespace", "sys"),
    case(
        "prometheusRule.labels", {"release": "prom"}, RULE, "metadata.labels.release", "prom",
        prometheusRule__enabled=True,
    ),
    case(
        "prometheusRule.runbooks", "https://runbooks.example.com/", RULE,
        "alert HeteroInferGroupNotReady.annotations.runbook_url",
        "https://runbooks.example.com/#heteroinfergroupnotready", prometheusRule__enabled=True,
    ),
    case(
        "prometheusRule.alerts", ALERTS, RULE, "alert HeteroInferGroupNotReady.for", "40m",
        prometheusRule__enabled=True,
    ),
    case("dashboards.enabled", True, BOARD, "metadata.namespace", "sys"),
    case(
        "dashboards.namespace", "grafana", BOARD, "metadata.namespace", "grafana", dashboards__enabled=True,
    ),
    case("dashboards.labels", {"a": "b"}, BOARD, "metadata.labels.a", "b", dashboards__enabled=True),
    case(
        "dashboards.annotations", {"a": "b"}, BOARD, "metadata.annotations.a", "b", dashboards__enabled=True,
    ),
)  # fmt: skip


def leaves(values: dict[str, Any], path: str = "") -> set[str]:
    """Returns the paths of all values.

    An object that is empty, or has the user's own keys, counts as one value.
    """
    found = set()
    for name, value in values.items():
        whole = f"{path}{name}"
        nested = isinstance(value, dict) and value and whole not in FREE
        found |= leaves(value, f"{whole}.") if nested else {whole}
    return found


FREE = (
    *("podResources.fetch", "podResources.inspect"),
    *("calibration.measureResources", "calibration.keepResources"),
    *("podSecurityContext", "containerSecurityContext"),
    *("workerPods.podSecurityContext", "workerPods.containerSecurityContext"),
    "resources",
    "nodeSelector",
    "dashboards.labels",
    "dashboards.annotations",
)
"""Objects with keys of the user's own that have defaults."""


def values_of(path: str, value: Any) -> str:
    """Returns YAML that sets one value."""
    for name in reversed(path.split(".")):
        value = {name: value}
    return str(yaml.safe_dump(value))
