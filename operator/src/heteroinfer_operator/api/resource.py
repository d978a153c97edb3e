"""Converts a whole HeteroInference from JSON values to models, or to errors with the field's path. Pure."""

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args

from pydantic import ConfigDict, Field, ValidationError

from heteroinfer_operator import quantity
from heteroinfer_operator.api.base import (
    AS_STORED,
    PROBLEMS,
    RULE_ERROR,
    Model,
    ObjectName,
    ValidationRule,
)
from heteroinfer_operator.api.role import Resources
from heteroinfer_operator.api.spec import HeteroInferenceSpec, LifecycleSpec
from heteroinfer_operator.api.status import HeteroInferenceStatus
from heteroinfer_operator.errors import SpecError

ModelT = TypeVar("ModelT", bound=Model)

MAX_NAME_LENGTH: Final = 40
"""Longest name of a resource: a pod's host name, NAME-GROUP-EPOCH-POD, has at most 63 characters. These are
40 characters of NAME, 3 hyphens and 20 digits."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ResourceKey:
    """Namespace and name of a HeteroInference."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class Metadata(Model):
    """The fields of metadata that the operator reads."""

    model_config = ConfigDict(extra="ignore")

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the resource."""
    namespace: ObjectName = "default"
    """Namespace of the resource."""


class HeteroInference(Model):
    """One model served by groups of ranks on GPUs and CPUs."""

    rules: ClassVar[tuple[ValidationRule, ...]] = (
        ValidationRule(
            field="metadata",
            cel=f"self.metadata.name.size() <= {MAX_NAME_LENGTH}",
            message=f"name must have at most {MAX_NAME_LENGTH} characters, because pod names, "
            "NAME-GROUP-EPOCH-POD, have at most 63",
            fix="Choose a shorter name",
            holds=lambda resource: len(resource.metadata.name) <= MAX_NAME_LENGTH,
            got="%d characters",
            got_cel=("self.metadata.name.size()",),
            got_values=lambda resource: (len(resource.metadata.name),),
        ),
        ValidationRule(
            field="metadata",
            cel="self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
            message="name must consist of lower-case letters, digits and '-', and start with a letter, "
            "because it becomes the name of a Service",
            fix="Choose another name",
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
    """Name and namespace of the resource."""
    spec: HeteroInferenceSpec
    """Desired state: the model, the pods that serve it, and how they run."""
    status: HeteroInferenceStatus | None = None
    """State that the operator observed last."""

    @property
    def served_name(self) -> str:
        """Name of the model in the OpenAI API."""
        return self.spec.model.served_name or self.metadata.name


MAX_SPEC_LENGTH: Final = 256 * 1024
"""Longest spec, in bytes of JSON. The limit leaves room in the objects that contain the spec: the resource,
a ConfigMap, and pods, which have parts of it."""


def parse_resource(raw: Mapping[str, Any]) -> HeteroInference:
    """Returns the resource from parsed YAML or JSON.

    Raises:
        SpecError: the resource is invalid; the message has a line with the field's path for each problem.
    """
    resource = _parse(HeteroInference, raw, "")
    _check_spec_length(raw["spec"])
    return resource


def parse_spec(raw: Mapping[str, Any]) -> HeteroInferenceSpec:
    """Returns the spec from a resource's `spec`; raises SpecError like parse_resource."""
    spec = _parse(HeteroInferenceSpec, raw, "spec")
    _check_spec_length(raw)
    return spec


_PATTERN_ERROR: Final = "string_pattern_mismatch"
"""Type of pydantic's error for a text that does not match a pattern."""


def _check_spec_length(spec: Mapping[str, Any]) -> None:
    """Raises SpecError if the spec is too long for the objects that contain it."""
    spec_length = _json_length(spec)
    if spec_length <= MAX_SPEC_LENGTH:
        return
    length_by_part = {name: _json_length(part) for name, part in spec.items() if name != "roles"}
    length_by_part |= {f"roles[{i}]": _json_length(role) for i, role in enumerate(spec["roles"])}
    longest_part = max(length_by_part, key=lambda name: length_by_part[name])
    problem = (
        f"spec: must be at most {MAX_SPEC_LENGTH // 1024} KiB of JSON, because pods and ConfigMaps contain "
        f"the spec, and the API server stores no larger objects (got {spec_length // 1024} KiB, including "
        f"{length_by_part[longest_part] // 1024} KiB in {longest_part}). Shorten {longest_part}"
    )
    raise SpecError([problem])


def _json_length(raw: object) -> int:
    """Returns the bytes of a value as compact JSON, in which every character beyond ASCII is escaped."""
    return len(json.dumps(raw, default=dict, separators=(",", ":")))


def parse_stored_spec(raw: Mapping[str, Any]) -> HeteroInferenceSpec:
    """Returns a stored spec, which an older or newer version may have accepted.

    Skips rules and drops unknown fields.

    Raises:
        SpecError: a known field has a value that this version cannot read.
    """
    try:
        return _read_as_stored(HeteroInferenceSpec, raw)
    except ValidationError:  # perhaps because of a field that this version does not know
        pass
    return _parse(
        HeteroInferenceSpec, _without_unknown_fields(raw, HeteroInferenceSpec), "spec", context=AS_STORED
    )


