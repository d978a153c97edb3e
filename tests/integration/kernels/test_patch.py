"""The patch `cpu_linear`, through the layers of the pinned vLLM that consume what it replaces."""

import shutil
from pathlib import Path

import pytest

from heteroinfer_contract.model import Scheme, SchemeName
from heteroinfer_operator.planning.packing import packed_ratio, packed_ratio_for_amx
from tests.integration.kernels.instructions import SETS, of_this_cpu
from tests.integration.kernels.probe_answers import ask, ask_forked
from tests.seams import VLLM_VERSION
from vllm_heteroinfer.kernels import build
from vllm_heteroinfer.patches.registry import CPU_LINEAR, PATCHES

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(1200)]

PROBE = "tests.integration.kernels.layers_probe"
ROUNDING = 2.0**-7
"""Of the largest output, in bf16."""
ROTARY = 1e-5
"""In float32."""


@pytest.fixture(autouse=True)
def kernels() -> None:
    build.build()


def test_the_patch_applies_once_and_can_be_reverted() -> None:
    answer = ask_forked(PROBE, "patch")
    assert answer["applied"]
    assert answer["twice"]
    assert answer["reverted"]
    missing, changed, newer = answer["refusals"]
    assert "got nothing in vLLM" in missing
    assert "got parameters (layer)" in changed
    assert "got an unverified version of the function in vLLM 0.33.0+cpu)" in newer
    assert all("HETEROINFER_CPU_LINEAR=onednn" in text for text in (missing, changed, newer))


def test_the_patch_serves_linear_layers(usable: list[str]) -> None:
    answer = ask_forked(PROBE, "linear_layers", *usable)
    assert answer["served"] == [True, True, False, False]
    assert all(gap < ROUNDING for gap in answer["gaps"])
    served, left = answer["said"]  # once each, whatever the number of layers
    paths = ", ".join(of_this_cpu() or SETS)
    assert served.startswith(f"CPU linear layers: HeteroInfer's bf16 kernels ({paths}), ")
    assert left == "CPU linear layers with torch.float32 weights: vLLM computes them (oneDNN)"


def test_an_output_head_keeps_one_copy_of_its_weights(usable: list[str]) -> None:
    answer = ask_forked(PROBE, "heads", *usable)
    assert all(gap < ROUNDING for gap in answer["gaps"])
    assert answer["lookup"], "an embedding's table is still there to be looked up"
    assert answer["packed"] == [False, True, True]


def test_without_compiled_kernels_onednn_serves_and_logs_the_reason(tmp_path: Path) -> None:
    """The image was built without the library of kernels."""
    package = build.SOURCE.parents[1]
    copy = shutil.copytree(
        package, tmp_path / package.name, ignore=shutil.ignore_patterns("compiled", "__pycache__")
    )
    answer = ask(PROBE, "without", env={"PYTHONPATH": str(tmp_path)})
    assert all(gap < ROUNDING for gap in answer["gaps"])
    (line,) = answer["said"]
    assert "vLLM's slower kernels (oneDNN)" in line
    assert "was not compiled. Run: python -m vllm_heteroinfer.kernels.build" in line
    assert not (copy / "kernels/compiled").exists(), "nothing is compiled while serving"


def test_an_invalid_setting_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"HETEROINFER_CPU_LINEAR must be auto or onednn \(got 'fast'\)"):
        ask_forked(PROBE, "without", env={"HETEROINFER_CPU_LINEAR": "fast"})


def test_vllm_still_needs_the_patch() -> None:
    """Fails once vLLM removes packed linear weights or a head beside its packed form in another way.

    Without AVX-512, oneDNN has no kernel for bf16, so torch uses the weights as they are.
    """
    answer = ask_forked(PROBE, "onednn_alone")
    linear = [0] if of_this_cpu() else [96, 64]
    assert answer == {"linear": linear, "head": [128, 64]}, f"is the patch {CPU_LINEAR.id} still needed?"


