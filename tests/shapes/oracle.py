"""Computes vLLM's own sizes of the shapes: the parameters of each stage, and the KV cache of each layer.

The first command prints a line of JSON for each shape; the second one records them in recorded/cpu.json; the
third one writes FILE, with 12 processes:

    .venv-worker/bin/python -m tests.shapes.oracle [NAME ...]
    .venv-worker/bin/python -m tests.shapes.oracle --record [NAME ...]
    python -m tests.shapes.oracle --output FILE --at-once 12

vLLM's own model classes build each shape in two stages on torch's meta device, without weights. So the
recorded sizes are those of vLLM's CPU platform on CPUs with AMX. On a GPU machine, a CUDA build of vLLM
computes the sizes of the CUDA platform: recorded/cuda.json, from an H200 without DeepGEMM, FlashMLA and
flashinfer.

Imports torch and vLLM inside functions only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.shapes.corpus import SHAPES, Shape, write_shape

RECORDED = Path(__file__).parent / "recorded"
LENGTHS = (8192, 131072)
"""Longest sequences for KV caches, in tokens. A model's own longest sequence may be shorter."""
BLOCK_TOKENS = 32
BATCHED_TOKENS = 2048
LAYOUT = "LBHNC"
"""Block size of all our ranks (vllm_heteroinfer.rank.worker.group_worker)."""
MEMORY_BYTES = 2**40
"""Bytes of each stage's KV cache: so many that the number of blocks gives their bytes to a millionth."""


def stage_layers(layers: int) -> tuple[int, int]:
    """Returns the layers of the two stages of a shape."""
    return layers // 3, layers - layers // 3


def ask(shape: Shape) -> dict[str, Any]:
    """Returns vLLM's sizes of a shape.

    The keys of the answer:

    - `weights`: bytes of parameters by stage.
    - `encoder`: bytes of the encoder's parameters by stage.
    - `layers`: runs of equal caches, as [number, kind, bytes of a block, tokens of a block].
    - `pools`: by longest sequence, the `bytes` of a block by stage, the blocks of such a sequence
    (`sequence`), and
      the `tokens` of a block.
    """
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    with tempfile.TemporaryDirectory() as folder:
        directory = write_shape(shape, Path(folder))
        layers = _num_layers(directory)
        answer: dict[str, Any] = {"layers": [], "pools": {}}
        stages = []
        for stage in (0, 1):
            config = _config(directory, stage_layers(layers))
            stages.append((config, *_build(config, stage)))
        answer["weights"] = [weights for _, weights, _, _ in stages]
        answer["encoder"] = [encoder for _, _, encoder, _ in stages]
        specs = [spec for _, _, _, spec in stages]
        config, longest = stages[0][0], stages[0][0].model_config.max_model_len
        for length in LENGTHS if any(specs) else ():
            # Only the sizes of the cache's pools depend on it.
            config.model_config.max_model_len = min(length, longest)
            found = get_kv_cache_configs(config, [dict(spec) for spec in specs], [MEMORY_BYTES] * 2)
            answer["pools"][str(config.model_config.max_model_len)] = _pool(config, found)
        for spec in specs:
            for each in spec.values():
                kind = [type(each).__name__, each.page_size_bytes, each.block_size]
                if answer["layers"] and answer["layers"][-1][1:] == kind:
                    answer["layers"][-1][0] += 1
                else:
                    answer["layers"].append([1, *kind])
    return answer


def _pool(config: Any, found: Sequence[Any]) -> dict[str, Any]:
    from vllm.v1.core.kv_cache_utils import _max_memory_usage_bytes_from_groups, _pool_bytes_per_block

    bytes_ = [_pool_bytes_per_block(config, each.kv_cache_groups) for each in found]
    whole = _max_memory_usage_bytes_from_groups(config, found[0].kv_cache_groups)
    return {
        "bytes": bytes_,
        "sequence": whole // bytes_[0],
        "tokens": config.cache_config.block_size,
    }


def _num_layers(directory: Path) -> int:
    from heteroinfer_contract.model_files import read_profile

    return read_profile(directory).num_layers


