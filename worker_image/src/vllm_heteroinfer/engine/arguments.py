"""Converts a plan to vLLM's arguments, and these arguments to vLLM's configuration of a rank.

The arguments contain every option that must agree between ranks, because vLLM's defaults differ by
device. Imports vLLM inside functions only: `arguments` must work without vLLM.
"""

import argparse
import logging
from typing import TYPE_CHECKING, Any

from heteroinfer_contract import load_formats, names
from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.plan import Device, Mode, Plan, RankAssignment, eager_reason
from heteroinfer_contract.pod_launch import PodLaunch
from heteroinfer_contract.refused_args import (
    MIXED_STAGE_IN_PIPELINE,
    MULTIMODAL_CPU_FIRST,
    TENSOR_CPU_FIRST,
    Unsupported,
    find_refused,
)
from vllm_heteroinfer.feed_forward import remote_parts
from vllm_heteroinfer.pod import addresses

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_logger = logging.getLogger(__name__)

SCHEDULER = "vllm_heteroinfer.engine.scheduler.PipelineScheduler"


def arguments(plan: Plan, launch: PodLaunch, rank: RankAssignment) -> list[str]:
    """Builds vLLM's arguments for `rank`: the user's, then the plan's, which have priority.

    Raises:
        ContractError: a user's argument belongs to the plan or is not supported, or the plan needs a
            feature that does not exist; the message contains the fix.
    """
    engine = plan.engine
    first_refused = next(iter(find_refused(engine.extra_args)), None)
    if first_refused is not None:
        raise ContractError(str(first_refused))
    _check_stages(plan)
    remote_parts.check_plan(plan)
    # The planner checks `eager_reason`, too. But a plan written by hand must not hang in its first CUDA
    # graph.
    eager_gpu = engine.eager_gpu or eager_reason(plan) is not None
    eager = engine.eager_cpu if rank.device is Device.CPU else eager_gpu
    # The supervisor probes twice a second. A user's own value comes later and wins.
    quiet = ["--disable-access-log-for-endpoints", names.PATH_API_HEALTH]
    flags = [
        "--enforce-eager" if eager else "--no-enforce-eager",
        # The custom all-reduce uses shared memory of one node, which other pods cannot reach.
        "--disable-custom-all-reduce",
        *_scheduler_options(plan, rank),
        *_autotuning_options(plan, rank),
    ]
    options = [
        word for name, value in _planned_values(plan, launch, rank).items() for word in (name, str(value))
    ]
    return [*quiet, *engine.extra_args, *options, *flags]


def _planned_values(plan: Plan, launch: PodLaunch, rank: RankAssignment) -> dict[str, object]:
    """Returns the values of options that the plan and the launch set, by option."""
    engine = plan.engine
    timeout_s = int(launch.startup_timeout_s)
    return {
        "--model": engine.model,
        "--served-model-name": engine.served_name,
        "--dtype": engine.dtype,
        "--seed": engine.seed,
        "--max-model-len": engine.max_model_len,
        "--max-num-batched-tokens": engine.max_num_batched_tokens,
        "--max-num-seqs": engine.max_num_seqs,
        "--block-size": engine.block_size,
        "--kv-cache-memory-bytes": rank.kv_cache_bytes,
        "--tensor-parallel-size": plan.tensor_parallel_size,
        "--pipeline-parallel-size": plan.pipeline_parallel_size,
        "--distributed-timeout-seconds": timeout_s,
        "--cpu-distributed-timeout-seconds": timeout_s,
        "--host": addresses.bind_address(launch.leader.host),
        "--port": launch.leader.api_port,
    }


def _scheduler_options(plan: Plan, rank: RankAssignment) -> list[str]:
    """Returns the options that choose the scheduler.

    If one GPU holds all layers, vLLM's asynchronous scheduler runs, otherwise HeteroInfer's scheduler.
    """
    if plan.schedules_ahead:
        # Only the GPU rank schedules. A feed-forward rank needs a value that vLLM accepts on CPUs.
        return ["--async-scheduling" if rank.device is Device.GPU else "--no-async-scheduling"]
    return ["--no-async-scheduling", "--scheduler-cls", SCHEDULER]


def _check_stages(plan: Plan) -> None:
    """Checks that stages shared by GPU and CPU ranks are supported; raises ContractError."""
    for stage in filter(plan.is_mixed, range(plan.pipeline_parallel_size)):
        if plan.mode is not Mode.TENSOR:
            raise ContractError(_unsupported_message("parallelism", MIXED_STAGE_IN_PIPELINE))
        if plan.stage(stage)[0].device is Device.CPU:
            raise ContractError(_unsupported_message("roles", TENSOR_CPU_FIRST))


