"""Tests the permissions of the operator and its pods on a real API server, and that secrets stay secret."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from heteroinfer_contract import names
from heteroinfer_operator.kube import rights
from heteroinfer_operator.kube.paths import EVENT, HETERO_INFERENCE, LEASE, POD
from heteroinfer_operator.kube.rights import AccessRule
from heteroinfer_operator.kube.server import FORBIDDEN, ApiError, ApiServer, load_configuration
from heteroinfer_operator.manifests.drift import contains_value
from tests.cluster.errors import ClusterError
from tests.cluster.folders import LEAST_VALUES
from tests.cluster.running_cluster import Cluster
from tests.integration.operator.conftest import CHART, Installation
from tests.integration.operator.life import COLLECTED_S, Install, bring_up, nothing_left, stored
from tests.integration.operator.running_operator import SPEC, create_resource, operator, pod, until
from tests.unit.api.test_template import DIGEST, PLATFORM
from tests.unit.manifests.test_golden import RESOURCE
from tests.unit.manifests.test_platform_fields import model_pod, worker
from tests.unit.manifests.test_platform_fields import spec as platform_spec


async def test_namespaced_scope_serves_its_namespaces_with_a_role_only(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, control_plane: Cluster
) -> None:
    installed = install("scope=Namespaced", f"watchNamespaces={{{namespace}}}")
    elsewhere = installed.release
    await create_resource(server, elsewhere)
    settings = {"watch_namespaces": namespace, "resync_seconds": "1"}
    async with operator(installed.kubeconfig, tmp_path / "log", **settings) as process:
        await process.working()
        pods = await bring_up(server, namespace)
        assert len(pods) == 2
        untouched = await server.get(HETERO_INFERENCE.path(elsewhere, "tiny"))
        assert untouched["status"]["observedGeneration"] == -1
        await server.delete(HETERO_INFERENCE.path(namespace, "tiny"), {})
        await until("nothing is left", lambda: nothing_left(server, namespace), timeout_s=COLLECTED_S)
        assert await process.stop() == 0
        assert " 403 " not in process.output
    for verb, resource in (
        ("list", "pods"),
        ("create", "pods"),
        ("list", "heteroinferences.heteroinfer.dev"),
    ):
        assert not may(control_plane, installed, verb, resource, elsewhere)
    assert not may(control_plane, installed, "list", "nodes", "")


def may(cluster: Cluster, installed: Installation, verb: str, resource: str, namespace: str) -> bool:
    """Returns whether the operator's account may use a verb on a resource."""
    review = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SubjectAccessReview",
        "spec": {
            "user": installed.account,
            "resourceAttributes": {
                "verb": verb,
                "namespace": namespace,
                "resource": resource.partition(".")[0].partition("/")[0],
                "subresource": resource.partition("/")[2],
                "group": resource.partition(".")[2],
            },
        },
    }
    answer = cluster.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(review))
    return bool(json.loads(answer)["status"]["allowed"])


VERBS = ("get", "list", "watch", "create", "update", "patch", "delete", "deletecollection")
Right = tuple[str, str, str]
"""Group, resource and verb."""


async def served(server: ApiServer) -> dict[tuple[str, str], bool]:
    """Returns every resource and subresource of the API server, and whether it is namespaced."""
    groups = (await server.get("/apis"))["groups"]
    paths = ["/api/v1", *(f"/apis/{each['preferredVersion']['groupVersion']}" for each in groups)]
    found: dict[tuple[str, str], bool] = {}
    for path in paths:
        listed = await server.get(path)
        group = listed["groupVersion"].rpartition("/")[0]
        found |= {(group, each["name"]): each["namespaced"] for each in listed["resources"]}
    return found


async def rights_of(server: ApiServer, account: str, namespace: str) -> set[Right]:
    """Returns a service account's permissions in a namespace, and the resources without any permission."""
    resources = await served(server)
    # Some are not served here: those of missing schedulers, and the permission for finalizers.
    resources = {(rule.group, rule.resource): True for rule in rights.SERVED} | resources
    slots = asyncio.Semaphore(16)

    async def allowed(group: str, name: str, verb: str, *, namespaced: bool) -> bool:
        """Returns whether the account may use a verb on a resource of the API server."""
        resource, _, subresource = name.partition("/")
        attributes = {
            "group": group,
            "resource": resource,
            "subresource": subresource,
            "verb": verb,
            "namespace": namespace if namespaced else "",
        }
        _, _, home, _ = account.split(":")
        review = {
            "apiVersion": "authorization.k8s.io/v1",
            "kind": "SubjectAccessReview",
            "spec": {
                "user": account,
                "groups": [
                    "system:authenticated",
                    "system:serviceaccounts",
                    f"system:serviceaccounts:{home}",
                ],
                "resourceAttributes": attributes,
            },
        }
        async with slots:
            answer = await server.create("/apis/authorization.k8s.io/v1/subjectaccessreviews", review)
        return bool(answer["status"]["allowed"])

    asked = [(group, name, verb) for group, name in resources for verb in VERBS]
    answers = await asyncio.gather(
        *(allowed(group, name, verb, namespaced=resources[group, name]) for group, name, verb in asked)
    )
    return {right for right, granted in zip(asked, answers, strict=True) if granted}


