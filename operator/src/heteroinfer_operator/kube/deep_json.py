"""Parses JSON of any depth, as the API server stores it in the fields of managers. Pure."""

import json
import re
from typing import Any, Final

MOST_DEPTH: Final = 200
"""Kubernetes' own objects nest a tenth of this."""
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*+"|[][{}]', re.DOTALL)


def parse_json(text: str | bytes) -> Any:
    """Returns what JSON says; values that nest deeper than Python's parser goes are null.

    Whoever may create a pod may store `metadata.managedFields` that nest thousands of times. Such an object
    must not keep the list that it is in from being read.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return json.loads(_without_depth(text.decode() if isinstance(text, bytes) else text))


def _without_depth(text: str) -> str:
    """Returns JSON with null for each object and list below MOST_DEPTH others."""
    kept: list[str] = []
    depth = start = 0
    for token in _TOKEN.finditer(text):
        if token[0] in "[{":
            depth += 1
            if depth == MOST_DEPTH + 1:
                kept += [text[start : token.start()], "null"]
        elif token[0] in "]}":
            if depth == MOST_DEPTH + 1:
                start = token.end()
            depth -= 1
    return "".join([*kept, text[start:]])
