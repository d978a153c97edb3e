"""Finds weights of a feed-forward rank that a checkpoint lacks, and that would stay uninitialized. PURE."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from heteroinfer_contract.errors import ContractError
from vllm_heteroinfer.feed_forward.columns import kind_of
from vllm_heteroinfer.feed_forward.remote_parts import layer_of


class ExpertNumbers:
    """The numbers of the experts in a checkpoint, by the names of their tensors."""

    def __init__(self) -> None:
        self._of_kind: defaultdict[str, set[int]] = defaultdict(set)

    def add(self, name: str) -> None:
        """Notes a tensor."""
        found = kind_of(name)
        if found is not None:
            self._of_kind[found[0]].add(found[1])

    def lacking(self, totals: Mapping[int | None, int]) -> list[str]:
        """Returns tensors missing for some experts of a layer and present for others."""
        return [
            kind.replace("*", str(number))
            for kind, numbers in self._of_kind.items()
            for number in range(totals.get(layer_of(kind), 0))
            if number not in numbers
        ]


def unfilled(model: Any, parts: Iterable[Any], filled: Collection[str]) -> list[str]:
    """Returns the parameters of a model's parts that have memory but got no weights from the checkpoint.

    Args:
        filled: names of loaded parameters, as the model's `load_weights` returns them.
    """
    own = {parameter for part in parts for parameter in part.parameters() if not parameter.is_meta}
    return [name for name, parameter in model.named_parameters() if parameter in own and name not in filled]


def check(model: str, lacking: Collection[str]) -> None:
    """Raises ContractError if weights are lacking."""
    if lacking:
        others = f" and {len(lacking) - 1} others" if len(lacking) > 1 else ""
        raise ContractError(
            f"{model}: got no weights for {min(lacking)}{others}, expected those of all experts and columns "
            "that config.json says; download the model again"
        )
