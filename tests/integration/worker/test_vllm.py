"""What HeteroInfer relies on in the pinned vLLM is there; asked in the worker's own Python."""

import functools
import json
from typing import Any

import pytest

from heteroinfer_contract.refused_args import PLAN_OWNED, UNSUPPORTED, find_refused
from heteroinfer_operator.api.env_vars import ALLOWED_ENV
from heteroinfer_operator.reconcile.allowed_args import ALLOWED_ARGS, KEYS, SHORT, VALUES, WHY
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


def test_options_are_vllms_and_no_other_is_refused() -> None:
    options = set(ask(OPTIONS))
    refused = set(PLAN_OWNED) | {option for entry in UNSUPPORTED for option in entry.options}
    assert refused <= options, "names that this vLLM does not have"
    free = {option for option in options if find_refused([option]) is None}
    assert free == options - refused, "options refused by mistake, as a prefix of another"


def test_what_is_allowed_is_vllms() -> None:
    options = set(ask(OPTIONS))
    listed = {*ALLOWED_ARGS, *SHORT, *(option for entry in WHY for option in entry.options)} - {"-O"}
    assert listed <= options, "names that this vLLM does not have"
    known = set(ask(ENVIRONMENT))
    assert {name for name in ALLOWED_ENV if name.startswith("VLLM_")} <= known


def test_keys_and_values_that_are_allowed_are_vllms() -> None:
    known = ask(FIELDS)
    for option, names in {**KEYS, **VALUES}.items():
        assert option == "--hf-overrides" or names <= set(known[option]), option


def test_every_seam_is_there() -> None:
    assert ask(TARGETS, json.dumps([seam.target for seam in SEAMS])) == []
