"""A model on a hub, through huggingface_hub; its errors in words, never with a token.

The files are fetched by the client's `http_get` into files of ours. Its own
`snapshot_download` begins each file anew after a restart: it writes to a name that no later
process knows (`huggingface_hub/file_download.py::_download_to_tmp_and_move@2.4.0`).
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
"""What the client gathers before it writes; with its own 10 MiB a slow hub would seem to send nothing."""
_HASH: Final = re.compile(r"git:[0-9a-f]{40}|(git|sha256):[0-9a-f]{64}")
_HOW_TO_GIVE_A_TOKEN: Final = (
    "set spec.model.tokenSecretRef to a Secret with a token of an account that may read it "
    f"(with `heteroinfer up`: export {names.ENV_HUB_TOKEN})"
)


class HubModel:
    """One revision of a model on a hub.

    Args:
        revision: branch, tag or commit.
    """

    def __init__(self, repository: str, revision: str) -> None:
        from huggingface_hub import constants, get_token, logging, utils

        logging.set_verbosity_error()  # it would log URLs with signatures in them
        utils.disable_progress_bars()
        # Read at each fetch (huggingface_hub/file_download.py::http_get@2.4.0); there is no option for it.
        constants.DOWNLOAD_CHUNK_SIZE = PIECE_BYTES
        # No content network sends a larger file at once; parts of one it does.
        self._most_http_bytes: int = constants.MAX_HTTP_DOWNLOAD_SIZE
        self._hub = AskedHub(
            endpoint=constants.ENDPOINT,
            repository=repository,
            revision=revision,
            token=get_token() or "",
            give_a_token=_HOW_TO_GIVE_A_TOKEN,
            environment=" in spec.engine.env",
            trust="set spec.model.caBundle to a ConfigMap or Secret with the certificate of that authority",
        )

    def files(self) -> tuple[str, list[FetchedFile]]:
        """Returns the commit that the revision means now, and all files of it.

        Raises:
            FetchError: the hub does not show them.
        """
        from huggingface_hub import HfApi

        api = HfApi(endpoint=self._hub.endpoint, token=self._hub.token or None)
        try:
            with self._in_words():
                found = api.model_info(
                    self._hub.repository,
                    revision=self._hub.revision,
                    files_metadata=True,
                    timeout=REQUEST_TIMEOUT_S,
                )
        except (AttributeError, LookupError, RecursionError, TypeError) as error:
            raise self._hub.no_hub(f"its listing cannot be read: {self._hub.clean(error)}") from error
        if not found.sha or not found.siblings:
            raise self._hub.no_hub("its answer names no commit or no files")
        if not COMMIT.fullmatch(str(found.sha)):
            raise self._hub.no_hub(f"got {reprlib.repr(found.sha)} for a commit")
        # Names that no file can have here are of no model.
        return str(found.sha), [self._file(each) for each in found.siblings if can_be_a_file(each.rfilename)]

    def _file(self, sibling: Any) -> FetchedFile:
        path, size_bytes = sibling.rfilename, sibling.lfs.size if sibling.lfs else sibling.size
        digest = f"sha256:{sibling.lfs.sha256}" if sibling.lfs else f"git:{sibling.blob_id}"
        if not isinstance(size_bytes, int) or size_bytes < 0 or not _HASH.fullmatch(digest):
            raise self._hub.no_hub(f"it does not tell size and hash of {path}")
        return FetchedFile(path=path, size_bytes=size_bytes, digest=digest)

    def is_large(self, file: FetchedFile) -> bool:
        """Returns whether a file is larger than what content networks send at once."""
        return file.size_bytes > self._most_http_bytes

    def fetch(self, commit: str, file: FetchedFile, into: Path) -> None:
        """Fetches what `into` lacks of a file; bytes that it holds are not asked for again.

        A file that is larger than what content networks send at once is asked for in parts.

        Raises:
            FetchError: it is not complete; what came is kept.
        """
        is_large = self.is_large(file)
        with into.open("r+b") as target:
            while (have_bytes := target.seek(0, os.SEEK_END)) < file.size_bytes:
                end_bytes = min(have_bytes + self._most_http_bytes // 2, file.size_bytes)
                try:
                    self._fetch_until(commit, file, target, end_bytes if is_large else file.size_bytes)
                except FetchError as error:
                    if not is_large or error.may_heal:
                        raise
                    raise FetchError(error.reason, f"{error}. {self._by_hand(file)}") from error
                target.flush()
                os.fsync(target.fileno())

    def _by_hand(self, file: FetchedFile) -> str:
        """Returns how a model comes into a volume of which the hub does not send a large file in parts."""
        repository = self._hub.repository
        return (
            f"{file.path} has {format_bytes(file.size_bytes)}, and was asked for in parts. If this hub sends "
            f"none, fill a volume (hf download {repository} --local-dir DIR) and use pvc://CLAIM/PATH"
        )

    def _fetch_until(self, commit: str, file: FetchedFile, target: BinaryIO, end_bytes: int) -> None:
        """Fetches what a file that is open at its end lacks of its first `end_bytes`."""
        from huggingface_hub import hf_hub_url
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers

        hub = self._hub
        url = hf_hub_url(hub.repository, file.path, revision=commit, endpoint=hub.endpoint)
        # Compressed, a part of a file cannot be asked for.
        headers = {**build_hf_headers(token=hub.token or None), "accept-encoding": "identity"}
        if end_bytes < file.size_bytes:
            headers["Range"] = f"bytes=0-{end_bytes - 1}"  # from where it resumes, the client adds
        with self._in_words():
            http_get(
                url,
                BoundedFile(target, file),
                resume_size=target.tell(),
                headers=headers,
                expected_size=end_bytes,
            )

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        import httpx2
        from huggingface_hub import errors

        try:
            yield
        except errors.HfHubHTTPError as error:
            # The client takes some answers without a code for those of a model that is not shown.
            hidden = type(error) is errors.RepositoryNotFoundError
            code = "RepoNotFound" if hidden else error.response.headers.get("X-Error-Code", "")
            raise self._hub.refusal(error.response.status_code, code, self._hub.clean(error)) from error
        except errors.OfflineModeIsEnabled as error:
            raise self._hub.offline() from error
        except httpx2.HTTPError as error:
            if is_distrusted(error):
                raise self._hub.distrusted(error) from error
            raise self._hub.silence(error) from error
        except OSError as error:
            if error.errno is not None:
                raise  # of the cache, not of the hub
            raise self._hub.away(f"did not send {self._hub.model}: {self._hub.clean(error)}") from error
        except errors.HFValidationError as error:
            said = f"{self._hub.model}: {self._hub.clean(error)}; correct spec.model.uri"
            raise FetchError(FailureReason.MODEL_NOT_FOUND, said) from error
        except ValueError as error:
            raise self._hub.no_hub(self._hub.clean(error)) from error


class BoundedFile:
    """A file that takes no more than the hub has said: who answers with more does not fill the cache."""

    def __init__(self, target: BinaryIO, file: FetchedFile) -> None:
        self._target = target
        self._file = file
        self.seek, self.tell, self.truncate = target.seek, target.tell, target.truncate

    def write(self, chunk: bytes) -> int:
        """Writes; raises OSError, with nothing kept, if it gets too long."""
        if self._target.tell() + len(chunk) > self._file.size_bytes:
            self._target.seek(0)
            self._target.truncate()
            raise OSError(f"{self._file.path} comes with more than its {self._file.size_bytes} bytes")
        return self._target.write(chunk)
