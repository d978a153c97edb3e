"""Names used in Kubernetes objects, environments and URLs; each is defined only here.

Stdlib only; pure. The module contains only constants and stays small, because a pod's first process imports
it before that process can handle signals.
"""

from typing import Final

# The resource
API_GROUP: Final = "heteroinfer.dev"
API_VERSION: Final = "v1alpha1"
KIND: Final = "HeteroInference"
PLURAL: Final = "heteroinferences"
SINGULAR: Final = "heteroinference"
SHORT_NAME: Final = "hinf"
FINALIZER: Final = f"{API_GROUP}/group-teardown"
"""Finalizer that earlier versions set on resources; this version only removes it."""

# Labels of every object that belongs to a resource
LABEL_RESOURCE: Final = f"{API_GROUP}/resource"
"""Name of the HeteroInference."""
LABEL_GROUP: Final = f"{API_GROUP}/group"
"""Index of the group, from 0."""
LABEL_EPOCH: Final = f"{API_GROUP}/epoch"
"""Number of the group's current start; grows with each start."""
LABEL_POD_INDEX: Final = f"{API_GROUP}/pod-index"
"""Index of the pod in its group; 0 is the leader."""
LABEL_ROLE: Final = f"{API_GROUP}/role"
"""Name of the role in `spec.roles`."""
LABEL_DEVICE: Final = f"{API_GROUP}/device"
"""CPU or GPU: the device of the pod's ranks."""
LABEL_LEADER: Final = f"{API_GROUP}/leader"
"""`true` on the pod of rank 0, absent on other pods."""
LABEL_REVISION: Final = f"{API_GROUP}/revision"
"""Hash of the spec fields whose change needs new pods."""
LABEL_PLAN: Final = f"{API_GROUP}/plan"
"""Hash of the plan."""
ANNOTATION_IMAGES: Final = f"{API_GROUP}/images"
"""The images that the operator requested for the workers of the pod's epoch; a webhook may change them."""
ANNOTATION_CODE: Final = f"{API_GROUP}/code"
"""Code of a ConfigMap with a plan or a revision; the code proves that the operator wrote the content."""
LABEL_GANG: Final = f"{API_GROUP}/gang"
"""Gang scheduler of the pod's group (Kueue, Volcano, Coscheduling, Native); absent without a gang."""
LABEL_COMPONENT: Final = f"{API_GROUP}/component"
"""One of the COMPONENT_ values."""
COMPONENT_WORKER: Final = "worker"
COMPONENT_INSPECT: Final = "inspect"
COMPONENT_FETCH: Final = "fetch"
LABEL_MANAGED_BY: Final = "app.kubernetes.io/managed-by"
MANAGER: Final = "heteroinfer-operator"

# Worker pods
CONTAINER_WORKER: Final = "worker"
PORT_API: Final = "api"
"""Name of the leader's OpenAI port."""
PORT_HEALTH: Final = "health"
"""Name of each supervisor's HTTP port: /healthz, /readyz and, on the leader, /group."""
PORT_METRICS: Final = "metrics"
"""Name prefix of the ranks' metrics ports: `metrics-<local rank>`."""
PLAN_KEY: Final = "plan.json"
"""Name of the ConfigMap's entry that contains the plan."""
GROUP_KEY_KEY: Final = "group-key"
"""Name of the Secret's entry that contains a group's key."""
MODEL_MOUNT: Final = "/model"
"""Read-only mount path of the model in a worker pod."""
CA_BUNDLE_MOUNT: Final = "/etc/heteroinfer/ca-bundle"
"""Read-only mount path of the certificate authorities of `model.caBundle` in fetch and worker pods."""
CA_BUNDLE_FILE: Final = "ca.crt"
"""File in CA_BUNDLE_MOUNT."""
FILES_MOUNT: Final = "/etc/heteroinfer/files"
"""Read-only mount path of `engine.files` in worker pods."""
TERMINATION_MESSAGE_PATH: Final = "/dev/termination-log"
"""Default of Kubernetes, which reads a container's termination message from this file."""

# Ports inside a pod; on a cluster, every pod of a group uses the same ports
DEFAULT_API_PORT: Final = 8000
DEFAULT_HEALTH_PORT: Final = 8081
DEFAULT_CONTROL_PORT: Final = 29499
DEFAULT_RENDEZVOUS_PORT: Final = 29500
DEFAULT_EXECUTOR_PORT: Final = 29501
DEFAULT_METRICS_PORT: Final = 9400
"""Metrics port of local rank 0; local rank i uses this port plus i."""
DEFAULT_NETWORK_PORT: Final = 29502
"""Port at which `heteroinfer-worker network --listen` answers the other machine's measurement."""

