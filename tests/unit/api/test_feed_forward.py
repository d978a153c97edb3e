"""Feed-forward ranks in the resource: what is taken, and what is refused in which words."""

import itertools
from contextlib import suppress
from typing import Any

import pytest

from heteroinfer_operator.api import HeteroInferenceSpec, parse_spec
from heteroinfer_operator.errors import SpecError

OWN = {"cpu": "14", "memory": "64Gi"}


def spec(mode: str = "FeedForward", own: dict[str, Any] | None = OWN, **fields: Any) -> dict[str, Any]:
    role = {"name": "gpu", "device": "GPU", **({"feedForward": own} if own else {}), **fields}
    return {
        "model": {"uri": "pvc://models/moe"},
        "parallelism": {"mode": mode},
        "roles": [role],
    }


def beside(raw: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Returns a spec with a further role of CPUs, with some fields changed."""
    return {**raw, "roles": [*raw["roles"], {"name": "cpus", "device": "CPU", **fields}]}


@pytest.mark.parametrize("own", [None, OWN])
def test_cpu_roles_have_feed_forward_ranks_in_pods_of_their_own(own: dict[str, Any] | None) -> None:
    parsed: HeteroInferenceSpec = parse_spec(beside(spec(own=own), pods=3, ranksPerPod=2))
    assert [role.name for role in parsed.stage_roles] == ["gpu"]
    assert parsed.world_size == 7
    sizes = {"mode": "FeedForward", "tensor": 1, "pipeline": 1}
    assert parse_spec({**beside(spec(own=own), pods=3), "parallelism": sizes}).world_size == 4


def test_a_role_with_feed_forward_ranks_is_one_rank_of_vllm() -> None:
    parsed: HeteroInferenceSpec = parse_spec(spec())
    assert (parsed.world_size, parsed.roles[0].pod_ranks) == (1, 2)
    assert parse_spec(spec(own={**OWN, "ranks": 2, "layers": 6})).roles[0].pod_ranks == 3


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (spec(mode="Pipeline"), "must be FeedForward or Auto, because a role sets feedForward"),
        (spec(own=None), "must not be FeedForward without feed-forward ranks"),
        (beside(spec(own=None), pods=2, layers=[4]), "roles: must not set layers in mode FeedForward"),
        (
            beside(spec(), feedForward=OWN),
            "exactly one role must have device GPU or feedForward, with pods: 1",
        ),
        (beside(spec(own=None), device="GPU"), "must have all GPUs in one pod"),
        (spec(pods=2), "must have all GPUs in one pod"),
        (spec(device="CPU", own=None), "exactly one role must have device GPU or feedForward"),
        (spec(ranksPerPod=2), "feedForward.ranks must be a multiple of ranksPerPod"),
        (spec(ranksPerPod=2, own={**OWN, "ranks": 3}), "must be a multiple of ranksPerPod"),
        (beside(spec(ranksPerPod=2, own={**OWN, "ranks": 2})), "the GPU role must be the only role"),
        (beside(spec(ranksPerPod=2, own=None)), "the GPU role must be the only role"),
        (spec(layers=[4]), "Set feedForward.layers"),
        (spec(own={**OWN, "ranks": 0}), "feedForward.ranks: must be greater than or equal to 1"),
        (
            spec(own={**OWN, "ranks": 16}),
            "ranksPerPod: the sum of ranksPerPod and feedForward.ranks must be at most 16",
        ),
        (spec(own={**OWN, "layers": 0}), "feedForward.layers: must be greater than or equal to 1"),
        (spec(own={"cpu": "14"}), "memory"),
    ],
)
def test_impossible_feed_forward_settings_are_refused_with_a_reason(raw: dict[str, Any], words: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse_spec(raw)
    assert words in caught.value.message


def test_tensor_must_be_the_gpus_and_pipeline_must_be_one() -> None:
    sizes = {"mode": "FeedForward", "tensor": 1, "pipeline": 1}
    assert parse_spec({**spec(), "parallelism": sizes}).world_size == 1
    with pytest.raises(SpecError, match=r"parallelism\.pipeline: must be 1 or unset in mode FeedForward"):
        parse_spec({**spec(), "parallelism": {**sizes, "pipeline": 2}})
    two = spec(ranksPerPod=2, own={**OWN, "ranks": 4})
    assert parse_spec(two).roles[0].pod_ranks == 6
    assert parse_spec({**two, "parallelism": {**sizes, "tensor": 2}}).world_size == 2
    with pytest.raises(SpecError, match=r"parallelism\.tensor: .* must be unset or equal to ranksPerPod"):
        parse_spec({**two, "parallelism": sizes})


_ROLES = [
    {"device": device, "pods": pods, "ranksPerPod": ranks, **own, **layers}
    for device in ("CPU", "GPU")
    for pods, ranks in ((1, 1), (2, 1), (1, 2))
    for own in ({}, {"feedForward": OWN})
    for layers in ({}, {"layers": [4]})
]
_SIZES = [(tensor, pipeline) for tensor in (None, 1, 2) for pipeline in (None, 2)]


@pytest.mark.parametrize("mode", [None, "Auto", "FeedForward", "Pipeline", "Tensor"])
def test_every_combination_of_roles_and_sizes_is_parsed_or_refused(mode: str | None) -> None:
    one_role = [(role,) for role in _ROLES]
    for roles, (tensor, pipeline) in itertools.product(
        [*one_role, *itertools.product(_ROLES[::3], _ROLES[::2])], _SIZES
    ):
        sizes = {"mode": mode, "tensor": tensor, "pipeline": pipeline}
        named = [{"name": f"role-{index}", **role} for index, role in enumerate(roles)]
        raw = {
            "model": {"uri": "pvc://models/moe"},
            "parallelism": {name: value for name, value in sizes.items() if value is not None},
            "roles": named,
        }
        with suppress(SpecError):
            parse_spec(raw)
