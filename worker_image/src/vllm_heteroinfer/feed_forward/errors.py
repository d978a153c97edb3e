"""Why a feed-forward group cannot go on. Stdlib only."""


class LaneError(RuntimeError):
    """A feed-forward rank did not answer in time; the text says what to do.

    It is an accusation by the rank that asks: the lane's own report and its supervisor's weigh more.

    Attributes:
        rank: the rank that is to blame.
    """

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        super().__init__(message)


class LaneFailedError(LaneError):
    """A feed-forward rank answered that its computation failed; its own report says why."""
