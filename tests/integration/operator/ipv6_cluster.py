"""Runs a cluster without IPv4 around real processes, in its own network and mount namespaces.

`python -m tests.integration.operator.ipv6_cluster MODEL SCRATCH` starts a control plane at an IPv6 address,
installs the chart, and plays the kubelet: it starts the commands of pods (operator, fetch, workers of a
group), each in a network namespace without any IPv4 address, not even on loopback. It sends requests to the
group through the clients' Service, from a namespace with kube-proxy's rules. It prints what it saw as JSON,
for `test_ipv6_only.py`.
"""

import base64
import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from heteroinfer_contract import names
from tests.cluster import tools
from tests.cluster.control_plane import Site, start_control_plane
from tests.cluster.folders import REPOSITORY
from tests.cluster.pki import create_pki
from tests.cluster.running_cluster import CONTROL_PLANE_LIMIT, Cluster, removed_on_failure
from tests.cluster.state import State
from tests.hub_server import HubServer, Repository
from tests.integration.worker.groups import WORKER_PYTHON
from tests.integration.worker.pod_networks import pair, pod_namespace, run
from tests.models import PROMPTS

IPV6 = "fd00:5e1f::/48"
SERVICES = "fd00:10:96::/112"
OPERATOR, FETCH, FIRST_WORKER, CLIENT = 0, 1, 2, 4
NAMESPACE, SYSTEM, RELEASE = "models", "heteroinfer-system", "heteroinfer"
NODE = "node"
MODEL = "acme/small"
PAUSE_BYTES = 8_000_000
TIMEOUT_S = 240.0
ACCOUNT = Path("/run/secrets/kubernetes.io/serviceaccount")
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
Pod = dict[str, Any]


def address(namespace: int) -> str:
    """Returns the address of a namespace of this test."""
    return pair(IPV6, namespace)[1]


