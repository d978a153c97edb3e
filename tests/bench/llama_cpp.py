"""Measures decoding by llama.cpp with experts on the CPU (`--n-cpu-moe`), for comparison with HeteroInfer.

    python -m tests.bench.llama_cpp --bench PATH [--layers 24] [--off 24] [--threads 13,14,16] [--tokens 128]

Writes a GGUF of a shape with random bf16 weights (as many bytes per element as in HeteroInfer), and lets
llama-bench decode one request with it. llama.cpp's router chooses as many experts per token as the model
requires. llama.cpp is not a dependency of the project: build `llama-bench` from the sources in
llama-cpp-python's sdist with `-DGGML_CUDA=ON`, and pass its path. `gguf` writes the file. `--folder` needs
space for the model: half a gigabyte, and 1.2 GB per layer for Qwen3-30B-A3B.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.bench.model_shapes import SHAPES

SEED_BYTES = 64 << 20
SMALL = 0.02
"""Standard deviation of random weights: so small that 24 layers do not overflow."""
LIMIT_S = 400.0


def tensors(config: Mapping[str, Any], layers: int) -> Iterator[tuple[str, tuple[int, ...], bool]]:
    """Yields name, shape (outputs first), and whether in bf16 (else float32), of a qwen3moe's tensors."""
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["num_experts"]
    head = config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield "token_embd.weight", (config["vocab_size"], hidden), True
    yield "output_norm.weight", (hidden,), False
    yield "output.weight", (config["vocab_size"], hidden), True
    for layer in range(layers):
        name = f"blk.{layer}"
        kept: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "attn_q_norm": (head,),
            "attn_k_norm": (head,),
            "ffn_norm": (hidden,),
            "ffn_gate_inp": (experts, hidden),
        }
        large: dict[str, tuple[int, ...]] = {
            "attn_q": (q, hidden),
            "attn_k": (kv, hidden),
            "attn_v": (kv, hidden),
            "attn_output": (hidden, q),
            "ffn_gate_exps": (experts, width, hidden),
            "ffn_up_exps": (experts, width, hidden),
            "ffn_down_exps": (experts, hidden, width),
        }
        for part, shape in [*kept.items(), *large.items()]:
            yield f"{name}.{part}.weight", shape, part in large


def write_model(path: Path, config: Mapping[str, Any], layers: int) -> None:
    """Writes a GGUF with random weights. The bytes of one block are repeated."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_context_length(8192)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_count(config["num_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    draw = np.random.default_rng(0)
    block = (draw.standard_normal(SEED_BYTES // 4, dtype=np.float32) * SMALL).view(np.uint32)
    words = ((block + 0x8000) >> 16).astype(np.uint16)
    given = [*tensors(config, layers)]
    for name, shape, is_bf16 in given:
        kind = gguf.GGMLQuantizationType.BF16 if is_bf16 else gguf.GGMLQuantizationType.F32
        count = int(np.prod(shape))
        stored = (*shape[:-1], shape[-1] * 2) if is_bf16 else shape
        dtype: Any = np.uint8 if is_bf16 else np.float32
        writer.add_tensor_info(name, stored, np.dtype(dtype), count * (2 if is_bf16 else 4), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape, is_bf16 in given:
        count = int(np.prod(shape))
        if is_bf16:
            writer.write_tensor_data(np.resize(words, count))
        elif "norm" in name:
            writer.write_tensor_data(np.ones(shape, dtype=np.float32))
        else:
            writer.write_tensor_data(np.resize(block.view(np.float32), count).reshape(shape))
    writer.close()


def bench(options: argparse.Namespace, model: Path, off: int) -> list[dict[str, Any]]:
    """Runs llama-bench, and returns its measurements."""
    command = [str(options.bench), "-m", str(model), "-ngl", "99", "-ncmoe", str(off), "-lm", "none"]
    command += ["-t", options.threads, "-p", "0", "-n", str(options.tokens), "-r", "3", "-o", "json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise SystemExit(f"llama-bench exited {done.returncode}:\n{done.stderr[-3000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def main() -> int:
    """Prints a row for each number of threads."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.llama_cpp")
    parser.add_argument("--bench", type=Path, required=True, help="path of llama-bench")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--off", type=int, default=24)
    parser.add_argument("--threads", default="13,14,16")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"))
    parser.add_argument("--keep", action="store_true", help="keep the model's file for another run")
    options = parser.parse_args()
    path = options.folder / f"{options.shape}-{options.layers}.gguf"
    try:
        if not path.exists():
            start = time.monotonic()
            write_model(path, SHAPES[options.shape], options.layers)
            print(
                f"{path.stat().st_size / 1e9:.1f} GB written in {time.monotonic() - start:.0f} s", flush=True
            )
        print("| layers' experts on the CPU | threads | tokens/s | ms a step |\n|---|---|---|---|")
        for row in bench(options, path, options.off):
            rate, spread = row["avg_ts"], row["stddev_ts"]
            print(f"| {options.off} | {row['n_threads']} | {rate:.2f} ± {spread:.2f} | {1e3 / rate:.2f} |")
    finally:
        if not options.keep:
            path.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
