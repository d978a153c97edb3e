"""Scopes of actions. A refused action blocks the later actions of its scopes. Pure."""

from typing import Final

CLIENTS_SCOPE: Final = "clients"
"""Scope of the actions through which clients reach groups."""
MODEL_SCOPE: Final = "model"
"""Scope of the actions that fetch or inspect the model."""


def group_scope(index: int) -> str:
    """Returns the scope of the actions that create a group."""
    return f"group/{index}"
