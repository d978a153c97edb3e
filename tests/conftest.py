"""Defines fixtures for all tests, and settings for random examples."""

from hypothesis import settings

from tests.cluster.fixtures import control_plane, node_cluster

__all__ = ["control_plane", "node_cluster"]

# Machines are noisy, so only pytest's time limit ends a hanging example, not hypothesis's 200 ms.
settings.register_profile("heteroinfer", deadline=None, max_examples=50)
settings.load_profile("heteroinfer")
