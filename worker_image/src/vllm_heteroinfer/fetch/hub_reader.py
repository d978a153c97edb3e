"""Reads small files and the first bytes of large files from a hub. Stdlib and the contract only.

`heteroinfer plan` uses this module, because it must run without huggingface_hub and vLLM. The module reads
the variables HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE, HTTPS_PROXY and NO_PROXY.
"""

import http.client
import json
import os
import reprlib
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any, Final
from urllib.parse import quote, urlsplit

from heteroinfer_contract import names
from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.model_fetch import COMMIT, FetchedFile
from heteroinfer_contract.model_file_content import MAX_HEADER_BYTES
from vllm_heteroinfer.fetch.asked_hub import AskedHub
from vllm_heteroinfer.fetch.distrust import is_distrusted
from vllm_heteroinfer.fetch.errors import FetchError
from vllm_heteroinfer.fetch.selection import can_be_a_file

DEFAULT_ENDPOINT: Final = "https://huggingface.co"
REQUEST_TIMEOUT_S: Final = 30.0
FIRST_BYTES: Final = 64 * 2**10
"""Size of the first read of a file. It includes most headers, so few files need a second request."""
_MAX_LISTING_BYTES: Final = 64 * 2**20
_PAUSES_S: Final = (0.5, 2.0)
"""Pauses before the same request is repeated, if the hub is busy or closed the connection."""
_TRUE: Final = frozenset({"1", "ON", "TRUE", "YES"})
_FIX_FOR_TOKEN: Final = f"set {names.ENV_HUB_TOKEN} to a token of an account that may read the model"


class HubReader:
    """One revision of a model on a hub.

    Args:
        repository: ORG/MODEL.
        revision: branch, tag or commit.
        env: the environment.
    """

    def __init__(self, repository: str, revision: str, env: Mapping[str, str] = os.environ) -> None:
        self._hub = AskedHub(
            endpoint=(env.get(names.ENV_HUB_ENDPOINT) or DEFAULT_ENDPOINT).rstrip("/"),
            repository=repository,
            revision=revision,
            token=_token(env),
            fix_for_token=_FIX_FOR_TOKEN,
        )
        self._offline = env.get(names.ENV_HUB_OFFLINE, "").upper() in _TRUE
        self._opener = urllib.request.build_opener(TokenForOneHost())
        self._stored_first_bytes: dict[str, bytes] = {}

    def files(self) -> tuple[str, list[FetchedFile]]:
        """Looks up the revision's current commit and its files, without their hashes.

        Raises:
            FetchError: the hub does not list the files.
        """
        revision = quote(self._hub.revision, safe="")
        url = f"{self._hub.endpoint}/api/models/{quote(self._hub.repository)}/revision/{revision}"
        text = self._retry(partial(self._read, f"{url}?blobs=true", _MAX_LISTING_BYTES))
        try:
            listing = json.loads(text)
            commit, siblings = str(listing["sha"]), listing["siblings"]
            files = [
                FetchedFile(path=sibling["rfilename"], size_bytes=_size_bytes_of(sibling), digest="")
                for sibling in siblings
                if can_be_a_file(sibling["rfilename"])
            ]
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise self._hub.not_a_hub_error(f"its listing cannot be read ({type(error).__name__})") from error
        if not COMMIT.fullmatch(commit):
            raise self._hub.not_a_hub_error(
                f"its answer must name a commit of 1 to 64 letters and digits (got {reprlib.repr(commit)})"
            )
        return commit, files

    def fetch(self, commit: str, file: FetchedFile, into: Path) -> None:
        """Downloads a small file and writes it to `into`.

        Raises:
            FetchError: the hub does not send the file, or the file is longer than MAX_HEADER_BYTES.
        """
        if file.size_bytes > MAX_HEADER_BYTES:
            raise FetchError(
                FailureReason.MODEL_NOT_READABLE,
                f"{self._hub.model}: {file.path} must have at most {MAX_HEADER_BYTES} bytes (got "
                f"{file.size_bytes}). Use another model",
            )
        into.write_bytes(self.first_bytes(commit, file, file.size_bytes))

    def first_bytes(self, commit: str, file: FetchedFile, size_bytes: int) -> bytes:
        """Reads the first `size_bytes` of a file, or the whole file if it is smaller.

        Requests at least FIRST_BYTES, and keeps them for the next call, which usually needs more bytes.

        Raises:
            FetchError: the hub does not send these bytes.
        """
        size_bytes = min(size_bytes, file.size_bytes)
        first_part = self._stored_first_bytes.pop(file.path, b"")
        if len(first_part) < size_bytes:
            request_bytes = max(size_bytes, min(FIRST_BYTES, file.size_bytes))
            url = f"{self._hub.endpoint}/{quote(self._hub.repository)}/resolve/{commit}/{quote(file.path)}"
            first_part = self._retry(partial(self._read_first_bytes, url, request_bytes))
        if size_bytes < len(first_part):
            self._stored_first_bytes[file.path] = first_part
        return first_part[:size_bytes]

    def _retry(self, read: Callable[[], bytes]) -> bytes:
        """Returns the result of `read`. Calls `read` again after a pause if the hub is busy.

        Raises:
            FetchError: HF_HUB_OFFLINE forbids requests, or `read` failed permanently or three times.
        """
        if self._offline:
            raise self._hub.offline_error()
        for pause_s in _PAUSES_S:
            try:
                return read()
            except FetchError as error:
                if not error.is_temporary:
                    raise
            time.sleep(pause_s)
        return read()

    def _read_first_bytes(self, url: str, size_bytes: int) -> bytes:
        """Reads exactly the first `size_bytes` bytes of a file.

        Raises:
            FetchError: the hub refuses, does not answer, or sends fewer bytes.
        """
        content = self._read(url, size_bytes, {"Range": f"bytes=0-{size_bytes - 1}"})
        if len(content) < size_bytes:
            raise self._hub.unavailable_error(
                f"sent only {len(content)} of the requested {size_bytes} bytes of {self._hub.clean(url)}"
            )
        return content

    def _read(self, url: str, max_bytes: int, headers: Mapping[str, str] | None = None) -> bytes:
        """Sends one request. Returns the answer, or only the first `max_bytes` bytes of a longer answer.

        Raises:
            FetchError: the hub refuses or does not answer.
        """
        try:
            request = urllib.request.Request(url, headers={"User-Agent": "heteroinfer", **(headers or {})})  # noqa: S310 - the hub is the user's choice
            if self._hub.token:
                request.add_header("Authorization", f"Bearer {self._hub.token}")
            with self._opener.open(request, timeout=REQUEST_TIMEOUT_S) as answer:
                return bytes(answer.read(max_bytes))  # a server without ranges sends the whole file
        except urllib.error.HTTPError as error:
            with error:
                raise self._hub.refusal_error(error.code, error.headers.get("X-Error-Code", "")) from error
        except FetchError:  # raised by `time_limit`; a FetchError is also a ValueError, which is caught below
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            if is_distrusted(error):
                raise self._hub.untrusted_certificate_error(error) from error
            raise self._hub.no_answer_error(error) from error


