"""Defines the options, groups and references of the tests on a GPU machine.

Runs in the worker's own environment: pytest and pytest-timeout, no other plugin. The tests of each topology
run together, in the order of tests/gpu/topologies.py, on one group.
"""

import os
import signal
import tempfile
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.gpu import reference
from tests.gpu.machine import visible_gpus
from tests.gpu.reference import Answer
from tests.gpu.report import Report
from tests.gpu.started_groups import STARTS_AT_ONCE, Groups, Served, Site
from tests.gpu.topologies import TOPOLOGIES, Topology
from tests.integration.worker.conftest import make

MODEL_OPTIONS = {"float32": (), "bfloat16": ("--initializer-range", "0.05")}
"""For bf16, a model whose logprobs rounding alone moves by less than the limit (tests/models.py)."""
REFERENCE_ENV = {
    # Layers are tiny. Two threads that shared a busy CPU took minutes instead of 15 s.
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_PLUGINS": "",  # stock: without a look for our plugin
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TRITON_F32_DEFAULT": "ieee",
}
REPORT = pytest.StashKey[Report]()
LEFT_OUT = pytest.StashKey[list[str]]()

References = dict[str, Future[tuple[Answer, ...]]]
"""The reference: `transformers`, or the dtype in which stock vLLM runs on one device."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("heteroinfer")
    group.addoption(
        "--devices-as-cpu",
        action="store_true",
        help="a dry run without a GPU: CPU ranks replace GPU ranks",
    )
    group.addoption("--report", type=Path, help="write the table of results here; default $OUT/topologies.md")
    group.addoption(
        "--groups-at-once",
        type=int,
        default=STARTS_AT_ONCE,
        help="groups alive at the same time; default: %(default)s",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Registers the markers, and prepares the table of results. Fails without a GPU."""
    config.addinivalue_line(
        "markers", "gpus2: needs two GPUs. With fewer, it is skipped, and the summary shows this"
    )
    config.addinivalue_line("markers", "gpu: needs a GPU, also in a dry run with --devices-as-cpu")
    as_cpu = config.getoption("--devices-as-cpu")
    config.stash[REPORT] = Report(as_cpu=as_cpu)
    config.stash[LEFT_OUT] = []
    if not as_cpu and not visible_gpus():
        raise pytest.UsageError(
            "tests/gpu needs an NVIDIA GPU: nvidia-smi found none. Run it on a machine with a GPU, or try "
            "the topologies with --devices-as-cpu"
        )
    # A signal that ends this process must not leave groups on the GPU.
    signal.signal(signal.SIGTERM, _terminate)


def _terminate(*_: object) -> None:
    pytest.exit("terminated by a signal")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the tests by topology, and skips those that need more GPUs than this machine has."""
    gpus = len(visible_gpus())
    as_cpu = config.getoption("--devices-as-cpu")

    def runs(item: pytest.Item) -> bool:
        if item.get_closest_marker("gpus2") is not None and not as_cpu:
            return gpus >= 2
        return item.get_closest_marker("gpu") is None or gpus >= 1

    left_out = [item for item in items if not runs(item)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        config.stash[LEFT_OUT] = [item.nodeid for item in left_out]
    position = {topology.name: index for index, topology in enumerate(TOPOLOGIES)}

    def order(item: pytest.Item) -> int:
        topology = topology_of(item)
        return -1 if topology is None else position[topology.name]

    items[:] = sorted((item for item in items if runs(item)), key=order)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Records failures in the table of results, and writes them with the group's logs to a file."""
    outcome = yield
    topology = topology_of(item)
    if outcome.failed:
        if topology is not None:
            item.config.stash[REPORT].row(topology).failures.append(getattr(item, "originalname", item.name))
        write_failure(item, outcome.longreprtext)
    return outcome


def write_failure(item: pytest.Item, text: str) -> None:
    """Appends a failure to `failures.txt` beside the report, if there is a report."""
    report = report_path(item.config)
    if report is None:
        return
    served = getattr(item, "funcargs", {}).get("served")
    logs = served.group.logs() if isinstance(served, Served) else ""
    report.parent.mkdir(parents=True, exist_ok=True)
    with report.with_name("failures.txt").open("a") as file:
        file.write(f"===== {item.nodeid}\n{text}\n{logs}\n")


