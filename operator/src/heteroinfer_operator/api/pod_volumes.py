"""Volumes that a role's pods may have besides those of the plan: of safe kinds. Pure.

These open nothing of the node: no hostPath, no token of a service account, no driver of its own.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, ClassVar, Final

from pydantic import Field

from heteroinfer_operator.api.base import ATOMIC, ByteSize, Model, ObjectName, ValidationRule, cel_text
from heteroinfer_operator.api.pod_fields import ClassName, Image, KeyOfObject

OWN_VOLUMES: Final = ("model", "scratch", "shm", "ca-bundle", "files")
"""Names of volumes that the manifests of workers have."""
MOUNT_ROOTS: Final = ("/mnt", "/data", "/srv")
"""Folders of a container below which volumes are mounted.

No image has code, settings or accounts there. Anywhere else a file of a ConfigMap may become code of a worker
(`sitecustomize.py`, `/etc/ld.so.preload`, a user's site-packages), whatever the installation refuses in args.
"""
_FileMode = Annotated[int, Field(ge=0, le=0o777)]
_PART: Final = "([^/:.]|[.][^/:.])[^/:]*"
"""Of a path: not `.`, and nothing that begins with `..`. A rule in CEL would cost too much so deep inside."""
_RELATIVE: Final = f"{_PART}(/{_PART})*"
_ABSOLUTE: Final = f"(/{_PART})+"


class PullPolicy(StrEnum):
    """When an image is pulled."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class Medium(StrEnum):
    """What an emptyDir is made of."""

    DISK = ""
    MEMORY = "Memory"


class KeyToPath(Model):
    """A key of a ConfigMap or Secret, and its path in the volume."""

    key: KeyOfObject
    """Key."""
    path: Annotated[str, Field(pattern=f"^{_RELATIVE}$", min_length=1, max_length=256)]
    """Path of its file, relative to the volume."""
    mode: _FileMode | None = None
    """Permissions of the file; defaultMode if not given."""


_Items = Annotated[tuple[KeyToPath, ...], Field(max_length=16, json_schema_extra=ATOMIC)]


class ConfigMapVolume(Model):
    """A ConfigMap of the same namespace."""

    name: ObjectName
    """Its name."""
    items: _Items | None = None
    """Keys to mount; all if not given."""
    default_mode: _FileMode | None = None
    """Permissions of the files; 0644 if not given."""
    optional: bool | None = None
    """Whether pods start without it."""


class SecretVolume(Model):
    """A Secret of the same namespace."""

    secret_name: ObjectName
    """Its name."""
    items: _Items | None = None
    """Keys to mount; all if not given."""
    default_mode: _FileMode | None = None
    """Permissions of the files; 0644 if not given."""
    optional: bool | None = None
    """Whether pods start without it."""


class ProjectedObject(Model):
    """A ConfigMap or Secret of the same namespace, as a part of a volume."""

    name: ObjectName
    """Its name."""
    items: _Items | None = None
    """Keys to mount; all if not given."""
    optional: bool | None = None
    """Whether pods start without it."""


class ProjectedSource(Model):
    """A part of a projected volume: exactly one of its fields."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="has(self.configMap) != has(self.secret)",
            message="sources: give exactly one of configMap and secret in each",
            holds=lambda own: (own.config_map is None) != (own.secret is None),
        ),
    )

    config_map: ProjectedObject | None = None
    """A ConfigMap."""
    secret: ProjectedObject | None = None
    """A Secret."""


class ProjectedVolume(Model):
    """Several ConfigMaps and Secrets in one folder."""

    sources: Annotated[
        tuple[ProjectedSource, ...], Field(min_length=1, max_length=16, json_schema_extra=ATOMIC)
    ]
    """Its parts."""
    default_mode: _FileMode | None = None
    """Permissions of the files; 0644 if not given."""


class EmptyDirVolume(Model):
    """A folder that begins empty with each pod."""

    medium: Medium | None = None
    """Memory counts as memory of the pod, which the plan does not subtract; disk if not given."""
    size_limit: ByteSize | None = None
    """A pod that writes more is evicted."""


class ImageVolume(Model):
    """The files of an image or of an OCI artifact, read-only."""

    reference: Image
    """Its name, as a container's image."""
    pull_policy: PullPolicy | None = None
    """When it is pulled; Always for the tag latest, else IfNotPresent, if not given."""


class ClaimVolume(Model):
    """A PersistentVolumeClaim of the same namespace."""

    claim_name: ClassName
    """Its name."""
    read_only: bool | None = None
    """Whether it is mounted read-only."""


_KINDS: Final = ("configMap", "secret", "projected", "emptyDir", "image", "persistentVolumeClaim")
_ATTRIBUTES: Final = ("config_map", "secret", "projected", "empty_dir", "image", "persistent_volume_claim")


class TemplateVolume(Model):
    """A volume: exactly one of its kinds."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel=f"[{', '.join(f'has(self.{kind})' for kind in _KINDS)}].filter(given, given).size() == 1",
            message=f"volumes: give exactly one of {', '.join(_KINDS)} in each",
            holds=lambda own: sum(getattr(own, name) is not None for name in _ATTRIBUTES) == 1,
        ),
        ValidationRule(
            cel=f"!(self.name in [{', '.join(map(cel_text, OWN_VOLUMES))}])",
            message=f"volumes: the operator has volumes {', '.join(OWN_VOLUMES)} itself; choose another name",
            holds=lambda own: own.name not in OWN_VOLUMES,
        ),
    )

    name: Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", min_length=1, max_length=63)]
    """Name, by which volumeMounts mean it."""
    config_map: ConfigMapVolume | None = None
    """A ConfigMap."""
    secret: SecretVolume | None = None
    """A Secret."""
    projected: ProjectedVolume | None = None
    """Several ConfigMaps and Secrets in one folder."""
    empty_dir: EmptyDirVolume | None = None
    """A folder that begins empty with each pod."""
    image: ImageVolume | None = None
    """The files of an image, read-only; Kubernetes 1.35 or later."""
    persistent_volume_claim: ClaimVolume | None = None
    """A claim."""


class TemplateMount(Model):
    """Where a volume is mounted in the worker container."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel=f"[{', '.join(cel_text(f'{root}/') for root in MOUNT_ROOTS)}]"
            ".exists(r, self.mountPath.startsWith(r))",
            message=f"mountPath: must be below {', '.join(MOUNT_ROOTS)}, such as /mnt/NAME; files elsewhere "
            "may become code of workers",
            holds=lambda own: own.mount_path.startswith(tuple(f"{root}/" for root in MOUNT_ROOTS)),
            got="%s",
            got_cel=("self.mountPath",),
            got_values=lambda own: (own.mount_path,),
        ),
    )

    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of one of volumes."""
    mount_path: Annotated[str, Field(pattern=f"^{_ABSOLUTE}$", min_length=2, max_length=256)]
    """Folder in the container, below /mnt, /data or /srv."""
    sub_path: Annotated[str, Field(pattern=f"^{_RELATIVE}$", min_length=1, max_length=256)] | None = None
    """A part of the volume; all of it if not given."""
    read_only: bool | None = None
    """Whether it is mounted read-only."""


def unknown_mounts(mounts: tuple[TemplateMount, ...], volumes: tuple[TemplateVolume, ...]) -> Iterator[str]:
    """Yields the names in mounts that no volume has."""
    known = {volume.name for volume in volumes}
    yield from (mount.name for mount in mounts if mount.name not in known)
