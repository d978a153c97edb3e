"""A model fetched from a hub: its folder in a cache, its marker, and the results of a fetch.

Stdlib only; pure. A cache has a folder `ORG--MODEL/COMMIT/` for each model and commit. The files keep the
names that they have in the hub. The marker is written last: a folder without a marker is incomplete.
"""

import hashlib
import json
import re
from dataclasses import dataclass
from typing import Final, TypeGuard

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model_profile import ModelProfile

MARKER_FILE: Final = ".heteroinfer-complete.json"
PARTS_FOLDER: Final = ".parts"
"""Folder for partly fetched files; the fetch removes the folder when it writes the marker."""
LOCK_FILE: Final = ".lock"
REMOVE_WITHIN_S: Final = 15.0
"""Seconds after its question to the operator (QUESTION_HEADER) in which a fetch may remove commits."""
CONFIRMED_S: Final = 30.0
"""Seconds after its confirmation in which the operator lets no resource begin to use a commit that the fetch
may remove. The fetch asked before the confirmation, so it stops at least 15 s earlier."""
QUESTION_HEADER: Final = "X-HeteroInfer-Question"
"""Header of an answer on /fetch, with which a fetch asks whether its list of commits in use is still
complete. The value is the number of the question, from 0. The operator confirms with the token of this
question as the credentials of a request."""
MAX_QUESTIONS: Final = 8
"""Maximum number of questions of one fetch. A question without an answer in time counts, too."""
HUB_SCHEME: Final = "hf://"
COMMIT: Final = re.compile(r"[0-9A-Za-z]{1,64}")
"""Matches a whole commit name of a hub; the name becomes part of a path."""


def is_commit(text: object) -> TypeGuard[str]:
    """Checks whether a value is a valid commit name, and therefore safe as part of a path."""
    return isinstance(text, str) and COMMIT.fullmatch(text) is not None


def model_folder(repository: str, commit: str) -> str:
    """Returns the folder of a model in a cache.

    Args:
        repository: ORG/MODEL, or MODEL; hubs do not allow `--` in names.
    """
    return f"{repository.replace('/', '--')}/{commit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedFile:
    """One file of a complete model.

    Attributes:
        path: relative to the model's folder.
        digest: `sha256:HEX`, or `git:HEX` for a git blob: the hub's digest, verified during the fetch.
    """

    path: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteModel(codec.JsonValue):
    """The marker of a complete model."""

    repository: str
    commit: str
    files: tuple[FetchedFile, ...]

    @property
    def size_bytes(self) -> int:
        """Size of all files."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCleanup(codec.JsonValue):
    """The rule by which a fetch removes old commits of a model from a cache.

    Attributes:
        keep: number of most recently fetched commits that stay, besides those in use; at least 1.
        in_use: commits that a resource uses.
        listed_s: Unix time at which `in_use` was listed, in seconds.
        token_hashes: hash of the token that confirms each question, by number. Only the operator can compute
            the tokens, so the reader of a pod's environment cannot confirm a question.
    """

    reads_tolerantly = True
    keep: int
    in_use: tuple[str, ...]
    listed_s: float
    token_hashes: tuple[str, ...] = ()

    def check(self) -> None:
        """Checks that at least one commit stays; raises ContractError."""
        codec.at_least(1, "CacheCleanup", keep=self.keep)


def hash_token(token: str) -> str:
    """Returns the hash of a token (SHA-256, hex), by which a fetch recognizes the token."""
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProgress(codec.JsonValue):
    """Progress of a fetch; the fetch pod serves it as JSON on /fetch.

    Attributes:
        commit: commit of the requested revision; "" until the hub answers.
        done_bytes: bytes already in the cache, including those of earlier attempts.
        total_bytes: size of all files; 0 while unknown.
        message: reason why the fetch waits, or "" if it does not wait.
    """

    commit: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    message: str = ""

    def check(self) -> None:
        """Checks that no size is negative; raises ContractError that names the field."""
        codec.at_least(0, "FetchProgress", done_bytes=self.done_bytes, total_bytes=self.total_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedModel(codec.JsonValue):
    """The result of a fetch, written as its pod's termination message."""

    reads_tolerantly = True
    commit: str
    size_bytes: int
    profile: ModelProfile

    def to_json(self) -> str:
        """Returns the canonical JSON text of this result; the profile omits defaults, as in its own text."""
        value = {
            "commit": self.commit,
            "size_bytes": self.size_bytes,
            "profile": json.loads(self.profile.to_json()),
        }
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    def check(self) -> None:
        """Checks the properties that every reader relies on; raises ContractError that names the field."""
        codec.at_least(0, "FetchedModel", size_bytes=self.size_bytes)
        if not is_commit(self.commit):
            raise ContractError(
                f"FetchedModel.commit: must be the hash of a commit (got {self.commit[:80]!r}). "
                f"{codec.SAME_VERSION}"
            )
        self.profile.check()
