"""Image volumes: which pods mount them, and which nodes cannot. Pure.

Source: kubernetes.io/docs/tasks/configure-pod-container/image-volumes. An older runtime ignores the image of
a mount, and then fails with a message about an empty path.
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
"""First version of the kubelet with image volumes. The feature gate of a kubelet before 1.35 is unknown."""


def mounts_images(spec: HeteroInferenceSpec, template: PodTemplate | None) -> bool:
    """Reports whether pods with this template mount the model or a volume of the template from an image."""
    volumes = (template.volumes if template is not None else None) or ()
    return spec.model.uri.startswith(_OCI_SCHEME) or any(volume.image is not None for volume in volumes)


def describe_old_program(runtime: str, kubelet: str) -> str:
    """Describes the program of a node that is too old for image volumes, or returns "".

    Args:
        runtime: `containerRuntimeVersion` of the node, such as `containerd://1.7.2`.
        kubelet: `kubeletVersion` of the node, such as `v1.35.4`.
    """
    found = _RUNTIME.match(runtime)
    first = _FIRST_RUNTIMES.get(found[1]) if found is not None else None
    if found is not None and first is not None and (int(found[2]), int(found[3])) < first:
        name = f"{found[1]} {found[2]}.{found[3]}"
        return f"{name}, which cannot mount image volumes ({found[1]} {first[0]}.{first[1]} can)"
    version = _KUBELET.match(kubelet)
    if version is not None and (int(version[1]), int(version[2])) < _FIRST_KUBELET:
        return f"kubelet {version[1]}.{version[2]}, which cannot mount image volumes (kubelet 1.35 can)"
    return ""
