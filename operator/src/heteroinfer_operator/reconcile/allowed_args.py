"""The vLLM options that `engine.args` may contain, by their names in vLLM 0.32.0. Pure.

Other options may load code, let clients read the pod's files, contain a secret, open more of the pod to the
network, or make ranks need memory that the plan does not count. heteroinfer_contract.refused_args lists the
options that the plan sets itself and the options that cannot work across ranks. The worker refuses those too,
but does not check the list of this module: a group that started under an older list must be able to start
again with its own plan.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from heteroinfer_contract.given_options import GivenOption, given_options
from heteroinfer_contract.refused_args import refusal_of
from heteroinfer_contract.word_table import word_set
from heteroinfer_operator.errors import PlanError

REMOTE_CODE: Final = "--trust-remote-code"
_REMOTE_CODE_KEY: Final = "trust_remote_code"
"""Key that has the effect of `--trust-remote-code` in the JSON value of another option."""
ARGS_BY_TOPIC: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "vLLM's API server, templates and parsers": word_set(
            """
            --chat-template --chat-template-content-format --default-chat-template-kwargs --response-role
            --return-tokens-as-token-ids --enable-auto-tool-choice --exclude-tools-when-tool-choice-none
            --tool-call-parser --tool-strict-level --reasoning-parser --reasoning-config --max-log-len
            --enable-prompt-tokens-details --enable-per-request-metrics --enable-server-load-tracking
            --enable-force-include-usage --sse-keep-alive-interval --enable-tokenizer-info-endpoint
            --enable-log-outputs --enable-log-deltas --enable-log-requests --cohere-is-reasoning-model
            --cohere-format --anthropic-disabled-thinking-effort --log-error-stack --tokens-only
            --fingerprint-mode --fingerprint-value
            --uvicorn-log-level --disable-uvicorn-access-log --disable-access-log-for-endpoints
            --allow-credentials --allowed-origins --allowed-methods --allowed-headers --root-path
            --enable-request-id-headers --disable-fastapi-docs --h11-max-incomplete-event-size
            --h11-max-header-count --enable-offline-docs
            """
        ),
        "tokenizer, weights and sampling": word_set(
            """
            --tokenizer --tokenizer-mode --tokenizer-revision --skip-tokenizer-init --allowed-media-domains
            --quantization --allow-deprecated-quantization --config-format --load-format --hf-overrides
            --generation-config --override-generation-config --model-impl --max-logprobs --logprobs-mode
            --use-fp64-gumbel --enable-sleep-mode --renderer-num-workers --safetensors-load-strategy
            --safetensors-prefetch-num-threads --safetensors-prefetch-block-size --ignore-patterns
            --use-tqdm-on-load --max-parallel-loading-workers
            """
        ),
        "kernels and CUDA graphs": word_set(
            """
            --attention-backend --attention-config --mamba-backend --mamba-ssu-algorithm --moe-backend
            --linear-backend --gdn-prefill-backend --kda-prefill-backend --kda-decode-backend
            --compilation-config --optimization-level --performance-mode --cudagraph-capture-sizes
            --max-cudagraph-capture-size --enable-flashinfer-autotune --disable-cascade-attn
            """
        ),
        "KV cache": word_set(
            """
            --kv-cache-dtype --mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-cache-mode
            --enable-prefix-caching --prefix-caching-hash-algo --kv-cache-metrics --kv-cache-metrics-sample
            """
        ),
        "media": word_set(
            """
            --language-model-only --limit-mm-per-prompt --media-io-kwargs --mm-processor-kwargs
            --mm-processor-cache-gb --mm-hasher-algorithm --mm-encoder-attn-backend --interleave-mm-strings
            --skip-mm-profiling --video-pruning-rate --video-pruning-method
            """
        ),
        "scheduling": word_set(
            """
            --max-num-active-seqs --max-num-queued-reqs --max-num-queued-tokens --long-prefill-token-threshold
            --scheduling-policy --enable-chunked-prefill --disable-chunked-mm-input --stream-interval
            --async-scheduling --enable-lora --enable-dbo --structured-outputs-config
            """
        ),
        "logs and metrics": word_set(
            """
            --log-level --show-hidden-metrics-for-version --otlp-traces-endpoint --collect-detailed-traces
            --custom-histogram-buckets --cudagraph-metrics --enable-mfu-metrics
            --enable-logging-iteration-details --jit-monitor-mode --jit-monitor-verbose --disable-log-stats
            """
        ),
    }
)
"""Allowed options, by topic. A flag also allows its negation (`--no-...`)."""
ALLOWED_ARGS: Final = frozenset().union(*ARGS_BY_TOPIC.values())
"""All allowed options."""
KEYS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "--compilation-config": word_set(
            """
            mode custom_ops splitting_ops compile_sizes compile_ranges_endpoints cudagraph_mode
            cudagraph_capture_sizes cudagraph_num_of_warmups cudagraph_copy_inputs
            max_cudagraph_capture_size use_inductor_graph_partition pass_config
            """
        ),
        "--attention-config": word_set(
            """
            backend flash_attn_version flash_attn_max_num_splits_for_cuda_graph use_trtllm_attention
            disable_flashinfer_q_quantization
            """
        ),
        "--structured-outputs-config": word_set(
            """
            backend disable_any_whitespace disable_additional_properties reasoning_parser
            enable_in_reasoning
            """
        ),
        "--hf-overrides": frozenset({"rope_parameters", "rope_scaling", "rope_theta"}),
    }
)
"""Allowed keys of options with JSON values; other keys may load code or change the memory that ranks need."""
VALUES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {"--kv-cache-dtype": frozenset({"auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"})}
)
"""Allowed values of options; other values make ranks need memory that the plan does not count."""
MAX_LOGPROBS: Final = 100
"""Largest value of `--max-logprobs`: the number of probabilities that a client may request for each token.

