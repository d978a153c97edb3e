"""How pods are spread over nodes, zones and the like, as in a Pod. Pure."""

from enum import StrEnum
from typing import Annotated, ClassVar, Final

from pydantic import Field

from heteroinfer_operator.api.base import Model, ValidationRule
from heteroinfer_operator.api.label_selector import LabelSelector
from heteroinfer_operator.api.pod_fields import LabelKey

SPREAD_KEYS: Final = ("topologyKey", "whenUnsatisfiable")
"""Of a list of constraints: no two are equal in both."""


class WhenUnsatisfiable(StrEnum):
    """What the scheduler does with a pod that would break a spread constraint."""

    DO_NOT_SCHEDULE = "DoNotSchedule"
    SCHEDULE_ANYWAY = "ScheduleAnyway"


class InclusionPolicy(StrEnum):
    """Whether node rules or taints leave nodes out of a spread."""

    HONOR = "Honor"
    IGNORE = "Ignore"


class TopologySpread(Model):
    """How evenly pods are spread over the values of a node label, as in a Pod."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="!has(self.minDomains) || self.whenUnsatisfiable == 'DoNotSchedule'",
            message="minDomains is for whenUnsatisfiable DoNotSchedule; remove it, or set that",
            holds=lambda own: (
                own.min_domains is None or own.when_unsatisfiable is WhenUnsatisfiable.DO_NOT_SCHEDULE
            ),
        ),
    )

    max_skew: Annotated[int, Field(ge=1, le=2**31 - 1)]
    """Most pods by which one value may be ahead of another."""
    topology_key: LabelKey
    """Node label."""
    when_unsatisfiable: WhenUnsatisfiable
    """ScheduleAnyway prefers; DoNotSchedule requires, which the capacity check does not count."""
    label_selector: LabelSelector | None = None
    """Which pods are counted."""
    min_domains: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Fewest values."""
    node_affinity_policy: InclusionPolicy | None = None
    """Whether node selector and node affinity leave nodes out."""
    node_taints_policy: InclusionPolicy | None = None
    """Whether taints leave nodes out."""
