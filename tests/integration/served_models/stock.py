"""Generates greedy tokens with stock vLLM in one process without plugins. Runs in the worker's Python.

Imports vLLM inside functions only, after the environment is set.
"""

import json
import os
from typing import Any, Final

ENV: Final = {
    "VLLM_PLUGINS": "",
    # The engine and its only rank run in this process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "CUDA_VISIBLE_DEVICES": "-1",
}


def answer(
    options: dict[str, Any], prompts: list[list[int]], tokens: int, *, at_once: bool
) -> tuple[list[list[int]], float]:
    """Returns the greedy tokens after each prompt, and the smallest margin of all tokens.

    The margin of a token is the difference between its logprob and the second best logprob.

    Args:
        options: options of vLLM's engine.
        prompts: token ids.
        tokens: number of tokens of each answer.
        at_once: whether all prompts are sent at the same time, or one after another.
    """
    import torch

    torch.set_num_threads(1)

    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    assert type(current_platform).__module__ == "vllm.platforms.cpu", current_platform
    if options["dtype"] != "float32":
        # vLLM's router on CPUs rounds the weights of experts to 16 bits, and ours does not (patch cpu_router
        # in docs/contributor/patches.md). Other tests show that ours is right.
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
    """Prints tokens and margin. `argument` has the arguments of `answer` as JSON."""
    assert os.environ["VLLM_PLUGINS"] == ""
    print(json.dumps(answer(**json.loads(argument))), flush=True)
