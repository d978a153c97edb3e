"""Opens vLLM's message queues between the executor and the ranks, with deadlines.

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
    """Serialises the queue's address for the group's store. JSON, because unpickling would be unsafe."""
    return json.dumps(dataclasses.asdict(queue.export_handle()))


def open_queue(text: str, reader: int) -> MessageQueue:
    """Opens the reading end of the queue that `text` describes, as the reader with this number."""
    raw: dict[str, Any] = json.loads(text)
    for name in ("buffer_handle", "tensor_arena_handle"):  # JSON has lists in place of tuples
        if raw[name] is not None:
            raw[name] = tuple(raw[name])
    return MessageQueue.create_from_handle(Handle(**raw), reader)


def wait_until_ready(queue: MessageQueue, deadline: Deadline, *, other_end: str) -> None:
    """Waits until both ends of a queue are connected. Every process that uses the queue must call this.

    MessageQueue.wait_until_ready waits without a limit, so this function sets a receive timeout on its
    sockets. Once all readers are connected, the creator of the shared memory removes the memory's name. Then
    the kernel frees the memory when the last process ends, even if all are killed.

    Args:
        other_end: name of the process or processes at the other end, for the error.

    Raises:
        TimeoutError: the other end did not connect in time.
    """
    sockets = [each for each in (queue.local_socket, queue.remote_socket) if each is not None]
    for socket in sockets:
        socket.setsockopt(zmq.RCVTIMEO, max(1, int(deadline.left_s * 1000)))
    try:
        queue.wait_until_ready()
    except zmq.Again as error:
        raise TimeoutError(
            f"{other_end} did not connect within {deadline.total_s:.0f} s. Read the log of {other_end}"
        ) from error
    finally:
        for socket in sockets:
            socket.setsockopt(zmq.RCVTIMEO, -1)
    buffer = queue.buffer
    if buffer is not None and buffer.is_creator:
        with contextlib.suppress(FileNotFoundError):  # a reader's resource tracker has removed it already
            buffer.shared_memory.unlink()
        buffer.is_creator = False  # so its destructor does not remove the name again
