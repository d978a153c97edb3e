"""`spec.engine`: settings of vLLM that the plan does not choose. Pure."""

from enum import StrEnum
from typing import Annotated, ClassVar, Final

from pydantic import AfterValidator, Field

from heteroinfer_contract import names
from heteroinfer_operator.api.base import (
    ByteSize,
    Duration,
    Model,
    Port,
    ValidationRule,
    When,
    cel_text,
    duration_rule,
    map_list,
)
from heteroinfer_operator.api.env_vars import ConfigMapKey, EnvVar
from heteroinfer_operator.api.pod_fields import Image


class DType(StrEnum):
    """Element type of weights and activations."""

    AUTO = "auto"
    CAPITAL_AUTO = "Auto"
    """Synonym of AUTO, with a capital like other constants of the resource. Validation converts it."""
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


def _normalize_auto(dtype: DType) -> DType:
    """Returns DType.AUTO for both spellings of auto."""
    return DType.AUTO if dtype is DType.CAPITAL_AUTO else dtype


class EngineFile(Model):
    """A small file in every worker, such as a chat template or a tool parser."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", min_length=1, max_length=64)]
    """Name of the file in the folder /etc/heteroinfer/files."""
    config_map_key_ref: ConfigMapKey
    """Key of a ConfigMap with the content of the file, at most 1 MiB."""


def _missing_file(engine: "EngineSpec") -> str:
    """Returns the first argument that names a file in FILES_MOUNT that `engine.files` lacks, or ""."""
    known_paths = tuple(f"{_FOLDER}{file.name}" for file in engine.files)
    return next((arg for arg in engine.args if _FOLDER in arg and not arg.endswith(known_paths)), "")


_FOLDER: Final = f"{names.FILES_MOUNT}/"
_IS_MISSING: Final = (
    f"a.contains({cel_text(_FOLDER)}) && !(has(self.files) && "
    f"self.files.exists(f, a.endsWith({cel_text(_FOLDER)} + f.name)))"
)


class EngineSpec(Model):
    """Settings of vLLM that the plan does not choose."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            field="args",
            cel=f"!has(self.args) || !self.args.exists(a, {_IS_MISSING})",
            message=f"must not name a file in {names.FILES_MOUNT} that engine.files lacks",
            fix="Add the file to engine.files, or correct the path in the argument",
            holds=lambda engine: not _missing_file(engine),
            got="%s",
            got_cel=(f"self.args.filter(a, {_IS_MISSING})[0]",),
            got_values=lambda engine: (_missing_file(engine),),
        ),
        duration_rule("maxTimeBetweenTokens", "max_time_between_tokens", least="10ms", most="10m"),
    )

    image: Image | None = None
    """Container image of the workers. Default: the image for the role's device in the chart's
    workerImages."""
    args: Annotated[tuple[Annotated[str, Field(max_length=1024)], ...], Field(max_length=64)] = ()
    """Further command-line options of vLLM. The operator refuses options that the plan sets, and options that
    neither HeteroInfer nor the chart's allowedArguments allows. Default: none."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64, json_schema_extra=map_list("name"))] = ()
    """Further environment variables of every worker. HeteroInfer or the chart's allowedEnvironment must allow
    their names. Default: none."""
    files: Annotated[tuple[EngineFile, ...], Field(max_length=16, json_schema_extra=map_list("name"))] = ()
    """Small files from ConfigMaps, in the folder /etc/heteroinfer/files of every worker. Options in args can
    name them. Default: none."""
    port: Port = names.DEFAULT_API_PORT
    """TCP port of the OpenAI API in the pods."""
    dtype: Annotated[DType, AfterValidator(_normalize_auto)] = DType.AUTO
    """Element type of weights and activations. Auto or auto: the type of the checkpoint, but bfloat16 if the
    group has CPU ranks and weights in 4 bits (AWQ, GPTQ, int4)."""
    max_model_len: Annotated[int, Field(ge=1, le=16_777_216)] | None = None
    """Maximum number of tokens of a request, prompt and output together. Default: 8192, or the model's limit
    if that is lower."""
    max_batched_tokens: Annotated[int, Field(ge=2048, le=65536)] | None = None
    """Maximum number of tokens of a step, of all requests together. A longer prompt takes several steps. With
    a larger value, long prompts take fewer steps, and running requests wait longer between tokens. Default:
    8,192 without CPU ranks, 2,048 with CPU ranks, and up to 16,384 in mode FeedForward if memory and
    predicted times allow."""
    max_time_between_tokens: Duration | None = None
    """Limit of the time between two tokens of a request while vLLM computes the prompts of other requests.
    The plan reduces the tokens of a step until each step is predicted to keep the limit. Long prompts then
    take more steps, so their first token comes later. Default: no limit."""
    eager: When = When.AUTO
    """Controls whether vLLM runs without CUDA graphs and torch.compile. Auto: CPU ranks run without them. GPU
    ranks run with them, unless GPU and CPU ranks split the same layers. Always: all ranks run without them.
    Never: CPU ranks use torch.compile, too; GPU ranks run as with Auto."""
    shm_size: ByteSize = "8Gi"
    """Size of /dev/shm in each pod, at most the memory limit of the role. The content of /dev/shm counts as
    memory of the pod."""
