"""Finds weights of a feed-forward rank that a checkpoint lacks, and that would stay uninitialized. PURE."""

from collections.abc import Collection, Iterable
from typing import Any

from heteroinfer_contract.errors import ContractError


def unfilled(model: Any, parts: Iterable[Any], filled: Collection[str]) -> list[str]:
    """Returns the parameters of a model's parts that have memory but got no weights from the checkpoint.

    Args:
        filled: names of loaded parameters, as the model's `load_weights` returns them.
    """
    own = {parameter for part in parts for parameter in part.parameters() if not parameter.is_meta}
    return [name for name, parameter in model.named_parameters() if parameter in own and name not in filled]


def check(model: str, lacking: Collection[str]) -> None:
    """Raises ContractError if weights are missing."""
    if lacking:
        others = f" and {len(lacking) - 1} others" if len(lacking) > 1 else ""
        raise ContractError(
            f"{model}: weights are missing for {min(lacking)}{others}, although config.json requires them. "
            "Download the model again"
        )
