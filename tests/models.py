"""Makes a small Llama-shaped model with random weights and a trained tokenizer, and its expected tokens.

Run it with the worker's Python, which has torch and transformers. The first command makes the model in DIR;
the second one prints transformers' greedy tokens as JSON:

    python -m tests.models DIR [--layers 8] [--seed 0] [...]
    python -m tests.models reference DIR

A model is built once for each recipe and kept in the cache folder; its expected tokens are kept in the
model's folder. Imports torch, transformers and tokenizers inside functions only, so that tests can read
`PROMPTS` and `cache_dir` without these packages.
"""

import argparse
import dataclasses
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROMPTS = (
    "Hello world",
    "이종 하드웨어에서 모델 하나를 실행합니다.",
    "def init_device(self):",
    "A GPU rank and a CPU rank form one group, and every token passes through both of them.",
)
"""Prompts of the references: English, Korean, code, and a longer one."""

REFERENCE_TOKENS = 32
"""Number of tokens of each reference."""

REFERENCE_FILE = "reference.json"

SPECIAL_TOKENS = ("<s>", "</s>", "<pad>")

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

CORPUS = """\
One model is served by one engine whose ranks sit on graphics cards and on the cores of ordinary
machines. A group is the set of pods that serves one copy of the model. A role is a list of alike
pods. A stage holds whole layers, and hidden states pass from one stage to the next one.
The leader is the pod of rank zero: it runs the scheduler and the server that answers requests.
Decoding reads every weight once in each step, and so a processor adds capacity and not speed.
A plan says who is which rank, on which device, with which layers, before any pod exists.
When a rank is lost the whole group ends, and it starts again as the next epoch, from the plan.
Hello, world. How are you today? The quick brown fox jumps over the lazy dog near the river.
def init_device(self): return self.rank, self.stage, self.device, self.layers[first:last]
for step in range(32): token = model.forward(tokens, positions); tokens.append(token)
이종 하드웨어에서 모델 하나를 실행합니다. 그래픽 카드가 부족하면 일반 서버의 메모리를 빌려 씁니다.
그룹은 모델 하나를 함께 제공하는 파드의 모음입니다. 각 단계는 전체 레이어를 가지고 있습니다.
한 단계의 결과는 다음 단계로 전달되고, 마지막 단계가 다음 토큰을 고릅니다.
계획은 파드가 만들어지기 전에 각 랭크의 위치와 장치와 레이어를 정합니다.
랭크 하나가 멈추면 그룹 전체가 멈추고, 같은 계획으로 다시 시작합니다.
안녕하세요. 오늘은 날씨가 좋습니다. 서울에서 부산까지 기차로 두 시간 반이 걸립니다.
"""
"""Text for the training of the tokenizer; written for this file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """All settings that distinguish one test model from another.

    Attributes:
        layers: number of transformer layers.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        heads: query heads.
        kv_heads: key/value heads.
        vocab_size: rows of the embedding, including special tokens and bytes.
        seed: seed of the random weights.
        initializer_range: standard deviation of the weights. 0.15 is wide enough that the best token leads
            clearly: greedy answers do not hang on the rounding of float32. Rounding to bf16 alone then moves
            the best token's logprob by up to 0.26 (95 %), at 0.05 by 0.02.
    """

    layers: int = 8
    hidden_size: int = 256
    intermediate_size: int = 768
    heads: int = 8
    kv_heads: int = 4
    vocab_size: int = 512
    seed: int = 0
    initializer_range: float = 0.15

    def key(self) -> str:
        """Returns 16 hex digits of a hash of the recipe and of this file, which makes models from it."""
        recipe = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(recipe.encode() + Path(__file__).read_bytes()).hexdigest()[:16]


def cache_dir() -> Path:
    """Returns the folder of everything that is made or downloaded once and kept."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("HETEROINFER_CACHE") or Path(base) / "heteroinfer")


def make_model(directory: Path, *, layers: int = 8, seed: int = 0, **sizes: Any) -> Path:
    """Writes the model of this recipe into `directory`, and returns `directory`.

    Args:
        directory: made if needed. Files with the same names are replaced.
        layers: number of transformer layers.
        seed: seed of the random weights.
        **sizes: other fields of Recipe.
    """
    cached = cached_model(Recipe(layers=layers, seed=seed, **sizes))
    directory.mkdir(parents=True, exist_ok=True)
    for source in sorted(cached.iterdir()):
        shutil.copyfile(source, directory / source.name)
        (directory / source.name).chmod(0o644)
    return directory


