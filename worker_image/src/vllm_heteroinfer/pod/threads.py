"""Background threads that report their exceptions, and threads for calls that may block. Stdlib only."""

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
        """Runs the function, and passes an error to `failed`."""
        try:
            run()
        except BaseException as error:  # no thread may end without a report
            failed(error)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    return thread


class LastingThread:
    """A thread that runs calls one after another. A process that ends does not wait for the thread.

    asyncio.to_thread() is not suitable: asyncio joins its threads before the loop ends, so one call that
    hangs in the kernel would keep the process alive.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    async def call(self, function: Callable[[], T]) -> T:
        """Runs `function` on the thread, after earlier calls. Returns its result or raises its exception.

        If this coroutine is cancelled while `function` runs, `function` continues and its result is dropped.
        """
        answer: Future[T] = Future()
        self._calls.put((answer, function))
        return await asyncio.wrap_future(answer)

    def close(self) -> None:
        """Ends the thread once its calls have returned."""
        self._calls.put(None)

    async def end(self, timeout_s: float) -> bool:
        """Ends the thread once its calls have returned. Returns whether it ended within the timeout."""
        self.close()
        deadline_s = time.monotonic() + timeout_s
        while self._thread.is_alive() and time.monotonic() < deadline_s:
            await asyncio.sleep(END_POLL_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        """Runs the calls one after another, until `close`."""
        while (call := self._calls.get()) is not None:
            answer, function = call
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(function())
            except BaseException as error:  # the coroutine that awaits the answer raises it
                answer.set_exception(error)


async def call_aside(name: str, function: Callable[[], T]) -> T:
    """Runs `function` on a thread of its own. Returns its result or raises its exception.

    A process that ends does not wait for the thread. If this coroutine is cancelled while `function` runs,
    `function` continues and its result is dropped.
    """
    thread = LastingThread(name)
    try:
        return await thread.call(function)
    finally:
        thread.close()
