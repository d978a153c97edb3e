"""Builds, starts and removes a real Kubernetes cluster on this machine, for tests and for trying things.

`python -m tests.cluster --help` is the command line, and `tests.cluster.fixtures` has the pytest fixtures.
docs/contributor/testing.md describes the cluster. This package does not import the product.
"""
