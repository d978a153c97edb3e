"""The number of a first epoch as in a cluster, for tests of groups without a cluster."""

from typing import Final

EPOCH: Final = 28_566_368_366
"""A first epoch in a cluster counts milliseconds (reconcile/options.py::first_epoch), so it has more than 32
bits."""
