"""Sampling by one rank for its tensor-parallel group, and seeded requests on CPU ranks.

In vLLM every tensor-parallel rank samples and continues with its own token
(vllm/v1/worker/gpu_model_runner.py::GPUModelRunner._bookkeeping_sync@v0.32.0). Random streams and
roundings differ between devices, so ranks would silently continue with different texts.
"""

import contextlib
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput

from vllm_heteroinfer.distributed.bridge import Bridge


def share_samples(runner: Any, bridge: Bridge, *, leads: bool) -> None:
    """Replaces a runner's `_sample`, so that every rank continues with the first rank's tokens.

    Args:
        leads: whether this rank is the first rank of the bridge.
    """
    runner._sample = _SharedSamples(runner, bridge, leads=leads)


class _SharedSamples:
    """A runner's `_sample` by which the group's first rank samples and broadcasts its tokens.

    Every step of the last stage ends with this broadcast, even if all its tokens are discarded (the first
    chunks of a prompt). So this broadcast detects ranks that disagree on the content of a step.
    """

    def __init__(self, runner: Any, bridge: Bridge, *, leads: bool) -> None:
        """Keeps the runner's own `_sample`, which the first rank calls."""
        self._runner = runner
        self._bridge = bridge
        self._leads = leads
        self._sample = runner._sample
        self._digest = 0

    def __call__(self, logits: torch.Tensor, spec_decode_metadata: Any) -> SamplerOutput:
        """Returns the first rank's tokens. Only the first rank, which answers the engine, returns logprobs.

        Args:
            logits: [num_requests, vocabulary], on every rank.
            spec_decode_metadata: always None, because groups refuse speculative decoding.
        """
        if self._leads:
            output: SamplerOutput = self._sample(logits, spec_decode_metadata)
            self._bridge.broadcast(output.sampled_token_ids, src=0)
            self._add_to_history(output.sampled_token_ids)
            return output
        token_ids = torch.empty((logits.shape[0], 1), dtype=torch.int32, device=logits.device)
        token_ids = self._bridge.broadcast(token_ids, src=0)
        self._add_to_history(token_ids)
        return SamplerOutput(sampled_token_ids=token_ids, logprobs_tensors=None)

    def _add_to_history(self, token_ids: torch.Tensor) -> None:
        """Adds the step's tokens and request ids to the digest that later collectives compare."""
        order = "\0".join(self._runner.input_batch.req_ids).encode()
        self._digest = zlib.crc32(token_ids.cpu().numpy().tobytes(), zlib.crc32(order, self._digest))
        self._bridge.set_history(self._digest)


@contextlib.contextmanager
def without_discarded_seeds(input_batch: Any, discarded: Any) -> Iterator[None]:
    """Hides the generators of requests whose sample of this step is discarded.

    vLLM undoes the last draw of such a request by moving the generator's offset. A CPU generator has no
    offset and raises, so a seeded request with a prompt of several chunks would end the group. A hidden
    generator draws nothing, which has the same effect.
    Source: vllm/v1/worker/gpu_model_runner.py::GPUModelRunner._bookkeeping_sync@v0.32.0.

    Args:
        discarded: whether a row's sample is discarded, by row.
    """
    generators = input_batch.generators
    hidden = {row: generators.pop(row) for row in list(generators) if discarded[row]}
    try:
        yield
    finally:
        generators.update(hidden)
