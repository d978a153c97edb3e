"""Draws resources as JSON values: valid resources, and valid resources with one change."""

import copy
import functools
from collections.abc import Callable
from typing import Any, TypeAlias

from hypothesis import strategies as st

from heteroinfer_contract import names
from heteroinfer_operator.api.crd import build_schema
from heteroinfer_operator.api.env_vars import OWNED_ENV
from heteroinfer_operator.quantity import DURATION_PATTERN
from heteroinfer_operator.reconcile.allowed_env import ALLOWED_ENV

Json: TypeAlias = dict[str, Any]
SCHEMA = build_schema()

ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2,
    17,
    65,
    257,
    8081,
    29500,
    2**31,
    1.5,
    1e19,
    10**15 - 1,
    10**15,
    2**63,
    "",
    "0",
    "a",
    "cpu",
    "CPU",
    "A_b",
    "Auto",
    "10m",
    "1h",
    "5Gi",
    "-5Gi",
    "1e3",
    "5 Gi",
    "x\n",
    "é" * 20,
    "a" * 21,
    "a" * 64,
    "a" * 600,
    "a" * 5000,
    "hf://a",
    "hf://a/b/c",
    "pvc://claim/../x",
    "file://relative",
    "2026-11-21T12:00:00Z",
    "RANK",
    [],
    [1],
    [0],
    [None],
    ["a"],
    [1] * 257,
    {},
    {"name": "x"},
    {"a": "b"},
)
"""Values that a field is set to. Each is valid for some fields and invalid for most."""


def from_schema(schema: Json) -> st.SearchStrategy[Any]:
    """Builds a strategy for the values that a structural schema accepts. Ignores most of its CEL rules."""
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if schema.get("x-kubernetes-int-or-string"):
        return st.integers(0, 2**40) | st.from_regex(schema["pattern"].replace("$", r"\Z"))
    strategies: dict[str, Callable[[Json], st.SearchStrategy[Any]]] = {
        "boolean": lambda _: st.booleans(),
        "integer": lambda node: st.integers(node["minimum"], node["maximum"]),
        "number": lambda node: st.floats(node["minimum"], node["maximum"]),
        "string": _texts,
        "array": _lists,
        "object": _objects,
    }
    return strategies[schema["type"]](schema)


def _texts(schema: Json) -> st.SearchStrategy[str]:
    if schema.get("format") == "date-time":
        return st.datetimes().map(lambda time: time.isoformat(timespec="seconds") + "Z")
    shortest, longest = schema.get("minLength", 0), schema["maxLength"]
    if schema.get("pattern") == DURATION_PATTERN:  # within the bounds of every duration of the schema
        return st.sampled_from(["1m", "90s", "2m5s", "300s", "60500ms", "1m1s1ms"])
    if "pattern" in schema:
        pattern = schema["pattern"].replace("$", r"\Z")
        return st.from_regex(pattern).filter(lambda text: shortest <= len(text) <= longest)
    # Without surrogates, which JSON cannot contain.
    return st.text(st.characters(codec="utf-8"), min_size=shortest, max_size=min(longest, 20))


def _lists(schema: Json) -> st.SearchStrategy[list[Any]]:
    keys = schema.get("x-kubernetes-list-map-keys")
    unique = (lambda item: tuple(item[key] for key in keys)) if keys else None
    shortest = schema.get("minItems", 0)
    return st.lists(from_schema(schema["items"]), min_size=shortest, max_size=shortest + 2, unique_by=unique)


def _objects(schema: Json) -> st.SearchStrategy[Json]:
    if "additionalProperties" in schema:
        keys = st.sampled_from(["memory", "cpu", "example.com/x"] * 5 + ["team", "team name", "a" * 64, ""])
        return st.dictionaries(keys, from_schema(schema["additionalProperties"]), max_size=2)
    fields = {name: from_schema(field) for name, field in schema["properties"].items()}
    required = {name: fields.pop(name) for name in schema.get("required", ())}
    return st.fixed_dictionaries(required, optional=fields)


@functools.cache  # building strategies is slower than drawing from them
def _field(*path: str) -> st.SearchStrategy[Any]:
    node = SCHEMA
    for name in path:
        node = (
            node["items"]
            if name == "[]"
            else node.get("properties", {}).get(name) or node["additionalProperties"]
        )
    return from_schema(node)


