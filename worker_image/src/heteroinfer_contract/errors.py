"""Errors of the contract. Stdlib only."""


class ContractError(ValueError):
    """A plan, an environment or a message is not what its schema says; the text says which field."""
