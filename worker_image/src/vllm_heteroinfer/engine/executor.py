"""The executor: calls every rank of the group from the engine's process, but starts no ranks.

Modelled on vLLM's RayExecutorV2: vLLM sees one node, and the plan assigns every rank. The
supervisors start and watch the ranks. If a rank fails, the whole group ends, including this process.
"""

import logging
import os
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import cloudpickle
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.executor.multiproc_executor import FutureWrapper, MultiprocExecutor, WorkerProc
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from heteroinfer_contract import names
from heteroinfer_contract.parent_death import die_with_parent
from heteroinfer_contract.plan import Plan
from heteroinfer_contract.pod_launch import PodLaunch
from vllm_heteroinfer.group import fingerprint, kv_blocks, queues
from vllm_heteroinfer.group.deadline import NO_LIMIT_S, Deadline, WaitCountdown
from vllm_heteroinfer.group.engine_calls import check_sleep_level
from vllm_heteroinfer.group.rendezvous import GroupStore
from vllm_heteroinfer.patches import engine_pause
from vllm_heteroinfer.pod import addresses

_logger = logging.getLogger(__name__)

CONTROL_TIMEOUT_S = 600.0
"""Longest wait for the replies to a call outside of steps and start-up, in seconds."""
_POLL_S = 0.02
"""How long the executor waits for a rank's reply before it checks the next rank."""
_LONG_POLL_S = 1.0
"""Like _POLL_S, if only one reply is missing."""

_WORK_FIELDS = (
    "total_num_scheduled_tokens",
    "finished_req_ids",
    "preempted_req_ids",
    "free_encoder_mm_hashes",
    "new_block_ids_to_zero",
    "kv_cache_block_copies",
    "kv_connector_metadata",
    "aux_output_connector_metadata",
    "ec_connector_metadata",
    "ec_manager_metadata",
)
"""Fields of vLLM's SchedulerOutput that a worker acts on (vllm/v1/core/sched/output.py@v0.32.0)."""


