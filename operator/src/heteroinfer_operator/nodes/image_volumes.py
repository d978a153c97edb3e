"""Image volumes: which pods mount them, and which nodes cannot. Pure.

Source: kubernetes.io/docs/tasks/configure-pod-container/image-volumes. A runtime that is too old ignores the
image of a mount, and then fails with a message about an empty path. So the operator excludes such nodes.
"""

import re
from types import MappingProxyType
from typing import Final

from heteroinfer_operator.api import HeteroInferenceSpec, PodTemplate

FIX: Final = (
    "Image volumes need a kubelet of Kubernetes 1.35 (1.33 with the feature gate ImageVolume), and "
    "containerd 2.1 or CRI-O 1.31. Upgrade the nodes, select other nodes by template.nodeSelector, or use "
    "hf:// or pvc:// in model.uri"
)
_OCI_SCHEME: Final = "oci://"
_RUNTIME: Final = re.compile(r"([a-z-]{1,32})://v?([0-9]{1,4})\.([0-9]{1,4})")
_KUBELET: Final = re.compile(r"v?([0-9]{1,4})\.([0-9]{1,4})")
_FIRST_RUNTIMES: Final = MappingProxyType({"containerd": (2, 1), "cri-o": (1, 31)})
"""First version of each runtime that mounts image volumes."""
_FIRST_KUBELET: Final = (1, 31)
"""First version of the kubelet with image volumes. Before 1.35, they need a feature gate of unknown state."""


def mounts_images(spec: HeteroInferenceSpec, template: PodTemplate | None) -> bool:
    """Reports whether pods with this template mount the model or a volume of the template from an image."""
    volumes = (template.volumes if template is not None else None) or ()
    return spec.model.uri.startswith(_OCI_SCHEME) or any(volume.image is not None for volume in volumes)


def describe_old_program(runtime: str, kubelet: str) -> str:
    """Describes a runtime or a kubelet that is too old for image volumes; returns "" if neither is too old.

    Args:
        runtime: `containerRuntimeVersion` of the node, such as `containerd://1.7.2`.
        kubelet: `kubeletVersion` of the node, such as `v1.35.4`.
    """
    runtime_match = _RUNTIME.match(runtime)
    if runtime_match is not None:
        name, major, minor = runtime_match.groups()
        first = _FIRST_RUNTIMES.get(name)
        if first is not None and (int(major), int(minor)) < first:
            first_major, first_minor = first
            return (
                f"{name} {major}.{minor}, which cannot mount image volumes "
                f"({name} {first_major}.{first_minor} can)"
            )
    version = _KUBELET.match(kubelet)
    # A kubelet from 1.31 to 1.34 is not too old, because its feature gate may be on.
    if version is not None and (int(version[1]), int(version[2])) < _FIRST_KUBELET:
        return f"kubelet {version[1]}.{version[2]}, which cannot mount image volumes (kubelet 1.35 can)"
    return ""
