"""Answers each request of a GPU with the rows of the request, so that `gpu` can measure the exchange.

Run as `python -m vllm_heteroinfer.calibration.echo OFFER`. Imports torch.
"""

import ctypes
import sys

import torch

from vllm_heteroinfer.feed_forward import slab_library
from vllm_heteroinfer.feed_forward.slab import Offer, connect

SPIN_NS = 50_000_000
"""Time that this process spins before it sleeps: longer than the GPU's time between two requests."""
LIMIT_NS = 1_000_000_000
"""Longest single wait for a request. After this time, the process begins another wait."""


def main(argv: list[str]) -> None:
    """Answers requests until the process that created the slab stops the slab, or kills this process."""
    torch.set_num_threads(1)
    offer = Offer.from_json(argv[0])
    slab, _ = connect(offer, 0, offer.shape)
    calls = slab_library.load()
    layer, rows = ctypes.c_uint32(), ctypes.c_uint32()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    while True:
        state = calls.heteroinfer_ff_next(
            slab.address, 0, SPIN_NS, LIMIT_NS, ctypes.byref(layer), ctypes.byref(rows)
        )
        if state == slab_library.STOPPED:
            return
        if state == slab_library.ASKED:
            slab.y[0][: rows.value].copy_(slab.x[: rows.value])
            # Lane 0, status 0 (success), the rows, no experts, no time of computing.
            calls.heteroinfer_ff_answer(slab.address, 0, 0, rows.value, None, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1:])
