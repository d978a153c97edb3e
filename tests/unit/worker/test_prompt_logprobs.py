"""Log-probabilities of a prompt are computed for a few tokens at a time, and for each token once."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_heteroinfer.rank.worker.prompt_logprobs import PromptLogprobsInParts

ROWS = 3


class Runner:
    """A runner whose method follows vLLM's rules for the position in a prompt and for its end."""

    def __init__(self, prompts: dict[str, int]) -> None:
        self.prompts = prompts
        self.num_prompt_logprobs = dict.fromkeys(prompts, 0)
        self.requests = {name: SimpleNamespace(num_computed_tokens=0) for name in prompts}
        self.scored: dict[str, list[int]] = {name: [] for name in prompts}
        self.begin: dict[str, int] = {}
        self.max_rows = 0

    def _get_prompt_logprobs_dict(self, hidden_states: list[Any], tokens: dict[str, int]) -> dict[str, Any]:
        ended = {}
        for name in list(self.num_prompt_logprobs):
            if name not in tokens:
                continue
            left = self.prompts[name] - self.requests[name].num_computed_tokens - 1
            rows = min(tokens[name], left)
            if tokens[name] > left:
                ended[name] = self.scored[name]
                del self.num_prompt_logprobs[name]
            begin = self.begin[name]
            self.scored[name] += hidden_states[begin : begin + max(rows, 0)]
            self.max_rows = max(self.max_rows, rows)
        return ended


@pytest.mark.parametrize("step", [1, 2, 3, 4, 7, 20])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 6, 7, 8, 13])
def test_each_token_is_scored_once_and_only_a_few_tokens_at_a_time(length: int, step: int) -> None:
    prompts = {"a": length, "b": 5}
    runner = Runner(prompts)
    score: Any = PromptLogprobsInParts(runner, ROWS)
    found: dict[str, Any] = {}
    while runner.num_prompt_logprobs:
        tokens = {n: min(step, prompts[n] - r.num_computed_tokens) for n, r in runner.requests.items()}
        hidden: list[Any] = []
        for name, count in tokens.items():
            runner.begin[name] = len(hidden)
            hidden += range(runner.requests[name].num_computed_tokens, prompts[name])[:count]
        found |= score(hidden, tokens)
        for name, count in tokens.items():
            runner.requests[name].num_computed_tokens += count
    assert found == {name: list(range(size - 1)) for name, size in prompts.items()}
    assert runner.max_rows <= ROWS
