"""The error of a fetch that cannot continue. Pure."""

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import FailureReason


class FetchError(ContractError):
    """A fetch cannot continue; the message contains the problem and its fix.

    Attributes:
        reason: becomes the reason of the condition ModelReady.
        is_temporary: whether another attempt may soon succeed, for example after a network error.
    """

    def __init__(self, reason: FailureReason, message: str, *, is_temporary: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.is_temporary = is_temporary
