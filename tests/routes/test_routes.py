"""Tests two groups behind gateways with TLS and an API key, and scaling to zero: `make routes`.

All parts are the real programs on a real node, built from their modules, and run as pods from their own
charts and manifests: Envoy Gateway, the endpoint picker of the Gateway API Inference Extension, KEDA and its
HTTP add-on. Only the Envoy before the picker is a process of the node, with a configuration by `gateway.py`,
because Envoy Gateway alone does not support InferencePools.
"""

import http.client
import json
import shutil
import socket
import ssl
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract import names
from tests.cluster import processes, tools
from tests.cluster.crds import wait_established
from tests.cluster.errors import ClusterError
from tests.cluster.folders import REPOSITORY
from tests.cluster.namespaces import Addresses
from tests.cluster.node import NodeCluster
from tests.cluster.pki import Pki
from tests.cluster.volumes import volume_manifests
from tests.e2e.conftest import model
from tests.e2e.serving import Resource, install
from tests.routes.gateway import (
    HTTPS_PORT,
    build_envoy_command,
    ensure_envoy,
    write_envoy_configuration,
)
from tests.routes.program_images import load_images

__all__ = ["model"]

NAMESPACE = "routed"
HOST = "llm.example.com"
KEY = "a-key-of-these-tests"
START_S = 420.0
ANSWER_S = 300.0
"""Number of clients at the same time, on a node whose two cores other tests use, too."""
REQUESTS = 48
CLIENTS = 8
"""Requests of each client. Each is sent after the last answer, so that the picker sees the load."""

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def groups(node_cluster: NodeCluster, model: tuple[Path, dict[str, Any]]) -> Resource:
    """Yields examples/cpu-pair.yaml with two groups, and an API key as docs/user/expose.md describes."""
    install(node_cluster)
    node_cluster.kubectl("create", "namespace", NAMESPACE)
    node_cluster.kubectl("apply", "-f", "-", stdin=volume_manifests(NAMESPACE, model[0]))
    secret = ("create", "secret", "generic", "cpu-pair-api-key", f"--from-literal=key={KEY}")
    node_cluster.kubectl(*secret, "-n", NAMESPACE)
    document = yaml.safe_load((REPOSITORY / "examples/cpu-pair.yaml").read_text())
    document["spec"]["replicas"] = 2
    document["spec"]["roles"][0]["resources"]["requests"]["cpu"] = "200m"  # four pods on two cores
    reference = {"secretKeyRef": {"name": "cpu-pair-api-key", "key": "key"}}
    dev_mode = {"name": "VLLM_SERVER_DEV_MODE", "value": "1"}
    document["spec"]["engine"] |= {
        "args": ["--enable-sleep-mode"],
        "env": [{"name": "VLLM_API_KEY", "valueFrom": reference}, dev_mode],
    }
    node_cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=yaml.safe_dump(document))
    resource = Resource(cluster=node_cluster, namespace=NAMESPACE, name="cpu-pair")
    resource.wait_ready(START_S)
    return resource


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """The address that clients outside of the cluster use."""

    groups: Resource
    address: str
    port: int
    authority: Path

    def open(self, path: str, body: dict[str, Any] | None, key: str = KEY) -> http.client.HTTPResponse:
        """Sends a request by TLS, and returns the answer before its body is read."""
        context = ssl.create_default_context(cafile=str(self.authority))
        connection = http.client.HTTPSConnection(HOST, self.port, timeout=ANSWER_S)
        plain = socket.create_connection((self.address, self.port), ANSWER_S)
        connection.sock = context.wrap_socket(plain, server_hostname=HOST)
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {key}",
            "Connection": "close",
        }
        data = None if body is None else json.dumps(body).encode()
        connection.request("GET" if body is None else "POST", path, data, headers)
        return connection.getresponse()

    def ask(self, path: str, body: dict[str, Any] | None = None, *, key: str = KEY) -> tuple[int, str]:
        """Sends a request by TLS, and returns status and text."""
        with self.open(path, body, key) as answer:
            return answer.status, answer.read().decode()

    def complete(self, prompt: str | list[int], max_tokens: int = 16, **options: Any) -> tuple[int, str]:
        return self.ask("/v1/completions", asks_for(prompt, max_tokens, **options))

    def answered(self) -> Counter[str]:
        """Returns the number of requests that each leader has answered, by pod."""
        found: Counter[str] = Counter()
        for pod in leaders(self.groups):
            url = f"http://{pod['status']['podIP']}:8000/metrics"
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as answer:
                lines = answer.read().decode().splitlines()
            done = [line for line in lines if line.startswith("vllm:request_success_total")]
            found[pod["metadata"]["name"]] = round(sum(float(line.rpartition(" ")[2]) for line in done))
        return found


