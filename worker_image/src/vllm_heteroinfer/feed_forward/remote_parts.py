"""Interface of experts and MLPs that other ranks compute, while the asking rank builds its model. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.model.weights import is_of_encoder
from heteroinfer_contract.plan import Mode, Plan
from vllm_heteroinfer.feed_forward.recipe import ExpertParameter, LayerRecipe

_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """Returns the decoder layer of a module or tensor; None if it belongs to no decoder layer."""
    match = None if is_of_encoder(name) else _LAYER.search(f"{name}.")
    return int(match[1]) if match else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedParameter:
    """A parameter of the recipe, and the tensors of the model that it consists of.

    Attributes:
        parts: these tensors, in the order of their elements in the parameter.
        shape: shape of the parameter. The first dimension counts experts.
    """

    parts: tuple[Any, ...]
    shape: Sequence[int]


class RemotePart(Protocol):
    """The experts or the MLP of a remote layer, which feed-forward ranks compute."""

    @property
    def targets(self) -> Mapping[str, RecordedParameter]:
        """The parameters, which have no memory. Those of an MLP have the names of an expert's parameters."""

    def begin(self) -> None:
        """Prepares the model for its loader, whose copies to `targets` are recorded."""

    def end(self) -> None:
        """Removes the parameters from the model, so that the part has no weights in this rank."""

    def describe(self, parameters: Mapping[str, ExpertParameter]) -> LayerRecipe:
        """Returns the layer's recipe with these parameters."""


def check_found(found_layers: Iterable[int], planned_layers: Iterable[int], model: str) -> None:
    """Raises ContractError if a planned layer has no experts and no MLP that other ranks can compute.

    Args:
        found_layers: layers whose experts or MLP were found in the model.
        planned_layers: layers that the plan gives to feed-forward ranks.
        model: name of the model, for the message.
    """
    missing = sorted(set(planned_layers) - set(found_layers))
    if missing:
        raise ContractError(
            f"{model}: feed-forward ranks cannot compute layers {missing}, because vLLM builds them neither "
            "with its class RoutedExperts nor as an MLP of its linear layers. Lower feedForward.layers "
            "until the plan leaves these layers on the GPU, or use parallelism.mode: Pipeline"
        )


def check_plan(plan: Plan) -> None:
    """Raises ContractError for a plan of mode FeedForward whose ranks with attention are in several pods."""
    if plan.mode is Mode.FEED_FORWARD and len({rank.pod for rank in plan.stage_ranks}) != 1:
        raise ContractError(
            f"Plan.ranks: mode {Mode.FEED_FORWARD} must have all ranks with attention in one pod (got "
            f"{len({rank.pod for rank in plan.stage_ranks})} pods). Use one pod, or spec.parallelism.mode: "
            "Pipeline"
        )