def listed(*rules: AccessRule) -> set[Right]:
    return {(rule.group, rule.resource, verb) for rule in rules for verb in rule.verbs if not rule.name}


async def test_the_service_account_has_exactly_the_listed_permissions(
    server: ApiServer, namespace: str, install: Install
) -> None:
    installed = install()
    nobody = await rights_of(server, f"system:serviceaccount:{namespace}:default", namespace)
    got = await rights_of(server, installed.account, namespace)
    assert got - nobody == listed(*rights.SERVED, *rights.CLUSTER)
    at_home = await rights_of(server, installed.account, installed.release)
    lease = listed(*rights.lease_rules(f"{installed.release}-heteroinfer"))
    assert at_home - nobody == listed(*rights.SERVED, *rights.CLUSTER) | lease
    account = ApiServer(await load_configuration(str(installed.kubeconfig)))
    try:
        name = f"{installed.release}-heteroinfer"
        own = rights.key_rules(f"{name}-operator-key", f"{name}-key")
        assert await rights.find_missing_rights(account, own, installed.release) == []
        other = rights.key_rules("another")
        assert len(await rights.find_missing_rights(account, other, installed.release)) == 2
    finally:
        await account.close()


async def test_requests_beyond_the_listed_permissions_are_refused(
    server: ApiServer, namespace: str, install: Install, control_plane: Cluster
) -> None:
    installed = install()
    control_plane.kubectl("create", "-n", namespace, "secret", "generic", "hub", "--from-literal=token=x")
    owner = await create_resource(server, namespace)
    await server.create(POD.path(namespace), pod(owner, "tiny-0-1-0"))
    account = ApiServer(await load_configuration(str(installed.kubeconfig)))
    secret = f"/api/v1/namespaces/{namespace}/secrets/hub"
    resource = HETERO_INFERENCE.path(namespace, "tiny")
    binding = {"metadata": {"name": "mine"}, "roleRef": {"kind": "ClusterRole", "name": "cluster-admin"}}
    requests: dict[str, Callable[[], Awaitable[Any]]] = {
        "read a secret": lambda: account.get(secret),
        "list secrets": lambda: account.get(f"/api/v1/namespaces/{namespace}/secrets"),
        "write a node": lambda: account.merge("/api/v1/nodes/n", {"spec": {"unschedulable": True}}),
        "run in a pod": lambda: account.create(POD.path(namespace, "tiny-0-1-0", "exec"), {}),
        "read a log": lambda: account.get_text(POD.path(namespace, "tiny-0-1-0", "log")),
        "reach a pod by proxy": lambda: account.get_text(POD.path(namespace, "tiny-0-1-0", "proxy")),
        "change a pod": lambda: account.merge(POD.path(namespace, "tiny-0-1-0"), {"metadata": {}}),
        "change a spec": lambda: account.update(resource, {}),
        "delete a resource": lambda: account.delete(resource, {}),
        "a token": lambda: account.create(
            f"/api/v1/namespaces/{installed.release}/serviceaccounts/{installed.release}-heteroinfer/token",
            {},
        ),
        "more rights": lambda: account.create(
            f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings", binding
        ),
        "another's lease": lambda: account.get(LEASE.path(installed.release, "another")),
    }
    try:
        for what, request in requests.items():
            with pytest.raises(ApiError) as refused:
                await request()
            assert refused.value.status == FORBIDDEN, (what, refused.value.message)
    finally:
        await account.close()


HUB = {
    "model": {
        "uri": "hf://org/tiny",
        "tokenSecretRef": {"name": "hub"},
        "cache": {"size": "1Gi"},
    }
}


