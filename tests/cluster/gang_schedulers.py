"""Runs other projects' gang schedulers beside a control plane: Kueue, Volcano, coscheduling.

Each is configured as by its own chart. But it runs as a process instead of a pod, with all permissions.
"""

import base64
import json
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import processes, tools
from tests.cluster.control_plane import GO_ENVIRONMENT, site_of
from tests.cluster.crds import apply_crds
from tests.cluster.programs import Program
from tests.cluster.running_cluster import Cluster
from tests.cluster.tools import Tool, source_folder
from tests.ports import free_port

READY_TIMEOUT_S = 60.0
KUEUE_QUEUE = "team"
"""For every namespace for which `open_kueue_queue` was called."""
_KUEUE_QUOTA = "all"
_CONVERTED = ("localqueues", "clusterqueues", "cohorts", "workloads", "multikueueclusters")
"""Kueue's kinds with two versions, which its webhook converts, as its kustomization lists them."""


def start_coscheduling(cluster: Cluster) -> None:
    """Starts the scheduler of scheduler-plugins with the name from its chart.

    Raises:
        ClusterError: the scheduler did not start.
    """
    folder = source_folder("scheduler-plugins", "sigs.k8s.io/scheduler-plugins")
    apply_crds(cluster, *_documents(folder / "config/crd/bases/scheduling.x-k8s.io_podgroups.yaml"))
    (chart,) = _documents(folder / "manifests/install/charts/as-a-second-scheduler/values.yaml")
    profile = {
        "schedulerName": chart["scheduler"]["name"],
        "plugins": {
            "multiPoint": {"enabled": [{"name": "Coscheduling"}], "disabled": [{"name": "PrioritySort"}]}
        },
        "pluginConfig": [{"name": "Coscheduling", "args": {"permitWaitingTimeSeconds": 10}}],
    }
    config = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(cluster.kubeconfig)},
        "profiles": [profile],
    }
    file = _write(cluster, "coscheduling.yaml", config)
    _start(cluster, tools.COSCHEDULING, "scheduler", [f"--config={file}", "--secure-port=0"])


def start_volcano(cluster: Cluster) -> None:
    """Starts Volcano's controllers, and its scheduler with the chart's configuration.

    Waits until the queue `default` is open: the scheduler creates it, and the controllers open it.

    Raises:
        ClusterError: a program did not start, or the queue is not open.
    """
    folder = source_folder("volcano", "volcano.sh/volcano")
    apply_crds(cluster, *_documents(*(folder / "config/crd").glob("*/bases/*.yaml")))
    settings = folder / "installer/helm/chart/volcano/config/volcano-scheduler.conf"
    flags = [f"--kubeconfig={cluster.kubeconfig}", "--leader-elect=false", "--logtostderr"]
    _start(cluster, tools.VOLCANO, "controller-manager", flags)
    dump = f"--cache-dump-dir={cluster.state.folder}"
    program = _start(cluster, tools.VOLCANO, "scheduler", [*flags, f"--scheduler-conf={settings}", dump])
    queue_state = "jsonpath={.items[?(@.metadata.name=='default')].status.state}"
    processes.wait_until(
        "Volcano's queue",
        lambda: cluster.kubectl("get", "queues.scheduling.volcano.sh", "-o", queue_state) == "Open",
        timeout_s=READY_TIMEOUT_S,
        process=program.identity,
        log=cluster.state.log(program.name),
    )


def start_kueue(cluster: Cluster, quota: Mapping[str, str]) -> None:
    """Starts Kueue with its webhooks and the integration of pods, and one ClusterQueue.

    Args:
        cluster: cluster to start it on.
        quota: container resources that all pods of the queue may use, by name; see `set_kueue_quota`.

    Raises:
        ClusterError: Kueue did not start.
    """
    components = source_folder("kueue", "sigs.k8s.io/kueue") / "config/components"
    port, authority = free_port(), _issue_serving_certificate(cluster)
    url = f"https://127.0.0.1:{port}"
    convert = {"url": f"{url}/convert", "caBundle": authority}
    conversion = {"clientConfig": convert, "conversionReviewVersions": ["v1"]}
    definitions = _documents(*(components / "crd/bases").glob("*.yaml"))
    for definition in definitions:
        if definition["spec"]["names"]["plural"] in _CONVERTED:
            definition["spec"]["conversion"] = {"strategy": "Webhook", "webhook": conversion}
    apply_crds(cluster, *definitions)
    config = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": "0"},
        "metrics": {"bindAddress": "0"},
        "webhook": {"host": "127.0.0.1", "port": port, "certDir": str(_certificates(cluster))},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "integrations": {"frameworks": ["batch/job", "pod"]},
    }
    file = _write(cluster, "kueue.yaml", config)
    gates = "--feature-gates=VisibilityOnDemand=false"  # it would need an address in the cluster
    flags = [f"--config={file}", f"--kubeconfig={cluster.kubeconfig}", gates]
    program = _start(cluster, tools.KUEUE, "kueue", flags, _with_files_in_etc(cluster))
    processes.wait_until(
        "Kueue's webhooks",
        lambda: _listens(port),
        timeout_s=READY_TIMEOUT_S,
        process=program.identity,
        log=cluster.state.log(program.name),
    )
    configurations = _documents(components / "webhook/manifests.yaml")
    for configuration in configurations:
        configuration["metadata"]["name"] = f"kueue-{configuration['metadata']['name']}"
        for webhook in configuration["webhooks"]:
            path = webhook["clientConfig"]["service"]["path"]
            webhook["clientConfig"] = {"url": url + path, "caBundle": authority}
    _apply(cluster, *configurations)
    _apply(cluster, _kueue("ResourceFlavor", _KUEUE_QUOTA, None, {}))
    set_kueue_quota(cluster, quota)


