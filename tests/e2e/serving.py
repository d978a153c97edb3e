"""Does what a user does in the end-to-end tests: installs the chart, adds a model, sends requests."""

import json
import re
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from heteroinfer_contract import names
from tests.cluster import processes
from tests.cluster.errors import ClusterError
from tests.cluster.folders import REPOSITORY
from tests.cluster.node import NodeCluster

RELEASE = "heteroinfer"
SYSTEM = "heteroinfer-system"
OPERATOR_LABELS = "app.kubernetes.io/name=heteroinfer-operator"
VALUES = REPOSITORY / "tests/cluster/values.yaml"
QUOTA = {"limits.cpu": "16", "limits.memory": "24Gi", "limits.ephemeral-storage": "32Gi"}
"""With this quota, the API server refuses containers without one of these limits."""
LIMITED = (
    "resources.limits.cpu=1",
    "resources.limits.ephemeral-storage=64Mi",
    "podResources.fetch.limits.cpu=2",
    "podResources.fetch.limits.ephemeral-storage=64Mi",
    "podResources.inspect.limits.cpu=1",
    "podResources.inspect.limits.ephemeral-storage=64Mi",
    "podResources.worker.limits.cpu=2",
    "podResources.worker.limits.ephemeral-storage=1Gi",
)
"""Values of the chart, as for --set, that set those limits for all pods."""
NO_PROXY = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def install(cluster: NodeCluster, *values: str) -> None:
    """Installs the chart as the README says, with the images of this tree. `values` are as for --set."""
    sets = [option for value in values for option in ("--set", value)]
    cluster.helm(
        "install", RELEASE, str(REPOSITORY / "charts/heteroinfer"), "--namespace", SYSTEM,
        "--create-namespace", "--values", str(VALUES), *sets, "--wait", "--timeout", "120s",
    )  # fmt: skip


def cache_volume(name: str, cache: Path) -> dict[str, Any]:
    """Returns a volume of the node's folder `cache`, in which a fetch stores its models."""
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "hostPath": {"path": str(cache), "type": "Directory"},
        },
    }


def add_quota(cluster: NodeCluster, namespace: str) -> None:
    """Limits the sum of all pods of a namespace, and checks that a pod without limits is refused."""
    hard = ",".join(f"{name}={amount}" for name, amount in QUOTA.items())
    cluster.kubectl("create", "quota", "limits", "-n", namespace, f"--hard={hard}")

    security = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    container = {"name": "unlimited", "image": "none", "securityContext": security}
    metadata = {"name": "unlimited", "labels": {"sidecar.istio.io/inject": "false"}}  # no mesh changes it
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}
    manifest = json.dumps({**pod, "spec": {"containers": [container]}})

    def refuses() -> bool:
        try:
            cluster.kubectl("create", "-n", namespace, "--dry-run=server", "-f", "-", stdin=manifest)
        except ClusterError as error:
            return "must specify limits.cpu" in str(error)
        return False

    processes.wait_until("the quota holds", refuses, timeout_s=30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """One HeteroInference on the node.

    Attributes:
        cluster: cluster of the node.
        namespace: its namespace.
        name: its name.
    """

    cluster: NodeCluster
    namespace: str
    name: str

    def get(self, kind: str, *arguments: str) -> dict[str, Any]:
        """Returns objects as JSON."""
        text = self.cluster.kubectl("get", "-n", self.namespace, kind, *arguments, "-o", "json")
        return dict(json.loads(text))

    @property
    def status(self) -> dict[str, Any]:
        """Returns the stored status."""
        return dict(self.get(names.SINGULAR, self.name).get("status", {}))

    def pods(self) -> list[dict[str, Any]]:
        """Returns its worker pods by pod index."""
        selector = f"{names.LABEL_RESOURCE}={self.name},{names.LABEL_COMPONENT}={names.COMPONENT_WORKER}"
        found = self.get("pods", "-l", selector)["items"]
        return sorted(found, key=lambda pod: int(pod["metadata"]["labels"][names.LABEL_POD_INDEX]))

    def wait_ready(self, timeout_s: float) -> None:
        """Waits as the README says. The error contains the status and the pods."""
        try:
            self.cluster.kubectl(
                "wait", "-n", self.namespace, "--for=condition=Ready", f"hinf/{self.name}",
                f"--timeout={timeout_s:.0f}s", timeout_s=timeout_s + 10,
            )  # fmt: skip
        except Exception as error:
            raise AssertionError(f"{error}\n{json.dumps(self.status, indent=1)}\n{self.logs()}") from error

    def logs(self) -> str:
        """Returns the last lines of each worker pod."""
        return "\n".join(
            self.cluster.kubectl("logs", "-n", self.namespace, pod["metadata"]["name"], "--tail=30")
            for pod in self.pods()
        )

    def url(self) -> str:
        """Returns the URL for completions: the address of the clients' Service."""
        service = self.get("service", self.name)
        return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}/v1/completions"

    def complete(self, prompt: list[int], max_tokens: int, *, url: str | None = None) -> list[int]:
        """Returns the greedy tokens after a prompt, through the clients' Service.

        `url` is an earlier result of `url()`, for times without the API server.
        """
        body = {
            "model": self.name,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            url or self.url(), json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with NO_PROXY.open(request, timeout=60) as answer:
            return list(json.load(answer)["choices"][0]["token_ids"])

    def execute(self, pod: str, script: str) -> str:
        """Runs a Python script in a pod's container, and returns its output."""
        return self.cluster.kubectl("exec", "-n", self.namespace, pod, "--", "python3", "-c", script)

    def rank_pid(self, pod: str, rank: int) -> int:
        """Returns the process id of a rank inside its pod."""
        log = self.cluster.kubectl("logs", "-n", self.namespace, pod)
        started = re.search(rf"started rank {rank} as process (\d+)", log)
        assert started is not None, log
        return int(started[1])
