"""The sizes of a hub's model, without its weights, read by `heteroinfer-worker inspect`.

It runs in this Python, which needs no vLLM for it, and as a process of its own: operator and worker
import nothing of each other.
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
from heteroinfer_operator.local.process import WORKER_MODULE

TIMEOUT_S: Final = 300.0
"""Two small requests for each file of weights."""


def read_hub_profile(model: ModelSpec, env: Mapping[str, str] = os.environ) -> ModelProfile:
    """Returns the sizes of a hub's model, from its config.json and the headers of its weights.

    HF_ENDPOINT and HF_TOKEN are the environment's.

    Raises:
        ModelError: the hub does not show it, or it is no model.
    """
    command = [sys.executable, "-m", WORKER_MODULE, "inspect", "--model", model.uri]
    command += ["--revision", model.revision] if model.revision else []
    # Without a message's path, which would be a pod's; the answer is on standard output.
    environment = {name: value for name, value in env.items() if name != names.ENV_TERMINATION_MESSAGE_PATH}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise _error(model, f"the hub gave no answer within {TIMEOUT_S:.0f} s; try again") from error
    if done.returncode != 0:
        raise _error(model, done.stderr.strip().rpartition("inspect: ")[2][-500:])
    try:
        return ModelProfile.from_json(done.stdout)
    except ContractError as error:
        raise _error(model, f"{WORKER_MODULE} gave no profile: {error}") from error


def _error(model: ModelSpec, message: str) -> ModelError:
    return ModelError(f"model.uri: {model.uri}: {message}")
