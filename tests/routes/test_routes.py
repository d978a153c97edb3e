"""Two groups behind a gateway with TLS, an API key and an endpoint picker, on a real node: `make routes`.

The endpoint picker of the Gateway API Inference Extension, Envoy and the interceptor of KEDA's HTTP add-on
are the real programs. No gateway controller runs here: `gateway.py` writes Envoy's configuration.
"""

import json
import ssl
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPResponse
from pathlib import Path
from typing import Any, cast

import pytest
import yaml

from heteroinfer_contract import names
from tests.cluster import processes, tools
from tests.cluster.crds import wait_established
from tests.cluster.folders import REPOSITORY
from tests.cluster.namespaces import Addresses
from tests.cluster.node import NodeCluster
from tests.cluster.pki import Pki
from tests.cluster.volumes import volume_manifests
from tests.e2e.conftest import model
from tests.e2e.serving import Resource, install
from tests.routes.gateway import (
    HOLDER_PORT,
    HOLDER_QUEUE_PORT,
    HTTPS_PORT,
    build_envoy_command,
    build_holder_command,
    build_holder_environment,
    ensure_envoy,
    write_envoy_configuration,
)

__all__ = ["model"]

NAMESPACE = "routed"
HOST = "llm.example.com"
KEY = "a-key-of-these-tests"
START_S = 420.0
ANSWER_S = 300.0
"""All requests at once, on a node whose two cores other tests use too."""
REQUESTS = 24

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def groups(node_cluster: NodeCluster, model: tuple[Path, dict[str, Any]]) -> Resource:
    """examples/cpu-pair.yaml with two groups, and the API key as docs/user/expose.md#routes gives it."""
    for tool in (tools.ENDPOINT_PICKER, tools.HTTP_ADD_ON):
        tools.ensure_built(tool)
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
    """What clients reach from outside."""

    groups: Resource
    address: str
    authority: Path

    def open(self, path: str, body: dict[str, Any] | None, key: str = KEY) -> HTTPResponse:
        """Returns the answer to a request by TLS, of which the body is not read yet."""
        context = ssl.create_default_context(cafile=str(self.authority))
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"https://{self.address}:{HTTPS_PORT}{path}", data, headers)
        direct = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        return cast("HTTPResponse", direct.open(request, timeout=ANSWER_S))

    def ask(self, path: str, body: dict[str, Any] | None = None, *, key: str = KEY) -> tuple[int, str]:
        """Returns status and text of a request by TLS."""
        try:
            with self.open(path, body, key) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def complete(self, prompt: str | list[int], max_tokens: int = 16, **options: Any) -> tuple[int, str]:
        return self.ask("/v1/completions", asks_for(prompt, max_tokens, **options))

    def answered(self) -> Counter[str]:
        """Returns how many requests each leader has answered, by pod."""
        found: Counter[str] = Counter()
        for pod in leaders(self.groups):
            url = f"http://{pod['status']['podIP']}:8000/metrics"
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10) as said:
                lines = said.read().decode().splitlines()
            done = [line for line in lines if line.startswith("vllm:request_success_total")]
            found[pod["metadata"]["name"]] = round(sum(float(line.rpartition(" ")[2]) for line in done))
        return found


def asks_for(prompt: str | list[int], max_tokens: int, **options: Any) -> dict[str, Any]:
    body = {"model": "cpu-pair", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
    return {**body, **options}


def leaders(groups: Resource) -> list[dict[str, Any]]:
    return [pod for pod in groups.pods() if names.LABEL_LEADER in pod["metadata"]["labels"]]


def start_picker(cluster: NodeCluster, inside: Sequence[str]) -> None:
    """Starts the picker with the arguments and the service account of the example's Deployment."""
    example = yaml.safe_load_all((REPOSITORY / "examples/routes/inference-pool.yaml").read_text())
    objects = {item["kind"]: item for item in example}
    pod = objects.pop("Deployment")["spec"]["template"]["spec"]
    cluster.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=yaml.safe_dump_all(objects.values()))
    token = cluster.kubectl("create", "token", pod["serviceAccountName"], "-n", NAMESPACE).strip()
    configuration = json.loads(cluster.kubeconfig.read_text())
    configuration["users"][0]["user"] = {"token": token}
    kubeconfig = cluster.state.folder / "picker.kubeconfig"
    kubeconfig.touch(mode=0o600)
    kubeconfig.write_text(json.dumps(configuration))
    arguments = [given.replace("$(NAMESPACE)", NAMESPACE) for given in pod["containers"][0]["args"]]
    processes.spawn(
        [*inside, str(tools.program(tools.ENDPOINT_PICKER, "epp")), *arguments],
        mark=cluster.state.folder,
        log=cluster.state.log("endpoint-picker"),
        environment={"KUBECONFIG": str(kubeconfig), "NAMESPACE": NAMESPACE},
    )


