"""Checks that all ranks serve the same model with the same settings, before they load weights.

Each rank builds its own configuration, and vLLM does not compare configurations between pods. A follower
with another dtype or block size would compute wrong results or hang. Pure except for `of_model`, which
reads the model's files.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from heteroinfer_contract.plan import Plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_SAMPLE_BYTES = 64 * 1024
_SAMPLES_PER_FILE = 8
_SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.jinja",
    "*.index.json",
    "hf_quant_config.json",
    "quant*_config.json",
)

_DEVICE_SETTINGS = frozenset({"enforce_eager", "async_scheduling"})
"""Settings in which ranks of different devices may differ. Only GPU ranks can schedule a step ahead."""
SAME_MODEL = "Mount the same files at spec.model in all pods"
_REMEDIES = {
    "model": SAME_MODEL,
    "vllm": "Use one worker image for all roles",
}
_FORMATS = {
    "auto_awq": "awq",
    "awq_marlin": "awq",
    "auto_gptq": "gptq",
    "gptq_marlin": "gptq",
    "gpt_oss_mxfp4": "mxfp4",
}
"""Quantization method -> format (vllm/model_executor/layers/quantization/__init__.py@v0.32.0)."""
_DEFAULT_REMEDY = "Start all pods from one plan and one image"

_MODEL_SIZES = frozenset({"hidden", "topk", "dtype"})

Fingerprint = Mapping[str, Any]
"""Setting -> value; JSON scalars only."""


def remedy_for_slab(fields: Sequence[str]) -> str:
    """Returns the fix if these fields of a slab's shape differ between the ranks that share the slab.

    Sizes and type of a row come from the model's files, all other fields from the epoch and the plan.
    """
    return SAME_MODEL if _MODEL_SIZES.issuperset(fields) else _DEFAULT_REMEDY


class ConfigMismatchError(RuntimeError):
    """Settings differ between ranks; the message names the ranks, the settings and the fix.

    Attributes:
        rank: the first rank that differs from rank 0.
    """

    def __init__(self, rank: int, message: str) -> None:
        self.rank = rank
        super().__init__(message)


def of_config(config: "VllmConfig", *, layer_partition: str) -> dict[str, Any]:
    """Returns the settings that must agree between ranks, including a hash of the model's files."""
    import vllm

    model, cache, scheduler = config.model_config, config.cache_config, config.scheduler_config
    return {
        **of_files(model.model),
        # The suffix of a build, such as +cpu, is left out: ranks may have different builds of one version.
        "vllm": vllm.__version__.split("+")[0],
        "revision": model.revision,
        "architecture": ",".join(model.architectures),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": quantized_format(model.quantization),
        **({"state_dtype": cache.mamba_ssm_cache_dtype} if model.is_hybrid else {}),
        "max_model_len": model.max_model_len,
        "seed": model.seed,
        "enforce_eager": model.enforce_eager,
        "block_size": cache.block_size,
        "kv_cache_dtype": cache.cache_dtype,
        "prefix_caching": cache.enable_prefix_caching,
        "max_num_batched_tokens": scheduler.max_num_batched_tokens,
        "max_num_seqs": scheduler.max_num_seqs,
        "chunked_prefill": scheduler.enable_chunked_prefill,
        "async_scheduling": bool(scheduler.async_scheduling),
        "second_model_runner": bool(config.use_v2_model_runner),
        "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
        "pipeline_parallel_size": config.parallel_config.pipeline_parallel_size,
        "layer_partition": layer_partition,
    }


def of_files(model: str) -> dict[str, Any]:
    """Returns the settings that a feed-forward rank compares. The recipe has the other settings."""
    return {"model": of_model(Path(model)) if Path(model).is_dir() else model}


def quantized_format(method: str | None) -> str | None:
    """Returns the format that a quantization method reads; None without quantization.

    Ranks must agree in the format, not in the method: vLLM names a method after its kernels, which differ by
    device (`awq` on CPUs, `auto_awq` on GPUs).
    """
    return None if method is None else _FORMATS.get(method, method)


def of_model(directory: Path) -> str:
    """Returns a hash of a model's files, 16 hex digits: whole small files, headers and samples of weights.

    The hash is cheap (8 x 64 KiB per weight file). It distinguishes models and revisions, but does not detect
    damaged files.
    """
    digest = hashlib.sha256()
    small = {path for pattern in _SMALL_FILES for path in directory.glob(pattern)}
    for path in sorted(small):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    for path in sorted(directory.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(min(header_bytes, size)))
            for sample in range(_SAMPLES_PER_FILE):  # evenly spaced, from the start to the end of the file
                file.seek(sample * max(0, size - _SAMPLE_BYTES) // max(1, _SAMPLES_PER_FILE - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def compare(plan: Plan, fingerprints: Sequence[Fingerprint]) -> None:
    """Raises ConfigMismatchError if a rank differs from rank 0; every rank raises the same error."""
    expected = fingerprints[0]
    differences, first_rank = [], None
    for rank, settings in zip(plan.ranks, fingerprints, strict=True):
        has_device_of_rank_0 = rank.device is plan.ranks[0].device
        for field in sorted(expected.keys() | settings.keys()):
            if field in _DEVICE_SETTINGS and not has_device_of_rank_0:
                continue
            if rank.feed_forward is not None and field not in settings:
                continue  # a feed-forward rank has only the settings of `of_files`
            if settings.get(field) != expected.get(field):
                first_rank = rank.rank if first_rank is None else first_rank
                differences.append(
                    f"rank {rank.rank} (pod {rank.pod}, role {rank.role}): {field} must be "
                    f"{expected.get(field)}, as on rank 0 (got {settings.get(field)}). "
                    f"{_REMEDIES.get(field, _DEFAULT_REMEDY)}"
                )
    if first_rank is not None:
        raise ConfigMismatchError(
            first_rank, "the ranks of this group have different settings: " + "; ".join(differences)
        )


def to_json(fingerprint: Fingerprint) -> str:
    """Serialises a fingerprint; equal fingerprints have equal texts."""
    return json.dumps(dict(fingerprint), sort_keys=True)


def from_json(text: str) -> Fingerprint:
    """Parses the text of `to_json`."""
    value: dict[str, Any] = json.loads(text)
    return value


def compare_engine(plan: Plan, engine: Fingerprint, rank_0: Fingerprint) -> None:
    """Raises ConfigMismatchError if the engine's settings differ from rank 0's."""
    for field in sorted(engine.keys() | rank_0.keys()):
        if engine.get(field) != rank_0.get(field):
            raise ConfigMismatchError(
                plan.ranks[0].rank,
                f"the engine of vLLM's API server: {field} must be {rank_0.get(field)}, as on rank 0 (got "
                f"{engine.get(field)}). {_REMEDIES.get(field, _DEFAULT_REMEDY)}",
            )
