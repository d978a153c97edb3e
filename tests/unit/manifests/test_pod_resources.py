"""Resources of pods: the spec's override the installation's, whose defaults are in no revision."""

from typing import Any

import pytest

from heteroinfer_contract.plan import Device
from heteroinfer_operator.api import HeteroInferenceSpec, Resources, parse_spec
from heteroinfer_operator.cluster import CreateObject, ResourceKey
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.kube.child_errors import refusal_message
from heteroinfer_operator.manifests import identity
from heteroinfer_operator.manifests.addressing import ClusterAddressing
from heteroinfer_operator.manifests.identity import Owner
from heteroinfer_operator.manifests.model_pods import build_model_pod, model_pod_name
from heteroinfer_operator.manifests.pod_resources import PodResources, add_defaults
from heteroinfer_operator.manifests.worker_pods import WorkerImages, build_volumes
from heteroinfer_operator.nodes.role_demand import role_resources

OWNER = Owner(key=ResourceKey(namespace="team", name="llama"), uid="0000-uid")
IMAGES = WorkerImages(cpu="cpu:1", gpu="gpu:1")
LIMITED = PodResources.from_json(
    '{"fetch": {"limits": {"cpu": 2, "ephemeral-storage": "1Gi"}},'
    ' "inspect": {"limits": {"cpu": 0.5, "memory": "1Gi", "ephemeral-storage": "32Gi"}},'
    ' "worker": {"requests": {"cpu": "1"}, "limits": {"cpu": "2", "memory": "4Gi"}}}'
)


def spec_of(uri: str = "pvc://models/small", resources: Any = None, **model: Any) -> HeteroInferenceSpec:
    role: dict[str, Any] = {"name": "cpu", "device": "CPU"}
    if resources is not None:
        role["resources"] = resources
    return parse_spec({"model": {"uri": uri, **model}, "roles": [role]})


def model_pod(spec: HeteroInferenceSpec) -> tuple[dict[str, Any], str]:
    """Returns the resources of the pod for a model, and the size limit of its scratch volume."""
    source = ClusterAddressing().find_model_source(spec, OWNER)
    pod = build_model_pod(spec, OWNER, source, IMAGES, LIMITED)["spec"]
    scratch = next(each for each in pod["volumes"] if each["name"] == "scratch")
    return pod["containers"][0]["resources"], scratch["emptyDir"]["sizeLimit"]


def test_the_specs_resources_for_the_model_pod_override_the_installations() -> None:
    assert model_pod(spec_of()) == (
        {"limits": {"cpu": "0.5", "memory": "1Gi", "ephemeral-storage": "32Gi"}},
        "16Gi",
    )
    hub: dict[str, Any] = {"uri": "hf://acme/llama", "cache": {"size": "1Gi"}}
    assert model_pod(spec_of(**hub)) == ({"limits": {"cpu": "2", "ephemeral-storage": "1Gi"}}, "1Gi")
    spec = parse_spec({**spec_of().dump(), "model": {**hub, "resources": {"limits": {"cpu": "3"}}}})
    assert model_pod(spec) == ({"limits": {"ephemeral-storage": "1Gi", "cpu": "3"}}, "1Gi")


def shm_sizes(spec: HeteroInferenceSpec, resources: PodResources) -> tuple[str, str]:
    """Returns the size limits of /dev/shm in the pod that reads the model, and in the worker pod."""
    source = ClusterAddressing().find_model_source(spec, OWNER)
    model_pod = build_model_pod(spec, OWNER, source, IMAGES, resources)
    worker = build_volumes(spec, source, role_resources(resources.complete_roles(spec).roles[0], Device.CPU))
    volumes = {"model": model_pod["spec"]["volumes"], "worker": worker}
    found = {name: next(v for v in each if v["name"] == "shm")["emptyDir"] for name, each in volumes.items()}
    assert {each["medium"] for each in found.values()} == {"Memory"}
    return found["model"]["sizeLimit"], found["worker"]["sizeLimit"]


