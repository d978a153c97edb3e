"""Writes the chart's README and the descriptions of its values' schema from the comments of values.yaml.

python -m charts.readme
"""

import json
import re
from pathlib import Path
from typing import Any, Final

import yaml

CHART: Final = Path(__file__).parent / "heteroinfer"
README: Final = CHART / "README.md"
SCHEMA: Final = CHART / "values.schema.json"
_KEY: Final = re.compile(r"^( *)([A-Za-z]+):")
_INDENT: Final = 2


def read_comments(text: str) -> dict[str, str]:
    """Returns the comment above each key of values.yaml, by the value's path.

    Leaves out examples, which begin with a dash.
    """
    found: dict[str, str] = {}
    path: list[str] = []
    above: list[str] = []
    for line in text.splitlines():
        key = _KEY.match(line)
        if line.strip().startswith("#"):
            above.append(line.strip().removeprefix("#").strip())
        elif key is None:
            above = []
        else:
            path = [*path[: len(key[1]) // _INDENT], key[2]]
            said = " ".join(above).partition(" - ")[0]
            found[".".join(path)] = said.strip()
            above = []
    return found


def describe(schema: dict[str, Any], comments: dict[str, str]) -> dict[str, Any]:
    """Returns the schema with the comment of each value as its description."""

    def described(node: dict[str, Any], path: str) -> dict[str, Any]:
        rest = {name: value for name, value in node.items() if name != "description" or not path}
        said = {"description": comments[path]} if comments.get(path) else {}
        if path and path not in comments and "description" in node:
            said = {"description": node["description"]}
        properties = {
            name: described(child, f"{path}.{name}" if path else name)
            for name, child in node.get("properties", {}).items()
        }
        return {**said, **rest, **({"properties": properties} if properties else {})}

    return described(schema, "")


def render_schema() -> str:
    """Returns values.schema.json with the descriptions of values.yaml."""
    comments = read_comments((CHART / "values.yaml").read_text())
    return json.dumps(describe(json.loads(SCHEMA.read_text()), comments), indent=2) + "\n"


def render_readme() -> str:
    """Returns the chart's README."""
    text = (CHART / "values.yaml").read_text()
    comments, values = read_comments(text), yaml.safe_load(text)
    rows = [
        f"| `{path}` | {_show(default)} | {comments[path].replace('|', chr(92) + '|')} |"
        for path, default in _leaves(values, comments)
    ]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    head = _HEAD.format(description=chart["description"], kubernetes=chart["kubeVersion"].removesuffix("-0"))
    return head + "\n".join(["| value | default | meaning |", "|---|---|---|", *rows]) + "\n"


def _leaves(values: dict[str, Any], comments: dict[str, str], path: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        whole = f"{path}{name}"
        nested = isinstance(value, dict) and any(
            said and each.startswith(f"{whole}.") for each, said in comments.items()
        )
        found += _leaves(value, comments, f"{whole}.") if nested else [(whole, value)]
    return found


def _show(value: Any) -> str:
    return f"`{json.dumps(value)}`"


_HEAD: Final = """<!-- Written by `python -m charts.readme` from values.yaml; change that. -->
# heteroinfer
{description}.

Needs Kubernetes {kubernetes} and images of your own: HeteroInfer publishes none.

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

Guide: docs/README.md in the source tree. docs/contributor/chart.md compares these values with those of
CloudNativePG and cert-manager.

## Values
"""


if __name__ == "__main__":
    SCHEMA.write_text(render_schema())
    README.write_text(render_readme())