def cached_model(recipe: Recipe) -> Path:
    """Returns the folder of this recipe's model in the cache, and makes it if needed. Do not write there."""
    target = cache_dir() / "models" / recipe.key()
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        _write_tokenizer(made, recipe)
        _write_weights(made, recipe)
        for file in made.iterdir():
            file.chmod(0o644)
        made.chmod(0o755)
        try:
            made.rename(target)
        except OSError:
            if not target.is_dir():  # otherwise another process has made the same model in the meantime
                raise
    return target


def reference(model_dir: Path, prompts: Sequence[str] = PROMPTS) -> dict[str, dict[str, list[int]]]:
    """Returns the greedy tokens of transformers in float32, by prompt: prompt_token_ids and token_ids.

    End-of-sequence tokens do not end an answer, so send requests with `ignore_eos`. The tokens are kept in
    the model's folder with the hash of the weights.
    """
    kept = model_dir / REFERENCE_FILE
    weights = hashlib.sha256()
    for file in sorted(model_dir.glob("*.safetensors")):
        weights.update(file.read_bytes())
    if kept.exists():
        known = json.loads(kept.read_text())
        if known["weights"] == weights.hexdigest() and set(prompts) <= set(known["answers"]):
            return {prompt: known["answers"][prompt] for prompt in prompts}
    answers = _greedy(model_dir, prompts)
    kept.write_text(json.dumps({"weights": weights.hexdigest(), "answers": answers}, ensure_ascii=False))
    kept.chmod(0o644)
    return answers


def _greedy(model_dir: Path, prompts: Sequence[str]) -> dict[str, dict[str, list[int]]]:
    """Generates greedy tokens. Raises if the two best tokens are so close that rounding could swap them."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    answers = {}
    for prompt in prompts:
        prompt_ids: list[int] = tokenizer(prompt).input_ids
        token_ids: list[int] = []
        with torch.inference_mode():
            out = model(torch.tensor([prompt_ids]), use_cache=True)
            while len(token_ids) < REFERENCE_TOKENS:
                logits = out.logits[0, -1]
                best = torch.topk(logits, 2).values
                if float(best[0] - best[1]) < 1e-3:
                    raise RuntimeError(
                        f"{model_dir}: the two best tokens after {prompt!r} + {len(token_ids)} are too "
                        "close: float32 sums in another order could swap them. Use another seed"
                    )
                token_ids.append(int(logits.argmax()))
                out = model(torch.tensor([token_ids[-1:]]), past_key_values=out.past_key_values)
        answers[prompt] = {"prompt_token_ids": prompt_ids, "token_ids": token_ids}
    return answers


def _write_tokenizer(directory: Path, recipe: Recipe) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS.splitlines(),
        trainers.BpeTrainer(
            vocab_size=recipe.vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    begin, end, pad = SPECIAL_TOKENS
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=begin, eos_token=end, pad_token=pad
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(directory)


def _write_weights(directory: Path, recipe: Recipe) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(recipe.seed)
    config: Any = LlamaConfig(
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        vocab_size=recipe.vocab_size,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        tie_word_embeddings=False,
        initializer_range=recipe.initializer_range,
    )
    model = LlamaForCausalLM(config).float()
    model.save_pretrained(directory)


def main(argv: Sequence[str]) -> int:
    """Makes a model, or prints a model's expected tokens."""
    if argv[:1] == ["reference"]:
        parser = argparse.ArgumentParser(prog="python -m tests.models reference")
        parser.add_argument("model_dir", type=Path)
        print(json.dumps(reference(parser.parse_args(argv[1:]).model_dir), ensure_ascii=False))
        return 0
    parser = argparse.ArgumentParser(prog="python -m tests.models")
    parser.add_argument("directory", type=Path)
    for field in dataclasses.fields(Recipe):
        kind = type(field.default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, default=field.default)
    args = vars(parser.parse_args(argv))
    print(make_model(args.pop("directory"), **args))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
