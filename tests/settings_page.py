"""Writes the page of the operator's environment variables: `python -m tests.settings_page`.

Names, meanings, defaults and allowed values come from the operator's settings.
"""

import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from typing import Final

from heteroinfer_operator.errors import HeteroInferError
from heteroinfer_operator.settings import InstallationSettings
from tests.cluster.folders import REPOSITORY

PAGE: Final = REPOSITORY / "docs" / "user" / "reference" / "environment.md"
CHART_VALUES: Final = {
    "WATCH_NAMESPACES": "scope, watchNamespaces",
    "OPERATOR_CLASS": "operatorClass",
    "WORKER_IMAGE_CPU": "workerImages.cpu, image",
    "WORKER_IMAGE_GPU": "workerImages.gpu, image",
    "WORKER_PULL_POLICY": "workerImages.pullPolicy",
    "WORKER_PULL_SECRETS": "workerImages.pullSecrets",
    "ALLOWED_WORKER_IMAGES": "allowedWorkerImages",
    "ALLOWED_HOST_PATHS": "allowedHostPaths",
    "ALLOW_HOST_PATHS": "allowHostPaths",
    "ALLOW_REMOTE_CODE": "allowRemoteCode",
    "ALLOWED_ARGUMENTS": "allowedArguments",
    "ALLOWED_ENVIRONMENT": "allowedEnvironment",
    "ALLOWED_ANNOTATIONS": "allowedAnnotations",
    "ALLOWED_SERVICE_ACCOUNTS": "allowedServiceAccounts",
    "POD_RESOURCES": "podResources",
    "HTTP_PORT": "httpPort",
    "WORKERS": "workers",
    "RESYNC_SECONDS": "extraEnv",
    "WATCH_SILENCE_SECONDS": "extraEnv",
    "POD_EGRESS": "podEgress",
    "FETCH_EGRESS": "fetchEgress",
    "LEADER_ELECTION": "leaderElection.enabled",
    "LEASE_NAME": "fullnameOverride",
    "LEASE_SECONDS": "leaderElection.leaseSeconds",
    "KEY_SECRET": "fullnameOverride",
    "FORMER_KEY_SECRET": "fullnameOverride",
    "CALIBRATION_CONFIG_MAP": "calibration.nodeKinds",
    "NAMESPACE": "",
    "IDENTITY": "",
    "LOG_LEVEL": "logLevel",
    "LOG_FORMAT": "logFormat",
    "POD_SECURITY": "assignedUserIds, workerPods",
}
"""The chart's values that set a variable, by the variable's name without HETEROINFER_."""
_ENTRY: Final = re.compile(r"^ {8}(\w+): HETEROINFER_(\w+): (.+\n(?: {12}.+\n)*)", re.MULTILINE)
_EXPECTED: Final = re.compile(r" must be (.+) \(got ", re.DOTALL)

_HEAD = """# Environment of the operator
This page lists the environment variables of the operator. It is generated from the operator's settings:
`python -m tests.settings_page` writes it.

If you install the operator with the chart, set the value of the chart in the last column. The chart sets each
variable, except the two that you may set with `extraEnv`. If the value of a variable is not allowed, the
operator ends with [exit code 1](exit-codes.md#heteroinfer-operator) and names the variable. Outside of a pod,
the operator finds its cluster by `KUBECONFIG`.

| variable | meaning | allowed values | default | value of the chart |
|---|---|---|---|---|"""


def render_page() -> str:
    """Returns the page."""
    return "\n".join([_HEAD, *_rows()]) + "\n"


def _rows() -> Iterator[str]:
    """Yields a row for each setting. Raises if the class docstring lacks a setting."""
    defaults = {each.name: each.default for each in fields(InstallationSettings)}
    entries = _ENTRY.findall(InstallationSettings.__doc__ or "")
    for field, name, text in entries:
        chart = ", ".join(f"`{value}`" for value in CHART_VALUES[name].split(", ") if value)
        cells = (
            f"`HETEROINFER_{name}`",
            " ".join(text.split()).removesuffix(".").replace("|", "\\|"),
            _allowed(f"HETEROINFER_{name}"),
            _shown(defaults.pop(field)),
            chart or "set from the operator's pod",
        )
        yield f"| {' | '.join(cells)} |"
    if defaults:
        raise AssertionError(f"InstallationSettings: its docstring must describe {sorted(defaults)}")


def _allowed(variable: str) -> str:
    """Returns the values that the operator accepts, from its error about a value that no variable accepts."""
    try:
        InstallationSettings.from_env({variable: "! !"})
    except HeteroInferError as error:
        if expected := _EXPECTED.search(str(error)):
            return expected[1]
    return "any text"


def _shown(default: object) -> str:
    if default is MISSING or default in ("", ()):
        return "empty"
    if isinstance(default, bool):
        return f"`{str(default).lower()}`"
    return f"`{default:g}`" if isinstance(default, float) else f"`{default}`"


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
