"""Which pods of a resource were to be made and have never existed, and what each is made of. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from heteroinfer_contract import names
from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.stored_fields import as_object

_SAME_LABELS = (names.LABEL_EPOCH, names.LABEL_PLAN, names.LABEL_REVISION)


@dataclass(slots=True)
class _UnmadePod:
    """A pod that was to be made.

    Attributes:
        text: its manifest, which parsed takes three times as much: thousands of pods may wait.
        asked: whether the API server was asked for it and may have made it: it has not answered.
    """

    text: str
    asked: bool = False

    @property
    def manifest(self) -> Manifest:
        """Returns that of the first decision to make it, with hints at the nodes of all pods of its epoch."""
        return as_object(json.loads(self.text), "pod")


@dataclass(slots=True)
class UnmadePods:
    """The pods of one resource that this process decided to make, until they are seen or refused."""

    _wanted: dict[str, _UnmadePod] = field(default_factory=dict)

    def names(self) -> frozenset[str]:
        """Returns the names of the pods that have never existed, as far as the API server has answered."""
        return frozenset(self._wanted)

    def unasked(self) -> frozenset[str]:
        """Returns those of them that the API server was not asked for."""
        return frozenset(name for name, each in self._wanted.items() if not each.asked)

    def want(self, manifest: Manifest) -> Manifest:
        """Notes that a pod is to be made; returns the manifest to make it of.

        One of an earlier decision on the same pod goes before.
        """
        name = manifest["metadata"]["name"]
        before = self._wanted.get(name)
        if before is None or _labels(before.manifest) != _labels(manifest):
            self._wanted[name] = _UnmadePod(json.dumps(manifest, separators=(",", ":")))
            return manifest
        return before.manifest

    def note_asked(self, name: str) -> None:
        """Notes that the API server is asked for a pod."""
        if name in self._wanted:
            self._wanted[name].asked = True

    def was_asked(self, name: str) -> bool:
        """Returns whether the API server was asked for a pod before, and has not answered."""
        return name in self._wanted and self._wanted[name].asked

    def settle(self, name: str) -> None:
        """Notes that a pod was made or refused."""
        self._wanted.pop(name, None)

    def forget_before(self, epochs: Mapping[int, int]) -> None:
        """Forgets the pods of epochs that are over.

        `epochs` has the epoch of each group as stored, by index. A newer one may be about to be stored.
        """
        self._wanted = {
            name: each for name, each in self._wanted.items() if not _is_before(each.manifest, epochs)
        }


def _is_before(manifest: Manifest, epochs: Mapping[int, int]) -> bool:
    labels = manifest["metadata"]["labels"]
    return int(labels[names.LABEL_EPOCH]) < epochs.get(int(labels[names.LABEL_GROUP]), 0)


def _labels(manifest: Manifest) -> tuple[str | None, ...]:
    labels = manifest["metadata"].get("labels") or {}
    return tuple(labels.get(label) for label in _SAME_LABELS)
