"""A model fetched from a hub: where it lies in a cache, how it is marked complete, what the fetch says.

Stdlib only; pure. A cache holds `ORG--MODEL/COMMIT/` for each model and commit, with the files as the
hub names them and, written last, the marker: without one a folder is not complete.
"""

import json
import re
from dataclasses import dataclass
from typing import Final, TypeGuard

from heteroinfer_contract import codec
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model_profile import ModelProfile

MARKER_FILE: Final = ".heteroinfer-complete.json"
PARTS_FOLDER: Final = ".parts"
"""Of files that are still fetched; goes with the marker."""
LOCK_FILE: Final = ".lock"
HUB_SCHEME: Final = "hf://"
COMMIT: Final = re.compile(r"[0-9A-Za-z]{1,64}")
"""A hub's name of a commit, whole: it becomes part of a path."""


def is_commit(text: object) -> TypeGuard[str]:
    """Checks whether a value can be a hub's name of a commit, and so a part of a path."""
    return isinstance(text, str) and COMMIT.fullmatch(text) is not None


def model_folder(repository: str, commit: str) -> str:
    """Returns the folder of a model in a cache.

    Args:
        repository: ORG/MODEL, or MODEL; a hub allows no `--` in it.
    """
    return f"{repository.replace('/', '--')}/{commit}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedFile:
    """One file of a complete model.

    Attributes:
        path: relative to the model's folder.
        digest: `sha256:HEX`, or `git:HEX` of a git blob: what the hub says of it, and what was
            found when it was fetched.
    """

    path: str
    size_bytes: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CompleteModel:
    """The marker of a complete model."""

    repository: str
    commit: str
    files: tuple[FetchedFile, ...]

    @property
    def size_bytes(self) -> int:
        """Returns the size of all files, in bytes."""
        return sum(file.size_bytes for file in self.files)

    def to_json(self) -> str:
        """Returns the one JSON text of this marker."""
        return codec.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "CompleteModel":
        """Returns the marker that `text` holds; raises ContractError naming the field."""
        return codec.from_json(cls, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProgress:
    """How far a fetch is; served as JSON by its pod on /fetch.

    Attributes:
        commit: what the revision means; "" while the hub has not said.
        done_bytes: in the cache already, from earlier attempts too.
        total_bytes: of all files; 0 while unknown.
        message: what it waits for, or "".
    """

    commit: str = ""
    done_bytes: int = 0
    total_bytes: int = 0
    message: str = ""

    def to_json(self) -> str:
        """Returns the one JSON text of this progress."""
        return codec.to_json(self)

    @classmethod
    def from_json(cls, text: str) -> "FetchProgress":
        """Returns the progress that `text` holds; raises ContractError naming the field."""
        progress = codec.from_json(cls, text)
        codec.at_least(0, "FetchProgress", done_bytes=progress.done_bytes, total_bytes=progress.total_bytes)
        return progress


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedModel:
    """What a fetch leaves as its pod's termination message."""

    commit: str
    size_bytes: int
    profile: ModelProfile

    def to_json(self) -> str:
        """Returns the one JSON text of this answer."""
        value = {
            "commit": self.commit,
            "size_bytes": self.size_bytes,
            "profile": json.loads(self.profile.to_json()),
        }
        return json.dumps(value, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> "FetchedModel":
        """Returns the answer that `text` holds; raises ContractError naming the field."""
        fetched = codec.from_json(cls, text, tolerant=True)
        codec.at_least(0, "FetchedModel", size_bytes=fetched.size_bytes)
        if not is_commit(fetched.commit):
            raise ContractError(f"FetchedModel.commit: got {fetched.commit[:80]!r}, expected a commit's hash")
        fetched.profile.check()
        return fetched