Without a limit (-1), a request can take gigabytes of memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnlistedOptions:
    """Well-known options that are not allowed, with the cause and an alternative for the message.

    Attributes:
        why: cause, which completes the sentence "OPTION is refused: it ...".
        remedy: alternative, as sentences in the imperative.
    """

    options: tuple[str, ...]
    why: str
    remedy: str


_OWN_CODE: Final = "runs code from a file or a module with all permissions of the pod"
_OWN_IMAGE: Final = "Remove it, or build it into your own image"
OFFLOADING: Final = _UnlistedOptions(
    options=(
        "--cpu-offload-gb",
        "--cpu-offload-params",
        "--offload-backend",
        "--offload-group-size",
        "--offload-num-in-group",
        "--offload-prefetch-step",
        "--offload-params",
    ),
    why="copies weights from host memory to the GPU in each step: the plan counts neither the host memory "
    "nor the time",
    remedy="Remove it. To run layers that do not fit on the GPUs, add a role of CPU pods; for experts, set "
    "parallelism.mode FeedForward",
)
"""Options that every installation refuses, because no plan counts the offloaded weights."""
UNLISTED_OPTIONS: Final = (
    _UnlistedOptions(
        options=(
            "--middleware",
            "--worker-extension-cls",
            "--logits-processors",
            "--io-processor-plugin",
            "--model-class-overrides",
            "--logging-config",
            "--log-config-file",
        ),
        why=_OWN_CODE,
        remedy=_OWN_IMAGE,
    ),
    _UnlistedOptions(
        options=("--tool-parser-plugin", "--reasoning-parser-plugin"),
        why=_OWN_CODE,
        remedy="Remove it, or add it to the chart's allowedArguments and the file to engine.files",
    ),
    _UnlistedOptions(
        options=("--allowed-local-media-path",),
        why="lets every client read files of the pod",
        remedy="Remove it. Clients can send the content of media files in their requests",
    ),
    _UnlistedOptions(
        options=("--api-key", "--hf-token"),
        why="would show a secret to all users that may read the resource, the plan or a log",
        remedy="Set VLLM_API_KEY in engine.env from a Secret; for a hub's token, use model.tokenSecretRef",
    ),
    OFFLOADING,
    _UnlistedOptions(
        options=("--runner",),
        why="is needed only to select pooling, which is untested across stages",
        remedy="Remove it, and serve a pooling model with stock vLLM",
    ),
)
_NOT_LISTED: Final = "is not an allowed option"
_USE_FULL_NAME: Final = (
    "Use the full name of an option in docs/user/reference/allowed-values.md, or add this option to the "
    "chart's allowedArguments"
)
_UNLISTED_REASON: Final = "ArgumentNotAllowed"
_REMOTE_CODE_REASON: Final = "RemoteCodeNotAllowed"


def find_unlisted(
    args: Sequence[str], *, more: Collection[str] | None, remote_code: bool
) -> Iterator[PlanError]:
    """Yields an error for each argument that is not allowed.

    Arguments that heteroinfer_contract.refused_args reports are left out. Options must have their full names,
    with hyphens or underscores, as `--opt value` or `--opt=value`, and `--opt.key` or JSON for options with
    JSON values.

    Args:
        args: arguments for vLLM.
        more: additional options that the installation allows; None allows all but weight offloading.
        remote_code: whether the model's own code may run.
    """
    for given in given_options(args):
        if refusal_of(given) is None:
            unlisted = _find_problem(given, more, remote_code)
            if unlisted is not None:
                yield unlisted