# Environment of a worker pod
ENV_PLAN: Final = "HETEROINFER_PLAN"
"""The plan as JSON (Plan.to_json)."""
ENV_PLAN_HASH: Final = "HETEROINFER_PLAN_HASH"
"""Hash of the text in ENV_PLAN, set by the operator; unset in pods of older versions."""
ENV_GROUP: Final = "HETEROINFER_GROUP"
"""`namespace/name/index`, for messages and metrics."""
ENV_GROUP_UID: Final = "HETEROINFER_GROUP_UID"
ENV_EPOCH: Final = "HETEROINFER_EPOCH"
ENV_POD_INDEX: Final = "HETEROINFER_POD_INDEX"
ENV_ADDRESSES: Final = "HETEROINFER_ADDRESSES"
"""JSON list of PodAddress, by pod index."""
ENV_STARTUP_TIMEOUT: Final = "HETEROINFER_STARTUP_TIMEOUT_SECONDS"
ENV_DRAIN_TIMEOUT: Final = "HETEROINFER_DRAIN_TIMEOUT_SECONDS"
ENV_HEARTBEAT_TIMEOUT: Final = "HETEROINFER_HEARTBEAT_TIMEOUT_SECONDS"
ENV_STEP_TIMEOUT: Final = "HETEROINFER_STEP_TIMEOUT_SECONDS"
"""The supervisor ends the group if one step of a rank takes longer than this. The same limit applies if
vLLM's API server or the engine does not answer while all ranks are idle. Default: DEFAULT_STEP_TIMEOUT_S."""
DEFAULT_STEP_TIMEOUT_S: Final = 300.0
ENV_METRICS: Final = "HETEROINFER_METRICS"
"""`on` (default), or `off`: ranks neither count nor serve metrics; the status still shows step times."""
ENV_CPU_LINEAR: Final = "HETEROINFER_CPU_LINEAR"
"""`auto` (default): the fastest linear layers that this CPU supports; `onednn`: vLLM's linear layers."""
ENV_MAX_INSTRUCTIONS: Final = "HETEROINFER_MAX_INSTRUCTIONS"
"""Highest instruction set that CPU kernels use: `avx2`, `avx512f`, `avx512_bf16` or `amx_bf16` (default).
Tests and measurements set it, so that one machine computes as machines without the other sets do."""
ENV_BRIDGE: Final = "HETEROINFER_BRIDGE"
"""`auto` (default): shared memory inside a pod or machine, else gloo. `shared_memory`, `gloo`: force one."""
USER_ENV: Final = (ENV_METRICS, ENV_CPU_LINEAR, ENV_BRIDGE)
"""Variables that a user may set in `engine.env`; other names that begin with HETEROINFER_ are reserved."""
ENV_NETWORK_INTERFACE: Final = "HETEROINFER_NETWORK_INTERFACE"
ENV_CPU_BINDING: Final = "HETEROINFER_CPU_BINDING"
"""`Auto`, `Always` or `Never`: whether threads of CPU ranks are bound to cores."""
ENV_MEMORY_NODES: Final = "HETEROINFER_MEMORY_NODES"
"""NUMA nodes of a CPU rank's cores, such as `0,1`; the supervisor sets it on machines with several nodes."""
ENV_FEED_FORWARD_SPIN: Final = "HETEROINFER_FEED_FORWARD_SPIN_SECONDS"
"""Seconds that a feed-forward rank spins for the next request before it sleeps, and that the relay spins for
requests and answers. The supervisor sets it to 0 if a CPU limit or a lack of cores would make other processes
wait."""
ENV_RELAY_CPUS: Final = "HETEROINFER_RELAY_CPUS"
"""CPUs of the relay to feed-forward ranks in other pods, such as `0,1`; the supervisor sets it if ranks are
bound to cores."""
ENV_TERMINATION_MESSAGE_PATH: Final = "HETEROINFER_TERMINATION_MESSAGE_PATH"
"""File to which the supervisor writes its Failure; default TERMINATION_MESSAGE_PATH."""
ENV_RANK: Final = "HETEROINFER_RANK"
"""Set by the supervisor for each rank process it starts."""
ENV_RANK_CHANNEL_FD: Final = "HETEROINFER_RANK_CHANNEL_FD"
"""File descriptor on which a rank reports its events to its supervisor."""
ENV_GROUP_KEY: Final = "HETEROINFER_GROUP_KEY"
"""Key of the group as hex (GroupKey), from its Secret; unset in pods of older versions."""
ENV_FORK_FD: Final = "HETEROINFER_FORK_FD"
"""File descriptor on which the supervisor asks a pod's first rank to fork the pod's other processes."""
ENV_OWN_ADDRESS: Final = "VLLM_HOST_IP"
"""vLLM's own variable; the supervisor sets it for each process that it starts."""
ENV_LAYER_PARTITION: Final = "VLLM_PP_LAYER_PARTITION"
"""vLLM's own variable: layers of each stage, separated by commas."""
ENV_TARGET_DEVICE: Final = "VLLM_TARGET_DEVICE"
ENV_V2_MODEL_RUNNER: Final = "VLLM_USE_V2_MODEL_RUNNER"
ENV_GLOO_INTERFACE: Final = "GLOO_SOCKET_IFNAME"
ENV_VISIBLE_GPUS: Final = "CUDA_VISIBLE_DEVICES"
HIDE_GPUS: Final = "-1"
"""Value of ENV_VISIBLE_GPUS that hides all GPUs. With the empty string, vLLM 0.32.0 keeps Triton enabled, and
its sampler fails without a driver."""
ENV_HETEROGENEOUS_DEVICE: Final = "VLLM_HETEROGENEOUS_DEVICE"
"""`cpu` or `cuda`: the device of this process; the platform plugin reads it."""

