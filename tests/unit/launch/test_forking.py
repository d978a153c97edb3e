from hypothesis import given
from hypothesis import strategies as st

from vllm_heteroinfer.pod.forking import environment_changes

ENVIRONMENTS = st.dictionaries(st.sampled_from("ABCDE"), st.sampled_from(["", "0", "1"]))


@given(ENVIRONMENTS, ENVIRONMENTS)
def test_the_difference_converts_one_environment_into_another(
    first: dict[str, str], other: dict[str, str]
) -> None:
    changed = environment_changes(first, other)
    assert all(first.get(name) != text for name, text in changed.items())
    merged = {**first, **changed}
    assert {name: text for name, text in merged.items() if text is not None} == other
