"""Runs the warm-up of a leader and of a follower on a small torch module, in the worker's Python.

`python -m tests.integration.worker.following_probe MISTAKE...` prints as JSON, by mistake, the calls of both.
The follower's forward makes the mistake (`twice`, `short`), or the leader announces `more` at the end; with
`none` there is no mistake.
"""

import json
import sys
from typing import Any

import torch

from vllm_heteroinfer.rank.worker import following


class Model(torch.nn.Module):
    """A model with the interface by which vLLM calls its models."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[tuple[str, int]] = []

    def forward(self, *, input_ids: Any, positions: torch.Tensor) -> torch.Tensor:
        self.ran.append(("forward", positions.shape[-1]))
        return torch.zeros(positions.shape[-1], 2)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        self.ran.append(("logits", hidden_states.shape[0]))
        return hidden_states


def follow(mistake: str) -> Any:
    """Runs leader and follower with a mistake. Returns their calls, and the reported error."""
    leader, follower = Model(), Model()
    announced: list[bytes] = []
    with following.leading(announced.append, leader, "warm-up"):
        hidden = leader(input_ids=None, positions=torch.zeros(3, 5))  # as for models with three positions
        leader.compute_logits(hidden[:2])
        leader(input_ids=None, positions=torch.zeros(16))
    assert not {"forward", "compute_logits"} & vars(leader).keys(), "the instance is unchanged"
    leader(input_ids=None, positions=torch.zeros(1))
    assert len(announced) == 4, "nothing is announced after the end"
    if mistake == "more":
        del announced[1]

    def forward(tokens: int) -> None:
        follower(input_ids=None, positions=torch.zeros(tokens - (mistake == "short")))
        if mistake == "twice":
            follower(input_ids=None, positions=torch.zeros(tokens))

    messages = iter(announced)
    error = ""
    try:
        following.follow(
            lambda: next(messages),
            model=follower,
            forward=forward,
            logits=lambda rows: follower.compute_logits(torch.zeros(rows, 2)),
            phase="warm-up",
        )
    except following.FollowError as raised:
        error = str(raised)
    return {"leader": leader.ran[:-1], "follower": follower.ran, "error": error}


if __name__ == "__main__":
    print(json.dumps({mistake: follow(mistake) for mistake in sys.argv[1:]}))