def get(host: str, port: int, path: str) -> str | None:
    """Returns the answer of a URL, or None if the status is not 200."""
    try:
        with DIRECT.open(f"http://[{host}]:{port}{path}", timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return None


def wait(what: str, check: Callable[[], Any]) -> Any:
    """Waits until `check` returns a true value, and returns it."""
    deadline = time.monotonic() + TIMEOUT_S
    while not (found := check()):
        assert time.monotonic() < deadline, f"not within {TIMEOUT_S:g} s: {what}"
        time.sleep(0.2)
    return found


class Kubelet:
    """Starts the commands of pods of the API server as processes, and reports the pods' status."""

    def __init__(self, cluster: Cluster, scratch: Path, inside: list[tuple[str, ...]]) -> None:
        self.cluster, self.scratch, self.inside = cluster, scratch, inside
        self.started: list[subprocess.Popen[bytes]] = []

    def get(self, kind: str, namespace: str, *arguments: str) -> Any:
        """Returns objects as JSON."""
        return json.loads(self.cluster.kubectl("get", kind, "-n", namespace, *arguments, "-o", "json"))

    def pods(self, namespace: str, selector: str) -> list[Pod]:
        """Returns pods by name."""
        found = self.get("pods", namespace, "-l", selector)["items"]
        return sorted(found, key=lambda pod: str(pod["metadata"]["name"]))

    def environment(self, pod: Pod, number: int) -> dict[str, str]:
        """Returns the variables of a pod's container, as a kubelet resolves them."""
        metadata, given = pod["metadata"], {}
        for variable in pod["spec"]["containers"][0]["env"]:
            source = variable.get("valueFrom", {})
            if reference := source.get("configMapKeyRef"):
                stored = self.get("configmap", metadata["namespace"], reference["name"])
                value = stored["data"][reference["key"]]
            elif reference := source.get("secretKeyRef"):
                stored = self.get("secret", metadata["namespace"], reference["name"])
                value = base64.b64decode(stored["data"][reference["key"]]).decode()
            elif reference := source.get("fieldRef"):
                value = metadata[reference["fieldPath"].removeprefix("metadata.")]
            else:
                value = variable.get("value", "")
            given[variable["name"]] = value
        own = {name: os.environ[name] for name in ("PATH", "PYTHONPATH")}
        temporary = Path(f"/run/pod{number}")
        temporary.mkdir(exist_ok=True)
        message = {names.ENV_TERMINATION_MESSAGE_PATH: str(self.scratch / f"message-{number}")}
        return {**own, "NO_PROXY": "*", "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), **message, **given}

    def start(self, pod: Pod, number: int, *command: str, **more: str) -> subprocess.Popen[bytes]:
        """Starts a pod's process in its namespace, and reports the pod's addresses."""
        environment = {**self.environment(pod, number), **more}
        with (self.scratch / f"log-{number}").open("wb") as log:
            process = subprocess.Popen(
                [*self.inside[number], *command], env=environment, stdout=log, stderr=log, cwd=self.scratch
            )
        self.started.append(process)
        self._bind(pod)
        self.report(pod, number, ready=False)
        return process

    def report(self, pod: Pod, number: int, *, ready: bool) -> None:
        """Stores the status of a pod that runs."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        state = {"running": {"startedAt": now}}
        status = {
            "phase": "Running",
            "podIP": address(number),
            "podIPs": [{"ip": address(number)}],
            "conditions": [{"type": "Ready", "status": str(ready), "lastTransitionTime": now}],
            "containerStatuses": [_container(pod, state, ready=ready)],
        }
        self._store(pod, status)

    def report_end(self, pod: Pod, number: int) -> None:
        """Stores the status of a pod that succeeded, with its message."""
        message = (self.scratch / f"message-{number}").read_text()
        state = {"terminated": {"exitCode": 0, "reason": "Completed", "message": message}}
        ended = {"phase": "Succeeded", "containerStatuses": [_container(pod, state, ready=False)]}
        self._store(pod, ended)

    def _bind(self, pod: Pod) -> None:
        """Puts a pod on the node, because the endpoints of Services are those of pods on nodes."""
        metadata = pod["metadata"]
        url = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/binding"
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": metadata["name"]}}
        binding["target"] = {"apiVersion": "v1", "kind": "Node", "name": NODE}
        self.cluster.kubectl("create", "--raw", url, "-f", "-", stdin=json.dumps(binding))

    def _store(self, pod: Pod, status: dict[str, Any]) -> None:
        metadata = pod["metadata"]
        where = ("-n", metadata["namespace"], "--subresource=status", "--type=merge")
        self.cluster.kubectl("patch", "pod", metadata["name"], *where, "-p", json.dumps({"status": status}))

    def stop(self) -> None:
        """Ends all processes."""
        for process in self.started:
            process.terminate()
        for process in self.started:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _container(pod: Pod, state: dict[str, Any], *, ready: bool) -> dict[str, Any]:
    name = pod["spec"]["containers"][0]["name"]
    common = {"name": name, "image": "none", "imageID": "", "restartCount": 0}
    return {**common, "ready": ready, "started": ready, "state": state}


@contextlib.contextmanager
def control_plane() -> Iterator[Cluster]:
    """Starts a control plane whose API server and Services have IPv6 addresses only."""
    state = State.claim("control-plane", CONTROL_PLANE_LIMIT)
    router = pair(IPV6, OPERATOR)[0]
    with removed_on_failure(state):
        site = Site(
            address=router,
            api_port=6443,
            etcd_port=2379,
            etcd_peer_port=2380,
            controller_manager_port=10257,
            scheduler_port=10259,
            service_range=SERVICES,
            node_grace_s=3600,
        )
        start_control_plane(state, site, create_pki(state.folder / "pki", router, "fd00:10:96::1", node=None))
    with Cluster(state=state) as cluster:
        yield cluster


def add_node(cluster: Cluster) -> None:
    """Stores the node, which the scheduler does not use."""
    spec = {"taints": [{"key": "tests.heteroinfer.dev/nobody", "effect": "NoSchedule"}]}
    node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "spec": spec}
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(node))
    status = {"addresses": [{"type": "InternalIP", "address": address(CLIENT)}]}
    patch = ("--subresource=status", "--type=merge", "-p", json.dumps({"status": status}))
    cluster.kubectl("patch", "node", NODE, *patch)


def start_operator(kubelet: Kubelet) -> None:
    """Installs the chart, and starts its pod. The operator finds the API server as every pod does."""
    cluster = kubelet.cluster
    values = ("-f", str(REPOSITORY / "tests/cluster/values.yaml"))
    chart = str(REPOSITORY / "charts/heteroinfer")
    cluster.helm("install", RELEASE, chart, "-n", SYSTEM, "--create-namespace", *values)
    found = wait("the operator's pod", lambda: kubelet.pods(SYSTEM, "app.kubernetes.io/name"))
    (pod,) = found
    token = cluster.kubectl("create", "token", "-n", SYSTEM, pod["spec"]["serviceAccountName"])
    authority = json.loads(cluster.kubeconfig.read_text())["clusters"][0]["cluster"]
    ACCOUNT.mkdir(parents=True)
    (ACCOUNT / "token").write_text(token.strip())
    (ACCOUNT / "namespace").write_text(SYSTEM)
    (ACCOUNT / "ca.crt").write_bytes(base64.b64decode(authority["certificate-authority-data"]))
    command = (sys.executable, "-m", "heteroinfer_operator.cli", "operator")
    server = {"KUBERNETES_SERVICE_HOST": pair(IPV6, OPERATOR)[0], "KUBERNETES_SERVICE_PORT": "6443"}
    kubelet.start(pod, OPERATOR, *command, **server)
    wait("the operator's /readyz", lambda: get(address(OPERATOR), 8080, "/readyz") == "ok")


def resource(hub: HubServer) -> str:
    """Returns the resource: two CPU pods for a model of the hub."""
    amounts = {"requests": {"cpu": "500m", "memory": "3Gi"}, "limits": {"memory": "3Gi"}}
    spec = {
        "scheduling": {"gang": "Never"},
        "model": {"uri": f"hf://{MODEL}", "cache": {"size": "1Gi"}},
        "engine": {"maxModelLen": 1024, "env": [{"name": "HF_ENDPOINT", "value": hub.endpoint}]},
        "parallelism": {"mode": "Pipeline"},
        "roles": [{"name": "cpu", "device": "CPU", "pods": 2, "resources": amounts}],
    }
    return json.dumps(
        {
            "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
            "kind": names.KIND,
            "metadata": {"name": "tiny", "namespace": NAMESPACE},
            "spec": spec,
        }
    )


def fetch_model(kubelet: Kubelet, hub: HubServer) -> dict[str, Any]:
    """Runs the pod that downloads the model. Returns the resource's status in the middle of the download."""
    hub.pause_after_bytes = PAUSE_BYTES
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_FETCH}"
    (pod,) = wait("the fetch pod", lambda: kubelet.pods(NAMESPACE, selector))
    arguments = pod["spec"]["containers"][0]["args"]
    command = (str(WORKER_PYTHON), "-m", "vllm_heteroinfer.launch.cli", *arguments)
    process = kubelet.start(pod, FETCH, *command)
    wait("/healthz of the fetch", lambda: get(address(FETCH), names.DEFAULT_HEALTH_PORT, names.PATH_HEALTHZ))
    kubelet.report(pod, FETCH, ready=True)

    def progress() -> dict[str, Any] | None:
        model = kubelet.get("hinf", NAMESPACE, "tiny").get("status", {}).get("model", {})
        return model if 0 < model.get("bytesDone", 0) < model.get("bytesTotal", 0) else None

    status: dict[str, Any] = wait("progress in the status", progress)
    hub.pause_after_bytes = None
    assert process.wait(TIMEOUT_S) == 0, (kubelet.scratch / f"log-{FETCH}").read_text()
    kubelet.report_end(pod, FETCH)
    return status


def serve(kubelet: Kubelet) -> list[Pod]:
    """Runs the pods of the group until all are Ready, and returns them."""
    selector = f"{names.LABEL_COMPONENT}={names.COMPONENT_WORKER}"

    def both() -> list[Pod]:
        found = kubelet.pods(NAMESPACE, selector)
        return found if len(found) == 2 else []

    pods: list[Pod] = wait("the worker pods", both)
    by_name = {variable["name"]: variable for variable in pods[0]["spec"]["containers"][0]["env"]}
    hosts = [each["host"] for each in json.loads(by_name[names.ENV_ADDRESSES]["value"])]
    table = [f"{address(FIRST_WORKER + pod)} {host}" for pod, host in enumerate(hosts)]
    Path("/etc/hosts").write_text("\n".join(["::1 localhost", *table, ""]))
    for index, pod in enumerate(pods):
        arguments = pod["spec"]["containers"][0].get("args", ["run"])
        command = (str(WORKER_PYTHON), "-m", "vllm_heteroinfer.launch.cli", *arguments)
        kubelet.start(pod, FIRST_WORKER + index, *command)
    waiting = dict(enumerate(pods))

    def ready() -> bool:
        for index in list(waiting):
            ended = kubelet.started[-2 + index].poll()
            assert ended is None, (kubelet.scratch / f"log-{FIRST_WORKER + index}").read_text()[-6000:]
            if get(address(FIRST_WORKER + index), names.DEFAULT_HEALTH_PORT, names.PATH_READYZ):
                kubelet.report(waiting.pop(index), FIRST_WORKER + index, ready=True)
        return not waiting

    wait("ready pods", ready)
    return pods


def start_proxy(kubelet: Kubelet) -> None:
    """Starts kube-proxy in the namespace of the client, as on a node of its own."""
    cluster = kubelet.cluster
    program = str(tools.program(tools.KUBERNETES, "kube-proxy"))
    flags = [
        f"--kubeconfig={cluster.kubeconfig}",
        f"--hostname-override={NODE}",
        "--proxy-mode=nftables",
        f"--cluster-cidr={IPV6}",
        "--metrics-bind-address=[::1]:10249",
        "--healthz-bind-address=[::1]:10256",
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
    ]
    with (kubelet.scratch / "log-proxy").open("wb") as log:
        command = [*kubelet.inside[CLIENT], program, *flags]
        kubelet.started.append(subprocess.Popen(command, stdout=log, stderr=log))


def ask(kubelet: Kubelet, url: str, prompt: list[int]) -> list[int] | None:
    """Returns the tokens of a completion at a URL, or None without an answer."""
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 8,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    command = [*kubelet.inside[CLIENT], "curl", "-gsS", "--max-time", "30", "--noproxy", "*", "--json"]
    done = subprocess.run(
        [*command, json.dumps(body), url], stdout=subprocess.PIPE, stderr=sys.stderr, text=True, check=False
    )
    return list(json.loads(done.stdout)["choices"][0]["token_ids"]) if done.returncode == 0 else None


def main(model: Path, scratch: Path) -> None:
    """Runs all parts, and prints what it saw."""
    run("ip", "link", "set", "lo", "up")
    run("sysctl", "-qw", "net.ipv6.conf.all.forwarding=1")
    (scratch / "hosts").touch()
    run("mount", "--bind", str(scratch / "hosts"), "/etc/hosts")
    prompt = json.loads((scratch / "reference").read_text())[PROMPTS[0]]
    with contextlib.ExitStack() as stack:
        inside = [stack.enter_context(pod_namespace(number, [IPV6])) for number in range(CLIENT + 1)]
        for words in inside:
            run(*words, "ip", "address", "del", "127.0.0.1/8", "dev", "lo")
        cluster = stack.enter_context(control_plane())
        kubelet = Kubelet(cluster, scratch, inside)
        stack.callback(kubelet.stop)
        host = pair(IPV6, FETCH)[0]
        hub = stack.enter_context(HubServer(host=host, content_host=host))
        hub.repositories[MODEL] = Repository.of_folder(model)
        add_node(cluster)
        start_operator(kubelet)
        cluster.kubectl("create", "namespace", NAMESPACE)
        cluster.kubectl("create", "-f", "-", stdin=resource(hub))
        fetched = fetch_model(kubelet, hub)
        pods = serve(kubelet)
        cluster.kubectl(
            "wait", "-n", NAMESPACE, "--for=condition=Ready", "hinf/tiny", "--timeout=60s", timeout_s=70
        )
        start_proxy(kubelet)
        service = kubelet.get("service", NAMESPACE, "tiny")["spec"]
        url = f"http://[{service['clusterIP']}]:{service['ports'][0]['port']}/v1/completions"
        tokens = wait("an answer through the Service", lambda: ask(kubelet, url, prompt["prompt_token_ids"]))
        slices = kubelet.get("endpointslices", NAMESPACE, "-l", "kubernetes.io/service-name=tiny")["items"]
        addresses = subprocess.run(
            [*inside[OPERATOR], "ip", "-4", "address"], stdout=subprocess.PIPE, text=True, check=True
        )
        print(
            json.dumps(
                {
                    "fetched": fetched,
                    "tokens": tokens,
                    "expected": prompt["token_ids"][: len(tokens)],
                    "families": service["ipFamilies"],
                    "service": service["clusterIP"],
                    "endpoints": [each["endpoints"][0]["addresses"] for each in slices],
                    "leader": address(FIRST_WORKER),
                    "pods": len(pods),
                    "status": kubelet.get("hinf", NAMESPACE, "tiny")["status"],
                    "metrics": get(address(OPERATOR), 8080, "/metrics"),
                    "ipv4": addresses.stdout,
                }
            )
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