def set_kueue_quota(cluster: Cluster, quota: Mapping[str, str]) -> None:
    """Sets the container resources that all pods with a queue may use together, by name."""
    resources = [{"name": name, "nominalQuota": amount} for name, amount in quota.items()]
    flavors = [{"name": _KUEUE_QUOTA, "resources": resources}]
    groups = [{"coveredResources": list(quota), "flavors": flavors}]
    spec = {"namespaceSelector": {}, "resourceGroups": groups}
    _apply(cluster, _kueue("ClusterQueue", _KUEUE_QUOTA, None, {"spec": spec}))


def stop_kueue_queue(cluster: Cluster, *, stopped: bool) -> None:
    """Evicts all admitted pods and admits no more, or admits pods again."""
    policy = json.dumps({"spec": {"stopPolicy": "HoldAndDrain" if stopped else "None"}})
    kind = "clusterqueue.kueue.x-k8s.io"
    cluster.kubectl("patch", kind, _KUEUE_QUOTA, "--type=merge", "-p", policy)


def open_kueue_queue(cluster: Cluster, namespace: str) -> None:
    """Creates the queue that resources of a namespace may name."""
    spec = {"spec": {"clusterQueue": _KUEUE_QUOTA}}
    _apply(cluster, _kueue("LocalQueue", KUEUE_QUEUE, namespace, spec))


def _kueue(kind: str, name: str, namespace: str | None, fields: Mapping[str, Any]) -> dict[str, Any]:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    return {"apiVersion": "kueue.x-k8s.io/v1beta2", "kind": kind, "metadata": metadata, **fields}


def _issue_serving_certificate(cluster: Cluster) -> str:
    """Writes Kueue's certificate for 127.0.0.1. Returns the CA as a `caBundle`."""
    _, pki = site_of(cluster.state)
    pki.issue("kueue", "/CN=kueue", server_names=["IP:127.0.0.1"])
    folder = _certificates(cluster)
    folder.mkdir(parents=True)
    for end in ("key", "crt"):
        (folder / f"tls.{end}").write_bytes(Path(pki.path(f"kueue.{end}")).read_bytes())
    return base64.b64encode(Path(pki.path("ca.crt")).read_bytes()).decode()


def _certificates(cluster: Cluster) -> Path:
    return cluster.state.folder / "etc/kueue/metrics/certs"


def _with_files_in_etc(cluster: Cluster) -> list[str]:
    """Returns a command prefix: only its program sees the folder of certificates in /etc.

    Kueue reads the certificates of its metrics only there (`kueue/cmd/kueue/main.go@v0.15.0`, line 177).
    """
    overlay = f"mount -t overlay overlay -o lowerdir={cluster.state.folder}/etc:/etc /etc"
    return ["unshare", "--mount", "sh", "-c", f'{overlay} && exec "$@"', "kueue"]


def _documents(*files: Path) -> list[dict[str, Any]]:
    return [document for file in sorted(files) for document in yaml.safe_load_all(file.read_text())]


def _apply(cluster: Cluster, *manifests: Mapping[str, Any]) -> None:
    text = "\n---\n".join(map(json.dumps, manifests))
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=text)


def _write(cluster: Cluster, name: str, config: Mapping[str, Any]) -> Path:
    file = cluster.state.folder / name
    file.write_text(json.dumps(config))
    return file


def _start(
    cluster: Cluster, tool: Tool, program: str, flags: Sequence[str], prefix: Sequence[str] = ()
) -> Program:
    command = [*prefix, str(tools.program(tool, program)), *flags]
    return Program.start(cluster.state, f"{tool.name}-{program}", command, GO_ENVIRONMENT)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
