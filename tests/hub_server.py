"""Serves a model hub over HTTP, as far as huggingface_hub's client needs: lists, downloads, ranges, refusals.

Large files are served by a redirect to another host name, like the hub's content network. The server records
the requests to that host, and the number of bytes that it sent of each file.
"""

import functools
import hashlib
import json
import re
import socket
import ssl
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_FROM_BYTES = 10_000
"""Smaller files are stored in git and have a git hash. Larger files have a sha256, and another host serves
them."""
SIGNATURE = "signature=not-to-be-logged"
_API = re.compile(r"/api/models/(?P<name>[^/]+/[^/]+)/revision/(?P<revision>[^/]+)")
_RESOLVE = re.compile(r"/(?P<name>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
_CONTENT = re.compile(r"/content/(?P<sha256>[0-9a-f]{64})")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_BLOCK_BYTES = 1 << 16


@dataclass(slots=True, kw_only=True)
class Repository:
    """A model of the hub.

    Attributes:
        files: content of the newest commit by path.
        token: required token, or None if everybody may read the model.
        gated: whether users with a token must have accepted a licence.
    """

    files: dict[str, bytes]
    token: str | None = None
    gated: bool = False

    @property
    def commit(self) -> str:
        """Returns the hash of a commit with exactly these files."""
        digest = hashlib.sha1(usedforsecurity=False)
        for path, content in sorted(self.files.items()):
            digest.update(f"{path} {_sha256(content)}".encode())
        return digest.hexdigest()

    @classmethod
    def of_folder(cls, folder: Path, **fields: Any) -> "Repository":
        """Returns a model with the files of a folder."""
        files = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        return cls(files=files, **fields)


@dataclass(slots=True)
class Seen:
    """The requests that the hub has got.

    Attributes:
        sent_bytes: bytes sent of each file's content, by path.
        requests: method and path of each request, in order.
        tokens_elsewhere: Authorization headers that reached the content host. There should be none.
    """

    sent_bytes: Counter[str] = field(default_factory=Counter)
    requests: list[str] = field(default_factory=list)
    tokens_elsewhere: list[str] = field(default_factory=list)


class HubServer:
    """The hub, a context manager that serves until the context ends.

    Attributes:
        repositories: models by ORG/MODEL. Tests may change them at any time.
        seen: the requests that it has got.
        closed: whether it has stopped.
        bytes_per_s: speed of each file; 0 sends as fast as possible.
        pause_after_bytes: each file stops after this number of bytes while this is set. Then the
            connection is closed.
        refuse_with: status of every answer, or None.
        break_after_bytes: each connection is closed after this number of bytes of a file, or None.
        corrupt: paths whose content is sent with a wrong byte.
        held: paths of which nothing is sent while they are in this set.
        refuse_ranges: whether the server refuses requests for parts of files.

    Args:
        host: address to listen on.
        content_host: another name of the same address, which serves large files.
        port: port to listen on; 0 takes a free one.
        certificate: files of a certificate and its key for TLS; None serves without TLS.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        content_host: str = "localhost",
        port: int = 0,
        certificate: tuple[str, str] | None = None,
    ) -> None:
        self.repositories: dict[str, Repository] = {}
        self.seen = Seen()
        self.closed = False
        self.bytes_per_s = 0.0
        self.pause_after_bytes: int | None = None
        self.refuse_with: int | None = None
        self.break_after_bytes: int | None = None
        self.corrupt: set[str] = set()
        self.held: set[str] = set()
        self.refuse_ranges = False
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = (_Server6 if ":" in host else _Server)((host, port), Handler)
        self._server.daemon_threads = True
        self.port = int(self._server.server_address[1])
        scheme = "http"
        if certificate is not None:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(*certificate)
            # The handshake runs in the connection's own thread, so a client without trust ends only its own
            # connection.
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
            scheme = "https"
        self.endpoint = f"{scheme}://{_in_url(host)}:{self.port}"
        self.content_endpoint = f"{scheme}://{_in_url(content_host)}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> "HubServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stops serving and listening."""
        self.closed = True
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def content(self, sha256: str) -> tuple[str, bytes] | None:
        """Returns path and content of a large file."""
        for repository in self.repositories.values():
            for path, content in repository.files.items():
                if _sha256(content) == sha256:
                    return path, content
        return None


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores errors of clients that do not trust the hub, to keep the tests' output short."""
        if not isinstance(sys.exception(), ssl.SSLError):
            super().handle_error(request, client_address)


class _Server6(_Server):
    address_family = socket.AF_INET6


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        """Logs nothing, to keep the tests' output short."""

    def _answer(self) -> None:
        """Answers a request for content, for a repository's list, or for a file."""
        hub, path = self.server_hub, unquote(urlsplit(self.path).path)
        hub.seen.requests.append(f"{self.command} {path}")
        if hub.refuse_with is not None:
            self._send(hub.refuse_with)
        elif match := _CONTENT.fullmatch(path):
            self._content(match["sha256"])
        elif match := _API.fullmatch(path):
            repository = self._repository(match["name"], match["revision"])
            if repository is not None:
                self._send(HTTPStatus.OK, json.dumps(_listing(match["name"], repository)).encode())
        elif match := _RESOLVE.fullmatch(path):
            self._resolve(match)
        else:
            self._send(HTTPStatus.NOT_FOUND)

    def _repository(self, name: str, revision: str) -> Repository | None:
        """Returns a model that the client may read. Otherwise sends a refusal, and returns None."""
        repository = self.server_hub.repositories.get(name)
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        known = {known.token for known in self.server_hub.repositories.values()} - {None}
        if given and given not in known:
            error = {"X-Error-Message": "Invalid credentials in Authorization header"}
            self._send(HTTPStatus.UNAUTHORIZED, headers=error)
        elif repository is None or (repository.token not in (None, given) and not repository.gated):
            status = HTTPStatus.NOT_FOUND if given else HTTPStatus.UNAUTHORIZED
            self._send(status, headers={"X-Error-Code": "RepoNotFound"})
        elif repository.gated:
            status = HTTPStatus.FORBIDDEN if given else HTTPStatus.UNAUTHORIZED
            self._send(status, headers={"X-Error-Code": "GatedRepo"})
        elif revision not in ("main", repository.commit):
            self._send(HTTPStatus.NOT_FOUND, headers={"X-Error-Code": "RevisionNotFound"})
        else:
            return repository
        return None

    def _resolve(self, match: re.Match[str]) -> None:
        """Sends a small file itself, and a redirect to the content host for a large one."""
        repository = self._repository(match["name"], match["revision"])
        if repository is None:
            return
        content = repository.files.get(match["path"])
        if content is None:
            self._send(HTTPStatus.NOT_FOUND, headers={"X-Error-Code": "EntryNotFound"})
            return
        about = {"X-Repo-Commit": repository.commit}
        if len(content) < LFS_FROM_BYTES:
            self._file(match["path"], content, {**about, "ETag": f'"{_git_hash(content)}"'})
            return
        sha256 = _sha256(content)
        linked = {"X-Linked-Etag": f'"{sha256}"', "X-Linked-Size": str(len(content))}
        location = f"{self.server_hub.content_endpoint}/content/{sha256}?{SIGNATURE}"
        self._send(HTTPStatus.FOUND, headers={**about, **linked, "Location": location})

    def _content(self, sha256: str) -> None:
        if "Authorization" in self.headers:
            self.server_hub.seen.tokens_elsewhere.append(self.headers["Authorization"])
        found = self.server_hub.content(sha256)
        if found is None or SIGNATURE not in self.path:
            self._send(HTTPStatus.FORBIDDEN)
        else:
            self._file(*found, {"ETag": f'"{sha256}"'})

    def _file(self, path: str, content: bytes, headers: Mapping[str, str]) -> None:
        """Sends a file, or the requested range of it."""
        asked = _RANGE.fullmatch(self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        end = min(int(asked[2]) + 1, len(content)) if asked and asked[2] else len(content)
        if start >= len(content) > 0 or (asked and self.server_hub.refuse_ranges):
            self._send(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
            return
        self.send_response(HTTPStatus.PARTIAL_CONTENT if asked else HTTPStatus.OK)
        if asked:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        for name, value in {**headers, "Accept-Ranges": "bytes"}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        if self.command == "GET":
            self._stream(path, content, start, end)

    def _stream(self, path: str, content: bytes, start: int, end: int) -> None:
        """Sends the bytes of a file, with the delays and breaks that the test has set."""
        hub = self.server_hub
        while path in hub.held and not hub.closed:
            time.sleep(0.01)
        began, sent = time.monotonic(), 0
        if path in hub.corrupt:
            content = bytes([content[0] ^ 1]) + content[1:]
        rest = memoryview(content)[start:end]
        while sent < len(rest):
            block = rest[sent : sent + _BLOCK_BYTES]
            try:
                self.wfile.write(block)
            except OSError:  # the client was killed
                return
            sent += len(block)
            hub.seen.sent_bytes[path] += len(block)
            if hub.break_after_bytes is not None and sent >= hub.break_after_bytes:
                self.close_connection = True
                return
            if hub.pause_after_bytes is not None and sent >= hub.pause_after_bytes:
                while hub.pause_after_bytes is not None and not hub.closed:
                    time.sleep(0.01)
                self.close_connection = True
                return
            if hub.bytes_per_s:
                time.sleep(max(began + sent / hub.bytes_per_s - time.monotonic(), 0.0))

    def _send(self, status: int, body: bytes = b"{}", headers: Mapping[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


@functools.cache
def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git_hash(content: bytes) -> str:
    digest = hashlib.sha1(usedforsecurity=False)
    digest.update(b"blob %d\0" % len(content) + content)
    return digest.hexdigest()


def _listing(name: str, repository: Repository) -> dict[str, Any]:
    siblings = []
    for path, content in sorted(repository.files.items()):
        sibling: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": _git_hash(content)}
        if len(content) >= LFS_FROM_BYTES:
            sha256 = _sha256(content)
            sibling["lfs"] = {"sha256": sha256, "size": len(content), "pointerSize": 134}
        siblings.append(sibling)
    return {"_id": "0" * 24, "id": name, "sha": repository.commit, "siblings": siblings, "tags": []}