def _config(directory: Path, layers: tuple[int, int]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    os.environ["VLLM_PP_LAYER_PARTITION"] = ",".join(map(str, layers))
    from heteroinfer_contract.model_files import read_profile

    profile = read_profile(directory)
    config = EngineArgs(
        model=str(directory),
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=min(max(LENGTHS), profile.max_position_embeddings),
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_num_batched_tokens=BATCHED_TOKENS,
        max_num_seqs=64,
        mamba_ssm_cache_dtype="float32" if profile.has_state else "auto",
        trust_remote_code=True,
    ).create_engine_config()
    config.cache_config.kv_cache_layout = LAYOUT
    config.parallel_config.pipeline_parallel_size = 2  # concurrent batches; this code makes the stages itself
    return config


def _one_rank() -> None:
    """Creates process groups with only this process, because model classes read their sizes."""
    from vllm.distributed import (
        init_distributed_environment,
        initialize_model_parallel,
        parallel_state,
    )

    init_distributed_environment(1, 0, f"file://{tempfile.mktemp()}", 0, "gloo")
    initialize_model_parallel(1, 1)
    if parallel_state._EP is None:  # only created for a mixture, and the next shape may be one
        parallel_state._EP = parallel_state._TP


def _build(config: Any, stage: int) -> tuple[int, int, dict[str, Any]]:
    """Returns the bytes of parameters and of the encoder, and the KV specs, of one of two stages."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    with set_current_vllm_config(config):
        if parallel_state._PP is None:
            _one_rank()
        group = parallel_state._PP
        assert group is not None
        group.rank_in_group, group.world_size, group.ranks = stage, 2, [0, 1]
        with torch.device("meta"), set_default_torch_dtype(config.model_config.dtype):
            model = initialize_model(config)
        current_platform.update_block_size_for_backend(config)
        specs = {
            name: spec
            for name, layer in config.compilation_config.static_forward_context.items()
            if isinstance(layer, AttentionLayerBase)
            # As the runner does it (gpu_model_runner.py::get_kv_cache_spec@v0.32.0).
            and not getattr(layer, "kv_sharing_target_layer_name", None)
            and (spec := layer.get_kv_cache_spec(config)) is not None
        }
    sizes = {name: each.numel() * each.element_size() for name, each in model.named_parameters()}
    encoder = sum(size for name, size in sizes.items() if _is_encoder(name))
    return sum(sizes.values()) - encoder, encoder, specs


def _is_encoder(name: str) -> bool:
    parts = ("visual", "vision_tower", "vision_model", "vision_encoder", "multi_modal_projector", "mlp1")
    return name.removeprefix("model.").split(".", 1)[0] in parts


def ask_all(names: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the answer for each shape, or `{"refused": reason}`."""
    for shape in SHAPES:
        if names and shape.name not in names:
            continue
        try:
            yield shape.name, ask(shape)
        except Exception as error:  # vLLM's message about a model that it cannot build, as data
            yield shape.name, {"refused": f"{type(error).__name__}: {error}"[:300]}


def render(answers: dict[str, Any]) -> str:
    """Renders the answers as in their file: a line for each shape."""
    lines = ",\n".join(
        f"{json.dumps(name)}: {json.dumps(answers[name], sort_keys=True)}" for name in sorted(answers)
    )
    return f"{{\n{lines}\n}}\n"


def ask_at_once(names: Sequence[str], processes: int, output: Path) -> int:
    """Computes the answers of shapes in several processes. Writes the file after each answer."""
    chosen = [shape.name for shape in SHAPES if not names or shape.name in names]
    parts = [chosen[first::processes] for first in range(min(processes, len(chosen)))]
    answers: dict[str, Any] = {}
    lock = threading.Lock()

    def read(process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                with lock:
                    answers.update(json.loads(line))
                    output.write_text(render(answers))

    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.shapes.oracle", *part], stdout=subprocess.PIPE, text=True
        )
        for part in parts
    ]
    readers = [threading.Thread(target=read, args=(process,)) for process in started]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    codes = [process.wait() for process in started]
    missing = sorted(set(chosen) - set(answers))
    refused = sorted(name for name, answer in answers.items() if "refused" in answer)
    print(
        f"{len(answers)} shapes, of which {len(refused)} refused: {refused}; missing {missing}; codes {codes}"
    )
    return 0 if not missing else 1


def main() -> int:
    """Computes the answers of shapes, and returns 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--output", type=Path, metavar="FILE")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("names", nargs="*")
    arguments = parser.parse_args()
    if arguments.output is not None:
        return ask_at_once(arguments.names, arguments.at_once, arguments.output)
    os.environ.setdefault("VLLM_PLUGINS", "")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from vllm.platforms import current_platform

    from tests.shapes.kernels import cpu_with

    path = RECORDED / f"{current_platform.device_type}.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    with cpu_with(amx=True):
        for name, answer in ask_all(arguments.names):
            sys.stdout.write(json.dumps({name: answer}) + "\n")
            sys.stdout.flush()
            kept[name] = answer
            if arguments.record:
                path.parent.mkdir(exist_ok=True)
                path.write_text(render(kept))
    return 0


if __name__ == "__main__":
    sys.exit(main())
