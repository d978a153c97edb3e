"""A whole HeteroInference: from parsed YAML or JSON to models, or to errors that name the field. Pure."""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args

from pydantic import ConfigDict, Field, ValidationError

from heteroinfer_operator.api.base import Model, ObjectName, ValidationRule
from heteroinfer_operator.api.spec import HeteroInferenceSpec
from heteroinfer_operator.api.status import HeteroInferenceStatus
from heteroinfer_operator.errors import SpecError

ModelT = TypeVar("ModelT", bound=Model)

MAX_NAME_LENGTH: Final = 40
"""A pod's host name is NAME-GROUP-EPOCH-POD and has at most 63 characters: this leaves 20 digits."""


class Metadata(Model):
    """What we read of a resource's metadata; the rest is Kubernetes' own."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the resource."""
    namespace: ObjectName = "default"
    """Its namespace."""


class HeteroInference(Model):
    """One model served by groups of ranks on GPUs and CPUs."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            cel=f"self.metadata.name.size() <= {MAX_NAME_LENGTH}",
            message=f"metadata.name: expected at most {MAX_NAME_LENGTH} characters, since pod names, "
            "NAME-GROUP-EPOCH-POD, have at most 63; choose a shorter name",
            holds=lambda resource: len(resource.metadata.name) <= MAX_NAME_LENGTH,
            got="%d characters",
            got_cel=("self.metadata.name.size()",),
            got_values=lambda resource: (len(resource.metadata.name),),
        ),
        ValidationRule(
            cel="self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            message="metadata.name: expected lower-case letters, digits and '-', beginning with a letter, "
            "since it becomes a Service's name; choose another name",
            holds=lambda resource: (
                re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", resource.metadata.name) is not None
            ),
            got="%s",
            got_cel=("self.metadata.name",),
            got_values=lambda resource: (resource.metadata.name,),
        ),
    )

    api_version: Literal["heteroinfer.dev/v1alpha1"] = "heteroinfer.dev/v1alpha1"
    """Version of this schema."""
    kind: Literal["HeteroInference"] = "HeteroInference"
    """Kind of the resource."""
    metadata: Metadata
    """Name and namespace."""
    spec: HeteroInferenceSpec
    """What the user asks for."""
    status: HeteroInferenceStatus | None = None
    """What is, as the operator last saw it."""

    @property
    def served_name(self) -> str:
        """Returns the model's name in the OpenAI API."""
        return self.spec.model.served_name or self.metadata.name


def parse_resource(raw: Mapping[str, Any]) -> HeteroInference:
    """Returns the resource that parsed YAML or JSON holds.

    Raises:
        SpecError: it isn't one; a line for each problem, with the field's path.
    """
    return _parse(HeteroInference, raw, "")


def parse_spec(raw: Mapping[str, Any]) -> HeteroInferenceSpec:
    """Returns the spec that a resource's `spec` holds; raises SpecError as parse_resource."""
    return _parse(HeteroInferenceSpec, raw, "spec")


def parse_status(raw: Mapping[str, Any] | None) -> HeteroInferenceStatus:
    """Returns the status that a resource's `status` holds, an empty one for none; raises SpecError."""
    return _parse(HeteroInferenceStatus, raw or {}, "status")


def _parse(cls: type[ModelT], raw: Mapping[str, Any], where: str) -> ModelT:
    # Through JSON, since strict models take enums and lists only from JSON.
    try:
        return cls.model_validate_json(json.dumps(_without_nulls(raw, cls)))
    except ValidationError as error:
        raise SpecError(_problem(where, problem) for problem in _causes(error)) from None


def _without_nulls(raw: object, cls: type[Model] | None) -> object:
    """Returns JSON values without nulls in maps and in fields that `cls` knows.

    The API server takes such a null for an absent field; one in an unknown field is an
    unknown field. Mappings that aren't dicts (kopf's views) become dicts.
    """
    if isinstance(raw, Mapping):
        fields = {} if cls is None else {field.alias: field for field in cls.model_fields.values()}
        return {
            key: _without_nulls(value, _model_of(fields[key].annotation) if key in fields else None)
            for key, value in raw.items()
            if value is not None or (cls is not None and key not in fields)
        }
    if isinstance(raw, list | tuple):
        return [_without_nulls(value, cls) for value in raw]
    return raw


def _model_of(annotation: object) -> type[Model] | None:
    """Returns the model inside an annotation such as `tuple[RoleSpec, ...] | None`, or None."""
    if isinstance(annotation, type) and issubclass(annotation, Model):
        return annotation
    return next((model for arg in get_args(annotation) if (model := _model_of(arg)) is not None), None)


def _causes(error: ValidationError) -> list[Any]:
    # A list with a bad item is also reported as too short: leave out what an inner error explains.
    found = error.errors()
    locations = [problem["loc"] for problem in found]
    return [
        problem
        for problem in found
        if not any(
            len(location) > len(problem["loc"]) and location[: len(problem["loc"])] == problem["loc"]
            for location in locations
        )
    ]


def _problem(where: str, error: Mapping[str, Any]) -> str:
    path = where
    for part in error["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else str(part)
    if error["type"] == "extra_forbidden":
        return f"{path}: unknown field; check its spelling against `heteroinfer crd` or remove it"
    if error["type"] == "missing":
        return f"{path}: missing; add it"
    got = (
        ""
        if error["type"] == "rule" or isinstance(error["input"], dict | list)
        else f": got {error['input']!r}"
    )
    return f"{path or 'resource'}: {error['msg']}{got}"
