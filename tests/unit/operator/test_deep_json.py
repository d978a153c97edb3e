"""JSON of any depth is parsed. Only values that nest too deeply are lost."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heteroinfer_operator.kube.deep_json import MAX_DEPTH, parse_json
from heteroinfer_operator.kube.server import parse_answer

DEPTH = 20_000
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab"\\[]{}\n', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='a"\\}', max_size=2), inner),
    max_leaves=8,
)


def nested(opening: str, closing: str, inner: str = "1") -> str:
    return opening * DEPTH + inner + closing * DEPTH


@given(values, st.sampled_from([('{"f:a":', "}"), ("[", "]"), ('[{"a]":', "}]")]), st.booleans())
def test_values_next_to_a_deep_value_are_read(value: Any, brackets: tuple[str, str], as_bytes: bool) -> None:
    text = f'{{"before": {json.dumps(value)}, "deep": {nested(*brackets)}, "after": {json.dumps(value)}}}'
    with pytest.raises(RecursionError):
        json.loads(text)
    read = parse_json(text.encode() if as_bytes else text)
    assert (read["before"], read["after"]) == (value, value)
    deep, depth = read["deep"], 0
    while deep is not None:
        deep, depth = (deep[0] if isinstance(deep, list) else next(iter(deep.values()))), depth + 1
    assert depth == MAX_DEPTH - 1


@given(values)
def test_other_json_is_unchanged(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("text", ["", "{", nested("[", "", ""), nested("[", "]") + "]", nested('{"a":', "]")])
def test_text_that_is_not_json_raises(text: str) -> None:
    with pytest.raises(ValueError, match=r"line 1|Expecting"):
        parse_json(text)


def test_answers_of_the_api_server_may_nest_deeply() -> None:
    deep = nested('{"f:a":', "}", "{}")
    assert (
        parse_answer("GET", f'{{"kind": "Pod", "metadata": {deep}}}', required_keys=("kind",))["kind"]
        == "Pod"
    )
