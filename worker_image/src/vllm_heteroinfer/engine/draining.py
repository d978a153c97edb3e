"""Ends vLLM's API server without losing a request: refuses new requests and lets running requests end.

An ASGI middleware around the whole server, so that it handles every request until the last byte of the
answer. Stdlib only: vLLM imports this module by its name.
"""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Final

from heteroinfer_contract import names

AsgiScope = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[MutableMapping[str, Any]]]
AsgiSend = Callable[[MutableMapping[str, Any]], Awaitable[None]]
AsgiApp = Callable[[AsgiScope, AsgiReceive, AsgiSend], Awaitable[None]]

STILL_ACCEPTED_S: Final = 1.0
"""Time after the start of a drain in which the server still accepts requests: the cluster's proxies need a
moment to learn that this pod is no longer in the Service."""
BODY_TIMEOUT_S: Final = 2.0
"""Time after STILL_ACCEPTED_S in which the body of a request must be complete. Otherwise a client that sends
no body could delay the end without limit."""
_REFUSAL: Final = {
    "error": {
        "message": "this group is ending and takes no more requests. Try again later",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
}
"""Body of a refusal, in the form of an error of the OpenAI API."""
_UNCOUNTED_PATHS: Final = frozenset({names.PATH_API_HEALTH, "/metrics", "/ping", "/version", "/load"})
"""Paths that the server answers until its end, and that do not delay the end."""


class Drain:
    """Counts the running requests of vLLM's API server. Use it from the server's event loop.

    Args:
        clock: a monotonic clock in seconds.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._running = 0
        self._body_limits: set[asyncio.Timeout] = set()
        """Time limits of the waits for a part of a request's body."""
        self._refuse_from_s: float | None = None

    def begin(self) -> None:
        """Starts the drain. Requests are refused after STILL_ACCEPTED_S. Further calls have no effect."""
        if self._refuse_from_s is None:
            self._refuse_from_s = self._clock() + STILL_ACCEPTED_S

    def refuses(self) -> bool:
        """Reports whether the server refuses new requests now."""
        return self._refuse_from_s is not None and self._clock() >= self._refuse_from_s

    def is_done(self) -> bool:
        """Reports whether no request runs and new requests are refused."""
        return self.refuses() and not self._running

    async def run(self, app: AsgiApp, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        """Lets the server answer a request, and counts the request until its last byte is sent."""
        request = _RunningRequest(self, receive, send)
        self._running += 1
        try:
            await app(scope, request.receive, request.send)
        finally:
            self._running -= 1

    def refuse_late_bodies(self) -> None:
        """Refuses requests whose body did not arrive in time. Call this method repeatedly during a drain.

        Ends each wait for a body by moving its time limit to the present.
        """
        if self._refuse_from_s is None or self._clock() < self._refuse_from_s + BODY_TIMEOUT_S:
            return
        while self._body_limits:
            self._body_limits.pop().reschedule(asyncio.get_running_loop().time())

    async def receive_body_part(self, receive: AsgiReceive) -> MutableMapping[str, Any]:
        """Waits for the next part of a request's body, and returns it.

        Raises:
            TimeoutError: the server drains, and the body did not arrive in time.
        """
        # There is no limit until a drain. Then `refuse_late_bodies` moves the limit to the present.
        async with asyncio.timeout(None) as limit:
            self._body_limits.add(limit)
            try:
                return await receive()
            finally:
                self._body_limits.discard(limit)


class _RunningRequest:
    """A running request. A drain can refuse it for a late body until its answer has begun."""

    def __init__(self, drain: Drain, receive: AsgiReceive, send: AsgiSend) -> None:
        self._drain, self._receive, self._send = drain, receive, send
        self._awaits_body, self._answer_has_begun, self._is_refused = True, False, False

    async def receive(self) -> MutableMapping[str, Any]:
        """Returns the next message for the app; a disconnect if the request was refused for its late body.

        Only a wait for the body has a limit. If the body is late but the answer has begun, the request goes
        on.
        """
        if not self._awaits_body:
            return await self._receive()
        try:
            message = await self._drain.receive_body_part(self._receive)
        except TimeoutError:
            self._awaits_body = False  # the limit is over, so later waits have none
            if self._answer_has_begun:
                return await self._receive()
            self._is_refused = True
            await _refuse(self._send)
            return {"type": "http.disconnect"}
        self._awaits_body = message.get("more_body", False)
        return message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Sends the app's answer, unless the request was refused."""
        self._answer_has_begun = True
        if not self._is_refused:
            await self._send(message)


DRAIN: Final = Drain()
"""The drain of this process. It is global because vLLM creates the middleware without arguments."""


class DrainMiddleware:
    """Counts requests, or refuses them while DRAIN refuses. Enabled by vLLM's `--middleware`."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app

    async def __call__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        """Answers one request, or one connection of the realtime API."""
        if scope["type"] not in {"http", "websocket"} or scope["path"] in _UNCOUNTED_PATHS:
            await self._app(scope, receive, send)
        elif not DRAIN.refuses():
            await DRAIN.run(self._app, scope, receive, send)
        elif scope["type"] == "http":
            await _refuse(send)
        else:
            await send({"type": "websocket.close", "code": 1001})


async def _refuse(send: AsgiSend) -> None:
    """Answers a request with 503 and _REFUSAL."""
    headers = [(b"content-type", b"application/json"), (b"connection", b"close"), (b"retry-after", b"1")]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(_REFUSAL).encode()})
