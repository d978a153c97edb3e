"""Files that pods mount in addition to the model: CA bundle, engine files and user volumes. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.api import HeteroInferenceSpec, KeyReference, PodTemplate

_CA_BUNDLE: Final = "ca-bundle"
_FILES: Final = "files"
FIELDS_OF_VOLUMES: Final[Mapping[str, str]] = MappingProxyType(
    {_CA_BUNDLE: "spec.model.caBundle", _FILES: "spec.engine.files"}
)
"""Field of the resource that adds a volume, by the volume's name. A role's template adds the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MountedFiles:
    """Volumes of a pod in addition to scratch and model.

    Attributes:
        volumes: volumes of the pod.
        mounts: mounts of the pod's container.
        env: environment variables with paths of the files.
    """

    volumes: tuple[dict[str, Any], ...] = ()
    mounts: tuple[dict[str, Any], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def __add__(self, other: "MountedFiles") -> "MountedFiles":
        return MountedFiles(
            volumes=(*self.volumes, *other.volumes),
            mounts=(*self.mounts, *other.mounts),
            env={**self.env, **other.env},
        )


def ca_bundle(spec: HeteroInferenceSpec) -> MountedFiles:
    """Returns the file of `model.caBundle`, and the environment variable with its path."""
    bundle = spec.model.ca_bundle
    if bundle is None:
        return MountedFiles()
    reference: KeyReference | None
    # A volume names its source in the field `name` of a ConfigMap, or `secretName` of a Secret.
    kind, name_field, reference = "configMap", "name", bundle.config_map_key_ref
    if bundle.secret_key_ref is not None:
        kind, name_field, reference = "secret", "secretName", bundle.secret_key_ref
    assert reference is not None  # the schema requires exactly one of both
    items = [{"key": reference.key, "path": names.CA_BUNDLE_FILE}]
    return MountedFiles(
        volumes=({"name": _CA_BUNDLE, kind: {name_field: reference.name, "items": items}},),
        mounts=({"name": _CA_BUNDLE, "mountPath": names.CA_BUNDLE_MOUNT, "readOnly": True},),
        env={names.ENV_CA_BUNDLE: f"{names.CA_BUNDLE_MOUNT}/{names.CA_BUNDLE_FILE}"},
    )


def engine_files(spec: HeteroInferenceSpec) -> MountedFiles:
    """Returns the files of `engine.files`."""
    if not spec.engine.files:
        return MountedFiles()
    sources = [
        {
            "configMap": {
                "name": file.config_map_key_ref.name,
                "items": [{"key": file.config_map_key_ref.key, "path": file.name}],
            }
        }
        for file in spec.engine.files
    ]
    return MountedFiles(
        volumes=({"name": _FILES, "projected": {"sources": sources}},),
        mounts=({"name": _FILES, "mountPath": names.FILES_MOUNT, "readOnly": True},),
    )


def template_volumes(template: PodTemplate | None) -> MountedFiles:
    """Returns the volumes of a role's template."""
    if template is None:
        return MountedFiles()
    return MountedFiles(
        volumes=tuple(volume.dump() for volume in template.volumes),
        mounts=tuple(volume_mount.dump() for volume_mount in template.volume_mounts),
    )
