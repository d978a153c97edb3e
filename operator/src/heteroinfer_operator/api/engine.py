"""`spec.engine`: vLLM's settings that the plan doesn't own. Pure."""

from enum import StrEnum
from typing import Annotated, ClassVar, Final

from pydantic import Field

from heteroinfer_contract import names
from heteroinfer_operator.api.base import (
    ByteSize,
    Model,
    ObjectName,
    Port,
    ValidationRule,
    When,
    cel_text,
    map_list,
)
from heteroinfer_operator.api.env_vars import EnvVar
from heteroinfer_operator.api.pod_fields import Image, KeyOfObject


class DType(StrEnum):
    """Element type of weights and activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class ConfigMapKey(Model):
    """A key of a ConfigMap of the same namespace."""

    name: ObjectName
    """Name of the ConfigMap."""
    key: KeyOfObject
    """Key in it."""


class EngineFile(Model):
    """A small file of the engine: a chat template, or a tool parser's."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", min_length=1, max_length=64)]
    """Name of the file, in /etc/heteroinfer/files."""
    config_map_key_ref: ConfigMapKey
    """Where its content comes from; a ConfigMap holds at most 1 MiB."""


def _missing_file(engine: "EngineSpec") -> str:
    """Returns the first argument that names a file in the folder of `files` that is not there, or ""."""
    files = tuple(f"{_FOLDER}{each.name}" for each in engine.files)
    return next((arg for arg in engine.args if _FOLDER in arg and not arg.endswith(files)), "")


_FOLDER: Final = f"{names.FILES_MOUNT}/"
_IS_MISSING: Final = (
    f"a.contains({cel_text(_FOLDER)}) && !(has(self.files) && "
    f"self.files.exists(f, a.endsWith({cel_text(_FOLDER)} + f.name)))"
)


class EngineSpec(Model):
    """vLLM's settings that the plan doesn't own."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel=f"!has(self.args) || !self.args.exists(a, {_IS_MISSING})",
            message=f"args: a file in {names.FILES_MOUNT} must be one of engine.files; add it there, or "
            "correct its name",
            holds=lambda engine: not _missing_file(engine),
            got="%s",
            got_cel=(f"self.args.filter(a, {_IS_MISSING})[0]",),
            got_values=lambda engine: (_missing_file(engine),),
        ),
    )

    image: Image | None = None
    """Worker image; the operator's default if not given."""
    args: Annotated[tuple[Annotated[str, Field(max_length=1024)], ...], Field(max_length=64)] = ()
    """Further options of vLLM; those that the plan owns are refused."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64, json_schema_extra=map_list("name"))] = ()
    """Further environment of every worker."""
    files: Annotated[tuple[EngineFile, ...], Field(max_length=16, json_schema_extra=map_list("name"))] = ()
    """Small files of ConfigMaps for every worker, in /etc/heteroinfer/files; options in args name them."""
    port: Port = names.DEFAULT_API_PORT
    """OpenAI API."""
    dtype: DType = DType.AUTO
    """auto takes the checkpoint's own."""
    max_model_len: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Longest prompt plus output, in tokens; the lesser of the model's and 8192 if not given."""
    eager: When = When.AUTO
    """Always runs without CUDA graphs and torch.compile; Auto decides by device and mode."""
    shm_size: ByteSize = "8Gi"
    """Size of /dev/shm; counts as memory of the pod."""
