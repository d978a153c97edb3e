"""Remembers the pods that the operator decided to create and that have not existed yet. Pure."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from heteroinfer_contract import names
from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.stored_fields import as_object

_IDENTIFYING_LABELS = (names.LABEL_EPOCH, names.LABEL_PLAN, names.LABEL_REVISION)


@dataclass(slots=True)
class _NeverCreatedPod:
    """A pod that the operator decided to create.

    Attributes:
        text: the manifest as JSON. A parsed manifest takes three times the memory, and thousands of pods may
            wait.
        is_requested: whether a create request was sent and not answered, so that the pod may exist.
    """

    text: str
    is_requested: bool = False

    @property
    def manifest(self) -> Manifest:
        """The manifest of the first decision to create the pod.

        That decision placed all pods of the epoch together, so the preferred node in its manifest suits the
        nodes of the other pods.
        """
        return as_object(json.loads(self.text), "pod")


@dataclass(slots=True)
class NeverCreatedPods:
    """The pods of one resource that this process decided to create, until they exist or are refused."""

    _pods: dict[str, _NeverCreatedPod] = field(default_factory=dict)

    def names(self) -> frozenset[str]:
        """Returns the names of pods that do not exist yet according to the answers of the API server."""
        return frozenset(self._pods)

    def never_requested(self) -> frozenset[str]:
        """Returns the names of the pods for which no create request was sent."""
        return frozenset(name for name, each in self._pods.items() if not each.is_requested)

    def add(self, manifest: Manifest) -> Manifest:
        """Adds a pod that the operator decided to create. Returns the manifest for its create request.

        If an earlier decision already added the same pod, returns the manifest of that decision.
        """
        name = manifest["metadata"]["name"]
        added = self._pods.get(name)
        if added is not None and _identifying_labels(added.manifest) == _identifying_labels(manifest):
            return added.manifest
        self._pods[name] = _NeverCreatedPod(json.dumps(manifest, separators=(",", ":")))
        return manifest

    def record_request(self, name: str) -> None:
        """Records that a create request for the pod is sent."""
        if name in self._pods:
            self._pods[name].is_requested = True

    def is_requested(self, name: str) -> bool:
        """Reports whether a create request for the pod was sent and has no answer yet."""
        return name in self._pods and self._pods[name].is_requested

    def forget(self, name: str) -> None:
        """Removes a pod that was created or refused."""
        self._pods.pop(name, None)

    def forget_earlier_epochs(self, epochs: Mapping[int, int]) -> None:
        """Removes the pods of epochs that are over.

        Pods of an epoch that is newer than the stored epoch stay, because the status with their epoch may be
        about to be stored.

        Args:
            epochs: stored epoch of each group, by group index.
        """
        self._pods = {
            name: each for name, each in self._pods.items() if not _is_of_earlier_epoch(each.manifest, epochs)
        }


def _is_of_earlier_epoch(manifest: Manifest, epochs: Mapping[int, int]) -> bool:
    """Reports whether a pod belongs to an epoch before the stored epoch of its group."""
    labels = manifest["metadata"]["labels"]
    return int(labels[names.LABEL_EPOCH]) < epochs.get(int(labels[names.LABEL_GROUP]), 0)


def _identifying_labels(manifest: Manifest) -> tuple[str | None, ...]:
    """Returns the labels that differ between two different pods with the same name."""
    labels = manifest["metadata"].get("labels") or {}
    return tuple(labels.get(label) for label in _IDENTIFYING_LABELS)
