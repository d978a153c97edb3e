"""Tests that the parts of the pinned vLLM that HeteroInfer relies on exist, in the worker's own Python."""

import functools
import json
import shlex
from typing import Any

import pytest

from heteroinfer_contract.given_options import SHORT, given_options
from heteroinfer_contract.refused_args import PLAN_OWNED, UNSUPPORTED, find_refused
from heteroinfer_operator.reconcile.allowed_args import ALLOWED_ARGS, KEYS, UNLISTED_OPTIONS, VALUES
from heteroinfer_operator.reconcile.allowed_env import ALLOWED_ENV
from heteroinfer_operator.vllm_support.engine_options import EngineOptions
from tests.integration.forked_script import run_script
from tests.integration.worker.groups import WORKER_PYTHON
from tests.seams import SEAMS

pytestmark = [pytest.mark.unhurried, pytest.mark.timeout(1200)]

OPTIONS = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
print(json.dumps([o for action in parser._actions for o in action.option_strings]))
"""

PARSER = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
class Parser(FlexibleArgumentParser):
    def error(self, message):
        raise ValueError(message)
parser = make_arg_parser(Parser())
"""

TAKEN_FOR = f"""{PARSER}
def taken_for(arg):
    try:
        action, option, *_ = parser._parse_optional(arg)
    except ValueError:
        return ""
    return option if action is not None else ""
options = [option for action in parser._actions for option in action.option_strings]
beginnings = {{option[:end] for option in options for end in range(2, len(option) + 1)}} - {{"--", "-h"}}
print(json.dumps({{beginning: taken_for(beginning) for beginning in sorted(beginnings)}}))
"""

CHOSEN = f"""{PARSER}
def chosen(args):
    try:
        parsed = parser.parse_args(args)
    except ValueError as error:
        return str(error)
    return {{field: getattr(parsed, field) for field in json.loads(sys.argv[1])}}
print(json.dumps([chosen(args) for args in [[], *json.loads(sys.argv[2])]]))
"""

CHOSEN_AS = {
    "kv_cache_dtype": "kv_cache_dtype",
    "quantization": "quantization",
    "moe_backend": "moe_backend",
    "mamba_ssm_cache_dtype": "state_dtype",
    "mamba_cache_dtype": "convolution_dtype",
    "load_format": "load_format",
    "model_impl": "model_impl",
    "cpu_offload_gb": "offloaded_gib",
    "offload_group_size": "offloaded_layers",
    "language_model_only": "is_text_only",
    "allow_deprecated_quantization": "allows_deprecated",
}
"""For each attribute of vLLM's arguments, the field of EngineOptions."""
SPELLINGS = [
    shlex.split(line)
    for line in """
    --kv-cache-dtype fp8
    --kv_cache-dtype=fp8
    --kv-cache-dtype auto --kv_cache_dtype=fp8
    --compilation_config.custom_ops+ none,+rms_norm --kv_cache_dtype fp8
    --quantization fp8
    --quantization=fp8 --quantization=awq
    -q awq
    -q=awq
    -qawq
    -qa=b
    '-q a'
    -qfp8 --quantization awq
    -q fp8 --allow-deprecated-quantization
    --allow-dep --no-allow-deprecated-q
    --moe-backend triton
    --moe_b triton
    --moe=triton
    -cc.mode 0 --moe-backend triton
    --mamba-ssm-cache-dtype float16
    --mamba_ssm-c=bfloat16
    --mamba-cache-dtype float32
    --mamba_cache_d=float32
    --load-format dummy
    --load dummy
    -O3 --load-format=dummy
    -O 2 -O=1 --load-format=dummy
    -cc '{"mode": 0}' --load_format dummy
    --model-impl vllm
    --model-im vllm
    --cpu-offload-gb 2
    --cpu_offload-g=2.5
    --offload-group-size 4
    --offload-g 4
    --language-model-only
    --lang
    --no-language-model-only
    --language-model-only --no-lang
    --no_language-model-only --language-m
    --max-logprobs -1 --language-model-only
    --chat-template '- x y' --lang
    - --language-model-only
    -- x
    """.strip().splitlines()
]
REFUSED_SPELLINGS = [
    ["--kv-cache-d", "fp8"],
    ["--quant", "fp8"],
    ["--kv-cache-dtype"],
    ["--kv-cache-dtype", "--lang"],
    ["--language-model-only=x"],
    ["-d", "2"],
]
"""The parser refuses these options, as ambiguous or without a value."""

