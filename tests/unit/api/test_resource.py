"""The resource: what is taken, what is refused, and in which words."""

from typing import Any

import pytest

from heteroinfer_operator.api import (
    Device,
    HeteroInferenceSpec,
    ModelSpec,
    RoleSpec,
    parse_resource,
    parse_spec,
    parse_stored_spec,
)
from heteroinfer_operator.errors import SpecError


def cpu(**fields: Any) -> dict[str, Any]:
    return {"name": "cpu", "device": "CPU", **fields}


def gpu(**fields: Any) -> dict[str, Any]:
    return {"name": "gpu", "device": "GPU", **fields}


def spec(**fields: Any) -> dict[str, Any]:
    return {"model": {"uri": "hf://org/model"}, "roles": [cpu(), gpu()], **fields}


def resource(name: str = "llama", **fields: Any) -> dict[str, Any]:
    return {
        "apiVersion": "heteroinfer.dev/v1alpha1",
        "kind": "HeteroInference",
        "metadata": {"name": name},
        "spec": spec(**fields),
    }


def problems(raw: dict[str, Any]) -> str:
    with pytest.raises(SpecError) as caught:
        parse_spec(raw)
    return caught.value.message


def test_an_omitted_field_has_its_documented_default() -> None:
    parsed = parse_spec(spec())
    assert (parsed.replicas, parsed.suspend, parsed.engine.port, parsed.engine.shm_size) == (
        1,
        False,
        8000,
        "8Gi",
    )
    assert (parsed.parallelism.mode, parsed.parallelism.stage_order, parsed.engine.dtype) == (
        None,
        "Auto",
        "auto",
    )
    assert parsed.planning.load is None
    assert (parsed.planning.on_gpu_shortage.action, parsed.planning.on_gpu_shortage.after) == ("Wait", "10m")
    assert (parsed.restart.max_restarts, parsed.restart.window, parsed.restart.backoff_max) == (5, "1h", "5m")
    assert (parsed.startup.timeout, parsed.drain_timeout, parsed.network.rendezvous_port) == (
        "30m",
        "60s",
        29500,
    )
    assert [role.num_ranks for role in parsed.roles] == [1, 1]
    assert parsed.roles[1].gpu_resource == "nvidia.com/gpu"


def test_a_dump_has_the_spelling_of_the_resource_and_no_nulls() -> None:
    dumped = parse_resource(resource(planning={"onGPUShortage": {"action": "CPUOnly"}})).dump()
    assert dumped["spec"]["planning"] == {"onGPUShortage": {"action": "CPUOnly", "after": "10m"}}
    assert "layers" not in dumped["spec"]["roles"][0]
    assert parse_resource(dumped).dump() == dumped


def test_spec_classes_are_built_with_python_names() -> None:
    built = HeteroInferenceSpec(
        model=ModelSpec(uri="hf://org/model"),
        roles=(RoleSpec(name="cpu", device=Device.CPU, ranks_per_pod=2),),
    )
    assert parse_spec(built.dump()) == built


@pytest.mark.parametrize("amount", [-1, 1.5, True, 10**15, [1]])
def test_refuses_a_quantity_that_is_negative_fractional_too_large_or_no_number(amount: Any) -> None:
    bad = cpu(resources={"limits": {"cpu": amount}})
    assert problems(spec(roles=[bad])).startswith("spec.roles[0].resources.limits.cpu")


def test_a_null_in_an_unknown_field_is_an_unknown_field() -> None:
    assert problems(spec(nothing=None)).startswith("spec.nothing: unknown field")


def test_null_means_that_the_field_is_absent() -> None:
    assert parse_spec(spec(replicas=None, engine=None, restartedAt=None)) == parse_spec(spec())


