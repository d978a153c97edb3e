"""Errors of the contract. Stdlib only; pure."""


class ContractError(ValueError):
    """A plan, an environment or a message is not what its schema says; the text says which field."""


class ModelIncompleteError(ContractError):
    """A model that was fetched is not complete any more; the text says what is missing."""


def not_set(variable: str) -> ContractError:
    """Returns the error of a process that lacks a variable which every worker has."""
    return ContractError(f"{variable} is not set; workers are started by the operator or `heteroinfer up`")
