"""Downloads side by side: a refusal for good is raised at once; else all downloads end first."""

import os
import queue
import threading
from collections.abc import Callable, Sequence

from heteroinfer_contract.model_fetch import FetchedFile
from vllm_heteroinfer.fetch.errors import FetchError


def fetch_side_by_side(
    files: Sequence[FetchedFile],
    fetch: Callable[[FetchedFile], None],
    *,
    at_once: int,
    share_lock: Callable[[], int],
) -> None:
    """Fetches files, a few at once; after an error no other file is begun.

    Downloads that run when a file is refused for good cannot be ended here: they go on until the process
    ends, and keep the lock of their folder until then, so that another fetch never writes to their parts
    beside them. The process does not wait for their threads.

    Args:
        fetch: fetches a file; raises FetchError.
        share_lock: returns a descriptor that keeps the lock of the folder until it is closed.

    Raises:
        FetchError: a file was refused for good, as soon as it was; or another error of `fetch`, once the
            other downloads have ended.
    """
    waiting: queue.SimpleQueue[FetchedFile] = queue.SimpleQueue()
    for file in files:
        waiting.put(file)
    ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    failed = threading.Event()

    def work(lock: int) -> None:
        error: BaseException | None = None
        try:
            while not failed.is_set() and (file := _next(waiting)) is not None:
                fetch(file)
        except BaseException as raised:  # for the thread that waits below
            failed.set()
            error = raised
        finally:
            os.close(lock)
            ended.put(error)

    workers = [
        threading.Thread(target=work, args=(share_lock(),), name=f"fetch-{number}", daemon=True)
        for number in range(min(at_once, len(files)))
    ]
    for worker in workers:
        worker.start()
    first: BaseException | None = None
    for _ in workers:
        error = ended.get()
        if error is not None and not (isinstance(error, FetchError) and error.may_heal):
            raise error
        first = first or error
    if first is not None:
        raise first


def _next(waiting: "queue.SimpleQueue[FetchedFile]") -> FetchedFile | None:
    try:
        return waiting.get_nowait()
    except queue.Empty:
        return None