class TokenForOneHost(urllib.request.HTTPRedirectHandler):
    """Follows HTTP and HTTPS redirects only, and never sends the token to another host."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        """Returns the request to the new address, or None if the answer is no redirect for urllib.

        Raises:
            URLError: the redirect leads to neither http nor https.
        """
        target = urlsplit(newurl)
        if target.scheme not in ("http", "https"):
            fp.close()
            raise urllib.error.URLError(
                f"redirect to {target.scheme}:// refused: a redirect must lead to http or https"
            )
        redirected = super().redirect_request(req, fp, code, msg, headers, newurl)
        source = urlsplit(req.full_url)
        is_other_host = (target.scheme, target.netloc) != (source.scheme, source.netloc)
        if redirected is not None and is_other_host:
            redirected.remove_header("Authorization")
        return redirected


def _size_bytes_of(sibling: Any) -> int:
    """Returns the size of a listed file; raises TypeError or LookupError if the listing lacks it."""
    size = (sibling.get("lfs") or sibling)["size"]  # a file in Git LFS has its size in the entry `lfs`
    if not isinstance(size, int) or size < 0:
        raise TypeError(size)
    return size


def _token(env: Mapping[str, str]) -> str:
    """Returns the token from the environment or from the file of `hf auth login`; "" if there is none.

    Ignores spaces and line breaks in a variable, which users often copy with a token.
    """
    for name in (names.ENV_HUB_TOKEN, "HUGGING_FACE_HUB_TOKEN"):
        if token := "".join(env.get(name, "").split()):
            return token
    caches = env.get(names.ENV_CACHE_HOME) or os.path.expanduser("~/.cache")
    home = env.get("HF_HOME") or os.path.join(caches, "huggingface")
    try:
        return Path(env.get("HF_TOKEN_PATH") or os.path.join(home, "token")).expanduser().read_text().strip()
    except OSError:
        return ""
