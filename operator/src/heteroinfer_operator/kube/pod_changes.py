"""Finds changes by a webhook that keep a new pod from serving in its group. Pure.

Harmless changes: added sidecars, mounts, defaults, labels and variables, an image from a mirror or with a
digest, and a wrapper program in front of the command.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.manifests.drift import says

_OURS: Final = "HETEROINFER_"
"""Prefix of the variables by which the processes of a group find each other."""


def find_changes(sent: Manifest, stored: Manifest) -> list[str]:
    """Returns the paths of fields that differ from the sent pod and keep it from serving."""
    return list(_changes(sent, stored))


def _changes(sent: Manifest, stored: Manifest) -> Iterator[str]:
    metadata = stored["metadata"]
    labels = metadata.get("labels") or {}
    for label, value in (sent["metadata"].get("labels") or {}).items():
        if label.startswith(f"{names.API_GROUP}/") and labels.get(label) != value:
            yield f"metadata.labels[{label}]"
    if _controller(stored) != _controller(sent):
        yield "metadata.ownerReferences"
    found = {container["name"]: container for container in stored["spec"].get("containers") or ()}
    for container in sent["spec"]["containers"]:
        path = f"spec.containers[{container['name']}]"
        if container["name"] not in found:
            yield path
            continue
        yield from (f"{path}.{field}" for field in _changes_of(container, found[container["name"]]))


def _changes_of(sent: Mapping[str, Any], stored: Mapping[str, Any]) -> Iterator[str]:
    if _program(sent["image"]) != _program(stored.get("image", "")):
        yield "image"
    if not _ends_with(_command(stored), _command(sent)):
        yield "command"
    variables = {variable["name"]: variable for variable in stored.get("env") or ()}
    for variable in sent.get("env") or ():
        name = variable["name"]
        if name.startswith(_OURS) and not says(variables.get(name), variable):
            yield f"env[{name}]"


def _controller(pod: Manifest) -> str:
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def _program(image: str) -> str:
    """Returns the last part of an image's name without tag and digest. A mirror keeps this part."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[0]


def _command(container: Mapping[str, Any]) -> list[str]:
    return [*(container.get("command") or ()), *(container.get("args") or ())]


def _ends_with(whole: Sequence[str], end: Sequence[str]) -> bool:
    return list(whole[len(whole) - len(end) :]) == list(end) if len(end) <= len(whole) else False