def asks_for(prompt: str | list[int], max_tokens: int, **options: Any) -> dict[str, Any]:
    body = {"model": "cpu-pair", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return {**body, **options}


def leaders(groups: Resource) -> list[dict[str, Any]]:
    return [pod for pod in groups.pods() if names.LABEL_LEADER in pod["metadata"]["labels"]]


def create_authority(cluster: NodeCluster) -> Pki:
    """Returns the keys of a gateway for the examples' host. The CA is in `ca.crt`."""
    pki = Pki(folder=cluster.state.folder / "gateway")
    if not pki.folder.exists():
        pki.folder.mkdir(mode=0o700)
        pki.create_authority("ca", "gateway")
        pki.issue("server", f"/CN={HOST}", server_names=[f"DNS:{HOST}"])
    return pki


def wait_rollouts(cluster: NodeCluster, namespace: str, timeout_s: float = 180.0) -> None:
    """Waits until all Deployments of a namespace are available. The error shows their pods and events."""
    every = ("--for=condition=Available", "deployment", "--all", f"--timeout={timeout_s:.0f}s")
    try:
        cluster.kubectl("wait", "-n", namespace, *every, timeout_s=timeout_s + 10)
    except ClusterError as error:
        found = cluster.kubectl("get", "-n", namespace, "pods,events", "-o", "wide")
        raise AssertionError(f"{error}\n{found}") from error


@pytest.fixture(scope="module")
def gateway(groups: Resource) -> Gateway:
    """Yields the example's pool with its picker, and Envoy in front of them."""
    cluster, state = groups.cluster, groups.cluster.state
    bases = tools.source_folder("endpoint-picker", "sigs.k8s.io/gateway-api-inference-extension")
    for file in sorted((bases / "config/crd/bases").glob("*.yaml")):
        cluster.kubectl("apply", "--server-side", "-f", str(file))
        wait_established(cluster, yaml.safe_load(file.read_text())["metadata"]["name"])
    example = REPOSITORY / "examples/routes/inference-pool.yaml"
    (picker,) = (item for item in yaml.safe_load_all(example.read_text()) if item["kind"] == "Deployment")
    image = picker["spec"]["template"]["spec"]["containers"][0]["image"]
    load_images(cluster, {image: [tools.program(tools.ENDPOINT_PICKER, "epp")]})
    cluster.kubectl("apply", "-n", NAMESPACE, "-f", str(example))
    wait_rollouts(cluster, NAMESPACE)
    service = groups.get("service", picker["metadata"]["name"])["spec"]["clusterIP"]

    pki = create_authority(cluster)
    configuration = state.folder / "envoy.json"
    files = (Path(pki.path("server.crt")), Path(pki.path("server.key")))
    write_envoy_configuration(configuration, *files, service)
    processes.spawn(
        [*cluster.namespaces.prefix, *build_envoy_command(ensure_envoy(), configuration)],
        mark=state.folder,
        log=state.log("envoy"),
        environment={},
    )
    address = Addresses(number=state.number).node
    front = Gateway(groups=groups, address=address, port=HTTPS_PORT, authority=Path(pki.path("ca.crt")))
    processes.wait_until("the gateway", lambda: answers(front), timeout_s=60, log=state.log("envoy"))
    return front


def answers(front: Gateway) -> bool:
    """Returns whether a gateway forwards requests."""
    try:
        return front.ask("/v1/models")[0] == 200
    except OSError:
        return False


def test_tokens_are_those_of_the_reference(gateway: Gateway, model: tuple[Path, dict[str, Any]]) -> None:
    for prompt, answer in model[1].items():
        status, text = gateway.complete(
            prompt, len(answer["token_ids"]), temperature=0, return_token_ids=True
        )
        assert (status, json.loads(text)["choices"][0]["token_ids"]) == (200, answer["token_ids"]), text


def test_requests_with_another_key_or_to_other_paths_are_refused(gateway: Gateway) -> None:
    assert gateway.ask("/v1/models", key="another")[0] == 401
    assert gateway.ask("/metrics")[0] == 404
    assert gateway.ask("/v1/../metrics")[0] == 404
    assert gateway.ask("/sleep", {})[0] == 404


def test_the_picker_refuses_a_prompt_of_token_ids(gateway: Gateway) -> None:
    """docs/user/expose.md#routes describes this. Without a picker, vLLM accepts such a prompt."""
    assert gateway.complete([3, 5])[0] == 400


def test_both_groups_get_requests(gateway: Gateway) -> None:
    before = gateway.answered()
    with ThreadPoolExecutor(CLIENTS) as pool:
        answers = list(pool.map(lambda i: gateway.complete(f"{i} ranks", 64), range(REQUESTS)))
    assert Counter(status for status, _ in answers) == {200: REQUESTS}
    now = gateway.answered()
    shares = {pod: now[pod] - before[pod] for pod in now}
    assert sum(shares.values()) == REQUESTS
    assert min(shares.values()) >= REQUESTS // 6, shares


def test_a_stream_arrives_in_parts(gateway: Gateway) -> None:
    began = time.monotonic()
    with gateway.open("/v1/completions", asks_for("A stream", 128, stream=True)) as answer:
        arrived = [(time.monotonic() - began, line.strip()) for line in answer if line.strip()]
    assert arrived[-1][1] == b"data: [DONE]"
    assert len(arrived) > 64  # the bytes of one character arrive together
    (first_s, _), *_, (last_s, _) = arrived
    assert first_s < last_s / 2, f"the first of {len(arrived)} events came after {first_s} of {last_s} s"


def test_a_group_that_sleeps_gets_no_request(gateway: Gateway) -> None:
    asleep = leaders(gateway.groups)[0]
    name, address = asleep["metadata"]["name"], asleep["status"]["podIP"]
    status, answer = gateway.groups.cluster.pod_http(address, 8000, "/sleep?level=1", body=b"", timeout_s=60)
    assert status == 200, answer

    def is_unready() -> bool:
        conditions = gateway.groups.get("pod", name)["status"]["conditions"]
        return any((c["type"], c["status"]) == ("Ready", "False") for c in conditions)

    processes.wait_until("the sleeping leader is not Ready", is_unready, timeout_s=60)
    before = gateway.answered()
    said_now = [gateway.complete(f"{i} pods", 4)[0] for i in range(8)]
    now = gateway.answered()
    assert said_now == [200] * 8
    assert now[name] == before[name]
    assert gateway.groups.cluster.pod_http(address, 8000, "/wake_up", body=b"", timeout_s=60)[0] == 200
    gateway.groups.wait_ready(60)


# A gateway controller

CONTROLLER = "envoy-gateway-system"
CONTROLLER_IMAGE = "localhost/envoyproxy/gateway:test"
ENVOY_IMAGE = "localhost/envoyproxy/envoy:test"
GATEWAY_CLASS = f"""
apiVersion: gateway.envoyproxy.io/v1alpha1
kind: EnvoyProxy
metadata: {{name: here, namespace: {CONTROLLER}}}
spec:
  provider:
    type: Kubernetes
    kubernetes:
      envoyService: {{type: ClusterIP}}  # the node has no load balancers
      envoyDeployment: {{container: {{image: {ENVOY_IMAGE}}}}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: GatewayClass
metadata: {{name: eg}}
spec:
  controllerName: gateway.envoyproxy.io/gatewayclass-controller
  parametersRef: {{group: gateway.envoyproxy.io, kind: EnvoyProxy, name: here, namespace: {CONTROLLER}}}
"""


def install_controller(cluster: NodeCluster) -> None:
    """Installs Envoy Gateway from its own chart."""
    programs = {
        CONTROLLER_IMAGE: [tools.program(tools.ENVOY_GATEWAY, "envoy-gateway")],
        ENVOY_IMAGE: [ensure_envoy()],
    }
    load_images(cluster, programs)
    source = tools.source_folder("envoy-gateway", "github.com/envoyproxy/gateway") / "charts/gateway-helm"
    chart = cluster.state.folder / "gateway-helm"
    shutil.copytree(source, chart, copy_function=shutil.copyfile)
    chart.chmod(0o755)
    values = (chart / "values.tmpl.yaml").read_text()
    values = values.replace("${GatewayImage}", CONTROLLER_IMAGE)
    (chart / "values.yaml").write_text(values.replace("${GatewayImagePullPolicy}", "IfNotPresent"))
    namespace = ("--namespace", CONTROLLER, "--create-namespace")
    cluster.helm("install", "eg", str(chart), *namespace, "--wait", "--timeout", "180s")


@pytest.fixture(scope="module")
def routed(groups: Resource) -> Gateway:
    """Yields examples/routes/httproute.yaml with Envoy Gateway."""
    cluster = groups.cluster
    install_controller(cluster)
    cluster.kubectl("apply", "-f", "-", stdin=GATEWAY_CLASS)
    pki = create_authority(cluster)
    files = (f"--cert={pki.path('server.crt')}", f"--key={pki.path('server.key')}")
    cluster.kubectl("create", "secret", "tls", "llm-example-com", "-n", NAMESPACE, *files)
    example = (REPOSITORY / "examples/routes/httproute.yaml").read_text()
    cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=example.replace("GATEWAY-CLASS", "eg"))
    programmed = ("wait", "-n", NAMESPACE, "--for=condition=Programmed", "gateway/llm", "--timeout=120s")
    cluster.kubectl(*programmed, timeout_s=130)
    owned = ("-l", "gateway.envoyproxy.io/owning-gateway-name=llm")
    (service,) = Resource(cluster=cluster, namespace=CONTROLLER, name="").get("services", *owned)["items"]
    address, authority = service["spec"]["clusterIP"], Path(pki.path("ca.crt"))
    front = Gateway(groups=groups, address=address, port=443, authority=authority)
    processes.wait_until("Envoy of the controller", lambda: answers(front), timeout_s=60)
    return front


