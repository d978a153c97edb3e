"""Options of vLLM's arguments are found, with full name, keys and values."""

import pytest

from heteroinfer_contract.given_options import GivenOption, given_options


@pytest.mark.parametrize(
    ("args", "name", "path", "value"),
    [
        (["--max-log-len", "5"], "--max-log-len", (), "5"),
        (["--max_log_len=5"], "--max-log-len", (), "5"),
        (["--max-log-len="], "--max-log-len", (), ""),
        (["--max-log-len"], "--max-log-len", (), None),
        (["--max-logprobs", "-1"], "--max-logprobs", (), "-1"),
        (["--chat-template", "-"], "--chat-template", (), "-"),
        (["--hf_overrides.rope_theta", "1"], "--hf-overrides", ("rope_theta",), "1"),
        (["--hf-overrides.a_b.c=x.y"], "--hf-overrides", ("a_b", "c"), "x.y"),
        (["-cc.custom_ops+", "a,b"], "--compilation-config", ("custom_ops",), "a,b"),
        (["-cc", "{}"], "--compilation-config", (), "{}"),
        (["-tp=2"], "--tensor-parallel-size", (), "2"),
        (["-n2"], "--nnodes", (), "2"),
        (["-n 2"], "--nnodes", (), " 2"),
        (["-qa=b"], "--quantization", (), "a=b"),
        (["-O3"], "--optimization-level", (), "3"),
        (["-O=3"], "--optimization-level", (), "3"),
        (["-O", "3"], "--optimization-level", (), "3"),
        (["-dpx"], "-dpx", (), None),
        (["--max-log-len+", "5"], "--max-log-len+", (), "5"),
    ],
)
def test_reads_each_spelling_of_an_option(
    args: list[str], name: str, path: tuple[str, ...], value: str | None
) -> None:
    assert given_options(args) == (GivenOption(arg=args[0], name=name, path=path, value=value),)


@pytest.mark.parametrize("hiding", [["--"], ["--hf-overrides.x"], ["--chat-template"]])
def test_an_option_is_found_after_any_other_argument(hiding: list[str]) -> None:
    """The parser of vLLM finds --config even after -- and as the value of a dotted option."""
    assert [each.name for each in given_options([*hiding, "--config", "x"])][-1] == "--config"


def test_only_the_prefix_no_with_a_hyphen_negates_a_flag() -> None:
    (given,) = given_options(["--no_enable_lora"])
    assert (given.option, given.is_negated) == ("--enable-lora", True)
    (given,) = given_options(["--nnodes=1"])
    assert (given.option, given.is_negated) == ("--nnodes", False)


@pytest.mark.parametrize(
    ("arg", "option", "may_mean"),
    [
        ("--tensor", "--tensor-parallel-size", True),
        ("-t", "--tensor-parallel-size", True),
        ("-d", "--data-parallel-size", True),
        ("-tp", "--pipeline-parallel-size", False),
        ("--tensor-parallel-size-x", "--tensor-parallel-size", False),
        ("--enforce-eager", "--no-enforce-eager", False),
        ("--", "--tensor-parallel-size", False),
        ("-=2", "--tensor-parallel-size", False),
    ],
)
def test_an_abbreviation_may_mean_any_option_that_begins_with_it(
    arg: str, option: str, may_mean: bool
) -> None:
    (given,) = given_options([arg])
    assert given.may_mean(option) is may_mean
