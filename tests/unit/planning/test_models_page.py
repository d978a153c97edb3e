"""docs/user/supported-models.md has a row for every shape and the present plans."""

from tests.shapes.corpus import SHAPES
from tests.shapes.page import PAGE, build_page

WITHOUT = ("GPUs only: ", "one stage only: ", "neither: ")


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == build_page(), "run python -m tests.shapes.page"


def test_every_shape_has_a_row_with_a_plan_or_a_reason() -> None:
    rows = {line.split(" | ")[0].removeprefix("| "): line for line in PAGE.read_text().splitlines()}
    for shape in SHAPES:
        cells = rows[shape.name].strip("| ").split(" | ")
        assert len(cells) == 8
        assert cells[5] in ("A", "B") or cells[7].startswith(WITHOUT), shape.name
