"""The process that `heteroinfer-worker calibrate` becomes: `python -m vllm_heteroinfer.calibration`."""

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from heteroinfer_contract.names import exit_code_of
from heteroinfer_contract.parent_death import adopt_orphans
from vllm_heteroinfer.calibration.command import LIMIT_S, calibrate

LEAST_LIMIT_S, MOST_LIMIT_S = 5.0, 3600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the command line; see `heteroinfer-worker calibrate --help`."""
    parser = argparse.ArgumentParser(prog="heteroinfer-worker calibrate", description=main.__doc__)
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write it there, not to stdout")
    parser.add_argument(
        "--limit",
        type=_limit,
        default=LIMIT_S,
        metavar="SECONDS",
        help=f"leave out what is not measured by then; {LIMIT_S:g} if not given",
    )
    parser.add_argument("--termination-message-path", type=Path, help="write it there, too")
    arguments = parser.parse_args(argv)
    _end_when_asked()
    adopt_orphans()
    return calibrate(arguments.output, arguments.termination_message_path, limit_s=arguments.limit)


def _end_when_asked() -> None:
    """Ends this process on SIGTERM with what it has started and written, also as PID 1.

    The command line has blocked the signal for as long as nobody here took it.
    """
    signal.signal(signal.SIGTERM, _leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)  # once is enough
    raise SystemExit(exit_code_of(number))


def _limit(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not LEAST_LIMIT_S <= seconds <= MOST_LIMIT_S:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected {LEAST_LIMIT_S:g} to {MOST_LIMIT_S:g} seconds"
        )
    return seconds


if __name__ == "__main__":
    sys.exit(main())
