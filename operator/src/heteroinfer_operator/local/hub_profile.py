"""Reads the sizes of a hub model by `heteroinfer-worker inspect`, without downloading its weights.

The command runs with this Python, and needs no vLLM. It is a separate process, because operator and worker
do not import each other.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from heteroinfer_contract import names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.api import ModelSpec
from heteroinfer_operator.errors import ModelError
from heteroinfer_operator.local.process import MAX_ERROR_LENGTH, WORKER_MODULE

TIMEOUT_S: Final = 300.0
"""Time limit of the command, which sends two small requests for each file of weights."""


def read_hub_profile(model: ModelSpec, env: Mapping[str, str] = os.environ) -> ModelProfile:
    """Reads the sizes of a hub model, from its config.json and the headers of its weights.

    Takes HF_ENDPOINT and HF_TOKEN from the environment.

    Raises:
        ModelError: the hub does not serve the files, or the files do not describe a model.
    """
    command = [sys.executable, "-m", WORKER_MODULE, "inspect", "--model", model.uri]
    command += ["--revision", model.revision] if model.revision else []
    # In a pod, this variable names the file with the result, which the kubelet reads. Here is no kubelet, and
    # the result is on standard output. So leave out the variable.
    environment = {name: value for name, value in env.items() if name != names.ENV_TERMINATION_MESSAGE_PATH}
    try:
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _build_error(model, f"the hub did not answer within {TIMEOUT_S:.0f} s. Try again") from error
    if result.returncode != 0:
        raise _build_error(model, result.stderr.strip().rpartition("inspect: ")[2][-MAX_ERROR_LENGTH:])
    try:
        return ModelProfile.from_json(result.stdout)
    except ContractError as error:
        raise _build_error(model, f"{WORKER_MODULE} did not print a profile: {error}") from error


def _build_error(model: ModelSpec, message: str) -> ModelError:
    """Builds the error about a model, with its URI."""
    return ModelError(f"model.uri: {model.uri}: {message}")
