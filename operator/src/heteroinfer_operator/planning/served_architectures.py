"""Which models vLLM serves, by the class that their config.json names. Pure.

The table beside it is what vLLM's own registry says; tests/integration/models holds it to that.
"""

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.errors import PlanError, PlanReason


def check_architecture(profile: ModelProfile) -> tuple[str, ...]:
    """Returns what users should know of the model's class, one line each.

    A class that neither vLLM nor transformers has may come with a plugin in the image, or with the model.

    Raises:
        PlanError: vLLM would end at its start; the message says what can be done.
    """
    name, table = profile.architecture, _table()
    if not name:
        raise _refuse(
            "config.json of the model: got no architectures, by which vLLM finds no class that generates "
            "text; add the list with the name of the model's class, or take the model from who made it"
        )
    if name in table["generates"] or name in table["by_transformers"]:
        return ()
    runner = next((each for ending, each in table["endings"].items() if name.endswith(ending)), "")
    if name in table["other_tasks"] or runner == "pooling":
        raise _refuse(
            f"the model is a {name}, which vLLM serves for embeddings or scores, or as the draft of another "
            "model; expected one that generates text"
        )
    if name in table["until"]:
        raise _refuse(
            f"the model is a {name}, which vLLM served until {table['until'][name]} and serves no more; take "
            "another model"
        )
    return (
        f"neither vLLM nor transformers has a {name}: without a plugin or code of its own it cannot start",
    )


def is_by_transformers(architecture: str) -> bool:
    """Returns whether vLLM serves a model by transformers' class, having none of its own."""
    return architecture in _table()["by_transformers"]


@cache
def _table() -> Mapping[str, Any]:
    text = resources.files("heteroinfer_operator.planning").joinpath("served_architectures.json").read_text()
    return dict(json.loads(text))


def _refuse(message: str) -> PlanError:
    return PlanError(message, reason=PlanReason.UNSUPPORTED_MODEL)
