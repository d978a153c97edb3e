"""docs/user/models-of-2026.md has the present plans and refusals of all models of 2026."""

from tests.shapes.corpus_2026 import SHAPES_2026
from tests.shapes.profiles import recorded_profiles
from tests.shapes.situations import PAGE, SITUATIONS, build_page


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == build_page(), "run python -m tests.shapes.situations"


def test_every_model_has_a_row_and_a_section() -> None:
    text = PAGE.read_text()
    names = [shape.name for shape in SHAPES_2026]
    assert list(recorded_profiles("profiles_2026.json")) == names
    for name in names:
        (row,) = [line for line in text.splitlines() if line.startswith(f"| {name} |")]
        assert row.count("|") == 3 + len(SITUATIONS)
        assert f"\n## {name}\n" in text