def parse_lifecycle(raw: Mapping[str, Any]) -> LifecycleSpec:
    """Returns the fields of a spec that start, stop and replace groups, even if other fields are invalid.

    A field that cannot be read gets its default. But if `replicas` is set and cannot be read, the number of
    groups is unknown (None), not 1.
    """
    lifecycle = _parse_stored(LifecycleSpec, raw)
    is_replicas_set = raw.get("replicas") is not None
    return lifecycle if is_replicas_set else lifecycle.changed(replicas=1)


def parse_status(raw: Mapping[str, Any] | None) -> HeteroInferenceStatus:
    """Returns the status from a resource's `status`; an empty status if there is none.

    A value that another version wrote, or that is damaged, may be unreadable. Then only the field with this
    value is dropped, or the list entry that contains the field if the entry requires the field.
    """
    return _parse_stored(HeteroInferenceStatus, raw or {})


def storable_status(status: HeteroInferenceStatus) -> tuple[dict[str, Any], str]:
    """Returns a status as JSON values that the schema accepts, and the problems of dropped values.

    `changed(...)` sets fields without validation, so a status may have a value that the schema refuses. Such
    a value is dropped, because otherwise the API server would refuse the whole status again and again.

    Returns:
        The values, and the problems of the dropped values; "" if there are none.
    """
    value = status.dump()
    try:
        _parse(HeteroInferenceStatus, value, "status")
    except SpecError as error:
        return parse_status(value).dump(), "; ".join(error.problems)
    return value, ""


def _parse_stored(cls: type[ModelT], raw: Mapping[str, Any]) -> ModelT:
    """Returns the model of stored values. Values that cannot be read are dropped.

    Drops the values at which validation fails and validates the rest again, until no problem is left. If the
    object as a whole is unreadable, the result has only defaults.
    """
    try:
        return _read_as_stored(cls, {key: raw[key] for key in _models_by_field(cls) if key in raw})
    except ValidationError:  # rare; the code below takes ten times as long
        pass
    value = _without_unknown_fields(_without_nulls(raw, cls), cls)
    while True:
        try:
            return cls.model_validate_json(json.dumps(value), context=AS_STORED)
        except ValidationError as error:
            paths_to_drop = {_path_to_drop(value, problem) for problem in _find_causes(error)}
        if () in paths_to_drop:
            return cls()
        for path in sorted(paths_to_drop, key=_removal_order):
            _remove(value, path)


def _read_as_stored(cls: type[ModelT], raw: Mapping[str, Any]) -> ModelT:
    """Returns the model of stored values; raises ValidationError if a value would have to be dropped."""
    return cls.model_validate_json(_to_json(raw, cls), context=AS_STORED, by_alias=True, by_name=False)


