"""Why a feed-forward group cannot go on. Stdlib only."""


class LaneError(RuntimeError):
    """A feed-forward rank did not answer as it must; the text says what, and what to do.

    Attributes:
        rank: the rank that is to blame.
    """

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        super().__init__(message)