ENVIRONMENT = """
import json
from vllm.envs import environment_variables
print(json.dumps(sorted(environment_variables)))
"""

FIELDS = """
import json, typing
from vllm.config import AttentionConfig, CompilationConfig, StructuredOutputsConfig
from vllm.config.cache import CacheDType
fields = {
    "--attention-config": AttentionConfig,
    "--compilation-config": CompilationConfig,
    "--structured-outputs-config": StructuredOutputsConfig,
}
found = {option: sorted(config.__dataclass_fields__) for option, config in fields.items()}
print(json.dumps(found | {"--kv-cache-dtype": typing.get_args(CacheDType)}))
"""

TARGETS = """
import functools, importlib, json, sys
missing = []
for target in json.loads(sys.argv[1]):
    module, path = target.split(":")
    try:
        functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        missing.append(f"{target}: {error}")
print(json.dumps(missing))
"""


@functools.cache
def ask(script: str, *args: str) -> Any:
    return run_script(WORKER_PYTHON, script, *args).answer()


REFUSED = set(PLAN_OWNED) | {option for entry in UNSUPPORTED for option in entry.options}


def test_exactly_the_listed_options_of_vllm_are_refused() -> None:
    options = set(ask(OPTIONS))
    assert options >= REFUSED, "names that this vLLM does not have"
    assert {o for o in options if not o.startswith("--")} == set(SHORT) - {"-O"} | {"-h"}
    refused = {option for option in options if any(find_refused([option]))}
    assert {SHORT.get(option, option) for option in refused} == REFUSED, "others are refused by mistake"


def test_abbreviated_options_are_read_as_vllm_reads_them() -> None:
    taken = {beginning: SHORT.get(option, option) for beginning, option in ask(TAKEN_FOR).items() if option}
    assert len(taken) > 1000
    found = {beginning: [each.option for each in find_refused([beginning])] for beginning in taken}
    assert found == {beginning: [option] if option in REFUSED else [] for beginning, option in taken.items()}
    assert all(given_options([beginning])[0].may_mean(option) for beginning, option in taken.items())


def test_repeated_options_have_the_value_that_vllm_uses() -> None:
    spelled = json.dumps([*SPELLINGS, *REFUSED_SPELLINGS])
    default, *chosen = ask(CHOSEN, json.dumps(list(CHOSEN_AS)), spelled)
    assert all(isinstance(each, str) for each in chosen[len(SPELLINGS) :])
    for args, of_vllm in zip(SPELLINGS, chosen, strict=False):
        assert isinstance(of_vllm, dict), (args, of_vllm)
        options = EngineOptions.of(args)
        for attribute, field in CHOSEN_AS.items():
            ours, theirs = getattr(options, field), of_vllm[attribute]
            if isinstance(ours, str) and isinstance(theirs, int | float):
                ours = float(ours)
            assert ours == theirs or (not ours and theirs == default[attribute]), (args, field)


def test_allowed_options_are_options_of_vllm() -> None:
    options = set(ask(OPTIONS))
    listed = {*ALLOWED_ARGS, *(option for entry in UNLISTED_OPTIONS for option in entry.options)}
    assert listed <= options, "names that this vLLM does not have"
    known = set(ask(ENVIRONMENT))
    assert {name for name in ALLOWED_ENV if name.startswith("VLLM_")} <= known


def test_allowed_keys_and_values_exist_in_vllm() -> None:
    known = ask(FIELDS)
    for option, names in {**KEYS, **VALUES}.items():
        assert option == "--hf-overrides" or names <= set(known[option]), option


def test_vllm_has_the_target_of_every_seam() -> None:
    assert ask(TARGETS, json.dumps([seam.target for seam in SEAMS])) == []
