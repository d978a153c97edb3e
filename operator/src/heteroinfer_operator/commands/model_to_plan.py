"""The model that `heteroinfer plan` plans for: in a directory of this machine, or on a hub."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from heteroinfer_contract.errors import ContractError
from heteroinfer_contract.given_options import given_options
from heteroinfer_contract.model_fetch import HUB_SCHEME
from heteroinfer_contract.model_files import has_tokenizer, read_profile
from heteroinfer_contract.model_profile import ModelProfile
from heteroinfer_operator.api import HeteroInference
from heteroinfer_operator.errors import ModelError
from heteroinfer_operator.local.hub_profile import read_hub_profile

_FILE_SCHEME: Final = "file://"
_OTHER_TOKENIZER: Final = ("--tokenizer", "--skip-tokenizer-init")


def read_model(resource: HeteroInference, model_dir: Path | None) -> tuple[ModelProfile, tuple[str, ...]]:
    """Returns the sizes of a resource's model, and what users should know of its files, one line each.

    Args:
        model_dir: the model's directory, instead of the resource's URI.

    Raises:
        ModelError: the model is not here, or cannot be read.
    """
    directory = _directory(resource, model_dir)
    if directory is None:
        return read_hub_profile(resource.spec.model), ()
    try:
        profile = read_profile(directory)
    except ContractError as error:
        raise ModelError(f"{'--model-dir' if model_dir else 'model.uri'}: {error}") from error
    return profile, _missing_tokenizer(directory, resource.spec.engine.args)


def _directory(resource: HeteroInference, model_dir: Path | None) -> Path | None:
    """Returns where the model is on this machine, or None for a model of a hub."""
    uri = resource.spec.model.uri
    if model_dir is not None:
        return model_dir
    if uri.startswith(HUB_SCHEME):
        return None
    if not uri.startswith(_FILE_SCHEME):
        raise ModelError(
            f"model.uri: got {uri}, which is not on this machine; give its files with --model-dir DIR"
        )
    return Path(uri.removeprefix(_FILE_SCHEME))


def _missing_tokenizer(directory: Path, args: Sequence[str]) -> tuple[str, ...]:
    """Returns a note if a directory that was read holds no tokenizer, and no argument names another."""
    elsewhere = any(given.may_be(option) for given in given_options(args) for option in _OTHER_TOKENIZER)
    if elsewhere or has_tokenizer(directory):
        return ()
    note = (
        f"{directory} holds no tokenizer (tokenizer.json, or a file of another kind), without which the API "
        "server cannot start; copy it from where the model was published, or name a folder that has one by "
        "--tokenizer in engine.args"
    )
    return (note,)
