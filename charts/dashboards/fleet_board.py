"""The fleet: which groups serve, which is slow and why, whether the operator works."""

from typing import Final

from charts.dashboards.board import Board, Kind, Panel, Query, Row
from charts.dashboards.queries import (
    DECODE,
    GENERATED,
    IN_NAMESPACE,
    ITL,
    KV_USED,
    NAMESPACES,
    RUNNING,
    TTFT,
    WAITING,
    WINDOW,
    mean,
    quantile,
    quantiles,
    rate,
    stat,
)
from heteroinfer_contract import metric_names as m

FLEET: Final = Board(
    uid="heteroinfer-fleet",
    title="HeteroInfer / Fleet",
    text="All groups: which groups serve, which groups are slow because of which rank, and whether the "
    "operator works.",
    variables=(NAMESPACES,),
    rows=(
        Row(
            title="Now",
            panels=(
                stat("Groups that serve", f"sum({m.GROUP_READY}{{{IN_NAMESPACE}}})"),
                stat(
                    "Groups that do not serve",
                    f"sum(1 - {m.GROUP_READY}{{{IN_NAMESPACE}}})",
                    text="Includes suspended and sleeping groups. The table below shows the reasons.",
                    thresholds=(1.0,),
                ),
                stat(
                    "Restarts in the last hour",
                    f"sum(increase({m.GROUP_RESTARTS_TOTAL}{{{IN_NAMESPACE}}}[1h]))",
                    thresholds=(1.0, 3.0),
                ),
                stat("Tokens generated a second", f"sum(rate({GENERATED}{{{IN_NAMESPACE}}}[{WINDOW}]))"),
                stat("Requests running", f"sum({RUNNING}{{{IN_NAMESPACE}}})"),
                stat("Requests waiting", f"sum({WAITING}{{{IN_NAMESPACE}}})", thresholds=(1.0, 20.0)),
                stat(
                    "Fullest KV cache",
                    f"max({KV_USED}{{{IN_NAMESPACE}}})",
                    unit="percentunit",
                    thresholds=(0.8, 0.95),
                ),
                stat(
                    "Last resync of the operator",
                    f"time() - max({m.OPERATOR_LAST_PASS_TIMESTAMP_SECONDS})",
                    unit="s",
                    text="Grows to the resync period (5 minutes), then falls back to 0.",
                    thresholds=(600.0, 900.0),
                ),
            ),
        ),
        Row(
            title="What to fix first",
            panels=(
                Panel(
                    title="Ready resources (1) and others (0), with the reason",
                    kind=Kind.TABLE,
                    queries=(
                        Query(expr=f'sort({m.RESOURCE_CONDITION}{{condition="Ready", {IN_NAMESPACE}}})'),
                    ),
                    columns=("namespace", "name", "reason"),
                ),
                Panel(
                    title="Slowest rank of each group: compute of a decode step",
                    kind=Kind.BARS,
                    queries=(
                        Query(
                            expr="topk by (group) (1, "
                            + mean(
                                m.COMPUTE_SECONDS, f"{DECODE}, {IN_NAMESPACE}", "group, rank, role, device"
                            )
                            + ")",
                            legend="{{group}} rank {{rank}} ({{role}}, {{device}})",
                        ),
                    ),
                    unit="s",
                    text="The rank's own compute, without its wait for other ranks. This rank sets the "
                    "group's pace.",
                    link=True,
                ),
                Panel(
                    title="Seconds since the last failure",
                    kind=Kind.TABLE,
                    queries=(
                        Query(
                            expr=f"sort(time() - {m.GROUP_LAST_FAILURE_TIMESTAMP_SECONDS}{{{IN_NAMESPACE}}})"
                        ),
                    ),
                    columns=("group", "reason", "rank"),
                    unit="s",
                ),
            ),
        ),
        Row(
            title="Service",
            panels=(
                Panel(
                    title="Tokens generated per second",
                    queries=(Query(expr=rate(GENERATED, IN_NAMESPACE, "group"), legend="{{group}}"),),
                    link=True,
                ),
                Panel(
                    title="Time to first token, p95",
                    queries=(Query(expr=quantile(0.95, TTFT, IN_NAMESPACE, "group"), legend="{{group}}"),),
                    unit="s",
                    link=True,
                ),
                Panel(
                    title="Time between tokens, p95",
                    queries=(Query(expr=quantile(0.95, ITL, IN_NAMESPACE, "group"), legend="{{group}}"),),
                    unit="s",
                    link=True,
                ),
                Panel(
                    title="Requests waiting",
                    queries=(
                        Query(expr=f"sum by (group) ({WAITING}{{{IN_NAMESPACE}}})", legend="{{group}}"),
                    ),
                    text="The autoscaling example scales by this metric.",
                    link=True,
                ),
                Panel(
                    title="KV cache in use",
                    queries=(
                        Query(expr=f"max by (group) ({KV_USED}{{{IN_NAMESPACE}}})", legend="{{group}}"),
                    ),
                    unit="percentunit",
                    most=1.0,
                    link=True,
                ),
                Panel(
                    title="Restarts",
                    queries=(
                        Query(
                            expr=f"max by (group) ({m.GROUP_RESTARTS_TOTAL}{{{IN_NAMESPACE}}})",
                            legend="{{group}}",
                        ),
                    ),
                    link=True,
                ),
            ),
        ),
        Row(
            title="Operator",
            panels=(
                Panel(
                    title="Groups by phase",
                    queries=(Query(expr=f"sum by (phase) ({m.OPERATOR_GROUPS})", legend="{{phase}}"),),
                    stacked=True,
                    width=6,
                ),
                Panel(
                    title="Time of a reconcile",
                    queries=quantiles(m.OPERATOR_RECONCILE_SECONDS, ""),
                    unit="s",
                    width=6,
                ),
                Panel(
                    title="Resources that wait, and errors a second",
                    queries=(
                        Query(expr=f"sum({m.OPERATOR_QUEUE_LENGTH})", legend="waiting"),
                        Query(
                            expr=rate(m.OPERATOR_RECONCILE_ERRORS_TOTAL, "", "reason"),
                            legend="errors: {{reason}}",
                        ),
                    ),
                    text="The reason Conflict is normal. If the reason is the name of a Python error, please "
                    "report it as a bug.",
                    width=6,
                ),
                Panel(
                    title="Writes to the API server a second",
                    queries=(
                        Query(
                            expr=rate(m.OPERATOR_WRITES_TOTAL, "", "verb, kind"), legend="{{verb}} {{kind}}"
                        ),
                    ),
                    text="Never 0: the operator renews its Lease, and stores new step times of serving "
                    "groups once a minute. A rate that stays high while nothing changes means a loop.",
                    width=6,
                ),
                Panel(
                    title="Memory of the operator",
                    queries=(
                        Query(
                            expr=f"{m.PROCESS_RESIDENT_MEMORY_BYTES} and on (instance) "
                            f"{m.OPERATOR_LAST_PASS_TIMESTAMP_SECONDS}",
                            legend="{{pod}}",
                        ),
                    ),
                    unit="bytes",
                    width=12,
                ),
                Panel(
                    title="Since the last resync",
                    queries=(
                        Query(
                            expr=f"time() - ({m.OPERATOR_LAST_PASS_TIMESTAMP_SECONDS} > 0)", legend="{{pod}}"
                        ),
                    ),
                    unit="s",
                    width=12,
                ),
            ),
        ),
    ),
)
