"""Background threads whose end is never overlooked, and threads for calls that may block. Stdlib only."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
END_POLL_S = 0.005


def start_thread(
    run: Callable[[], object], *, name: str, failed: Callable[[BaseException], object]
) -> threading.Thread:
    """Starts a thread that the process does not wait for, and reports its exception.

    Use this function in place of `threading.Thread`: Python prints the exception of a thread and goes on
    without the thread (tests/unit/test_background_threads.py enforces this).

    Args:
        failed: called in the thread with the exception that ended it.
    """

    def guarded() -> None:
        try:
            run()
        except BaseException as error:  # the boundary of this thread
            failed(error)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


class LastingThread:
    """One thread that lives until it is ended, or as long as the process, which does not wait for it.

    asyncio.to_thread() has neither: its threads are joined before the loop ends, so that one call that
    hangs in the kernel would keep the process.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[[], T]) -> T:
        """Returns what `function` does, or raises what it raises; calls come one after another.

        One that has begun when this is cancelled goes on, and what it returns is dropped.
        """
        answer: Future[T] = Future()
        self._calls.put((answer, function))
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """Ends it once its calls have returned."""
        self._calls.put(None)

    async def end(self, timeout_s: float) -> bool:
        """Ends it once its calls have returned; returns whether that was within so long."""
        self.close()
        deadline_s = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            await asyncio.sleep(END_POLL_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            answer, function = call
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(function())
            except BaseException as error:  # for whoever awaits it
                answer.set_exception(error)


async def call_aside(name: str, function: Callable[[], T]) -> T:
    """Returns what `function` does on a thread that the process does not wait for, or raises what it raises.

    One that has begun when this is cancelled goes on, and what it returns is dropped.
    """
    thread = LastingThread(name)
    try:
        return await thread.call(function)
    finally:
        thread.close()
