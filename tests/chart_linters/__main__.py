"""Runs independent linters on the rendered chart: every finding must be listed with its reason.

    python -m tests.chart_linters

docs/contributor/chart.md lists the findings. The program fails if a finding is not listed, or if no linter
reports a listed finding.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from tests.cluster import processes, tools
from tests.cluster.folders import LEAST_VALUES, REPOSITORY
from tests.cluster.progress import say
from tests.pinned_environment import ensure_environment

HERE = Path(__file__).parent
PAGE = REPOSITORY / "docs" / "contributor" / "chart.md"
KUBERNETES = ("1.30", "1.37")
"""The oldest version that the chart supports, and the newest version that kubernetes-validate knows."""
WITHOUT_SCHEMA = "monitoring.coreos.com/"
"""API group that kubernetes-validate does not know. tests/integration/watching has its real definitions."""
_LISTED = re.compile(r"^\| (checkov|kube-score|kubernetes-validate) \| `([^`]+)`[^|]* \| (\w+) \| ", re.M)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Finding:
    """A linter's finding about a kind of object.

    Attributes:
        tool: the linter.
        rule: name of the rule in the linter.
        kind: kind of the object.
    """

    tool: str
    rule: str
    kind: str


def read_listed(text: str) -> set[Finding]:
    """Returns the findings that a page lists."""
    return {Finding(tool=tool, rule=rule, kind=kind) for tool, rule, kind in _LISTED.findall(text)}


def render(folder: Path) -> list[Path]:
    """Renders the chart with the fewest values and with all values. Returns the files."""
    helm = str(tools.program(tools.HELM, "helm"))
    chart = str(REPOSITORY / "charts" / "heteroinfer")
    files = []
    for name, more in (("least", ()), ("everything", ("-f", str(HERE / "everything.yaml")))):
        command = [helm, "template", "heteroinfer", chart, "--namespace", "heteroinfer-system"]
        given = ["--kube-version", "1.35.4", "-f", str(LEAST_VALUES), *more]
        files.append(folder / f"{name}.yaml")
        files[-1].write_text(processes.run([*command, *given], timeout_s=60))
    return files


def ask(command: list[str], *, codes: tuple[int, ...]) -> str:
    """Runs a linter, and returns its output. Its exit code must be in `codes`."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode not in codes:
        raise SystemExit(f"{command[0]} ended with exit code {done.returncode}: {done.stderr}")
    return done.stdout + done.stderr


def ask_checkov(programs: Path, files: list[Path]) -> Iterator[Finding]:
    """Yields the findings of checkov."""
    given = [option for file in files for option in ("-f", str(file))]
    # Its package contains the rules. Without this variable, it would download newer ones.
    options = ["--framework", "kubernetes", "--skip-download", "--soft-fail", "--quiet", "-o", "json"]
    output = json.loads(processes.run([str(programs / "checkov"), *options, *given], timeout_s=300))
    if output["summary"]["parsing_errors"] or output["summary"]["passed"] < 1:
        raise SystemExit(f"checkov found no objects: {output['summary']}")
    for check in output["results"]["failed_checks"]:
        yield Finding(tool="checkov", rule=check["check_id"], kind=check["resource"].partition(".")[0])


def ask_kube_score(files: list[Path]) -> Iterator[Finding]:
    """Yields the findings of kube-score: critical ones and warnings."""
    program = str(tools.program(tools.KUBE_SCORE, "kube-score"))
    options = ["score", "--output-format", "json", "--output-version", "v2", "--exit-one-on-warning=false"]
    for file in files:
        judged = json.loads(ask([program, *options, str(file)], codes=(0, 1)))
        if not judged:
            raise SystemExit("kube-score found no objects")
        for each in judged:
            for check in each["checks"]:
                if not check["skipped"] and check["grade"] < GOOD:
                    kind = each["type_meta"]["kind"]
                    yield Finding(tool="kube-score", rule=check["check"]["id"], kind=kind)


GOOD = 7
"""kube-score's grade of a check that passes almost or completely; 1 is critical, 5 a warning."""


def ask_kubernetes_validate(programs: Path, files: list[Path]) -> Iterator[Finding]:
    """Yields the objects that a version's schema refuses, also for unknown fields."""
    for file in files:
        for version in KUBERNETES:
            command = [str(programs / "kubernetes-validate"), "--strict", "-k", version, str(file)]
            output = ask(command, codes=(0, 1))
            documents = [document for document in yaml.safe_load_all(file.read_text()) if document]
            known = [each for each in documents if not each["apiVersion"].startswith(WITHOUT_SCHEMA)]
            if output.count(" passed for resource ") + output.count("ERROR") < len(known):
                raise SystemExit(f"kubernetes-validate {version}: got fewer answers than objects:\n{output}")
            for line in output.splitlines():
                if "ERROR" in line:
                    say(line)
                    yield Finding(tool="kubernetes-validate", rule=version, kind="any")


def main() -> int:
    """Returns the exit code: 0 if the findings are exactly the listed ones."""
    listed = read_listed(PAGE.read_text())
    programs = ensure_environment("linters", HERE / "requirements.txt")
    with tempfile.TemporaryDirectory() as folder:
        files = render(Path(folder))
        found = {
            *ask_checkov(programs, files),
            *ask_kube_score(files),
            *ask_kubernetes_validate(programs, files),
        }
    page = PAGE.relative_to(REPOSITORY)
    for finding in sorted(found - listed):
        print(f"not listed: {finding.tool} {finding.rule} on a {finding.kind}. Fix it, or list it in {page}")
    for finding in sorted(listed - found):
        print(f"no longer found: {finding.tool} {finding.rule} on a {finding.kind}. Remove it from {page}")
    print(f"{len(found)} findings by linters of the chart, {len(found & listed)} of them listed")
    return int(found != listed)


if __name__ == "__main__":
    sys.exit(main())
