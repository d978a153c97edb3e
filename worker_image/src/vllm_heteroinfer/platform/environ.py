"""Registers our environment variable with vLLM, which warns about unknown VLLM_ names at each start.

Imports vLLM.
"""

import os

from vllm import envs

from heteroinfer_contract import names


def register_environ() -> None:
    """Registers the variable that chooses the platform with vLLM. A second call does nothing.

    Like vLLM's own variables, the variable then becomes a factor of compiled graphs.
    Source: vllm/platforms/interface.py::Platform.validate_environ@v0.32.0, vllm/envs.py::compile_factors.
    """
    envs.environment_variables.setdefault(
        names.ENV_HETEROGENEOUS_DEVICE, lambda: os.environ.get(names.ENV_HETEROGENEOUS_DEVICE)
    )
