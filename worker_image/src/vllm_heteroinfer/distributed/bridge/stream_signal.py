"""Words of host memory that a GPU's stream writes by itself, in its order.

A host that waits for the stream to write the word instead knows late: on the H200 a
synchronize takes 5 us longer than the word (2026-11-21).
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch


class StreamSignal:
    """Writes words of one memory, when all that is in the stream now is done and seen by the host.

    Source: cuStreamWriteValue64 of the CUDA driver API, whose default is to wait for all
    writes before it, and to let the system see them.
    """

    def __init__(
        self, words: "memoryview[int]", address: int, device: torch.device, *, proof_word: int
    ) -> None:
        """Proves that the driver does it.

        Args:
            words: int64, page-locked host memory that the device maps at its own address.
            proof_word: number of a word that nothing else uses.

        Raises:
            OSError: the driver lacks it, or the word did not come.
        """
        self._address, self._device = address, device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._write = _driver_call()
        wanted = words[proof_word] + 1
        try:
            self.write(proof_word, wanted)
            torch.cuda.current_stream(device).synchronize()
        except RuntimeError as error:
            raise OSError(str(error)) from error
        if words[proof_word] != wanted:
            raise OSError(f"{device} wrote no word: got {words[proof_word]}, expected {wanted}")

    def write(self, word: int, value: int) -> None:
        """Puts the write of word number `word` into the current stream.

        Raises:
            RuntimeError: the driver refused.
        """
        status = self._write(self.stream(), self._address + 8 * word, value, 0)
        if status:
            raise RuntimeError(f"{self._device}: cuStreamWriteValue64 failed with {status}")

    def stream(self) -> int:
        """Returns the handle of the current stream, in which it writes."""
        # The public torch.cuda.current_stream makes an object each time, which takes 2 us.
        return int(torch._C._cuda_getCurrentRawStream(self._index))

    def check(self) -> None:
        """Raises what the device has met; the words of a failed stream never come."""
        torch.cuda.current_stream(self._device).query()


def find_signal(
    words: "memoryview[int]", address: int, device: torch.device, proof_word: int
) -> tuple[StreamSignal | None, str]:
    """Returns what lets a device publish small parts by itself, if it can; and who publishes, for the log.

    Arguments as `StreamSignal`.
    """
    try:
        signal = StreamSignal(words, address, device, proof_word=proof_word)
    except OSError as error:  # a few us slower, and the log says so
        return None, f"the host publishes, since the device cannot: {error}"
    return signal, "the device publishes small parts"


def _driver_call() -> Callable[[int, int, int, int], int]:
    try:
        call: Any = ctypes.CDLL("libcuda.so.1").cuStreamWriteValue64_v2
    except AttributeError as error:
        raise OSError(f"the driver has no cuStreamWriteValue64: {error}") from error
    call.argtypes = (ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint)
    call.restype = ctypes.c_int
    return call
