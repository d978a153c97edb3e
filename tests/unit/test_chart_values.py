"""The chart's README, the descriptions of its values, and a rendering case for each of them."""

import json
from fnmatch import fnmatch
from pathlib import Path

import pytest
import yaml

from charts import readme
from tests.cluster.folders import REPOSITORY
from tests.integration.chart.value_cases import CASES, leaves

WRITE = "run `python -m charts.readme`"


def test_every_value_has_a_comment() -> None:
    text = (readme.CHART / "values.yaml").read_text()
    comments = readme.read_comments(text)
    missing = sorted(path for path in leaves(yaml.safe_load(text)) if not comments[path].text)
    assert not missing, f"values.yaml: these have no comment above them: {missing}"


def test_the_readme_and_the_schema_match_values_yaml() -> None:
    assert readme.README.read_text() == readme.render_readme(), WRITE
    assert readme.SCHEMA.read_text() == readme.render_schema(), WRITE


def test_every_value_is_rendered_by_a_case() -> None:
    values = yaml.safe_load((readme.CHART / "values.yaml").read_text())
    cases = {case.value for case in CASES}
    assert leaves(values) - cases == set(), (
        "tests/integration/chart/value_cases.py has no case for these values"
    )
    assert cases - leaves(values) == set(), "these values are no more"


def columns(heading: str) -> list[set[str]]:
    """Returns the values in each column of a table of docs/contributor/chart.md; `…` of it is a `*` here."""
    page = (REPOSITORY / "docs/contributor/chart.md").read_text()
    section = page.partition(f"## {heading}\n")[2].partition("\n\n")[0]
    rows = [line.removeprefix("| ").split(" | ") for line in section.splitlines()[2:]]
    values = [[cell.replace("`", "").replace("…", "*").split(", ") for cell in row] for row in rows]
    return [
        {each for cell in column for each in cell if each != NONE} for column in zip(*values, strict=True)
    ]


NONE = "\N{EN DASH}"
OWN = "Each value of this chart"
REFUSED = "Values of the other charts that this chart does not have"


def test_every_value_is_compared_with_other_charts() -> None:
    values = yaml.safe_load((readme.CHART / "values.yaml").read_text())
    assert columns(OWN)[0] == leaves(values)


@pytest.mark.parametrize(("column", "chart"), [(1, "CloudNativePG"), (2, "cert-manager")])
def test_every_value_of_other_charts_is_met_or_refused(column: int, chart: str) -> None:
    theirs = json.loads((Path(__file__).parent / "other_charts.json").read_text())[chart]
    met, refused = (columns(heading)[column] for heading in (OWN, REFUSED))
    assert not met & refused
    unmatched = [each for each in theirs if not any(fnmatch(each, named) for named in met | refused)]
    assert not unmatched, f"docs/contributor/chart.md compares none of these values of {chart}"
    unknown = [named for named in met | refused if not any(fnmatch(each, named) for each in theirs)]
    assert not unknown, f"{chart} has no such values"


def test_comments_are_read_by_path_with_their_headings_and_examples() -> None:
    text = (
        "# == First ==\n# All of it.\na:\n  # One\n  # thing (2 - 1).\n  # - an: example\n  #   with: 2\n"
        "  b: 1\n# Lost.\n\n# == Last ==\nc: {}\n"
    )
    assert readme.read_comments(text) == {
        "a": readme.Comment(text="All of it.", example="", heading="First"),
        "a.b": readme.Comment(text="One thing (2 - 1).", example="- an: example\n  with: 2", heading="First"),
        "c": readme.Comment(text="", example="", heading="Last"),
    }


def test_the_chart_and_its_user_docs_name_the_same_release() -> None:
    chart = yaml.safe_load((REPOSITORY / "charts/heteroinfer/Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"]
