"""Provides an API server that serves the generated CRD. Other tests install the CRD in other ways."""

from collections.abc import Iterator

import pytest

from tests.cluster.running_cluster import Cluster
from tests.integration.crd.resource_requests import Server
from tests.integration.specs.checking import start_cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Yields a control plane that serves HeteroInference."""
    with start_cluster() as started:
        yield started


@pytest.fixture(scope="package")
def server(cluster: Cluster) -> Iterator[Server]:
    """Yields one open connection to the API server."""
    with Server(cluster.kubeconfig) as connected:
        yield connected