def test_an_integer_is_a_quantity() -> None:
    limits = {"cpu": 4, "memory": "8Gi", "example.com/x": 2.0}
    parsed = parse_spec(spec(roles=[cpu(resources={"limits": limits})]))
    assert parsed.roles[0].resources is not None
    assert parsed.roles[0].resources.limits == {"cpu": "4", "memory": "8Gi", "example.com/x": "2"}


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        # The issue's own list.
        (
            spec(parallelism={"tensor": 2, "pipeline": 3}, roles=[cpu(ranksPerPod=2), gpu(ranksPerPod=2)]),
            (
                "spec.parallelism: tensor x pipeline must be the number of ranks, the sum of pods x "
                "ranksPerPod over roles (got tensor 2 x pipeline 3 and roles with 4 ranks). Change the "
                "roles, or remove tensor and pipeline"
            ),
        ),
        (
            spec(parallelism={"pipeline": 3}),
            (
                "spec.parallelism.pipeline: must divide the number of ranks, the sum of pods x "
                "ranksPerPod over roles (got pipeline 3 and roles with 2 ranks). Change the roles, or "
                "remove pipeline"
            ),
        ),
        (
            spec(roles=[cpu(layer=[1])]),
            "spec.roles[0].layer: unknown field. Remove the field, or write layers",
        ),
        (
            spec(gpu=1),
            (
                "spec.gpu: unknown field. Remove the field, or correct its name (see "
                "`kubectl explain hinf.spec`)"
            ),
        ),
        (
            spec(parallelism={"mode": "pipeline"}),
            "spec.parallelism.mode: must be 'Auto', 'Pipeline', 'Tensor' or 'FeedForward' (got 'pipeline')",
        ),
        (
            spec(roles=[cpu(pods=0)]),
            "spec.roles[0].pods: must be greater than or equal to 1 (got 0)",
        ),
        # The other rules.
        (
            spec(roles=[cpu(ranksPerPod=0)]),
            "spec.roles[0].ranksPerPod: must be greater than or equal to 1 (got 0)",
        ),
        (
            spec(roles=[cpu(layers=[3, 0], pods=2)]),
            "spec.roles[0].layers[1]: must be greater than or equal to 1 (got 0)",
        ),
        (
            spec(roles=[cpu(deviceMemory="8Gi")]),
            (
                "spec.roles[0].device: must be GPU if deviceResourceName or deviceMemory is set (got CPU in "
                "role cpu). Remove deviceResourceName and deviceMemory; resources sets the memory of a CPU "
                "role"
            ),
        ),
        (
            spec(roles=[cpu(), gpu(cpuBinding="Always")]),
            (
                "spec.roles[1].cpuBinding: must be Auto or unset for device GPU, because its ranks "
                "compute on GPUs (got Always in role gpu). Remove cpuBinding"
            ),
        ),
        (
            spec(roles=[cpu(), cpu()]),
            "spec.roles: each name must be unique (got cpu twice). Rename or remove one entry",
        ),
        (
            spec(roles=[cpu(layers=[1]), gpu()]),
            (
                "spec.roles: must set layers either in all roles or in no role. Add layers to the other "
                "roles, or remove all layers"
            ),
        ),
        (
            spec(parallelism={"mode": "Pipeline", "tensor": 2}, roles=[cpu(pods=2)]),
            (
                "spec.parallelism.tensor: must divide ranksPerPod of each role, because the ranks of a "
                "stage share one pod (got 2). Make each ranksPerPod a multiple of tensor"
            ),
        ),
        (
            spec(parallelism={"tensor": 1}, roles=[cpu(layers=[1, 2])]),
            (
                "spec.roles: layers must have one entry for each stage of the role, that is pods x "
                "ranksPerPod / tensor entries. Add or remove entries, or change pods, ranksPerPod or "
                "parallelism.tensor"
            ),
        ),
        (
            spec(roles=[cpu(name=f"r{i}", pods=64, ranksPerPod=16) for i in range(2)]),
            (
                "spec.roles: must have at most 256 ranks, the sum of pods x ranksPerPod (got 2048). "
                "Use fewer pods, or fewer ranksPerPod"
            ),
        ),
        (
            spec(engine={"port": 29500}),
            (
                "spec.engine.port: must not be network.rendezvousPort or a port that workers use: "
                "8081, 29499, 29501 or 9400-9415 (got 29500). Choose another port"
            ),
        ),
        (
            spec(model={"uri": "s3://bucket/model"}),
            (
                "spec.model.uri: must be hf://ORG/MODEL, pvc://CLAIM/PATH, "
                "oci://REGISTRY/NAME@sha256:DIGEST#FOLDER or file:///ABSOLUTE/PATH (got "
                "s3://bucket/model)"
            ),
        ),
        (
            spec(model={"uri": "file:///models/../etc"}),
            (
                "spec.model.uri: must be a path without '..' (got file:///models/../etc). Write the path "
                "without '..'"
            ),
        ),
        (
            spec(model={"uri": "pvc://claim", "revision": "main"}),
            (
                "spec.model.uri: must be an hf:// model if revision, tokenSecretRef or cache is set "
                "(got pvc://claim). Remove revision, tokenSecretRef and cache"
            ),
        ),
        (
            spec(model={"uri": "hf://a/b", "cache": {"claimName": "x", "size": "1Gi"}}),
            "spec.model.cache: must set either claimName (for an existing claim) or size (for a new claim)",
        ),
        (
            spec(model={"uri": "hf://a/b", "cache": {"size": "0.0Gi"}}),
            "spec.model.cache.size: must be more than 0. Set the size of the model's files, such as 40Gi",
        ),
        (
            spec(model={"uri": "hf://a/b", "cache": {"claimName": "x", "accessMode": "ReadWriteMany"}}),
            (
                "spec.model.cache.claimName: must be unset if storageClassName or accessMode is set, "
                "because both are for a new claim. Remove storageClassName and accessMode, or replace "
                "claimName by size"
            ),
        ),
        (
            spec(engine={"env": [{"name": "HETEROINFER_PLAN", "value": "x"}]}),
            (
                "spec.engine.env[0].name: must not be a variable that HeteroInfer reserves "
                "(got HETEROINFER_PLAN). Remove the variable. The fields roles[].device, roles[].layers and "
                "network.interface set the device, the layers and the network interface"
            ),
        ),
        (
            spec(engine={"env": [{"name": "TZ"}]}),
            "spec.engine.env[0]: must set exactly one of value and valueFrom (got TZ)",
        ),
        (
            spec(engine={"env": [{"name": "TZ", "valueFrom": {}}]}),
            "spec.engine.env[0].valueFrom: must set exactly one of secretKeyRef and configMapKeyRef",
        ),
        (
            spec(roles=[cpu(template={"labels": {"heteroinfer.dev/group": "1"}})]),
            (
                "spec.roles[0].template.labels: must not have heteroinfer.dev/* or "
                "app.kubernetes.io/managed-by, which the operator sets. Remove these keys"
            ),
        ),
        ({"roles": [cpu()]}, "spec.model: required field is missing. Set this field"),
        (spec(replicas="2"), "spec.replicas: must be a valid integer (got '2')"),
        (spec(roles=[cpu(device="TPU")]), "spec.roles[0].device: must be 'CPU' or 'GPU' (got 'TPU')"),
    ],
)
def test_bad_input_is_refused_with_a_message(raw: dict[str, Any], expected: str) -> None:
    assert problems(raw) == expected


