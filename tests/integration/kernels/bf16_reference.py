"""Prints transformers' bf16 logprobs of given texts.

Run `python -m tests.integration.kernels.bf16_reference MODEL` with the worker's Python. It reads texts (lists
of token ids) as JSON from stdin. The last line has, for each position of each text except the first, the best
token and its logprob.
"""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main(model: str) -> None:
    """Computes and prints the logprobs; see the module."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    answers = []
    with torch.inference_mode():
        for text in json.load(sys.stdin):
            logprobs = torch.log_softmax(network(torch.tensor([text])).logits[0, :-1].float(), -1)
            best = logprobs.max(-1)
            answers.append(list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
