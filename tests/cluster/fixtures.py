"""Defines the pytest fixtures: `pytest_plugins = ["tests.cluster.fixtures"]` in a conftest.

Both clusters end with the test session. If the session is killed, the next start removes them.
"""

from collections.abc import Iterator

import pytest

from tests.cluster import tools
from tests.cluster.images import ensure_images
from tests.cluster.node import NodeCluster, start_node_cluster
from tests.cluster.running_cluster import Cluster, ensure_tools, start_control_plane_only


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Cluster]:
    """A real API server with controllers and scheduler, but no node: for CRDs, RBAC, the operator, Helm."""
    ensure_tools(tools.CONTROL_PLANE)
    with start_control_plane_only() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def node_cluster() -> Iterator[NodeCluster]:
    """A real node that is Ready, with the images of this working tree, which are built if needed."""
    ensure_tools(tools.NODE)
    with start_node_cluster(ensure_images()) as cluster:
        yield cluster
