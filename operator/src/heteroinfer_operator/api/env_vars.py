"""Environment variables of workers: the variables that a user may set, and the sources of values. Pure.

Variables are listed by name. A variable that is not on the list may load code, take devices, or open closed
ports, or it belongs to the plan. An image can still set it, and reviewers of images see such settings.
"""

from collections.abc import Callable, Iterable
from typing import Annotated, ClassVar, Final

from pydantic import Field

from heteroinfer_contract import names
from heteroinfer_operator.api.base import Model, ObjectName, RuleReason, ValidationRule, cel_text
from heteroinfer_operator.api.pod_fields import KeyOfObject


class KeyReference(Model):
    """A key of a Secret or a ConfigMap of the same namespace."""

    name: ObjectName
    """Name of the object."""
    key: KeyOfObject
    """Key in the object."""


class EnvSource(Model):
    """Source of a variable's value: exactly one of the fields."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel="has(self.secretKeyRef) != has(self.configMapKeyRef)",
            message="must set exactly one of secretKeyRef and configMapKeyRef",
            holds=lambda source: (source.secret_key_ref is None) != (source.config_map_key_ref is None),
        ),
    )

    secret_key_ref: KeyReference | None = None
    """Key of a Secret with the value."""
    config_map_key_ref: KeyReference | None = None
    """Key of a ConfigMap with the value."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


