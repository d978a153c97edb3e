"""The vLLM options that a user must not give in `engine.args`, with the alternative for each.

Stdlib only; pure. The operator refuses these options while planning. The worker refuses them again before it
builds its configuration.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from heteroinfer_contract.given_options import GivenOption, given_options

PLAN_OWNED: Final[Mapping[str, str]] = MappingProxyType(
    {
        "--model": "set spec.model.uri",
        "--served-model-name": "set spec.model.servedName",
        "--revision": "set spec.model.revision",
        "--dtype": "set spec.engine.dtype",
        "--max-model-len": "set spec.engine.maxModelLen",
        "--max-num-batched-tokens": "set spec.engine.maxBatchedTokens",
        "--max-num-scheduled-tokens": "remove it: the plan sets the same value on GPU and CPU ranks",
        "--max-num-seqs": "remove it: the plan sets the same value on GPU and CPU ranks",
        "--block-size": "remove it: the plan sets the same value on GPU and CPU ranks",
        "--seed": "remove it: the plan sets the same value on all ranks",
        "--tensor-parallel-size": "set spec.parallelism.tensor",
        "--pipeline-parallel-size": "set spec.parallelism.pipeline",
        "--kv-cache-memory-bytes": "set the memory of the role's pods; the plan gives each rank its KV cache",
        "--gpu-memory-utilization": "set spec.roles[].deviceMemory; the plan gives each rank its KV cache",
        "--device-memory-utilization": "set spec.roles[].deviceMemory; the plan gives each rank its KV cache",
        "--num-gpu-blocks-override": "set the memory of the role's pods; the plan gives each rank its KV "
        "cache",
        "--enforce-eager": "set spec.engine.eager",
        "--no-enforce-eager": "set spec.engine.eager",
        "--distributed-executor-backend": "remove it: a group needs HeteroInfer's executor",
        "--worker-cls": "remove it: the role's device chooses the worker",
        "--scheduler-cls": "remove it: a group needs HeteroInfer's scheduler",
        "--nnodes": "set spec.roles[].pods",
        "--node-rank": "remove it: the plan numbers the ranks",
        "--master-addr": "remove it: the plan contains the leader's address",
        "--master-port": "set spec.network.rendezvousPort",
        "--headless": "remove it: the supervisor starts each pod's processes",
        "--host": "remove it: the server listens on the pod's address",
        "--port": "set spec.engine.port",
        "--uds": "remove it: clients reach the group through its Service",
        "--device-ids": "set spec.roles[].ranksPerPod; each rank gets its device from the plan",
        "--numa-bind": "remove it: the pod's supervisor binds ranks to CPUs",
        "--no-numa-bind": "remove it: the pod's supervisor binds ranks to CPUs",
        "--numa-bind-nodes": "remove it: the pod's supervisor binds ranks to CPUs",
        "--numa-bind-cpus": "remove it: the pod's supervisor binds ranks to CPUs",
        "--distributed-timeout-seconds": "set spec.startup.timeout",
        "--cpu-distributed-timeout-seconds": "set spec.startup.timeout",
        "--config": "write the options of the file into spec.engine.args, so that they can be checked",
        "--mm-processor-cache-type": "remove it: pods of a group share no memory",
    }
)
"""Option of vLLM 0.32.0 -> what to set in the resource instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsupported:
    """A feature of vLLM that HeteroInfer groups do not support yet."""

    feature: str
    options: tuple[str, ...]
    why: str
    remedy: str


MULTIMODAL_CPU_FIRST: Final = Unsupported(
    feature="a multimodal model whose first stage is on a CPU",
    options=(),
    why="vLLM runs the encoder on the first rank only, and its CPU encoder is untested in a group",
    remedy="add a GPU role and remove parallelism.stageOrder, or add --language-model-only",
)
TENSOR_CPU_FIRST: Final = Unsupported(
    feature="a stage shared by GPU and CPU ranks whose first rank is on a CPU",
    options=(),
    why="the first rank samples for all ranks and leads the warm-up, and the warm-up of a GPU has more steps",
    remedy="list the GPU roles first, or set parallelism.stageOrder: Auto",
)
MIXED_STAGE_IN_PIPELINE: Final = Unsupported(
    feature="a stage shared by GPU and CPU ranks in pipeline mode",
    options=(),
    why="the stage's collectives are inside the forward pass, so GPU ranks could not use CUDA graphs",
    remedy="set spec.parallelism.mode: Tensor, or let all ranks of each stage be GPUs or all be CPUs",
)

