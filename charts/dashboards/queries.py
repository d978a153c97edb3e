"""PromQL that the dashboards share. Metric names are the contract's and vLLM's own."""

from typing import Final

from charts.dashboards.board import Kind, Panel, Query, Variable
from heteroinfer_contract import metric_names as m

IN_NAMESPACE: Final = 'namespace=~"$namespace"'
OF_GROUP: Final = 'group="$group"'
OF_RANK: Final = 'group="$group", rank="$rank"'
DECODE: Final = f'phase="{m.PHASE_DECODE}"'
PREFILL: Final = f'phase="{m.PHASE_PREFILL}"'
WINDOW: Final = "$__rate_interval"

# vLLM's metrics, on the leader's API port. A test compares the names with the metrics of a running group.
GENERATED: Final = "vllm:generation_tokens_total"
PROMPTED: Final = "vllm:prompt_tokens_total"
RUNNING: Final = "vllm:num_requests_running"
WAITING: Final = "vllm:num_requests_waiting"
KV_USED: Final = "vllm:kv_cache_usage_perc"
PREEMPTED: Final = "vllm:num_preemptions_total"
PREFIX_HITS: Final = "vllm:prefix_cache_hits_total"
PREFIX_ASKED: Final = "vllm:prefix_cache_queries_total"
ANSWERED: Final = "vllm:request_success_total"
TTFT: Final = "vllm:time_to_first_token_seconds"
ITL: Final = "vllm:inter_token_latency_seconds"
QUEUED: Final = "vllm:request_queue_time_seconds"
E2E: Final = "vllm:e2e_request_latency_seconds"


def rate(metric: str, selector: str, by: str) -> str:
    """Returns the PromQL expression for the rate of a counter per second, summed by labels."""
    return f"sum by ({by}) (rate({metric}{{{selector}}}[{WINDOW}]))"


def mean(histogram: str, selector: str, by: str) -> str:
    """Returns the PromQL expression for the mean of a histogram's observations."""
    return f"{rate(histogram + '_sum', selector, by)} / {rate(histogram + '_count', selector, by)}"


def quantile(q: float, histogram: str, selector: str, by: str = "") -> str:
    """Returns the PromQL expression for a quantile of a histogram."""
    labels = ", ".join(filter(None, ("le", by)))
    return f"histogram_quantile({q:g}, {rate(histogram + '_bucket', selector, labels)})"


def quantiles(histogram: str, selector: str, *, words: str = "") -> tuple[Query, ...]:
    """Returns queries of p50, p95 and p99."""
    return tuple(
        Query(expr=quantile(q, histogram, selector), legend=f"p{q * 100:g} {words}".strip())
        for q in (0.5, 0.95, 0.99)
    )


def stat(title: str, expr: str, unit: str = "short", text: str = "", **more: object) -> Panel:
    """Returns a panel with one number."""
    fields = {"width": 3, "height": 4, **more}
    return Panel(title=title, kind=Kind.STAT, queries=(Query(expr=expr),), unit=unit, text=text, **fields)  # type: ignore[arg-type]  # fields of Panel


SHARES: Final = (
    ("compute", m.COMPUTE_SECONDS + "_sum"),
    ("wait", m.WAIT_SECONDS + "_sum"),
    ("transfer", m.TRANSFER_SECONDS + "_sum"),
    ("idle", m.IDLE_SECONDS_TOTAL),
)
"""Parts of a rank's wall time; they add up to all of it."""

NAMESPACES: Final = Variable(name="namespace", label="namespace", series=m.GROUP_READY, many=True)
GROUPS: Final = Variable(name="group", label="group", series=m.GROUP_READY)
