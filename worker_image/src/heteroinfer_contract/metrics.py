"""Names of the metrics that ranks and the operator export; dashboards and rules use these.

Stdlib only, constants only.
"""

from typing import Final

RANK_LABELS: Final = ("group", "rank", "stage", "role", "device")
"""On every metric of a rank."""

STEP_SECONDS: Final = "heteroinfer_rank_step_seconds"
"""Histogram, label phase (prefill|decode): wall time of a step on this rank."""
COMPUTE_SECONDS: Final = "heteroinfer_rank_compute_seconds"
"""Histogram, label phase: of which this rank's own compute. A long one is a straggler."""
DEVICE_SECONDS: Final = "heteroinfer_rank_device_seconds"
"""Histogram, label phase, GPU ranks only: of its compute, the forward pass as the GPU timed it."""
WAIT_SECONDS: Final = "heteroinfer_rank_wait_seconds"
"""Histogram, label phase: of which waiting for peers."""
IDLE_SECONDS_TOTAL: Final = "heteroinfer_rank_idle_seconds_total"
"""Counter: between steps, waiting for the engine's next call; with the steps it is all of the wall time."""
TRANSFER_SECONDS: Final = "heteroinfer_rank_transfer_seconds"
"""Histogram, label direction (send|recv): copying and sending between ranks."""
TRANSFER_BYTES_TOTAL: Final = "heteroinfer_rank_transfer_bytes_total"
"""Counter, label direction."""
TRANSPORT_INFO: Final = "heteroinfer_rank_transport_info"
"""Gauge, always 1, labels between (stages|ranks) and path (shared_memory|gloo): how its tensors travel."""
TOKENS_TOTAL: Final = "heteroinfer_rank_tokens_total"
"""Counter, label phase: tokens that passed through this rank."""
KV_CACHE_BYTES: Final = "heteroinfer_rank_kv_cache_bytes"
"""Gauge: size of this rank's KV cache."""
KV_BLOCKS: Final = "heteroinfer_rank_kv_blocks"
"""Gauge: KV blocks of the group (the least over its ranks)."""
WEIGHT_BYTES: Final = "heteroinfer_rank_weight_bytes"
"""Gauge: size of this rank's weights as loaded."""
HEARTBEAT_AGE_SECONDS: Final = "heteroinfer_rank_heartbeat_age_seconds"
"""Gauge: since this rank's supervisor heard from the leader's; on the leader, from the oldest follower."""
PHASE_PREFILL: Final = "prefill"
PHASE_DECODE: Final = "decode"

OPERATOR_RECONCILE_SECONDS: Final = "heteroinfer_operator_reconcile_seconds"
OPERATOR_RECONCILE_ERRORS_TOTAL: Final = "heteroinfer_operator_reconcile_errors_total"
OPERATOR_QUEUE_LENGTH: Final = "heteroinfer_operator_queue_length"
OPERATOR_WRITES_TOTAL: Final = "heteroinfer_operator_writes_total"
"""Counter, labels verb and kind: writes to the API server."""
OPERATOR_LAST_PASS_TIMESTAMP_SECONDS: Final = "heteroinfer_operator_last_pass_timestamp_seconds"  # noqa: S105 - "pass" is no password
OPERATOR_GROUPS: Final = "heteroinfer_operator_groups"
"""Gauge, label phase."""
