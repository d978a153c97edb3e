"""How many CPUs the engine keeps for itself where it shares them with ranks. Stdlib only; pure."""

from typing import Final

_OF_MANY: Final = 2
"""The engine core and the API server each spin on one CPU; 16 threads on 16 CPUs made a
step take 258 ms instead of 56 (H200 host, 2026-11)."""
_MANY: Final = 8
"""From here on the engine gets two CPUs; below, one; a single CPU is shared."""


def engine_cpus(usable: float) -> int:
    """Returns the CPUs that ranks leave to the engine and its API server.

    Args:
        usable: CPUs that a leader's ranks, engine and API server share.
    """
    if usable <= 1:
        return 0
    return _OF_MANY if usable >= _MANY else 1