class GroupExecutor(MultiprocExecutor):
    """vLLM's executor over the ranks of a plan.

    Passed as a class in `distributed_executor_backend`, which allows pipeline parallelism
    on one node (vllm/engine/arg_utils.py::EngineArgs._check_feature_supported@v0.32.0).
    """

    _unread_replies: "Counter[int]"
    """Rank -> number of replies to failed calls that are still unread."""
    uses_ray = False
    supports_pp = True

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """Returns whether vLLM may schedule a step ahead. It may only if one GPU holds all stages."""
        return Plan.from_env(os.environ).schedules_ahead

    def _init_executor(self) -> None:
        """Compares settings with rank 0's, then connects to every rank when all have loaded their weights.

        Raises:
            TimeoutError: a rank did not connect before the start-up deadline.
            ConfigMismatchError: this engine's configuration differs from the ranks' configuration.
        """
        die_with_parent(os.getppid())
        engine_pause.install()
        self._unread_replies = Counter()
        self.is_failed = False
        self.failure_callback = None
        self.shutting_down = False
        plan, launch = Plan.from_env(os.environ), PodLaunch.from_env(os.environ)
        self._plan = plan
        self.world_size = len(plan.stage_ranks)  # the executor does not call feed-forward ranks
        self.output_rank = self._get_output_rank()
        self._startup_deadline: Deadline | None = Deadline.after(NO_LIMIT_S)
        deadline = self._startup_deadline
        self._store = GroupStore.connect(launch, deadline)
        self._check_settings(plan, deadline)
        for rank in range(self.world_size):
            awaited = f'"weights loaded" message from rank {rank}'
            self._store.get(f"loaded/{rank}", deadline, awaited=awaited)
        # Create the queues last, because their shared memory has names until all ranks are connected. If the
        # group ended before that, the names (and the memory) would remain.
        self._connect_queues(plan, deadline)
        self.futures_queue: deque[FutureWrapper] = deque()

    def _connect_queues(self, plan: Plan, deadline: Deadline) -> None:
        """Creates the queue of calls, and connects the queue of replies of each rank."""
        self.rpc_broadcast_mq = MessageQueue(
            self.world_size,  # all readers
            sum(rank.pod == 0 for rank in plan.stage_ranks),  # readers in this pod, through shared memory
            connect_ip=addresses.own_address(os.environ),
        )
        self._store.put("executor", queues.handle_to_json(self.rpc_broadcast_mq))
        self.response_mqs = []
        for rank in range(self.world_size):
            text = self._store.get(f"rank/{rank}", deadline, awaited=f"message queue of rank {rank}")
            self.response_mqs.append(queues.open_queue(text, 0))
        queues.wait_until_ready(self.rpc_broadcast_mq, deadline, other_end="the ranks")
        for rank, queue in enumerate(self.response_mqs):
            queues.wait_until_ready(queue, deadline, other_end=f"rank {rank}")

    def _check_settings(self, plan: Plan, deadline: Deadline) -> None:
        """Compares this engine's settings with rank 0's.

        Each other rank compares its own settings with rank 0's, too.
        """
        text = self._store.get("fingerprint/0", deadline, awaited="settings of rank 0")
        engine_settings = fingerprint.of_config(
            self.vllm_config, layer_partition=os.environ.get(names.ENV_LAYER_PARTITION, "")
        )
        rank_0_settings = fingerprint.from_json(text)
        fingerprint.compare_engine(plan, engine_settings, rank_0_settings)

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Runs a step on every rank. Returns the last stage's reply, or a future if `non_block`.

        Does not send an empty step (`has_work`), which the engine schedules whenever all batches are already
        in flight.
        """
        if not has_work(scheduler_output):
            return _completed_future(EMPTY_MODEL_RUNNER_OUTPUT) if non_block else EMPTY_MODEL_RUNNER_OUTPUT
        return super().execute_model(scheduler_output, non_block)

    def collective_rpc(  # noqa: PLR0913, PLR0917 - the signature is vLLM's
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        kv_output_aggregator: Any = None,
        ec_output_aggregator: Any = None,
    ) -> Any:
        """Calls a method on every rank.

        Args:
            method: name of a worker's method, or a function of the worker.
            timeout: longest wait for all replies, in seconds. None means the start-up deadline during
                start-up, and CONTROL_TIMEOUT_S later.
            unique_reply_rank: the only rank that replies; None for all ranks.
            kv_output_aggregator: unused, because connectors are refused.
            ec_output_aggregator: unused, because connectors are refused.

        Returns:
            One reply, or a list of replies by rank; a future if `non_block`.

        Raises:
            TimeoutError: a rank did not reply in time; the message names it.
            RuntimeError: a rank replied with an error.
        """
        if self.is_failed or self.rpc_broadcast_mq is None:
            raise RuntimeError(
                "this group has ended (its pods start again in the next epoch). Send the request again later"
            )
        if timeout is None:
            timeout = (
                self._startup_deadline.left_s if self._startup_deadline is not None else CONTROL_TIMEOUT_S
            )
        deadline = Deadline.after(timeout)
        sent_method = method if isinstance(method, str) else cloudpickle.dumps(method)
        self.rpc_broadcast_mq.enqueue((sent_method, args, kwargs or {}, unique_reply_rank))
        ranks = range(self.world_size) if unique_reply_rank is None else (unique_reply_rank,)

        def read_replies() -> Any:
            """Reads the replies. The future calls this after the replies to all earlier calls were read."""
            replies = self._read_replies(method, ranks, deadline)
            return replies if unique_reply_rank is None else replies[0]

        future = FutureWrapper(self.futures_queue, read_replies)
        return future if non_block else future.result()

    def _read_replies(self, method: Any, ranks: Any, deadline: Deadline) -> list[Any]:
        """Reads the replies of `ranks` as they arrive, so that an error is raised immediately.

        Each queue has the replies of one rank in the order of the calls. So replies to an earlier call that
        failed come first, and are skipped.
        """
        missing_ranks, replies = list(ranks), {}
        # The whole time-out counts from now, because the replies to earlier calls were read only now.
        countdown = WaitCountdown(deadline.total_s)
        while missing_ranks:
            for rank in tuple(missing_ranks):
                nap_s = min(_LONG_POLL_S if len(missing_ranks) == 1 else _POLL_S, countdown.left_s)
                try:
                    status, result = self.response_mqs[rank].dequeue(timeout=nap_s)
                except TimeoutError:
                    countdown.record_nap(nap_s)
                    continue
                if self._unread_replies[rank]:  # this is the reply to an earlier call that failed
                    self._unread_replies[rank] -= 1
                    continue
                missing_ranks.remove(rank)
                if status is not WorkerProc.ResponseStatus.SUCCESS:
                    self._unread_replies.update(missing_ranks)
                    raise RuntimeError(
                        f"rank {rank} failed in {method}: {result}. Read the log of rank {rank}"
                    )
                replies[rank] = result
            if missing_ranks and countdown.left_s == 0:
                self._unread_replies.update(missing_ranks)
                raise TimeoutError(
                    f"got no reply to {method} from rank {', '.join(map(str, missing_ranks))} within "
                    f"{deadline.total_s:.0f} s. Read the log of the rank. GET /group on the leader's "
                    "health port shows for how long each rank is busy"
                )
        return [replies[rank] for rank in ranks]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """Allocates the KV cache on every rank, and logs the rank that limits the number of blocks."""
        super().initialize_from_config(kv_cache_configs)
        headrooms_bytes = self.collective_rpc("kv_headroom_bytes")
        _logger.info(
            "%s",
            kv_blocks.describe(
                self._plan,
                blocks=kv_cache_configs[0].num_blocks,
                sizes_bytes=[kv_blocks.size_bytes(config) for config in kv_cache_configs],
                headrooms_bytes=headrooms_bytes,
            ),
        )

    def sleep(self, level: int = 1) -> None:
        """Puts every rank to sleep.

        Raises:
            ValueError: groups do not support the level.
        """
        check_sleep_level(level)
        super().sleep(level)

    def compile_or_warm_up_model(self) -> None:
        """Warms up every rank, which ends the start."""
        super().compile_or_warm_up_model()
        self._startup_deadline = None  # later calls without a timeout have CONTROL_TIMEOUT_S

    def check_health(self) -> None:
        """Raises an error if a rank does not answer. The supervisors watch the ranks' processes."""
        self.collective_rpc("check_health", timeout=10.0)

    def shutdown(self) -> None:
        """Closes the queues. The supervisors end the ranks."""
        self.shutting_down = True
        for queue in (getattr(self, "rpc_broadcast_mq", None), *getattr(self, "response_mqs", ())):
            if queue is not None:
                queue.shutdown()
        self.rpc_broadcast_mq = None
        self.response_mqs = []


def has_work(scheduler_output: Any) -> bool:
    """Returns whether the ranks need this step.

    A step has work if it has tokens, requests to forget, blocks to clear, or data for a connector.
    """
    return any(bool(getattr(scheduler_output, field)) for field in _WORK_FIELDS)


def _completed_future(result: Any) -> "Future[Any]":
    """Returns a future that already has its result."""
    future: Future[Any] = Future()
    future.set_result(result)
    return future
