"""Recognises connections that failed because of an untrusted certificate. Stdlib only."""

import ssl
from collections.abc import Iterator


def is_distrusted(error: BaseException) -> bool:
    """Checks whether an untrusted certificate caused an error, directly or through other errors."""
    return any(isinstance(cause, ssl.SSLCertVerificationError) for cause in _causes(error))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yields an error and all errors that led to it."""
    seen: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        each = waiting.pop()
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            # urllib stores the original error as `reason`.
            waiting += [each.__cause__, each.__context__, getattr(each, "reason", None)]
