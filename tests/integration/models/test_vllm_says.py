"""Tests that our records of vLLM and transformers equal their present answers."""

import json
import subprocess
from typing import Any

import pytest

from heteroinfer_contract.model import Routing, SchemeName
from heteroinfer_operator.vllm_support.architectures import (
    BROKEN_PIPELINE,
    IMAGES_ATTEND_BOTH_WAYS,
    OWN_CPU_BLOCKS,
)
from heteroinfer_operator.vllm_support.cpu_kernels import CODED_BITS, CPU_EXPERTS
from heteroinfer_operator.vllm_support.cpu_ranks import (
    CPU_FP8_HEAD_MULTIPLE,
    CPU_HEAD_SIZES,
    CPU_LATENT_DTYPE,
)
from heteroinfer_operator.vllm_support.engine_options import ELEMENT_BYTES
from heteroinfer_operator.vllm_support.quantization import DEPRECATED_METHODS, METHOD_DTYPES
from tests.integration.worker.groups import REPOSITORY, WORKER_PYTHON
from tests.shapes.comparison import recorded

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(1200)]

SHAPES = ("gemma-3-27b-it", "DeepSeek-V2-Lite-Chat", "Nemotron-H-8B-Base-8K")
"""Models with sliding windows, latents and states."""


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(WORKER_PYTHON), "-m", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, timeout=900, capture_output=True, text=True, check=False)


def test_sizes_of_weights_and_kv_caches_in_vllm_equal_the_record() -> None:
    done = _run("tests.shapes.oracle", *SHAPES)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {name: answer for each in answers for name, answer in each.items()} == {
        name: recorded("cpu")[name] for name in SHAPES
    }


def test_recorded_defaults_of_configs_equal_those_of_transformers() -> None:
    done = _run("tests.shapes.defaults", "--check")
    assert done.returncode == 0, done.stderr[-2000:]


def test_recorded_architectures_equal_vllms_registry() -> None:
    done = _run("tests.shapes.architectures", "--check")
    assert done.returncode == 0, done.stderr[-2000:]


def test_methods_of_quantization_take_the_types_of_the_table() -> None:
    done = _run("tests.shapes.quantization")
    assert done.returncode == 0, done.stderr[-2000:]
    output = json.loads(done.stdout.splitlines()[-1])
    known = set(ELEMENT_BYTES)
    assert {method: known & set(dtypes) for method, dtypes in output["dtypes"].items()} == METHOD_DTYPES
    assert set(output["deprecated"]) == DEPRECATED_METHODS


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    """Returns vLLM's present answers about kernels on CPUs."""
    done = _run("tests.shapes.kernels")
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_kernels_for_experts_take_the_routing_methods_of_the_table(kernels: dict[str, Any]) -> None:
    known = {routing.value for routing in Routing}
    for scheme, methods in kernels["routing"].items():
        ours = CPU_EXPERTS[SchemeName(scheme)].routing
        assert ours is not None
        assert {routing.value for routing in ours} == known & set(methods), scheme


def test_vllms_cpu_routers_support_every_method_only_with_our_patch(kernels: dict[str, Any]) -> None:
    of_vllm, patched = kernels["routers"]
    assert [kind for kind, each in of_vllm.items() if not each["computes"]] == ["sigmoid", "sigmoid biased"]
    assert not of_vllm["softmax biased"]["heeds"]
    assert all(each["computes"] for each in patched.values())
    assert all(each["heeds"] for kind, each in patched.items() if "biased" in kind)
    methods = {method for each in patched.values() for method in each["methods"]}
    assert methods >= {routing.value for routing in Routing} & {"SigmoidRenorm", "Sigmoid", "MiniMax2"}


def test_activations_of_experts_match_the_table(kernels: dict[str, Any]) -> None:
    for scheme, activations in kernels["activations"].items():
        assert CPU_EXPERTS[SchemeName(scheme)].activations == set(activations), scheme


def test_exactly_the_formats_with_instructions_in_the_table_need_amx(kernels: dict[str, Any]) -> None:
    with_amx, without = kernels["experts"]
    assert set(with_amx.values()) == {True}
    needs = {SchemeName(scheme): not runs for scheme, runs in without.items()}
    # Our kernels compute FP8 in blocks on CPUs with AVX-512 (patches/cpu_experts.py).
    assert needs == {scheme: bool(CPU_EXPERTS[scheme].instructions) for scheme in needs}
    # What vLLM packs as int4 for its kernel.
    packed = {CPU_EXPERTS[scheme] for scheme in (SchemeName.AWQ, SchemeName.GPTQ, SchemeName.INT4)}
    assert len(packed) == 1