def rendered_chart(cluster: Cluster, namespace: str, *values: str) -> list[dict[str, Any]]:
    """Returns the objects that the chart renders."""
    sets = [option for value in values for option in ("--set", value)]
    rendered = cluster.helm(
        *("template", "rel", str(CHART), "--namespace", namespace, "--kube-version", "1.35.4"),
        *("-f", str(LEAST_VALUES)),
        *sets,
    )
    return [each for each in yaml.safe_load_all(rendered) if each]


def check_chart_pods(cluster: Cluster, namespace: str, *values: str) -> None:
    """Checks that the operator's pod and the pod of `helm test` are admitted."""
    objects = rendered_chart(cluster, namespace, *values)
    pods = [each for each in objects if each["kind"] == "Pod"]
    pods += [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "operator"}, **each["spec"]["template"]}
        | {"metadata": {"name": "operator"}}
        for each in objects
        if each["kind"] == "Deployment"
    ]
    assert len(pods) == 2
    for each in pods:
        each["spec"]["serviceAccountName"] = "default"
        each["metadata"] = {"name": each["metadata"]["name"], "namespace": namespace}
        cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(each))


async def test_all_pods_are_admitted_to_a_restricted_namespace(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, control_plane: Cluster
) -> None:
    installed = install("scope=Namespaced", f"watchNamespaces={{{namespace}}}")
    enforce = "pod-security.kubernetes.io/enforce=restricted"
    control_plane.kubectl("label", "namespace", namespace, enforce)
    control_plane.kubectl("create", "-n", namespace, "secret", "generic", "hub", "--from-literal=token=x")
    check_chart_pods(control_plane, namespace)
    check_platform_pods(control_plane, namespace)
    settings = {"watch_namespaces": namespace, "resync_seconds": "1", "allow_host_paths": "true"}
    async with operator(installed.kubeconfig, tmp_path / "log", log_level="debug", **settings) as process:
        await process.working()
        await bring_up(server, namespace)
        await create_named(server, namespace, "hub", HUB)
        await until(
            "the fetch pod", lambda: has_pod(server, namespace, "hub-fetch-"), details=lambda: process.output
        )
        assert "violates PodSecurity" not in process.output

        # The refusal is reported to the user, because a restricted namespace allows no host path volume.
        await create_named(server, namespace, "path", {"model": {"uri": "file:///models/tiny"}})

        async def refused() -> bool:
            events = (await server.get(EVENT.path(namespace)))["items"]
            reported = [
                e["note"] for e in events if e["type"] == "Warning" and e["regarding"]["name"] == "path"
            ]
            return any("restricted volume types" in note for note in reported)

        await until("the refusal as an event", refused, details=lambda: process.output)
        token = yaml.safe_load(installed.kubeconfig.read_text())["users"][0]["user"]["token"]
        assert token not in process.output, "it logs at the most detailed level"
        for name in ("tiny", "hub", "path"):
            await server.delete(HETERO_INFERENCE.path(namespace, name), {})
        await until("nothing is left", lambda: nothing_left(server, namespace), timeout_s=COLLECTED_S)


def check_platform_pods(cluster: Cluster, namespace: str) -> None:
    """Checks that pods with all template fields, CAs, files and a model image are admitted."""
    model = {
        "uri": f"oci://registry.test/llama@{DIGEST}#models",
        "caBundle": {"secretKeyRef": {"name": "hub", "key": "token"}},
    }
    file = {"name": "chat.jinja", "configMapKeyRef": {"name": "a", "key": "b"}}
    engine = {**RESOURCE.spec.engine.dump(), "files": [file]}
    changed = platform_spec(PLATFORM, model=model, engine=engine, scheduling={})
    cluster.kubectl("create", "serviceaccount", "-n", namespace, "models")
    for made in (worker(changed), model_pod(changed)):
        made["metadata"] = {"name": made["metadata"]["name"], "namespace": namespace}
        answer = cluster.kubectl(
            "create", "--dry-run=server", "-f", "-", "-o", "json", stdin=yaml.safe_dump(made)
        )
        admitted = json.loads(answer)["spec"]
        mounts = [each["mountPath"] for each in admitted["containers"][0]["volumeMounts"]]
        assert not [path for path in mounts if "serviceaccount" in path], "no token"
        for field in ("dnsConfig", "serviceAccountName", "topologySpreadConstraints", "resourceClaims"):
            assert field not in made["spec"] or contains_value(admitted[field], made["spec"][field])
        assert contains_value(admitted["volumes"], made["spec"]["volumes"])