OWNED_ENV: Final = (
    names.ENV_LAYER_PARTITION,
    names.ENV_TARGET_DEVICE,
    names.ENV_HETEROGENEOUS_DEVICE,
    names.ENV_VISIBLE_GPUS,
    "VLLM_CPU_KVCACHE_SPACE",
    names.ENV_V2_MODEL_RUNNER,
    "VLLM_PLUGINS",
    names.ENV_OWN_ADDRESS,
    "VLLM_PORT",
    names.ENV_GLOO_INTERFACE,
    "NCCL_SOCKET_IFNAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
)
"""Variables that the plan or the supervisor sets."""
OWNED_ENV_PREFIX: Final = "HETEROINFER_"
SECRET_ENV: Final = (names.ENV_HUB_TOKEN, "VLLM_API_KEY")
"""Variables that hold a secret, which must not be written into the resource."""
ALLOWED_ENV: Final = _words(
    """
    ALL_PROXY all_proxy HTTPS_PROXY https_proxy HTTP_PROXY http_proxy NO_PROXY no_proxy
    CURL_CA_BUNDLE REQUESTS_CA_BUNDLE SSL_CERT_DIR SSL_CERT_FILE
    FORCE_COLOR LANG LC_ALL NO_COLOR TZ
    MALLOC_ARENA_MAX MALLOC_MMAP_MAX_ MALLOC_MMAP_THRESHOLD_ MALLOC_TOP_PAD_ MALLOC_TRIM_THRESHOLD_

    CUBLAS_WORKSPACE_CONFIG CUDA_DEVICE_MAX_CONNECTIONS CUDA_LAUNCH_BLOCKING CUDA_MODULE_LOADING
    NVIDIA_TF32_OVERRIDE
    KMP_AFFINITY KMP_BLOCKTIME KMP_FORKJOIN_BARRIER_PATTERN KMP_PLAIN_BARRIER_PATTERN
    KMP_REDUCTION_BARRIER_PATTERN KMP_SETTINGS KMP_TPAUSE
    MKL_DYNAMIC MKL_ENABLE_INSTRUCTIONS MKL_NUM_THREADS MKL_VERBOSE
    OMP_DYNAMIC OMP_NUM_THREADS OMP_PLACES OMP_PROC_BIND OMP_SCHEDULE OMP_WAIT_POLICY
    ONEDNN_DEFAULT_FPMATH_MODE ONEDNN_MAX_CPU_ISA ONEDNN_PRIMITIVE_CACHE_CAPACITY ONEDNN_VERBOSE
    PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF PYTORCH_NVML_BASED_CUDA_CHECK
    TORCHINDUCTOR_COMPILE_THREADS TORCHINDUCTOR_COORDINATE_DESCENT_TUNING TORCHINDUCTOR_MAX_AUTOTUNE
    TORCH_BLAS_PREFER_CUBLASLT TORCH_CPP_LOG_LEVEL TORCH_DISTRIBUTED_DEBUG TORCH_LOGS
    TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_ENABLE_MONITORING
    TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_SHOW_CPP_STACKTRACES
    TRITON_PRINT_AUTOTUNING

    NCCL_ALGO NCCL_BUFFSIZE NCCL_COLLNET_ENABLE NCCL_CROSS_NIC NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE
    NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_DMABUF_ENABLE NCCL_GRAPH_MIXING_SUPPORT NCCL_IB_DISABLE
    NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_IB_QPS_PER_CONNECTION NCCL_IB_RETRY_CNT NCCL_IB_SL NCCL_IB_TC
    NCCL_IB_TIMEOUT NCCL_IGNORE_CPU_AFFINITY NCCL_LAUNCH_MODE NCCL_MAX_CTAS NCCL_MAX_NCHANNELS
    NCCL_MIN_CTAS NCCL_MIN_NCHANNELS NCCL_NET_GDR_LEVEL NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS
    NCCL_NVB_DISABLE NCCL_NVLS_ENABLE NCCL_P2P_DISABLE NCCL_P2P_LEVEL NCCL_PROTO NCCL_PXN_DISABLE
    NCCL_SHM_DISABLE NCCL_SOCKET_FAMILY NCCL_SOCKET_NTHREADS

    HF_DEBUG HF_ENDPOINT HF_HUB_DISABLE_PROGRESS_BARS HF_HUB_DISABLE_TELEMETRY HF_HUB_DISABLE_XET
    HF_HUB_DOWNLOAD_TIMEOUT HF_HUB_ENABLE_HF_TRANSFER HF_HUB_ETAG_TIMEOUT HF_HUB_OFFLINE HF_HUB_VERBOSITY
    HF_TOKEN HF_XET_HIGH_PERFORMANCE
    SAFETENSORS_FAST_GPU TIKTOKEN_ENCODINGS_BASE TIKTOKEN_RS_CACHE_DIR TOKENIZERS_PARALLELISM
    TRANSFORMERS_NO_ADVISORY_WARNINGS TRANSFORMERS_OFFLINE TRANSFORMERS_VERBOSITY

    OTEL_BSP_EXPORT_TIMEOUT OTEL_BSP_MAX_EXPORT_BATCH_SIZE OTEL_BSP_MAX_QUEUE_SIZE OTEL_BSP_SCHEDULE_DELAY
    OTEL_EXPORTER_OTLP_ENDPOINT OTEL_EXPORTER_OTLP_HEADERS OTEL_EXPORTER_OTLP_INSECURE
    OTEL_EXPORTER_OTLP_PROTOCOL OTEL_EXPORTER_OTLP_TIMEOUT OTEL_EXPORTER_OTLP_TRACES_ENDPOINT
    OTEL_EXPORTER_OTLP_TRACES_HEADERS OTEL_EXPORTER_OTLP_TRACES_INSECURE
    OTEL_EXPORTER_OTLP_TRACES_PROTOCOL OTEL_EXPORTER_OTLP_TRACES_TIMEOUT OTEL_RESOURCE_ATTRIBUTES
    OTEL_SDK_DISABLED OTEL_SERVICE_NAME OTEL_TRACES_SAMPLER OTEL_TRACES_SAMPLER_ARG

    VLLM_API_KEY VLLM_AUDIO_FETCH_TIMEOUT VLLM_BATCH_INVARIANT VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER
    VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT VLLM_COMPUTE_NANS_IN_LOGITS VLLM_CONFIGURE_LOGGING
    VLLM_CPU_ATTN_SPLIT_KV VLLM_CPU_INT4_W4A8 VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DEBUG_MFU_METRICS
    VLLM_DEBUG_WORKSPACE VLLM_DEEP_GEMM_WARMUP VLLM_DISABLED_KERNELS VLLM_DISABLE_COMPILE_CACHE
    VLLM_DISABLE_LOG_LOGO VLLM_DISABLE_PYNCCL VLLM_DISABLE_REQUEST_ID_RANDOMIZATION
    VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_DO_NOT_TRACK VLLM_ENABLE_CUDAGRAPH_GC
    VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE
    VLLM_ENABLE_RESPONSES_API_STORE VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_FLASHINFER_ALLREDUCE_BACKEND
    VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_FLOAT32_MATMUL_PRECISION VLLM_GC_DEBUG
    VLLM_GDN_DECODE_KERNEL VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_GPU_SYNC_CHECK
    VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_IMAGE_FETCH_TIMEOUT VLLM_KV_CACHE_LAYOUT VLLM_LOGGING_COLOR
    VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION
    VLLM_LOG_STATS_INTERVAL VLLM_MARLIN_INPUT_DTYPE VLLM_MARLIN_USE_ATOMIC_ADD
    VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_DECODE_DURATION_S
    VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_IMAGE_PIXELS
    VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS
    VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_URL_ALLOW_REDIRECTS
    VLLM_MOE_USE_DEEP_GEMM VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_NO_USAGE_STATS
    VLLM_REGEX_COMPILATION_TIMEOUT_S VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_SERVER_DEV_MODE
    VLLM_SKIP_P2P_CHECK VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_SYSTEM_START_DATE
    VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_USE_DEEP_GEMM
    VLLM_USE_DEEP_GEMM_E8M0 VLLM_USE_FLASHINFER_MOE_INT4 VLLM_USE_FLASHINFER_SAMPLER
    VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_USE_NCCL_SYMM_MEM VLLM_USE_TRITON_AWQ
    VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_VIDEO_FETCH_TIMEOUT VLLM_XGRAMMAR_CACHE_MB
    """
)
"""Variables that a user may set, in addition to the project's own (names.USER_ENV)."""


