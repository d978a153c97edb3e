"""Settings for pulling the images of the operator's pods. Pure."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePulls:
    """Settings that an installation adds to every pod for its images.

    Attributes:
        policy: Always, IfNotPresent or Never; "" for Kubernetes' default.
        secrets: names of Secrets in the pod's namespace, in addition to the resource's own.
    """

    policy: str = ""
    secrets: tuple[str, ...] = ()

    def add_to(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Returns a pod's spec with this pull policy, and with these secrets added to the spec's own."""
        new_spec = dict(spec)
        if self.policy:
            new_spec["containers"] = [
                {**container, "imagePullPolicy": self.policy} for container in spec["containers"]
            ]
        existing_secrets = spec.get("imagePullSecrets", [])
        missing_secrets = [{"name": name} for name in self.secrets if {"name": name} not in existing_secrets]
        if missing_secrets:
            new_spec["imagePullSecrets"] = [*existing_secrets, *missing_secrets]
        return new_spec
