"""No module of the product starts a task whose exception nobody sees."""

import ast
from collections import Counter
from collections.abc import Iterator

from tests.unit.product import SOURCES, modules_below

AWAITED = {
    "heteroinfer_contract.background": (1, "start_task itself"),
    "heteroinfer_operator.operator_process": (2, "_until awaits both, and raises what ended the work"),
}
"""By module: how many tasks it starts without start_task, and who looks at the exception of each."""


def _starts(source: str) -> Iterator[str]:
    """Finds calls that start a task outside of an `asyncio.TaskGroup` (a name that ends in `group`)."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        owner, _, name = called.rpartition(".")
        if name == "ensure_future" or (name == "create_task" and not owner.endswith("group")):
            yield called


def test_the_rule_finds_each_way_to_start_a_task() -> None:
    source = (
        "asyncio.create_task(x)\nloop.create_task(x)\nensure_future(x)\ngroup.create_task(x)\nstart_task(x)"
    )
    assert list(_starts(source)) == ["asyncio.create_task", "loop.create_task", "ensure_future"]


def test_the_exception_of_every_task_is_seen() -> None:
    found = Counter(
        {
            name: len(starts)
            for name, file in modules_below(SOURCES).items()
            if (starts := list(_starts(file.read_text())))
        }
    )
    assert found == {name: count for name, (count, _) in AWAITED.items()}, (
        "use heteroinfer_contract.background.start_task or an asyncio.TaskGroup, or list the module here "
        "with the code that awaits the task"
    )