def _is_owned(name: str) -> bool:
    return name in OWNED_ENV or (name.startswith(OWNED_ENV_PREFIX) and name not in names.USER_ENV)


def _cel_list(values: Iterable[str]) -> str:
    return f"[{', '.join(map(cel_text, values))}]"


_OWNED_CEL: Final = (
    f"(self.name in {_cel_list(OWNED_ENV)} || (self.name.startsWith({cel_text(OWNED_ENV_PREFIX)}) "
    f"&& !(self.name in {_cel_list(names.USER_ENV)})))"
)


def _rule(
    cel: str,
    holds: Callable[["EnvVar"], bool],
    message: str,
    *,
    field: str,
    fix: str = "",
    reason: RuleReason = RuleReason.FORBIDDEN,
) -> ValidationRule:
    """Returns a rule whose message contains the name of the variable."""
    return ValidationRule(
        field=field,
        cel=cel,
        holds=holds,
        message=message,
        fix=fix,
        reason=reason,
        got="%s",
        got_cel=("self.name",),
        got_values=lambda variable: (variable.name,),
    )


class EnvVar(Model):
    """An environment variable of every worker."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        _rule(
            "has(self.value) != has(self.valueFrom)",
            lambda variable: (variable.value is None) != (variable.value_from is None),
            "must set exactly one of value and valueFrom",
            field="",
            reason=RuleReason.INVALID,
        ),
        _rule(
            f"!{_OWNED_CEL}",
            lambda variable: not _is_owned(variable.name),
            "must not be a variable that the plan or the operator sets",
            field="name",
            fix="Remove it, and set roles[].device, roles[].layers or network instead",
        ),
        _rule(
            f"self.name in {_cel_list((*names.USER_ENV, *ALLOWED_ENV))} || {_OWNED_CEL}",
            lambda variable: variable.name in (*names.USER_ENV, *ALLOWED_ENV) or _is_owned(variable.name),
            "must be a variable on the list of docs/user/secure.md",
            field="name",
            fix="Remove it, or set it in an image of your own (spec.engine.image)",
        ),
        _rule(
            f"!(self.name in {_cel_list(SECRET_ENV)}) "
            "|| (has(self.valueFrom) && has(self.valueFrom.secretKeyRef))",
            lambda variable: (
                variable.name not in SECRET_ENV
                or (variable.value_from is not None and variable.value_from.secret_key_ref is not None)
            ),
            "must come from a Secret, because every reader of the resource would see the value",
            field="",
            fix="Store the value in a Secret, and set valueFrom.secretKeyRef",
        ),
    )

    name: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", min_length=1, max_length=128)]
    """Name of the variable."""
    value: Annotated[str, Field(max_length=4096)] | None = None
    """Value of the variable. Set either value or valueFrom."""
    value_from: EnvSource | None = None
    """Source of the value. Set either value or valueFrom."""
