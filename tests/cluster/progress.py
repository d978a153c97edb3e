"""Prints progress for the waiting user to stderr, because a shell evaluates stdout."""

import sys


def say(words: str) -> None:
    """Prints one line of progress."""
    print(words, file=sys.stderr, flush=True)
