"""Marks errors that only result from the end of another process. Stdlib only; pure.

Code that talks to another process wraps the call in `Conversation`, which marks its errors. The message of
an error is never evaluated.
"""

from enum import StrEnum
from types import TracebackType


class Lost(StrEnum):
    """Which other process a rank has lost."""

    RANK = "rank"
    ENGINE = "engine"


class PeerGoneError(RuntimeError):
    """Another process of the group is gone or silent; this rank is not the cause.

    Attributes:
        peer: global rank of the other process; None for the engine.
    """

    def __init__(self, peer: int | None, message: str) -> None:
        self.peer = peer
        super().__init__(message)


class Conversation:
    """Turns the errors of a connection to another process into PeerGoneError; put nothing else in its block.

    Args:
        peer: global rank at the other end; None for the engine.
        call: name of the call, for the message.
    """

    def __init__(self, peer: int | None, call: str) -> None:
        self._peer, self._call = peer, call

    def __enter__(self) -> None:
        """Begins the block."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Raises PeerGoneError in place of the connection's error."""
        if isinstance(error, RuntimeError | OSError) and not isinstance(error, PeerGoneError):
            other = "the engine" if self._peer is None else f"rank {self._peer}"
            message = (
                f"{self._call} failed, since {other} is gone or silent ({error}). Read the log of {other}"
            )
            raise PeerGoneError(self._peer, message) from error


def find_lost_process(error: BaseException) -> Lost | None:
    """Returns the lost process that caused an error; None if this process caused the error itself."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, PeerGoneError):
            return Lost.ENGINE if cause.peer is None else Lost.RANK
        if _comes_from_torch_distributed(cause):
            return Lost.RANK
        cause = cause.__cause__
    return None


def _comes_from_torch_distributed(error: BaseException) -> bool:
    """Returns whether torch.distributed raised an error that vLLM passed on.

    Most errors of torch.distributed have the class DistError. Errors of gloo are plain RuntimeErrors, so the
    module of the function that raised the error decides (torch/distributed/distributed_c10d.py@v2.13.0).
    """
    classes = type(error).__mro__
    if any((each.__module__, each.__name__) == ("torch.distributed", "DistError") for each in classes):
        return True
    trace = error.__traceback__
    if type(error) is not RuntimeError or trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__", ""))
    return module == "torch.distributed" or module.startswith("torch.distributed.")
