"""One group: what clients see, and which rank sets its pace."""

from typing import Final

from charts.dashboards.board import Board, Kind, Panel, Query, Row
from charts.dashboards.queries import (
    ANSWERED,
    DECODE,
    E2E,
    GENERATED,
    GROUPS,
    ITL,
    KV_USED,
    OF_GROUP,
    PREEMPTED,
    PREFIX_ASKED,
    PREFIX_HITS,
    PROMPTED,
    QUEUED,
    RUNNING,
    SHARES,
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

GROUP: Final = Board(
    uid="heteroinfer-group",
    title="HeteroInfer / Group",
    text="One copy of a model: whether it is fast enough, and which rank limits its speed.",
    variables=(GROUPS,),
    rows=(
        Row(
            title="Now",
            panels=(
                stat("Serves", f"max({m.GROUP_READY}{{{OF_GROUP}}})"),
                Panel(
                    title="Phase",
                    kind=Kind.STAT,
                    queries=(Query(expr=f"{m.GROUP_PHASE}{{{OF_GROUP}}}", legend="{{phase}}"),),
                    width=3,
                    height=4,
                ),
                stat(
                    "Epoch",
                    f"max({m.GROUP_EPOCH}{{{OF_GROUP}}})",
                    text="Grows with each start of the group. The number itself is not the number of starts.",
                ),
                stat(
                    "Planned ranks with metrics",
                    f"count(count by (rank) ({m.HEARTBEAT_AGE_SECONDS}{{{OF_GROUP}}}))"
                    f" / max({m.GROUP_RANKS}{{{OF_GROUP}}})",
                    unit="percentunit",
                ),
                stat("Tokens generated a second", f"sum(rate({GENERATED}{{{OF_GROUP}}}[{WINDOW}]))"),
                stat("Requests running", f"sum({RUNNING}{{{OF_GROUP}}})"),
                stat("Requests waiting", f"sum({WAITING}{{{OF_GROUP}}})", thresholds=(1.0, 20.0)),
                stat(
                    "KV cache in use",
                    f"max({KV_USED}{{{OF_GROUP}}})",
                    unit="percentunit",
                    thresholds=(0.8, 0.95),
                ),
            ),
        ),
        Row(
            title="Which rank is slowest, and why",
            panels=(
                Panel(
                    title="Compute of a decode step",
                    kind=Kind.BARS,
                    queries=(
                        Query(
                            expr="sort_desc("
                            + mean(m.COMPUTE_SECONDS, f"{DECODE}, {OF_GROUP}", "rank, role, device")
                            + ")",
                            legend="rank {{rank}} ({{role}}, {{device}})",
                        ),
                    ),
                    unit="s",
                    text="The longest bar sets the pace: give this rank fewer layers, or a faster machine.",
                ),
                Panel(
                    title="How each rank spends a second",
                    kind=Kind.STACK,
                    queries=tuple(
                        Query(expr=rate(metric, OF_GROUP, "rank"), legend=word) for word, metric in SHARES
                    ),
                    unit="percentunit",
                    columns=("rank",),
                    text="compute is the rank's own work, wait is the wait for other ranks, transfer is "
                    "copying and sending, idle is the time between steps. If one rank computes while all "
                    "others wait, this rank is the bottleneck. If transfer takes long, the network or the "
                    "copies between GPU and CPU are slow. If all ranks are idle, there are too few requests.",
                ),
                Panel(
                    title="Share of time: own compute",
                    queries=(
                        Query(
                            expr=rate(m.COMPUTE_SECONDS + "_sum", OF_GROUP, "rank"), legend="rank {{rank}}"
                        ),
                    ),
                    unit="percentunit",
                    most=1.0,
                ),
                Panel(
                    title="Compute of a decode step, relative to its prediction",
                    queries=(
                        Query(
                            expr=f"{mean(m.COMPUTE_SECONDS, f'{DECODE}, {OF_GROUP}', 'rank')}"
                            f" / on (rank) max by (rank) ({m.PREDICTED_STEP_SECONDS}{{{OF_GROUP}}} > 0)",
                            legend="rank {{rank}}",
                        ),
                    ),
                    text="1: the compute takes as long as planned for one request. If one rank is far above "
                    "the other ranks, the alert HeteroInferRankStraggles names this rank.",
                ),
                Panel(
                    title="Bytes sent and received a second",
                    queries=(
                        Query(
                            expr=rate(m.TRANSFER_BYTES_TOTAL, OF_GROUP, "rank, direction"),
                            legend="rank {{rank}} {{direction}}",
                        ),
                    ),
                    unit="Bps",
                ),
                Panel(
                    title="How tensors travel",
                    kind=Kind.TABLE,
                    queries=(Query(expr=f"max by (rank, between, path) ({m.TRANSPORT_INFO}{{{OF_GROUP}}})"),),
                    columns=("rank", "between", "path"),
                    text="If ranks of one pod use gloo, they could not use shared memory. Their log has the "
                    "reason.",
                ),
            ),
        ),
        Row(
            title="What clients see",
            panels=(
                Panel(title="Time to first token", queries=quantiles(TTFT, OF_GROUP), unit="s"),
                Panel(title="Time between tokens", queries=quantiles(ITL, OF_GROUP), unit="s"),
                Panel(
                    title="Whole request, and its wait in the queue, p95",
                    queries=(
                        Query(expr=quantile(0.95, E2E, OF_GROUP), legend="whole"),
                        Query(expr=quantile(0.95, QUEUED, OF_GROUP), legend="queue"),
                    ),
                    unit="s",
                ),
                Panel(
                    title="Requests",
                    queries=(
                        Query(expr=f"sum({RUNNING}{{{OF_GROUP}}})", legend="running"),
                        Query(expr=f"sum({WAITING}{{{OF_GROUP}}})", legend="waiting"),
                    ),
                ),
                Panel(
                    title="Tokens a second",
                    queries=(
                        Query(expr=f"sum(rate({GENERATED}{{{OF_GROUP}}}[{WINDOW}]))", legend="generated"),
                        Query(expr=f"sum(rate({PROMPTED}{{{OF_GROUP}}}[{WINDOW}]))", legend="of prompts"),
                    ),
                ),
                Panel(
                    title="Requests ended a second, by finish reason",
                    queries=(
                        Query(expr=rate(ANSWERED, OF_GROUP, "finished_reason"), legend="{{finished_reason}}"),
                    ),
                ),
            ),
        ),
        Row(
            title="Memory and life",
            panels=(
                Panel(
                    title="KV cache in use",
                    queries=(Query(expr=f"max({KV_USED}{{{OF_GROUP}}})", legend="in use"),),
                    unit="percentunit",
                    most=1.0,
                    text="If the cache is full, requests wait or are preempted (see the next panel).",
                    width=6,
                ),
                Panel(
                    title="Preemptions a second, and prefix cache hits",
                    queries=(
                        Query(expr=f"sum(rate({PREEMPTED}{{{OF_GROUP}}}[{WINDOW}]))", legend="preemptions"),
                        Query(
                            expr=f"sum(rate({PREFIX_HITS}{{{OF_GROUP}}}[{WINDOW}]))"
                            f" / sum(rate({PREFIX_ASKED}{{{OF_GROUP}}}[{WINDOW}]))",
                            legend="part of prompts from the prefix cache",
                        ),
                    ),
                    width=6,
                ),
                Panel(
                    title="Weights and KV cache of each rank",
                    kind=Kind.BARS,
                    queries=(
                        Query(
                            expr=f"max by (rank) ({m.WEIGHT_BYTES}{{{OF_GROUP}}})",
                            legend="rank {{rank}} weights",
                        ),
                        Query(
                            expr=f"max by (rank) ({m.KV_CACHE_BYTES}{{{OF_GROUP}}})",
                            legend="rank {{rank}} KV cache",
                        ),
                    ),
                    unit="bytes",
                    width=6,
                ),
                Panel(
                    title="Heartbeat age",
                    queries=(
                        Query(
                            expr=f"max by (rank) ({m.HEARTBEAT_AGE_SECONDS}{{{OF_GROUP}}})",
                            legend="rank {{rank}}",
                        ),
                    ),
                    unit="s",
                    text="Normally a few tenths of a second. At 1.5 s the group restarts.",
                    thresholds=(1.0, 1.5),
                    width=6,
                ),
            ),
        ),
    ),
)
