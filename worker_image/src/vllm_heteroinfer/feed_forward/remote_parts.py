"""Feed-forward parts that other ranks compute, and their checkpoint tensors. PURE."""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model.weights import is_of_encoder
from heteroinfer_contract.plan import Mode, Plan, RankAssignment

_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.(.*)$")
MLP_NAMES: Final = ("mlp", "feed_forward")
"""Names of a dense layer's MLP from hidden states to hidden states, in vLLM 0.32.0's models."""


def layer_of(name: str) -> int | None:
    """Returns the decoder layer of a module or tensor; None if it belongs to no decoder layer."""
    found = None if is_of_encoder(name) else _LAYER.search(f"{name}.")
    return int(found[1]) if found else None


@dataclass(slots=True, kw_only=True)
class RemoteParts:
    """Parts of a rank's model that other ranks compute; collected during the build of the model.

    Attributes:
        experts: layer -> its routed experts (`recording.RemoteExperts`), which other ranks compute.
        mlps: dense layers whose MLP other ranks compute.
    """

    experts: dict[int, Any] = field(default_factory=dict)
    mlps: set[int] = field(default_factory=set)

    def add_experts(self, layer: int, experts: Any) -> None:
        """Adds a layer's routed experts; raises ContractError for a second set, since both might ask."""
        if layer in self.experts:
            raise ContractError(
                f"layer {layer}: got two sets of routed experts, expected one; leave it to the GPU, or use "
                "spec.parallelism.mode: Pipeline"
            )
        self.experts[layer] = experts

    def has(self, tensor: str) -> bool:
        """Returns whether a tensor of the checkpoint belongs to an MLP that other ranks compute."""
        found = _LAYER.search(tensor)
        if found is None or is_of_encoder(tensor):
            return False
        layer, rest = int(found[1]), found[2]
        # Mistral's own files name an MLP feed_forward even if the module has another name.
        return layer in self.mlps and rest.startswith(tuple(f"{name}." for name in MLP_NAMES))


def check_found(remote: RemoteParts, wanted: Iterable[int], model: str) -> None:
    """Raises ContractError unless every planned layer has a part that other ranks can compute."""
    missing = sorted(set(wanted) - set(remote.experts) - remote.mlps)
    if missing:
        raise ContractError(
            f"{model}: got feed-forward ranks for layers {missing}, expected layers with routed experts of "
            f"vLLM's RoutedExperts, or with an MLP named {' or '.join(MLP_NAMES)}; leave these layers to the "
            "GPU, or use spec.parallelism.mode: Pipeline"
        )


def check_plan(plan: Plan) -> None:
    """Raises ContractError for a plan of this mode that is not built yet."""
    if plan.mode is not Mode.FEED_FORWARD:
        return
    if len(plan.stage_ranks) != 1:
        raise ContractError(
            f"got {plan.tensor_parallel_size} x {plan.pipeline_parallel_size} ranks with attention in mode "
            f"{Mode.FEED_FORWARD}, expected one: several GPUs with feed-forward ranks are not built yet; use "
            "one GPU rank, or spec.parallelism.mode: Pipeline"
        )


def check_one_size(hidden: Collection[int], topk: Collection[int]) -> None:
    """Raises ContractError if layers differ in elements or experts per row; a slab needs equal rows."""
    if len(hidden) > 1 or len(topk) > 1:
        raise ContractError(
            f"got layers with rows of {sorted(hidden)} elements and {sorted(topk)} experts a row, "
            "expected one size of both; give feed-forward ranks layers of one kind"
        )


def served_rank(plan: Plan, rank: RankAssignment) -> RankAssignment:
    """Returns the rank that a feed-forward rank serves."""
    return plan.stage(rank.stage)[0]