def _find_problem(given: GivenOption, more: Collection[str] | None, remote_code: bool) -> PlanError | None:
    """Returns the error if an argument is not allowed, or None.

    Args:
        more: additional options that the installation allows; None allows all but weight offloading.
        remote_code: whether the model's own code may run.
    """
    # Abbreviations of offloading options are refused, too, because vLLM accepts them.
    if any(map(given.may_mean, OFFLOADING.options)):
        return _refusal_error(given.arg, OFFLOADING.why, OFFLOADING.remedy)
    if more is None:
        return None
    if given.option == REMOTE_CODE and not given.path:  # a path means --trust-remote-code.KEY, another option
        return None if remote_code or given.is_negated else _remote_code_error(given)
    if given.option in more:
        return None
    if given.option not in ALLOWED_ARGS:
        well_known = next((entry for entry in UNLISTED_OPTIONS if given.option in entry.options), None)
        why, remedy = (well_known.why, well_known.remedy) if well_known else (_NOT_LISTED, _USE_FULL_NAME)
        return _refusal_error(given.arg, why, remedy)
    return _find_value_problem(given, remote_code)


def _find_value_problem(given: GivenOption, remote_code: bool) -> PlanError | None:
    """Returns the error if the value of an allowed option is not allowed, or None."""
    if (memory_error := _find_uncounted_memory(given)) is not None:
        return memory_error
    value = _parse_json(given.value)
    keys_at_any_depth = {*given.path, *_all_keys(value)}
    if not remote_code and _REMOTE_CODE_KEY in keys_at_any_depth:
        return _remote_code_error(given)
    allowed_keys = KEYS.get(given.option)
    if allowed_keys is None:  # all keys are allowed
        return None
    if not given.path and not isinstance(value, Mapping):
        return _refusal_error(given.arg, "must have a JSON object as its value", "Add a JSON object")
    # `--opt.key=...` has one key at the top, a JSON object may have several. Only these keys are limited.
    top_keys = given.path[:1] or tuple(value)
    unlisted_key = next((key for key in top_keys if key not in allowed_keys), None)
    if unlisted_key is None:
        return None
    return _refusal_error(
        f"{given.option}.{unlisted_key}",
        "is not an allowed key of this option",
        f"Remove it. Allowed keys are {', '.join(sorted(allowed_keys))}",
    )


def _find_uncounted_memory(given: GivenOption) -> PlanError | None:
    """Returns an error if a value makes ranks need memory that the plan does not count, or None."""
    option_text, allowed_values = f"{given.option} {given.value}", VALUES.get(given.option)
    if allowed_values is not None and given.value not in allowed_values:
        remedy = f"Set one of {', '.join(sorted(allowed_values))}"
        return _refusal_error(option_text, "creates a KV cache that the plan cannot count", remedy)
    if given.option == "--max-logprobs" and not _is_up_to(given.value, MAX_LOGPROBS):
        why = "lets each client use memory that the plan does not count"
        return _refusal_error(option_text, why, f"Set a number from 0 to {MAX_LOGPROBS}")
    return None


def _is_up_to(value: str | None, limit: int) -> bool:
    """Reports whether a text is a number from 0 to `limit`."""
    if value is None or len(value) > 9:  # `int` refuses very long texts
        return False
    return value.isascii() and value.isdecimal() and int(value) <= limit


def _remote_code_error(given: GivenOption) -> PlanError:
    """Returns the error for an argument that runs the model's own code."""
    remedy = "Remove it, or install the chart with allowRemoteCode=true"
    return _refusal_error(given.arg, "runs the model's own code", remedy, reason=_REMOTE_CODE_REASON)


def _refusal_error(given: str, why: str, remedy: str, *, reason: str = _UNLISTED_REASON) -> PlanError:
    """Returns the error for an argument. `_UnlistedOptions` describes `why` and `remedy`."""
    return PlanError(f"engine.args: {given!r} is refused: it {why}. {remedy}", reason=reason)


def _parse_json(text: str | None) -> Any:
    """Parses a JSON value; returns None if the text is not JSON."""
    try:
        return json.loads(text or "", object_pairs_hook=_RepeatedKeys)
    except (ValueError, RecursionError):
        return None


class _RepeatedKeys(dict[str, Any]):
    """A JSON object that keeps all values of a repeated key, so that each value is checked."""

    def __init__(self, pairs: Sequence[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs


def _all_keys(value: Any) -> Iterator[str]:
    """Yields all keys inside a JSON value, at any depth."""
    if isinstance(value, _RepeatedKeys):
        for key, inner in value.pairs:
            yield key
            yield from _all_keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _all_keys(inner)
