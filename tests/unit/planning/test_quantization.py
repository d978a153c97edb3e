"""Quantized checkpoints that vLLM refuses at their load are refused at plan time, on GPUs and on CPUs."""

from typing import Any

import pytest

from heteroinfer_contract.model import Scheme, SchemeName
from heteroinfer_operator.errors import PlanError
from tests.shapes.profiles import recorded_profiles
from tests.unit.planning.planned_models import cpu, gpu, plan, profile, spec

GPUS = (gpu(deviceMemory="141Gi"),)
CPUS = (cpu(memory="4Ti"),)


@pytest.mark.parametrize("roles", [GPUS, CPUS])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("Llama-3.3-70B-Instruct-AWQ", "float32"),
        ("Llama-3.1-8B-Instruct-GPTQ-INT4", "float32"),
        ("Qwen3-235B-A22B-FP8", "float32"),
        ("gpt-oss-20b", "float32"),
        ("gpt-oss-20b", "float16"),
    ],
)
def test_a_type_that_a_method_does_not_take_is_refused(
    name: str, dtype: str, roles: tuple[dict[str, Any], ...]
) -> None:
    with pytest.raises(PlanError, match=rf"requires engine.dtype to be .*got {dtype}.*Set engine.dtype"):
        plan(spec(*roles, engine={"dtype": dtype}), recorded_profiles()[name])


def test_compressed_tensors_accept_float32() -> None:
    packed = recorded_profiles()["Llama-3.1-8B-Instruct-quantized.w4a16"]
    engine = {"dtype": "float32"}
    for roles in (GPUS, CPUS):
        assert plan(spec(*roles, engine=engine), packed).plan.engine.dtype == "float32"


@pytest.mark.parametrize("method", ["bitsandbytes", "hqq", "aqlm", "exl3", "gguf", "foo"])
def test_a_method_that_vllm_does_not_know_is_refused_by_name(method: str) -> None:
    with pytest.raises(PlanError, match=rf"quant_method: must be .* .got {method}.*auto_awq, .*quark"):
        plan(spec(*GPUS), profile(quantization=method))
    with pytest.raises(PlanError, match=rf"engine.args --quantization: must be .* .got {method}"):
        plan(spec(*GPUS, engine={"args": ["--quantization", method]}))


@pytest.mark.parametrize("method", ["auto-round", "compressed_tensors", "quark", "torchao", "FP8", ""])
def test_methods_that_vllm_knows_are_planned_by_all_their_names(method: str) -> None:
    assert plan(spec(*GPUS), profile(quantization=method)).plan.ranks


def test_a_deprecated_method_needs_the_option() -> None:
    with pytest.raises(PlanError, match=r"Add --allow-deprecated-quantization to engine\.args"):
        plan(spec(*GPUS), profile(quantization="fbgemm_fp8"))
    allowed = spec(*GPUS, engine={"args": ["--allow-deprecated-quantization"]})
    assert plan(allowed, profile(quantization="fbgemm_fp8")).plan.ranks


def test_a_format_without_a_name_is_called_by_its_method() -> None:
    model = profile(
        quantization="quark",
        scheme=Scheme(name=SchemeName.OTHER, bits=0),
        kinds=recorded_profiles()["Llama-3.3-70B-Instruct-AWQ"].kinds[:1],
        kind_of_layer=(0,) * 32,
    )
    with pytest.raises(PlanError, match="CPU ranks do not support weights in quark"):
        plan(spec(*CPUS), model)
