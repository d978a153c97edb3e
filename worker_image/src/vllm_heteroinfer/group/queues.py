"""vLLM's message queues between the executor and the ranks: handles as text, waits with a deadline.

Imports vLLM. Source: vllm/distributed/device_communicators/shm_broadcast.py::MessageQueue@v0.32.0.
"""

import contextlib
import dataclasses
import json
from typing import Any

import zmq
from vllm.distributed.device_communicators.shm_broadcast import Handle, MessageQueue

from vllm_heteroinfer.group.deadline import Deadline


def handle_to_json(queue: MessageQueue) -> str:
    """Returns where the queue is reached, for the group's store; JSON, so that nobody unpickles it."""
    return json.dumps(dataclasses.asdict(queue.export_handle()))


def open_queue(text: str, reader: int) -> MessageQueue:
    """Returns the reading end of the queue described by `text`, for the reader of this number."""
    raw: dict[str, Any] = json.loads(text)
    for name in ("buffer_handle", "tensor_arena_handle"):
        if raw[name] is not None:
            raw[name] = tuple(raw[name])
    return MessageQueue.create_from_handle(Handle(**raw), reader)


def wait_until_ready(queue: MessageQueue, deadline: Deadline, *, what: str) -> None:
    """Waits until both ends of a queue are connected; every process that holds it must call this.

    MessageQueue.wait_until_ready waits without a limit, so its sockets get one meanwhile.
    Once all readers are in, the shared memory loses its name: it then vanishes with the
    processes, however they end.

    Raises:
        TimeoutError: the other end did not come.
    """
    sockets = [s for s in (queue.local_socket, queue.remote_socket) if s is not None]
    for socket in sockets:
        socket.setsockopt(zmq.RCVTIMEO, max(1, int(deadline.left_s * 1000)))
    try:
        queue.wait_until_ready()
    except zmq.Again as error:
        raise TimeoutError(
            f"{what} did not connect within {deadline.total_s:.0f} s; look at its log"
        ) from error
    finally:
        for socket in sockets:
            socket.setsockopt(zmq.RCVTIMEO, -1)
    buffer = queue.buffer
    if buffer is not None and buffer.is_creator:
        with contextlib.suppress(FileNotFoundError):  # the resource tracker of a reader was faster
            buffer.shared_memory.unlink()
        buffer.is_creator = False
