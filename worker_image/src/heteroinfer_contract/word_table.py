"""Parses tables of names that modules contain as wrapped text. Stdlib only; pure."""

from collections.abc import Mapping
from types import MappingProxyType


def word_set(text: str) -> frozenset[str]:
    """Returns the words of a text, as a set."""
    return frozenset(text.split())


def word_pairs(text: str) -> Mapping[str, str]:
    """Pairs the words of a text. Returns a mapping from each first word to the second."""
    words = text.split()
    return MappingProxyType(dict(zip(words[::2], words[1::2], strict=True)))
