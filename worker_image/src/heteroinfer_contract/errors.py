"""Errors of the contract. Stdlib only; pure."""


class ContractError(ValueError):
    """A plan, an environment or a message is not what its schema says; the text says which field."""


class ModelIncompleteError(ContractError):
    """A model that was fetched is not complete any more; the text says what is missing."""
