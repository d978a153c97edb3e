"""A whole HeteroInference: from parsed YAML or JSON to models, or to errors that name the field. Pure."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args

from pydantic import ConfigDict, Field, ValidationError

from heteroinfer_operator import quantity
from heteroinfer_operator.api.base import AS_STORED, Model, ObjectName, ValidationRule
from heteroinfer_operator.api.role import Resources
from heteroinfer_operator.api.spec import HeteroInferenceSpec, LifeSpec
from heteroinfer_operator.api.status import HeteroInferenceStatus
from heteroinfer_operator.errors import SpecError

ModelT = TypeVar("ModelT", bound=Model)

MAX_NAME_LENGTH: Final = 40
"""A pod's host name is NAME-GROUP-EPOCH-POD and has at most 63 characters: this leaves 20 digits."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class ResourceKey:
    """Name of a HeteroInference."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


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


MAX_SPEC_LENGTH: Final = 256 * 1024
"""Of a spec as JSON: it is kept in a ConfigMap, parts of it in pods, and the status has the same object."""


def parse_resource(raw: Mapping[str, Any]) -> HeteroInference:
    """Returns the resource that parsed YAML or JSON holds.

    Raises:
        SpecError: it isn't one; a line for each problem, with the field's path.
    """
    found = _parse(HeteroInference, raw, "")
    _check_length(raw["spec"])
    return found


def parse_spec(raw: Mapping[str, Any]) -> HeteroInferenceSpec:
    """Returns the spec that a resource's `spec` holds; raises SpecError as parse_resource."""
    found = _parse(HeteroInferenceSpec, raw, "spec")
    _check_length(raw)
    return found


_OTHER_PATTERN: Final = "string_pattern_mismatch"


def _check_length(spec: Mapping[str, Any]) -> None:
    """Raises SpecError for a spec of which the API server would not store the objects."""
    length = _length(spec)
    if length <= MAX_SPEC_LENGTH:
        return
    parts = {name: _length(part) for name, part in spec.items() if name != "roles"}
    parts |= {f"roles[{i}]": _length(role) for i, role in enumerate(spec["roles"])}
    longest = max(parts, key=lambda name: parts[name])
    problem = (
        f"spec: expected at most {MAX_SPEC_LENGTH >> 10} KiB of JSON, since pods and ConfigMaps hold it, and "
        f"the API server stores no large objects; make it shorter: got {length >> 10} KiB, of which "
        f"{longest} is {parts[longest] >> 10} KiB"
    )
    raise SpecError([problem])


def _length(raw: object) -> int:
    return len(json.dumps(raw, default=dict, separators=(",", ":")))


def parse_stored_spec(raw: Mapping[str, Any]) -> HeteroInferenceSpec:
    """Returns a spec that some version accepted: without rules, and without fields that are not known here.

    Raises:
        SpecError: it cannot be read even so.
    """
    try:
        return _as_stored(HeteroInferenceSpec, raw)
    except ValidationError:  # it may be for a field that is not known here
        pass
    return _parse(HeteroInferenceSpec, _known_only(raw, HeteroInferenceSpec), "spec", context=AS_STORED)


def parse_life(raw: Mapping[str, Any]) -> LifeSpec:
    """Returns what a spec says of the life of groups, whatever else is wrong with it.

    A field that cannot be read has its default.
    """
    life = _salvage(LifeSpec, raw)
    return life if raw.get("replicas") is not None else life.changed(replicas=1)


def parse_status(raw: Mapping[str, Any] | None) -> HeteroInferenceStatus:
    """Returns the status that a resource's `status` holds, an empty one for none.

    What cannot be read, since it was written by another version or damaged, loses only itself: a
    field, or the entry of a list whose needed field is lost.
    """
    return _salvage(HeteroInferenceStatus, raw or {})


def storable_status(status: HeteroInferenceStatus) -> tuple[dict[str, Any], str]:
    """Returns a status as JSON values that the schema takes, and what it lost for that.

    Nothing checks what `changed(...)` writes into a model. What the schema would refuse is left
    out: the API server would refuse the whole status, again and again.

    Returns:
        The values, and the problems of what was left out, "" if nothing was.
    """
    value = status.dump()
    try:
        _parse(HeteroInferenceStatus, value, "status")
    except SpecError as error:
        return parse_status(value).dump(), "; ".join(error.problems)
    return value, ""


