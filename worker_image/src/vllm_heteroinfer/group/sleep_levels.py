"""Which of vLLM's levels of sleep a group has. Stdlib only; pure."""

LEVELS = (0, 1)
"""0 stops scheduling only; 1 gives back the KV cache, and moves a GPU's weights to host memory. Level 2
drops the weights, which another call then loads again: packed weights of CPU ranks cannot be."""


def check_level(level: int) -> None:
    """Raises ValueError for a level that a group does not have; it says what to do."""
    if level not in LEVELS:
        raise ValueError(
            f"got sleep level {level}, expected {' or '.join(map(str, LEVELS))}: a group keeps its weights "
            "in host memory while it sleeps; set spec.suspend: true to give back all memory"
        )