def test_each_problem_of_a_resource_is_reported_on_its_own_line() -> None:
    raw = spec(replica=2, roles=[cpu(pods=0), gpu(device="TPU")])
    assert [line.split(":")[0] for line in problems(raw).splitlines()] == [
        "spec.roles[0].pods",
        "spec.roles[1].device",
        "spec.replica",
    ]


def test_a_name_that_makes_host_names_too_long_is_refused() -> None:
    assert parse_resource(resource("a" * 40)).metadata.name == "a" * 40
    with pytest.raises(SpecError) as caught:
        parse_resource(resource("a" * 41))
    assert caught.value.message == (
        "metadata: name must have at most 40 characters, because pod names, NAME-GROUP-EPOCH-POD, "
        "have at most 63 (got 41 characters). Choose a shorter name"
    )


@pytest.mark.parametrize("name", ["1llama", "llama.3", "-x", "Llama", "x-"])
def test_a_name_that_services_cannot_have_is_refused(name: str) -> None:
    with pytest.raises(
        SpecError, match="name must consist of lower-case letters, digits and '-', and start with a letter"
    ):
        parse_resource(resource(name))


def test_another_kind_is_refused() -> None:
    with pytest.raises(SpecError, match=r"^kind: must be 'HeteroInference' \(got 'Deployment'\)$"):
        parse_resource({**resource(), "kind": "Deployment"})


def test_a_name_of_maximum_length_fits_every_host_name() -> None:
    # 64 groups, 16 roles of 64 pods; a billion epochs are 31 years of one a second.
    assert len(f"{'a' * 40}-{63}-{10**9}-{16 * 64 - 1}") <= 63


def test_a_spec_that_is_too_large_is_refused_with_a_reason() -> None:
    requirement = {"key": "zone", "operator": "In", "values": [f"{i:02}{'v' * 61}" for i in range(32)]}
    terms = [{"matchExpressions": [requirement] * 16}] * 10
    affinity = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    }
    roles = [
        {"name": "cpu", "device": "CPU"},
        {"name": "b", "device": "CPU", "template": {"affinity": affinity}},
    ]
    spec = {"model": {"uri": "pvc://models/tiny"}, "roles": roles}
    with pytest.raises(SpecError) as caught:
        parse_spec(spec)
    assert "must be at most 256 KiB" in caught.value.message
    assert " KiB in roles[1])" in caught.value.message
    assert parse_stored_spec(spec).roles[1].name == "b", "what is stored is read all the same"


def test_new_limits_of_pod_fields_do_not_refuse_stored_specs() -> None:
    template = {
        "labels": {"team name": "a b"},
        "tolerations": [{"effect": "NoSchedule"}],
        "runtimeClassName": "a..b",
    }
    roles = [{"name": "cpu", "device": "CPU", "template": template}]
    spec = {"model": {"uri": "pvc://models/tiny"}, "roles": roles, "engine": {"image": "a b"}}
    with pytest.raises(SpecError):
        parse_spec(spec)
    assert parse_stored_spec(spec).engine.image == "a b"
