"""Fixtures that every test may ask for, and how random examples are drawn."""

from hypothesis import settings

from tests.cluster.fixtures import control_plane, node_cluster

__all__ = ["control_plane", "node_cluster"]

# Machines are noisy: pytest's own time limit ends what hangs, not hypothesis's 200 ms an example.
settings.register_profile("heteroinfer", deadline=None, max_examples=50)
settings.load_profile("heteroinfer")
