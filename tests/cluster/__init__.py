"""A real Kubernetes cluster for tests and for playing: built, started and removed on this machine.

`python -m tests.cluster --help` is the way in from a shell, `tests.cluster.fixtures` the way in
from pytest, docs/contributor/testing.md tells what it does. Nothing here imports the product.
"""
