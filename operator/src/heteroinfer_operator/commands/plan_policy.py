"""Finds the settings of a resource that an installation with the user's chart values refuses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import yaml
from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError
from pydantic.alias_generators import to_camel

from heteroinfer_operator.api import HeteroInferenceSpec
from heteroinfer_operator.errors import HeteroInferError, PlanError
from heteroinfer_operator.manifests.addressing import build_host_path_error
from heteroinfer_operator.reconcile import Allowed

_HOW_TO_CREATE: Final = "Create the file with `helm get values RELEASE --all -o yaml`"


class ChartValues(BaseModel):
    """The chart values that restrict resources or give them defaults."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel)

    allow_host_paths: bool = False
    allow_remote_code: bool = False
    allowed_arguments: tuple[str, ...] = ()
    allowed_environment: tuple[str, ...] = ()
    allowed_annotations: tuple[str, ...] = ()
    pod_resources: dict[str, JsonValue] = {}
    allowed_worker_images: tuple[str, ...] = ()
    allowed_host_paths: tuple[str, ...] = ()
    allowed_service_accounts: tuple[str, ...] = ()


def read_chart_values(file: str | None) -> ChartValues:
    """Returns the chart values in a file, or the chart's defaults.

    Without a file, host paths are allowed, because the resource may be for `heteroinfer up` on this machine.

    Raises:
        HeteroInferError: the file cannot be read or does not hold chart values.
    """
    if file is None:
        return ChartValues.model_validate({"allowHostPaths": True})
    try:
        stored = yaml.safe_load(Path(file).read_text())
        return ChartValues.model_validate({} if stored is None else stored)
    except OSError as error:
        raise HeteroInferError(
            f"--chart-values: cannot read {file} ({error.strerror}). {_HOW_TO_CREATE}", reason="Usage"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise HeteroInferError(
            f"--chart-values: {file} does not contain values of the chart ({_describe_error(error)}). "
            f"{_HOW_TO_CREATE}",
            reason="Usage",
        ) from error


def _describe_error(error: Exception) -> str:
    """Returns the first problem of a file of chart values, in one line."""
    if isinstance(error, ValidationError):
        problem = error.errors()[0]
        return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
    return " ".join(str(error).split())


def find_refused(values: ChartValues, spec: HeteroInferenceSpec) -> Iterator[PlanError]:
    """Yields an error for each setting of the spec that an operator with these values refuses."""
    allowed = Allowed(
        remote_code=values.allow_remote_code,
        arguments=values.allowed_arguments,
        environment=values.allowed_environment,
        annotations=values.allowed_annotations,
        images=values.allowed_worker_images,
        host_paths=values.allowed_host_paths,
        service_accounts=values.allowed_service_accounts,
    )
    yield from allowed.find_all_forbidden(spec)
    if spec.model.uri.startswith("file://") and not values.allow_host_paths:
        yield build_host_path_error(spec)
