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
        "--max-num-batched-tokens": "leave it to the plan: it must be equal on GPU and CPU ranks",
        "--max-num-scheduled-tokens": "leave it to the plan: it must be equal on GPU and CPU ranks",
        "--max-num-seqs": "leave it to the plan: it must be equal on GPU and CPU ranks",
        "--block-size": "leave it to the plan: it must be equal on GPU and CPU ranks",
        "--seed": "leave it to the plan: it must be equal on every rank",
        "--tensor-parallel-size": "set spec.parallelism.tensor",
        "--pipeline-parallel-size": "set spec.parallelism.pipeline",
        "--kv-cache-memory-bytes": "set the memory of the role's pods; the plan gives each rank its KV cache",
        "--gpu-memory-utilization": "set spec.roles[].deviceMemory; the plan gives each rank its KV cache",
        "--device-memory-utilization": "set spec.roles[].deviceMemory; the plan gives each rank its KV cache",
        "--num-gpu-blocks-override": "set the memory of the role's pods; the plan gives out the KV cache",
        "--enforce-eager": "set spec.engine.eager",
        "--no-enforce-eager": "set spec.engine.eager",
        "--distributed-executor-backend": "leave it out: HeteroInfer's executor runs the group",
        "--worker-cls": "leave it out: the role's device chooses the worker",
        "--scheduler-cls": "leave it out: HeteroInfer's scheduler decides what is in flight",
        "--nnodes": "set spec.roles[].pods",
        "--node-rank": "leave it out: the plan numbers the ranks",
        "--master-addr": "leave it out: the plan knows the leader",
        "--master-port": "set spec.network.rendezvousPort",
        "--headless": "leave it out: followers run ranks only",
        "--host": "leave it out: the pod's address is used",
        "--port": "set spec.engine.port",
        "--uds": "leave it out: the group is reached by its Service",
        "--device-ids": "set spec.roles[].ranksPerPod; each rank gets its device from the plan",
        "--numa-bind": "leave it out: the pod's CPUs are shared out by its supervisor",
        "--no-numa-bind": "leave it out: the pod's CPUs are shared out by its supervisor",
        "--numa-bind-nodes": "leave it out: the pod's CPUs are shared out by its supervisor",
        "--numa-bind-cpus": "leave it out: the pod's CPUs are shared out by its supervisor",
        "--distributed-timeout-seconds": "set spec.startup.timeout",
        "--cpu-distributed-timeout-seconds": "set spec.startup.timeout",
        "--config": "write the options of the file into spec.engine.args, so that they can be checked",
        "--mm-processor-cache-type": "leave it out: ranks of a group share no memory between pods",
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
    remedy="give it a GPU role and leave parallelism.stageOrder out, or add --language-model-only",
)
TENSOR_CPU_FIRST: Final = Unsupported(
    feature="a stage shared by GPU and CPU ranks whose first rank is on a CPU",
    options=(),
    why="the first rank samples for all and leads the warm-up, which on a GPU runs more than on a CPU",
    remedy="list the GPU roles first, or set parallelism.stageOrder: Auto",
)
MIXED_STAGE_IN_PIPELINE: Final = Unsupported(
    feature="a stage shared by GPU and CPU ranks in pipeline mode",
    options=(),
    why="its collectives sit inside the forward pass, so that CUDA graphs would be lost unasked",
    remedy="set spec.parallelism.mode: Tensor, or give each stage one device",
)

