"""What an installation decides for all its resources. Pure."""

from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from heteroinfer_operator.manifests.addressing import Addressing
from heteroinfer_operator.manifests.worker_pods import WorkerImages
from heteroinfer_operator.reconcile.allowed import Allowed
from heteroinfer_operator.stored_fields import version_number

_MOST_EXACT: Final = 10**14
"""Versions below are epochs; names of pods have space for all that follow."""
_PER_EPOCH: Final = 10**5


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

    def first_epoch(self, resource_version: str, now: datetime) -> int:
        """Returns the epoch of a group of which nothing is known: at least as high as any that it has had.

        The API server counts its writes, and never back: whatever was lost, the status, the group by a scale,
        or the whole resource, each epoch was written into the status before it began. Where the
        resourceVersion is no number, the seconds since 1970 take its place: they hold while the operator's
        clock is not set back.

        Args:
            resource_version: of the resource.
            now: time of the reconcile.
        """
        if not self.names_come_again:
            return 1
        version = version_number(resource_version) or max(int(now.timestamp()), 1)
        # A version of more digits is a time in nanoseconds: no epochs follow each other so fast.
        return version if version < _MOST_EXACT else _MOST_EXACT + version // _PER_EPOCH

    def largest_epoch(self, resource_version: str, now: datetime) -> int:
        """Returns the largest epoch that the operator can have written into the status of a resource.

        The first is a version of the resource, and each next one is written into the status, which makes the
        version grow by one at least.

        Args:
            resource_version: of the resource.
            now: as of first_epoch.
        """
        return self.first_epoch(resource_version, now) if self.names_come_again else _MOST_EXACT