@st.composite
def _roles(draw: st.DrawFn) -> tuple[list[Json], Json]:
    """Draws roles, and the parallelism that fits most of them."""
    tensor = draw(st.sampled_from([1, 1, 2]))
    with_layers = draw(st.booleans())
    roles = []
    for i in range(draw(st.integers(1, 3))):
        device = draw(st.sampled_from(["CPU", "GPU"]))
        role: Json = {"name": f"r{i}", "device": device, "pods": draw(st.integers(1, 3))}
        role["ranksPerPod"] = tensor * draw(st.integers(1, 2))
        if with_layers:
            stages = role["pods"] * role["ranksPerPod"] // tensor
            role["layers"] = draw(st.lists(st.integers(1, 40), min_size=stages, max_size=stages))
        if device == "GPU" and draw(st.booleans()):
            drawn = _field("spec", "roles", "[]", "deviceMemory")
            role["deviceMemory"] = draw(st.one_of(st.sampled_from(["24Gi", "80Gi"]), drawn))
        if draw(st.booleans()):
            role["resources"] = draw(_field("spec", "roles", "[]", "resources"))
        if draw(st.integers(0, 4)) == 0:
            role["template"] = draw(_field("spec", "roles", "[]", "template"))
        roles.append(role)
    world = sum(role["pods"] * role["ranksPerPod"] for role in roles)
    stages = world // tensor
    both = {"tensor": tensor, "pipeline": stages}
    sizes: Json = dict(draw(st.sampled_from([{}, {"tensor": tensor}, {"pipeline": stages}, both])))
    mode = draw(st.sampled_from([None, None, "Auto", "Pipeline", "Tensor", "FeedForward"]))
    if mode is not None:
        sizes["mode"] = mode
    if mode == "FeedForward" and draw(st.integers(0, 4)):
        return _feed_forward_roles(roles, own=draw(st.booleans())), {"mode": mode}
    if mode in (None, "Auto", "FeedForward") and draw(st.integers(0, 4)) == 0:
        roles[0]["feedForward"] = dict(_FEED_FORWARD)
    return roles, sizes


_FEED_FORWARD = {"cpu": "4", "memory": "8Gi"}


def _feed_forward_roles(roles: list[Json], *, own: bool) -> list[Json]:
    """Changes the roles for mode FeedForward: the first role has attention, the others have CPUs.

    Args:
        own: whether the first role has feed-forward ranks even if there are CPU roles.
    """
    for role in roles:
        role.pop("layers", None)
    first, *others = roles
    first |= {"pods": 1, "ranksPerPod": 1}
    if own or not others or first["device"] == "CPU":
        first["feedForward"] = dict(_FEED_FORWARD)
    for role in others:
        role["device"] = "CPU"
        role.pop("deviceMemory", None)
    return roles


@st.composite
def resources(draw: st.DrawFn) -> Json:
    """Draws resources, most of which are valid."""
    roles, sizes = draw(_roles())
    spec: Json = {"model": draw(_models()), "roles": roles, "parallelism": sizes}
    if draw(st.booleans()):
        spec["engine"] = draw(_engines())
    fields = SCHEMA["properties"]["spec"]["properties"]
    others = sorted(fields.keys() - {"model", "roles", "parallelism", "engine"})
    for name in draw(st.lists(st.sampled_from(others), max_size=4, unique=True)):
        spec[name] = draw(_field("spec", name))
    return {
        "apiVersion": f"{names.API_GROUP}/{names.API_VERSION}",
        "kind": names.KIND,
        "metadata": {"name": draw(st.sampled_from(["llama", "a", "a-1", "a" * 40]))},
        "spec": spec,
    }


@st.composite
def _models(draw: st.DrawFn) -> Json:
    uri = draw(
        st.sampled_from(["hf://org/model", "hf://gpt2", "pvc://claim/a/b", "pvc://claim", "file:///m/x"])
    )
    model: Json = {"uri": uri}
    if draw(st.booleans()):
        model["servedName"] = draw(_field("spec", "model", "servedName"))
    if uri.startswith("hf://") and draw(st.integers(0, 4)):  # without parallelism there is no plan
        made = {"size": "5Gi", "accessMode": "ReadWriteMany"}
        model["cache"] = draw(st.sampled_from([{"claimName": "c"}, made]))
    return model


@st.composite
def _engines(draw: st.DrawFn) -> Json:
    engine: Json = draw(_field("spec", "engine"))
    for variable in engine.get("env", ()):
        # Most drawn variables have both a value and a source, or neither.
        if draw(st.integers(0, 5)):
            variable.pop("valueFrom", None)
            variable["value"] = "1"
        if draw(st.integers(0, 5)):
            variable["name"] = draw(st.sampled_from([*sorted(ALLOWED_ENV), *OWNED_ENV]))
    return engine


def paths(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Yields the path of each value inside a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        found += paths(child, (*path, key))
    return found


@st.composite
def changed(draw: st.DrawFn) -> Json:
    """Draws a resource with one change in its spec: another value, an extra field, or a missing field."""
    resource = copy.deepcopy(draw(resources()))
    # Hypothesis draws the first alternatives more often. These choices are uniform.
    random = draw(st.randoms(use_true_random=True))
    path = random.choice(paths(resource["spec"]))
    *parents, last = path
    parent: Any = resource["spec"]
    for key in parents:
        parent = parent[key]
    (change,) = random.choices(["odd", "other", "remove", "add", "twice"], [5, 6, 2, 1, 2])
    if change == "remove":
        del parent[last]
    elif change == "add" and isinstance(parent, dict):
        parent["noSuchField"] = random.choice([1, None, {}])
    elif change == "twice" and isinstance(parent, list):
        parent.append(copy.deepcopy(parent[last if isinstance(last, int) else 0]))
    elif change == "odd":
        parent[last] = copy.deepcopy(random.choice(ODD_VALUES))
    else:
        parent[last] = draw(_field("spec", *("[]" if isinstance(key, int) else key for key in path)))
    return resource


def statuses() -> st.SearchStrategy[Json]:
    """Builds a strategy for the statuses that the schema accepts."""
    return _field("status")
