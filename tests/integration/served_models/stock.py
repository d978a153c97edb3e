"""Greedy tokens of stock vLLM, one process without any plugin; in the worker's Python.

Imports vLLM inside functions only: under the environment that it is called with.
"""

import json
import os
from typing import Any, Final

ENV: Final = {
    "VLLM_PLUGINS": "",
    # The engine and its only rank are this process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
}


def answer(
    options: dict[str, Any], prompts: list[list[int]], tokens: int, *, at_once: bool
) -> tuple[list[list[int]], float]:
    """Returns the greedy tokens after each prompt, and the least margin of any of them.

    The margin of a token is the difference between its logprob and that of the second best token.

    Args:
        options: of vLLM's engine.
        prompts: token ids.
        tokens: of each answer.
        at_once: whether all are asked at the same time, or one after the other.
    """
    import torch

    torch.set_num_threads(1)

    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    assert type(current_platform).__module__ == "vllm.platforms.cpu", current_platform
    if options["dtype"] != "float32":
        # vLLM's router on CPUs rounds the weights of experts to 16 bits, ours does not (patch cpu_router in
        # docs/contributor/patches.md). Tests of their own show that ours is right.
        from vllm_heteroinfer.patches import cpu_router

        cpu_router.install()
    engine = LLM(enforce_eager=True, **options)
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=2)
    batches = [prompts] if at_once else [[prompt] for prompt in prompts]
    answers = [
        done.outputs[0]
        for batch in batches
        for done in engine.generate([{"prompt_token_ids": prompt} for prompt in batch], sampling)
    ]
    margins: list[float] = []
    for each in answers:
        for best_tokens in each.logprobs:
            best, second = sorted((token.logprob for token in best_tokens.values()), reverse=True)[:2]
            margins.append(best - second)
    return [list(each.token_ids) for each in answers], min(margins)


def main(argument: str) -> None:
    """Prints the tokens and the margin that `argument`, the keywords of `answer` in JSON, asks for."""
    assert os.environ["VLLM_PLUGINS"] == ""
    print(json.dumps(answer(**json.loads(argument))), flush=True)
