"""Computes the answers of one device alone, with which every topology is compared.

Run with the worker's Python, each in its own process. The first command writes greedy tokens, in float32 on
the CPU; the second one uses stock vLLM on the GPU (or --device cpu):

    python -m tests.gpu.reference transformers MODEL OUT
    python -m tests.gpu.reference vllm MODEL OUT --dtype float32

Without a plan in the environment, our plugin does nothing (vllm_heteroinfer/__init__.py). With VLLM_PLUGINS=,
vLLM does not load it at all. Imports torch and vLLM inside functions only.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.integration.worker.groups import REPOSITORY, WORKER_PYTHON
from tests.models import PROMPTS

MAX_TOKENS = 64
"""Number of tokens of each answer."""
ALL_PROMPTS = (
    *PROMPTS,
    "그룹은 모델 하나를 함께 제공하는 파드의 모음입니다.",
    "for step in range(32): token = model.forward(tokens, positions)",
    "When a rank is lost the whole group ends, and it starts again as the next epoch. Why?",
    "x",
)
TIMEOUT_S = 400.0
MIN_LEAD = 1e-3
"""Smallest lead of the best token's logit. Other orders of float32 sums change logits by less."""
MAX_MODEL_LEN = 512
BLOCK_SIZE = 32
KV_CACHE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer to one prompt.

    Attributes:
        prompt: token ids of the prompt.
        tokens: greedy token ids.
        logprobs: logprob of each of `tokens`.
        best: for each position of prompt + tokens except the first, the best token and its logprob, given
            all tokens before. Empty if it was not requested.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    best: tuple[tuple[int, float], ...] = ()


def read(path: Path) -> tuple[Answer, ...]:
    """Reads the answers of a reference process, by prompt."""
    return tuple(
        Answer(
            prompt=tuple(raw["prompt"]),
            tokens=tuple(raw["tokens"]),
            logprobs=tuple(raw["logprobs"]),
            best=tuple((token, logprob) for token, logprob in raw["best"]),
        )
        for raw in json.loads(path.read_text())
    )


def make(
    kind: str, model: Path, out: Path, *options: str, env: Mapping[str, str], give_up: threading.Event
) -> tuple[Answer, ...]:
    """Runs a reference process, and returns its answers.

    Raises:
        RuntimeError: the process failed, took longer than TIMEOUT_S, or was given up. The message has its
            log.
    """
    command = [str(WORKER_PYTHON), "-m", "tests.gpu.reference", kind, str(model), str(out), *options]
    log = out.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env={**os.environ, **env},
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while (code := process.poll()) is None and time.monotonic() < deadline:
                if give_up.wait(0.1):
                    break
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
    if code != 0:
        ended = f"was not done within {TIMEOUT_S} s" if code is None else f"exited {code}"
        raise RuntimeError(f"{' '.join(command)} {ended}:\n{log.read_text(errors='replace')[-4000:]}")
    return read(out)


def by_transformers(model: Path) -> list[Answer]:
    """Returns greedy answers of transformers in float32 on the CPU, one prompt after another.

    Raises:
        RuntimeError: two tokens are so close that the order of a sum decides. Use another seed.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    answers = []
    for prompt in ALL_PROMPTS:
        prompt_ids: list[int] = tokenizer(prompt).input_ids
        tokens: list[int] = []
        logprobs: list[float] = []
        with torch.inference_mode():
            out = network(torch.tensor([prompt_ids]), use_cache=True)
            while len(tokens) < MAX_TOKENS:
                logits = out.logits[0, -1]
                best = torch.topk(logits, 2)
                lead = float(best.values[0] - best.values[1])
                if lead < MIN_LEAD:
                    raise RuntimeError(
                        f"{prompt!r} + {len(tokens)} tokens: got a lead of {lead}, expected {MIN_LEAD}"
                    )
                tokens.append(int(best.indices[0]))
                logprobs.append(float(torch.log_softmax(logits, 0)[tokens[-1]]))
                out = network(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values)
        answers.append(Answer(prompt=tuple(prompt_ids), tokens=tuple(tokens), logprobs=tuple(logprobs)))
    return answers


def by_stock_vllm(model: Path, dtype: str, device: str) -> list[Answer]:
    """Returns greedy answers of stock vLLM on one device, all prompts at the same time."""
    import vllm

    # A backend that multiplies float32 in float32 (facts: Hybrid on a real GPU).
    exact = {"attention_backend": "TRITON_ATTN"} if device == "gpu" and dtype == "float32" else {}
    llm = vllm.LLM(
        model=str(model),
        dtype=dtype,
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=16,
        max_num_batched_tokens=MAX_MODEL_LEN,
        block_size=BLOCK_SIZE,
        kv_cache_memory_bytes=KV_CACHE_BYTES,
        gpu_memory_utilization=0.05,  # other processes share the device
        enable_prefix_caching=False,
        **exact,
    )
    tokenizer = llm.get_tokenizer()
    prompts = [list(tokenizer(prompt).input_ids) for prompt in ALL_PROMPTS]
    greedy = vllm.SamplingParams(
        temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1, detokenize=False
    )
    outputs = [out.outputs[0] for out in llm.generate(_batch(prompts), greedy, use_tqdm=False)]
    forced = vllm.SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    texts = [[*prompt, *out.token_ids] for prompt, out in zip(prompts, outputs, strict=True)]
    scored = llm.generate(_batch(texts), forced, use_tqdm=False)
    return [
        Answer(
            prompt=tuple(prompt),
            tokens=tuple(out.token_ids),
            logprobs=tuple(
                by_token[token].logprob for token, by_token in zip(out.token_ids, out.logprobs, strict=True)
            ),
            best=tuple(_best(position) for position in score.prompt_logprobs[1:]),
        )
        for prompt, out, score in zip(prompts, outputs, scored, strict=True)
    ]


def _batch(prompts: Sequence[Sequence[int]]) -> Any:
    return [{"prompt_token_ids": list(prompt)} for prompt in prompts]


def _best(position: Any) -> tuple[int, float]:
    return next((token, found.logprob) for token, found in position.items() if found.rank == 1)


def main() -> None:
    """Computes the answers, and writes them as JSON; see the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.reference")
    parser.add_argument("kind", choices=["transformers", "vllm"])
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", choices=["cpu", "gpu"], default="gpu")
    args = parser.parse_args()
    if args.kind == "transformers":
        answers = by_transformers(args.model)
    else:
        answers = by_stock_vllm(args.model, args.dtype, args.device)
    args.out.write_text(json.dumps([asdict(answer) for answer in answers]))


if __name__ == "__main__":
    main()