@pytest.mark.parametrize(
    ("engine", "limits", "size"),
    [
        ({}, None, "8Gi"),
        ({}, {"memory": "3Gi"}, "3Gi"),
        ({}, {"memory": "0"}, "8Gi"),
        ({}, {"memory": "64Gi"}, "8Gi"),
        ({"shmSize": "512Mi"}, {"memory": "3Gi"}, "512Mi"),
        ({"shmSize": "28Gi"}, {"memory": "3Gi"}, "3Gi"),
    ],
    ids=["no limit", "below the default", "a limit of 0", "above the default", "smaller", "larger"],
)
def test_shared_memory_is_at_most_the_memory_limit_of_its_pod(
    engine: dict[str, str], limits: dict[str, str] | None, size: str
) -> None:
    """The kubelet mounts the volume with the lower of both limits, so the pod shows this size."""
    role = {"name": "cpu", "device": "CPU", **({"resources": {"limits": limits}} if limits else {})}
    spec = parse_spec({"model": {"uri": "pvc://models/small"}, "engine": engine, "roles": [role]})
    inspect_size = "512Mi"  # memory limit of the pod that reads the model, without a value of the chart
    assert shm_sizes(spec, PodResources()) == (inspect_size, size)


def test_shared_memory_is_at_most_the_memory_limit_of_the_installation() -> None:
    assert shm_sizes(spec_of(), LIMITED) == ("1Gi", "4Gi")


def test_defaults_stay_within_the_users_requests_and_limits() -> None:
    completed = LIMITED.complete_roles(spec_of(resources={"requests": {"cpu": "8"}}))
    assert completed.roles[0].resources == Resources(
        requests={"cpu": "8"}, limits={"cpu": "8", "memory": "4Gi"}
    )
    small = add_defaults(Resources(limits={"cpu": "500m"}), LIMITED.worker)
    assert small == {"requests": {"cpu": "500m"}, "limits": {"memory": "4Gi", "cpu": "500m"}}


@pytest.mark.parametrize("uri", ["pvc://models/small", "hf://acme/llama"])
def test_other_resources_for_the_model_pod_create_another_pod_and_no_revision(uri: str) -> None:
    cache = {"cache": {"size": "1Gi"}} if uri.startswith("hf") else {}
    without, given = spec_of(uri, **cache), spec_of(uri, **cache)
    resources = Resources(limits={"cpu": "1"})
    given = given.changed(model=given.model.changed(resources=resources))
    assert identity.revision(given) == identity.revision(without)
    assert identity.model_key(given) == identity.model_key(without)
    assert model_pod_name(given, OWNER) != model_pod_name(without, OWNER)
    assert identity.labels_of_name(OWNER, model_pod_name(given, OWNER)) is not None


def test_an_installation_without_defaults_does_not_change_a_spec() -> None:
    spec = spec_of()
    assert PodResources().complete_roles(spec) is spec


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[", "must be JSON"),
        ('{"workers": {}}', "must be an object with only the keys fetch, inspect, worker"),
        ('{"worker": {"limits": {"cpu": "many"}}}', r"worker\.limits\.cpu"),
        (
            '{"fetch": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}}',
            "fetch.requests: must not exceed limits",
        ),
    ],
)
def test_invalid_pod_resources_are_reported_with_the_chart_value(text: str, said: str) -> None:
    with pytest.raises(
        HeteroInferError,
        match=rf"HETEROINFER_POD_RESOURCES \(podResources of the chart\): .*{said}.*Correct podResources",
    ):
        PodResources.from_json(text)


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("failed quota: q: must specify limits.cpu for: worker", "Set spec.model.resources, or podResources"),
        (
            "exceeded quota: q, requested: limits.cpu=1",
            "Raise the quota q of namespace team, or lower spec.model",
        ),
        (
            "cpu max limit to request ratio per Container is 1, but provided ratio is 4",
            "podResources.inspect",
        ),
        ("minimum memory usage per Container is 256Mi, but request is 128Mi", "podResources.inspect"),
        ("serviceaccount default not found", "not found"),
    ],
)
def test_a_refusal_names_the_field_to_change(said: str, advice: str) -> None:
    spec = spec_of()
    pod = build_model_pod(spec, OWNER, ClusterAddressing().find_model_source(spec, OWNER), IMAGES)
    assert advice in refusal_message(CreateObject(manifest=pod), said)


def test_a_policy_of_another_controller_does_not_count_as_a_quota() -> None:
    spec = spec_of()
    pod = build_model_pod(spec, OWNER, ClusterAddressing().find_model_source(spec, OWNER), IMAGES)
    said = 'admission webhook "validate.kyverno.svc" denied the request: pods must specify the label team'
    assert refusal_message(CreateObject(manifest=pod), said).endswith(said)
