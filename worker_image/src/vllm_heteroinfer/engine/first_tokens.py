"""Runs a first request through every rank before a group accepts clients.

Warm-up runs without a KV cache. A model whose attention fails only with a KV cache would become Ready and
then fail at the first request of a client. Imports vLLM inside functions.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from vllm_heteroinfer.group.engine_calls import FIRST_REQUEST

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

_logger = logging.getLogger(__name__)

_PROMPT_TOKENS: Final = 3
_NEW_TOKENS: Final = 2
"""The step of the prompt generates the first token, and a decode step generates the second token."""


async def generate_first_tokens(client: "EngineClient") -> None:
    """Generates two tokens with all ranks. Neither vLLM's metrics nor the ranks' metrics count the request.

    Raises:
        RuntimeError: the engine answered with another number of tokens.
        Exception: a rank failed. vLLM raises the error, and the rank reports its own failure.
    """
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    prompt: Any = {"prompt_token_ids": list(range(_PROMPT_TOKENS))}
    tokens = 0
    with _without_metrics(client):
        async for output in client.generate(prompt, params, FIRST_REQUEST):
            tokens = len(output.outputs[0].token_ids)
    if tokens != _NEW_TOKENS:
        raise RuntimeError(
            f"the self-test request at the start must return {_NEW_TOKENS} tokens (got {tokens}). "
            "Read the logs of the ranks"
        )
    _logger.info("the group generated its first %d tokens", tokens)


@contextmanager
def _without_metrics(client: Any) -> Iterator[None]:
    """Keeps a request out of vLLM's metrics.

    Source: vllm/v1/engine/async_llm.py::AsyncLLM._run_output_handler@v0.32.0, which records into the logger
    that this list holds.
    """
    loggers = client._logger_ref
    stat_logger = loggers[0]
    loggers[0] = None
    try:
        yield
    finally:
        loggers[0] = stat_logger
