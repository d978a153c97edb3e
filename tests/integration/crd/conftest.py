"""An API server of its own that serves the generated CRD: other tests install it in other ways."""

from collections.abc import Iterator

import pytest

from heteroinfer_operator.crd import render_crd
from tests.cluster import tools
from tests.cluster.cluster import Cluster, ensure_tools, start_control_plane_only
from tests.integration.crd.server import Server


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """A control plane that serves HeteroInference."""
    ensure_tools(tools.ALL)
    with start_control_plane_only() as started:
        started.kubectl("create", "-f", "-", stdin=render_crd())
        started.kubectl(
            "wait", "--for=condition=Established", "crd/heteroinferences.heteroinfer.dev", "--timeout=30s"
        )
        yield started


@pytest.fixture(scope="package")
def server(cluster: Cluster) -> Iterator[Server]:
    """One kept-alive connection to its API server."""
    with Server(cluster.kubeconfig) as connected:
        yield connected
