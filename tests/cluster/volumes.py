"""Makes a folder of this machine a volume of the node, for models."""

from pathlib import Path

import yaml


def volume_manifests(namespace: str, folder: Path) -> str:
    """Returns a PersistentVolume on a folder of the node, and the claim `models` on it."""
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"models-{namespace}"},
        "spec": {
            "capacity": {"storage": "1Gi"},
            "accessModes": ["ReadOnlyMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "claimRef": {"namespace": namespace, "name": "models"},
            "hostPath": {"path": str(folder), "type": "Directory"},
        },
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "models", "namespace": namespace},
        "spec": {
            "accessModes": ["ReadOnlyMany"],
            "storageClassName": "",
            "volumeName": f"models-{namespace}",
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    return yaml.safe_dump_all([volume, claim])
