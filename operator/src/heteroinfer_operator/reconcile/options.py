"""What an installation decides for all its resources. Pure."""

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

from heteroinfer_operator.manifests import egress_policy
from heteroinfer_operator.manifests.addressing import Addressing
from heteroinfer_operator.manifests.fetch_egress import FetchEgress
from heteroinfer_operator.manifests.pod_resources import PodResources
from heteroinfer_operator.manifests.pod_security import PodSecurity
from heteroinfer_operator.manifests.worker_pods import WorkerImages
from heteroinfer_operator.reconcile.allowed import Allowed
from heteroinfer_operator.stored_fields import version_number

_MOST_EXACT: Final = 10**14
"""Versions below are epochs; names of pods have space for all that follow."""
_PER_EPOCH: Final = 10**5
_SINCE: Final = datetime(2026, 1, 1, tzinfo=UTC)
"""Epochs count from here: names of pods stay shorter than with the years since 1970."""
_SET_BACK: Final = timedelta(days=1)
"""By so much the operator's clock may be set back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What an installation decides for all its resources.

    Attributes:
        operator_key: of which groups' keys are made; None gives them none.
        egress: whether policies let pods out.
        fetch_egress: where they let pods that fetch a model out to.
        nodes_may_come: whether waiting for missing GPUs is of use: not on one machine.
        names_come_again: whether a resource of the same name may have been here before.
        pod_resources: of the pods that look at models, and what roles leave out.
        pod_security: security contexts of workers, and of pods that fetch or read a model.
    """

    addressing: Addressing
    images: WorkerImages
    operator_key: bytes | None = field(default=None, repr=False)
    egress: egress_policy.Egress = egress_policy.Egress.AUTO
    fetch_egress: FetchEgress = FetchEgress()  # noqa: RUF009 - frozen
    nodes_may_come: bool = True
    allowed: Allowed = Allowed()  # noqa: RUF009 - frozen
    names_come_again: bool = True
    pod_resources: PodResources = field(default_factory=PodResources)
    pod_security: PodSecurity = PodSecurity()  # noqa: RUF009 - frozen

    def first_epoch(self, resource_version: str, now: datetime) -> int:
        """Returns the lowest epoch that a group may begin now: no group of its name has had it.

        Nothing that is stored proves which epochs there were: the status, a scaled group or the whole
        resource may be lost, and a restore of etcd takes all of them back, and the resourceVersion too. So
        the epoch is the sum of two counts: the milliseconds since _SINCE, which no restore takes back, and
        the resourceVersion, which grows with each write within a millisecond. Each epoch is written into the
        status, so the sum is larger than all epochs before, as long as the API server takes fewer than 1,000
        writes a second between a backup and its restore, and the operator's clock is not set back meanwhile.
        """
        if not self.names_come_again:
            return 1
        version = version_number(resource_version) or 0
        # A version of more digits is a time in nanoseconds: no epochs follow each other so fast.
        exact = version if version < _MOST_EXACT else _MOST_EXACT + version // _PER_EPOCH
        return max(exact + (now - _SINCE) // timedelta(milliseconds=1), exact, 1)

    def largest_epoch(self, resource_version: str, now: datetime) -> int:
        """Returns the largest epoch that the operator can have written into the status of a resource.

        It is the first epoch that a group may begin now, and one day more: the clock may have been set back.
        """
        if not self.names_come_again:
            return _MOST_EXACT
        return self.first_epoch(resource_version, now) + _SET_BACK // timedelta(milliseconds=1)
