"""Checks whether vLLM has the classes that a model's config.json names, and loads its files correctly. Pure.

`listed_architectures` copies vLLM's registry; tests/integration/models compares both.
"""

from functools import partial

from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.errors import PlanError, PlanReason
from heteroinfer_operator.vllm_support.architectures import SILENT_LOSSES
from heteroinfer_operator.vllm_support.combined_checks import run_all_checks
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
    """Returns the name of the model's class and, for some models, the class of the language model inside.

    For models in TEXT_BY_CONFIG, vLLM finds the second class by the config of the language model. A name is
    "" if the config names no class, and vLLM has no class for the type of the language model.
    """
    if profile.architecture not in TEXT_BY_CONFIG or not profile.text_type:
        return (profile.architecture,)
    language_model = profile.text_architecture or CAUSAL_TYPES.get(profile.text_type, "")
    return profile.architecture, language_model


def check_files(profile: ModelProfile) -> None:
    """Checks that vLLM loads the model's files correctly.

    Raises:
        PlanError: loading would fail, or drop a part of the model without an error.
    """
    loss = SILENT_LOSSES.get(profile.architecture)
    problems = [f"model: {fault}. Use a copy whose config.json and files agree" for fault in profile.faults]
    if loss:
        name = profile.architecture
        problems.append(f"model: vLLM 0.32 gives wrong answers with {name}: {loss}. Use another model")
    if problems:
        raise _build_error("\n".join(problems))


def check_architecture(profile: ModelProfile) -> tuple[str, ...]:
    """Checks that vLLM serves the model's classes. Returns notes for the user, one line each.

    A class that vLLM and transformers lack only causes a note: a plugin in the image or the model itself may
    contain it.

    Raises:
        PlanError: vLLM would fail at its start; the message contains a fix.
    """
    if not profile.architecture:
        raise _build_error(
            "model: config.json must have the field 'architectures', a list with the name of the model's "
            "class in vLLM. Add the field, or use the original files of the model"
        )
    return run_all_checks(*(partial(_check_class, name, profile) for name in class_names(profile)))


def _check_class(name: str, profile: ModelProfile) -> tuple[str, ...]:
    """Raises PlanError if vLLM serves no model of this class.

    Returns a note if vLLM lacks the class, but a plugin or the model itself may contain it.
    """
    if name in GENERATES or name in BY_TRANSFORMERS:
        return ()
    if not name:
        raise _build_error(
            f"model: {profile.architecture} contains a language model of type {profile.text_type}. vLLM 0.32 "
            "has no class for this type, and 'text_config' in config.json has no field 'architectures'. Use "
            "another model, or an image whose vLLM has such a class"
        )
    # vLLM gives an unknown class the task of the first ending that matches the name.
    assumed_task = next((task for ending, task in ENDINGS.items() if name.endswith(ending)), None)
    if name in OTHER_TASKS or assumed_task == "pooling":
        raise _build_error(
            f"model: must generate text, but vLLM uses {name} for embeddings or scores, or as the draft of "
            "another model. Use another model"
        )
    if name in UNTIL:
        raise _build_error(
            f"model: vLLM no longer serves {name} (the last version with this class was {UNTIL[name]}). "
            "Use another model"
        )
    note = (
        f"model: neither vLLM nor transformers has the class {name}. The model starts only if a plugin in "
        "the image or the model's own code (--trust-remote-code) contains this class"
    )
    return (note,)


def uses_transformers_class(architecture: str) -> bool:
    """Reports whether vLLM serves a model with its Transformers modeling backend, not its own class."""
    return architecture in BY_TRANSFORMERS


def _build_error(message: str) -> PlanError:
    return PlanError(message, reason=PlanReason.UNSUPPORTED_MODEL)
