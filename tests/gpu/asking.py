"""Sends requests to a group for the tests, all prompts at the same time."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.gpu.reference import MAX_TOKENS, Answer
from tests.integration.worker.groups import Group

BF16_GAP, BF16_SHARE = 0.05, 0.95
"""Share of positions at which the best token's logprob must be close to stock vLLM's on one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """A group's answer to one prompt.

    Attributes:
        tokens: token ids.
        logprobs: logprob of each token.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


def generate(group: Group, prompts: Sequence[Sequence[int]], **options: Any) -> list[Generated]:
    """Returns answers of MAX_TOKENS tokens. They are greedy unless `options` say otherwise."""

    def one(prompt: Sequence[int]) -> Generated:
        choice = group.choice(prompt, **{"max_tokens": MAX_TOKENS, "logprobs": 1, **options})
        return Generated(
            tokens=tuple(choice["token_ids"]), logprobs=tuple(choice["logprobs"]["token_logprobs"])
        )

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


def score(group: Group, texts: Sequence[Sequence[int]], *, best: int = 0) -> list[list[dict[int, float]]]:
    """Returns the logprobs at each position of each text except the first, by token.

    The logprobs depend on all tokens before the position. They are of the text's token and of the `best` most
    likely tokens. Such requests do not read the prefix cache
    (vllm/sampling_params.py::SamplingParams@v0.32.0).
    """

    def one(text: Sequence[int]) -> list[dict[int, float]]:
        choice = group.choice(text, max_tokens=1, prompt_logprobs=best)
        return [
            {int(token): found["logprob"] for token, found in position.items()}
            for position in choice["prompt_logprobs"][1:]
        ]

    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(one, texts))


def bf16_gaps(stock: Sequence[Answer], got: Sequence[Sequence[Mapping[int, float]]]) -> list[float]:
    """Returns the differences of logprobs from stock vLLM's, of stock's best token at every position."""
    return [
        abs(position.get(token, float("-inf")) - logprob)
        for answer, positions in zip(stock, got, strict=True)
        for (token, logprob), position in zip(answer.best, positions, strict=True)
    ]


def texts_of(answers: Sequence[Answer]) -> list[list[int]]:
    """Returns prompt and tokens of each answer as one text."""
    return [[*answer.prompt, *answer.tokens] for answer in answers]
