"""Tests what platforms require of pods: assigned user ids, a private CA, files, volumes, devices.

The tests run on a real node. One group has all of it: namespaces that assign user ids and refuse fixed ones,
a hub under TLS with the certificate of a company's CA, a chat template from a ConfigMap, volumes of each
kind, and a device by dynamic resource allocation.
"""

import json
import shutil
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract import names
from heteroinfer_contract.model_fetch import model_folder
from tests.cluster import debian, processes
from tests.cluster.folders import REPOSITORY
from tests.cluster.namespaces import Addresses
from tests.cluster.node import NodeCluster
from tests.cluster.oci import Image, Layout
from tests.cluster.pki import Pki
from tests.e2e import dra_driver
from tests.e2e.assigned_ids import USER, assigned_ids
from tests.e2e.serving import NO_PROXY, RELEASE, SYSTEM, Resource, cache_volume, install
from tests.hub_server import HubServer, Repository
from tests.models import PROMPTS, REFERENCE_TOKENS

NAMESPACE = "platform"
MODEL = "acme/small"
FETCH_S = 120.0
START_S = 420.0
TEMPLATE = "{% for m in messages %}Hello {{ m['content'] }}{% endfor %}"
TOOL_PARSER = """
import json

from vllm.entrypoints.generate.base.protocol import ExtractedToolCallInformation, FunctionCall, ToolCall
from vllm.tool_parsers import ToolParser, ToolParserManager


@ToolParserManager.register_module("company")
class CompanyParser(ToolParser):
    def extract_tool_calls(self, model_output, request):
        arguments = json.dumps({"length": len(model_output)})
        function = FunctionCall(name=request.tools[0].function.name, arguments=arguments)
        calls = [ToolCall(type="function", function=function)]
        return ExtractedToolCallInformation(tools_called=True, tool_calls=calls, content=None)
"""
"""Takes each answer for a call of the first tool, with the answer's length in characters."""
WHO = (
    "import getpass, os, pwd; own = pwd.getpwuid(os.getuid()); "
    "print(os.getuid(), os.getgid(), own.pw_dir, getpass.getuser(), os.path.expanduser('~'))"
)
CLIENTS = """
import asyncio, json, os, sys, urllib.request
import httpx, huggingface_hub, requests
from vllm.connections import HTTPConnection

hub, model, ways = os.environ["HF_ENDPOINT"], sys.argv[1], HTTPConnection()
url = f"{hub}/api/models/{model}/revision/main"
clients = {
    "ssl": lambda: urllib.request.urlopen(url, timeout=10).read(),
    "requests": lambda: requests.get(url, timeout=10).raise_for_status(),
    "httpx": lambda: httpx.get(url, timeout=10).raise_for_status(),
    "huggingface_hub": lambda: huggingface_hub.HfApi().model_info(model, revision="main"),
    "vLLM, sync": lambda: ways.get_bytes(url, timeout=10),
    "vLLM, async": lambda: asyncio.run(ways.async_get_bytes(url, timeout=10)),
}
answers = {}
for name, ask in clients.items():
    try:
        ask()
        answers[name] = "answered"
    except Exception as error:
        answers[name] = "refused" if "CERTIFICATE_VERIFY_FAILED" in repr(error) else repr(error)
print(json.dumps(answers))
"""
"""HTTP clients of a worker. vLLM's own clients fetch the images of requests."""
IN_POD = f"""
import json, os, pathlib, subprocess, sys, tempfile
from vllm_heteroinfer.pod.certificates import trust_ca_bundle

plain = os.environ | {{"HF_HUB_OFFLINE": "0"}}
env = dict(plain)
trust_ca_bundle(env, pathlib.Path(tempfile.mkdtemp()))
command = [sys.executable, "-c", {CLIENTS!r}, sys.argv[1]]
runs = [subprocess.Popen(command, env=each, stdout=subprocess.PIPE, text=True) for each in (env, plain)]
print(json.dumps([json.loads(run.communicate()[0].splitlines()[-1]) for run in runs]))
"""
"""Asks the hub with the environment that a supervisor gives its processes, and again without
model.caBundle."""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def hub(node_cluster: NodeCluster, model: tuple[Path, dict[str, Any]], tmp_path: Path) -> Iterator[HubServer]:
    """Runs the hub under TLS. The certificate of its CA is `tmp_path`/ca.crt."""
    address = Addresses(number=node_cluster.state.number).machine
    pki = Pki(folder=tmp_path)
    pki.create_authority("ca", "Company")
    pki.issue("hub", "/CN=hub", server_names=(f"IP:{address}",))
    certificate = (pki.path("hub.crt"), pki.path("hub.key"))
    with HubServer(host=address, content_host=address, certificate=certificate) as server:
        server.repositories[MODEL] = Repository.of_folder(model[0] / "small")
        yield server