def _path_to_drop(value: Any, problem: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Returns the path of the value to drop because of a problem.

    If a required field is missing, the object that lacks the field is dropped. pydantic's path can contain
    parts that the value lacks, such as the name of a type; the result ends before such parts.
    """
    path = problem["loc"][:-1] if problem["type"] == "missing" else problem["loc"]
    path_in_value: list[str | int] = []
    for part in path:
        if not _has_part(value, part):
            break
        path_in_value.append(part)
        value = value[part]
    return tuple(path_in_value)


def _has_part(value: Any, part: str | int) -> bool:
    """Reports whether a dict has a key, or a list has an index."""
    if isinstance(value, dict):
        return part in value
    return isinstance(value, list) and isinstance(part, int) and part < len(value)


def _removal_order(path: Sequence[str | int]) -> tuple[Any, ...]:
    """Returns the sort key with which later entries of a list are removed before earlier entries.

    So the indexes in the other paths stay valid.
    """
    return tuple((-part, "") if isinstance(part, int) else (0, part) for part in path)


def _remove(value: Any, path: Sequence[str | int]) -> None:
    """Deletes the part of a value at a path, unless an outer part was removed already."""
    *outer_parts, last_part = path
    for part in outer_parts:
        if not _has_part(value, part):
            return
        value = value[part]
    del value[last_part]


def _without_unknown_fields(raw: object, cls: type[Model] | None) -> Any:
    """Returns JSON values without the fields that `cls` does not know."""
    if isinstance(raw, Mapping):
        if cls is None:
            return dict(raw)
        fields = _models_by_field(cls)
        return {
            key: _without_unknown_fields(value, fields[key]) for key, value in raw.items() if key in fields
        }
    if isinstance(raw, list | tuple):
        return [_without_unknown_fields(value, cls) for value in raw]
    return raw


def parse_resources(raw: Mapping[str, Any], where: str) -> Resources:
    """Returns requests and limits of a container.

    Raises:
        SpecError: a value is invalid; the message starts with `where`.
    """
    return _parse(Resources, raw, where)


def _parse(cls: type[ModelT], raw: Mapping[str, Any], where: str, *, context: str | None = None) -> ModelT:
    """Returns the model of JSON values.

    Raises:
        SpecError: the values are invalid; each problem starts with the path of its field below `where`.
    """
    # The values are parsed from JSON, because strict models accept enums and lists only from JSON.
    try:
        return cls.model_validate_json(_to_json(raw, cls), context=context)
    except ValidationError as error:
        causes = _find_causes(error)
        raise SpecError(text for cause in causes for text in _describe_problem(cls, where, cause)) from None


def _to_json(raw: Mapping[str, Any], cls: type[Model]) -> str:
    """Returns values as a JSON text, without nulls that stand for absent fields."""
    text = json.dumps(raw, default=dict)  # kopf's views are mappings but not dicts
    return text if "null" not in text else json.dumps(_without_nulls(raw, cls))


def _without_nulls(raw: object, cls: type[Model] | None) -> object:
    """Returns JSON values without nulls in maps and in fields that `cls` knows.

    The API server treats such a null as an absent field. A null in an unknown field stays, so that the field
    is refused as unknown. Mappings that are not dicts (kopf's views) become dicts.
    """
    if isinstance(raw, Mapping):
        fields = {} if cls is None else _models_by_field(cls)
        return {
            key: _without_nulls(value, fields.get(key))
            for key, value in raw.items()
            if value is not None or (cls is not None and key not in fields)
        }
    if isinstance(raw, list | tuple):
        return [_without_nulls(value, cls) for value in raw]
    return raw


@cache
def _models_by_field(cls: type[Model]) -> Mapping[str, type[Model] | None]:
    """Returns the model inside each field, or None, by the name of the field in the resource."""
    fields = cls.model_fields.values()
    return MappingProxyType({str(field.alias): _find_model(field.annotation) for field in fields})


def _find_model(annotation: object) -> type[Model] | None:
    """Returns the model inside an annotation such as `tuple[RoleSpec, ...] | None`, or None."""
    if isinstance(annotation, type) and issubclass(annotation, Model):
        return annotation
    for argument in get_args(annotation):
        model = _find_model(argument)
        if model is not None:
            return model
    return None


def _find_causes(error: ValidationError) -> list[Any]:
    """Returns the innermost problems of an error.

    Pydantic also reports a consequence of a problem at the value around the problem. For example, it reports
    a list with an invalid item as too short, too. Such outer problems are left out.
    """
    problems = error.errors()

    def has_inner_problem(outer: tuple[str | int, ...]) -> bool:
        """Reports whether another problem is at a location inside the location `outer`."""
        longer_locations = (problem["loc"] for problem in problems if len(problem["loc"]) > len(outer))
        return any(location[: len(outer)] == outer for location in longer_locations)

    return [problem for problem in problems if not has_inner_problem(problem["loc"])]


def _describe_problem(cls: type[Model], where: str, error: Mapping[str, Any]) -> Iterator[str]:
    """Yields the messages of one problem, each with the path of its field."""
    path = where
    for part in error["loc"]:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else str(part)
    if error["type"] == RULE_ERROR:
        for field, text in error["ctx"][PROBLEMS]:
            field_path = f"{path}.{field}" if path and field else path or field
            yield f"{field_path or 'resource'}: {text}"
    elif error["type"] == "extra_forbidden":
        similar = _find_similar_field(cls, error["loc"])
        fix = f"write {similar}" if similar else "correct its name (see `kubectl explain hinf.spec`)"
        yield f"{path}: unknown field. Remove the field, or {fix}"
    elif error["type"] == "missing":
        yield f"{path}: required field is missing. Set this field"
    else:
        got = "" if isinstance(error["input"], dict | list) else f" (got {error['input']!r})"
        yield f"{path or 'resource'}: {_translate_message(error)}{got}"


def _find_similar_field(cls: type[Model], location: Sequence[str | int]) -> str | None:
    """Returns the known field whose name is most similar to the name of an unknown field, or None.

    Args:
        location: path of the unknown field below the model `cls`.
    """
    *outer_parts, unknown_name = location
    model: type[Model] | None = cls
    for part in outer_parts:
        if model is not None and isinstance(part, str):  # an index of a list leads to the same model
            model = _models_by_field(model).get(part)
    known_names = () if model is None else _models_by_field(model)
    matches = difflib.get_close_matches(str(unknown_name), known_names, n=1)
    return matches[0] if matches else None


def _translate_message(error: Mapping[str, Any]) -> str:
    """Returns pydantic's message of an error with "must be", as in the API server's answers."""
    if error["type"] == _PATTERN_ERROR:
        requirement = quantity.PATTERN_WORDS.get(error["ctx"]["pattern"])
        if requirement:
            return requirement
    message: str = error["msg"]
    return re.sub("^(Input|String|List|Tuple|Dictionary) should ", "must ", message)