def test_a_gateway_controller_serves_the_examples_route(
    routed: Gateway, model: tuple[Path, dict[str, Any]]
) -> None:
    (prompt, answer), *_ = model[1].items()
    tokens = answer["token_ids"]
    status, text = routed.complete(prompt, len(tokens), temperature=0, return_token_ids=True)
    assert (status, json.loads(text)["choices"][0]["token_ids"]) == (200, tokens), text
    assert routed.complete([3, 5])[0] == 200  # no picker reads this request
    assert routed.ask("/v1/models", key="another")[0] == 401
    assert routed.ask("/metrics")[0] == 404
    assert routed.ask("/v1/../metrics")[0] == 404


def test_a_stream_through_the_controllers_envoy_arrives_in_parts(routed: Gateway) -> None:
    began = time.monotonic()
    with routed.open("/v1/completions", asks_for("A stream", 128, stream=True)) as answer:
        arrived = [time.monotonic() - began for line in answer if line.strip()]
    assert len(arrived) > 64
    assert arrived[0] < arrived[-1] / 2


# Scale to zero

KEDA = "keda"
QUIET_S = 20
"""Seconds without a request after which KEDA scales to zero; 15 min in the example."""


def install_keda(cluster: NodeCluster) -> None:
    """Installs KEDA and its HTTP add-on from their own manifests, with one replica each."""
    add_on = "ghcr.io/kedacore/http-add-on-"
    images = {
        f"{add_on}{name}": tools.program(tools.HTTP_ADD_ON, name) for name in tools.HTTP_ADD_ON.programs
    }
    with_command = cluster.state.folder / "keda"
    with_command.mkdir()
    for name, built in (("keda", "operator"), ("keda-adapter", "adapter")):
        shutil.copyfile(tools.program(tools.KEDA, built), with_command / name)
    images["ghcr.io/kedacore/keda"] = with_command / "keda"
    images["ghcr.io/kedacore/keda-metrics-apiserver"] = with_command / "keda-adapter"
    load_images(cluster, {f"{reference}:test": [file] for reference, file in images.items()})
    keda = tools.source_folder("keda", "github.com/kedacore/keda/v2")
    http_add_on = tools.source_folder("http-add-on", "github.com/kedacore/http-add-on")
    for folder in (keda / "config/minimal", http_add_on / "config/default"):
        rendered = list(yaml.safe_load_all(cluster.kubectl("kustomize", str(folder))))
        definitions = [item for item in rendered if item["kind"] == "CustomResourceDefinition"]
        apply(cluster, definitions)
        for definition in definitions:
            wait_established(cluster, definition["metadata"]["name"])
        # The add-on's own ScaledObject requires three interceptors.
        kept = [item for item in rendered if item["kind"] not in ("CustomResourceDefinition", "ScaledObject")]
        for item in kept:
            if item["kind"] == "Deployment":
                item["spec"]["replicas"] = 1
                (container,) = item["spec"]["template"]["spec"]["containers"]
                container["image"] = f"{container['image'].partition(':')[0]}:test"
                container["imagePullPolicy"] = "IfNotPresent"
                if item["metadata"]["name"] == "keda-operator":
                    container["args"].append("--enable-webhook-patching=false")  # there is no webhook
        apply(cluster, kept)
    # KEDA's operator makes the certificates. Its own pod and the adapter's pod restart until the certificates
    # exist.
    wait_rollouts(cluster, KEDA, START_S)