def pytest_terminal_summary(
    terminalreporter: "pytest.TerminalReporter", exitstatus: int, config: pytest.Config
) -> None:
    """Prints the table of results, and the skipped tests."""
    report, left_out = config.stash[REPORT], config.stash[LEFT_OUT]
    if report.rows:
        terminalreporter.section("topologies")
        table = report.to_markdown()
        terminalreporter.write_line(table)
        path = report_path(config)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(table)
            terminalreporter.write_line(f"written to {path}")
    if left_out:
        here = len(visible_gpus())
        terminalreporter.section(
            f"NOT RUN: {len(left_out)} tests need more GPUs than the {here} of this machine"
        )
        for nodeid in left_out:
            terminalreporter.write_line(nodeid)


def report_path(config: pytest.Config) -> Path | None:
    """Returns the file for the table, or None for the terminal only."""
    given: Path | None = config.getoption("--report")
    out = os.environ.get("OUT")
    return given or (Path(out) / "topologies.md" if out else None)


def topology_of(item: pytest.Item) -> Topology | None:
    """Returns the topology of a test, if it has one."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("topology") if callspec is not None else None


def wanted(session: pytest.Session) -> list[Topology]:
    """Returns the topologies of the selected tests in order, each once."""
    found = (topology_of(item) for item in session.items)
    return list(dict.fromkeys(topology for topology in found if topology is not None))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Path]:
    """Makes the model of each dtype that the tests need."""
    dtypes = dict.fromkeys(topology.dtype for topology in wanted(request.session))
    return {dtype: make(tmp_path_factory.mktemp(dtype), *MODEL_OPTIONS[dtype]) for dtype in dtypes}


@pytest.fixture(scope="session")
def references(
    models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[References]:
    """Starts to compute the answers of one device alone, while the first groups start."""
    folder = tmp_path_factory.mktemp("references")
    device = "cpu" if request.config.getoption("--devices-as-cpu") else "gpu"
    give_up = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        found: References = {}

        def start(name: str, kind: str, model: Path, *options: str) -> None:
            found[name] = threads.submit(
                reference.make,
                kind,
                model,
                folder / f"{name}.json",
                *options,
                env=REFERENCE_ENV,
                give_up=give_up,
            )

        for dtype, model in models.items():
            start(dtype, "vllm", model, "--dtype", dtype, "--device", device)
            if dtype == "float32":
                start("transformers", "transformers", model)
        yield found
        threads.shutdown(wait=False, cancel_futures=True)
        give_up.set()


@pytest.fixture(scope="session", autouse=True)
def groups(
    models: dict[str, Path],
    references: References,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Iterator[Groups]:
    """Starts the groups of the selected tests, at most --groups-at-once at the same time.

    The first ones start with the session, beside tests that need no group.
    """
    as_cpu = request.config.getoption("--devices-as-cpu")
    site = Site(
        models=models,
        logs=tmp_path_factory.mktemp("groups"),
        # The compilers' caches stay after a run of the tests, as a node's cache stays after a pod.
        caches=Path(tempfile.gettempdir()) / "heteroinfer-test-gpu",
        gpus=() if as_cpu else visible_gpus(),
        devices_as_cpu=as_cpu,
    )
    groups = Groups(site, wanted(request.session), at_once=request.config.getoption("--groups-at-once"))
    try:
        yield groups
    finally:
        groups.close()


@pytest.fixture
def served(
    groups: Groups, topology: Topology, report: Report, request: pytest.FixtureRequest
) -> Iterator[Served]:
    """Yields the ready group of this test's topology. It ends after the last test of its topology."""
    last = next(item for item in reversed(request.session.items) if topology_of(item) == topology)
    try:
        served = groups.take(topology)
        report.row(topology).ready_s = served.ready_s
        yield served
    finally:
        if last is request.node:
            groups.release(topology)


@pytest.fixture
def report(request: pytest.FixtureRequest) -> Report:
    """Yields the table of results."""
    return request.config.stash[REPORT]
