"""Fields for platforms: their effect on users, volumes, claims, CA bundle and files of pods."""

from dataclasses import replace
from typing import Any

import pytest

from heteroinfer_contract import names
from heteroinfer_operator.api import HeteroInferenceSpec, parse_spec
from heteroinfer_operator.cluster import CreateObject
from heteroinfer_operator.kube.child_errors import refusal_message
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.addressing import ClusterAddressing
from heteroinfer_operator.manifests.model_pods import build_model_pod, model_pod_name
from heteroinfer_operator.manifests.pod_security import PodSecurity
from heteroinfer_operator.reconcile.allowed import Allowed
from tests.unit.api.test_template import DIGEST, PLATFORM
from tests.unit.manifests.test_golden import GROUP, IMAGES, OWNER, PLAN, RESOURCE, _pods

BUNDLE = {"configMapKeyRef": {"name": "company", "key": "ca.crt"}}


def spec(template: dict[str, Any] | None = None, **fields: Any) -> HeteroInferenceSpec:
    """Returns the golden resource's spec, changed."""
    value = {**RESOURCE.spec.dump(), **fields}
    if template is not None:
        value["roles"] = [{**role, "template": template} for role in value["roles"]]
    return parse_spec(value)


def worker(changed: HeteroInferenceSpec, **fields: Any) -> dict[str, Any]:
    addressing = ClusterAddressing()
    pods = replace(
        _pods(), spec=changed, source=addressing.find_model_source(changed, OWNER),
        addresses=addressing.pods(changed, GROUP, PLAN), **fields,
    )  # fmt: skip
    return pods.build_pod(PLAN.pods[1])


def model_pod(changed: HeteroInferenceSpec) -> dict[str, Any]:
    return build_model_pod(changed, OWNER, ClusterAddressing().find_model_source(changed, OWNER), IMAGES)


def mounts(pod: dict[str, Any]) -> dict[str, str]:
    container = pod["spec"]["containers"][0]
    return {each["mountPath"]: each["name"] for each in container["volumeMounts"]}


def env(pod: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}


def test_a_roles_template_reaches_its_workers() -> None:
    pod = worker(spec(PLATFORM))
    made = pod["spec"]
    for field in (
        "serviceAccountName",
        "topologySpreadConstraints",
        "resourceClaims",
        "dnsPolicy",
        "dnsConfig",
    ):
        assert made[field] == PLATFORM[field]
    assert made["automountServiceAccountToken"] is False
    assert made["securityContext"] == {**PodSecurity().pod, **PLATFORM["securityContext"]}
    assert made["volumes"][-6:] == PLATFORM["volumes"]
    container = made["containers"][0]
    assert container["volumeMounts"][-2:] == PLATFORM["volumeMounts"]
    assert container["resources"]["claims"] == [{"name": "nic"}]
    assert container["resources"]["limits"], "the role's own stay"


def test_a_pod_that_reads_the_model_has_the_fields_for_its_files() -> None:
    made = model_pod(spec(PLATFORM))["spec"]
    assert made["securityContext"] == {**PodSecurity().pod, **PLATFORM["securityContext"]}
    assert (made["serviceAccountName"], made["dnsPolicy"]) == ("models", "None")
    assert not {"topologySpreadConstraints", "resourceClaims"} & made.keys()
    assert [each["name"] for each in made["volumes"]] == ["scratch", "shm", "model"]


@pytest.mark.parametrize(
    ("bundle", "source"),
    [
        (BUNDLE, {"configMap": {"name": "company", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}),
        (
            {"secretKeyRef": {"name": "company", "key": "ca"}},
            {"secret": {"secretName": "company", "items": [{"key": "ca", "path": "ca.crt"}]}},
        ),
    ],
)
def test_pods_that_fetch_and_serve_mount_the_ca_bundle(
    bundle: dict[str, Any], source: dict[str, Any]
) -> None:
    model = {"uri": "hf://org/model", "cache": {"size": "1Gi"}, "caBundle": bundle}
    for pod in (worker(spec(model=model)), model_pod(spec(model=model))):
        assert {"name": "ca-bundle", **source} in pod["spec"]["volumes"]
        assert mounts(pod)["/etc/heteroinfer/ca-bundle"] == "ca-bundle"
        assert env(pod)[names.ENV_CA_BUNDLE] == "/etc/heteroinfer/ca-bundle/ca.crt"


def test_another_ca_bundle_causes_a_new_fetch_and_without_a_ca_bundle_keys_stay_the_same() -> None:
    model = {"uri": "hf://org/model", "cache": {"size": "1Gi"}}
    plain, trusting = spec(model=model), spec(model={**model, "caBundle": BUNDLE})
    assert model_pod_name(plain, OWNER) == "llama-fetch-10a901296a", "as 5ba4481 named it"
    assert model_pod_name(plain, OWNER) != model_pod_name(trusting, OWNER)
    assert identity.model_key(plain) == identity.model_key(trusting), "the profile holds"
    assert identity.revision(plain) != identity.revision(trusting)


def test_files_of_the_engine_are_in_one_folder() -> None:
    files = [
        {"name": "chat.jinja", "configMapKeyRef": {"name": "a", "key": "x"}},
        {"name": "parser.py", "configMapKeyRef": {"name": "b", "key": "y"}},
    ]
    changed = spec(engine={**RESOURCE.spec.engine.dump(), "files": files})
    pod = worker(changed)
    sources = [
        {"configMap": {"name": "a", "items": [{"key": "x", "path": "chat.jinja"}]}},
        {"configMap": {"name": "b", "items": [{"key": "y", "path": "parser.py"}]}},
    ]
    assert {"name": "files", "projected": {"sources": sources}} in pod["spec"]["volumes"]
    assert mounts(pod)["/etc/heteroinfer/files"] == "files"
    assert "/etc/heteroinfer/files" not in mounts(model_pod(changed))


def test_a_model_in_an_image_is_a_volume() -> None:
    changed = spec(model={"uri": f"oci://registry.test/llama@{DIGEST}#models/a"})
    assert ClusterAddressing().find_model_source(changed, OWNER).path == "/model/models/a"
    volume = {"name": "model", "image": {"reference": f"registry.test/llama@{DIGEST}"}}
    for pod in (worker(changed), model_pod(changed)):
        assert volume in pod["spec"]["volumes"]
        assert mounts(pod)["/model"] == "model"
    said = 'Pod "x" is invalid: spec.volumes[2]: Required value: must specify a volume type'
    advice = "This cluster does not support image volumes"
    assert advice in refusal_message(CreateObject(manifest=model_pod(changed)), said)
    assert advice not in refusal_message(CreateObject(manifest=model_pod(changed)), "denied")
    assert advice not in refusal_message(CreateObject(manifest=model_pod(RESOURCE.spec)), said)


def test_security_contexts_come_from_the_installation() -> None:
    security = PodSecurity(pod={"runAsNonRoot": True}, container={"privileged": False})
    pod = worker(RESOURCE.spec, security=security)["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True}
    assert pod["containers"][0]["securityContext"] == {"privileged": False}


def test_only_listed_service_accounts_are_allowed() -> None:
    found = Allowed().find_forbidden(spec(PLATFORM))
    assert found is not None
    assert found.reason == "ServiceAccountNotAllowed"
    assert "allowedServiceAccounts" in found.message
    assert Allowed(service_accounts=("other", "models")).find_forbidden(spec(PLATFORM)) is None
    assert Allowed(service_accounts=None).find_forbidden(spec(PLATFORM)) is None
