"""The page of the operator's environment variables agrees with its settings and with the chart."""

import yaml

from tests.cluster.folders import REPOSITORY
from tests.settings_page import CHART_VALUES, PAGE, render_page

CHART = REPOSITORY / "charts" / "heteroinfer"


def test_the_page_of_environment_variables_is_current() -> None:
    assert PAGE.read_text() == render_page(), f"{PAGE} is stale: run `python -m tests.settings_page`"


def test_each_named_value_is_a_value_of_the_chart() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for name in {name for named in CHART_VALUES.values() for name in named.split(", ") if name}:
        found = values
        for part in name.split("."):
            assert part in found, f"{name}: values.yaml has no such value"
            found = found[part]


def test_the_chart_sets_each_variable_except_those_of_extra_env() -> None:
    template = (CHART / "templates" / "_helpers.tpl").read_text()
    for variable, value in CHART_VALUES.items():
        assert (f"{{name: HETEROINFER_{variable}," in template) == (value != "extraEnv"), variable
