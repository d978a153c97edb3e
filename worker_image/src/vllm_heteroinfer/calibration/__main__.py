"""The process that `heteroinfer-worker calibrate` becomes: `python -m vllm_heteroinfer.calibration`."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from heteroinfer_contract.parent_death import adopt_orphans
from vllm_heteroinfer.calibration.command import LIMIT_S, calibrate
from vllm_heteroinfer.calibration.sigterm import exit_at_sigterm

MIN_LIMIT_S, MAX_LIMIT_S = 5.0, 3600.0


def main(argv: Sequence[str] | None = None) -> int:
    """Measures this machine and prints the calibration. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="heteroinfer-worker calibrate", description="Measures this machine and prints the calibration."
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="file to write instead of stdout")
    parser.add_argument(
        "--limit",
        type=_parse_limit,
        default=LIMIT_S,
        metavar="SECONDS",
        help=f"time limit; measurements that do not fit are skipped; default: {LIMIT_S:g}",
    )
    parser.add_argument(
        "--termination-message-path",
        type=Path,
        help="file for the calibration or the failure, in addition to --output",
    )
    arguments = parser.parse_args(argv)
    exit_at_sigterm()
    adopt_orphans()
    return calibrate(arguments.output, arguments.termination_message_path, limit_s=arguments.limit)


def _parse_limit(text: str) -> float:
    """Parses a time limit in seconds; raises ArgumentTypeError."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0  # too short, so refused below
    if not MIN_LIMIT_S <= seconds <= MAX_LIMIT_S:
        raise argparse.ArgumentTypeError(f"must be {MIN_LIMIT_S:g} to {MAX_LIMIT_S:g} seconds (got {text!r})")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
