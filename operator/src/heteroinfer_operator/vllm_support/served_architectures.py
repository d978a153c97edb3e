"""Checks whether vLLM serves a model, by the classes in its config.json, and loads it as it is. Pure.

`listed_architectures` copies vLLM's registry; tests/integration/models compares both.
"""

from functools import partial

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.errors import PlanError, PlanReason
from heteroinfer_operator.vllm_support.architectures import SILENT_LOSSES
from heteroinfer_operator.vllm_support.every_reason import every_reason
from heteroinfer_operator.vllm_support.listed_architectures import (
    BY_TRANSFORMERS,
    CAUSAL_TYPES,
    ENDINGS,
    GENERATES,
    OTHER_TASKS,
    TEXT_BY_CONFIG,
    UNTIL,
)


def class_names(profile: ModelProfile) -> tuple[str, ...]:
    """Returns the model's class, and the class of the language model inside if its own config decides it.

    A class is "" if the config names none and vLLM finds none by the type.
    """
    if profile.architecture not in TEXT_BY_CONFIG or not profile.text_type:
        return (profile.architecture,)
    inside = profile.text_architecture or CAUSAL_TYPES.get(profile.text_type, "")
    return profile.architecture, inside


def check_files(profile: ModelProfile) -> None:
    """Checks that vLLM loads the model's files as they are.

    Raises:
        PlanError: its load would fail, or drop a part of the model without an error.
    """
    loss = SILENT_LOSSES.get(profile.architecture)
    lines = [f"model: {fault}. Use a copy whose config.json and files agree" for fault in profile.faults]
    if loss:
        name = profile.architecture
        lines.append(f"model: vLLM 0.32 gives wrong answers with {name}: {loss}. Use another model")
    if lines:
        raise _refuse("\n".join(lines))


def check_architecture(profile: ModelProfile) -> tuple[str, ...]:
    """Checks that vLLM serves the model's classes. Returns notes for the user, one line each.

    A class missing in vLLM and transformers may come with a plugin in the image, or with the model.

    Raises:
        PlanError: vLLM would fail at its start; the message contains a fix.
    """
    if not profile.architecture:
        raise _refuse(
            "config.json of the model: got no architectures, by which vLLM finds no class that generates "
            "text; add the list with the name of the model's class, or take the model from who made it"
        )
    return every_reason(*(partial(_check_class, name, profile) for name in class_names(profile)))


def _check_class(name: str, profile: ModelProfile) -> tuple[str, ...]:
    if name in GENERATES or name in BY_TRANSFORMERS:
        return ()
    if not name:
        raise _refuse(
            f"model: {profile.architecture} has a language model of type {profile.text_type}, for which "
            "vLLM 0.32 has no class, and its text_config names no architectures. Use another model, or an "
            "image whose vLLM has that class"
        )
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
