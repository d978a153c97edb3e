"""Sends requests to the API server: JSON in, JSON out, one class of errors.

`kubernetes.aio` provides authentication, TLS and connections. This module does not use its generated API
classes: manifests are dicts anyway, and 4,000 pods take 355 MiB as dicts, but 462 MiB as models.
"""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast
from urllib.request import getproxies

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.config import ConfigException, kube_config

from heteroinfer_contract import names
from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.kube.deep_json import parse_json

JSON: Final = "application/json"
ONLY_METADATA: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
ANY: Final = "*/*"
MERGE_PATCH: Final = "application/merge-patch+json"
APPLY_PATCH: Final = "application/apply-patch+yaml"

REQUEST_TIMEOUT_S: Final = 30.0
"""Timeout of one request. Longer than the API server's own timeout for a slow etcd (about 15 s)."""

DRY_RUN_TIMEOUT_S: Final = 70.0
"""Timeout of a dry run.

Longer than the API server waits for a webhook (30 s) and for a whole request (60 s), so that its answer
contains the reason.
"""

REQUESTS_AT_ONCE: Final = 64
"""A lane sends at most this many requests at the same time. Watches have no lane, because each watch keeps
its own connection: 200 namespaces have 1,600 watches."""
QUICK_TIMEOUT_S: Final = 15.0
"""Timeout of `get_quickly`, which reads one object."""
PAGE_OBJECTS: Final = 500
"""A page contains at most this many objects."""
PAGE_FIRST_OBJECTS: Final = 2
"""Objects of the first page, whose sizes are unknown."""
PAGE_GROWTH: Final = 4
"""A page contains at most this many times the objects of the page before, because the next objects may be
larger."""
PAGE_BYTES: Final = 2**20
"""Target size of a page. Parsed, a page takes ten times the memory, and all caches list at the same time."""

WATCH_SILENCE_S: Final = 100.0
"""A watch is dead after this time without data.

A server sends a bookmark each minute (`k8s.io/apiserver` defaultBookmarkFrequency).
"""

CONFLICT: Final = 409
FORBIDDEN: Final = 403
GONE: Final = 410
BAD_REQUEST: Final = 400
UNPROCESSABLE: Final = 422
TOO_LARGE: Final = 413
NOT_FOUND: Final = 404
INTERNAL_ERROR: Final = 500
NAMESPACE_ENDS: Final = "NamespaceTerminating"
"""Cause of a refusal: the API server creates nothing in a namespace that is being deleted."""

_OBJECT_STATUSES: Final = frozenset({TOO_LARGE, UNPROCESSABLE})
"""Statuses with which the API server always blames the object."""
_QUOTA_IS_FULL: Final = re.compile(r'[^" ]+ "[^"]*" is forbidden: exceeded quota: [^\s,]+, requested: ')
"""Message of a full quota: `k8s.io/apiserver/pkg/admission/plugin/resourcequota/controller.go`.

A message with `failed quota` blames the object instead. A policy or a webhook may use the words of this
pattern in its own message, but only after `denied request` or `denied the request`.
"""
_WEBHOOK_DENIES: Final = "denied the request"
"""Message of a webhook's refusal: `k8s.io/apiserver/pkg/admission/plugin/webhook/errors/statuserror.go`.

If a webhook fails, the message has `failed calling` instead.
"""
_UNAVAILABLE_STATUSES: Final = frozenset({401, CONFLICT, 429, 502, 503, 504})
"""Statuses from 400 that are not refusals: a conflict, or the API server cannot answer now."""

_MAX_QUOTED: Final = 200
"""Characters of an invalid answer that an error quotes."""
_PROXY_HINT: Final = "Check whether a proxy answers instead of the API server"

Query = Mapping[str, str | int]
Body = Mapping[str, Any]
OnWrite = Callable[[str, str], None]


class RequestLane(Enum):
    """A class of requests with its own limit, so that slow requests do not block those of other classes."""

    STATUS = "statuses and finalizers of resources"
    READ = "reads of one object"
    LIST = "lists"
    WRITE = "writes, which webhooks may delay"
    EVENT = "events"


