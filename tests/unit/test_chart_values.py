"""The chart's README, the descriptions of its values, and a rendering case for each of them."""

import re

import yaml

from charts import readme
from tests.cluster.folders import REPOSITORY
from tests.integration.chart.value_cases import CASES, leaves

WRITE = "run `python -m charts.readme`"


def test_every_value_has_a_comment() -> None:
    text = (readme.CHART / "values.yaml").read_text()
    comments = readme.read_comments(text)
    missing = sorted(path for path in leaves(yaml.safe_load(text)) if not comments[path])
    assert not missing, f"values.yaml: these have no comment above them: {missing}"


def test_the_readme_and_the_schema_say_what_values_yaml_says() -> None:
    assert readme.README.read_text() == readme.render_readme(), WRITE
    assert readme.SCHEMA.read_text() == readme.render_schema(), WRITE


def test_every_value_is_rendered_by_a_case() -> None:
    values = yaml.safe_load((readme.CHART / "values.yaml").read_text())
    cases = {case.value for case in CASES}
    assert leaves(values) - cases == set(), (
        "tests/integration/chart/value_cases.py has no case for these values"
    )
    assert cases - leaves(values) == set(), "these values are no more"


def test_every_value_is_compared_with_other_charts() -> None:
    values = yaml.safe_load((readme.CHART / "values.yaml").read_text())
    page = (REPOSITORY / "docs/contributor/chart.md").read_text()
    table = page.partition("## Each value of this chart")[2].partition("\n## ")[0]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    compared = set(re.findall("`([^`]+)`", " ".join(first_cells)))
    assert compared == set(values), "docs/contributor/chart.md has one place for each key of values.yaml"


def test_comments_are_read_by_path_and_without_their_examples() -> None:
    text = "# All of it.\na:\n  # One\n  # thing:\n  # - an example\n  b: 1\n# Lost.\n\nc: {}\n"
    assert readme.read_comments(text) == {"a": "All of it.", "a.b": "One thing:", "c": ""}


def test_the_chart_and_its_user_docs_name_the_same_release() -> None:
    chart = yaml.safe_load((REPOSITORY / "charts/heteroinfer/Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"]
