"""Small files of ConfigMaps and Secrets that pods mount: authorities, and files of the engine. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from heteroinfer_contract import names
from heteroinfer_operator.api import HeteroInferenceSpec, PodTemplate

_CA_BUNDLE: Final = "ca-bundle"
_FILES: Final = "files"


@dataclass(frozen=True, slots=True, kw_only=True)
class MountedFiles:
    """What a pod has besides scratch and model.

    Attributes:
        volumes: of the pod.
        mounts: of its container.
        env: variables that name the files.
    """

    volumes: tuple[dict[str, Any], ...] = ()
    mounts: tuple[dict[str, Any], ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)

    def __add__(self, other: "MountedFiles") -> "MountedFiles":
        """Returns both."""
        return MountedFiles(
            volumes=(*self.volumes, *other.volumes),
            mounts=(*self.mounts, *other.mounts),
            env={**self.env, **other.env},
        )


def ca_bundle(spec: HeteroInferenceSpec) -> MountedFiles:
    """Returns what brings `model.caBundle`; nothing without one."""
    bundle = spec.model.ca_bundle
    if bundle is None:
        return MountedFiles()
    kind, named, reference = "configMap", "name", bundle.config_map_key_ref
    if bundle.secret_key_ref is not None:
        kind, named, reference = "secret", "secretName", bundle.secret_key_ref
    assert reference is not None  # a rule of the schema: exactly one is given
    items = [{"key": reference.key, "path": names.CA_BUNDLE_FILE}]
    return MountedFiles(
        volumes=({"name": _CA_BUNDLE, kind: {named: reference.name, "items": items}},),
        mounts=({"name": _CA_BUNDLE, "mountPath": names.CA_BUNDLE_MOUNT, "readOnly": True},),
        env={names.ENV_CA_BUNDLE: f"{names.CA_BUNDLE_MOUNT}/{names.CA_BUNDLE_FILE}"},
    )


def engine_files(spec: HeteroInferenceSpec) -> MountedFiles:
    """Returns what brings `engine.files`; nothing without any."""
    if not spec.engine.files:
        return MountedFiles()
    sources = [
        {
            "configMap": {
                "name": each.config_map_key_ref.name,
                "items": [{"key": each.config_map_key_ref.key, "path": each.name}],
            }
        }
        for each in spec.engine.files
    ]
    return MountedFiles(
        volumes=({"name": _FILES, "projected": {"sources": sources}},),
        mounts=({"name": _FILES, "mountPath": names.FILES_MOUNT, "readOnly": True},),
    )


def template_volumes(template: PodTemplate | None) -> MountedFiles:
    """Returns the further volumes of a role's pods."""
    if template is None:
        return MountedFiles()
    return MountedFiles(
        volumes=tuple(each.dump() for each in template.volumes),
        mounts=tuple(each.dump() for each in template.volume_mounts),
    )
