"""Writes a pod's termination message, which the operator reads. Stdlib only."""

import logging
from pathlib import Path

_logger = logging.getLogger(__name__)


def write(path: Path, text: str) -> None:
    """Writes a termination message; only logs an error if that fails."""
    try:
        path.write_text(text)
    except OSError as error:
        _logger.error(
            "termination message: cannot write %s (%s), so the operator cannot report the result of this "
            "pod. Check this path, and read the result in the log of this pod",
            path,
            error,
        )
