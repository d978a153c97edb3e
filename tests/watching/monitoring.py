"""Runs Prometheus with the configuration of a real Prometheus Operator, on a control plane without nodes.

The Prometheus Operator makes the configuration from PodMonitors, ServiceMonitors and PrometheusRules. It also
makes a StatefulSet, which has no node to run on, so Prometheus is started here.
"""

import gzip
import json
import math
import urllib.error
import urllib.parse
import urllib.request
from base64 import b64decode
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import processes, tools
from tests.cluster.control_plane import reserved_ports
from tests.cluster.crds import wait_established
from tests.cluster.errors import ClusterError
from tests.cluster.running_cluster import Cluster

NAMESPACE = "monitoring"
_NAME = "watching"
_MODULE = "github.com/prometheus-operator/prometheus-operator"
_RULES = f"prometheus-{_NAME}-rulefiles-0"
_MOUNTED = f"/etc/prometheus/rules/{_RULES}"
_OF_POD = {"$(SHARD)": "0", "$(POD_NAME)": f"prometheus-{_NAME}-0"}
"""In Prometheus' own pod, a sidecar writes this into the configuration."""
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def install_definitions(cluster: Cluster) -> None:
    """Installs the CustomResourceDefinitions of the Prometheus Operator from its pinned release."""
    folder = tools.source_folder("prometheus-operator", _MODULE) / "example" / "prometheus-operator-crd"
    cluster.kubectl("apply", "--server-side", "-f", str(folder))
    kinds = ("podmonitors", "servicemonitors", "prometheusrules", "prometheuses")
    wait_established(cluster, *(f"{kind}.monitoring.coreos.com" for kind in kinds))


class Prometheus:
    """A running Prometheus.

    Args:
        url: URL of its HTTP API.
    """

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str, **parameters: str) -> Any:
        """Sends a query to the HTTP API, and returns the data of the answer.

        Raises:
            ClusterError: Prometheus refused the query. The message has the query and the answer.
        """
        query = urllib.parse.urlencode(parameters)
        try:
            with NO_PROXY.open(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ClusterError(f"{path} {parameters}: {error.read().decode()}") from error

    def values(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Returns the labels and values of an instant query, without NaN."""
        found = self.get("query", query=expr)["result"]
        samples = [(dict(series["metric"]), float(series["value"][1])) for series in found]
        return [(labels, value) for labels, value in samples if not math.isnan(value)]

    def series(self, expr: str, start: float, end: float, step_s: float) -> list[dict[str, Any]]:
        """Returns the series of a range query: `metric` and `values`."""
        answer = self.get("query_range", query=expr, start=str(start), end=str(end), step=str(step_s))
        return list(answer["result"])

    def targets(self) -> dict[str, str]:
        """Returns the health of each target by its URL: up, down or unknown."""
        return {target["scrapeUrl"]: target["health"] for target in self.get("targets")["activeTargets"]}

    def firing(self) -> set[str]:
        """Returns the names of the firing alerts."""
        return {a["labels"]["alertname"] for a in self.get("alerts")["alerts"] if a["state"] == "firing"}


def start_prometheus(cluster: Cluster, jobs: set[str]) -> Prometheus:
    """Starts a Prometheus that scrapes and evaluates the monitoring objects of this cluster.

    Ends with the cluster.

    Args:
        cluster: cluster with the installed definitions.
        jobs: PodMonitors and ServiceMonitors that the configuration must have, such as
            `podMonitor/NAMESPACE/NAME`.

    Raises:
        ClusterError: a program did not start, or the configuration did not appear.
    """
    site = json.loads((cluster.state.folder / "site.json").read_text())
    server = f"https://{site['address']}:{site['api_port']}"
    pki = cluster.state.folder / "pki"
    files = {"caFile": pki / "ca.crt", "certFile": pki / "admin.crt", "keyFile": pki / "admin.key"}
    cluster.kubectl("create", "namespace", NAMESPACE)
    cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(_build_prometheus(server, files)))
    with reserved_ports(1) as (listen,):
        processes.spawn(
            [
                str(tools.program(tools.PROMETHEUS_OPERATOR, "operator")),
                f"-apiserver={server}",
                *(
                    f"-{flag}-file={file}"
                    for flag, file in zip(("ca", "cert", "key"), files.values(), strict=True)
                ),
                f"-web.listen-address=127.0.0.1:{listen}",
            ],
            mark=cluster.state.folder,
            log=cluster.state.log("prometheus-operator"),
        )
    folder = _wait_for_configuration(cluster, jobs)
    with reserved_ports(1) as (port,):
        pass
    process = processes.spawn(
        [
            str(tools.program(tools.PROMETHEUS, "prometheus")),
            f"--config.file={folder / 'prometheus.yaml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
        ],
        mark=cluster.state.folder,
        log=cluster.state.log("prometheus"),
    )
    prometheus = Prometheus(f"http://127.0.0.1:{port}")
    processes.wait_until(
        "Prometheus' first answer",
        lambda: _answers(prometheus),
        timeout_s=60,
        process=process,
        log=cluster.state.log("prometheus"),
    )
    return prometheus


def _answers(prometheus: Prometheus) -> bool:
    try:
        with NO_PROXY.open(f"{prometheus.url}/-/ready", timeout=5):
            return True
    except OSError:
        return False


def _build_prometheus(server: str, files: Mapping[str, Path]) -> dict[str, Any]:
    """Returns the resource that makes the Prometheus Operator configure everything that it finds."""
    every: dict[str, Any] = {}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "Prometheus",
        "metadata": {"name": _NAME, "namespace": NAMESPACE},
        "spec": {
            "version": "v3.15.0",
            "evaluationInterval": "1s",
            "podMonitorSelector": every,
            "podMonitorNamespaceSelector": every,
            "serviceMonitorSelector": every,
            "serviceMonitorNamespaceSelector": every,
            "ruleSelector": every,
            "ruleNamespaceSelector": every,
            "apiserverConfig": {"host": server, "tlsConfig": {key: str(file) for key, file in files.items()}},
        },
    }


def _wait_for_configuration(cluster: Cluster, jobs: set[str]) -> Path:
    """Waits for the Prometheus Operator's configuration and rules, and returns their folder."""
    folder = cluster.state.folder / "prometheus"
    (folder / "rules").mkdir(parents=True)

    def configured() -> bool:
        """Writes the configuration and the rules, and returns whether they are complete."""
        try:
            secret = json.loads(
                cluster.kubectl("get", "secret", f"prometheus-{_NAME}", "-n", NAMESPACE, "-o", "json")
            )
            rules = json.loads(cluster.kubectl("get", "configmap", _RULES, "-n", NAMESPACE, "-o", "json"))
        except ClusterError as error:
            if "NotFound" not in str(error):
                raise
            return False
        text = gzip.decompress(b64decode(secret["data"]["prometheus.yaml.gz"])).decode()
        found = {job["job_name"].rpartition("/")[0] for job in yaml.safe_load(text)["scrape_configs"]}
        for name, content in rules.get("data", {}).items():
            (folder / "rules" / name).write_text(content)
        for name, value in {_MOUNTED: str(folder / "rules"), **_OF_POD}.items():
            text = text.replace(name, value)
        (folder / "prometheus.yaml").write_text(text)
        return jobs <= found and bool(rules.get("data"))

    processes.wait_until(
        "the configuration made by the Prometheus Operator",
        configured,
        timeout_s=60,
        log=cluster.state.log("prometheus-operator"),
    )
    return folder
