from pathlib import Path

from tests import seams


def test_the_page_of_patches_is_current() -> None:
    page = Path(__file__).parents[3] / "docs/contributor/patches.md"
    remedy = "python -m tests.seams > docs/contributor/patches.md"
    assert page.read_text() == seams.to_markdown(), remedy
