"""Fetches a model from a hub through huggingface_hub; error messages never contain a token.

The client's `http_get` writes into files that this package names. The client's `snapshot_download` would
start each file again after a restart, because it writes to a name that no later process knows
(`huggingface_hub/file_download.py::_download_to_tmp_and_move@2.4.0`).
"""

import contextlib
import os
import re
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from heteroinfer_contract import names
from heteroinfer_contract.failure import FailureReason
from heteroinfer_contract.model_fetch import COMMIT, FetchedFile
from heteroinfer_contract.printable import format_bytes
from vllm_heteroinfer.fetch.asked_hub import AskedHub
from vllm_heteroinfer.fetch.distrust import is_distrusted
from vllm_heteroinfer.fetch.errors import FetchError
from vllm_heteroinfer.fetch.selection import can_be_a_file

REQUEST_TIMEOUT_S: Final = 30.0
PIECE_BYTES: Final = 2**20
"""Size of the client's writes. With the client's default of 10 MiB a slow hub would seem to send nothing."""
_HASH: Final = re.compile(r"git:[0-9a-f]{40}|(git|sha256):[0-9a-f]{64}")
_FIX_FOR_TOKEN: Final = (
    "set spec.model.tokenSecretRef to a Secret with a token of an account that may read the model "
    f"(with `heteroinfer up`: export {names.ENV_HUB_TOKEN})"
)


