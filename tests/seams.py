"""Lists where HeteroInfer enters vLLM without replacing code. patches/registry.py lists replaced code.

docs/contributor/patches.md is made from this table. A test looks up each target in the pinned vLLM. Stdlib
only.
"""

from dataclasses import dataclass
from typing import Final

from vllm_heteroinfer.patches.registry import PATCHES

VLLM_VERSION: Final = "0.32.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
    """One entry point into vLLM.

    Attributes:
        target: `module:attribute` that must exist.
        kind: way of entry, ordered from the most to the least official.
        used_by: module of ours that uses it.
        why: reason for its use.
    """

    target: str
    kind: str
    used_by: str
    why: str


SEAMS: Final = (
    Seam(
        target="vllm.platforms:resolve_current_platform_cls_qualname",
        kind="entry point vllm.platform_plugins",
        used_by="platform/",
        why="the role of a rank chooses its device, not the hardware that vLLM finds",
    ),
    Seam(
        target="vllm.engine.arg_utils:EngineArgs._check_feature_supported",
        kind="executor class",
        used_by="engine/executor.py",
        why="a class with supports_pp may run a pipeline on one node; supervisors start the ranks",
    ),
    Seam(
        target="vllm.v1.executor.multiproc_executor:WorkerProc._execute_worker_rpc",
        kind="subclass",
        used_by="rank/rank_process.py",
        why="vLLM only logs an error of a rank that sends no reply",
    ),
    Seam(
        target="vllm.v1.executor.multiproc_executor:FutureWrapper",
        kind="class used",
        used_by="engine/executor.py",
        why="futures of steps in the order of the queues",
    ),
    Seam(
        target="vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
        kind="scheduler class (--scheduler-cls)",
        used_by="engine/scheduler.py",
        why="one decode batch in flight: two halves would read the weights twice",
    ),
    Seam(
        target="vllm.v1.core.sched.scheduler:Scheduler.schedule",
        kind="subclass; Request.next_decode_eligible_step",
        used_by="engine/scheduler.py",
        why="holds decoding requests back while the limit is reached",
    ),
    Seam(
        target="vllm.v1.worker.cpu_worker:CPUWorker.determine_available_memory",
        kind="worker class",
        used_by="rank/worker/cpu_worker.py",
        why="a later CPU stage has no input buffer until the model has run once",
    ),
    Seam(
        target="vllm.v1.worker.gpu_worker:Worker.determine_available_memory",
        kind="worker class",
        used_by="rank/worker/group_worker.py",
        why="vLLM does not measure a planned KV cache: a rank with less memory would fail later",
    ),
    Seam(
        target="vllm.model_executor.model_loader:register_model_loader",
        kind="registry; ModelRunner.load_config",
        used_by="rank/worker/weight_loading.py",
        why="a load reports its progress, so that a load with progress needs no deadline",
    ),
    Seam(
        target="vllm.entrypoints.serve.middleware.register:init_entrypoints_middleware",
        kind="option (--middleware)",
        used_by="engine/draining.py",
        why="a group that ends refuses new requests and answers its running ones to the last byte",
    ),
    Seam(
        target="vllm.v1.worker.cpu_worker:CPUWorker.sleep",
        kind="worker class",
        used_by="rank/worker/sleep.py",
        why="vLLM's method only logs; ours returns the pages of the KV cache",
    ),
    Seam(
        target="vllm.platforms.interface:Platform.pre_register_and_update",
        kind="platform method",
        used_by="platform/environ.py",
        why="registers our VLLM_ variables before vLLM warns of unknown ones",
    ),
    Seam(
        target="vllm.envs:environment_variables",
        kind="registry",
        used_by="platform/environ.py",
        why="registers VLLM_HETEROGENEOUS_DEVICE, because vLLM warns of unknown VLLM_ variables",
    ),
    Seam(
        target="vllm.platforms.interface:Platform.is_sleep_mode_available",
        kind="platform method",
        used_by="platform/cpu.py",
        why="a CPU rank would refuse --enable-sleep-mode",
    ),
    Seam(
        target="vllm.v1.engine.async_llm:AsyncLLM.sleep",
        kind="instance attribute of the engine's client",
        used_by="engine/api_server.py",
        why="a level that a group does not have is refused before requests are aborted",
    ),
    Seam(
        target="vllm.platforms.cpu:CpuPlatform.get_device_communicator_cls",
        kind="platform method",
        used_by="distributed/communicators.py",
        why="no communicator for pipeline groups; shared memory only inside a pod",
    ),
    Seam(
        target=(
            "vllm.distributed.device_communicators.cpu_communicator:"
            "CpuCommunicator._all_group_ranks_share_shm_group_name"
        ),
        kind="override",
        used_by="distributed/communicators.py",
        why="vLLM compares names that contain the rendezvous port, which is equal in every pod",
    ),
    Seam(
        target="vllm.distributed.parallel_state:GroupCoordinator.isend_tensor_dict",
        kind="instance attribute of the pipeline group",
        used_by="distributed/transport.py",
        why="one asynchronous message per hop between devices, without a header",
    ),
    Seam(
        target="vllm.distributed.parallel_state:GroupCoordinator.irecv_tensor_dict",
        kind="instance attribute of the pipeline group",
        used_by="distributed/transport.py",
        why="as above",
    ),
    Seam(
        target="vllm.v1.worker.gpu_worker:AsyncIntermediateTensors.wait_for_comm",
        kind="relied on",
        used_by="distributed/transport.py",
        why="a rank waits for a receive only when it uses the tensors",
    ),
    Seam(
        target="vllm.distributed.parallel_state:GroupCoordinator",
        kind="attributes of the tensor-parallel group",
        used_by="rank/worker/tensor_group.py",
        why="its communicator gets the bridge; a compiled CPU rank calls vLLM's own opaque operators",
    ),
    Seam(
        target="vllm.distributed.device_communicators.base_device_communicator:DeviceCommunicatorBase",
        kind="subclass",
        used_by="distributed/bridge_communicator.py",
        why="collectives between GPU and CPU ranks",
    ),
    Seam(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
        kind="instance attribute of the runner",
        used_by="rank/worker/sampling.py",
        why="every tensor-parallel rank samples for itself, which differs between devices",
    ),
    Seam(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._bookkeeping_sync",
        kind="relied on, with hidden generators",
        used_by="rank/worker/sampling.py",
        why="vLLM moves back the offset of a generator whose sample it discards; those of CPUs have none",
    ),
    Seam(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._get_prompt_logprobs_dict",
        kind="instance attribute of the runner",
        used_by="rank/worker/prompt_logprobs.py",
        why="the logits of all tokens of a step take more memory than a plan keeps free",
    ),
    Seam(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._dummy_run",
        kind="called",
        used_by="rank/worker/tensor_group.py",
        why="a follower runs one forward pass for each that its leader announces",
    ),
    Seam(
        target="vllm.v1.worker.gpu_model_runner:GPUModelRunner._may_reorder_batch",
        kind="attribute of the runner: reorder_batch_threshold",
        used_by="rank/worker/tensor_group.py",
        why="every rank that adds up a batch must have its rows in the same order",
    ),
    Seam(
        target="vllm.v1.worker.cpu_worker:CPUWorker._should_warm_up_model",
        kind="override",
        used_by="rank/worker/cpu_worker.py",
        why="a follower has run its leader's warm-up already",
    ),
    Seam(
        target="vllm.platforms.interface:Platform.simple_compile_backend",
        kind="platform attribute",
        used_by="platform/cpu.py",
        why="small functions would need a C++ compiler in the image, while peers wait in a collective",
    ),
    Seam(
        target="vllm.model_executor.warmup.kernel_warmup:flashinfer_autotune",
        kind="option --no-enable-flashinfer-autotune",
        used_by="engine/arguments.py",
        why="it ends with a barrier of all ranks, which CPU ranks never reach",
    ),
    Seam(
        target="vllm.distributed.device_communicators.shm_broadcast:MessageQueue.wait_until_ready",
        kind="socket option set around the call",
        used_by="group/queues.py",
        why="it has no time-out of its own",
    ),
    Seam(
        target="vllm.entrypoints.launchers.api_server.entry:build_and_serve",
        kind="function called",
        used_by="engine/api_server.py",
        why="`vllm serve` of the CPU build fails on its distribution's name",
    ),
    Seam(
        target="vllm.model_executor.models.registry:_ModelRegistry.register_model",
        kind="registry",
        used_by="rank/imports.py",
        why="vLLM inspects a model's class in a new process with all imports; a CPU rank does so itself",
    ),
    Seam(
        target="vllm.model_executor.models.registry:_LazyRegisteredModel.load_model_cls",
        kind="function called",
        used_by="rank/imports.py",
        why="as above",
    ),
)


