"""Log lines without terminal sequences: pods, webhooks and users' objects can put any text into a message."""

import logging
from typing import Final

from heteroinfer_contract.printable import printable

_KEPT: Final = "\n\t"
"""Tracebacks have several lines."""


class PrintableFormatter(logging.Formatter):
    """Formats as usual, then escapes control characters, except line breaks and tabs."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats one record."""
        return printable(super().format(record), keep=_KEPT)
