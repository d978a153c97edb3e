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
PREDICTED_STEP_SECONDS: Final = "heteroinfer_rank_predicted_step_seconds"
"""Gauge: the plan's prediction of this rank's compute in a decode step of one request; 0: none."""
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
"""Gauge: since the last heartbeat of the leader's supervisor; on the leader, of the oldest follower's."""
PHASE_PREFILL: Final = "prefill"
PHASE_DECODE: Final = "decode"

OPERATOR_RECONCILE_SECONDS: Final = "heteroinfer_operator_reconcile_seconds"
OPERATOR_RECONCILE_ERRORS_TOTAL: Final = "heteroinfer_operator_reconcile_errors_total"
OPERATOR_QUEUE_LENGTH: Final = "heteroinfer_operator_queue_length"
OPERATOR_WRITES_TOTAL: Final = "heteroinfer_operator_writes_total"
"""Counter, labels verb and kind: writes to the API server."""
OPERATOR_LAST_PASS_TIMESTAMP_SECONDS: Final = "heteroinfer_operator_last_pass_timestamp_seconds"  # noqa: S105 - "pass" is no password
OPERATOR_GROUPS: Final = "heteroinfer_operator_groups"
"""Gauge, label phase; every phase is there."""
PROCESS_RESIDENT_MEMORY_BYTES: Final = "process_resident_memory_bytes"
"""Gauge of the client library: memory of the process that is scraped."""

RESOURCE_LABELS: Final = ("namespace", "name")
"""Of the HeteroInference, on what the operator says of it."""
GROUP_LABELS: Final = (*RESOURCE_LABELS, "group")
"""`group` is `namespace/name/index`, as on metrics of ranks."""

RESOURCE_CONDITION: Final = "heteroinfer_resource_condition"
"""Gauge, labels condition and reason: 1 True, 0 False, -1 Unknown."""
GROUP_READY: Final = "heteroinfer_group_ready"
"""Gauge: 1 while the group serves."""
GROUP_PHASE: Final = "heteroinfer_group_phase"
"""Gauge, always 1, label phase: the one that the group is in."""
GROUP_EPOCH: Final = "heteroinfer_group_epoch"
"""Gauge: its incarnation, from 1."""
GROUP_RANKS: Final = "heteroinfer_group_ranks"
"""Gauge: ranks that its plan has."""
GROUP_RESTARTS_TOTAL: Final = "heteroinfer_group_restarts_total"
"""Counter: restarts because of failures that count; `spec.restartedAt` sets it back to 0."""
GROUP_LAST_FAILURE_TIMESTAMP_SECONDS: Final = "heteroinfer_group_last_failure_timestamp_seconds"
"""Gauge, labels reason and rank ("" if no rank is to blame): Unix time of the newest failure."""
