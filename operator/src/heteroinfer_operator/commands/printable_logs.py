"""Formats log lines without terminal sequences. Messages can contain any text of pods, webhooks or users."""

import json
import logging
from datetime import UTC, datetime
from typing import Final

from heteroinfer_contract.printable import printable

_NOT_ESCAPED: Final = "\n\t"
"""Control characters that stay in log lines, because tracebacks have several lines."""


class PrintableFormatter(logging.Formatter):
    """Formats as usual, then escapes control characters, except line breaks and tabs."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats one record."""
        return printable(super().format(record), keep=_NOT_ESCAPED)


class JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object on a line; escapes all but ASCII."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats one record."""
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields)
