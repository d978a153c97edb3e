"""A thread for calls that may block, and that must come from a thread that lives on. Stdlib only."""

import asyncio
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class LastingThread:
    """One thread that lives as long as the process, and whose calls nobody waits for at its end.

    asyncio.to_thread() has neither: its threads are joined before the loop ends, so that one call that
    hangs in the kernel would keep the process.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    async def call(self, function: Callable[[], T]) -> T:
        """Returns what `function` does, or raises what it raises; calls come one after another.

        One that has begun when this is cancelled goes on, and what it returns is dropped.
        """
        answer: Future[T] = Future()
        self._calls.put((answer, function))
        return await asyncio.wrap_future(answer)

    def _run(self) -> None:
        while True:
            answer, function = self._calls.get()
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(function())
            except BaseException as error:  # for whoever awaits it
                answer.set_exception(error)
