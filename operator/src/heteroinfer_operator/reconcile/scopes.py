"""Scopes of actions: a refused action blocks the later ones of its scopes. Pure."""

from typing import Final

CLIENTS_SCOPE: Final = "clients"
"""Scope of the actions by which clients reach groups."""
MODEL_SCOPE: Final = "model"
"""Scope of the actions that look at the model."""


def group_scope(index: int) -> str:
    """Returns the scope of the actions that make a group."""
    return f"group/{index}"
