"""What a connection takes of memory: each watch keeps one for itself, so many namespaces have many."""

from asyncio import sslproto
from typing import Final

RECORD_BYTES: Final = 16 * 1024
"""Of plain text in one TLS record, at most (RFC 8446, 5.1)."""


def shrink_tls_buffers() -> None:
    """Has TLS connections that begin from now on keep 16 KiB for what they receive, not 256 KiB.

    asyncio keeps that much for each as long as it lasts, and has no option for it
    (`asyncio/sslproto.py::SSLProtocol.max_size@3.11`). Of 400 idle connections each took
    309 KiB, and takes 69 KiB (2026-11-22). For where a process starts; it can go once there is an option.
    """
    sslproto.SSLProtocol.max_size = RECORD_BYTES
