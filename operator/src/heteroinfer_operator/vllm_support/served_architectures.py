"""Checks whether vLLM serves a model, by the class in its config.json. Pure.

`listed_architectures` copies vLLM's registry; tests/integration/models compares both.
"""

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.errors import PlanError, PlanReason
from heteroinfer_operator.vllm_support.listed_architectures import (
    BY_TRANSFORMERS,
    ENDINGS,
    GENERATES,
    OTHER_TASKS,
    UNTIL,
)


def check_architecture(profile: ModelProfile) -> tuple[str, ...]:
    """Checks that vLLM serves the model's class. Returns notes for the user, one line each.

    A class missing in vLLM and transformers may come with a plugin in the image, or with the model.

    Raises:
        PlanError: vLLM would fail at its start; the message contains a fix.
    """
    name = profile.architecture
    if not name:
        raise _refuse(
            "config.json of the model: got no architectures, by which vLLM finds no class that generates "
            "text; add the list with the name of the model's class, or take the model from who made it"
        )
    if name in GENERATES or name in BY_TRANSFORMERS:
        return ()
    runner = next((each for ending, each in ENDINGS.items() if name.endswith(ending)), "")
    if name in OTHER_TASKS or runner == "pooling":
        raise _refuse(
            f"the model is a {name}, which vLLM serves for embeddings or scores, or as the draft of another "
            "model; expected one that generates text"
        )
    if name in UNTIL:
        raise _refuse(
            f"the model is a {name}, which vLLM served until {UNTIL[name]} and serves no more; take "
            "another model"
        )
    return (
        f"neither vLLM nor transformers has a {name}: without a plugin or code of its own it cannot start",
    )


def is_by_transformers(architecture: str) -> bool:
    """Returns whether vLLM serves a model by transformers' class, because it has no own class."""
    return architecture in BY_TRANSFORMERS


def _refuse(message: str) -> PlanError:
    return PlanError(message, reason=PlanReason.UNSUPPORTED_MODEL)
