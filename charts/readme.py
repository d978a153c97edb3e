"""Writes the chart's README and the descriptions of its values' schema from the comments of values.yaml.

python -m charts.readme
"""

import json
import re
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import yaml

CHART: Final = Path(__file__).parent / "heteroinfer"
README: Final = CHART / "README.md"
SCHEMA: Final = CHART / "values.schema.json"
_KEY: Final = re.compile(r"^( *)([A-Za-z]+):")
_HEADING: Final = re.compile(r"# == (.*) ==")
_INDENT: Final = 2
_LONG: Final = 50
"""Longest default, in characters, that is shown on one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comment:
    """The comment above a key of values.yaml.

    Attributes:
        text: the comment without its example, on one line.
        example: lines of the example, which begins with a dash; "" for none.
        heading: last heading above the key.
    """

    text: str
    example: str
    heading: str


def read_comments(text: str) -> dict[str, Comment]:
    """Returns the comment above each key of values.yaml, by the value's path."""
    comments: dict[str, Comment] = {}
    path: list[str] = []
    above: list[str] = []
    heading = ""
    for line in text.splitlines():
        key = _KEY.match(line)
        if new_heading := _HEADING.fullmatch(line):
            heading = new_heading[1]
        elif line.strip().startswith("#"):
            above.append(line.strip().removeprefix("#").removeprefix(" "))
        elif key is None:
            above = []
        else:
            path = [*path[: len(key[1]) // _INDENT], key[2]]
            example_lines = (index for index, each in enumerate(above) if each.startswith("- "))
            begin = next(example_lines, len(above))
            comments[".".join(path)] = Comment(
                text=" ".join(above[:begin]).strip(), example="\n".join(above[begin:]), heading=heading
            )
            above = []
    return comments


def describe(schema: dict[str, Any], comments: dict[str, Comment]) -> dict[str, Any]:
    """Returns the schema with the comment of each value as its description."""

    def described(node: dict[str, Any], path: str) -> dict[str, Any]:
        """Returns a part of the schema; a part without a comment keeps its own description."""
        is_root = not path  # the root has no comment, so its description stays
        other_fields = {name: value for name, value in node.items() if name != "description" or is_root}
        description = {"description": comments[path].text} if path in comments and comments[path].text else {}
        if not is_root and path not in comments and "description" in node:
            description = {"description": node["description"]}
        properties = {
            name: described(child, f"{path}.{name}" if path else name)
            for name, child in node.get("properties", {}).items()
        }
        return {**description, **other_fields, **({"properties": properties} if properties else {})}

    return described(schema, "")


def render_schema() -> str:
    """Returns values.schema.json with the descriptions of values.yaml."""
    comments = read_comments((CHART / "values.yaml").read_text())
    return json.dumps(describe(json.loads(SCHEMA.read_text()), comments), indent=2) + "\n"


def render_readme() -> str:
    """Returns the chart's README, with a table of values below each heading of values.yaml."""
    text = (CHART / "values.yaml").read_text()
    comments, values = read_comments(text), yaml.safe_load(text)
    lines: list[str] = []
    by_heading = groupby(_leaves(values, comments), lambda leaf: comments[leaf[0]].heading)
    for heading, leaves in by_heading:
        lines += ["", f"### {heading}", "| value | default | meaning |", "|---|---|---|"]
        examples: list[str] = []
        for path, default in leaves:
            comment = comments[path]
            lines.append(f"| `{path}` | {_show(default)} | {comment.text.replace('|', chr(92) + '|')} |")
            if comment.example:
                examples += ["", f"Example of `{path}`:", "```yaml", comment.example, "```"]
        lines += examples
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    head = _HEAD.format(description=chart["description"], kubernetes=chart["kubeVersion"].removesuffix("-0"))
    return head + "\n".join(lines).lstrip("\n") + "\n"


def _leaves(values: dict[str, Any], comments: dict[str, Comment], path: str = "") -> list[tuple[str, Any]]:
    """Returns path and default of each value for which the README has a row.

    A map whose keys have comments has a row for each key. Any other value has one row.
    """
    leaves: list[tuple[str, Any]] = []
    for name, value in values.items():
        full_path = f"{path}{name}"
        commented_parts = [
            part for part, comment in comments.items() if comment.text and part.startswith(f"{full_path}.")
        ]
        if isinstance(value, dict) and commented_parts:
            leaves += _leaves(value, comments, f"{full_path}.")
        else:
            leaves.append((full_path, value))
    return leaves


def _show(value: Any) -> str:
    """Returns a default for the table; a long list or map has each entry on a line of its own."""
    text = json.dumps(value)
    if len(text) <= _LONG or not isinstance(value, dict | list):
        return f"`{text}`"
    if isinstance(value, list):
        return "<br>".join(f"`{json.dumps(each)}`" for each in value)
    return "<br>".join(f"`{key}: {json.dumps(each)}`" for key, each in value.items())


_HEAD: Final = """<!-- Written by `python -m charts.readme` from values.yaml. Change values.yaml instead. -->
# heteroinfer
{description}.

Needs Kubernetes {kubernetes} and images of your own, because HeteroInfer publishes no images.

```console
helm install heteroinfer charts/heteroinfer --namespace heteroinfer-system --create-namespace \\
  --set image.repository=REGISTRY/heteroinfer/operator
helm test heteroinfer --namespace heteroinfer-system
```

**Upgrade**: running groups keep running.

```console
helm upgrade heteroinfer charts/heteroinfer --namespace heteroinfer-system --reset-then-reuse-values
```

**Uninstall**: delete all HeteroInferences first, then `helm uninstall`. The CustomResourceDefinition stays
(with `crds.keep=false` it is deleted together with every HeteroInference of the cluster). The operator's key
in Secret `RELEASE-operator-key` and the measured rates of nodes in ConfigMap `RELEASE-measured` stay, too.

**Install again under another name**: the remaining CustomResourceDefinition still belongs to the old release.
Adopt it (Helm 3.17 or later):

```console
helm install other charts/heteroinfer --namespace heteroinfer-system --take-ownership \\
  --set image.repository=REGISTRY/heteroinfer/operator
```

The source tree contains the [guide](../../docs/README.md).

## Values
"""


if __name__ == "__main__":
    SCHEMA.write_text(render_schema())
    README.write_text(render_readme())
