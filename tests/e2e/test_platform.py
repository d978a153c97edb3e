"""What platforms ask of pods, on a real node: user ids of a range, a private authority, files and volumes.

One group has all of it: a namespace that admits user ids of its own range only, a hub under TLS with the
certificate of a company's authority, a chat template from a ConfigMap, and volumes of each kind.
"""

import json
import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract import names
from tests.cluster import debian, processes
from tests.cluster.errors import ClusterError
from tests.cluster.namespaces import Addresses
from tests.cluster.node import NodeCluster
from tests.cluster.oci import Image, Layout
from tests.cluster.pki import Pki
from tests.e2e.serving import NO_PROXY, RELEASE, SYSTEM, Resource, cache_volume, install
from tests.hub_server import HubServer, Repository
from tests.models import PROMPTS, REFERENCE_TOKENS

NAMESPACE = "platform"
MODEL = "acme/small"
USER = 1000680000
"""The first of a namespace's range on OpenShift; its group is 0."""
FETCH_S = 120.0
START_S = 420.0
TEMPLATE = "{% for m in messages %}Hello {{ m['content'] }}{% endfor %}"
WHO = (
    "import getpass, os, pwd; own = pwd.getpwuid(os.getuid()); "
    "print(os.getuid(), os.getgid(), own.pw_dir, getpass.getuser(), os.path.expanduser('~'))"
)
IN_RANGE = f"""
  [object.spec.?securityContext.runAsUser, object.spec.?securityContext.fsGroup].all(
    id, id.orValue({USER}) >= {USER} && id.orValue({USER}) < {USER + 10000}) &&
  object.spec.?securityContext.runAsGroup.orValue(0) == 0
"""

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
def hub(node_cluster: NodeCluster, model: tuple[Path, dict[str, Any]], tmp_path: Path) -> Iterator[HubServer]:
    """The hub under TLS; its authority's certificate is `tmp_path`/ca.crt."""
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
    shutil.chown(folder, USER, 0)  # a volume of a path of the node takes no group from fsGroup
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def installed(node_cluster: NodeCluster) -> Iterator[NodeCluster]:
    """The chart with user ids of the range, in a namespace that admits no other."""
    install(
        node_cluster,
        f"podSecurityContext.runAsUser={USER + 1}",
        "podSecurityContext.runAsGroup=0",
        f"workerPods.podSecurityContext.runAsUser={USER}",
        "workerPods.podSecurityContext.runAsGroup=0",
        f"workerPods.podSecurityContext.fsGroup={USER}",
        "allowedServiceAccounts={models}",
    )
    node_cluster.kubectl("create", "namespace", NAMESPACE)
    node_cluster.kubectl("label", "namespace", NAMESPACE, "pod-security.kubernetes.io/enforce=restricted")
    node_cluster.kubectl("create", "serviceaccount", "-n", NAMESPACE, "models")
    node_cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(policy()))
    processes.wait_until("the policy", lambda: refuses(node_cluster), timeout_s=30)
    yield node_cluster
    node_cluster.kubectl("delete", "hinf", "-n", NAMESPACE, "--all", "--timeout=60s", timeout_s=70)
    node_cluster.helm("uninstall", RELEASE, "--namespace", SYSTEM, "--wait", "--timeout", "60s")
    node_cluster.kubectl("delete", "crd", f"{names.PLURAL}.{names.API_GROUP}", "--timeout=30s")
    kinds = "validatingadmissionpolicies,validatingadmissionpolicybindings"
    node_cluster.kubectl("delete", kinds, "--all")
    node_cluster.kubectl("delete", "namespace", NAMESPACE, "--timeout=60s", timeout_s=70)
    node_cluster.kubectl(
        "delete", "pv", "platform-cache", "--ignore-not-found", "--timeout=30s", timeout_s=40
    )


def policy() -> list[dict[str, Any]]:
    """Returns what refuses pods with ids outside of the range, as OpenShift's constraints do."""
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": "ids-of-the-range"}}
    selector = {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    validation = {"expression": IN_RANGE, "message": "ids are of the namespace's range"}
    return [
        {
            **kind,
            "kind": "ValidatingAdmissionPolicy",
            "spec": {
                "matchConstraints": {"namespaceSelector": selector, "resourceRules": [pods]},
                "validations": [validation],
            },
        },
        {
            **kind,
            "kind": "ValidatingAdmissionPolicyBinding",
            "spec": {"policyName": "ids-of-the-range", "validationActions": ["Deny"]},
        },
    ]


def refuses(cluster: NodeCluster) -> bool:
    container = {
        "name": "c",
        "image": "none",
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    context = {"runAsUser": 65532, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "fixed", "namespace": NAMESPACE},
        "spec": {"securityContext": context, "containers": [container]},
    }
    try:
        cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(pod))
    except ClusterError as error:
        return "ids are of the namespace's range" in str(error)
    return False


