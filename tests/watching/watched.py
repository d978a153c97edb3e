"""Reads what Prometheus recorded of a group in a time span, with Grafana's queries."""

import math
from dataclasses import dataclass

from charts.dashboards.board import Kind, Panel, Query
from tests.watching.monitoring import Prometheus

STEP_S = 1.0
WINDOW = "10s"
"""Replaces Grafana's $__rate_interval, because scrapes are 1 s apart."""

Series = tuple[dict[str, str], list[tuple[float, float]]]
"""Labels, and samples as (Unix time, value)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watched:
    """A time span in which a group served.

    Attributes:
        prometheus: the Prometheus with the data.
        start: Unix time, in seconds.
        end: Unix time, in seconds.
        namespace: namespace of the group.
        group: value of the label of the group.
        rank: rank in the dashboard of one rank.
    """

    prometheus: Prometheus
    start: float
    end: float
    namespace: str
    group: str
    rank: str = "1"

    def expr(self, query: Query) -> str:
        """Returns the query with the values of Grafana's variables."""
        values = {
            "$__rate_interval": WINDOW,
            "$namespace": self.namespace,
            "$group": self.group,
            "$rank": self.rank,
        }
        expr = query.expr
        for name, value in values.items():
            expr = expr.replace(name, value)
        return expr

    def samples(self, query: Query, panel: Panel) -> list[Series]:
        """Returns a panel's data for a query, without NaN and without series that have nothing else.

        A panel with a time axis gets the whole span; any other panel gets the last moment.
        """
        start = self.start if panel.kind is Kind.TIME else self.end
        found = self.prometheus.series(self.expr(query), start, self.end, STEP_S)
        series = [
            (
                dict(one["metric"]),
                [(float(t), float(v)) for t, v in one["values"] if not math.isnan(float(v))],
            )
            for one in found
        ]
        return [(labels, samples) for labels, samples in series if samples]