@pytest.fixture
def cache() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="heteroinfer-cache-"))
    folder.chmod(0o755)
    shutil.chown(folder, USER, 0)  # fsGroup does not change a volume that is a path of the node
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def given(
    node_cluster: NodeCluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Counter[tuple[str, str]]]:
    """Creates namespaces that assign user ids.

    Yields the number of pods that got ids, by namespace and component.
    """
    node_cluster.kubectl("create", "namespace", NAMESPACE)
    node_cluster.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    with assigned_ids(node_cluster, (NAMESPACE, SYSTEM), tmp_path_factory.mktemp("ids")) as counted:
        yield counted
    node_cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=60s", timeout_s=70)


@pytest.fixture(scope="module")
def installed(node_cluster: NodeCluster, given: Counter[tuple[str, str]]) -> Iterator[NodeCluster]:
    """Installs the chart as on OpenShift."""
    plugins = "allowedArguments={--tool-parser-plugin}"
    install(node_cluster, "assignedUserIds=true", "allowedServiceAccounts={models}", plugins)
    assert given[SYSTEM, ""] == 1, "the operator"
    node_cluster.kubectl("create", "serviceaccount", "-n", NAMESPACE, "models")
    yield node_cluster
    node_cluster.kubectl("delete", "hinf", "-n", NAMESPACE, "--all", "--timeout=60s", timeout_s=70)
    node_cluster.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout", "60s")
    node_cluster.kubectl("delete", "crd", f"{names.PLURAL}.{names.API_GROUP}", "--timeout=30s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folders:
    """Folders of the node for the volumes `platform-cache` and `platform-notes`."""

    cache: Path
    notes: Path


@pytest.fixture
def folders(node_cluster: NodeCluster) -> Iterator[Folders]:
    """Creates the folders on the node, and deletes them with the objects that use them."""
    made = [Path(tempfile.mkdtemp(prefix=f"heteroinfer-{name}-")) for name in ("cache", "notes")]
    for folder in made:
        folder.chmod(0o755)
        shutil.chown(folder, USER, 0)  # fsGroup does not change a volume that is a path of the node
    (made[1] / "note").write_text("of a claim")
    yield Folders(cache=made[0], notes=made[1])
    volumes = ("platform-cache", "platform-notes")
    node_cluster.kubectl("delete", "hinf", "-n", NAMESPACE, "--all", "--timeout=60s", timeout_s=70)
    node_cluster.kubectl("delete", "pvc", "-n", NAMESPACE, "--all", "--timeout=60s", timeout_s=70)
    node_cluster.kubectl("delete", "pv", *volumes, "--timeout=30s", timeout_s=40)
    for folder in made:
        shutil.rmtree(folder)


@pytest.fixture
def driver(node_cluster: NodeCluster) -> Iterator[None]:
    """Runs a device driver on the node, which offers no device yet. The driver ends with the node."""
    state = node_cluster.state
    python = str(REPOSITORY / ".venv-worker/bin/python")
    command = [*node_cluster.namespaces.prefix, python, "-B", "-m", "tests.e2e.dra_driver"]
    log = state.log("dra-driver")
    processes.spawn(command, mark=state.folder, log=log, environment={"PYTHONPATH": str(REPOSITORY)})
    processes.wait_until("the driver", lambda: "registered" in log.read_text(), timeout_s=60, log=log)
    yield
    for kind in ("resourceslice", "deviceclass"):
        node_cluster.kubectl("delete", kind, dra_driver.DRIVER, "--ignore-not-found")


def manifests(folders: Folders, endpoint: str, authority: str, image: str) -> str:
    """Returns the manifests that a user applies: the resource, and the objects that it names."""
    volume = cache_volume("platform-cache", folders.cache)
    notes = cache_volume("platform-notes", folders.notes)
    notes["spec"]["claimRef"] = {"namespace": NAMESPACE, "name": "notes"}
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "notes"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
            "storageClassName": "",
            "volumeName": "platform-notes",
        },
    }
    company = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "company"},
        "data": {
            "ca.crt": authority,
            "chat.jinja": TEMPLATE,
            "parser.py": TOOL_PARSER,
            "note": "of a ConfigMap",
        },
    }
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "hidden"},
        "stringData": {"note": "of a Secret"},
    }
    role = {"requests": {"cpu": "500m", "memory": "3Gi"}, "limits": {"memory": "3Gi"}}
    both = [{"configMap": {"name": "company", "items": [{"key": "note", "path": "one"}]}}]
    both.append({"secret": {"name": "hidden", "items": [{"key": "note", "path": "two"}]}})
    template = {
        "serviceAccountName": "models",
        "securityContext": {"supplementalGroups": [7777]},
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "DoNotSchedule",
                "labelSelector": {"matchLabels": {names.LABEL_RESOURCE: "fetched"}},
            }
        ],
        "volumes": [
            {"name": "a", "configMap": {"name": "company", "items": [{"key": "note", "path": "note"}]}},
            {"name": "b", "secret": {"secretName": "hidden"}},
            {"name": "c", "projected": {"sources": both}},
            {"name": "d", "emptyDir": {"sizeLimit": "1Mi"}},
            {"name": "e", "persistentVolumeClaim": {"claimName": "notes"}},
            {"name": "f", "image": {"reference": image}},
        ],
        "resourceClaims": [{"name": "device", "resourceClaimTemplateName": "device"}],
        "volumeMounts": [
            {"name": "a", "mountPath": "/mnt/a"},
            {"name": "b", "mountPath": "/mnt/b/note", "subPath": "note"},
            {"name": "c", "mountPath": "/mnt/c", "readOnly": True},
            {"name": "d", "mountPath": "/mnt/d"},
            {"name": "e", "mountPath": "/mnt/e"},
            {"name": "f", "mountPath": "/mnt/f"},
        ],
        "dnsConfig": {"searches": ["company.test"]},
    }
    bundle = {"configMapKeyRef": {"name": "company", "key": "ca.crt"}}
    files = [
        {"name": name, "configMapKeyRef": {"name": "company", "key": name}}
        for name in ("chat.jinja", "parser.py")
    ]
    resource = {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": names.KIND,
        "metadata": {"name": "fetched"},
        "spec": {
            "model": {"uri": f"hf://{MODEL}", "cache": {"size": "1Gi"}, "caBundle": bundle},
            "engine": {
                "maxModelLen": 1024,
                "env": [{"name": "HF_ENDPOINT", "value": endpoint}],
                "files": files,
                "args": [
                    *("--chat-template", f"{names.FILES_MOUNT}/chat.jinja"),
                    *("--tool-parser-plugin", f"{names.FILES_MOUNT}/parser.py"),
                    *("--enable-auto-tool-choice", "--tool-call-parser", "company"),
                ],
            },
            "roles": [{"name": "cpu", "device": "CPU", "resources": role, "template": template}],
        },
    }
    devices = dra_driver.claims("device")
    return yaml.safe_dump_all([volume, notes, claim, company, secret, *devices, resource])


