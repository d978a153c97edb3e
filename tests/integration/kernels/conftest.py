"""The kernels' library for tests: on this CPU's instructions, or with all of them emulated."""

from pathlib import Path

import pytest

from tests.integration.kernels.instructions import emulated_library, of_this_cpu
from vllm_heteroinfer.kernels import build


@pytest.fixture(scope="session")
def emulated() -> Path:
    """The library with its instructions emulated: each path runs on any CPU."""
    return emulated_library()


@pytest.fixture(scope="session")
def usable(request: pytest.FixtureRequest) -> list[str]:
    """Arguments of the probes: none, or the emulated library where this CPU has none of the instructions."""
    build.build()
    return [] if of_this_cpu() else [str(request.getfixturevalue("emulated"))]
