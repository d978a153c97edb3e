"""Whether a connection failed since a certificate is not trusted. Stdlib only."""

import ssl
from collections.abc import Iterator


def is_distrusted(error: BaseException) -> bool:
    """Checks whether an error, or what it comes from, is of a certificate that nobody here trusts."""
    return any(isinstance(each, ssl.SSLCertVerificationError) for each in _chain(error))


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    waiting: list[object] = [error]
    while waiting:
        each = waiting.pop()
        if isinstance(each, BaseException) and id(each) not in seen:
            seen.add(id(each))
            yield each
            # urllib keeps what it caught as `reason`.
            waiting += [each.__cause__, each.__context__, getattr(each, "reason", None)]
