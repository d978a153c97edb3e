"""Volumes that a resource may add to a role's pods. Pure.

Only kinds that give no access to the node are allowed: no hostPath, no service account token, no inline CSI
driver.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, ClassVar, Final

from pydantic import Field

from heteroinfer_operator.api.base import (
    ATOMIC,
    ByteSize,
    Model,
    ObjectName,
    RuleReason,
    ValidationRule,
    cel_text,
)
from heteroinfer_operator.api.pod_fields import ClassName, Image, KeyOfObject

OWN_VOLUMES: Final = ("model", "scratch", "shm", "ca-bundle", "files")
"""Names of the volumes that the operator itself adds to worker pods."""
MOUNT_ROOTS: Final = ("/mnt", "/data", "/srv")
"""Folders of a container below which volumes may be mounted.

No image has code, settings or accounts in these folders. In any other folder, a worker may run a file of a
ConfigMap as code (`sitecustomize.py`, `/etc/ld.so.preload`, a user's site-packages), although the
installation refuses such code in args.
"""
_FileMode = Annotated[int, Field(ge=0, le=0o777)]
_PART: Final = "([^/:.]|[.][^/:.])[^/:]*"
"""Part of a path: not `.`, and not a name that begins with `..`.

The check is a pattern, because a CEL rule at this depth of the schema would exceed the API server's cost
limit.
"""
_RELATIVE: Final = f"{_PART}(/{_PART})*"
_ABSOLUTE: Final = f"(/{_PART})+"


class PullPolicy(StrEnum):
    """When the node pulls an image."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class Medium(StrEnum):
    """Storage of an emptyDir."""

    DISK = ""
    MEMORY = "Memory"


class KeyToPath(Model):
    """A key of a ConfigMap or Secret, and the path of its file in the volume."""

    key: KeyOfObject
    """Key of the ConfigMap or Secret."""
    path: Annotated[str, Field(pattern=f"^{_RELATIVE}$", min_length=1, max_length=256)]
    """Path of the file, relative to the volume."""
    mode: _FileMode | None = None
    """Permissions of the file, as a decimal number. Default: defaultMode of the volume."""


_Items = Annotated[tuple[KeyToPath, ...], Field(max_length=16, json_schema_extra=ATOMIC)]


class ConfigMapVolume(Model):
    """Files from a ConfigMap of the same namespace."""

    name: ObjectName
    """Name of the ConfigMap."""
    items: _Items | None = None
    """Keys to mount. Default: all keys."""
    default_mode: _FileMode | None = None
    """Permissions of the files, as a decimal number. Default: 420 (octal 0644)."""
    optional: bool | None = None
    """Lets pods start without the ConfigMap. Default: false."""


class SecretVolume(Model):
    """Files from a Secret of the same namespace."""

    secret_name: ObjectName
    """Name of the Secret."""
    items: _Items | None = None
    """Keys to mount. Default: all keys."""
    default_mode: _FileMode | None = None
    """Permissions of the files, as a decimal number. Default: 420 (octal 0644)."""
    optional: bool | None = None
    """Lets pods start without the Secret. Default: false."""


class ProjectedObject(Model):
    """A ConfigMap or Secret of the same namespace whose files are a part of a volume."""

    name: ObjectName
    """Name of the ConfigMap or Secret."""
    items: _Items | None = None
    """Keys to mount. Default: all keys."""
    optional: bool | None = None
    """Lets pods start without the ConfigMap or Secret. Default: false."""


class ProjectedSource(Model):
    """A part of a projected volume: exactly one of the fields."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="has(self.configMap) != has(self.secret)",
            message="must set exactly one of configMap and secret",
            holds=lambda source: (source.config_map is None) != (source.secret is None),
        ),
    )

    config_map: ProjectedObject | None = None
    """Files from a ConfigMap."""
    secret: ProjectedObject | None = None
    """Files from a Secret."""


class ProjectedVolume(Model):
    """Files from several ConfigMaps and Secrets in one folder."""

    sources: Annotated[
        tuple[ProjectedSource, ...], Field(min_length=1, max_length=16, json_schema_extra=ATOMIC)
    ]
    """ConfigMaps and Secrets whose files the volume has."""
    default_mode: _FileMode | None = None
    """Permissions of the files, as a decimal number. Default: 420 (octal 0644)."""


class EmptyDirVolume(Model):
    """A folder that is empty when the pod starts."""

    medium: Medium | None = None
    """Storage of the folder. Memory: a file system in memory. Its files count as memory of the pod, but the
    plan does not reserve memory for the files. Default: the node's disk."""
    size_limit: ByteSize | None = None
    """Size limit of the folder. A pod that writes more is evicted. Default: none."""


class ImageVolume(Model):
    """Files of a container image or an OCI artifact, read-only."""

    reference: Image
    """Reference of the image, as for a container."""
    pull_policy: PullPolicy | None = None
    """When the node pulls the image. Always: before each mount. IfNotPresent: if the node lacks the image.
    Never: the node must have the image already. Default: Always for the tag latest, otherwise
    IfNotPresent."""


class ClaimVolume(Model):
    """A PersistentVolumeClaim of the same namespace."""

    claim_name: ClassName
    """Name of the PersistentVolumeClaim."""
    read_only: bool | None = None
    """Mounts the claim read-only. Default: false."""


_KINDS: Final = ("configMap", "secret", "projected", "emptyDir", "image", "persistentVolumeClaim")
_ATTRIBUTES: Final = ("config_map", "secret", "projected", "empty_dir", "image", "persistent_volume_claim")


class TemplateVolume(Model):
    """A volume of the pods: a name, and exactly one kind of volume."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel=f"[{', '.join(f'has(self.{kind})' for kind in _KINDS)}].filter(given, given).size() == 1",
            message=f"must set exactly one of {', '.join(_KINDS)}",
            holds=lambda volume: sum(getattr(volume, name) is not None for name in _ATTRIBUTES) == 1,
        ),
        ValidationRule(
            field="name",
            reason=RuleReason.FORBIDDEN,
            cel=f"!(self.name in [{', '.join(map(cel_text, OWN_VOLUMES))}])",
            message=f"must not be {', '.join(OWN_VOLUMES[:-1])} or {OWN_VOLUMES[-1]}, which are the names of "
            "the operator's own volumes",
            fix="Choose another name",
            holds=lambda volume: volume.name not in OWN_VOLUMES,
        ),
    )

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=63)]
    """Name of the volume, for volumeMounts."""
    config_map: ConfigMapVolume | None = None
    """Files from a ConfigMap."""
    secret: SecretVolume | None = None
    """Files from a Secret."""
    projected: ProjectedVolume | None = None
    """Files from several ConfigMaps and Secrets in one folder."""
    empty_dir: EmptyDirVolume | None = None
    """A folder that is empty when the pod starts."""
    image: ImageVolume | None = None
    """Files of an image, read-only. Needs Kubernetes 1.35 or later."""
    persistent_volume_claim: ClaimVolume | None = None
    """A PersistentVolumeClaim."""


class TemplateMount(Model):
    """A mount of a volume in the worker container."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            field="mountPath",
            cel=f"[{', '.join(cel_text(f'{root}/') for root in MOUNT_ROOTS)}]"
            ".exists(r, self.mountPath.startsWith(r))",
            message=f"must be below {', '.join(MOUNT_ROOTS[:-1])} or {MOUNT_ROOTS[-1]}, because files in "
            "other folders could replace code of the worker",
            fix="Use a path such as /mnt/NAME",
            holds=lambda mount: mount.mount_path.startswith(tuple(f"{root}/" for root in MOUNT_ROOTS)),
            got="%s",
            got_cel=("self.mountPath",),
            got_values=lambda mount: (mount.mount_path,),
        ),
    )

    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of the volume in volumes."""
    mount_path: Annotated[str, Field(pattern=f"^{_ABSOLUTE}$", min_length=2, max_length=256)]
    """Folder in the container: below /mnt, /data or /srv."""
    sub_path: Annotated[str, Field(pattern=f"^{_RELATIVE}$", min_length=1, max_length=256)] | None = None
    """Folder of the volume to mount. Default: the whole volume."""
    read_only: bool | None = None
    """Mounts the volume read-only. Default: false."""


def unknown_mounts(mounts: tuple[TemplateMount, ...], volumes: tuple[TemplateVolume, ...]) -> Iterator[str]:
    """Yields the names of the mounts for which there is no volume of the same name."""
    known = {volume.name for volume in volumes}
    yield from (mount.name for mount in mounts if mount.name not in known)
