"""Applies CustomResourceDefinitions to an API server."""

import json
from collections.abc import Mapping
from typing import Any

from tests.cluster import processes
from tests.cluster.running_cluster import Cluster

TIMEOUT_S = 30.0


def apply_crds(cluster: Cluster, *definitions: Mapping[str, Any]) -> None:
    """Applies CustomResourceDefinitions, and waits until the API server serves them.

    Raises:
        ClusterError: the API server refuses a definition, or does not serve it after 30 s.
    """
    text = "\n---\n".join(map(json.dumps, definitions))
    cluster.kubectl("apply", "--server-side", "-f", "-", stdin=text)
    wait_established(cluster, *(definition["metadata"]["name"] for definition in definitions))


def wait_established(cluster: Cluster, *names: str) -> None:
    """Waits until the API server serves these CustomResourceDefinitions.

    `kubectl wait` gives up immediately if a CRD has no conditions yet, like every new one.

    Raises:
        ClusterError: a definition does not exist, or is not served after 30 s.
    """

    def established() -> bool:
        return all(is_established(cluster, name) for name in names)

    processes.wait_until(f"the kinds {', '.join(names)}", established, timeout_s=TIMEOUT_S)


def is_established(cluster: Cluster, name: str) -> bool:
    """Returns whether a CustomResourceDefinition is served. Raises ClusterError if it does not exist."""
    stored = json.loads(cluster.kubectl("get", "crd", name, "-o", "json"))
    return any(
        condition["type"] == "Established" and condition["status"] == "True"
        for condition in stored.get("status", {}).get("conditions") or ()
    )
