"""Parses JSON of any depth. `metadata.managedFields` of a stored object may be deep. Pure."""

import json
import re
from typing import Any, Final

MAX_DEPTH: Final = 200
"""Values at a greater depth are replaced by null. Ten times the depth of Kubernetes' own objects."""
_TOKEN: Final = re.compile(r'"(?:[^"\\]|\\.)*+"|[][{}]', re.DOTALL)
"""A string, or a bracket outside of strings."""


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. If Python's parser fails at deep nesting, replaces values deeper than MAX_DEPTH by null.

    An account that may create pods can store `metadata.managedFields` that nest thousands of times. Such an
    object must not make a whole list unreadable.

    Raises:
        ValueError: the text is not JSON.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return json.loads(_cut_deep_values(text.decode() if isinstance(text, bytes) else text))


def _cut_deep_values(text: str) -> str:
    """Returns the JSON text with null for each object and list that is nested deeper than MAX_DEPTH.

    A string is one token, so brackets in strings do not count.
    """
    pieces: list[str] = []
    depth = 0
    start = 0  # where the text begins that is not in `pieces` yet
    for token in _TOKEN.finditer(text):
        if token[0] in "[{":
            depth += 1
            if depth == MAX_DEPTH + 1:  # the begin of a value that is too deep
                pieces += [text[start : token.start()], "null"]
        elif token[0] in "]}":
            if depth == MAX_DEPTH + 1:  # the end of this value
                start = token.end()
            depth -= 1
    return "".join([*pieces, text[start:]])
