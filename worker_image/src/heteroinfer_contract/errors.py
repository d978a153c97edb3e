"""Errors of the contract. Stdlib only; pure."""


class ContractError(ValueError):
    """A plan, an environment or a message does not match its schema; the text names the field."""


class ModelIncompleteError(ContractError):
    """A fetched model is no longer complete; the text names the missing file."""


def not_set(variable: str) -> ContractError:
    """Returns the error for a required environment variable that is not set."""
    return ContractError(
        f"{variable}: must be set (the operator and `heteroinfer up` set it for each worker). Start the "
        "worker with one of them"
    )