_TIMEOUTS_S: Final[Mapping[RequestLane, float]] = MappingProxyType({RequestLane.EVENT: 15.0})
"""Timeout of one request by lane, if it is not REQUEST_TIMEOUT_S."""
_VERBS: Final[Mapping[str, str]] = MappingProxyType(
    {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
)
"""Verb by HTTP method, as in Kubernetes' RBAC and our metrics."""


class ApiError(HeteroInferError):
    """The API server refused a request or did not answer.

    Attributes:
        status: HTTP status; 0 without an answer.
        api_reason: the server's reason, for example `AlreadyExists`.
        answer_message: the server's message, without the request; "" without an answer.
        causes: the server's causes of the refusal, for example `NamespaceTerminating`.
    """

    reason = "ApiServerError"

    def __init__(
        self,
        message: str,
        *,
        status: int = 0,
        api_reason: str = "",
        answer_message: str = "",
        causes: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(message)
        self.status = status
        self.api_reason = api_reason
        self.answer_message = answer_message
        self.causes = causes

    @property
    def blames_object(self) -> bool:
        """Whether validation, a webhook or a policy refused the object because of its content.

        A full quota does not count, because the pods that use it may be about to be deleted. A webhook that
        does not support dry runs and a namespace that is being deleted do not count either.
        """
        if self.status == BAD_REQUEST:
            return "does not support dry run" not in self.answer_message
        if self.status == FORBIDDEN:
            is_quota_full = _QUOTA_IS_FULL.match(self.answer_message) is not None
            return not is_quota_full and NAMESPACE_ENDS not in self.causes
        return self.status in _OBJECT_STATUSES or _WEBHOOK_DENIES in self.answer_message

    @property
    def is_refusal(self) -> bool:
        """Whether this request was refused by validation, a quota, a policy or a failing webhook.

        A conflict (409) is not a refusal: the object is in another state than the request assumed. The other
        statuses that are not refusals mean that the API server cannot answer any request now.
        """
        if _WEBHOOK_DENIES in self.answer_message:  # a webhook chooses its status, even 429 or 503
            return self.status >= 400
        if self.status == INTERNAL_ERROR:  # a webhook failed; otherwise etcd lost its leader or timed out
            return "webhook" in self.answer_message
        return self.status >= 400 and self.status not in _UNAVAILABLE_STATUSES


def find_kubeconfigs(kubeconfig: str | None = None) -> list[Path]:
    """Returns the files that `kubeconfig` names and that exist.

    The client itself does not report that no file exists: it only logs a warning for each missing file.

    Args:
        kubeconfig: paths with separators as in KUBECONFIG. Default: KUBECONFIG, or else ~/.kube/config.
    """
    named = kubeconfig or kube_config.KUBE_CONFIG_DEFAULT_LOCATION
    files = [
        Path(name).expanduser() for name in named.split(kube_config.ENV_KUBECONFIG_PATH_SEPARATOR) if name
    ]
    return [file for file in files if file.exists()]


async def load_configuration(
    kubeconfig: str | None = None, context: str | None = None
) -> client.Configuration:
    """Loads the access to the API server: in a pod the service account, otherwise the kubeconfig.

    If an argument is set, loads the kubeconfig in a pod, too.

    Raises:
        HeteroInferError: there is neither a service account nor a kubeconfig, or the kubeconfig cannot be
            read.
    """
    # 0: no limit of connections. Otherwise the watches could use up all connections, and requests would wait
    # forever.
    configuration = client.Configuration(connection_pool_maxsize=0)
    # A pod reaches the API server directly, by an address. NO_PROXY often has the range of this address, but
    # aiohttp ignores ranges (`aiohttp/helpers.py::get_env_proxy_for_url@3.14`), so it would use a proxy.
    uses_proxy = False
    if kubeconfig or context or not _load_service_account(configuration):
        uses_proxy = bool(getproxies().keys() - {"no"})
        load_kubeconfig: Any = config.load_kube_config  # the client is only partly typed
        try:
            if not find_kubeconfigs(kubeconfig):
                named = kubeconfig or kube_config.KUBE_CONFIG_DEFAULT_LOCATION
                raise ConfigException(f"{named} does not exist")
            # Do not write to the user's folder: the client would store a refreshed token there.
            await load_kubeconfig(
                kubeconfig, context=context, client_configuration=configuration, persist_config=False
            )
        except ConfigException as error:
            raise HeteroInferError(
                f"cannot reach a cluster: no usable kubeconfig ({error}), and this process does not run in a "
                "pod. Set KUBECONFIG to the kubeconfig of your cluster",
                reason="NoCluster",
            ) from error
    # Trust the environment only if it names a proxy. With `trust_env`, aiohttp also looks for a ~/.netrc in a
    # thread before each request (`aiohttp/client.py::ClientSession._request@3.14`).
    configuration.client_session_kwargs = {"trust_env": uses_proxy}
    return configuration


def _load_service_account(configuration: client.Configuration) -> bool:
    """Loads the service account of this pod; returns False outside of pods."""
    load_in_pod: Any = config.load_incluster_config  # the client is only partly typed
    try:
        load_in_pod(client_configuration=configuration)
    except ConfigException:
        return False
    return True


class ApiServer:
    """A client of the API server.

    Attributes:
        watch_silence_s: a watch is dead after this many seconds without data.

    Args:
        on_write: called with the verb (as in RBAC) and the plural of each accepted write.
        on_unanswered: called in the same way for each write that the API server did not answer.
        before_write: called right before each write. An exception stops the write.
        agent: User-Agent of the requests. It is also the field manager of merge patches.
    """

    def __init__(
        self,
        configuration: client.Configuration,
        *,
        on_write: OnWrite = lambda verb, plural: None,
        on_unanswered: OnWrite = lambda verb, plural: None,
        before_write: Callable[[], None] = lambda: None,
        watch_silence_s: float = WATCH_SILENCE_S,
        agent: str = names.MANAGER,
    ) -> None:
        self.configuration = configuration
        self.watch_silence_s = watch_silence_s
        self._client: Any = client.ApiClient(configuration)
        self._client.user_agent = agent
        self._on_write = on_write
        self._on_unanswered = on_unanswered
        self._before_write = before_write
        self._lanes = {lane: asyncio.Semaphore(REQUESTS_AT_ONCE) for lane in RequestLane}

    async def close(self) -> None:
        await self._client.close()

    async def get(self, path: str, query: Query | None = None) -> dict[str, Any]:
        """Returns the object or list at a path; raises ApiError."""
        return await self._request_object(_Request(method="GET", path=path, query=query or {}))

    async def get_quickly(self, path: str) -> dict[str, Any]:
        """Returns an object. Raises ApiError, also if there is no answer within QUICK_TIMEOUT_S."""
        return await self._request_object(_Request(method="GET", path=path, timeout_s=QUICK_TIMEOUT_S))

    async def get_text(self, path: str, query: Query | None = None) -> str:
        """Returns an answer that is not an object, such as a log or a pod's answer; raises ApiError."""
        return await self._request_text(_Request(method="GET", path=path, query=query or {}, accept=ANY))

    async def post_text(self, path: str, *, timeout_s: float) -> str:
        """Posts an empty request to a pod through the API server. Returns the answer; raises ApiError."""
        return await self._request_text(
            _Request(method="POST", path=path, accept=ANY, lane=RequestLane.WRITE, timeout_s=timeout_s)
        )

    async def list_pages(
        self, path: str, query: Query, *, accept: str = JSON
    ) -> AsyncIterator[dict[str, Any]]:
        """Yields the pages of a list.

        Adapts the number of objects in a page to their sizes, so that a page has about PAGE_BYTES.

        Raises:
            ApiError: the API server refused or did not answer. Status 410: the list took too long.
        """
        limit, token = PAGE_FIRST_OBJECTS, ""
        while True:
            page_query: dict[str, str | int] = {**query, "limit": limit}
            if token:
                page_query["continue"] = token
            request = _Request(
                method="GET", path=path, query=page_query, accept=accept, lane=RequestLane.LIST
            )
            text = await self._request_text(request)
            page = parse_answer(f"GET {path}", text, required_keys=("kind", "apiVersion", "metadata"))
            yield page
            token = page["metadata"].get("continue", "")
            if not token:
                return
            limit_by_size = limit * PAGE_BYTES // len(text)  # if the next objects have the same size
            limit = max(1, min(PAGE_OBJECTS, limit * PAGE_GROWTH, limit_by_size))

    async def create(
        self, path: str, body: Body, query: Query | None = None, *, lane: RequestLane = RequestLane.WRITE
    ) -> dict[str, Any]:
        """Creates an object and returns it as stored.

        Raises:
            ApiError: status 409 if the name already exists.
        """
        return await self._write(_Request(method="POST", path=path, query=query or {}, body=body, lane=lane))

    async def dry_run_create(self, path: str, body: Body, query: Query) -> None:
        """Creates an object as a dry run, which stores nothing; raises ApiError like `create`."""
        query = {**query, "dryRun": "All"}
        dry_run = _Request(method="POST", path=path, query=query, body=body, lane=RequestLane.WRITE)
        await self._request_object(replace(dry_run, timeout_s=DRY_RUN_TIMEOUT_S))

    async def update(self, path: str, body: Body, *, lane: RequestLane = RequestLane.WRITE) -> dict[str, Any]:
        """Replaces an object and returns it as stored.

        Raises:
            ApiError: status 409 if the object changed since it was read.
        """
        return await self._write(_Request(method="PUT", path=path, body=body, lane=lane))

    async def merge(self, path: str, body: Body, *, lane: RequestLane = RequestLane.WRITE) -> dict[str, Any]:
        """Applies a JSON merge patch and returns the object as stored; raises ApiError like `update`."""
        patch = _Request(method="PATCH", path=path, body=body, content_type=MERGE_PATCH, lane=lane)
        return await self._write(patch)

    async def apply(self, path: str, body: Body, *, manager: str) -> dict[str, Any]:
        """Applies a manifest by server-side apply, and takes over fields of other managers (forced)."""
        query = {"fieldManager": manager, "force": "true"}
        request = _Request(method="PATCH", path=path, query=query, body=body, lane=RequestLane.WRITE)
        return await self._write(replace(request, content_type=APPLY_PATCH))

    async def delete(self, path: str, options: Body) -> dict[str, Any]:
        """Deletes an object. Returns its last state, or Kubernetes' Status object. Raises ApiError."""
        return await self._write(_Request(method="DELETE", path=path, body=options, lane=RequestLane.WRITE))

    async def watch(self, path: str, query: Query) -> AsyncIterator[dict[str, Any]]:
        """Yields watch events until the server ends the stream.

        Raises:
            ApiError: the server refused the watch, the server sent an ERROR event, or the connection broke.
                With status 410, the caller must list again.
        """
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=REQUEST_TIMEOUT_S, sock_read=self.watch_silence_s
        )
        request = _Request(method="GET", path=path, query={**query, "watch": "true"})
        response = await self._send(request, timeout)
        try:
            if response.status >= 300:
                raise _build_refusal(str(request), response.status, await response.text())
            async for line in _split_lines(response.content):
                event = parse_answer(f"watch {path}", line, required_keys=("type", "object"))
                if event["type"] == "ERROR":
                    status = event["object"]
                    raise _build_refusal(f"watch {path}", int(status.get("code", 0)), json.dumps(status))
                yield event
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(f"watch {path}: the connection broke: {error!r}") from error
        finally:
            # Abort the connection. A TLS close waits for the server's answer, and no task would await it.
            if response.connection is not None and response.connection.transport is not None:
                response.connection.transport.abort()
            response.close()

    async def _write(self, request: "_Request") -> dict[str, Any]:
        """Sends a write. Reports an accepted write to `on_write`, an unanswered write to `on_unanswered`."""
        self._before_write()
        verb = _VERBS[request.method]
        parts = request.path.split("/")  # with a namespace: .../namespaces/NAMESPACE/PLURAL/...
        plural = parts[parts.index("namespaces") + 2] if "namespaces" in parts else parts[-1]
        try:
            answer = await self._request_object(request)
        except ApiError as error:
            if not error.is_refusal and error.status != CONFLICT:
                self._on_unanswered(verb, plural)
            raise
        self._on_write(verb, plural)
        return answer

    async def _request_object(self, request: "_Request") -> dict[str, Any]:
        """Sends a request and returns the JSON object in its answer; raises ApiError."""
        return parse_answer(str(request), await self._request_text(request))

    async def _request_text(self, request: "_Request") -> str:
        """Sends a request once its lane has room. Returns the answer's text, or raises ApiError.

        The timeout includes the wait for the lane.
        """
        timeout_s = request.timeout_s or _TIMEOUTS_S.get(request.lane, REQUEST_TIMEOUT_S)
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._lanes[request.lane],
                await self._send(request, timeout) as response,
            ):
                text = await response.text(errors="replace")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise request.build_unanswered_error(error) from error
        if response.status >= 300:
            raise _build_refusal(str(request), response.status, text)
        return text

    async def _send(self, request: "_Request", timeout: aiohttp.ClientTimeout) -> aiohttp.ClientResponse:
        """Sends a request with the credentials of the configuration, and returns the open response.

        Raises:
            ApiError: there is no answer.
        """
        try:
            method, url, headers, body, _ = await self._client.param_serialize(
                request.method,
                request.path,
                query_params=list(request.query.items()),
                header_params={"Accept": request.accept, "Content-Type": request.content_type},
                body=request.body,
                auth_settings=["BearerToken"],
            )
            answer = await self._client.rest_client.request(
                method, url, headers=headers, body=body, _request_timeout=timeout
            )
        except (aiohttp.ClientError, TimeoutError) as error:
            raise request.build_unanswered_error(error) from error
        return cast("aiohttp.ClientResponse", answer.response)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """One request to the API server."""

    method: str
    path: str
    query: Query = field(default_factory=dict)
    body: Body | None = None
    content_type: str = JSON
    accept: str = JSON
    timeout_s: float | None = None
    """None for the timeout of the lane."""
    lane: RequestLane = RequestLane.READ

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    def build_unanswered_error(self, error: Exception) -> ApiError:
        """Builds the error for a request without an answer."""
        return ApiError(f"{self}: no answer from the API server: {error!r}")