def test_linear_layers_have_the_kernels_of_the_table(kernels: dict[str, Any]) -> None:
    """Our kernels serve them, with AMX and without.

    On CPUs, vLLM's method for GPTQ refuses 8 bits before it looks for a kernel.
    """
    for asked in kernels["linear"]:
        chosen = {
            (SchemeName(key.rpartition(" ")[0]), int(key.rpartition(" ")[2])): by_dtype
            for key, by_dtype in asked.items()
        }
        del chosen[SchemeName.GPTQ, 8]
        assert set(chosen) == {(name, bits) for name, of_format in CODED_BITS.items() for bits in of_format}
        for which, by_dtype in chosen.items():
            assert all(kernel.startswith("Coded") for kernel in by_dtype.values()), (which, by_dtype)


def test_no_library_of_vllm_for_cpus_has_the_scan_of_mamba_1(kernels: dict[str, Any]) -> None:
    assert kernels["scan"] == []


def test_kv_caches_have_the_type_and_heads_of_the_table(kernels: dict[str, Any]) -> None:
    plain, fp8 = kernels["head_sizes"]["auto"], kernels["head_sizes"]["fp8"]
    assert set(plain) == CPU_HEAD_SIZES
    if fp8 is not None:  # this CPU has AVX-512
        assert fp8 == [size for size in plain if size % CPU_FP8_HEAD_MULTIPLE == 0]
    assert kernels["overflows"], "a cache of another type may be planned on CPUs now"


def test_latent_attention_needs_amx_and_has_the_type_of_the_table(kernels: dict[str, Any]) -> None:
    with_amx, without = kernels["latent"]
    assert with_amx == {"name": "AMX_MLA", "dtypes": [CPU_LATENT_DTYPE], "fp8": False, "block_of_32": True}
    assert (without["name"], without["fp8"], without["block_of_32"]) == ("CPU_MLA", False, False)
    decoded = kernels["latents_decode"]
    if decoded is not None:  # this CPU has AMX
        assert {dtype for dtype, right in decoded.items() if right} == {CPU_LATENT_DTYPE}


@pytest.fixture(scope="module")
def said_of_classes() -> dict[str, Any]:
    """Returns the present properties of vLLM's classes on CPUs."""
    done = _run("tests.shapes.classes")
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture
def classes(said_of_classes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns these properties by architecture."""
    return dict(said_of_classes["classes"])


def test_models_with_bidirectional_image_attention_are_listed(said_of_classes: dict[str, Any]) -> None:
    types = said_of_classes["both_ways"]
    assert types == ["bagel", "gemma3", "molmo2", "moondream3", "paligemma"]
    # The record has one architecture per class, and one class has two names. For Gemma-4, the config decides.
    named = {name.lower() for name in IMAGES_ATTEND_BOTH_WAYS}
    assert all(any(name.startswith(each) for name in named) for each in types)
    assert {name for name in named if not name.startswith(tuple(types))} == {
        "gemma4forconditionalgeneration",
        "gemma4unifiedforconditionalgeneration",
        "hfmoondream",
    }


def test_models_that_use_layers_of_other_stages_are_listed(
    classes: dict[str, dict[str, Any]],
) -> None:
    broken = {name for name, output in classes.items() if output.get("pipeline") and output["all_layers"]}
    assert broken == BROKEN_PIPELINE


def test_listed_models_with_own_kv_blocks_are_classes_of_vllm(classes: dict[str, dict[str, Any]]) -> None:
    assert len(classes) > 200
    assert set(classes) >= OWN_CPU_BLOCKS


def test_our_sizes_of_gemma_4_equal_the_sizes_of_vllms_class() -> None:
    done = _run("tests.shapes.gemma4")
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"shared", "dense", "experts"}
    for name, off in found.items():
        for what, part in off.items():
            # If keys are also values, vLLM has two projections, but the files have one.
            assert abs(part) < (1e-6 if what.startswith("KV") else 0.005), (name, what, part)
