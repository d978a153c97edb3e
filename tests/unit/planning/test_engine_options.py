"""Options are found in every spelling that vLLM's parser accepts.

tests/integration/worker/test_vllm.py holds the spellings to vLLM's own parser.
"""

import pytest

from heteroinfer_operator.vllm_support.engine_options import EngineOptions


@pytest.mark.parametrize(
    "args",
    [
        ["--kv-cache-dtype", "fp8"],
        ["--kv-cache-dtype=fp8"],
        ["--kv_cache_dtype", "fp8"],
        ["--kv_cache-dtype=fp8"],
        ["--kv-cache-dtype", "auto", "--kv-cache-dtype", "fp8"],
        ["--kv-cache-dtype", "fp8", "--kv-cache-dtype.x", "auto"],
    ],
)
def test_finds_the_value_in_each_spelling(args: list[str]) -> None:
    assert EngineOptions.of(args) == EngineOptions(kv_cache_dtype="fp8")


@pytest.mark.parametrize("args", [["-q", "awq"], ["-q=awq"], ["-qawq"], ["--quantiz", "awq"]])
def test_finds_the_value_of_a_short_form(args: list[str]) -> None:
    assert EngineOptions.of(args) == EngineOptions(quantization="awq")


@pytest.mark.parametrize("args", [["--moe-b", "triton"], ["--moe=triton"], ["--moe_backend=triton"]])
def test_finds_the_value_of_an_abbreviation(args: list[str]) -> None:
    assert EngineOptions.of(args) == EngineOptions(moe_backend="triton")


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--", "x"],
        ["-", "x"],
        ["--=x"],
        ["-=x"],
        ["--kv-cache-dtype-x", "fp8"],
        ["fp8"],
        ["--kv-cache-dtype"],
        ["--max-logprobs", "-1"],
        ["-tp", "2"],
    ],
)
def test_other_arguments_are_not_the_option(args: list[str]) -> None:
    assert EngineOptions.of(args) == EngineOptions()


def test_a_dotted_option_does_not_hide_the_value_after_it() -> None:
    """The parser takes dotted options out first, and reads `--quantization fp8` here."""
    options = EngineOptions.of(["--quantization", "--compilation-config.mode=3", "fp8"])
    assert options.quantization == "--compilation-config.mode=3"


@pytest.mark.parametrize(
    ("args", "given"),
    [
        (["--language-model-only"], True),
        (["--language-model"], True),
        (["--language_model_only", "--no-language-model-only"], False),
        (["--language_model_only", "--no-lang"], False),
        (["--no-language-model-only", "--language-model-only"], True),
        (["--no-"], False),
    ],
)
def test_finds_a_flag_unless_a_later_one_negates_it(args: list[str], given: bool) -> None:
    assert EngineOptions.of(args) == EngineOptions(is_text_only=given)