async def _split_lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yields the lines of a stream, whatever their length.

    aiohttp's own line reader fails at lines beyond 4 MiB. With JSON escapes, an object of 1 MiB can be an
    event of 6 MiB. Each new watch would then fail at the same event.
    """
    unfinished_line: list[bytes] = []
    async for piece in content.iter_any():
        *line_ends, rest = piece.split(b"\n")
        for line_end in line_ends:
            yield b"".join((*unfinished_line, line_end))
            unfinished_line.clear()
        if rest:
            unfinished_line.append(rest)


def parse_answer(request: str, text: str | bytes, *, required_keys: Collection[str] = ()) -> dict[str, Any]:
    """Parses an answer as a JSON object.

    Args:
        required_keys: keys that the object must have.

    Raises:
        ApiError: the answer is not such an object, for example because a proxy answered.
    """
    try:
        answer = parse_json(text)
    except ValueError as error:
        raise ApiError(
            f"{request}: the answer must be JSON (got {text[:_MAX_QUOTED]!r}: {error}). {_PROXY_HINT}"
        ) from error
    if not isinstance(answer, dict) or not set(required_keys) <= answer.keys():
        requirement = f" with {', '.join(required_keys)}" if required_keys else ""
        raise ApiError(
            f"{request}: the answer must be an object{requirement} (got {text[:_MAX_QUOTED]!r}). "
            f"{_PROXY_HINT}"
        )
    return cast("dict[str, Any]", answer)


def _build_refusal(request: str, status: int, text: str) -> ApiError:
    """Builds the error from the API server's answer to a refused request."""
    try:
        answer = json.loads(text)
        message, api_reason = str(answer.get("message", "")), str(answer.get("reason", ""))
        cause_objects = (answer.get("details") or {}).get("causes") or ()
        causes = frozenset(str(cause.get("reason", "")) for cause in cause_objects)
    except (ValueError, AttributeError, TypeError):  # not a Status, for example the answer of a proxy
        message, api_reason, causes = text[:300], "", frozenset()
    return ApiError(
        f"{request}: {status} {message}",
        status=status,
        api_reason=api_reason,
        answer_message=message,
        causes=causes,
    )
