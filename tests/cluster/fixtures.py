"""pytest fixtures; a conftest takes them with `pytest_plugins = ["tests.cluster.fixtures"]` or an import."""

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import Cluster, start_control_plane_only


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Cluster]:
    """A real API server with controllers and scheduler, no node: for CRDs, RBAC, the operator, Helm."""
    with start_control_plane_only() as cluster:
        yield cluster
