"""How nodes pull the images of pods that the operator makes. Pure."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePulls:
    """What an installation adds to every pod for its images.

    Attributes:
        policy: Always, IfNotPresent or Never; "" leaves it to Kubernetes.
        secrets: names of Secrets of the pod's namespace, besides those that the resource names.
    """

    policy: str = ""
    secrets: tuple[str, ...] = ()

    def add_to(self, spec: dict[str, Any]) -> dict[str, Any]:
        """Returns a pod's spec with what is set; the same where nothing is."""
        added = dict(spec)
        if self.policy:
            added["containers"] = [{**each, "imagePullPolicy": self.policy} for each in spec["containers"]]
        given = spec.get("imagePullSecrets", [])
        more = [{"name": name} for name in self.secrets if {"name": name} not in given]
        if more:
            added["imagePullSecrets"] = [*given, *more]
        return added