def to_markdown() -> str:
    """Returns the page docs/contributor/patches.md."""
    rows = "\n".join(f"| `{s.target}` | {s.kind} | `{s.used_by}` | {s.why} |" for s in SEAMS)
    patches = "\n".join(
        f"| `{p.id}` | `{p.target}` | {p.processes} | {p.why} | {p.upstream or 'not proposed yet'} "
        f"| {', '.join(p.verified)} | {p.remove_when} |"
        for p in PATCHES
    )
    return f"""# How HeteroInfer enters vLLM

HeteroInfer is a plugin outside of vLLM's tree, for vLLM {VLLM_VERSION} only. The first table lists the places
of vLLM that it uses or extends without changing them. The second table lists the functions that it replaces.

`python -m tests.seams` writes this page from `tests/seams.py` and `vllm_heteroinfer/patches/registry.py`.
A test looks up each target in vLLM {VLLM_VERSION}. Another test checks that this page is current.

## Seams

| vLLM | kind | used by | why |
|---|---|---|---|
{rows}

## Patches

HeteroInfer applies a patch only in the listed processes, and never at import. The patch first checks the
signature of its target, and keeps the original function. If the signature or the version of vLLM differs, it
stops with a message.

| id | replaces | in | why | upstream | verified with vLLM | remove when |
|---|---|---|---|---|---|---|
{patches}
"""


if __name__ == "__main__":
    print(to_markdown(), end="")