class HubModel:
    """One revision of a model on a hub.

    Args:
        revision: branch, tag or commit.
    """

    def __init__(self, repository: str, revision: str) -> None:
        from huggingface_hub import constants, get_token, logging, utils

        logging.set_verbosity_error()  # otherwise the client logs URLs that contain signatures
        utils.disable_progress_bars()
        # huggingface_hub has no option for this size, and reads the constant at each fetch
        # (huggingface_hub/file_download.py::http_get@2.4.0).
        constants.DOWNLOAD_CHUNK_SIZE = PIECE_BYTES
        # Content networks refuse to send a larger file in one answer. `fetch` uses range requests.
        self._max_answer_bytes: int = constants.MAX_HTTP_DOWNLOAD_SIZE
        self._hub = AskedHub(
            endpoint=constants.ENDPOINT,
            repository=repository,
            revision=revision,
            token=get_token() or "",
            fix_for_token=_FIX_FOR_TOKEN,
            variables_field=" in spec.engine.env",
            fix_for_certificates=(
                "set spec.model.caBundle to a ConfigMap or Secret with the certificate of that authority"
            ),
        )

    def files(self) -> tuple[str, list[FetchedFile]]:
        """Looks up the revision's current commit and its files.

        Raises:
            FetchError: the hub does not list the files.
        """
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self._hub.endpoint, token=self._hub.token or None)
        try:
            with self._converted_errors():
                model_info = api.model_info(
                    self._hub.repository,
                    revision=self._hub.revision,
                    files_metadata=True,
                    timeout=REQUEST_TIMEOUT_S,
                )
        except (AttributeError, LookupError, RecursionError, TypeError) as error:
            raise self._hub.not_a_hub_error(
                f"its listing cannot be read: {self._hub.clean(error)}"
            ) from error
        if not model_info.sha or not model_info.siblings:
            raise self._hub.not_a_hub_error("its answer must name a commit and files")
        if not COMMIT.fullmatch(str(model_info.sha)):
            raise self._hub.not_a_hub_error(
                "its answer must name a commit of 1 to 64 letters and digits "
                f"(got {reprlib.repr(model_info.sha)})"
            )
        # Leaves out files whose names the cache cannot use. No model needs such a file.
        return str(model_info.sha), [
            self._file(sibling) for sibling in model_info.siblings if can_be_a_file(sibling.rfilename)
        ]

    def _file(self, sibling: Any) -> FetchedFile:
        """Returns the listed file; raises FetchError if the listing lacks its size or hash."""
        path, size_bytes = sibling.rfilename, sibling.lfs.size if sibling.lfs else sibling.size
        digest = f"sha256:{sibling.lfs.sha256}" if sibling.lfs else f"git:{sibling.blob_id}"
        if not isinstance(size_bytes, int) or size_bytes < 0 or not _HASH.fullmatch(digest):
            raise self._hub.not_a_hub_error(f"its listing lacks the size or hash of {path}")
        return FetchedFile(path=path, size_bytes=size_bytes, digest=digest)

    def is_large(self, file: FetchedFile) -> bool:
        """Checks whether a file is too large for content networks to send in one answer."""
        return file.size_bytes > self._max_answer_bytes

    def fetch(self, commit: str, file: FetchedFile, into: Path) -> None:
        """Downloads the rest of a file; bytes that `into` already holds are not requested again.

        Downloads a large file (`is_large`) with HTTP range requests.

        Raises:
            FetchError: the file is not complete; `into` keeps the bytes that arrived.
        """
        is_large = self.is_large(file)
        # A part is well below the limit.
        request_bytes = self._max_answer_bytes // 2 if is_large else file.size_bytes
        with into.open("r+b") as target:
            while (stored_bytes := target.seek(0, os.SEEK_END)) < file.size_bytes:
                end_bytes = min(stored_bytes + request_bytes, file.size_bytes)
                try:
                    self._fetch_until(commit, file, target, end_bytes)
                except FetchError as error:
                    if not is_large or error.is_temporary:
                        raise
                    raise FetchError(error.reason, f"{error}. {self._manual_download(file)}") from error
                target.flush()
                os.fsync(target.fileno())

    def _manual_download(self, file: FetchedFile) -> str:
        """Returns the fix for a hub without HTTP range requests: download the model to a volume."""
        repository = self._hub.repository
        return (
            f"{file.path} ({format_bytes(file.size_bytes)}) is downloaded with HTTP range requests. If this "
            "hub does not support them, download the model to a volume "
            f"(hf download {repository} --local-dir DIR), and set model.uri: pvc://CLAIM/PATH"
        )

    def _fetch_until(self, commit: str, file: FetchedFile, target: BinaryIO, end_bytes: int) -> None:
        """Downloads the rest of a file's first `end_bytes`; `target` is positioned at its end."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        hub = self._hub
        url = hf_hub_url(hub.repository, file.path, revision=commit, endpoint=hub.endpoint)
        # The hub must not compress the answer: its bytes would not be the bytes of the file.
        headers = {**build_hf_headers(token=hub.token or None), "accept-encoding": "identity"}
        if end_bytes < file.size_bytes:
            headers["Range"] = f"bytes=0-{end_bytes - 1}"  # the client replaces 0 with the start
        with self._converted_errors():
            http_get(
                url,
                BoundedFile(target, file),
                resume_size=target.tell(),
                headers=headers,
                expected_size=end_bytes,
            )

    @contextlib.contextmanager
    def _converted_errors(self) -> Iterator[None]:
        """Turns errors of the hub's client into FetchErrors. Does not change an OSError with an errno.

        The file system of the cache raises an OSError with an errno, and the client an OSError without.
        """
        import httpx2
        from huggingface_hub import errors

        try:
            yield
        except errors.HfHubHTTPError as error:
            # The client raises RepositoryNotFoundError also for some answers without the header X-Error-Code.
            # Not isinstance: the subclass GatedRepoError has a code of its own.
            is_not_found = type(error) is errors.RepositoryNotFoundError
            code = "RepoNotFound" if is_not_found else error.response.headers.get("X-Error-Code", "")
            raise self._hub.refusal_error(error.response.status_code, code, self._hub.clean(error)) from error
        except errors.OfflineModeIsEnabled as error:
            raise self._hub.offline_error() from error
        except httpx2.HTTPError as error:
            if is_distrusted(error):
                raise self._hub.untrusted_certificate_error(error) from error
            raise self._hub.no_answer_error(error) from error
        except OSError as error:
            if error.errno is not None:
                raise
            raise self._hub.unavailable_error(
                f"did not send {self._hub.model}: {self._hub.clean(error)}"
            ) from error
        except errors.HFValidationError as error:
            message = f"{self._hub.model}: {self._hub.clean(error)}. Correct spec.model.uri"
            raise FetchError(FailureReason.MODEL_NOT_FOUND, message) from error
        except ValueError as error:
            raise self._hub.not_a_hub_error(self._hub.clean(error)) from error


class BoundedFile:
    """A file that refuses bytes beyond the listed size, so that a wrong answer cannot fill the cache."""

    def __init__(self, target: BinaryIO, file: FetchedFile) -> None:
        self._target = target
        self._file = file
        self.seek, self.tell, self.truncate = target.seek, target.tell, target.truncate

    def write(self, chunk: bytes) -> int:
        """Writes a chunk; if the file would get too long, empties it and raises OSError."""
        if self._target.tell() + len(chunk) > self._file.size_bytes:
            self._target.seek(0)
            self._target.truncate()
            raise OSError(f"the answer has more than the {self._file.size_bytes} bytes of {self._file.path}")
        return self._target.write(chunk)
