"""Measures the time that a message takes from one process to another.

Run as `python -m vllm_heteroinfer.calibration.hops RANK FILE`.

Both ranks run on this machine, so the times do not include a network. Imports torch.
"""

import sys
from datetime import timedelta
from functools import partial
from typing import Final

import torch

from heteroinfer_contract.calibration import HopPath
from vllm_heteroinfer.calibration.process_output import report, rounded
from vllm_heteroinfer.kernels.rounds import median_s

SIZES: Final = (8 << 10, 64 << 10, 1 << 20)
"""Sizes in bytes of the hidden states of 1, 8 and 128 tokens of a model with hidden size 4096."""
ROUND_TRIPS: Final = 20
"""Round trips that one measured time covers."""
TIMEOUT: Final = timedelta(seconds=20)
"""Limit for the connection and for each message."""


def main(argv: list[str]) -> None:
    """Measures messages of each size, as rank 0 or as rank 1.

    Rank 0 sends messages, rank 1 sends them back, and rank 0 reports half of the time of a round trip. A
    message whose first byte is not 0 is the last of its size. The ranks find each other through a file,
    because another process could take a port between its choice and its use.

    Args:
        argv: number of this rank, 0 or 1, and path of the file.
    """
    rank, file = int(argv[0]), argv[1]
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(file, 2)
    store.set_timeout(TIMEOUT)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=TIMEOUT)
    for size in SIZES:
        message = torch.zeros(size, dtype=torch.uint8)
        if rank:
            _send_back(message)
            continue
        seconds = median_s([partial(_send_and_receive, message)] * ROUND_TRIPS)
        torch.distributed.send(torch.ones(size, dtype=torch.uint8), 1)
        report("hops", path=HopPath.GLOO, message_bytes=size, seconds=rounded(seconds / ROUND_TRIPS / 2))
    torch.distributed.destroy_process_group()


def _send_and_receive(message: torch.Tensor) -> None:
    """Sends a message to rank 1, and waits until rank 1 has sent it back."""
    torch.distributed.send(message, 1)
    torch.distributed.recv(message, 1)


def _send_back(message: torch.Tensor) -> None:
    """Sends back each message until the last message, whose first byte is not 0."""
    while True:
        torch.distributed.recv(message, 0)
        if message[0]:
            return
        torch.distributed.send(message, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
