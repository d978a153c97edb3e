"""Words for the person who waits; on stderr, since stdout is for what a shell evaluates."""

import sys


def say(words: str) -> None:
    """Prints one line of progress."""
    print(words, file=sys.stderr, flush=True)
