"""Provides the library of kernels: for this CPU's instructions, or with emulated instructions."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.kernels.instructions import emulated_library, of_this_cpu
from tests.integration.kernels.probe_answers import Asking, asking
from vllm_heteroinfer.kernels import build


@pytest.fixture(scope="session")
def emulated() -> Path:
    """Returns the library with emulated instructions, so that each path runs on any CPU."""
    return emulated_library()


@pytest.fixture(scope="session")
def usable(request: pytest.FixtureRequest) -> list[str]:
    """Returns the arguments of the probes: the emulated library if this CPU lacks all instructions."""
    build.build()
    return [] if of_this_cpu() else [str(request.getfixturevalue("emulated"))]


@pytest.fixture(scope="module")
def emulation(emulated: Path, request: pytest.FixtureRequest) -> Iterator[Asking]:
    """Yields a function that asks the module's PROBE with emulated instructions."""
    with asking(request.module.PROBE, str(emulated)) as ask:
        yield ask


@pytest.fixture(scope="module")
def kernels(usable: list[str], request: pytest.FixtureRequest) -> Iterator[Asking]:
    """Yields a function that asks the module's PROBE on this CPU, if it has any of PROBE_SETS."""
    has_own = of_this_cpu(request.module.PROBE_SETS)
    with asking(request.module.PROBE, *([] if has_own else usable)) as ask:
        yield ask


@pytest.fixture
def on_path(path: str, request: pytest.FixtureRequest) -> Asking:
    """Yields a function that asks the kernels, with emulation if this CPU lacks the path's instructions."""
    own = path in of_this_cpu(request.module.PROBE_SETS)
    asks: Asking = request.getfixturevalue("kernels" if own else "emulation")
    return asks
