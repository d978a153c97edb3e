"""Answers questions line by line in the worker's Python, for `asking.Probe`."""

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any


def serve(questions: Mapping[str, Callable[[dict[str, Any]], Any]]) -> None:
    """Answers each line of stdin, `[name, question]` as JSON, with a line on stdout, until stdin ends."""
    for line in sys.stdin:
        name, question = json.loads(line)
        print(json.dumps(questions[name](question)), flush=True)
