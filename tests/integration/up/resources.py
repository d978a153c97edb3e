"""Builds small resources for `heteroinfer up`, as a user writes them."""

from pathlib import Path
from typing import Any

import yaml

CPU_ROLE = {"name": "cpu", "device": "CPU", "pods": 2, "resources": {"limits": {"memory": "3Gi"}}}
GPU_ROLE = {"name": "gpu", "device": "GPU", "resources": {"limits": {"memory": "3Gi"}}}


def resource(model_dir: Path, **spec: Any) -> dict[str, Any]:
    """Builds a resource of two CPU pods. `spec` replaces fields of its spec."""
    return {
        "apiVersion": "heteroinfer.dev/v1alpha1",
        "kind": "HeteroInference",
        "metadata": {"name": "tiny"},
        "spec": {
            "model": {"uri": f"file://{model_dir}"},
            "engine": {"maxModelLen": 512},
            "parallelism": {"mode": "Pipeline"},
            "roles": [CPU_ROLE],
            **spec,
        },
    }


def write(folder: Path, document: dict[str, Any]) -> Path:
    """Writes the resource to a file, and returns the file."""
    path = folder / "resource.yaml"
    path.write_text(yaml.safe_dump(document))
    return path