def _salvage(cls: type[ModelT], raw: Mapping[str, Any]) -> ModelT:
    try:
        return _as_stored(cls, {key: raw[key] for key in _fields(cls) if key in raw})
    except ValidationError:  # seldom: what follows costs ten times as much
        pass
    value = _known_only(_without_nulls(raw, cls), cls)
    while True:
        try:
            return cls.model_validate_json(json.dumps(value), context=AS_STORED)
        except ValidationError as error:
            lost = {_deepest(value, problem) for problem in _causes(error)}
        if () in lost:
            return cls()
        for path in sorted(lost, key=_last_first):
            _remove(value, path)


def _as_stored(cls: type[ModelT], raw: Mapping[str, Any]) -> ModelT:
    """Returns the model of what is stored, if nothing of it has to be left out; raises ValidationError."""
    return cls.model_validate_json(_text(raw, cls), context=AS_STORED, by_alias=True, by_name=False)


def _deepest(value: Any, problem: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Returns the path of what must go so that a problem does: for a field that is missing, its holder."""
    path = problem["loc"][:-1] if problem["type"] == "missing" else problem["loc"]
    found: list[str | int] = []
    for part in path:
        there = part in value if isinstance(value, dict) else _has_item(value, part)
        if not there:
            break
        found.append(part)
        value = value[part]
    return tuple(found)


def _has_item(value: Any, index: str | int) -> bool:
    return isinstance(value, list) and isinstance(index, int) and index < len(value)


def _last_first(path: Sequence[str | int]) -> tuple[Any, ...]:
    """Returns what sorts later entries of a list, and inner values, before what their removal would move."""
    return tuple((-part, "") if isinstance(part, int) else (0, part) for part in path)


def _remove(value: Any, path: Sequence[str | int]) -> None:
    *outer, last = path
    for part in outer:
        if not (part in value if isinstance(value, dict) else _has_item(value, part)):
            return  # its holder has gone
        value = value[part]
    del value[last]


def _known_only(raw: object, cls: type[Model] | None) -> Any:
    """Returns JSON values without the fields that `cls` does not know."""
    if isinstance(raw, Mapping):
        if cls is None:
            return dict(raw)
        fields = _fields(cls)
        return {key: _known_only(value, fields[key]) for key, value in raw.items() if key in fields}
    return [_known_only(value, cls) for value in raw] if isinstance(raw, list | tuple) else raw


def parse_resources(raw: Mapping[str, Any], where: str) -> Resources:
    """Returns requests and limits of a container; raises SpecError, in whose message `where` comes first."""
    return _parse(Resources, raw, where)


def _parse(cls: type[ModelT], raw: Mapping[str, Any], where: str, *, context: str | None = None) -> ModelT:
    # Through JSON, since strict models take enums and lists only from JSON.
    try:
        return cls.model_validate_json(_text(raw, cls), context=context)
    except ValidationError as error:
        raise SpecError(_problem(where, problem) for problem in _causes(error)) from None


def _text(raw: Mapping[str, Any], cls: type[Model]) -> str:
    """Returns JSON values as text, without the nulls that mean nothing."""
    text = json.dumps(raw, default=dict)  # kopf's views are mappings, and no dicts
    return text if "null" not in text else json.dumps(_without_nulls(raw, cls))


def _without_nulls(raw: object, cls: type[Model] | None) -> object:
    """Returns JSON values without nulls in maps and in fields that `cls` knows.

    The API server takes such a null for an absent field; one in an unknown field is an
    unknown field. Mappings that aren't dicts (kopf's views) become dicts.
    """
    if isinstance(raw, Mapping):
        fields = {} if cls is None else _fields(cls)
        return {
            key: _without_nulls(value, fields.get(key))
            for key, value in raw.items()
            if value is not None or (cls is not None and key not in fields)
        }
    if isinstance(raw, list | tuple):
        return [_without_nulls(value, cls) for value in raw]
    return raw


@cache
def _fields(cls: type[Model]) -> Mapping[str, type[Model] | None]:
    """Returns by its name in the resource the model inside each field, or None."""
    fields = cls.model_fields.values()
    return MappingProxyType({str(field.alias): _model_of(field.annotation) for field in fields})


def _model_of(annotation: object) -> type[Model] | None:
    """Returns the model inside an annotation such as `tuple[RoleSpec, ...] | None`, or None."""
    if isinstance(annotation, type) and issubclass(annotation, Model):
        return annotation
    return next((model for arg in get_args(annotation) if (model := _model_of(arg)) is not None), None)


def _causes(error: ValidationError) -> list[Any]:
    # A list with a bad item is also reported as too short: leave out the outer error.
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
    words = quantity.PATTERN_WORDS.get(error["ctx"]["pattern"]) if error["type"] == _OTHER_PATTERN else None
    return f"{path or 'resource'}: {words or error['msg']}{got}"
