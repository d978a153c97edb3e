"""No module of the product starts a thread whose exception nobody sees."""

import ast
import threading
from collections import Counter
from collections.abc import Iterator

from tests.unit.product import SOURCES, modules_below
from vllm_heteroinfer.pod.threads import start_thread

SEEN = {
    "heteroinfer_operator.kube.handlers": (1, "runs kopf, whose end ends the operator"),
    "vllm_heteroinfer.calibration.gpu": (1, "is joined by the measurement"),
    "vllm_heteroinfer.fetch.job": (1, "hands each exception to the thread that waits for the files"),
    "vllm_heteroinfer.launch.output": (2, ""),
    "vllm_heteroinfer.pod.channel": (1, ""),
    "vllm_heteroinfer.pod.threads": (
        2,
        "start_thread, and what gives each exception to the code that awaits it",
    ),
}
"""By module: how many threads it starts without start_thread, and how the exception of each is seen."""


def _starts(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in {"Thread", "Timer"}:
            yield ast.unparse(node.func)


def test_the_rule_finds_each_way_to_start_a_thread() -> None:
    source = "threading.Thread(target=x)\nThread(target=x)\nthreading.Timer(1, x)\nstart_thread(x)"
    assert list(_starts(source)) == ["threading.Thread", "Thread", "threading.Timer"]


def test_the_exception_of_every_thread_is_seen() -> None:
    found = Counter(
        {
            name: len(starts)
            for name, file in modules_below(SOURCES).items()
            if (starts := list(_starts(file.read_text())))
        }
    )
    assert found == {name: count for name, (count, _) in SEEN.items()}, (
        "use vllm_heteroinfer.pod.threads.start_thread, or list the module here with the way in "
        "which the exception of its thread is seen"
    )


def test_reports_the_exception_of_a_thread() -> None:
    failures: list[BaseException] = []
    told = threading.Event()

    def failed(error: BaseException) -> None:
        failures.append(error)
        told.set()

    def run() -> None:
        raise OSError("Stale file handle")

    thread = start_thread(run, name="test", failed=failed)
    assert told.wait(10)
    thread.join(10)
    assert [str(error) for error in failures] == ["Stale file handle"]
