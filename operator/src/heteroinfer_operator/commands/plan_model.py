"""Reads the model that `heteroinfer plan` and `new` plan for, in a folder of this machine or on a hub."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.given_options import given_options
from heteroinfer_contract.model_fetch import HUB_SCHEME
from heteroinfer_contract.model_files import has_tokenizer, read_profile
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.api import ModelSpec
from heteroinfer_operator.errors import ModelError
from heteroinfer_operator.local.hub_profile import read_hub_profile

_FILE_SCHEME: Final = "file://"
_OTHER_TOKENIZER: Final = ("--tokenizer", "--skip-tokenizer-init")


def read_model(
    model: ModelSpec, args: Sequence[str], model_dir: Path | None
) -> tuple[ModelProfile, tuple[str, ...]]:
    """Returns the sizes of a model, and notes about its files.

    Args:
        args: arguments of vLLM, which may name another folder for the tokenizer.
        model_dir: folder of the model, instead of its URI.

    Raises:
        ModelError: the model is not on this machine or hub, or cannot be read.
    """
    directory = _local_directory(model.uri, model_dir)
    if directory is None:
        return read_hub_profile(model), ()
    try:
        profile = read_profile(directory)
    except ContractError as error:
        raise ModelError(f"{'--model-dir' if model_dir else 'model.uri'}: {error}") from error
    return profile, _describe_missing_tokenizer(directory, args)


def _local_directory(uri: str, model_dir: Path | None) -> Path | None:
    """Returns the folder of the model on this machine, or None for a model of a hub."""
    if model_dir is not None:
        return model_dir
    if uri.startswith(HUB_SCHEME):
        return None
    if not uri.startswith(_FILE_SCHEME):
        raise ModelError(
            f"model.uri {uri} is not on this machine. Add --model-dir DIR, a folder with a copy of the "
            "model's files"
        )
    return Path(uri.removeprefix(_FILE_SCHEME))


def _describe_missing_tokenizer(directory: Path, args: Sequence[str]) -> tuple[str, ...]:
    """Returns a note if the folder has no tokenizer and no argument names another tokenizer."""
    has_other_tokenizer = any(
        given.may_mean(option) for given in given_options(args) for option in _OTHER_TOKENIZER
    )
    if has_other_tokenizer or has_tokenizer(directory):
        return ()
    note = (
        f"{directory} has no tokenizer (tokenizer.json, or a file of another format), which vLLM's API "
        "server needs to start. Copy the tokenizer of the model into this folder, or add --tokenizer with "
        "another folder to engine.args"
    )
    return (note,)