def _autotuning_options(plan: Plan, rank: RankAssignment) -> list[str]:
    """Returns the option that disables FlashInfer's autotuning on GPU ranks of groups with CPU ranks.

    The autotuning gathers over the group and ends with a barrier of all ranks. CPU ranks never call these
    collectives, so GPU ranks would hang. Source:
    vllm/model_executor/warmup/kernel_warmup.py::flashinfer_autotune@v0.32.0.
    """
    has_cpu = any(other.device is Device.CPU for other in plan.ranks)
    return ["--no-enable-flashinfer-autotune"] if has_cpu and rank.device is Device.GPU else []


def parse(plan: Plan, launch: PodLaunch, rank: RankAssignment) -> argparse.Namespace:
    """Parses vLLM's arguments for `rank` and sets the executor class.

    Raises:
        ContractError: see `arguments`; or vLLM's parser refused an argument; or feed-forward ranks cannot
            load the format of `--load-format`.
    """
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_heteroinfer.engine.executor import GroupExecutor

    parser = make_arg_parser(_create_parser(FlexibleArgumentParser))
    args = parser.parse_args(arguments(plan, launch, rank))
    if args.model_tag is not None:
        raise ContractError(
            f"engine.args: each value must belong to an option (got {args.model_tag!r} without an option). "
            "Remove the value. The model is in spec.model.uri"
        )
    choose_load_format(plan, rank, args)
    # `parse_args` accepts only a name, but vLLM's check of pipeline parallelism needs a class.
    # Source: vllm/engine/arg_utils.py::EngineArgs._check_feature_supported@v0.32.0.
    args.distributed_executor_backend = GroupExecutor
    validate_parsed_serve_args(args)
    return args


def choose_load_format(plan: Plan, rank: RankAssignment, args: argparse.Namespace) -> None:
    """Replaces a load format for GPUs only by safetensors on the CPU ranks of mode FeedForward.

    Raises:
        ContractError: feed-forward ranks cannot load the user's format.
    """
    if plan.mode is not Mode.FEED_FORWARD:
        return
    load_format = args.load_format
    if load_format not in load_formats.FEED_FORWARD:
        raise ContractError(
            f"engine.args: --load-format must be {' or '.join(load_formats.FEED_FORWARD)} in mode "
            f"{plan.mode} (got {load_format}): {load_formats.FEED_FORWARD_WHY}. "
            "Remove the option"
        )
    if rank.device is Device.CPU and load_format in load_formats.GPU_FORMATS:
        _logger.info(
            "rank %d loads %s: %s is for GPUs only", rank.rank, load_formats.SAFETENSORS, load_format
        )
        args.load_format = load_formats.SAFETENSORS


def build_config(plan: Plan, launch: PodLaunch, rank: RankAssignment) -> "VllmConfig":
    """Builds the resolved configuration of `rank`; raises the errors of `parse` and of vLLM."""
    import vllm
    from vllm.usage.usage_lib import UsageContext

    engine_args = vllm.AsyncEngineArgs.from_cli_args(parse(plan, launch, rank))
    config = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
    check_supported(plan, config)
    return config


def check_supported(plan: Plan, config: "VllmConfig") -> None:
    """Raises ContractError if the model accepts images or other media, and rank 0 is a CPU rank."""
    multimodal = config.model_config.multimodal_config
    accepts_only_text = multimodal is None or getattr(multimodal, "language_model_only", False)
    if not accepts_only_text and plan.ranks[0].device is Device.CPU:
        raise ContractError(_unsupported_message(plan.engine.model, MULTIMODAL_CPU_FIRST))


def _unsupported_message(where: str, entry: Unsupported) -> str:
    """Returns the message for an unsupported feature; `where` is the setting or the model."""
    fix = f"{entry.remedy[0].upper()}{entry.remedy[1:]}"
    return f"{where}: {entry.feature} is not supported ({entry.why}). {fix}"


def _create_parser(base: Any) -> Any:
    """Creates vLLM's parser, changed to raise an error for a bad argument instead of printing the usage."""

    class Parser(base):
        def error(self, message: str) -> None:
            raise ContractError(f"engine.args: {message}. See vLLM's documentation of `vllm serve`")

    return Parser()
