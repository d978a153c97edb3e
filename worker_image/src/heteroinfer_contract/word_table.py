"""Tables of names that the source has as wrapped words. Stdlib only; pure."""

from collections.abc import Mapping
from types import MappingProxyType


def word_set(text: str) -> frozenset[str]:
    """Splits a text at its blanks and line breaks."""
    return frozenset(text.split())


def word_pairs(text: str) -> Mapping[str, str]:
    """Maps every first word of a text to the one behind it."""
    words = text.split()
    return MappingProxyType(dict(zip(words[::2], words[1::2], strict=True)))
