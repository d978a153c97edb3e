"""Names our own variable to vLLM; it warns at each start of VLLM_ names that it does not know.

Imports vLLM.
"""

import os

from vllm import envs

from heteroinfer_contract import names


def register_environ() -> None:
    """Adds the variable that chooses the platform to those that vLLM knows; twice is a no-op.

    It then counts among the factors of compiled graphs, too, as vLLM's own ones do.
    Source: vllm/platforms/interface.py::Platform.validate_environ@v0.32.0, vllm/envs.py::compile_factors.
    """
    envs.environment_variables.setdefault(
        names.ENV_HETEROGENEOUS_DEVICE, lambda: os.environ.get(names.ENV_HETEROGENEOUS_DEVICE)
    )
