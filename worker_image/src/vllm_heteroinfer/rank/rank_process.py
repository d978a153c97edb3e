"""A rank's worker, and the loop that runs the executor's calls. Imports vLLM."""

import os
import queue
from functools import partial
from typing import TYPE_CHECKING, Any

import cloudpickle
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.envs import enable_envs_cache
from vllm.platforms import current_platform
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.worker.worker_base import WorkerWrapperBase

from heteroinfer_contract.plan import Device
from vllm_heteroinfer.group import queues
from vllm_heteroinfer.group.rendezvous import world_init_method
from vllm_heteroinfer.pod import addresses
from vllm_heteroinfer.pod.threads import start_thread
from vllm_heteroinfer.rank.context import RankContext

if TYPE_CHECKING:
    from vllm.config import VllmConfig

ENDING_METHODS = frozenset(
    {
        "get_kv_cache_spec",
        "get_supported_kv_cache_layouts",
        "set_kv_cache_layout",
        "determine_available_memory",
        "initialize_from_config",
        "compile_or_warm_up_model",
        "execute_model",
        "sample_tokens",
        "sleep",
        "wake_up",
        "discard",
    }
)
"""Calls whose failure ends the rank. The failure of other calls (an unknown profiler) is only a reply."""

STEP_METHODS = frozenset({"execute_model", "sample_tokens"})
"""Calls that report this rank's current work themselves (RankMetrics). The loop reports all other calls."""


class RankProcess(WorkerProc):
    """vLLM's worker process, built in the process that the supervisor started.

    Source: vllm/v1/executor/ray_executor_v2.py::RayWorkerProc@v0.32.0 does the same inside a Ray actor.
    """

    def __init__(self, config: "VllmConfig", context: RankContext) -> None:
        """Joins the process groups, loads the weights, and connects to the executor."""
        self.context = context
        assignment = context.rank
        self.rank = assignment.rank
        self._calls = 0
        wrapper = WorkerWrapperBase(rpc_rank=0, global_rank=assignment.rank)
        wrapper.init_worker(
            [
                {
                    "vllm_config": config,
                    # A GPU rank sees only its own GPU (launch/environment.py).
                    "local_rank": assignment.local_rank if assignment.device is Device.CPU else 0,
                    "rank": assignment.rank,
                    "distributed_init_method": world_init_method(context.launch),
                    "is_driver_worker": assignment.tensor_rank == 0,
                }
            ]
        )
        self.worker = wrapper
        self.use_async_scheduling = bool(config.scheduler_config.async_scheduling)
        wrapper.attach(context)
        wrapper.init_device()
        self.setup_proc_title_and_log_prefix(enable_ep=False)
        wrapper.load_model()
        current_platform.update_block_size_for_backend(config)
        self._connect()
        if self.use_async_scheduling:
            self.async_output_queue: queue.Queue[Any] = queue.Queue()
            start_thread(self.async_output_busy_loop, name="heteroinfer-async-output", failed=context.fail)
        enable_envs_cache()

    def _connect(self) -> None:
        """Connects this rank's message queues with the executor's queues.

        Raises:
            TimeoutError: the executor did not connect before the start-up deadline.
        """
        context, deadline = self.context, self.context.startup
        context.store.put(f"loaded/{self.rank}", "")
        context.reporter.report_engine_wait()
        text = context.store.get("executor", deadline, awaited="message queue of vLLM's API server")
        self.rpc_broadcast_mq = queues.open_queue(text, self.rank)
        # The only reader is the executor, in pod 0.
        self.worker_response_mq = MessageQueue(
            n_reader=1,
            n_local_reader=1 if context.rank.pod == 0 else 0,
            connect_ip=addresses.own_address(os.environ),
        )
        context.store.put(f"rank/{self.rank}", queues.handle_to_json(self.worker_response_mq))
        context.reporter.report_engine_wait()
        queues.wait_until_ready(self.rpc_broadcast_mq, deadline, other_end="vLLM's API server")
        queues.wait_until_ready(self.worker_response_mq, deadline, other_end="vLLM's API server")

    def _execute_worker_rpc(
        self, rpc_request: tuple[Any, tuple[Any, ...], dict[str, Any], int | None]
    ) -> None:
        """Runs a call. An error in one of ENDING_METHODS ends this process, and with it the group.

        In vLLM's own loop, a rank that sends no reply only logs its error, and the last stage then waits
        without limit (vllm/v1/executor/multiproc_executor.py@v0.32.0).
        """
        method, args, kwargs, output_rank = rpc_request
        if isinstance(method, str):
            name, call = method, getattr(self.worker, method)
        else:  # a pickled function, which gets the worker as its first argument
            name, call = "a function of the engine", partial(cloudpickle.loads(method), self.worker)
        if method not in STEP_METHODS:
            self._calls += 1
            self.context.reporter.set_work(f"{name}, call {self._calls}")
        try:
            output: Any = call(*args, **kwargs)
        except Exception as error:
            if method in ENDING_METHODS:
                self.context.fail(error)
            output = error
        if method not in STEP_METHODS:
            self.context.reporter.report_engine_wait()
        if output_rank is None or output_rank == self.rank:
            self.handle_output(output)
