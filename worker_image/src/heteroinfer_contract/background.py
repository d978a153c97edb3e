"""Background tasks whose exceptions are always reported. Stdlib only."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

_RUNNING: Final[set[asyncio.Task[Any]]] = set()
"""Keeps the tasks alive: asyncio holds only weak references, so a task could be collected before it ends."""


def start_task(
    work: Coroutine[Any, Any, T], *, name: str, failed: Callable[[BaseException], None]
) -> asyncio.Task[T]:
    """Starts a task in the running event loop and reports its exception. Returns the task.

    Use this function, or an `asyncio.TaskGroup`, in place of `asyncio.create_task`: a task that nobody awaits
    ends silently when it raises (tests/unit/test_background.py enforces this).

    Args:
        failed: called in the event loop with the exception that ended the task; not called when the task is
            cancelled. It must not raise.
    """
    task = asyncio.get_running_loop().create_task(work, name=name)
    _RUNNING.add(task)

    def ended(task: asyncio.Task[T]) -> None:
        """Forgets the ended task, and reports its error."""
        _RUNNING.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            failed(error)

    task.add_done_callback(ended)
    return task