def apply(cluster: NodeCluster, objects: list[dict[str, Any]]) -> None:
    """Applies objects on the server."""
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(objects))


@pytest.fixture(scope="module")
def holder(groups: Resource) -> str:
    """Yields the address of the interceptor's Service, with the example's HTTPScaledObject and KEDA."""
    install_keda(groups.cluster)
    example = yaml.safe_load((REPOSITORY / "examples/scale-to-zero/http-scaled-object.yaml").read_text())
    example["spec"]["scaledownPeriod"] = QUIET_S
    groups.cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=yaml.safe_dump(example))
    keda = Resource(cluster=groups.cluster, namespace=KEDA, name="")
    service = keda.get("service", "keda-add-ons-http-interceptor-proxy")["spec"]
    return f"{service['clusterIP']}:{service['ports'][0]['port']}"


def ask_holder(address: str) -> tuple[int, str]:
    """Sends a completion through the interceptor, which waits until a group is Ready.

    Returns status and text.
    """
    body = {"model": "cpu-pair", "prompt": [3, 5], "max_tokens": 4}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", "Host": HOST}
    url = f"http://{address}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=START_S) as answer:
        return answer.status, answer.read().decode()


def test_keda_scales_to_zero_and_back_for_a_request(groups: Resource, holder: str) -> None:
    """This is the last test. All groups are removed, and one is started for the request."""

    def is_at_zero() -> bool:
        reasons = {c["type"]: (c["status"], c["reason"]) for c in groups.status["conditions"]}
        return reasons["Ready"] == ("True", "ScaledToZero") and not groups.pods()

    wait_for(groups, "ScaledToZero without requests", is_at_zero)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(ask_holder, holder)
        wait_for(groups, "pods for the held request", lambda: bool(groups.pods()))
        status, text = held.result(timeout=START_S)
    assert status == 200
    assert len(json.loads(text)["choices"]) == 1
    wait_for(groups, "ScaledToZero after the request", is_at_zero)


def wait_for(groups: Resource, what: str, holds: Callable[[], bool]) -> None:
    """Waits for a state of the groups. The error contains KEDA's log."""
    try:
        processes.wait_until(what, holds, timeout_s=180)
    except ClusterError as error:
        log = groups.cluster.kubectl("logs", "-n", KEDA, "deployment/keda-operator", "--tail=40")
        scaled = groups.cluster.kubectl("get", "-n", NAMESPACE, "scaledobjects,hpa", "-o", "yaml")
        raise AssertionError(f"{error}\n{log}\n{scaled}") from error
