"""Why a fetch cannot go on. Pure."""

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.failure import FailureReason


class FetchError(ContractError):
    """A fetch cannot go on; the text says what was got, expected, and what to do.

    Attributes:
        reason: becomes the reason of the condition ModelReady.
        may_heal: whether trying again soon may help: the network, a busy hub.
    """

    def __init__(self, reason: FailureReason, message: str, *, may_heal: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.may_heal = may_heal
