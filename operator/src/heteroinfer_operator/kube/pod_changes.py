"""Finds changes by a webhook that keep a new pod from serving in its group. Pure.

Other changes are harmless: added sidecars, mounts, defaults, labels and variables, an image from a mirror or
with a digest, and a wrapper program in front of the command.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.cluster import Manifest
from heteroinfer_operator.manifests.drift import contains_value

_OUR_PREFIX: Final = "HETEROINFER_"
"""Prefix of the variables by which the processes of a group find each other."""


def find_changes(sent: Manifest, stored: Manifest) -> list[str]:
    """Returns the paths of changed fields that keep the pod from serving in its group."""
    return list(_find_pod_changes(sent, stored))


def _find_pod_changes(sent: Manifest, stored: Manifest) -> Iterator[str]:
    """Yields the path of each field of a stored pod that keeps the pod from serving in its group."""
    metadata = stored["metadata"]
    labels = metadata.get("labels") or {}
    for label, value in (sent["metadata"].get("labels") or {}).items():
        is_our_label = label.startswith(f"{names.API_GROUP}/")
        if is_our_label and labels.get(label) != value:
            yield f"metadata.labels[{label}]"
    if _controller_uid(stored) != _controller_uid(sent):
        yield "metadata.ownerReferences"
    stored_containers = {container["name"]: container for container in stored["spec"].get("containers") or ()}
    for container in sent["spec"]["containers"]:
        path = f"spec.containers[{container['name']}]"
        if container["name"] not in stored_containers:
            yield path
            continue
        yield from (
            f"{path}.{field}"
            for field in _find_container_changes(container, stored_containers[container["name"]])
        )


def _find_container_changes(sent: Mapping[str, Any], stored: Mapping[str, Any]) -> Iterator[str]:
    """Yields each field of a stored container that keeps the pod from serving in its group."""
    if _image_base_name(sent["image"]) != _image_base_name(stored.get("image", "")):
        yield "image"
    if not _has_suffix(_command_and_args(stored), _command_and_args(sent)):
        yield "command"
    stored_variables = {variable["name"]: variable for variable in stored.get("env") or ()}
    for variable in sent.get("env") or ():
        name = variable["name"]
        if name.startswith(_OUR_PREFIX) and not contains_value(stored_variables.get(name), variable):
            yield f"env[{name}]"


def _controller_uid(pod: Manifest) -> str:
    """Returns the uid of a pod's controlling owner, or ""."""
    owners = pod["metadata"].get("ownerReferences") or ()
    return next((str(owner["uid"]) for owner in owners if owner.get("controller")), "")


def _image_base_name(image: str) -> str:
    """Returns the last part of an image's name, without tag and digest. Mirrors do not change this part."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[0]


def _command_and_args(container: Mapping[str, Any]) -> list[str]:
    return [*(container.get("command") or ()), *(container.get("args") or ())]


def _has_suffix(whole: Sequence[str], suffix: Sequence[str]) -> bool:
    """Reports whether a list ends with another list, as if a webhook had put a wrapper in front."""
    if len(suffix) > len(whole):
        return False
    return list(whole[len(whole) - len(suffix) :]) == list(suffix)