UNSUPPORTED: Final[tuple[Unsupported, ...]] = (
    Unsupported(
        feature="asynchronous scheduling",
        options=("--async-scheduling",),
        # vllm/config/vllm.py (its issue 45014) and vllm/platforms/cpu.py::check_and_update_config@v0.32.0
        why="vLLM forbids it across pipeline stages with the model runner that CPUs have, and turns it off "
        "on CPU ranks, whose inputs then differ from a GPU rank's: sampled tokens stay on the device there",
        remedy="leave it out",
    ),
    Unsupported(
        feature="speculative decoding",
        options=("--speculative-config", "--spec-method", "--spec-model", "--spec-tokens"),
        why="draft tokens across pipeline stages are untested",
        remedy="leave it out",
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
        why="experts over GPU and CPU ranks need collectives that are not built yet",
        remedy="leave it out: each stage holds its layers' experts",
    ),
    Unsupported(
        feature="context parallelism",
        options=("--decode-context-parallel-size", "--prefill-context-parallel-size"),
        why="its collectives between GPU and CPU ranks are not built yet",
        remedy="leave it out",
    ),
    Unsupported(
        feature="dual-batch overlap",
        options=("--enable-dbo", "--ubatch-size"),
        why="vLLM has none on CPUs",
        remedy="leave it out",
    ),
    Unsupported(
        feature="LoRA adapters",
        options=("--enable-lora", "--lora-modules", "--default-mm-loras"),
        why="each rank reads an adapter from its own pod's files while requests run, nothing compares them, "
        "and vLLM's CPU kernels for it are untested over stages",
        remedy="merge the adapter into the model",
    ),
    Unsupported(
        feature="KV transfer and offloading",
        options=("--kv-transfer-config", "--kv-offloading-size", "--kv-events-config"),
        why="connectors are untested with ranks on different devices",
        remedy="leave it out",
    ),
    Unsupported(
        feature="encoder disaggregation",
        options=("--ec-transfer-config", "--ec-manager-config"),
        why="connectors are untested with ranks on different devices",
        remedy="leave it out",
    ),
    Unsupported(
        feature="pooling models",
        options=("--pooler-config", "--convert"),
        why="only generation is tested across stages",
        remedy="serve the model with plain vLLM",
    ),
    Unsupported(
        feature="several API servers",
        options=("--api-server-count", "--grpc", "--grpc-port"),
        why="the leader runs one OpenAI server",
        remedy="set spec.replicas for more throughput",
    ),
    Unsupported(
        feature="Ray",
        options=("--ray-workers-use-nsight", "--no-ray-workers-use-nsight"),
        why="HeteroInfer starts and watches the ranks itself",
        remedy="leave it out",
    ),
    Unsupported(
        feature="vLLM's own fault tolerance and weight transfer",
        options=("--enable-fault-tolerance", "--fault-tolerance-config", "--weight-transfer-config"),
        why="a group is restarted as a whole by its operator",
        remedy="leave it out",
    ),
    Unsupported(
        feature="diffusion language models",
        options=("--diffusion-config",),
        why="they feed tokens back between stages in another way",
        remedy="serve the model with plain vLLM",
    ),
    Unsupported(
        feature="TLS of the API server",
        options=(
            "--ssl-keyfile",
            "--ssl-certfile",
            "--ssl-ca-certs",
            "--ssl-cert-reqs",
            "--ssl-ciphers",
            "--enable-ssl-refresh",
        ),
        why="its supervisor and the kubelet ask it for its health by HTTP",
        remedy="leave it out, and let a gateway in front of the Service speak TLS",
    ),
    MULTIMODAL_CPU_FIRST,
    TENSOR_CPU_FIRST,
    MIXED_STAGE_IN_PIPELINE,
)
"""All unsupported features; only this list decides."""
_REFUSED: Final[Mapping[str, tuple[str, str]]] = MappingProxyType(
    {option: (f"{option} belongs to the plan", remedy) for option, remedy in PLAN_OWNED.items()}
    | {
        option: (f"{entry.feature} is not supported ({entry.why})", entry.remedy)
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
        return f"engine.args: got {self.given!r}, but {self.reason}: {self.remedy}"


def find_refused(args: Sequence[str]) -> Iterator[RefusedArg]:
    """Finds the arguments that may not be given: the plan owns them, or groups do not support them."""
    return filter(None, map(refusal_of, given_options(args)))


def refusal_of(given: GivenOption) -> RefusedArg | None:
    """Finds the first refused option that vLLM's parser may take an argument for."""
    if not given.name.strip("-") and given.arg != "--":
        return RefusedArg(option="", given=given.arg, reason="it names no option", remedy="take it out")
    if given.path and given.value is None:  # vLLM would use the plan's next argument as its value
        return RefusedArg(option="", given=given.arg, reason="it has no value", remedy="give it one")
    option = next(filter(given.may_be, _REFUSED), None)
    if option is None:
        return None
    reason, remedy = _REFUSED[option]
    return RefusedArg(option=option, given=given.arg, reason=reason, remedy=remedy)
