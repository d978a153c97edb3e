"""Which models vLLM serves, by the class that their config.json names. Pure.

`listed_architectures` has what vLLM's own registry says; tests/integration/models holds it to that.
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
    """Returns what users should know of the model's class, one line each.

    A class that neither vLLM nor transformers has may come with a plugin in the image, or with the model.

    Raises:
        PlanError: vLLM would end at its start; the message says what can be done.
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
    """Returns whether vLLM serves a model by transformers' class, having none of its own."""
    return architecture in BY_TRANSFORMERS


def _refuse(message: str) -> PlanError:
    return PlanError(message, reason=PlanReason.UNSUPPORTED_MODEL)