NO_FIXED_IDS = """
  (!has(object.spec.securityContext) || (!has(object.spec.securityContext.runAsUser) &&
    !has(object.spec.securityContext.runAsGroup) && !has(object.spec.securityContext.fsGroup))) &&
  object.spec.containers.all(c, !has(c.securityContext) || !has(c.securityContext.runAsUser))
"""


def refuse_fixed_ids(cluster: Cluster, namespace: str) -> Callable[[], bool]:
    """Makes a policy that refuses pods with a fixed user or group.

    Returns a check whether it applies already. OpenShift refuses ids outside the namespace's range, and fills
    in missing ids.
    """
    name = f"no-fixed-ids-{namespace}"
    selector = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    pods = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    kind = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    policy = {
        **kind,
        "kind": "ValidatingAdmissionPolicy",
        "spec": {
            "matchConstraints": {"namespaceSelector": selector, "resourceRules": [pods]},
            "validations": [{"expression": NO_FIXED_IDS, "message": "user ids are given by the namespace"}],
        },
    }
    binding = {
        **kind,
        "kind": "ValidatingAdmissionPolicyBinding",
        "spec": {"policyName": name, "validationActions": ["Deny"]},
    }
    cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all([policy, binding]))
    context = {"runAsUser": 65532}
    container = {"name": "c", "image": "none"}
    fixed = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "fixed", "namespace": namespace},
        "spec": {"securityContext": context, "containers": [container]},
    }

    def applies() -> bool:
        try:
            cluster.kubectl("create", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(fixed))
        except ClusterError as error:
            return "user ids are given by the namespace" in str(error)
        return False

    return applies


async def test_the_chart_can_leave_the_user_of_pods_unset(
    server: ApiServer, namespace: str, install: Install, tmp_path: Path, control_plane: Cluster
) -> None:
    """A policy refuses fixed user ids, as OpenShift's security context constraints do."""
    installed = install("scope=Namespaced", f"watchNamespaces={{{namespace}}}")
    await until("the policy", refuse_fixed_ids(control_plane, namespace), timeout_s=30)
    settings = {"watch_namespaces": namespace, "resync_seconds": "1"}
    async with operator(installed.kubeconfig, tmp_path / "fixed", **settings) as process:
        await process.working()
        await create_named(server, namespace, "hub", HUB)

        async def refused() -> bool:
            found = await server.get(HETERO_INFERENCE.path(namespace, "hub"))
            messages = [each["message"] for each in found.get("status", {}).get("conditions", ())]
            return any("user ids are given by the namespace" in words for words in messages)

        await until("the policy's message", refused, timeout_s=30, details=lambda: process.output)
        assert await process.stop() == 0

    values = ("assignedUserIds=true", "allowHostPaths=true")
    check_chart_pods(control_plane, namespace, *values)
    (deployment,) = [
        each for each in rendered_chart(control_plane, namespace, *values) if each["kind"] == "Deployment"
    ]
    env = deployment["spec"]["template"]["spec"]["containers"][0]["env"]
    security = next(each["value"] for each in env if each["name"] == "HETEROINFER_POD_SECURITY")
    settings["pod_security"] = security
    async with operator(installed.kubeconfig, tmp_path / "log", **settings) as process:
        await process.working()
        await until(
            "the fetch pod", lambda: has_pod(server, namespace, "hub-fetch-"), timeout_s=30,
            details=lambda: process.output,
        )  # fmt: skip
        await bring_up(server, namespace)
        pods = await stored(server, POD, namespace)
        assert len(pods) >= 3, "the fetch pod and two workers"
        for each in pods:
            assert each["spec"]["securityContext"] == {
                "runAsNonRoot": True,
                "fsGroupChangePolicy": "OnRootMismatch",
                "seccompProfile": {"type": "RuntimeDefault"},
            }
        for name in ("tiny", "hub"):
            await server.delete(HETERO_INFERENCE.path(namespace, name), {})
        await until("nothing is left", lambda: nothing_left(server, namespace), timeout_s=COLLECTED_S)


async def create_named(server: ApiServer, namespace: str, name: str, spec: dict[str, Any]) -> None:
    body = {
        "apiVersion": HETERO_INFERENCE.api_version,
        "kind": names.KIND,
        "metadata": {"name": name},
        "spec": {**SPEC, **spec},
    }
    await server.create(HETERO_INFERENCE.path(namespace), body)


async def has_pod(server: ApiServer, namespace: str, prefix: str) -> bool:
    found = await stored(server, POD, namespace)
    return any(each["metadata"]["name"].startswith(prefix) for each in found)
