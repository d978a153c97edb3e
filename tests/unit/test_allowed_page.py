"""The page of allowed variables and options agrees with the lists."""

from tests.allowed_page import PAGE, render_page


def test_the_page_of_allowed_values_is_current() -> None:
    assert PAGE.read_text() == render_page(), f"{PAGE} is stale: run `python -m tests.allowed_page`"
