"""Metrics of the experts that a rank's GPU computes instead of its feed-forward ranks."""

from prometheus_client import Counter

from heteroinfer_contract import metric_names
from vllm_heteroinfer.rank.step_metrics import RankMetrics


class ExpertMeter:
    """Counts the rows for which a GPU computed experts, and the bytes that were copied to the GPU.

    Attributes:
        is_users_step: whether the present step computes requests of users.
    """

    def __init__(self, metrics: RankMetrics) -> None:
        """Creates the counters of a rank."""
        self.is_users_step = False

        def counter(name: str, text: str) -> Counter:
            labelled = Counter(name, text, metric_names.RANK_LABELS, registry=metrics.registry)
            return labelled.labels(*metrics.labels)

        self._rows = counter(
            metric_names.GPU_EXPERT_ROWS_TOTAL,
            "Rows for which the GPU computed some experts, summed over layers",
        )
        self._copied_bytes = counter(
            metric_names.GPU_EXPERT_BYTES_TOTAL, "Bytes of experts' weights that were copied to the GPU"
        )

    def count(self, rows: int, copied_bytes: int) -> None:
        """Counts a layer of which the GPU computed some experts."""
        self._rows.inc(rows)
        self._copied_bytes.inc(copied_bytes)
