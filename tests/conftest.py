"""Fixtures that every test may ask for."""

from tests.cluster.fixtures import control_plane, node_cluster

__all__ = ["control_plane", "node_cluster"]
