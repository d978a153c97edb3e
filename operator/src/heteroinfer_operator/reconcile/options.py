"""The options of an installation, which apply to all its resources. Pure."""

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

_MAX_EXACT_VERSION: Final = 10**14
"""A resourceVersion below this number counts in full. Pod names have no space for a larger number."""
_NANOSECONDS_PER_EPOCH: Final = 10**5
"""Divisor of a larger resourceVersion, which counts as a time in nanoseconds.

The quotient still differs for two epochs of a group, because no group begins two epochs within 0.1 ms.
"""
_SINCE: Final = datetime(2026, 1, 1, tzinfo=UTC)
"""Start of the milliseconds in an epoch's number. With milliseconds since 1970, pod names would be longer."""
_MAX_CLOCK_STEP: Final = timedelta(days=1)
"""Largest tolerated step back of the operator's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of an installation, which apply to all its resources.

    Attributes:
        operator_key: key from which the keys of groups are derived; with None, groups have no keys.
        egress: whether the operator writes policies that allow egress of pods.
        fetch_egress: destinations that these policies allow for pods that fetch a model.
        nodes_may_come: whether nodes with missing GPUs may join later; False on a single machine.
        names_come_again: whether an earlier resource may have had the same name.
        pod_resources: resources of model pods, and defaults for roles.
        pod_security: security contexts of workers, and of pods that fetch or inspect a model.
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
        """Returns the lowest epoch that a group may begin now. It is larger than the group's earlier epochs.

        The number is the sum of two counts. The milliseconds since _SINCE survive a restore of etcd. The
        resourceVersion distinguishes two epochs of one millisecond, because the operator writes each epoch to
        the status. A stored number could not replace the sum, because no stored object is safe: the status, a
        group or the whole resource may be deleted, and a restore of etcd resets all of them.

        The sum is larger than each earlier sum under two assumptions: between a backup and its restore, the
        API server accepts fewer than 1,000 writes a second, and the operator's clock is not set back.
        """
        if not self.names_come_again:
            return 1
        version = version_number(resource_version) or 0
        version_part = version
        if version >= _MAX_EXACT_VERSION:
            version_part = _MAX_EXACT_VERSION + version // _NANOSECONDS_PER_EPOCH
        # If the clock is before _SINCE, only the version counts.
        milliseconds = max((now - _SINCE) // timedelta(milliseconds=1), 0)
        return max(version_part + milliseconds, 1)

    def largest_epoch(self, resource_version: str, now: datetime) -> int:
        """Returns the largest epoch that the operator can have written to the status of a resource.

        It is one day (in milliseconds) above `first_epoch`, because the operator's clock may have been set
        back by up to a day since the write.
        """
        if not self.names_come_again:  # epochs count from 1, without a limit
            return _MAX_EXACT_VERSION
        return self.first_epoch(resource_version, now) + _MAX_CLOCK_STEP // timedelta(milliseconds=1)
