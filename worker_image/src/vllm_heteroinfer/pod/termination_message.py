"""The last word of a pod's process, for the operator. Stdlib only."""

import logging
from pathlib import Path

_logger = logging.getLogger(__name__)


def leave(path: Path, text: str) -> None:
    """Writes a termination message; where that is refused, the log says so, and nothing else changes."""
    try:
        path.write_text(text)
    except OSError as error:
        _logger.error("the termination message cannot be written: %s", error)