UNSUPPORTED: Final[tuple[Unsupported, ...]] = (
    Unsupported(
        feature="asynchronous scheduling",
        options=("--async-scheduling",),
        # vllm/config/vllm.py (its issue 45014) and vllm/platforms/cpu.py::check_and_update_config@v0.32.0
        why="vLLM's model runner for CPUs does not support it across pipeline stages. vLLM disables it on "
        "CPU ranks, so their inputs would differ from those of GPU ranks, where sampled tokens stay on the "
        "device",
        remedy="remove it",
    ),
    Unsupported(
        feature="speculative decoding",
        options=("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens"),
        why="draft tokens across pipeline stages are untested",
        remedy="remove it",
    ),
    Unsupported(
        feature="data parallelism inside a group",
        options=(
            "--data-parallel-size",
            "--data-parallel-rank",
            "--data-parallel-start-rank",
            "--data-parallel-size-local",
            "--data-parallel-address",
            "--data-parallel-rpc-port",
            "--data-parallel-backend",
            "--data-parallel-hybrid-lb",
            "--no-data-parallel-hybrid-lb",
            "--data-parallel-external-lb",
            "--no-data-parallel-external-lb",
            "--data-parallel-multi-port-external-lb",
            "--data-parallel-supervisor-port",
        ),
        why="a group is one copy of the model",
        remedy="set spec.replicas",
    ),
    Unsupported(
        feature="expert parallelism",
        options=("--enable-expert-parallel", "--enable-eplb", "--enable-elastic-ep"),
        why="it needs collectives between GPU and CPU ranks that HeteroInfer does not have yet",
        remedy="remove it: each stage holds the experts of its layers",
    ),
    Unsupported(
        feature="context parallelism",
        options=("--decode-context-parallel-size", "--prefill-context-parallel-size"),
        why="it needs collectives between GPU and CPU ranks that HeteroInfer does not have yet",
        remedy="remove it",
    ),
    Unsupported(
        feature="dual-batch overlap",
        options=("--enable-dbo", "--ubatch-size"),
        why="vLLM does not support it on CPUs",
        remedy="remove it",
    ),
    Unsupported(
        feature="LoRA adapters",
        options=("--enable-lora", "--lora-modules", "--default-mm-loras"),
        why="each rank reads an adapter from the files of its own pod while requests run, and nothing "
        "compares these files; vLLM's CPU kernels for adapters are untested across stages",
        remedy="merge the adapter into the model",
    ),
    Unsupported(
        feature="KV transfer and offloading",
        options=("--kv-transfer-config", "--kv-offloading-size", "--kv-events-config"),
        why="connectors are untested with ranks on different devices",
        remedy="remove it",
    ),
    Unsupported(
        feature="encoder disaggregation",
        options=("--ec-transfer-config", "--ec-manager-config"),
        why="connectors are untested with ranks on different devices",
        remedy="remove it",
    ),
    Unsupported(
        feature="pooling models",
        options=("--pooler-config", "--convert"),
        why="only generation is tested across stages",
        remedy="serve the model with plain vLLM",
    ),
    Unsupported(
        feature="several API servers of vLLM",
        options=("--api-server-count", "--grpc", "--grpc-port"),
        why="the leader runs one OpenAI server",
        remedy="set spec.replicas for more throughput",
    ),
    Unsupported(
        feature="Ray",
        options=("--ray-workers-use-nsight", "--no-ray-workers-use-nsight"),
        why="HeteroInfer starts and watches the ranks itself",
        remedy="remove it",
    ),
    Unsupported(
        feature="vLLM's own fault tolerance and weight transfer",
        options=("--enable-fault-tolerance", "--fault-tolerance-config", "--weight-transfer-config"),
        why="the operator restarts a group as a whole",
        remedy="remove it",
    ),
    Unsupported(
        feature="diffusion language models",
        options=("--diffusion-config",),
        why="they return tokens from the last stage to the first in another way",
        remedy="serve the model with plain vLLM",
    ),
    Unsupported(
        feature="TLS of vLLM's API server",
        options=(
            "--ssl-keyfile",
            "--ssl-certfile",
            "--ssl-ca-certs",
            "--ssl-cert-reqs",
            "--ssl-ciphers",
            "--enable-ssl-refresh",
        ),
        why="the supervisor and the kubelet check its health by HTTP",
        remedy="remove it, and end TLS at a gateway in front of the Service",
    ),
    MULTIMODAL_CPU_FIRST,
    TENSOR_CPU_FIRST,
    MIXED_STAGE_IN_PIPELINE,
)
"""All unsupported features; only this list decides."""
_REFUSED: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {option: (f"only HeteroInfer may set {option}", remedy) for option, remedy in PLAN_OWNED.items()}
    | {
        option: (f"HeteroInfer does not support {entry.feature} ({entry.why})", entry.remedy)
        for entry in UNSUPPORTED
        for option in entry.options
    }
)
"""Option -> reason for the refusal, alternative."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedArg:
    """An argument that must not be in `engine.args`.

    Attributes:
        option: the option that the argument sets, in vLLM's spelling; "" if it sets none.
        given: the argument as the user wrote it.
    """

    option: str
    given: str
    reason: str
    remedy: str

    def __str__(self) -> str:
        remedy = self.remedy[0].upper() + self.remedy[1:]
        return f"engine.args: {self.given!r} is refused: {self.reason}. {remedy}"


def find_refused(args: Sequence[str]) -> Iterator[RefusedArg]:
    """Yields the refusals of arguments that the plan sets or that groups do not support."""
    return filter(None, map(refusal_of, given_options(args)))


def refusal_of(given: GivenOption) -> RefusedArg | None:
    """Returns the refusal of an argument; None if vLLM's parser cannot read it as a refused option."""
    if not given.name.strip("-") and given.arg != "--":  # `--` only ends the options
        return RefusedArg(option="", given=given.arg, reason="it names no option", remedy="remove it")
    if given.path and given.value is None:  # vLLM would use the plan's next argument as its value
        return RefusedArg(option="", given=given.arg, reason="it has no value", remedy="add a value")
    option = next(filter(given.may_mean, _REFUSED), None)
    if option is None:
        return None
    reason, remedy = _REFUSED[option]
    return RefusedArg(option=option, given=given.arg, reason=reason, remedy=remedy)