@pytest.fixture(scope="module")
def gateway(groups: Resource) -> Gateway:
    """The pool of the example with its picker, and Envoy in front. Both run as processes of the node."""
    cluster, state = groups.cluster, groups.cluster.state
    bases = tools.source_folder("endpoint-picker", "sigs.k8s.io/gateway-api-inference-extension")
    for file in sorted((bases / "config/crd/bases").glob("*.yaml")):
        cluster.kubectl("apply", "--server-side", "-f", str(file))
        wait_established(cluster, yaml.safe_load(file.read_text())["metadata"]["name"])
    address, inside = Addresses(number=state.number).node, cluster.namespaces.prefix
    pki = Pki(folder=state.folder / "gateway")
    pki.folder.mkdir(mode=0o700)
    pki.create_authority("ca", "gateway")
    pki.issue("server", f"/CN={HOST}", server_names=[f"IP:{address}", f"DNS:{HOST}"])
    configuration = state.folder / "envoy.json"
    write_envoy_configuration(configuration, Path(pki.path("server.crt")), Path(pki.path("server.key")))
    start_picker(cluster, inside)
    processes.spawn(
        [*inside, *build_envoy_command(ensure_envoy(), configuration)],
        mark=state.folder,
        log=state.log("envoy"),
        environment={},
    )
    front = Gateway(groups=groups, address=address, authority=Path(pki.path("ca.crt")))

    def answers() -> bool:
        try:
            return front.ask("/v1/models")[0] == 200
        except OSError:
            return False

    processes.wait_until("the gateway", answers, timeout_s=60, log=state.log("endpoint-picker"))
    return front


def test_tokens_are_those_of_the_reference(gateway: Gateway, model: tuple[Path, dict[str, Any]]) -> None:
    for prompt, answer in model[1].items():
        status, text = gateway.complete(
            prompt, len(answer["token_ids"]), temperature=0, return_token_ids=True
        )
        assert (status, json.loads(text)["choices"][0]["token_ids"]) == (200, answer["token_ids"]), text


def test_without_the_key_nothing_is_answered_and_no_other_path_is_there(gateway: Gateway) -> None:
    assert gateway.ask("/v1/models", key="another")[0] == 401
    assert gateway.ask("/metrics")[0] == 404
    assert gateway.ask("/v1/../metrics")[0] == 404
    assert gateway.ask("/sleep", {})[0] == 404


def test_the_picker_refuses_a_prompt_of_token_ids(gateway: Gateway) -> None:
    """docs/user/expose.md#routes warns of it; without a picker vLLM takes such a prompt."""
    assert gateway.complete([3, 5])[0] == 400


def test_both_groups_get_requests(gateway: Gateway) -> None:
    before = gateway.answered()
    with ThreadPoolExecutor(REQUESTS) as pool:
        said = list(pool.map(lambda i: gateway.complete(f"{i} ranks", 64), range(REQUESTS)))
    assert Counter(status for status, _ in said) == {200: REQUESTS}
    now = gateway.answered()
    shares = {pod: now[pod] - before[pod] for pod in now}
    assert sum(shares.values()) == REQUESTS
    assert min(shares.values()) >= REQUESTS // 6, shares


