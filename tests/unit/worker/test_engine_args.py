"""vLLM's arguments: the user's, the plan's, and the refused ones."""

import argparse
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_contract import load_formats
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.given_options import SHORT
from heteroinfer_contract.plan import Device, Mode, Plan, eager_reason
from heteroinfer_contract.pod_launch import PodAddress, PodLaunch
from heteroinfer_contract.refused_args import PLAN_OWNED, UNSUPPORTED, find_refused
from tests.integration.feed_forward.feed_forward_plans import feed_forward_plan
from tests.integration.worker.groups import build_plan
from vllm_heteroinfer.engine import arguments

LAUNCH = PodLaunch(
    group="ns/x/0",
    group_uid="uid",
    epoch=1,
    pod_index=0,
    addresses=(PodAddress(host="127.0.0.1"), PodAddress(host="127.0.0.1")),
)


def plan(*extra_args: str) -> Plan:
    return build_plan(Path("/model"), layers=[3, 5], pods=[1, 1], extra_args=extra_args)


@pytest.mark.parametrize(
    "args",
    [
        ["--max-num-seqs", "3"],
        ["--max_num_seqs=3"],
        ["--max-num-seq", "3"],
        ["-tp", "2"],
        ["-tp=2"],
        ["-n2"],
        ["--port=1"],
        ["--enable-prefix-caching", "--no-enforce-eager"],
    ],
)
def test_every_spelling_of_an_option_that_the_plan_sets_is_found(args: list[str]) -> None:
    (found,) = find_refused(args)
    assert PLAN_OWNED[found.option] == found.remedy
    assert found.reason == f"only HeteroInfer may set {found.option}"


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["--enable-prefix-caching"],
        ["--kv-cache-dtype", "auto"],
        ["-O3"],
        ["-cc.mode=0"],
        ["--no-async-scheduling"],
        ["--max-logprobs", "-1"],
        ["--enable-sleep-mode"],
        ["--enable-chunked-prefill", "--enable-prefix-caching"],
        ["--structured-outputs-config", '{"backend": "xgrammar"}'],
    ],
)
def test_other_options_are_passed_to_vllm(args: list[str]) -> None:
    assert not list(find_refused(args))


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["--async-scheduling"], "does not support it across pipeline stages.* disables it on CPU ranks"),
        (["--enable-lora"], "each rank reads an adapter from the files of its own pod"),
        (["--lora-modules", "a=/a"], "Merge the adapter into the model"),
        (["--ssl-keyfile=/model/key"], "health by HTTP.*gateway in front of the Service"),
        (["--ssl_certfile", "/model/crt"], "health by HTTP.*gateway in front of the Service"),
    ],
)
def test_refused_features_have_a_reason(args: list[str], why: str) -> None:
    refused = next(find_refused(args))
    assert re.search(why, str(refused))


REFUSED = set(PLAN_OWNED) | {option for entry in UNSUPPORTED for option in entry.options}
SPELLED = REFUSED | {short for short, option in SHORT.items() if option in REFUSED}


@given(st.sampled_from(sorted(SPELLED)), st.data())
def test_every_spelling_of_a_refused_option_is_refused(option: str, data: st.DataObject) -> None:
    if option.startswith("--"):
        spelled = "--" + "".join(data.draw(st.sampled_from("-_")) if c == "-" else c for c in option[2:])
    else:
        spelled = option
    suffix = data.draw(st.sampled_from(["", "=1", ".key=1"]))
    (refused,) = find_refused(["--enable-prefix-caching", spelled + suffix])
    assert repr(spelled + suffix) in str(refused)


def test_the_arguments_contain_every_setting_of_the_plan() -> None:
    args = arguments.arguments(plan("--enable-prefix-caching"), LAUNCH, plan().ranks[1])
    assert args.index("--enable-prefix-caching") < args.index("--model"), (
        "of two values, vLLM takes the last one, which must be the plan's"
    )
    pairs = dict(pairwise(args))
    assert pairs["--dtype"] == "float32"
    assert pairs["--block-size"] == "32"
    assert pairs["--pipeline-parallel-size"] == "2"
    assert pairs["--kv-cache-memory-bytes"] == str(plan().ranks[1].kv_cache_bytes)
    assert pairs["--host"] == "127.0.0.1"
    assert "--enforce-eager" in args
    assert "--no-async-scheduling" in args


def test_eager_is_set_for_each_device_separately() -> None:
    base = plan()
    gpu = replace(base.ranks[1], device=Device.GPU)
    mixed = replace(base, ranks=(base.ranks[0], gpu))
    assert "--enforce-eager" in arguments.arguments(mixed, LAUNCH, mixed.ranks[0])
    assert "--no-enforce-eager" in arguments.arguments(mixed, LAUNCH, mixed.ranks[1])


