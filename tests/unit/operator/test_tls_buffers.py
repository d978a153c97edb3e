"""The size of asyncio's TLS receive buffer, for which asyncio has no option."""

from asyncio import Protocol, get_running_loop, sslproto
from ssl import create_default_context

import pytest

from heteroinfer_operator.kube.tls_buffers import RECORD_BYTES, shrink_tls_buffers


def buffer_bytes() -> int:
    """Returns the size of a new connection's receive buffer."""
    loop = get_running_loop()
    connection = sslproto.SSLProtocol(loop, Protocol(), create_default_context(), loop.create_future())
    try:
        return len(connection.get_buffer(-1))
    finally:
        connection._app_transport.abort()


async def test_a_connection_keeps_only_one_tls_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sslproto.SSLProtocol, "max_size", 2 * RECORD_BYTES)  # undone after this test
    assert buffer_bytes() == 2 * RECORD_BYTES
    shrink_tls_buffers()
    assert buffer_bytes() == RECORD_BYTES


async def test_asyncio_still_has_the_large_buffer() -> None:
    assert buffer_bytes() > RECORD_BYTES
