"""Ends a measuring process at SIGTERM. Stdlib and the contract only."""

import signal
from types import FrameType

from heteroinfer_contract.names import exit_code_of_signal


def exit_at_sigterm() -> None:
    """Makes this process end at SIGTERM, with its children and its temporary files.

    Without a handler, a process with PID 1 ignores SIGTERM. launch/cli.py has blocked the signal, so an
    earlier SIGTERM is not lost: it takes effect when this function unblocks the signal.
    """
    signal.signal(signal.SIGTERM, _exit)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _exit(number: int, frame: FrameType | None) -> None:
    """Ends this process with the exit code of a signal; ignores further signals during the cleanup."""
    signal.signal(number, signal.SIG_IGN)  # a second SIGTERM must not interrupt the cleanup
    raise SystemExit(exit_code_of_signal(number))
