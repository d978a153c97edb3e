"""Provides an API server that serves the generated CRD, as for the tests of the CRD."""

from collections.abc import Iterator

import pytest

from tests.cluster.running_cluster import Cluster
from tests.integration.specs.checking import start_cluster


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Yields a control plane that serves HeteroInference."""
    with start_cluster() as started:
        yield started
