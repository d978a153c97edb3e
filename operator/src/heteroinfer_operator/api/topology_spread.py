"""Topology spread constraints, as in a Pod. Pure."""

from enum import StrEnum
from typing import Annotated, ClassVar, Final

from pydantic import Field

from heteroinfer_operator.api.base import Model, RuleReason, ValidationRule
from heteroinfer_operator.api.label_selector import LabelSelector
from heteroinfer_operator.api.pod_fields import LabelKey

SPREAD_KEYS: Final = ("topologyKey", "whenUnsatisfiable")
"""Keys of the list of constraints: no two constraints have the same values of both."""


class WhenUnsatisfiable(StrEnum):
    """Reaction of the scheduler to a pod that would break a spread constraint."""

    DO_NOT_SCHEDULE = "DoNotSchedule"
    SCHEDULE_ANYWAY = "ScheduleAnyway"


class InclusionPolicy(StrEnum):
    """Whether node affinity or taints exclude nodes from a spread."""

    HONOR = "Honor"
    IGNORE = "Ignore"


class TopologySpread(Model):
    """A rule that spreads pods evenly over the values of a node label, as in a Pod."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            field="minDomains",
            reason=RuleReason.FORBIDDEN,
            cel="!has(self.minDomains) || self.whenUnsatisfiable == 'DoNotSchedule'",
            message="must be unset unless whenUnsatisfiable is DoNotSchedule",
            holds=lambda spread: (
                spread.min_domains is None or spread.when_unsatisfiable is WhenUnsatisfiable.DO_NOT_SCHEDULE
            ),
        ),
    )

    max_skew: Annotated[int, Field(ge=1, le=2**31 - 1)]
    """Maximum difference between the numbers of pods of two label values."""
    topology_key: LabelKey
    """Key of the node label."""
    when_unsatisfiable: WhenUnsatisfiable
    """Reaction to a pod that would break the rule. ScheduleAnyway: the rule is only a preference.
    DoNotSchedule: the pod waits. The operator ignores the rule when it checks whether a group fits the nodes.
    """
    label_selector: LabelSelector | None = None
    """Labels of the pods that are counted for each value of the node label. Default: no pods."""
    min_domains: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    """Minimum number of label values over which pods are spread. Default: 1."""
    node_affinity_policy: InclusionPolicy | None = None
    """Controls whether the rule counts nodes that the node selector or node affinity excludes. Honor: these
    nodes do not count. Ignore: these nodes count. Default: Honor."""
    node_taints_policy: InclusionPolicy | None = None
    """Controls whether the rule counts nodes with taints that the pods do not tolerate. Honor: these nodes do
    not count. Ignore: these nodes count. Default: Ignore."""