ENV_OMP_THREADS: Final = "OMP_NUM_THREADS"
"""Threads of a CPU rank; OpenMP's own variable."""
ENV_OMP_PLACES: Final = "OMP_PLACES"
"""CPUs to which a CPU rank's threads are bound; OpenMP's own variable."""
ENV_MODEL_FETCHED: Final = "HETEROINFER_MODEL_FETCHED"
"""`1`: the model was fetched from a hub; the supervisor checks that it is complete before it starts ranks."""
ENV_CACHE_CLEANUP: Final = "HETEROINFER_CONFIRMED_CLEANUP"
"""CacheCleanup as JSON: the commits that a fetch keeps when it cleans its cache. If unset, the fetch cleans
nothing. Set in fetch pods only. Fetches of earlier versions accept any confirmation, so they must remove
nothing: they read another variable, which is no longer set."""
ENV_CA_BUNDLE: Final = "HETEROINFER_CA_BUNDLE"
"""File with additional trusted certificate authorities; unset without `model.caBundle`."""
ENV_HUB_TOKEN: Final = "HF_TOKEN"  # noqa: S105 - the name of a variable
"""Token for a model hub; huggingface_hub's own variable. Set in fetch pods only."""
ENV_HUB_OFFLINE: Final = "HF_HUB_OFFLINE"
"""`1`: huggingface_hub sends no requests to a hub; huggingface_hub's own variable."""
ENV_HUB_ENDPOINT: Final = "HF_ENDPOINT"
"""URL of a hub or mirror; huggingface_hub's own variable."""
ENV_CACHE_HOME: Final = "XDG_CACHE_HOME"
"""Folder of the user's caches (XDG base directories); only the command line reads it."""

# Paths on the supervisors' health port
PATH_HEALTHZ: Final = "/healthz"
PATH_READYZ: Final = "/readyz"
PATH_API_HEALTH: Final = "/health"
"""Path of vLLM's OpenAI server."""
PATH_GROUP: Final = "/group"
"""Leader only: GroupReport as JSON."""
PATH_FETCH: Final = "/fetch"
"""Fetch pods only: FetchProgress as JSON."""

# Exit codes of a worker pod's first process; the Failure in the termination message has the details
EXIT_OK: Final = 0
"""The process did its work: a supervisor stopped its pod as requested, or a command has its result."""
EXIT_USAGE: Final = 64
"""The supervisor's own settings are wrong; it started no process."""
EXIT_RANK_FAILED: Final = 70
"""A rank (or vLLM's API server) of this pod failed."""
EXIT_PEER_FAILED: Final = 71
"""This pod is well; another pod of the group failed or was lost."""
EXIT_REFUSED: Final = 72
"""The pods of the group do not agree: plan, epoch or resolved settings differ."""
EXIT_STARTUP_TIMEOUT: Final = 73
EXIT_FETCH_FAILED: Final = 74
"""Exit code of fetch pods: the model is not in the cache; the termination message has the cause."""


def exit_code_of_signal(signal_number: int) -> int:
    """Returns the exit code for a process that a signal ended: 128 plus the number, as in shells."""
    return 128 + signal_number
