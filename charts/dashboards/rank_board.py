"""One rank: where its time goes."""

from typing import Final

from charts.dashboards.board import Board, Kind, Panel, Query, Row, Variable
from charts.dashboards.queries import (
    DECODE,
    GROUPS,
    OF_GROUP,
    OF_RANK,
    PREFILL,
    SHARES,
    WINDOW,
    mean,
    quantiles,
    rate,
    stat,
)
from heteroinfer_contract import metric_names as m

RANK: Final = Board(
    uid="heteroinfer-rank",
    title="HeteroInfer / Rank",
    text="One rank: how it spends each second.",
    variables=(
        GROUPS,
        Variable(name="rank", label="rank", series=f"{m.KV_BLOCKS}{{{OF_GROUP}}}"),
    ),
    rows=(
        Row(
            title="Where its time goes",
            panels=(
                Panel(
                    title="Share of wall time",
                    queries=tuple(
                        Query(expr=f"sum(rate({metric}{{{OF_RANK}}}[{WINDOW}]))", legend=word)
                        for word, metric in SHARES
                    ),
                    unit="percentunit",
                    stacked=True,
                    most=1.0,
                    text="The parts add up to one second: compute is the rank's own work, wait is the wait "
                    "for other ranks, transfer is copying and sending, idle is the time between steps.",
                    width=12,
                ),
                Panel(
                    title="A decode step",
                    queries=(
                        Query(expr=mean(m.COMPUTE_SECONDS, f"{DECODE}, {OF_RANK}", "rank"), legend="compute"),
                        Query(expr=mean(m.WAIT_SECONDS, f"{DECODE}, {OF_RANK}", "rank"), legend="wait"),
                        Query(
                            expr=f"max({m.PREDICTED_STEP_SECONDS}{{{OF_RANK}}})",
                            legend="compute as predicted",
                        ),
                        Query(
                            expr=mean(m.DEVICE_SECONDS, f"{DECODE}, {OF_RANK}", "rank"),
                            legend="compute as its GPU timed it",
                            only_where="the rank computes on a GPU",
                        ),
                    ),
                    unit="s",
                    width=12,
                ),
                Panel(
                    title="Wall time of a decode step",
                    queries=quantiles(m.STEP_SECONDS, f"{DECODE}, {OF_RANK}"),
                    unit="s",
                ),
                Panel(
                    title="Wall time of a prefill step",
                    queries=quantiles(m.STEP_SECONDS, f"{PREFILL}, {OF_RANK}"),
                    unit="s",
                ),
                Panel(
                    title="Tokens a second",
                    queries=(Query(expr=rate(m.TOKENS_TOTAL, OF_RANK, "phase"), legend="{{phase}}"),),
                ),
            ),
        ),
        Row(
            title="Its peers",
            panels=(
                Panel(
                    title="Time of a transfer",
                    queries=(
                        Query(expr=mean(m.TRANSFER_SECONDS, OF_RANK, "direction"), legend="{{direction}}"),
                    ),
                    unit="s",
                    width=6,
                ),
                Panel(
                    title="Bytes a second",
                    queries=(
                        Query(
                            expr=rate(m.TRANSFER_BYTES_TOTAL, OF_RANK, "direction"), legend="{{direction}}"
                        ),
                    ),
                    unit="Bps",
                    width=6,
                ),
                Panel(
                    title="How its tensors travel",
                    kind=Kind.TABLE,
                    queries=(Query(expr=f"max by (between, path) ({m.TRANSPORT_INFO}{{{OF_RANK}}})"),),
                    columns=("between", "path"),
                    width=6,
                ),
                Panel(
                    title="Heartbeat age",
                    queries=(Query(expr=f"max({m.HEARTBEAT_AGE_SECONDS}{{{OF_RANK}}})", legend="age"),),
                    unit="s",
                    width=6,
                ),
            ),
        ),
        Row(
            title="Its memory",
            panels=(
                stat("Weights", f"max({m.WEIGHT_BYTES}{{{OF_RANK}}})", unit="bytes", width=6),
                stat("KV cache", f"max({m.KV_CACHE_BYTES}{{{OF_RANK}}})", unit="bytes", width=6),
                stat(
                    "KV blocks of the group",
                    f"max({m.KV_BLOCKS}{{{OF_RANK}}})",
                    width=6,
                    text="The rank with the least headroom limits the number of blocks of all ranks.",
                ),
                stat("Steps a second", f"sum(rate({m.STEP_SECONDS}_count{{{OF_RANK}}}[{WINDOW}]))", width=6),
                stat(
                    "Locked memory",
                    f"max({m.LOCKED_MEMORY_BYTES}{{{OF_RANK}}})",
                    unit="bytes",
                    width=6,
                    text="Host memory that the rank has locked, or pinned for a device.",
                ),
                stat(
                    "Locked memory, limit",
                    f"max({m.LOCKED_MEMORY_LIMIT_BYTES}{{{OF_RANK}}})",
                    unit="bytes",
                    width=6,
                    text="Limit of locked memory (ulimit -l). RDMA needs a high limit.",
                ),
            ),
        ),
    ),
)
