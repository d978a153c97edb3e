"""What an installation decides for all its resources. Pure."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final

from heteroinfer_operator.manifests.addressing import Addressing
from heteroinfer_operator.manifests.worker_pods import WorkerImages
from heteroinfer_operator.reconcile.allowed import Allowed

_EPOCHS_SINCE: Final = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What an installation decides for all its resources.

    Attributes:
        addressing: how pods reach each other and their model.
        images: of workers whose spec names none.
        operator_key: of which groups' keys are made; None gives them none.
        nodes_may_come: whether waiting for missing GPUs is of use: not on one machine.
        allowed: what a spec may ask for beyond its schema.
        names_come_again: whether a resource of the same name may have been here before.
    """

    addressing: Addressing
    images: WorkerImages
    operator_key: bytes | None = field(default=None, repr=False)
    nodes_may_come: bool = True
    allowed: Allowed = Allowed()  # noqa: RUF009 - frozen
    names_come_again: bool = True

    def first_epoch(self, now: datetime) -> int:
        """Returns the epoch of a group of which nothing is known: higher than any that it can have had.

        Seconds of a clock: whatever was lost, the status, the group by a scale, or the whole resource,
        the group can have begun no more epochs than seconds have passed.
        """
        seconds = int((now - _EPOCHS_SINCE).total_seconds()) if self.names_come_again else 0
        return max(seconds, 1)
