"""Words of host memory that a GPU's stream writes itself, in stream order.

The alternative is that the host waits for the stream and then writes the word. That is slower: on the
H200, a synchronize takes 5 us longer than a write by the stream (2026-11-21).
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch


class StreamSignal:
    """Writes words in host memory after all work now in the stream is done and visible to the host.

    Source: cuStreamWriteValue64 of the CUDA driver API. By default it waits for all earlier writes and
    makes them visible to the system.
    """

    def __init__(
        self, words: "memoryview[int]", address: int, device: torch.device, *, proof_word: int
    ) -> None:
        """Tests that the driver writes words.

        Args:
            words: int64, page-locked host memory that the device maps at the same address.
            proof_word: index of a word that nothing else uses.

        Raises:
            OSError: the driver has no such function, or did not write the word.
        """
        self._address, self._device = address, device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._write = _load_write_call()
        expected = words[proof_word] + 1
        try:
            self.write(proof_word, expected)
            torch.cuda.current_stream(device).synchronize()
        except RuntimeError as error:
            raise OSError(str(error)) from error
        if words[proof_word] != expected:
            raise OSError(
                f"{device} did not write a test word (expected {expected}, got {words[proof_word]})"
            )

    def write(self, word: int, value: int) -> None:
        """Queues the write of the word with index `word` on the current stream.

        Raises:
            RuntimeError: the driver refused.
        """
        status = self._write(self.stream(), self._address + 8 * word, value, 0)
        if status:
            raise RuntimeError(f"{self._device}: cuStreamWriteValue64 failed with CUDA error {status}")

    def stream(self) -> int:
        """Returns the handle of the current stream, which `write` uses."""
        # The public torch.cuda.current_stream creates an object on each call, which takes 2 us.
        return int(torch._C._cuda_getCurrentRawStream(self._index))

    def raise_device_error(self) -> None:
        """Raises the device's error, if any. A failed device never writes the words of its stream."""
        torch.cuda.current_stream(self._device).query()


def create_signal(
    words: "memoryview[int]", address: int, device: torch.device, proof_word: int
) -> tuple[StreamSignal | None, str]:
    """Creates a signal. Returns the signal, and the description of the publisher for the log.

    Returns None as the signal if the driver does not support signals. The arguments are those of
    `StreamSignal`.
    """
    try:
        signal = StreamSignal(words, address, device, proof_word=proof_word)
    except OSError as error:  # the host takes a few us longer; the log has the reason
        return None, f"by the host, because the device cannot write to host memory: {error}"
    return signal, "by the device for small parts, by the host for larger parts"


def _load_write_call() -> Callable[[int, int, int, int], int]:
    """Returns the driver's cuStreamWriteValue64; raises OSError if the driver lacks it."""
    try:
        call: Any = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue64_v2
    except AttributeError as error:
        raise OSError(f"the driver has no cuStreamWriteValue64: {error}") from error
    call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint)
    call.restype = ctypes.c_int
    return call
