"""Background threads whose end is never overlooked. Stdlib only."""

import threading
from collections.abc import Callable


def start_thread(
    run: Callable[[], object], *, name: str, failed: Callable[[BaseException], object]
) -> threading.Thread:
    """Starts a thread that the process does not wait for, and reports its exception.

    Use this function in place of `threading.Thread`: Python prints the exception of a thread and goes on
    without the thread (tests/unit/test_background_threads.py enforces this).

    Args:
        run: what the thread runs.
        name: for logs.
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
