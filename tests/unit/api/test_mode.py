"""A spec without a mode: its revision, the modes that it may get, and the spec of a mode."""

from typing import Any

import pytest

from heteroinfer_contract.plan import Mode
from heteroinfer_operator.api import (
    ChosenMode,
    FeedForwardSpec,
    HeteroInferenceSpec,
    candidate_modes,
    infer_mode,
    parse_spec,
    parse_stored_spec,
)
from heteroinfer_operator.errors import SpecError
from heteroinfer_operator.manifests import identity

OWN = {"cpu": "14", "memory": "64Gi"}
PODS = "FeedForward, CPU pods"


def role(name: str, cpu: str = "16", memory: str = "64Gi", **fields: Any) -> dict[str, Any]:
    return {
        "name": name,
        "device": name.upper()[:3],
        "resources": {"requests": {"cpu": cpu, "memory": memory}},
        **fields,
    }


def spec(*roles: dict[str, Any], **fields: Any) -> HeteroInferenceSpec:
    return parse_spec({"model": {"uri": "pvc://models/m"}, "roles": list(roles), **fields})


def titles(*roles: dict[str, Any]) -> list[str]:
    return [each.title for each in candidate_modes(spec(*roles))[0]]


def test_auto_equals_an_unset_mode_and_its_revision_differs_from_that_of_pipeline() -> None:
    absent, auto, stored = (
        spec(role("cpu"), **fields)
        for fields in ({}, {"parallelism": {"mode": "Auto"}}, {"parallelism": {"mode": "Pipeline"}})
    )
    assert absent == auto
    assert absent.parallelism.mode is None
    assert identity.revision(absent) == identity.revision(auto) != identity.revision(stored)
    assert identity.first_revision(absent) != identity.first_revision(stored)


def test_a_stored_spec_keeps_its_mode_and_its_absence() -> None:
    for fields in ({}, {"parallelism": {"mode": "Tensor"}}):
        parsed = spec(role("cpu"), **fields)
        assert parse_stored_spec(parsed.dump()) == parsed


def test_a_role_may_offer_feed_forward_ranks_without_a_mode() -> None:
    assert spec(role("gpu", feedForward=OWN)).parallelism.mode is None
    with pytest.raises(SpecError, match="must be FeedForward or Auto"):
        spec(role("gpu", feedForward=OWN), parallelism={"mode": "Pipeline"})


@pytest.mark.parametrize(
    ("roles", "expected"),
    [
        ([role("gpu")], ["Pipeline"]),
        ([role("cpu")], ["Pipeline"]),
        ([role("cpu", pods=2)], ["Pipeline", "Tensor"]),
        ([role("gpu", ranksPerPod=2)], ["Pipeline", "Tensor"]),
        ([role("gpu"), role("cpu")], ["GPU only", "FeedForward", PODS, "Pipeline", "Tensor"]),
        ([role("gpu", feedForward=OWN)], ["GPU only", "FeedForward"]),
        (
            [role("gpu", feedForward=OWN), role("cpu")],
            ["GPU only", "FeedForward", PODS, "Pipeline", "Tensor"],
        ),
        ([role("gpu", pods=2), role("cpu")], ["GPU only", "GPU only, mode Tensor", "Pipeline", "Tensor"]),
        ([role("cpu", feedForward=OWN)], ["FeedForward", "Pipeline"]),
    ],
)
def test_roles_decide_which_modes_are_candidates(roles: list[dict[str, Any]], expected: list[str]) -> None:
    assert titles(*roles) == expected


def moved(*roles: dict[str, Any]) -> tuple[FeedForwardSpec | None, str]:
    modes, refused = candidate_modes(spec(*roles))
    return next((each.feed_forward for each in modes if each.mode is Mode.FEED_FORWARD), None), refused


def test_feed_forward_ranks_get_exactly_the_resources_of_the_cpu_roles() -> None:
    own, _ = moved(role("gpu"), role("cpu", cpu="16", memory="64Gi", pods=2, ranksPerPod=2))
    assert own == FeedForwardSpec(ranks=4, cpu="8", memory="32768Mi")
    own, _ = moved(role("gpu"), role("cpu", cpu="7", memory="10Gi"), role("cpus", cpu="4", memory="5Gi"))
    assert own == FeedForwardSpec(ranks=2, cpu="5500m", memory="7680Mi")


def test_feed_forward_ranks_are_divided_equally_among_gpus() -> None:
    own, _ = moved(role("gpu", ranksPerPod=2), role("cpu", cpu="15", memory="60Gi"))
    assert own == FeedForwardSpec(ranks=2, cpu="7500m", memory="30720Mi")
    own, _ = moved(role("gpu", ranksPerPod=2), role("cpu", cpu="8", memory="64Gi", pods=3))
    assert own == FeedForwardSpec(ranks=4, cpu="6", memory="49152Mi")


@pytest.mark.parametrize(
    ("roles", "words"),
    [
        ([role("gpu"), {"name": "cpu", "device": "CPU"}], "needs requests of cpu in role cpu"),
        ([role("gpu"), role("cpu", pods=16)], "supports at most 15 CPU ranks"),
        ([role("gpu", pods=2), role("cpu")], "needs all GPUs in one pod (the roles have 2 GPU pods)"),
        ([role("gpu")], "needs CPUs and memory in the GPU's pod"),
    ],
)
def test_reports_why_cpus_cannot_move_to_the_gpus_pod(roles: list[dict[str, Any]], words: str) -> None:
    own, refused = moved(*roles)
    assert own is None
    assert words in refused


def test_the_spec_of_a_mode_has_only_the_roles_that_it_uses() -> None:
    given = spec(role("gpu"), role("cpu"))
    for each in candidate_modes(given)[0]:
        resolved = each.apply_to(given)
        assert resolved.parallelism.mode is each.mode
        only_gpu = each.gpu_only or (each.mode is Mode.FEED_FORWARD and not each.keeps_cpu_pods)
        assert [own.name for own in resolved.roles] == (["gpu"] if only_gpu else ["gpu", "cpu"])
        moves = each.mode is Mode.FEED_FORWARD and not each.keeps_cpu_pods
        assert (resolved.roles[0].feed_forward is not None) is moves


def test_the_mode_of_a_lost_record_follows_from_the_plan() -> None:
    given = spec(role("gpu"), role("cpu"))
    assert infer_mode(given, ["gpu"], Mode.PIPELINE) == ChosenMode(mode=Mode.PIPELINE, gpu_only=True)
    assert infer_mode(given, ["cpu", "gpu"], Mode.TENSOR) == ChosenMode(mode=Mode.TENSOR)
    feed_forward = infer_mode(given, ["gpu"], Mode.FEED_FORWARD)
    assert feed_forward is not None
    assert feed_forward.feed_forward == FeedForwardSpec(ranks=1, cpu="16", memory="65536Mi")
    pods = infer_mode(given, ["gpu", "cpu"], Mode.FEED_FORWARD)
    assert pods == ChosenMode(mode=Mode.FEED_FORWARD, keeps_cpu_pods=True)
    assert infer_mode(given, ["other"], Mode.PIPELINE) is None
