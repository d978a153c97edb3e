from pathlib import Path

from vllm_heteroinfer import seams


def test_page_is_made_of_the_table() -> None:
    page = Path(__file__).parents[3] / "docs/patches.md"
    assert page.read_text() == seams.to_markdown(), "python -m vllm_heteroinfer.seams > docs/patches.md"
