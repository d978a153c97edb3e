"""The kernels' library for tests: on this CPU's instructions, or with all of them emulated."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.kernels.instructions import emulated_library, of_this_cpu
from tests.integration.kernels.probe_answers import Asking, asking
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


@pytest.fixture(scope="module")
def emulation(emulated: Path, request: pytest.FixtureRequest) -> Iterator[Asking]:
    """Asks the module's PROBE with the instructions emulated."""
    with asking(request.module.PROBE, str(emulated)) as ask:
        yield ask


@pytest.fixture(scope="module")
def kernels(usable: list[str], request: pytest.FixtureRequest) -> Iterator[Asking]:
    """Asks the module's PROBE on this CPU's own instructions, if it has any of PROBE_SETS."""
    has_own = of_this_cpu(request.module.PROBE_SETS)
    with asking(request.module.PROBE, *([] if has_own else usable)) as ask:
        yield ask


@pytest.fixture
def on_path(path: str, request: pytest.FixtureRequest) -> Asking:
    """Asks the kernels on this CPU's own instructions if it has those of the path, emulated if not."""
    own = path in of_this_cpu(request.module.PROBE_SETS)
    asks: Asking = request.getfixturevalue("kernels" if own else "emulation")
    return asks
