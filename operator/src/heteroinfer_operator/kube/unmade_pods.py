"""Remembers the pods that the operator decided to create but that never existed. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from heteroinfer_contract import names
from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.stored_fields import as_object

_SAME_LABELS = (names.LABEL_EPOCH, names.LABEL_PLAN, names.LABEL_REVISION)


@dataclass(slots=True)
class _UnmadePod:
    """A pod that the operator decided to create.

    Attributes:
        text: the manifest as JSON. Parsed it takes three times the memory, and thousands of pods may wait.
        asked: whether a create request was sent and not answered, so the pod may exist.
    """

    text: str
    asked: bool = False

    @property
    def manifest(self) -> Manifest:
        """The manifest of the first decision to create the pod.

        That decision placed all pods of the epoch together, so its preferred node fits those of the others.
        """
        return as_object(json.loads(self.text), "pod")


@dataclass(slots=True)
class UnmadePods:
    """The pods of one resource that this process decided to create, until they appear or are refused."""

    _wanted: dict[str, _UnmadePod] = field(default_factory=dict)

    def names(self) -> frozenset[str]:
        """Returns the names of the pods that never existed, according to the API server's answers so far."""
        return frozenset(self._wanted)

    def unasked(self) -> frozenset[str]:
        """Returns the names of the pods for which no create request was sent."""
        return frozenset(name for name, each in self._wanted.items() if not each.asked)

    def want(self, manifest: Manifest) -> Manifest:
        """Notes a pod to create; returns the manifest to create it from.

        The manifest of an earlier decision on the same pod takes precedence.
        """
        name = manifest["metadata"]["name"]
        before = self._wanted.get(name)
        if before is None or _labels(before.manifest) != _labels(manifest):
            self._wanted[name] = _UnmadePod(json.dumps(manifest, separators=(",", ":")))
            return manifest
        return before.manifest

    def note_asked(self, name: str) -> None:
        """Notes that a create request for the pod is sent."""
        if name in self._wanted:
            self._wanted[name].asked = True

    def was_asked(self, name: str) -> bool:
        """Returns whether an earlier create request for the pod has no answer yet."""
        return name in self._wanted and self._wanted[name].asked

    def settle(self, name: str) -> None:
        """Forgets a pod that was created or refused."""
        self._wanted.pop(name, None)

    def forget_before(self, epochs: Mapping[int, int]) -> None:
        """Forgets the pods of epochs that are over.

        Keeps pods of epochs newer than the stored one: their status may be about to be stored.

        Args:
            epochs: stored epoch of each group, by group index.
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