def ask(resource: Resource, path: str, **body: Any) -> dict[str, Any]:
    url = resource.url().replace("/v1/completions", path)
    request = urllib.request.Request(
        url, json.dumps({"model": resource.name, **body}).encode(), {"Content-Type": "application/json"}
    )
    with NO_PROXY.open(request, timeout=60) as answer:
        return dict(json.load(answer))


def tokenize(resource: Resource, **body: Any) -> list[int]:
    return list(ask(resource, "/tokenize", **body)["tokens"])


def check_tool_parser(resource: Resource) -> None:
    """Checks that vLLM has loaded the parser's file: a chat request gets the call that the parser finds."""
    schema = {"type": "object", "properties": {"length": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "measure", "parameters": schema}}
    message = {"role": "user", "content": "world"}
    answer = ask(resource, "/v1/chat/completions", messages=[message], tools=[tool], max_tokens=4)
    (choice,) = answer["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (choice["finish_reason"], call["function"]["name"]) == ("tool_calls", "measure")
    assert json.loads(call["function"]["arguments"])["length"] > 0


@pytest.mark.usefixtures("driver")
def test_a_group_serves_with_all_fields_that_platforms_need(
    *,
    installed: NodeCluster,
    given: Counter[tuple[str, str]],
    hub: HubServer,
    folders: Folders,
    registry: Path,
    model: tuple[Path, dict[str, Any]],
    tmp_path: Path,
) -> None:
    image = push(installed, "notes", {"note": b"of an image"}, tmp_path / "layout")
    applied = manifests(folders, hub.endpoint, (tmp_path / "ca.crt").read_text(), image)
    installed.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=applied)
    resource = Resource(cluster=installed, namespace=NAMESPACE, name="fetched")
    processes.wait_until(
        "the profile", lambda: resource.status.get("model", {}).get("phase") == "Ready", timeout_s=FETCH_S
    )
    fetched = folders.cache / model_folder(MODEL, hub.repositories[MODEL].commit) / "config.json"
    assert (fetched.stat().st_uid, fetched.stat().st_gid) == (USER, 0)
    offer_device(installed, resource)
    resource.wait_ready(START_S)
    reference = model[1][PROMPTS[0]]
    assert resource.complete(reference["prompt_token_ids"], REFERENCE_TOKENS) == reference["token_ids"]
    rendered = tokenize(resource, messages=[{"role": "user", "content": "world"}])
    assert rendered == tokenize(resource, prompt="Hello world", add_special_tokens=False)
    check_tool_parser(resource)

    (pod,) = resource.pods()
    name = pod["metadata"]["name"]

    def output(command: str) -> str:
        return installed.kubectl("exec", "-n", NAMESPACE, name, "--", "sh", "-c", command).strip()

    assert resource.execute(name, WHO).split() == [str(USER), "0", "/tmp", "heteroinfer", "/tmp"]
    assert output("id -G").split() == ["0", "7777", str(USER)]
    assert output("cat /mnt/a/note /mnt/b/note /mnt/c/one /mnt/c/two") == "of a ConfigMapof a Secret" * 2
    assert output("touch /mnt/d/x && ls /mnt/d") == "x"
    assert output("touch /mnt/e/x && cat /mnt/e/note /mnt/f/note") == "of a claimof an image"
    assert output("touch /mnt/f/x 2>&1 || true").endswith("Read-only file system")
    assert (folders.notes / "x").stat().st_uid == USER
    assert output(f"printenv {dra_driver.DEVICE_VARIABLE}") == dra_driver.DEVICE
    assert "company.test" in output("cat /etc/resolv.conf")
    assert pod["spec"]["serviceAccountName"] == "models"
    assert output("ls -d /var/run/secrets/kubernetes.io 2>/dev/null || echo no token") == "no token"
    (operator,) = Resource(cluster=installed, namespace=SYSTEM, name="").get(
        "pods", "-l", "app.kubernetes.io/name=heteroinfer-operator"
    )["items"]
    run = ("exec", "-n", SYSTEM, operator["metadata"]["name"], "--", "python3", "-c", WHO)
    assert installed.kubectl(*run).split()[:3] == [str(USER), "0", "/tmp"]
    assert given[NAMESPACE, names.COMPONENT_FETCH] >= 1
    assert given[NAMESPACE, names.COMPONENT_WORKER] >= 1
    check_trust(resource, name)