def test_rotary_embedding_is_right_if_queries_have_an_axis_of_heads() -> None:
    """The operation of vLLM itself is right only if queries and keys have no axis of heads."""
    of_vllm, patched, reverted, in_part = ask_forked(PROBE, "rope")
    assert {kind for kind, gap in of_vllm.items() if gap > ROTARY} == {
        f"{axes}, {pairs}" for axes in ("heads", "heads in a view") for pairs in ("neox", "interleaved")
    }, "is the patch cpu_rope still needed?"
    assert all(gap < ROTARY for gap in patched.values()), patched
    assert reverted
    # With 10, 12 and 20 pairs vLLM's operation ends the process.
    assert len(in_part) == 5
    assert all(gap < 2.0**-5 for gap in in_part.values()), in_part


def test_experts_are_chosen_and_weighted_as_in_a_plain_computation() -> None:
    gaps = ask_forked(PROBE, "router")
    assert len(gaps) == 16
    assert all(gap < ROTARY for gap in gaps.values()), gaps


def test_four_bits_are_packed_in_slices_to_the_same_bytes() -> None:
    answer = ask_forked(PROBE, "packing")
    assert len(answer["same"]) > 30 if "avx512f" in of_this_cpu() else len(answer["same"]) == 19
    assert all(answer["same"]), answer
    of_vllm, ours = answer["peaks"]
    assert of_vllm > 10, "is the patch cpu_packing still needed?"
    assert ours < of_vllm / 2, "of the layer's bytes; its tensors before and after are two of them"


def test_four_bits_have_the_bytes_that_plans_count() -> None:
    """The test lets vLLM build a layer of each format. Any CPU with AVX-512 can pack experts for AMX."""
    found = ask_forked(PROBE, "packed_bytes")
    assert len(found) == (12 if "avx512f" in of_this_cpu() else 9)
    for name, group, kind, part in found:
        scheme = Scheme(name=SchemeName(name), bits=4, group=group)
        counted = packed_ratio_for_amx(scheme) if kind == "experts" else packed_ratio(scheme)
        assert part == pytest.approx(float(counted), rel=1e-4), (name, group, kind)


def test_norms_of_eager_ranks_equal_a_plain_computation() -> None:
    """Eager ranks use vLLM's operation for CPUs.

    They use torch for rows that are not whole vectors, and on CPUs on which vLLM's operation truncates bf16.
    Truncation makes bf16 numbers smaller by 2^-9 on average, and rounding does not. Compiled ranks use torch.
    """
    gaps, asked = ask_forked(PROBE, "norms")
    assert len(gaps) == 24
    rounds = "avx512_bf16" in of_this_cpu()
    for what, (gap, missing) in gaps.items():
        assert gap < (ROTARY if "float32" in what else 2.0**-6), what
        assert abs(missing) < 2.0**-11, what
        by_torch = " 80 " in what or ("bfloat16" in what and not rounds)
        assert what.endswith("native" if by_torch else "vllm_cpu"), what
    assert asked == ["vllm_cpu", "native"]


def test_a_norm_in_one_call_rounds_like_the_operations_that_it_replaces(usable: list[str]) -> None:
    """It rounds like vLLM's operation for AVX512-BF16.

    Torch, for other CPUs, also rounds before the weight.
    """
    rounds = "avx512_bf16" in of_this_cpu()
    answer = ask_forked(PROBE, "patched_norms", *usable)
    assert answer["applied"]
    assert answer["reverted"]
    assert len(answer["taken"]) == 25
    for what, (calls, share, steps) in answer["taken"].items():
        assert calls == 1, what
        assert share < (1e-3 if rounds else 0.6), (what, share)  # squares are added up in another order
        assert steps <= (1.0 if rounds or "added" not in what else 2.0), (what, steps)
    assert len(answer["left"]) == 9
    assert set(map(tuple, answer["left"].values())) == {(0, 0.0, 0.0)}, answer["left"]


def test_attention_that_is_called_directly_equals_vllms() -> None:
    """Outputs and caches are equal to the last bit. Calls that the patch does not cover use vLLM's code."""
    answer = ask_forked(PROBE, "attention")
    assert answer["applied"]
    assert answer["reverted"]
    assert len(answer["taken"]) == 12
    assert set(map(tuple, answer["taken"].values())) == {(0, True)}, answer["taken"]
    assert answer["given_back"]
    assert answer["cast once"] == [1, True]
    assert len(answer["left"]) == 4
    assert set(map(tuple, answer["left"].values())) == {(3, True)}, answer["left"]


def test_the_registry_is_for_the_pinned_version() -> None:
    assert all(VLLM_VERSION in patch.verified for patch in PATCHES)
