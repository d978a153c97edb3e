"""A Pod as a user of the port may create it, written out."""

from typing import Any

from heteroinfer_contract import names


def pod(**container: Any) -> dict[str, Any]:
    """Returns the smallest Pod that runs here; `container` replaces fields of its container."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p-0-1-0", "labels": {names.LABEL_GROUP: "0"}},
        "spec": {
            "restartPolicy": "Never",
            "containers": [
                {
                    "name": names.CONTAINER_WORKER,
                    "command": ["heteroinfer-worker"],
                    "args": ["run"],
                    **container,
                }
            ],
        },
    }


def with_spec(**spec: Any) -> dict[str, Any]:
    """Returns the same with other fields of the pod's spec."""
    manifest = pod()
    return {**manifest, "spec": {**manifest["spec"], **spec}}
