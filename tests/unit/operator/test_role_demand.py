"""Demands of pods with feed-forward ranks."""

from typing import Any

import pytest

from heteroinfer_contract.plan import Device
from heteroinfer_operator.api import HeteroInferenceSpec, parse_spec
from heteroinfer_operator.nodes.role_demand import role_demand, role_fields, role_resources


def spec(resources: dict[str, Any] | None, **template: Any) -> HeteroInferenceSpec:
    own = {"ranks": 2, "cpu": "7", "memory": "32Gi"}
    role = {"name": "gpu", "device": "GPU", "feedForward": own, "template": template or None}
    role = {key: value for key, value in {**role, "resources": resources}.items() if value is not None}
    return parse_spec(
        {"model": {"uri": "pvc://models/moe"}, "parallelism": {"mode": "FeedForward"}, "roles": [role]}
    )


@pytest.mark.parametrize(
    ("given", "requests", "limits"),
    [
        (None, {"cpu": "14", "memory": "64Gi"}, {}),
        (
            {"requests": {"cpu": "2500m", "memory": "8Gi"}, "limits": {"memory": "8Gi"}},
            {"cpu": "16500m", "memory": "72Gi"},
            {"memory": "72Gi"},
        ),
        # A limit without a request counts as a request.
        (
            {"limits": {"cpu": "2", "memory": "512Mi"}},
            {"cpu": "16", "memory": "66048Mi"},
            {"cpu": "16", "memory": "66048Mi"},
        ),
    ],
)
def test_the_amounts_of_feed_forward_ranks_are_added(
    given: dict[str, Any] | None, requests: dict[str, str], limits: dict[str, str]
) -> None:
    gpu = {"nvidia.com/gpu": "1"}
    resources = role_resources(spec(given).roles[0], Device.GPU)
    assert resources == {"requests": {**requests, **gpu}, "limits": {**limits, **gpu}}


def test_the_pods_demand_includes_feed_forward_ranks() -> None:
    parsed = spec({"requests": {"cpu": "2", "memory": "8Gi"}})
    asked = role_demand(parsed, parsed.roles[0], Device.GPU).requests
    assert (asked["cpu"], asked["memory"], asked["nvidia.com/gpu"]) == (16, 72 * 2**30, 1)


def test_shared_gpus_are_excluded_in_each_affinity_alternative() -> None:
    zones = [{"key": "zone", "operator": "In", "values": [zone]} for zone in ("a", "b")]
    required = {"nodeSelectorTerms": [{"matchExpressions": [zone]} for zone in zones]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    unshared_gpu_requirement = {
        "key": "nvidia.com/gpu.sharing-strategy",
        "operator": "NotIn",
        "values": ["time-slicing", "mps"],
    }
    parsed = spec(None, affinity=affinity)
    fields = role_fields(parsed, parsed.roles[0], Device.GPU)
    terms = fields["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [term["matchExpressions"] for term in terms["nodeSelectorTerms"]] == [
        [zone, unshared_gpu_requirement] for zone in zones
    ]
    # A role on CPUs has no GPU to share.
    assert role_fields(parsed, parsed.roles[0], Device.CPU)["affinity"] == affinity
