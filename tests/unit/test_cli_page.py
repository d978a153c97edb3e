"""The page of the command line is that of the program."""

from tests.cli_page import PAGE, render


def test_the_page_of_the_command_line_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "write it: python -m tests.cli_page"