def test_a_stream_comes_through_in_parts(gateway: Gateway) -> None:
    began = time.monotonic()
    with gateway.open("/v1/completions", asks_for("A stream", 128, stream=True)) as answer:
        arrived = [(time.monotonic() - began, line.strip()) for line in answer if line.strip()]
    assert arrived[-1][1] == b"data: [DONE]"
    assert len(arrived) > 64  # the bytes of one character come together
    (first_s, _), *_, (last_s, _) = arrived
    assert first_s < last_s / 2, f"the first of {len(arrived)} events came after {first_s} of {last_s} s"


def test_a_group_that_sleeps_gets_no_request(gateway: Gateway) -> None:
    asleep = leaders(gateway.groups)[0]
    name, address = asleep["metadata"]["name"], asleep["status"]["podIP"]
    status, said = gateway.groups.cluster.pod_http(address, 8000, "/sleep?level=1", body=b"", timeout_s=60)
    assert status == 200, said

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


# Scale to zero


@pytest.fixture(scope="module")
def holder(gateway: Gateway) -> str:
    """The interceptor of KEDA's HTTP add-on with the example's HTTPScaledObject; returns its address.

    KEDA and the add-on's scaler and operator are not here: the test scales by what the interceptor counts.
    """
    cluster, state = gateway.groups.cluster, gateway.groups.cluster.state
    addon = tools.source_folder("http-add-on", "github.com/kedacore/http-add-on")
    cluster.kubectl("apply", "--server-side", "-f", str(addon / "config/crd/bases"))
    wait_established(cluster, "httpscaledobjects.http.keda.sh")
    example = REPOSITORY / "examples/scale-to-zero/http-scaled-object.yaml"
    cluster.kubectl("apply", "-n", NAMESPACE, "-f", str(example))
    resolver = state.folder / "holder-resolv.conf"
    names_of = "search svc.cluster.local cluster.local"
    resolver.write_text(f"nameserver {gateway.address}\n{names_of}\noptions ndots:5\n")
    program = tools.program(tools.HTTP_ADD_ON, "interceptor")
    processes.spawn(
        [*cluster.namespaces.prefix, *build_holder_command(program, resolver)],
        mark=state.folder,
        log=state.log("interceptor"),
        environment={"KUBECONFIG": str(cluster.kubeconfig), **build_holder_environment(NAMESPACE)},
    )

    def counts() -> bool:
        try:
            return waiting(gateway.address) == 0
        except OSError:
            return False

    processes.wait_until("the interceptor", counts, timeout_s=60, log=state.log("interceptor"))
    return gateway.address


def waiting(address: str) -> int:
    """Returns how many requests the interceptor has taken and not answered: its scaler scales by them."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"http://{address}:{HOLDER_QUEUE_PORT}/queue", timeout=5) as answer:
        found = json.load(answer)
    return sum(int(counts["Concurrency"]) for counts in found.values())


def ask_holder(address: str) -> tuple[int, str]:
    """Returns status and text of a completion by the interceptor, which holds it until a group is Ready."""
    body = {"model": "cpu-pair", "prompt": [3, 5], "max_tokens": 4}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", "Host": HOST}
    url = f"http://{address}:{HOLDER_PORT}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=START_S) as answer:
        return answer.status, answer.read().decode()


def test_a_request_is_held_while_there_is_no_group(gateway: Gateway, holder: str) -> None:
    """The last test: all groups go, and one comes for the request."""
    groups = gateway.groups
    scale = ("scale", "-n", NAMESPACE, "hinf/cpu-pair")
    groups.cluster.kubectl(*scale, "--replicas=0")
    processes.wait_until("the end of all pods", lambda: not groups.pods(), timeout_s=120)

    def is_at_zero() -> bool:
        reasons = {c["type"]: (c["status"], c["reason"]) for c in groups.status["conditions"]}
        return reasons["Ready"] == ("True", "ScaledToZero")

    processes.wait_until("reason ScaledToZero", is_at_zero, timeout_s=30)
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(ask_holder, holder)
        processes.wait_until("a held request", lambda: waiting(holder) == 1, timeout_s=30)
        assert not held.done()
        groups.cluster.kubectl(*scale, "--replicas=1")  # what KEDA does of this count
        status, text = held.result(timeout=START_S)
    assert status == 200
    assert len(json.loads(text)["choices"]) == 1
    processes.wait_until("the end of the count", lambda: waiting(holder) == 0, timeout_s=10)
