"""`spec.engine`: vLLM's settings that the plan doesn't own. Pure."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from heteroinfer_contract import names
from heteroinfer_operator.api.base import ByteSize, Model, Port, When, map_list
from heteroinfer_operator.api.env_vars import EnvVar
from heteroinfer_operator.api.pod_fields import Image


class DType(StrEnum):
    """Element type of weights and activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"


class EngineSpec(Model):
    """vLLM's settings that the plan doesn't own."""

    image: Image | None = None
    """Worker image; the operator's default if not given."""
    args: Annotated[tuple[Annotated[str, Field(max_length=1024)], ...], Field(max_length=64)] = ()
    """Further options of vLLM; those that the plan owns are refused."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64, json_schema_extra=map_list("name"))] = ()
    """Further environment of every worker."""
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
