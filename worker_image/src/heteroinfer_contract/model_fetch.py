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
class CompleteModel(codec.JsonValue):
    """The marker of a complete model."""

    repository: str
    commit: str
    files: tuple[FetchedFile, ...]

    @property
    def size_bytes(self) -> int:
        """Returns the size of all files, in bytes."""
        return sum(file.size_bytes for file in self.files)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCleanup(codec.JsonValue):
    """Which commits of its model a fetch may remove from a cache.

    Attributes:
        keep: commits that stay, the fetched one and those fetched last, beside those in use; at least 1.
        in_use: commits that some resource uses.
        listed_s: Unix time at which `in_use` was listed, in seconds.
    """

    reads_tolerantly = True
    keep: int
    in_use: tuple[str, ...]
    listed_s: float

    def check(self) -> None:
        """Checks that one commit stays; raises ContractError."""
        codec.at_least(1, "CacheCleanup", keep=self.keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchProgress(codec.JsonValue):
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

    def check(self) -> None:
        """Checks that no size is below 0; raises ContractError naming it."""
        codec.at_least(0, "FetchProgress", done_bytes=self.done_bytes, total_bytes=self.total_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedModel(codec.JsonValue):
    """What a fetch leaves as its pod's termination message."""

    reads_tolerantly = True
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

    def check(self) -> None:
        """Checks what every reader relies on; raises ContractError naming the field."""
        codec.at_least(0, "FetchedModel", size_bytes=self.size_bytes)
        if not is_commit(self.commit):
            raise ContractError(f"FetchedModel.commit: got {self.commit[:80]!r}, expected a commit's hash")
        self.profile.check()
