"""Log-probabilities of a prompt's tokens, computed for a few tokens at a time.

vLLM computes them for all tokens of a step together. 2,048 tokens and a vocabulary of 262,144 entries took
5 GiB (H100, 2026-11-26). Plans do not reserve that memory, so a single request could end a rank.
Source: vllm/v1/worker/gpu_model_runner.py::GPUModelRunner._get_prompt_logprobs_dict@v0.32.0.
"""

from collections.abc import Mapping
from typing import Any


def compute_prompt_logprobs_in_parts(runner: Any, rows: int) -> None:
    """Replaces a runner's `_get_prompt_logprobs_dict`, so that it computes a prompt in parts.

    Args:
        rows: limit of tokens in a part. The plan reserves memory for the logits of `max_num_seqs` tokens,
            which a step samples.
    """
    runner._get_prompt_logprobs_dict = PromptLogprobsInParts(runner, rows)


class PromptLogprobsInParts:
    """A runner's `_get_prompt_logprobs_dict` that calls vLLM's method for each part of a prompt.

    vLLM's method continues a prompt where the previous step ended, so each part looks like a step.
    """

    def __init__(self, runner: Any, rows: int) -> None:
        """Keeps vLLM's method, which this object calls for at most `rows` tokens of a prompt."""
        self._runner = runner
        self._rows = rows
        self._compute_part = runner._get_prompt_logprobs_dict

    def __call__(self, hidden_states: Any, num_scheduled_tokens: Mapping[str, int]) -> dict[str, Any]:
        """Returns the log-probabilities of each prompt that ends with this step, by request.

        Args:
            hidden_states: [tokens of the step, hidden size]
            num_scheduled_tokens: tokens of the step, by request.
        """
        logprobs: dict[str, Any] = {}
        for request_id in list(self._runner.num_prompt_logprobs):
            if request_id in num_scheduled_tokens:
                logprobs |= self._compute_request(hidden_states, request_id, num_scheduled_tokens[request_id])
        return logprobs

    def _compute_request(self, hidden_states: Any, request_id: str, tokens: int) -> dict[str, Any]:
        """Returns a request's log-probabilities, or {} if its prompt continues in the next step.

        Moves the request's position to the start of each part, where vLLM's method continues, and then
        restores the position.
        """
        request = self._runner.requests[request_id]
        first_token = request.num_computed_tokens
        logprobs: dict[str, Any] = {}
        try:
            for offset in range(0, tokens, self._rows):
                request.num_computed_tokens = first_token + offset
                part = {request_id: min(self._rows, tokens - offset)}
                logprobs = self._compute_part(hidden_states[offset:], part)
                if logprobs:  # the prompt ends in this part
                    break
        finally:
            request.num_computed_tokens = first_token
        return logprobs