def offer_device(cluster: NodeCluster, resource: Resource) -> None:
    """Offers the device after the status has quoted the scheduler's message that there is none."""

    def quoted() -> bool:
        conditions = resource.status.get("conditions", [])
        return any("cannot allocate all claims" in each["message"] for each in conditions)

    processes.wait_until("the scheduler's words about the claim", quoted, timeout_s=60)
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(dra_driver.offer(cluster.node_name)))


def check_trust(resource: Resource, pod: str) -> None:
    """Checks that each client of a worker reaches the hub under TLS only with model.caBundle."""
    run = ("exec", "-n", NAMESPACE, pod, "--", "python3", "-c", IN_POD, MODEL)
    with_bundle, without = json.loads(resource.cluster.kubectl(*run, timeout_s=120))
    clients = {"ssl", "requests", "httpx", "huggingface_hub", "vLLM, sync", "vLLM, async"}
    assert with_bundle == dict.fromkeys(clients, "answered")
    assert without == dict.fromkeys(clients, "refused")


# The tests of a model in an image follow.

REGISTRY = "localhost:5000"
"""On the node's loopback, where containerd uses no TLS."""


@pytest.fixture(scope="module")
def registry(node_cluster: NodeCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs a registry on the node, which ends with the node. Returns the log of its requests."""
    tmp_path = tmp_path_factory.mktemp("registry")
    debian.ensure_packages({"docker-registry": "docker-registry", "skopeo": "skopeo"})
    store = {"filesystem": {"rootdirectory": str(tmp_path / "store")}}
    settings = {"version": 0.1, "storage": store, "http": {"addr": REGISTRY}}
    configuration = tmp_path / "registry.yml"
    configuration.write_text(yaml.safe_dump(settings))
    state = node_cluster.state
    command = [*node_cluster.namespaces.prefix, "docker-registry", "serve", str(configuration)]
    processes.spawn(command, mark=state.folder, log=state.log("registry"), environment={})

    def answers() -> bool:
        try:
            node_cluster.namespaces.connect("127.0.0.1", 5000, 1).close()
        except OSError:
            return False
        return True

    processes.wait_until("the registry", answers, timeout_s=30, log=state.log("registry"))
    return state.log("registry")


def push(cluster: NodeCluster, tag: str, files: dict[str, bytes], folder: Path) -> str:
    """Pushes an image of these files, and returns its reference."""
    layout = Layout(folder=folder)
    layout.put_image(tag, files, {})
    name = f"{REGISTRY}/models/{tag}"
    copy = ("skopeo", "copy", "--quiet", "--preserve-digests", "--dest-tls-verify=false")
    cluster.namespaces.run(*copy, f"oci:{folder}:{tag}", f"docker://{name}:pushed")
    return f"{name}@{layout.digest(Image(tag=tag, reference=name))}"


def test_a_group_serves_a_model_from_an_image(
    installed: NodeCluster,
    given: Counter[tuple[str, str]],
    registry: Path,
    model: tuple[Path, dict[str, Any]],
    tmp_path: Path,
) -> None:
    """The kubelet pulls and mounts the image, so the group needs no claim and no download."""
    files = {f"weights/{file.name}": file.read_bytes() for file in (model[0] / "small").iterdir()}
    reference = push(installed, "small", files, tmp_path / "layout")
    role = {"requests": {"cpu": "500m", "memory": "3Gi"}, "limits": {"memory": "3Gi"}}
    document = {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": names.KIND,
        "metadata": {"name": "from-image"},
        "spec": {
            "model": {"uri": f"oci://{reference}#weights"},
            "engine": {"maxModelLen": 1024},
            "parallelism": {"mode": "Pipeline"},
            "roles": [{"name": "cpu", "device": "CPU", "pods": 2, "resources": role}],
        },
    }
    installed.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=yaml.safe_dump(document))
    resource = Resource(cluster=installed, namespace=NAMESPACE, name="from-image")
    resource.wait_ready(START_S)
    answer = model[1][PROMPTS[0]]
    assert resource.complete(answer["prompt_token_ids"], REFERENCE_TOKENS) == answer["token_ids"]

    assert given[NAMESPACE, names.COMPONENT_INSPECT] >= 1
    requests = registry.read_text()
    assert f"/v2/models/small/manifests/{reference.partition('@')[2]}" in requests
    for pod in resource.pods():
        images = [volume["image"]["reference"] for volume in pod["spec"]["volumes"] if "image" in volume]
        assert images == [reference]
        mounts = [mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]]
        assert names.MODEL_MOUNT in mounts
        script = f"cd {names.MODEL_MOUNT}/weights && ls && touch x 2>&1 || true"
        run = ("exec", "-n", NAMESPACE, pod["metadata"]["name"], "--", "sh", "-c", script)
        output = installed.kubectl(*run)
        assert "config.json" in output
        assert "Read-only file system" in output