def test_refuses_an_argument_that_the_plan_sets_with_a_fix() -> None:
    with pytest.raises(
        ContractError, match=r"'--dtype=half' is refused: only HeteroInfer may set --dtype. Set spec"
    ):
        arguments.arguments(plan("--dtype=half"), LAUNCH, plan().ranks[0])


def test_the_worker_has_no_list_of_allowed_arguments() -> None:
    """The operator checks the lists of allowed arguments when it makes a plan.

    A group restarts with its old plan even if the lists are stricter now.
    """
    args = ("--middleware", "a.B", "--api-key", "x", "--trust-remote-code", "--runner", "generate")
    assert set(args) <= set(arguments.arguments(plan(*args), LAUNCH, plan().ranks[0]))


def mixed_stage(*devices: Device, mode: Mode = Mode.TENSOR) -> Plan:
    return build_plan(
        Path("/model"), layers=[8], pods=[1] * len(devices), tensor=len(devices), mode=mode, devices=devices
    )


def test_gpu_ranks_of_a_mixed_stage_always_run_eagerly() -> None:
    mixed = mixed_stage(Device.GPU, Device.CPU)
    assert not mixed.engine.eager_gpu
    assert "stage 0" in str(eager_reason(mixed))
    assert "--enforce-eager" in arguments.arguments(mixed, LAUNCH, mixed.ranks[0])
    alone = mixed_stage(Device.GPU, Device.GPU)
    assert eager_reason(alone) is None
    assert "--no-enforce-eager" in arguments.arguments(alone, LAUNCH, alone.ranks[0])


def test_gpu_ranks_of_a_group_with_cpu_ranks_do_not_autotune() -> None:
    mixed = mixed_stage(Device.GPU, Device.CPU)
    assert "--no-enable-flashinfer-autotune" in arguments.arguments(mixed, LAUNCH, mixed.ranks[0])
    assert "--no-enable-flashinfer-autotune" not in arguments.arguments(mixed, LAUNCH, mixed.ranks[1])
    alone = mixed_stage(Device.GPU, Device.GPU)
    assert "--no-enable-flashinfer-autotune" not in arguments.arguments(alone, LAUNCH, alone.ranks[0])


@pytest.mark.parametrize(
    ("mixed", "remedy"),
    [
        (mixed_stage(Device.CPU, Device.GPU), "list the GPU roles first"),
        (mixed_stage(Device.GPU, Device.CPU, mode=Mode.PIPELINE), "mode: Tensor"),
    ],
    ids=["cpu first", "pipeline mode"],
)
def test_mixed_stages_that_cannot_work_are_refused(mixed: Plan, remedy: str) -> None:
    with pytest.raises(ContractError, match=f"(?i){remedy}"):
        arguments.arguments(mixed, LAUNCH, mixed.ranks[0])


def test_cpu_ranks_of_mode_feed_forward_read_gpu_formats_as_safetensors() -> None:
    plan = feed_forward_plan(Path("/model"), num_layers=4, remote=[2, 3], device=Device.GPU)
    for asked in load_formats.FEED_FORWARD:
        read = []
        for rank in plan.ranks:
            args = argparse.Namespace(load_format=asked)
            arguments.choose_load_format(plan, rank, args)
            read.append(args.load_format)
        assert read == [asked, "safetensors" if asked in load_formats.GPU_FORMATS else asked]


def test_a_load_format_that_feed_forward_ranks_cannot_read_is_refused() -> None:
    plan = feed_forward_plan(Path("/model"), num_layers=4, remote=[2, 3])
    args = argparse.Namespace(load_format="tensorizer")
    with pytest.raises(ContractError, match=r"--load-format must be auto or .* \(got tensorizer\)"):
        arguments.choose_load_format(plan, plan.ranks[1], args)
    alone = build_plan(Path("/model"), layers=[4], pods=[1])
    arguments.choose_load_format(alone, alone.ranks[0], args)
    assert args.load_format == "tensorizer"


@pytest.mark.parametrize("arg", ["--=1", "-=1", "--.a=1", "-.a=1", "---"])
def test_an_argument_without_a_name_is_refused(arg: str) -> None:
    (refused,) = find_refused([arg])
    assert str(refused) == f"engine.args: '{arg}' is refused: it names no option. Remove it"
    assert not list(find_refused(["--", "x"]))


@pytest.mark.parametrize("args", [["-cc.mode"], ["--otlp-traces-endpoint", "--compilation-config.mode"]])
def test_a_dotted_option_at_the_end_would_take_the_plans_first_argument(args: list[str]) -> None:
    (refused,) = find_refused(args)
    assert str(refused) == f"engine.args: '{args[-1]}' is refused: it has no value. Add a value"
    assert not list(find_refused([*args, "3"]))