def manifests(cache: Path, endpoint: str, authority: str) -> str:
    """Returns what a user applies: objects that the resource names, and the resource."""
    volume = cache_volume("platform-cache", cache)
    company = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "company"},
        "data": {"ca.crt": authority, "chat.jinja": TEMPLATE, "note": "of a ConfigMap"},
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
        ],
        "volumeMounts": [
            {"name": "a", "mountPath": "/mnt/a"},
            {"name": "b", "mountPath": "/mnt/b/note", "subPath": "note"},
            {"name": "c", "mountPath": "/mnt/c", "readOnly": True},
            {"name": "d", "mountPath": "/mnt/d"},
        ],
        "dnsConfig": {"searches": ["company.test"]},
    }
    bundle = {"configMapKeyRef": {"name": "company", "key": "ca.crt"}}
    file = {"name": "chat.jinja", "configMapKeyRef": {"name": "company", "key": "chat.jinja"}}
    resource = {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": names.KIND,
        "metadata": {"name": "fetched"},
        "spec": {
            "model": {"uri": f"hf://{MODEL}", "cache": {"size": "1Gi"}, "caBundle": bundle},
            "engine": {
                "maxModelLen": 1024,
                "env": [{"name": "HF_ENDPOINT", "value": endpoint}],
                "files": [file],
                "args": ["--chat-template", f"{names.FILES_MOUNT}/chat.jinja"],
            },
            "roles": [{"name": "cpu", "device": "CPU", "resources": role, "template": template}],
        },
    }
    return yaml.safe_dump_all([volume, company, secret, resource])


def tokenize(resource: Resource, **body: Any) -> list[int]:
    url = resource.url().replace("/v1/completions", "/tokenize")
    request = urllib.request.Request(
        url, json.dumps({"model": resource.name, **body}).encode(), {"Content-Type": "application/json"}
    )
    with NO_PROXY.open(request, timeout=60) as answer:
        return list(json.load(answer)["tokens"])


def test_a_group_serves_with_all_that_platforms_ask(
    installed: NodeCluster, hub: HubServer, cache: Path, model: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    authority = (tmp_path / "ca.crt").read_text()
    applied = manifests(cache, hub.endpoint, authority)
    installed.kubectl("apply", "-n", NAMESPACE, "-f", "-", stdin=applied)
    resource = Resource(cluster=installed, namespace=NAMESPACE, name="fetched")
    processes.wait_until(
        "the profile", lambda: resource.status.get("model", {}).get("phase") == "Ready", timeout_s=FETCH_S
    )
    resource.wait_ready(START_S)
    reference = model[1][PROMPTS[0]]
    assert resource.complete(reference["prompt_token_ids"], REFERENCE_TOKENS) == reference["token_ids"]
    rendered = tokenize(resource, messages=[{"role": "user", "content": "world"}])
    assert rendered == tokenize(resource, prompt="Hello world", add_special_tokens=False)

    (pod,) = resource.pods()
    name = pod["metadata"]["name"]

    def said(command: str) -> str:
        return installed.kubectl("exec", "-n", NAMESPACE, name, "--", "sh", "-c", command).strip()

    assert resource.execute(name, WHO).split() == [str(USER), "0", "/tmp", "heteroinfer", "/tmp"]
    assert said("id -G").split() == ["0", "7777", str(USER)]
    assert said("cat /mnt/a/note /mnt/b/note /mnt/c/one /mnt/c/two") == "of a ConfigMapof a Secret" * 2
    assert said("touch /mnt/d/x && ls /mnt/d") == "x"
    assert "company.test" in said("cat /etc/resolv.conf")
    assert pod["spec"]["serviceAccountName"] == "models"
    assert said("ls -d /var/run/secrets/kubernetes.io 2>/dev/null || echo no token") == "no token"
    (operator,) = Resource(cluster=installed, namespace=SYSTEM, name="").get(
        "pods", "-l", "app.kubernetes.io/name=heteroinfer-operator"
    )["items"]
    run = ("exec", "-n", SYSTEM, operator["metadata"]["name"], "--", "python3", "-c", WHO)
    assert installed.kubectl(*run).split()[:3] == [str(USER + 1), "0", "/tmp"]


# A model in an image

REGISTRY = "localhost:5000"
"""On the node's loopback, where containerd asks without TLS."""


@pytest.fixture
def registry(node_cluster: NodeCluster, tmp_path: Path) -> Path:
    """A registry on the node, which ends with the node; returns the log with its requests."""
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


def push_model(cluster: NodeCluster, model: Path, folder: Path) -> str:
    """Puts the model's files into an image, below /weights, and pushes it; returns its reference."""
    layout = Layout(folder=folder)
    layout.put_image("small", {f"weights/{file.name}": file.read_bytes() for file in model.iterdir()}, {})
    name = f"{REGISTRY}/models/small"
    copy = ("skopeo", "copy", "--quiet", "--preserve-digests", "--dest-tls-verify=false")
    cluster.namespaces.run(*copy, f"oci:{folder}:small", f"docker://{name}:pushed")
    return f"{name}@{layout.digest(Image(tag='small', reference=name))}"


def test_a_group_serves_a_model_from_an_image(
    installed: NodeCluster, registry: Path, model: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """The kubelet pulls the image and mounts it; no claim and no download."""
    reference = push_model(installed, model[0] / "small", tmp_path / "layout")
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

    requests = registry.read_text()
    assert f"/v2/models/small/manifests/{reference.partition('@')[2]}" in requests
    for pod in resource.pods():
        images = [volume["image"]["reference"] for volume in pod["spec"]["volumes"] if "image" in volume]
        assert images == [reference]
        mounts = [mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]]
        assert names.MODEL_MOUNT in mounts
        script = f"cd {names.MODEL_MOUNT}/weights && ls && touch x 2>&1 || true"
        run = ("exec", "-n", NAMESPACE, pod["metadata"]["name"], "--", "sh", "-c", script)
        said = installed.kubectl(*run)
        assert "config.json" in said
        assert "Read-only file system" in said
