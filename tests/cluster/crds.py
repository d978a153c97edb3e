"""Kinds of resources that an API server is given."""

import json

from tests.cluster import processes
from tests.cluster.cluster import Cluster

TIMEOUT_S = 30.0


def wait_established(cluster: Cluster, *names: str) -> None:
    """Returns once the API server serves these CustomResourceDefinitions.

    `kubectl wait` gives up at once on one that has no conditions yet, as every new one has none.

    Raises:
        ClusterError: one of them is not served after 30 s, or does not exist.
    """

    def established() -> bool:
        stored = [json.loads(cluster.kubectl("get", "crd", name, "-o", "json")) for name in names]
        return all(
            any(
                condition["type"] == "Established" and condition["status"] == "True"
                for condition in each.get("status", {}).get("conditions") or ()
            )
            for each in stored
        )

    processes.wait_until(f"the kinds {', '.join(names)}", established, timeout_s=TIMEOUT_S)
